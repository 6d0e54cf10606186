#!/usr/bin/env python3
"""check_tree.py must find each kind of fault in a tree that has it, and nothing in one that has not."""

import pathlib
import tempfile
import unittest

import check_tree


class CheckTree(unittest.TestCase):
    def findings(self, files, ratchet=None):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return check_tree.check(root, ratchet or {})

    def test_clean(self):
        self.assertEqual(self.findings({"kernels/a.cc": "int F() {\n  return 1;\n}\n",
                                        "kernels/CMakeLists.txt": "a.cc"}), [])

    def test_arrows(self):
        for rel, include in [("kernels/a.cc", "server/model/x.h"), ("kernels/a.cc", "grpcpp/grpcpp.h"),
                             ("server/model/a.cc", "server/engine/engine.h"),
                             ("server/engine/a.cc", "server/service/log.h"),
                             ("server/engine/a.cc", "sparsegdn/v1/prefill.pb.h"),
                             ("client/cpp/a.cc", "server/engine/types.h"),
                             ("client/cpp/a.cc", "sparsegdn/gdn.h")]:
            found = self.findings({rel: f'#include "{include}"\n', "CMakeLists.txt": "a.cc"})
            self.assertTrue(any("must not include" in f for f in found), (rel, include, found))

    def test_sizes(self):
        body = "int F(int a,\n      int b) {\n" + "  a++;\n" * 61 + "}\n"
        files = {"kernels/a.cc": body, "CMakeLists.txt": "a.cc"}
        self.assertTrue(any("function 0: 62 lines" in f for f in self.findings(files)))
        self.assertEqual(self.findings(files, {"kernels/a.cc:function 0": 62}), [])
        self.assertTrue(self.findings(files, {"kernels/a.cc:function 0": 61}))
        self.assertTrue(self.findings({"kernels/a.h": "int a;\n" * 201, "CMakeLists.txt": "a.h"}))

    def test_stale_ratchet(self):
        self.assertTrue(self.findings({}, {"kernels/gone.cc": 500}))

    def test_banned(self):
        for line in ["// FIX" + "ME later", "exit(1);", "std::exit(0);"]:
            files = {"kernels/a.cc": line + "\n", "CMakeLists.txt": "a.cc"}
            self.assertTrue(self.findings(files), line)
        self.assertEqual(self.findings({"kernels/a.cc": "_exit(0); x.on_exit(1);\n",
                                        "CMakeLists.txt": "a.cc"}), [])

    def test_documents(self):
        self.assertTrue(self.findings({"README.md": "[a](docs/none.md)\n"}))
        self.assertTrue(self.findings({"README.md": "@OUTPUT@\n"}))
        self.assertEqual(self.findings({"README.md": "[a](docs/a.md#x) [b](https://c.example)\n",
                                        "docs/a.md": "b\n"}), [])

    def test_dead_file(self):
        self.assertTrue(any("dead" in f for f in self.findings({"kernels/orphan.cc": "int a;\n"})))


if __name__ == "__main__":
    unittest.main()
