"""Show one or more comparisons of training runs as one HTML page that needs nothing but a browser.

    python compare_training.py --reference-dir results/cpu-ddp --actual-dir results/ddp \\
        --world-size 64 --json results/compare-ddp.json
    python report_training.py results/compare-ddp.json --output results/report.html
    python report_training.py results/compare-*.json --output results/report.html

The page loads nothing and runs no script: mail it, attach it to an issue, print it. The same input
gives the same bytes. Its text and looks are in report_training.html, a Jinja2 template.

Exit status: 0 the page is written, whatever the verdicts; 2 it is not, and one line says why.
matplotlib and Jinja2 come with `pip install -r requirements-report.txt`.
"""

import json
import sys
from pathlib import Path

from training_common import InputError, make_parser, write_then_rename
from training_records import SCHEMA, ranges
from training_summary import describe_growth

try:
    import jinja2
    import matplotlib

    from training_figures import allowed_eps, draw_losses, draw_path, draw_scores, number
except ImportError as error:  # --help works without them
    MISSING = error.name
else:
    MISSING = None

TEMPLATE = Path(__file__).with_suffix(".html")
LABELS = {
    "oracle": "the float64 oracle",
    "cpu": "a run on a CPU",
    "neuron": "a run on Neuron",
    "cuda": "a run on CUDA",
    "stand-in": "a run on the tests' stand-in for Neuron, computed on a CPU",
}
JOB = ("model", "dp_degree", "tp_degree", "seed", "global_batch_size", "learning_rate", "optimizer")


# ---------------------------------------------------------------- reading comparisons


