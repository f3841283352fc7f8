"""The summary of a comparison: what --json writes, and what is printed and shown on the page.

NUMERICS.md describes the fields by an annotated example.
"""

from datetime import UTC, datetime
from math import isfinite

from training_comparison import Outcome, ranks_of
from training_recorded_comparison import worst_element
from training_recorded_tolerance import Divergence
from training_records import KINDS, LAYOUT, SCHEMA, SHOWN, Run
from training_tolerance import ELEMENT_EPS, NORM_EPS, Result, Tolerance

Runs = dict[str, Run | None]  # "reference", "actual" and "oracle"
COMPUTED = ("outputs", "activations", "gradients")  # in a step, from its samples and parameters


def summarize(outcome: Outcome, runs: Runs, tolerance: Tolerance, cause: str | None) -> dict:
    """Return everything that --json writes and the report shows; NUMERICS.md describes the fields."""
    actual = runs["actual"]
    return {
        "schema": SCHEMA,
        "verdict": "FAIL" if outcome.findings else "PASS",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": actual.world_size,
        "steps": actual.metadata["steps"],
        "reference": describe_run(runs["reference"]),
        "actual": describe_run(actual),
        "oracle": describe_run(runs["oracle"]),
        "differences": differences(runs["reference"], actual),
        "tolerance": {**tolerance._asdict(), "element_eps": ELEMENT_EPS, "default_norm_eps": NORM_EPS},
        "losses": [{"step": step, **losses} for step, losses in enumerate(outcome.losses, start=1)],
        "kinds": errors_by_kind(outcome),
        "tensors": errors_by_tensor(outcome),
        "scores": outcome.comparison.scores if outcome.comparison else [],
        "largest_errors": largest_errors(outcome),
        "invariants": invariant_counts(outcome),
        "findings": len(outcome.findings),
        "failed_ranks": sorted({finding.rank for finding in outcome.findings}),
        "first": first_finding(outcome),
        "cause": cause,
        "oracle_errors": oracle_errors(outcome),
        "notes": outcome.comparison.notes if outcome.comparison else [],
        **of_recordings(outcome, runs),
    }


def of_recordings(outcome: Outcome, runs: Runs) -> dict:
    """Return what is known of recordings alone: the error on the way through the model, an element."""
    if not isinstance(outcome.comparison, Divergence):
        return {}
    first = outcome.findings[0] if outcome.findings else None
    of_reference = first is not None and first.check == "reference"
    element = worst_element(first, runs["reference"], runs["actual"]) if of_reference else None
    return {"path": outcome.comparison.path, "worst_element": element}


def describe_run(run: Run | None) -> dict | None:
    """Return a run's label, directory and metadata."""
    return run and {"label": run.label, "directory": str(run.directory), "metadata": run.metadata}


def differences(reference: Run | None, actual: Run) -> list[dict]:
    """Return what differs between the metadata of two runs of the same job."""
    if not reference:
        return []
    keys = [key for key in dict.fromkeys((*LAYOUT, *SHOWN, "command")) if key in actual.metadata]
    rows = [
        {"key": key, "reference": reference.metadata[key], "actual": actual.metadata[key]} for key in keys
    ]
    return [row for row in rows if row["reference"] != row["actual"]]


def figures(results: list[Result]) -> dict:
    """Return the numbers of a table's row."""
    return {
        "compared": len(results),
        "mismatched": sum(not result.passed for result in results),
        "negligible": sum(result.passed and bool(result.message) for result in results),
        "eps": max(result.eps for result in results),
        "score": max(result.score for result in results),
        "needed_rtol": max(result.needed_rtol for result in results),
        "needed_norm_eps": max(result.needed_norm_eps for result in results),
    }


def errors_by_kind(outcome: Outcome) -> list[dict]:
    """Return the errors of each kind of tensor, in causal order."""
    if not outcome.comparison:
        return []
    by_kind = outcome.comparison.by_kind()
    return [{"kind": kind, **figures(results)} for kind, results in by_kind.items() if results]


def errors_by_tensor(outcome: Outcome) -> list[dict]:
    """Return the errors of each tensor, and the rank and step of its worst."""
    rows = []
    for (kind, name), results in outcome.comparison.results.items() if outcome.comparison else ():
        rank, step, _ = max(results, key=lambda item: (item[2].score, -item[0], -item[1]))
        row = {"kind": kind, "name": name, **figures([result for _, _, result in results])}
        rows.append({**row, "worst_rank": rank, "worst_step": step})
    return rows


def largest_errors(outcome: Outcome) -> list[dict]:
    """Return for each step from 1 on the largest error of what it computes, and in which tensor it is.

    Parameters do not count: they hold the errors of all steps before.
    """
    largest: dict[int, dict] = {}
    for (kind, name), results in outcome.comparison.results.items() if outcome.comparison else ():
        for _, step, result in results if kind in COMPUTED else ():
            if step not in largest or result.eps > largest[step]["eps"]:
                largest[step] = {"step": step, "eps": result.eps, "kind": kind, "name": name}
    return [largest[step] for step in sorted(largest)]


def describe_growth(errors: list[dict], before: int | None = None) -> str | None:
    """Return in words how errors grow over the steps, None if there are not two steps with an error.

    errors: largest_errors of a summary. before: only the steps before this one, which is the first to fail.
    """
    errors = [error for error in errors if before is None or error["step"] < before]
    if before is not None:
        known = [error["eps"] for error in errors if error["eps"] is not None]
        return f"Largest error before step {before}: {max(known):.3g} eps." if known else None
    if len(errors) < 2 or not all(error["eps"] and isfinite(error["eps"]) for error in errors):
        return None
    first, last = errors[0], errors[-1]
    rate = (last["eps"] / first["eps"]) ** (1 / (last["step"] - first["step"]))
    grows = f"grows {rate:.2g} times a step" if rate > 1 else "does not grow"
    return (
        f"Largest error: {first['eps']:.3g} eps in step {first['step']}, {last['eps']:.3g} eps in step "
        f"{last['step']} ({last['kind']} {last['name']}); it {grows}."
    )


def invariant_counts(outcome: Outcome) -> list[dict]:
    """Return for each run and invariant how often it was checked and how often it failed."""
    return [
        {
            "run": check.run,
            "name": name,
            "text": text,
            "checked": check.checked[name],
            "failed": check.failed(name),
        }
        for check in outcome.checks
        for name, text in check.texts.items()
    ]


def first_finding(outcome: Outcome) -> dict | None:
    """Return the first finding in causal order, with all ranks that show it."""
    if not outcome.findings:
        return None
    first = outcome.findings[0]
    return {**first._asdict(), "ranks": ranks_of(first, outcome.findings)}


def oracle_errors(outcome: Outcome) -> list[dict] | None:
    """Return by kind the errors of reference and actual run against the oracle, and their ratio."""
    if not outcome.against_oracle:
        return None
    reference, actual = (comparison.by_kind() for comparison in outcome.against_oracle)
    rows = []
    for kind in KINDS:
        if not reference[kind]:
            continue
        errors = [max(result.eps for result in results) for results in (reference[kind], actual[kind])]
        ratio = errors[1] / errors[0] if errors[0] else None
        rows.append({"kind": kind, "reference_eps": errors[0], "actual_eps": errors[1], "ratio": ratio})
    return rows


def plain(value: object) -> object:
    """Return a value as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
