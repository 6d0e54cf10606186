#!/usr/bin/env python3
"""Plots open-loop runs over the offered rate.

    plot_load.py OUT.png NAME=RUN.json,RUN.json,... [NAME=RUN.json,...]

Each RUN.json is the output of `sparsegdn bench --rate R --json`; the runs of one NAME are one line.
Above: percentiles of the time to the first frame, all prompts, from the planned arrival (p50 solid,
p90 dashed, p99 dotted) on a logarithmic axis, with the objective where the runs name one. Below:
tokens/s offered (grey), completed (dashed), and of prompts within the objective (solid). Needs
matplotlib.
"""

import argparse
import json
import pathlib
import sys

STYLES = {"p50": "-", "p90": "--", "p99": ":"}


def read_series(text: str) -> tuple[str, list[dict]]:
    """(name, reports by rising offered rate) of one NAME=FILE,FILE argument."""
    name, equals, files = text.partition("=")
    if not equals or not name or not files:
        raise ValueError(f"{text!r}: wanted NAME=RUN.json,...")
    reports = []
    for file in files.split(","):
        report = json.loads(pathlib.Path(file).read_text())
        if report.get("loop") != "open":
            raise ValueError(f"{file}: not an open-loop report of sparsegdn bench")
        reports.append(report)
    return name, sorted(reports, key=lambda r: r["offered_rate"])


def draw(series: list[tuple[str, list[dict]]], out: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, (latency, tokens) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True)
    for index, (name, reports) in enumerate(series):
        color = f"C{index}"
        for key, style in STYLES.items():
            points = [(r["offered_rate"], r["all"]["first_frame_seconds"][key]) for r in reports
                      if r["all"]["first_frame_seconds"]]
            latency.plot(*zip(*points) if points else ([], []), style, color=color, marker="o",
                         markersize=3)
        rates = [r["offered_rate"] for r in reports]
        for field, style, shade in (("offered", "-", "0.7"), ("completed", "--", color),
                                    ("goodput", "-", color)):
            tokens.plot(rates, [r[f"{field}_tokens_per_second"] for r in reports], style,
                        color=shade, marker="o", markersize=3)
    objectives = {r["objective_seconds"] for _, reports in series for r in reports}
    for objective in objectives - {None}:
        latency.axhline(objective, color="0.5", linewidth=0.8)
        latency.annotate(f"objective {objective:g} s", (0.01, objective), color="0.4", fontsize=8,
                         xycoords=("axes fraction", "data"), va="bottom")
    names = [Line2D([], [], color=f"C{i}", label=name) for i, (name, _) in enumerate(series)]
    latency.legend(handles=names + [Line2D([], [], color="k", linestyle=s, label=k)
                                    for k, s in STYLES.items()])
    tokens.legend(handles=names + [Line2D([], [], color="0.7", label="offered"),
                                   Line2D([], [], color="k", linestyle="--", label="completed"),
                                   Line2D([], [], color="k", label="goodput")])
    latency.set(yscale="log", ylabel="time to first frame (s)")
    tokens.set(ylabel="tokens/s", xlabel="offered rate (prompts/s)", ylim=(0, None))
    for axes in (latency, tokens):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("series", nargs="+", metavar="NAME=RUN.json,...")
    parsed = parser.parse_args()
    try:
        series = [read_series(text) for text in parsed.series]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(series, parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
