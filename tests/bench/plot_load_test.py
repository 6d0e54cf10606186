"""plot_load.py on made-up runs: sorted by rate, figures that a run lacks left out, each panel drawn
from its own figures where matplotlib is there, wrong input refused in a line."""

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
            "all": {"first_frame_seconds": times if rate < 30 else None,
                    "queue_seconds": dict(times, p50=0) if rate < 30 else None},
            "server": {"batch_fill": 0.02 * rate, "wasted_share": 0.001 * rate}
            if rate != 20 else None,
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

    def test_runs_without_a_figure_are_left_out(self) -> None:
        reports = [run_of(rate) for rate in (10, 20, 30)]
        for path, want in ((("goodput_tokens_per_second",), ([10, 20, 30], [2000, 4000, 6000])),
                           (("all", "queue_seconds", "p90"), ([10, 20], [1, 2])),
                           (("server", "batch_fill"), ([10, 30], [0.2, 0.6]))):
            with self.subTest(path):
                self.assertEqual(plot_load.points(reports, *path), want)

    def test_wrong_input_is_refused_in_a_line(self) -> None:
        self.files[0].write_text('{"loop": "closed"}')
        for series in ("no files", "one=", f"one={self.files[0]}", "one=/nowhere/at/all"):
            with self.subTest(series):
                code, errors = self.main(series)
                self.assertEqual(code, 2)
                self.assertEqual(errors.count("\n"), 1, errors)
        self.assertFalse((self.folder / "out.png").exists())

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
    def test_each_panel_has_its_figures(self) -> None:
        figure = plot_load.draw([("one", [run_of(rate) for rate in (10, 20, 30)])])
        lines = {axes.get_ylabel(): [tuple(map(list, line.get_data())) for line in axes.lines]
                 for axes in figure.axes if axes.lines}
        rates = [10, 20]
        seconds = (rates, [1.0, 2.0])
        self.assertEqual(lines["queue wait (s)"],
                         [(rates, [plot_load.LEAST_SECONDS] * 2), seconds, seconds])
        self.assertEqual(lines["time to first frame (s)"][:3], [seconds] * 3)
        self.assertEqual(lines["batch fill"], [([10, 30], [0.2, 0.6])])
        self.assertEqual(lines["wasted of computed tokens"], [([10, 30], [0.01, 0.03])])
        self.assertEqual([values for _, values in lines["tokens/s"]],
                         [[per * rate for rate in (10, 20, 30)] for per in (256, 250, 200)])

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
    def test_runs_without_metrics_say_so(self) -> None:
        figure = plot_load.draw([("one", [run_of(20)])])
        for axes in figure.axes:
            if axes.get_ylabel() in ("batch fill", "wasted of computed tokens"):
                self.assertEqual([text.get_text() for text in axes.texts],
                                 ["no run with --metrics"])

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
    def test_a_plot_is_written(self) -> None:
        self.assertEqual(self.main("one=" + ",".join(map(str, self.files)))[0], 0)
        self.assertEqual((self.folder / "out.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")


if __name__ == "__main__":
    unittest.main()
