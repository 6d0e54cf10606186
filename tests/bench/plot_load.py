#!/usr/bin/env python3
"""Plots open-loop runs over the offered rate.

    plot_load.py OUT.png NAME=RUN.json,RUN.json,... [NAME=RUN.json,...]

Each RUN.json is the output of `sparsegdn bench --rate R --json`; the runs of one NAME are one line.
Left: percentiles over all completed prompts (p50 solid, p90 dashed, p99 dotted, logarithmic axes) of
the time to the first frame, from the planned arrival and with the objective where the runs name one,
and of the wait in the server's queue. Right: tokens/s offered (grey), completed (dashed) and of
prompts within the objective (solid); how full the server's steps were; the share of the computed
tokens that went to cancelled prompts. The last two need runs with --metrics. Needs matplotlib.
"""

import argparse
import json
import pathlib
import sys

STYLES = {"p50": "-", "p90": "--", "p99": ":"}
TOKENS = (("offered", "-"), ("completed", "--"), ("goodput", "-"))
LEAST_SECONDS = 1e-5  # a wait of nothing, on a logarithmic axis


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


def points(reports: list[dict], *path: str) -> tuple[list[float], list[float]]:
    """Offered rates and the figures at `path`, without the runs that have none."""
    rates, values = [], []
    for report in reports:
        value = report
        for key in path:
            value = value[key] if value is not None else None
        if value is not None:
            rates.append(report["offered_rate"])
            values.append(value)
    return rates, values


def draw_seconds(axes, series: list[tuple[str, list[dict]]], field: str) -> None:
    for index, (_, reports) in enumerate(series):
        for key, style in STYLES.items():
            rates, seconds = points(reports, "all", field, key)
            axes.plot(rates, [max(value, LEAST_SECONDS) for value in seconds], style,
                      color=f"C{index}", marker="o", markersize=3)
    axes.set(yscale="log")


def draw_objectives(axes, series: list[tuple[str, list[dict]]]) -> None:
    for objective in {r["objective_seconds"] for _, reports in series for r in reports} - {None}:
        axes.axhline(objective, color="0.5", linewidth=0.8)
        axes.annotate(f"objective {objective:g} s", (0.01, objective), color="0.4", fontsize=8,
                      xycoords=("axes fraction", "data"), va="bottom")


def draw_tokens(axes, series: list[tuple[str, list[dict]]]) -> None:
    for index, (_, reports) in enumerate(series):
        for field, style in TOKENS:
            axes.plot(*points(reports, f"{field}_tokens_per_second"), style, marker="o",
                      markersize=3, color="0.7" if field == "offered" else f"C{index}")
    axes.set(ylim=(0, None))


def draw_server(axes, series: list[tuple[str, list[dict]]], field: str) -> None:
    from matplotlib.ticker import PercentFormatter

    drawn = [points(reports, "server", field) for _, reports in series]
    for index, (rates, shares) in enumerate(drawn):
        axes.plot(rates, shares, color=f"C{index}", marker="o", markersize=3)
    if not any(rates for rates, _ in drawn):
        axes.annotate("no run with --metrics", (0.5, 0.5), xycoords="axes fraction", ha="center",
                      color="0.4")
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def legend_entries(series: list[tuple[str, list[dict]]]) -> list:
    from matplotlib.lines import Line2D

    names = [Line2D([], [], color=f"C{i}", label=name) for i, (name, _) in enumerate(series)]
    seconds = [Line2D([], [], color="k", linestyle=s, label=f"{k} of seconds")
               for k, s in STYLES.items()]
    tokens = [Line2D([], [], color="0.7" if field == "offered" else "k", linestyle=style,
                     label=f"{field} tokens/s") for field, style in TOKENS]
    return names + seconds + tokens


def draw(series: list[tuple[str, list[dict]]]):
    """The figure; its axes by what they show, in their labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(3, 2, figsize=(12, 10), sharex=True)
    (frame, tokens), (queue, fill), (legend, waste) = grid
    draw_seconds(frame, series, "first_frame_seconds")
    draw_objectives(frame, series)
    draw_seconds(queue, series, "queue_seconds")
    draw_tokens(tokens, series)
    draw_server(fill, series, "batch_fill")
    fill.set(ylim=(0, 1))
    draw_server(waste, series, "wasted_share")
    waste.set(ylim=(0, max(0.01, 1.05 * waste.get_ylim()[1])))
    for axes, label in ((frame, "time to first frame (s)"), (queue, "queue wait (s)"),
                        (tokens, "tokens/s"), (fill, "batch fill"),
                        (waste, "wasted of computed tokens")):
        axes.set(ylabel=label)
        axes.grid(alpha=0.3)
    for axes in (queue, waste):
        axes.set(xlabel="offered rate (prompts/s)")
    queue.tick_params(labelbottom=True)
    legend.axis("off")
    legend.legend(handles=legend_entries(series), loc="center", ncols=2, frameon=False)
    figure.tight_layout()
    return figure


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
    draw(series).savefig(parsed.out, dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
