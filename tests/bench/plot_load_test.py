"""plot_load.py on two made-up runs: sorted by rate, drawn where matplotlib is there, wrong input
refused in a line."""

import contextlib
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
import unittest

import plot_load


def run_of(rate: float) -> dict:
    times = {key: 0.1 * rate for key in ("p50", "p90", "p99", "max")}
    return {"loop": "open", "offered_rate": rate, "objective_seconds": 0.5,
            "all": {"first_frame_seconds": times if rate < 30 else None},
            "offered_tokens_per_second": 256 * rate, "completed_tokens_per_second": 250 * rate,
            "goodput_tokens_per_second": 200 * rate}


class PlotLoad(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.files = []
        for rate in (20, 10, 30):
            self.files.append(self.folder / f"{rate}.json")
            self.files[-1].write_text(json.dumps(run_of(rate)))

    def main(self, *arguments: str) -> tuple[int, str]:
        errors = io.StringIO()
        old, sys.argv = sys.argv, ["plot_load.py", str(self.folder / "out.png"), *arguments]
        try:
            with contextlib.redirect_stderr(errors):
                return plot_load.main(), errors.getvalue()
        finally:
            sys.argv = old

    def test_runs_are_sorted_by_rate(self) -> None:
        name, reports = plot_load.read_series("one=" + ",".join(map(str, self.files)))
        self.assertEqual(name, "one")
        self.assertEqual([r["offered_rate"] for r in reports], [10, 20, 30])

    def test_wrong_input_is_refused_in_a_line(self) -> None:
        self.files[0].write_text('{"loop": "closed"}')
        for series in ("no files", "one=", f"one={self.files[0]}", "one=/nowhere/at/all"):
            with self.subTest(series):
                code, errors = self.main(series)
                self.assertEqual(code, 2)
                self.assertEqual(errors.count("\n"), 1, errors)
        self.assertFalse((self.folder / "out.png").exists())

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
    def test_a_plot_is_written(self) -> None:
        self.assertEqual(self.main("one=" + ",".join(map(str, self.files)))[0], 0)
        self.assertEqual((self.folder / "out.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")


if __name__ == "__main__":
    unittest.main()
