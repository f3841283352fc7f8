"""Recordings in bfloat16, judged by a witness: the same script in float32, on one rank.

    python compare_training.py --reference-dir bf16-1 --actual-dir bf16-4 --witness float32-1

The reference and the run in question round the same computation to a few digits. Both are off from the
witness, by much the same errors: over seeds, models and plans the median ratio is 1.00. So a tensor passes
if its error against the witness is at most RATIO times the reference's own. That finds mistakes far below
the 1.6 % that the norm alone allows in bfloat16. RECORDING.md has the measurement.
"""

from collections import defaultdict
from math import isfinite, prod

from training_recorded_comparison import compare_recordings
from training_recorded_runs import Recording, unit_of
from training_recorded_tolerance import Divergence
from training_records import Finding, Key
from training_tolerance import DEFAULTS, NORM_EPS, bound_of

RATIO, RATIO_LATER = 1.5, 2.0  # in step 1; later steps start from parameters that differ
FEWEST = 64  # elements: the error of fewer numbers is too much of an accident
JUDGED = ("activations", "gradients", "parameters")


def judge_by_witness(
    found: Divergence, reference: Recording, actual: Recording, witness: Recording
) -> tuple[list[Finding], dict[tuple[Key, int], float]]:
    """Add what fails against the witness to what the comparison of the two runs has found.

    Returns the new findings, and for each tensor and step the reference's own error, a share of its norm.
    """
    theirs, ours = (errors_against(witness, run) for run in (reference, actual))
    elements = {name: prod(copies[0].shape) for name, copies in actual.start.items()}
    unit, ratios, added = unit_of(reference, actual), {}, []
    for (key, step), error in ours.items():
        small = key[0] != "activations" and elements.get(key[1], 0) < FEWEST
        if not step or small or (key, step) not in theirs:
            continue
        results = [result for _, one, result in found.results[key] if one == step]
        if not results or any(result.message for result in results):
            continue
        # What is allowed of Adam's steps, and of what follows from them, is so here, too.
        allowed = max(result.eps / result.score if result.score else 0.0 for result in results) * unit
        more = max(0.0, allowed - bound_of(unit, 2, None) * unit)
        own = max(theirs[key, step], NORM_EPS * 2**-23)
        limit = RATIO if step == 1 else RATIO_LATER
        ratios[key, step] = (error - more) / own
        if error > limit * own + more:
            message = f": its error against the witness is {error:.2g} of its norm, {error / own:.3g} times "
            message += f"the reference's own {own:.2g}; allowed {limit:g} times"
            added += fail(found, key, step, message)
    if ratios:
        (kind, name), step = worst = max(ratios, key=ratios.get)
        found.note(
            f"against the witness: errors are up to {ratios[worst]:.3g} times the reference's own ({kind} "
            f"{name}, step {step}); allowed {RATIO:g} times in step 1, {RATIO_LATER:g} later"
        )
    return added, theirs


def fail(found: Divergence, key: Key, step: int, message: str) -> list[Finding]:
    """Turn the results of a tensor in a step into failed ones; return the findings."""
    added = []
    for place, (rank, one, result) in enumerate(found.results[key]):
        if one == step:
            found.results[key][place] = rank, one, result._replace(passed=False, message=message)
            added.append(Finding(step, rank, *key, "reference", message))
    found.findings += added
    return added


def errors_against(witness: Recording, run: Recording) -> dict[tuple[Key, int], float]:
    """Return by tensor and step the norm of a run's error, a share of the tensor's; over all its ranks."""
    pair = [without_types(Recording(one.directory)) for one in (witness, run)]
    outcome, unit = compare_recordings(*pair, DEFAULTS), unit_of(*pair)
    squares: dict[tuple[Key, int], list[float]] = defaultdict(list)
    for key, results in outcome.comparison.results.items():
        for _, step, result in results if key[0] in JUDGED else ():
            if isfinite(result.eps) and not (result.passed and result.message):
                squares[key, step].append((result.eps * unit) ** 2)
    return {place: (sum(values) / len(values)) ** 0.5 for place, values in squares.items()}


def without_types(recording: Recording) -> Recording:
    """Return a recording whose tensors all claim to be float32: its types differ from the witness's."""
    for content in recording.contents:
        for step in content["steps"]:
            kinds = [step[kind].values() for kind in ("gradients", "before", "parameters")]
            for entry in [*step["activations"], *(entry for entries in kinds for entry in entries)]:
                entry["dtype"] = "float32" if "float" in entry["dtype"] else entry["dtype"]
    return recording
