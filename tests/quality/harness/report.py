"""results.json, results.csv and plots of a run."""

import csv
import json
import os

import numpy as np

MIN_DENSE = 0.6  # a task counts where dense reaches this
_COLUMNS = ("task", "length", "budget", "retained", "score", "score_spread", "dense_score",
            "counts", "nll", "nll_delta", "nll_delta_spread", "kl", "top1", "seconds", "examples")


def _mean(values):
    values = [value for value in values if value is not None]
    return float(np.mean(values)) if values else None


def _spread(values):
    """Standard deviation over seeds; 0 for one seed."""
    values = [value for value in values if value is not None]
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def summarise(lines):
    """One row per (task, length, budget) from one line per example, in order of appearance."""
    keys = list(dict.fromkeys((line["task"], line["length"], line["budget"]) for line in lines))
    rows = []
    for task, length, budget in keys:
        def of(name, which):
            return [line[name] for line in lines
                    if (line["task"], line["length"], line["budget"]) == (task, length, which)]
        delta = [a - b for a, b in zip(of("nll", budget), of("nll", "dense"))]
        dense = _mean(of("score", "dense"))
        rows.append({
            "task": task, "length": length, "budget": budget,
            "retained": _mean(of("retained", budget)),
            "score": _mean(of("score", budget)), "score_spread": _spread(of("score", budget)),
            "dense_score": dense, "counts": dense >= MIN_DENSE, "nll": _mean(of("nll", budget)),
            "nll_delta": _mean(delta), "nll_delta_spread": _spread(delta),
            "kl": _mean(of("kl", budget)), "top1": _mean(of("top1", budget)),
            "seconds": _mean(of("seconds", budget)), "examples": len(of("score", budget))})
    return rows


def heat(lines, budget):
    """[layers, head pairs]: mean retained share under a budget, None without any."""
    found = [line["pairs"] for line in lines if line["budget"] == budget and line["pairs"]]
    if not found:
        return None, []
    layers = sorted(found[0], key=int)
    return np.mean([[line[layer] for layer in layers] for line in found], axis=0), layers


def _plots(lines, rows, folder):
    """Writes the PNGs; their names, empty without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = []
    series = sorted({(row["task"], row["length"]) for row in rows})
    for name, label in (("score", "score"), ("nll_delta", "NLL above dense, nats a token"),
                        ("kl", "KL from dense, nats a token")):
        figure, axis = pyplot.subplots(figsize=(8, 5))
        for key in series:
            points = sorted((row["retained"], row[name]) for row in rows
                            if (row["task"], row["length"]) == key and row[name] is not None
                            and row["budget"].split(" ")[0] not in ("random", "shuffled"))
            axis.plot(*zip(*points), marker="o", label=f"{key[0]} {key[1]}", linewidth=1)
        axis.set_xlabel("events kept")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if series:
            axis.legend(fontsize=7)
        figure.tight_layout()
        names.append(f"{name}.png")
        figure.savefig(os.path.join(folder, names[-1]), dpi=90)
        pyplot.close(figure)
    for i, budget in enumerate(dict.fromkeys(line["budget"] for line in lines)):
        grid, layers = heat(lines, budget)
        if grid is None or budget == "dense":
            continue
        figure, axis = pyplot.subplots(figsize=(1.5 + 0.5 * grid.shape[1], 1.5 + 0.4 * len(layers)))
        image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto")
        axis.set_yticks(range(len(layers)), layers)
        axis.set_xlabel("head pair")
        axis.set_ylabel("layer")
        axis.set_title(budget, fontsize=9)
        figure.colorbar(image, label="events kept")
        figure.tight_layout()
        names.append(f"retained_{i}.png")
        figure.savefig(os.path.join(folder, names[-1]), dpi=90)
        pyplot.close(figure)
    return names


def write(folder, about, lines):
    """Writes everything; returns (rows, names of the plots)."""
    os.makedirs(folder, exist_ok=True)
    rows = summarise(lines)
    with open(os.path.join(folder, "results.json"), "w", encoding="utf-8") as file:
        json.dump({**about, "rows": rows, "lines": lines}, file, indent=1)
    with open(os.path.join(folder, "results.csv"), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows, _plots(lines, rows, folder)


def table(rows):
    """Text lines of the rows."""
    yield (f"{'task':18s} {'length':>7s} {'budget':22s} {'kept':>6s} {'score':>13s} "
           f"{'NLL above dense':>16s} {'KL':>8s} {'top-1':>6s}")
    for row in rows:
        kl = "" if row["kl"] is None else f"{row['kl']:8.4f} {row['top1']:6.3f}"
        yield (f"{row['task']:18s} {row['length']:7d} {row['budget']:22s} {row['retained']:6.3f} "
               f"{row['score']:6.3f}+-{row['score_spread']:.3f} "
               f"{row['nll_delta']:8.4f}+-{row['nll_delta_spread']:.4f} {kl}"
               + ("" if row["counts"] else "  (dense below 60 %: does not count)"))