def load_comparison(path: Path) -> dict:
    """Return what compare_training.py --json wrote. Raises InputError if the file holds anything else."""
    fix = f"expected {SCHEMA}, as compare_training.py --json writes it; compare the runs again"
    try:
        comparison = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {fix}") from None
    except ValueError:
        raise InputError(f"{path} is empty, cut off or no JSON; {fix}") from None
    schema = comparison.get("schema") if isinstance(comparison, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{path} is of another schema, {schema!r}; {fix}")
    return comparison


# ---------------------------------------------------------------- words


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_recorded(comparison: dict) -> bool:
    """Say whether the runs were recorded by record_training.py, which knows no mode or seed of a job."""
    return "command" in comparison["actual"]["metadata"]


def title(comparison: dict) -> str:
    """Return what a comparison is called: its mode, or the command that was recorded."""
    metadata = comparison["actual"]["metadata"]
    return setting(metadata["command"]) if is_recorded(comparison) else metadata["mode"]


def setting(value: object) -> str:
    """Return what a recording says of its run, as the page shows it; a command without its folder."""
    if isinstance(value, list):
        return " ".join([Path(value[0]).name, *map(str, value[1:])])
    return "none" if value is None else str(value)


def has_losses(comparison: dict) -> bool:
    """Say whether there are losses to draw. A recording has none of a script whose loss was not seen."""
    losses = comparison["losses"]
    if not is_recorded(comparison):
        return bool(losses)
    return any(value is not None for loss in losses for key, value in loss.items() if key != "step")


def describe_recording(run: dict) -> str:
    """Return in words how a recorded run was made."""
    metadata = run["metadata"]
    backend = f" with {metadata['backend']}" if metadata["backend"] else ""
    ranks = plural(metadata["world_size"], "rank")
    return f"{setting(metadata['command'])}, {ranks}{backend}, torch {metadata['torch_version']}"


def worst_error(comparison: dict) -> str:
    """Return the largest error of a comparison, in eps."""
    errors = [kind["eps"] for kind in comparison["kinds"]]
    if not errors:
        return "no reference"
    return number(None if None in errors else max(errors))


def describe_outcome(comparison: dict) -> str:
    """Return in words what the verdict rests on."""
    ranks, steps = plural(comparison["world_size"], "rank"), plural(comparison["steps"], "step")
    if comparison["verdict"] != "PASS":
        text = f"{plural(comparison['findings'], 'finding')} in {steps} of {ranks}."
        failed = comparison["failed_ranks"]
        text += f" Failed: {plural(len(failed), 'rank')}: {ranges(failed)}." if failed else ""
        first_step = comparison["first"]["step"]
        return " ".join(filter(None, (text, describe_growth(comparison["largest_errors"], first_step))))
    if comparison["reference"] is None:
        return f"Every invariant holds on {ranks} in {steps}. There was no reference to compare with."
    text = f"The run agrees with its reference on {ranks} in {steps}."
    return " ".join(filter(None, (text, describe_growth(comparison["largest_errors"]))))


def describe_devices(comparison: dict) -> str:
    """Return in words what was checked against what, so that a CPU run passes for no more than it is."""
    label = comparison["actual"]["label"]
    names = LABELS
    if is_recorded(comparison):  # of any device that torch has
        labels = [comparison[run]["label"] for run in ("actual", "reference") if comparison[run]]
        names = {name: f"a run on {name}" for name in labels} | LABELS
    text = f"Checked: {names[label]}."
    if comparison["reference"]:
        text += f" Reference: {names[comparison['reference']['label']]}."
    return text if label in ("neuron", "cuda") else f"{text} No accelerator was checked."


def describe_tolerance_of_recordings(tolerance: dict) -> str:
    """Return in words what a comparison of recordings allows."""
    return (
        f"Allowed: norm of a tensor's error at most {number(allowed_eps(tolerance))} eps, as sketches "
        "estimate it, and on top what RECORDING.md describes."
    )


def describe_tolerance(tolerance: dict) -> str:
    """Return in words what a tolerance allows."""
    rtol, atol, norm_eps = (tolerance[key] for key in ("rtol", "atol", "norm_eps"))
    relative = f"{number(tolerance['element_eps'])} eps" if rtol is None else number(rtol)
    absolute = "rtol x the largest magnitude in the tensor" if atol is None else number(atol)
    if norm_eps is None and rtol is None and atol is None:
        norm_eps = tolerance["default_norm_eps"]  # with --rtol or --atol only elements are judged
    whole = "not judged" if norm_eps is None else f"at most {number(norm_eps)} eps"
    return f"Allowed: rtol {relative}, atol {absolute}; norm of a tensor's error: {whole}."


def count_verdicts(comparisons: list[dict]) -> str:
    """Return "8 comparisons: 7 PASS, 1 FAIL"."""
    passed = sum(comparison["verdict"] == "PASS" for comparison in comparisons)
    return f"{plural(len(comparisons), 'comparison')}: {passed} PASS, {len(comparisons) - passed} FAIL"


# ---------------------------------------------------------------- page


def make_page(comparisons: list[dict]) -> str:
    """Return the page. Raises jinja2.UndefinedError, LookupError and the like where something is missing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The template calls these by name.
    descriptions = (describe_outcome, describe_devices, describe_tolerance, describe_recording)
    descriptions += (describe_tolerance_of_recordings,)
    for words in (number, plural, ranges, worst_error, title, is_recorded, *descriptions):
        environment.filters[words.__name__] = words
    shown = []
    # Text stays text, in the fonts of the page. The fixed salt gives the same ids every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": SCHEMA, "font.size": 10}):
        for index, comparison in enumerate(comparisons, start=1):
            figures = [draw_losses(comparison, f"c{index}")] if has_losses(comparison) else []
            figures += [draw_scores(comparison, f"c{index}")] if comparison["scores"] else []
            figures += [draw_path(comparison, f"c{index}")] if comparison.get("path") else []
            shown.append({"notes": [], **comparison, "figures": figures})
            if is_recorded(comparison):
                shown[-1]["differences"] = [
                    {"key": row["key"]} | {run: setting(row[run]) for run in ("reference", "actual")}
                    for row in comparison["differences"]
                ]
    template = environment.get_template(TEMPLATE.name)
    first_head = "run" if any(map(is_recorded, comparisons)) else "mode"
    return template.render(
        comparisons=shown, count=count_verdicts(comparisons), job=JOB, first_head=first_head
    )


def write_report(paths: list[Path], output: Path) -> str:
    """Write the page on some files of compare_training.py --json; return its title. Raises InputError."""
    if MISSING:
        raise InputError(f"{MISSING} is missing, the page needs it; pip install -r requirements-report.txt")
    if not TEMPLATE.exists():
        raise InputError(f"{TEMPLATE} is missing; copy it with {Path(__file__).name}")
    if output.resolve() in [path.resolve() for path in paths]:
        raise InputError(f"{output} is also an input and would be lost; give another --output")
    comparisons = [load_comparison(path) for path in paths]
    try:
        page = make_page(comparisons)
    except (jinja2.UndefinedError, AttributeError, LookupError, TypeError, ValueError) as error:
        which = f"one of {', '.join(map(str, paths))}" if len(paths) > 1 else paths[0]
        raise InputError(
            f"{which} is damaged: {type(error).__name__}: {error}; compare the runs again"
        ) from None
    try:
        with write_then_rename(output) as temporary:
            temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(
            f"{output} cannot be written: {error.strerror}; give a file in an existing directory"
        ) from None
    return count_verdicts(comparisons)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "comparisons", nargs="+", type=Path, metavar="FILE.json", help="what compare_training.py --json wrote"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.html", help="the page; replaced if it exists"
    )
    options = parser.parse_args()
    try:
        title = write_report(options.comparisons, options.output)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output} written, {title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
