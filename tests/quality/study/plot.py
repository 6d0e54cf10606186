#!/usr/bin/env python3
"""Recall and NLL against retention for every selector of a study: plot.py STUDY.json LENGTH OUT.png

Needs matplotlib. Reads what run_study.py writes.
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw(report, length, path):
    rows = [row for row in report["rows"] if row["length"] == length]
    dense = next(row for row in rows if row["selector"] == "dense")
    names = list(dict.fromkeys(row["selector"] for row in rows if row is not dense))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    for i, name in enumerate(names):
        own = sorted((row for row in rows if row["selector"] == name),
                     key=lambda row: row["retention"])
        style = {"marker": "o", "markersize": 3, "linewidth": 1, "color": f"C{i % 10}",
                 "linestyle": "-" if i < 10 else "--", "label": name}
        shares = [row["retention"] for row in own]
        left.plot(shares, [row["recall"][0] for row in own], **style)
        right.plot(shares, [row["nll"][0] - dense["nll"][0] for row in own], **style)
    left.axhline(dense["recall"][0], color="0.6", linewidth=1)
    left.set_ylabel("recall of 24 needles (grey: dense)")
    right.set_ylabel("NLL above dense, nats a token")
    right.set_yscale("log")
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    for axis in (left, right):
        axis.set_xlabel("retention")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{report['model']}, {length} tokens, {report['examples']} examples")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as source:
        draw(json.load(source), int(sys.argv[2]), sys.argv[3])
