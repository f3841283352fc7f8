"""The figures of a comparison's page: losses, ranks and steps, and the error through the model.

Takes what compare_training.py --json wrote, returns SVG that scales with the page. Needs matplotlib.
"""

import io
import re
from html import escape
from math import ceil, floor, isfinite, log10

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator

# The Okabe-Ito colours, told apart in every common form of colour blindness; line styles differ, too.
STYLES = {
    "reference": {"color": "#0072b2", "linewidth": 4.5, "alpha": 0.55},
    "actual": {"color": "#a83c00", "linestyle": "--", "marker": "o", "markersize": 4},
    "oracle": {"color": "black", "linestyle": ":", "marker": "x", "markersize": 6},
}
EQUAL, FAILED, NOT_FINITE = "white", "#e8743b", "#dddddd"
DASHES = ("-", "--", "-.", ":")  # of the steps in turn
WIDTH = 4.0  # inches of a figure: so narrow that its 10 pt text can be read on a phone
ROW = 0.13  # inches of a line of its smallest text
NAME = 28  # characters of a tensor's name beside an axis


def number(value: float | None) -> str:
    """Return a number as the page shows it; null stands for what is not finite."""
    return "not finite" if value is None else f"{value:.3g}"


def allowed_eps(tolerance: dict) -> float:
    """Return how many eps the norm of an error may have in a comparison of recordings."""
    given = tolerance["norm_eps"]
    return tolerance["default_norm_eps"] if given is None else given


