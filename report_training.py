"""Show one or more comparisons of training runs as one HTML page that needs nothing but a browser.

    python compare_training.py --reference-dir results/cpu-ddp --actual-dir results/ddp \\
        --world-size 64 --json results/compare-ddp.json
    python report_training.py results/compare-ddp.json --output results/report.html
    python report_training.py results/compare-*.json --output results/report.html

The page loads nothing and runs no script: mail it, attach it to an issue, print it. The same input
gives the same bytes. compare_training.py --report calls write_report directly.

Exit status: 0 the page is written, whatever the verdicts; 2 it is not, and one line says why. This
file works alone; matplotlib and Jinja2 come with `pip install -r requirements-report.txt`.
"""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from html import escape
from math import floor, isfinite, log10
from pathlib import Path

try:
    import jinja2
    import matplotlib
    import numpy
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path as Outline
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:  # whoever asks for a page hears of it
    MISSING = error.name
else:
    MISSING = None

SCHEMA = "parity-comparison-1"
LABELS = {
    "oracle": "the float64 oracle",
    "cpu": "a run on a CPU",
    "neuron": "a run on Neuron",
    "cuda": "a run on CUDA",
    "stand-in": "a run on the tests' stand-in for Neuron, computed on a CPU",
}
JOB = ("model", "dp_degree", "tp_degree", "seed", "global_batch_size", "learning_rate", "optimizer")

# What the page relies on: a type, {key: shape}, [shape of each item], or (shape,) where null is allowed.
NUMBER, MAYBE = int | float, int | float | None
ERRORS = {"compared": int, "mismatched": int, "eps": MAYBE, "score": MAYBE}
ERRORS |= {"needed_rtol": MAYBE, "needed_norm_eps": MAYBE}
RUN = {"label": str, "directory": str, "metadata": {"mode": str}}
SHAPE = {
    **{"schema": str, "verdict": str, "created": str, "world_size": int, "steps": int, "findings": int},
    **{"reference": (RUN,), "actual": RUN, "oracle": (RUN,), "cause": str | None, "failed_ranks": [int]},
    "differences": [{"key": str, "reference": object, "actual": object}],
    "tolerance": {"rtol": MAYBE, "atol": MAYBE, "norm_eps": MAYBE, "element_eps": NUMBER},
    "losses": [{"step": int}],  # and one for each run that there is
    "kinds": [{"kind": str, **ERRORS}],
    "tensors": [{"kind": str, "name": str, **ERRORS, "worst_rank": int | None, "worst_step": int | None}],
    "scores": [[MAYBE]],
    "invariants": [{"run": str, "name": str, "text": str, "checked": int, "failed": int}],
    "first": ({"step": int, "ranks": [int], "kind": str, "name": str, "check": str, "message": str},),
    "oracle_errors": ([{"kind": str, "reference_eps": MAYBE, "actual_eps": MAYBE, "ratio": MAYBE}],),
}

# The Okabe-Ito colours, told apart in every common form of colour blindness; line styles differ, too.
STYLES = {
    "reference": {"color": "#0072b2", "linewidth": 4.5, "alpha": 0.55},
    "actual": {"color": "#a83c00", "linestyle": "--", "marker": "o", "markersize": 4},
    "oracle": {"color": "black", "linestyle": ":", "marker": "x", "markersize": 6},
}
EQUAL, FAILED, NOT_FINITE = "white", "#e8743b", "#dddddd"
WIDTH = 4.0  # inches of a figure: so narrow that its 10 pt text can be read on a phone


class InputError(Exception):
    """A page that cannot be made: reported in one line, exit status 2."""


# ---------------------------------------------------------------- reading comparisons


def find_problem(value: object, shape: object, where: str) -> str | None:
    """Return where a value is not of a shape (see SHAPE), None if it is."""
    parts: Iterable[tuple[object, object, str]] = ()
    if isinstance(shape, tuple):
        return None if value is None else find_problem(value, shape[0], where)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        missing = [key for key in shape if key not in value]
        if missing:
            return f"{where} lacks {', '.join(missing[:3])}"
        parts = ((value[key], shape[key], f"{where}.{key}") for key in shape)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        parts = ((item, shape[0], f"{where}[{index}]") for index, item in enumerate(value))
    elif not isinstance(value, shape):
        return f"{where} is {json.dumps(value)[:40]}"
    return next(filter(None, (find_problem(*part) for part in parts)), None)


