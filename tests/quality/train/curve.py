"""The loss curve of a run as a PNG, from its log."""


def draw(lines, path, title):
    """Losses above, accuracy of answer tokens by family below; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True)
    steps = [line["step"] for line in lines]
    for name in ("prose", "answer"):
        top.plot(steps, [line[name] for line in lines], label=f"{name} tokens", linewidth=1)
    top.set_ylabel("cross entropy, nats a token")
    top.set_title(title)
    changes = [i for i in range(1, len(lines)) if lines[i]["length"] > max(
        line["length"] for line in lines[:i])]
    for i in changes:
        for axis in (top, bottom):
            axis.axvline(steps[i], color="0.8", linewidth=1)
        top.annotate(str(lines[i]["length"]), (steps[i], top.get_ylim()[1]), fontsize=8, va="top")
    for name in sorted({name for line in lines for name in line["accuracy"]}):
        rows = [line for line in lines if name in line["accuracy"]]
        bottom.plot([line["step"] for line in rows], [line["accuracy"][name] for line in rows],
                    label=name, linewidth=1)
    bottom.set_ylabel("answer tokens right, fresh examples")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return True