def to_svg(figure, prefix: str, text: str) -> str:
    """Return a figure as an inline <svg> that scales with the page, its ids under a prefix."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', svg).group()
    body = svg[svg.index(">") + 1 :]
    # Every figure has a figure_1 and an axes_1; a page with two would have the same id twice.
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    return f'<svg {box} role="img" aria-label="{escape(text)}">{body}'


def as_float(value: float | None) -> float:
    """Return a number to draw: NaN for null and for what no axis could hold."""
    return float(value) if value is not None and abs(value) < 1e300 else float("nan")


def draw_losses(comparison: dict, prefix: str) -> tuple[str, str]:
    """Return the losses of all runs over the steps, above their differences, as SVG and its caption."""
    runs = [run for run in ("reference", "actual", "oracle") if comparison[run]]
    steps = [loss["step"] for loss in comparison["losses"]]
    values = {run: [as_float(loss[run]) for loss in comparison["losses"]] for run in runs}
    pairs = [("actual", "reference"), ("actual", "oracle"), ("reference", "oracle")]
    pairs = [pair for pair in pairs if set(pair) <= set(runs)]
    panels = 1 + bool(pairs)
    figure = Figure(figsize=(WIDTH, 2.6 * panels), layout="constrained")
    upper, *lower = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    every = max(1, len(steps) // 20)
    for run in runs:
        label = run if run == comparison[run]["label"] else f"{run} ({comparison[run]['label']})"
        upper.plot(steps, values[run], label=label, markevery=every, **STYLES[run])
    upper.set_ylabel("global loss")
    lost = [step for step, *row in zip(steps, *values.values(), strict=True) if not all(map(isfinite, row))]
    for index, step in enumerate(lost):
        span = {"facecolor": NOT_FINITE, "edgecolor": "gray", "hatch": "..", "linewidth": 0}
        upper.axvspan(step - 0.5, step + 0.5, label=None if index else "a loss not finite", **span)
    caption = "Global loss of every step."
    for axes in lower:
        positive = []
        for pair, style in zip(pairs, ("actual", "oracle", "reference"), strict=False):
            gaps = [abs(a - b) for a, b in zip(values[pair[0]], values[pair[1]], strict=True)]
            positive += [gap for gap in gaps if gap > 0]
            axes.plot(steps, gaps, label=f"|{pair[0]} - {pair[1]}|", markevery=every, **STYLES[style])
        axes.set_ylabel("difference")
        if positive:  # logarithmic down to the smallest difference; below it there is only 0
            axes.set_yscale("symlog", linthresh=10.0 ** max(floor(log10(min(positive))), -300))
            axes.set_ylim(0, 3 * max(positive))
            caption += " Below, how far they are apart, on a logarithmic scale that ends in 0."
        else:
            axes.set_yticks([0])
            caption += " Below, how far they are apart: 0 wherever both are finite."
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in figure.axes:  # above the panel, where it covers no line
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
        axes.legend(**place, ncols=2, fontsize=9, frameon=False, columnspacing=1, handletextpad=0.4)
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.axes[-1].set_xlabel("step")
    return to_svg(figure, f"{prefix}-losses", caption), caption


def draw_scores(comparison: dict, prefix: str) -> tuple[str, str]:
    """Return the heat map of ranks and steps as SVG and its caption."""
    scores = numpy.array([[as_float(score) for score in row] for row in comparison["scores"]])
    finite = numpy.isfinite(scores)
    failed, equal = finite & (scores > 1), scores == 0
    # One range for all comparisons: the same colour is the same error in each.
    mapped = ScalarMappable(LogNorm(1e-3, 1, clip=True), "viridis_r")
    pixels = mapped.to_rgba(numpy.where(finite & ~equal, scores, 1))
    for cells, color in ((equal, EQUAL), (failed, FAILED), (~finite, NOT_FINITE)):
        pixels[cells] = to_rgba(color)
    height = min(max(0.055 * len(scores), 0.5), 6)
    figure = Figure(figsize=(WIDTH, height + 1.9), layout="constrained")
    axes = figure.subplots()
    axes.imshow(pixels, aspect="auto", interpolation="none")
    if equal.all():
        axes.text(0.5, 0.5, "all bitwise equal", transform=axes.transAxes, ha="center", va="center")
    legend = [Patch(facecolor=EQUAL, edgecolor="gray", label="0: bitwise equal")] if equal.any() else []
    for cells, color, hatch, label in (
        (failed, FAILED, "xxxx", "above 1: failed"),
        (~finite, NOT_FINITE, "....", "not finite: failed"),
    ):
        if cells.any():  # a hatch over each run of neighbours in a row: colour alone would not do
            edges = numpy.diff(numpy.pad(cells, ((0, 0), (1, 1))).astype(int))
            starts, ends = numpy.argwhere(edges == 1), numpy.argwhere(edges == -1)
            boxes = [
                Outline([(a, row), (b, row), (b, row + 1), (a, row + 1), (a, row)], closed=True)
                for (row, a), (_, b) in zip(starts - 0.5, ends - 0.5, strict=True)
            ]
            style = {"facecolor": "none", "edgecolor": "black", "hatch": hatch, "linewidth": 0.4}
            axes.add_patch(PathPatch(Outline.make_compound_path(*boxes), **style))
            legend.append(Patch(**style | {"facecolor": color}, label=label))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 4, 8, 10]))
    axes.set(xlabel="step (0: before training)", ylabel="rank")
    bar = figure.colorbar(mapped, ax=axes, location="bottom", aspect=30, pad=0.15 / height, extend="min")
    bar.set_label("error as a share of what is allowed")
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if legend:
        figure.legend(handles=legend, loc="outside upper center", ncols=2, fontsize=9)
    caption = (
        "Worst error of each rank and step as a share of what is allowed. "
        f"Of {scores.size} cells: {equal.sum()} bitwise equal, {failed.sum()} above 1 (failed), "
        f"{(~finite).sum()} not finite."
    )
    return to_svg(figure, f"{prefix}-scores", caption), caption


def draw_path(comparison: dict, prefix: str) -> tuple[str, str]:
    """Return the error of each activation, then of each gradient, in the order of execution, as SVG."""
    path = comparison["path"]
    failed = numpy.array([place["failed"] for place in path])  # by place and step
    errors = numpy.array([[as_float(error) for error in place["eps"]] for place in path])
    count = len(path)
    usual = allowed_eps(comparison["tolerance"])
    positive = [*errors[errors > 0], usual or 1.0]
    least, most = floor(log10(min(positive))), ceil(log10(max(positive)))
    least = min(least, most - 1)
    gap = max(0.6, (most - least) / 8)  # decades from 0 to the least, and from the most to where "n/a" is
    beyond = 10.0 ** (most + gap)  # where what failed without a number is drawn
    lost = failed & numpy.isnan(errors)
    errors[lost] = beyond
    height = min(max(ROW * count, 1.5), 8)
    figure = Figure(figsize=(WIDTH, height + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("symlog", linthresh=10.0**least, linscale=gap)
    forward = sum(place["kind"] == "activations" for place in path)
    parts = [range(first, last) for first, last in ((0, forward), (forward, count)) if last > first]
    draw_steps(axes, errors, failed, parts)
    axes.axvline(usual, color="black", linewidth=0.8)
    axes.text(
        usual, 1, f"{number(usual)} eps", transform=axes.get_xaxis_transform(), ha="center", va="bottom"
    )
    stride = max(1, ceil((most - least) / 5))
    ticks = [0.0, *(10.0**power for power in range(least, most + 1, stride))]
    texts = [f"{tick:g}" for tick in ticks]
    if lost.any():
        ticks, texts = [*ticks, beyond], [*texts, "n/a"]
    axes.set_xticks(ticks, texts)
    axes.set_xticks([], minor=True)
    axes.set_xlim(0, beyond if lost.any() else 2 * 10.0**most)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_ylim(count - 0.5, -0.5)
    labelled = places_to_label(count, int(height / ROW), numpy.nonzero(failed.any(1))[0][:1].tolist())
    axes.set_yticks(labelled, [shorten(path[place]["name"]) for place in labelled], fontsize=7)
    for part in parts:
        kind = path[part[0]]["kind"]
        text = f"{kind}, {'forward' if kind == 'activations' else 'backward'}"
        beside = {"transform": axes.get_yaxis_transform(), "rotation": 270, "ha": "left", "va": "center"}
        axes.text(1.02, (part[0] + part[-1]) / 2, text, fontsize=9, **beside)
    if len(parts) > 1:
        axes.axhline(forward - 0.5, color="gray", linewidth=0.8)
    axes.set_xlabel("error in eps")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False, columnspacing=1)
    caption = (
        "Error of every activation and gradient, from top to bottom in the order of execution, on a "
        f"logarithmic scale that begins with 0. Of {count} tensors {failed.any(1).sum()} failed."
    )
    if lost.any():
        caption += " n/a: the error is no number, for instance of a value that is not finite or missing."
    if len(labelled) < count:
        caption += f" {len(labelled)} of the names are shown; the table has all."
    return to_svg(figure, f"{prefix}-path", caption), caption


def draw_steps(axes: Axes, errors: numpy.ndarray, failed: numpy.ndarray, parts: list[range]) -> None:
    """Draw a line for each step through each part of the places, and a cross where something failed.

    errors, failed: by place and step.
    """
    count, steps = errors.shape
    labelled = sorted({round(index * (steps - 1) / 5) for index in range(6)}) if steps > 6 else range(steps)
    colors = matplotlib.colormaps["viridis"](numpy.linspace(0, 0.75, steps))
    for step in range(steps):
        style = {"color": colors[step], "linestyle": DASHES[step % len(DASHES)], "linewidth": 1}
        style |= {"marker": "o", "markersize": 2.5} if count <= 80 else {}
        for part in parts:
            label = f"step {step + 1}" if step in labelled and part is parts[0] else None
            axes.plot(errors[part, step], part, label=label, clip_on=False, **style)
    if failed.any():
        rows, columns = numpy.nonzero(failed)
        style = {"marker": "x", "s": 28, "color": "#a00000", "linewidths": 1.3, "zorder": 4}
        axes.scatter(errors[rows, columns], rows, label="failed", clip_on=False, **style)


def places_to_label(count: int, most: int, wanted: list[int]) -> list[int]:
    """Return which of so many places get a label: those wanted, and at most so many others, evenly."""
    every = ceil(count / most)
    others = [place for place in range(0, count, every) if all(abs(place - one) >= every for one in wanted)]
    return sorted([*wanted, *others])


def shorten(name: str) -> str:
    """Return a long name from the number of its layer on, without its middle if need be."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdecimal()), 0)
    if len(name) > NAME and first:
        name = f"…{'.'.join(parts[first:])}"
    return name if len(name) <= NAME else f"{name[: NAME // 2 - 1]}…{name[-NAME // 2 :]}"
