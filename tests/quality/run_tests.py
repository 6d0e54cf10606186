#!/usr/bin/env python3
"""Runs unittest modules of this folder, or says which package they need and leaves with 77.

    run_tests.py [--need PACKAGE]... MODULE...

ctest takes 77 as "skipped" and tests/run.sh prints the names of skipped tests.
"""

import argparse
import importlib.util
import pathlib
import sys
import unittest

SKIPPED = 77


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--need", action="append", default=[])
    parser.add_argument("modules", nargs="+")
    arguments = parser.parse_args()
    missing = [name for name in arguments.need if not importlib.util.find_spec(name)]
    if missing:
        print(f"skipped: {', '.join(missing)} not importable by {sys.executable}")
        return SKIPPED
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    suite = unittest.defaultTestLoader.loadTestsFromNames(arguments.modules)
    result = unittest.TextTestRunner().run(suite)
    for _, reason in result.skipped:
        print(f"skipped: {reason}")
    return 0 if result.wasSuccessful() and result.testsRun else 1


if __name__ == "__main__":
    sys.exit(main())