def load_comparison(path: Path) -> dict:
    """Return what compare_training.py --json wrote; raise InputError if the file holds anything else."""
    fix = f"expected {SCHEMA}, as compare_training.py --json writes it; compare the runs again"
    try:
        # Strict JSON has no NaN or Infinity. Null is what stands for them here.
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {fix}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is empty, cut off or no JSON; {fix}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is of another schema, {found!r}; {fix}")
    problem = find_problem(content, SHAPE, "comparison")
    if not problem:
        rows, columns = content["world_size"], content["steps"] + 1
        runs = [run for run in ("reference", "actual", "oracle") if content[run]]
        if content["verdict"] not in ("PASS", "FAIL"):
            problem = f"comparison.verdict is {content['verdict']!r}"
        elif not all(content[run]["label"] in LABELS for run in runs):
            problem = f"a run's label is none of {', '.join(LABELS)}"
        elif content["scores"] and [len(row) for row in content["scores"]] != [columns] * rows:
            problem = f"comparison.scores is not {columns} numbers for each of {rows} ranks"
        else:
            problem = find_problem(content["losses"], [dict.fromkeys(runs, MAYBE)], "comparison.losses")
    if problem:
        raise InputError(f"{path} is damaged: {problem}; {fix}")
    return content


# ---------------------------------------------------------------- words


def number(value: float | None) -> str:
    """Return a number as the page shows it; null and infinity are both not finite."""
    return "not finite" if value is None or not isfinite(value) else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def compact(ranks: list[int]) -> str:
    """Return ranks as "0-3, 7"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def worst_eps(comparison: dict) -> str:
    """Return the largest error of a comparison, in eps."""
    errors = [kind["eps"] for kind in comparison["kinds"]]
    if not errors:
        return "no reference"
    return number(None if None in errors else max(errors))


def verdict(comparison: dict) -> str:
    """Return in words what the verdict rests on."""
    ranks, steps = plural(comparison["world_size"], "rank"), plural(comparison["steps"], "step")
    if comparison["verdict"] == "FAIL":
        text = f"{plural(comparison['findings'], 'finding')} in {steps} of {ranks}."
        failed = comparison["failed_ranks"]
        return f"{text} Failed: {plural(len(failed), 'rank')}: {compact(failed)}." if failed else text
    if comparison["reference"] is None:
        return f"Every invariant holds on {ranks} in {steps}. There was no reference to compare with."
    return f"The run agrees with its reference on {ranks} in {steps}."


def checked(comparison: dict) -> str:
    """Return in words what was checked against what, so that a CPU run passes for no more than it is."""
    label = comparison["actual"]["label"]
    text = f"Checked: {LABELS[label]}."
    if comparison["reference"]:
        text += f" Reference: {LABELS[comparison['reference']['label']]}."
    return text if label in ("neuron", "cuda") else f"{text} No accelerator was checked."


def allowed(tolerance: dict) -> str:
    """Return in words what a tolerance allows."""
    rtol, atol, norm_eps = (tolerance[key] for key in ("rtol", "atol", "norm_eps"))
    relative = f"{number(tolerance['element_eps'])} eps" if rtol is None else number(rtol)
    absolute = "rtol x the largest magnitude in the tensor" if atol is None else number(atol)
    if norm_eps is None and rtol is None and atol is None:
        norm_eps = tolerance.get("default_norm_eps")  # off where only elements are to be judged
    whole = "not judged" if norm_eps is None else f"at most {number(norm_eps)} eps"
    return f"Allowed: rtol {relative}, atol {absolute}; norm of a tensor's error: {whole}."


def count_verdicts(comparisons: list[dict]) -> str:
    """Return "8 comparisons: 7 PASS, 1 FAIL"."""
    failed = sum(comparison["verdict"] == "FAIL" for comparison in comparisons)
    return f"{plural(len(comparisons), 'comparison')}: {len(comparisons) - failed} PASS, {failed} FAIL"


# ---------------------------------------------------------------- figures


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


# ---------------------------------------------------------------- page

PAGE = """\
<!DOCTYPE html>
{% macro table(id, caption, heads) %}
<p class="caption" id="{{ id }}">{{ caption }}</p>
<div class="scroll" role="region" tabindex="0" aria-labelledby="{{ id }}">
<table aria-labelledby="{{ id }}"><thead><tr>
{% for head in heads %}
<th scope="col"{% if head[0] == "#" %} class="n"{% endif %}>{{ head.lstrip("#") }}</th>
{% endfor %}
</tr></thead>
{{ caller() }}</table></div>
{% endmacro %}
{% macro errors(row) %}
<td class="n">{{ row.mismatched }}</td><td class="n">{{ row.compared }}</td>
<td class="n">{{ row.eps | number }}</td><td class="n">{{ row.score | number }}</td>
<td class="n">{{ row.needed_rtol | number | replace("not finite", "none") }}</td>
<td class="n">{{ row.needed_norm_eps | number | replace("not finite", "none") }}</td>
{% endmacro %}
{% macro badge(verdict) %}<strong class="{{ verdict }}">{{ verdict }}</strong>{% endmacro %}
{% macro label(run) %}{{ run.label if run else "no reference" }}{% endmacro %}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="report_training.py">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training parity: {{ count }}</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: white; color: #1a1a1a;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; margin: 1.5em 0 .5em; break-after: avoid; }
h1 { margin-top: 0; }
section { border-top: 2px solid #1a1a1a; margin-top: 3rem; }
a { color: #0b4f8a; }
.PASS, .FAIL { border: 2px solid; border-radius: .25em; padding: 0 .4em; white-space: nowrap; }
.PASS { color: #0a5c2b; }
.FAIL { color: #a00000; border-style: double; border-width: 4px; }
.note { border-left: 4px solid #a00000; padding-left: .75em; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4; min-width: 50%; }
.caption { font-size: .875rem; font-weight: bold; margin: 1rem 0 .25rem; break-after: avoid; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid #c8c8c8; }
th, td { overflow-wrap: normal; }
td.w { min-width: min(13rem, 40vw); overflow-wrap: anywhere; }
th.n, td.n { text-align: right; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; border-bottom: 2px solid #1a1a1a; }
tbody tr.kind > * { font-weight: bold; border-top: 1px solid #1a1a1a; }
.figures { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; max-width: 30rem; break-inside: avoid; }
figcaption { font-size: .875rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
dt { font-weight: bold; }
dd { margin: 0 0 .4rem 1rem; }
@media (max-width: 30rem) { th, td { padding: .25rem .35rem; } }
@media print {
  @page { size: A4; margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 9pt; line-height: 1.35; }
  h1, h2, h3 { margin: 1em 0 .3em; }
  .scroll, p, ul { margin: .4em 0; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; width: 100%; }
  th, td { padding: .15rem .3rem; }
  td.w { min-width: 9em; }
  figcaption { font-size: 8pt; }
  main > section + section { break-before: page; border-top: 0; margin-top: 0; }
  tr, tbody, dl > div { break-inside: avoid; }
  thead, h3 + p { break-after: avoid; }
  .figures { grid-template-columns: 1fr 1fr; break-inside: avoid; }
}
</style>
</head>
<body>
<header>
<h1>Training parity</h1>
<p>{{ count }}.</p>
{% call table("all", "Comparisons",
  ["mode", "verdict", "reference → actual", "#worst error in eps", "#ranks", "#steps"]) %}
<tbody>
{% for c in comparisons %}
<tr><th scope="row"><a href="#c{{ loop.index }}">{{ c.actual.metadata.mode }}</a></th>
<td>{{ badge(c.verdict) }}</td><td>{{ label(c.reference) }} → {{ label(c.actual) }}</td>
<td class="n">{{ c | worst_eps }}</td>
<td class="n">{{ c.world_size }}</td><td class="n">{{ c.steps }}</td></tr>
{% endfor %}
</tbody>
{% endcall %}
</header>
<main>
{% for c in comparisons %}
{% set id = "c%s" % loop.index %}
<section id="{{ id }}" aria-labelledby="{{ id }}-title">
<h2 id="{{ id }}-title">{{ badge(c.verdict) }} {{ c.actual.metadata.mode }}:
{{ label(c.reference) }} → {{ label(c.actual) }}, {{ c.world_size | plural("rank") }}</h2>
{% if c.verdict == "FAIL" %}
<p class="note"><strong>Likely cause:</strong>
{{ c.cause or "none of the known ones fits; start from the first divergence." }}</p>
{% endif %}
<p>{{ c | verdict }} {{ c | checked }}</p>
{% if c.first %}
<h3>First divergence</h3>
<dl>
<div><dt>Where</dt><dd>{{ "step %s" % c.first.step if c.first.step else "before training" }},
{{ c.first.kind }} <code>{{ c.first.name }}</code></dd></div>
<div><dt>Ranks</dt><dd>{{ c.first.ranks | compact }}</dd></div>
<div><dt>Check</dt>
<dd>{{ "reference" if c.first.check == "reference" else "invariant: " ~ c.first.check }}</dd></div>
<div><dt>Message</dt><dd>{{ c.first.message }}</dd></div>
</dl>
{% endif %}
<div class="figures">
{% for svg, text in c.figures %}
<figure>{{ svg | safe }}<figcaption>{{ text }}</figcaption></figure>
{% endfor %}
</div>
{% if c.tensors %}
<h3>Tensors</h3>
<p>{{ c.tolerance | allowed }}</p>
{% call table(id ~ "-tensors", "Errors by kind and tensor, each the worst of all ranks and steps",
  ["tensor", "#mismatched", "#compared", "#error in eps", "#share of allowed", "#passes at rtol",
   "#passes at norm eps", "#worst rank", "#worst step"]) %}
{% for kind in c.kinds %}
<tbody>
<tr class="kind"><th scope="rowgroup">{{ kind.kind }}</th>
{{ errors(kind) }}<td></td><td></td></tr>
{% for tensor in c.tensors if tensor.kind == kind.kind %}
<tr><td class="w"><code>{{ tensor.name }}</code></td>{{ errors(tensor) }}
<td class="n">{{ tensor.worst_rank }}</td><td class="n">{{ tensor.worst_step }}</td></tr>
{% endfor %}
</tbody>
{% endfor %}
{% endcall %}
{% endif %}
{% if c.oracle_errors %}
<h3>Distance from the float64 oracle</h3>
{% call table(id ~ "-oracle", "Error of both runs against the oracle",
  ["kind", "#reference, eps", "#actual, eps", "#actual / reference"]) %}
<tbody>
{% for row in c.oracle_errors %}
<tr><th scope="row">{{ row.kind }}</th><td class="n">{{ row.reference_eps | number }}</td>
<td class="n">{{ row.actual_eps | number }}</td><td class="n">{{ row.ratio | number }}</td></tr>
{% endfor %}
</tbody>
{% endcall %}
{% endif %}
{% if c.invariants %}
<h3>Invariants</h3>
{% call table(id ~ "-invariants", "What must hold in any run, with or without a reference",
  ["invariant", "run", "#failed", "#checked", "what must hold"]) %}
<tbody>
{% for row in c.invariants %}
<tr><th scope="row">{{ row.name }}</th><td>{{ row.run }}</td><td class="n">{{ row.failed }}</td>
<td class="n">{{ row.checked }}</td><td class="w">{{ row.text }}</td></tr>
{% endfor %}
</tbody>
{% endcall %}
{% endif %}
<h3>Runs</h3>
<ul>
{% for name in ("reference", "actual", "oracle") if c[name] %}
<li>{{ name }} ({{ label(c[name]) }}): <code>{{ c[name].directory }}</code></li>
{% endfor %}
<li>job: {% for key in job if key in c.actual.metadata %}
{{ key }} {{ c.actual.metadata[key] }}{{ ", " if not loop.last }}
{% endfor %}</li>
<li>compared: {{ c.created }}</li>
</ul>
{% if c.differences %}
{% call table(id ~ "-environment", "What differs in the environment",
  ["key", "reference", "actual"]) %}
<tbody>
{% for row in c.differences %}
<tr><th scope="row">{{ row.key }}</th>
<td class="w">{{ row.reference }}</td><td class="w">{{ row.actual }}</td></tr>
{% endfor %}
</tbody>
{% endcall %}
{% elif c.reference %}
<p>Nothing that was recorded of the environment differs.</p>
{% endif %}
</section>
{% endfor %}
</main>
<footer>
<section aria-labelledby="terms">
<h2 id="terms">Terms</h2>
<dl>
<div><dt>eps</dt><dd>The spacing of a dtype's numbers at 1: 2⁻²³ in float32. An error in eps is the norm of
the difference over the norm of the reference, in that unit.</dd></div>
<div><dt>share of allowed</dt><dd>The largest error over what the tolerance allows there. Above 1 it failed;
0 is bitwise equal.</dd></div>
<div><dt>passes at</dt><dd>The smallest tolerance under which all of it would have passed; none if no
tolerance would do.</dd></div>
<div><dt>not finite</dt><dd>NaN or infinite.</dd></div>
</dl>
</section>
</footer>
</body>
</html>
"""


def write_report(comparisons: list[dict], path: Path) -> None:
    """Write one page on all comparisons, whole or not at all. Raises InputError."""
    if MISSING:
        raise InputError(f"{MISSING} is missing, the page needs it; pip install -r requirements-report.txt")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for words in (number, plural, compact, worst_eps, verdict, checked, allowed):
        environment.filters[words.__name__] = words
    shown = []
    # Text stays text, in the fonts of the page. The fixed salt gives the same ids every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": SCHEMA, "font.size": 10}):
        for index, comparison in enumerate(comparisons, start=1):
            figures = [draw_losses(comparison, f"c{index}")] if comparison["losses"] else []
            figures += [draw_scores(comparison, f"c{index}")] if comparison["scores"] else []
            shown.append({**comparison, "figures": figures})
    count = count_verdicts(comparisons)
    page = environment.from_string(PAGE).render(comparisons=shown, count=count, job=JOB)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a reader never sees half a page
    try:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; give a file in an existing directory"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "comparisons", nargs="+", type=Path, metavar="FILE.json", help="what compare_training.py --json wrote"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.html", help="the page; replaced if it exists"
    )
    options = parser.parse_args()
    try:
        if options.output.resolve() in [path.resolve() for path in options.comparisons]:
            raise InputError(f"{options.output} is also an input and would be lost; give another --output")
        comparisons = [load_comparison(path) for path in options.comparisons]
        write_report(comparisons, options.output)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output} written, {count_verdicts(comparisons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
