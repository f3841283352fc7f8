"""Two recordings, step by step: where the one first leaves the other, as far as sketches tell.

In a step the order is causal: the samples, activations in the order of execution, the loss, gradients from
the last layer to the first, parameters, buffers. training_recorded_tolerance.py has the criterion.
"""

from math import inf, isfinite

import torch

from training_common import InputError
from training_comparison import Outcome, in_causal_order
from training_recorded_checks import check_recording
from training_recorded_runs import (
    CONVENTIONS,
    KNOWN,
    Recording,
    choose_conventions,
    loss_bound,
    losses_of,
    other_setting,
    put_together,
    rates_of,
    shown,
    unit_of,
)
from training_recorded_samples import (
    UPDATED,
    activations_of,
    add_activations,
    compare_samples,
    judge_activations,
    matched_keys,
    rerouted,
    rows_of_modules,
    say_skipped,
    whole_modules,
)
from training_recorded_tolerance import (
    CAUSAL_ORDER,
    Divergence,
    Drift,
    adaptive_allowance,
    distance,
    floor_of,
    judge,
    judge_whole,
    scale_of_rounding,
)
from training_records import LOSS, Finding, Key
from training_tolerance import LINEAR, NORM_EPS, Result, Tolerance, bound_of, largest_step, mismatch

# Share of the rows that rounding may send to other experts. In bfloat16 one of 32 was seen, under Adam.
REROUTED = 0.05


def compare_recordings(reference: Recording | None, actual: Recording, tolerance: Tolerance) -> Outcome:
    """Compare two recordings, or check one by itself. Raises InputError if they are not of the same job."""
    if reference is None:
        check = check_recording("actual", actual, unit_of(actual, actual))
        losses = [{"actual": losses_of(actual, step, CONVENTIONS[0])} for step in range(1, actual.steps + 1)]
        return Outcome(None, [check], [], losses, in_causal_order(check.findings, {}))
    check_same_model(reference, actual)
    norm_eps, unit = tolerance.norm_eps, unit_of(reference, actual)
    found, drift, losses = Divergence(actual.world_size, actual.steps), Drift(), []
    checks = [check_recording("actual", actual, unit), check_recording("reference", reference, unit)]
    kinds = rows_of_modules(reference, actual)
    compare_start(reference, actual, found)
    conventions = choose_conventions(reference, actual)
    say_conventions(conventions, found)
    for step in range(1, actual.steps + 1):
        *keys, eps = matched_keys(reference, actual, step)
        if step == 1:  # does each rank have the samples that it has in the other run?
            same_layout = reference.replicas == actual.replicas and keys[0] == keys[1]
        compare_samples(step, *keys, eps, (reference, actual), found)
        activations = activations_of(reference, step, keys[0]), activations_of(actual, step, keys[1])
        activations = activations[0], whole_modules(reference, actual, step, activations[1])
        results = judge_activations(step, *activations, kinds, same_layout, drift, unit, norm_eps, found)
        may_reroute = step > 1 and not found.findings  # by what earlier steps are allowed to differ
        if may_reroute and rounding_rerouted(reference, actual, step, kinds, results, found):
            for later in range(step + 1, actual.steps + 1):
                *keys, eps = matched_keys(reference, actual, later)
                compare_samples(later, *keys, eps, (reference, actual), found)
            break
        before = len(found.findings)
        losses.append(compare_losses(step, reference, actual, conventions, unit, norm_eps, found))
        compare_gradients(step, reference, actual, unit, norm_eps, drift, found)
        add_activations(step, results, len(found.findings) == before, found)
        compare_parameters(step, reference, actual, unit, norm_eps, drift, found)
        compare_buffers(step, reference, actual, same_layout, unit, norm_eps, drift, found)
    for step in range(len(losses) + 1, actual.steps + 1):
        one, other = (losses_of(run, step, CONVENTIONS[0]) for run in (reference, actual))
        losses.append({"reference": one, "actual": other})
    say_skipped(found)
    if drift.explained and not found.findings:
        optimizer = next(iter(drift.explained.values()))
        names = ", ".join(drift.explained)
        found.note(f"{optimizer} turns gradients that are zero but for rounding into full steps: {names}")
    findings = found.findings + [finding for check in checks for finding in check.findings]
    keys = sorted(found.results, key=lambda key: CAUSAL_ORDER.index(key[0]))  # each kind as it came
    order = {key: place for place, key in enumerate(keys)}
    return Outcome(found, checks, [], losses, in_causal_order(findings, order), order)


def rounding_rerouted(
    reference: Recording,
    actual: Recording,
    step: int,
    kinds: dict[tuple[int, str], str],
    results: list[tuple[Key, tuple[int, ...], Result]],
    found: Divergence,
) -> bool:
    """Say whether from here on samples alone can be compared, since rounding sent rows to other experts.

    So it is if a few rows went elsewhere and every activation before agrees. results: of the activations
    of this step, in the order of execution; those before are kept.
    """
    modules, share = rerouted(reference, actual, step, kinds)
    executed = [entry["name"] for entry in actual.of_step(step)[0]["activations"]]
    if not 0 < share <= REROUTED or not set(modules) & set(executed):
        return False
    first = min(executed.index(name) for name in modules if name in executed)
    before = [result for result in results if result[0][1] in executed[:first]]
    if not all(result.passed for _, _, result in before):
        return False
    add_activations(step, before, False, found)
    found.note(
        f"step {step}: {share:.1%} of the rows went to other experts than in the reference, first "
        f"{executed[first]}; everything before agrees, so rounding decided. From there on only samples are "
        "compared"
    )
    return True


def compare_start(reference: Recording, actual: Recording, found: Divergence) -> None:
    """Compare parameters and buffers before training; the tolerance of a copy, 16 eps of their type."""
    buffers = (run.tensors(1, "buffers_before") for run in (actual, reference))
    for name, (ours, theirs) in (("buffers", buffers), ("parameters", (actual.start, reference.start))):
        for tensor in [tensor for tensor in theirs if tensor in ours]:
            expected = theirs[tensor][0]
            for whole in ours[tensor]:
                found.add(0, (name, tensor), whole.ranks, judge_whole(whole, expected, 0.0))
    tied = reference.metadata["tied"], actual.metadata["tied"]
    ranks = tuple(range(actual.world_size))
    for name in {**tied[0], **tied[1]}:
        one, other = (set(names.get(name, ())) for names in tied)
        if one != other:
            run, others = ("reference", "actual") if one - other else ("actual", "reference")
            message = (
                f": the same tensor as {', '.join(sorted(one ^ other))} in the {run} run, not in the {others}"
            )
            found.add(0, ("parameters", name), ranks, mismatch(message))


def compare_losses(
    step: int,
    reference: Recording,
    actual: Recording,
    conventions: tuple,
    unit: float,
    norm_eps: float | None,
    found: Divergence,
) -> dict:
    """Compare the loss of a step; return both."""
    one, other = losses_of(reference, step, conventions[0]), losses_of(actual, step, conventions[1])
    ranks = tuple(range(actual.world_size))
    if one is not None and other is not None:
        if isfinite(one) and isfinite(other):
            eps = max(unit, 2.0**-23)
            result = judge(abs(other - one), abs(one), eps, 0.0, loss_bound(unit, norm_eps) / eps)
            if not result.passed:
                result = result._replace(message=f": reference {one:.9g}, actual {other:.9g}{result.message}")
        else:
            result = mismatch(f": reference {one:.9g}, actual {other:.9g}: not finite")
        found.add(step, LOSS, ranks, result)
    return {"reference": one, "actual": other}


def say_conventions(conventions: tuple, found: Divergence) -> None:
    """Note how losses are put together, where it is not the mean over everything."""
    for run, (microbatches, ranks) in zip(("reference", "actual"), conventions, strict=True):
        if (microbatches, ranks) != CONVENTIONS[0]:
            over = "divided by their number twice" if ranks == "share" else ranks
            found.note(
                f"losses of the {run} run: {microbatches} over the microbatches, {over} over the replicas"
            )


def compare_gradients(
    step: int,
    reference: Recording,
    actual: Recording,
    unit: float,
    norm_eps: float | None,
    drift: Drift,
    found: Divergence,
) -> None:
    """Compare gradients as backward completed them. Those that are zero but for rounding pass."""
    ours, theirs = actual.tensors(step, "gradients"), reference.tensors(step, "gradients")
    floor = floor_of(theirs, unit)
    everyone = tuple(range(actual.world_size))
    ready = (name for run in (reference, actual) for name in run.of_step(step)[0]["ready"])
    for name in dict.fromkeys((*ready, *reversed(list({**theirs, **ours})))):
        if name not in ours and name not in theirs:
            continue
        key = ("gradients", name)
        if name not in ours or name not in theirs:
            run = "actual" if name not in ours else "reference"
            found.add(step, key, everyone, mismatch(f": there is none in the {run} run"))
            continue
        expected = theirs[name][0]
        for whole in ours[name]:
            if max(whole.largest, expected.largest) <= floor and not whole.not_finite:
                text = "zero but for rounding in both runs, not compared"
                found.add(step, key, whole.ranks, Result(True, message=text))
            else:
                norm = expected.norm
                bound = bound_of(unit, len(expected.shape), norm_eps)
                more = drift.of_all(norm, unit) + bound * unit * (scale_of_rounding(name, theirs) - norm)
                result = judge_whole(whole, expected, unit, more, norm_eps)
                types = [run.metadata["reduced_in"].get(name) for run in (reference, actual)]
                if result.passed and None not in types and types[0] != types[1]:
                    result = mismatch(f": reduced in {types[1]}, the reference's in {types[0]}")
                found.add(step, key, whole.ranks, result)


def compare_parameters(
    step: int,
    reference: Recording,
    actual: Recording,
    unit: float,
    norm_eps: float | None,
    drift: Drift,
    found: Divergence,
) -> None:
    """Compare parameters after a step, and keep for the next one by how much they differ."""
    ours, theirs = actual.tensors(step, "parameters"), reference.tensors(step, "parameters")
    start, gradients = reference.start, reference.tensors(step, "gradients")
    settings = rates_of(reference.of_step(step)[:1])
    by_rank = settings_by_rank(actual, step)
    floor = floor_of(gradients, unit)
    for name in theirs:
        expected = theirs[name][0]
        moved = distance(expected, start[name][0])
        optimizer, group = settings.get(name, ("", {}))
        if name in gradients and optimizer not in LINEAR:
            gradient = gradients[name][0]
            (drift.silent.add if gradient.largest <= floor else drift.silent.discard)(name)
            scale = scale_of_rounding(name, gradients)
            rate = group.get("lr", 0.0) * largest_step(optimizer, group.get("alpha", 0.99))
            drift.allowed[name] += adaptive_allowance(gradient, rate, unit, floor, scale)
        bound = bound_of(unit, len(expected.shape), None)
        more = bound * unit * moved + drift.allowed[name]
        differences = []
        for whole in ours.get(name, []):
            eps = torch.finfo(whole.dtype).eps
            result = judge_whole(whole, expected, eps, more, norm_eps)
            found.add(step, ("parameters", name), whole.ranks, result)
            for rank in whole.ranks if result.passed and name in settings else ():
                if setting := other_setting(settings[name], by_rank[rank].get(name, settings[name]), KNOWN):
                    word, one, other = setting
                    text = f": its {word} is {shown(other)}, the reference's {shown(one)}"
                    found.add(step, ("parameters", name), (rank,), mismatch(text))
            differences.append(distance(whole, expected))
            explained = (NORM_EPS if norm_eps is None else norm_eps) * eps * expected.norm
            explained += bound * unit * moved
            if result.passed and drift.allowed[name] and differences[-1] > explained:
                drift.explained[name] = optimizer
        drift.measured[name] = (max(differences, default=0.0), expected.norm, len(expected.shape))


def settings_by_rank(recording: Recording, step: int) -> list[dict[str, tuple[str, dict]]]:
    """Return rates_of for each rank; one object for ranks that have the same."""
    records = recording.of_step(step)
    first = rates_of(records[:1])
    return [
        first if record["optimizers"] == records[0]["optimizers"] else rates_of([record])
        for record in records
    ]


def compare_buffers(
    step: int,
    reference: Recording,
    actual: Recording,
    same_layout: bool,
    unit: float,
    norm_eps: float | None,
    drift: Drift,
    found: Divergence,
) -> None:
    """Compare the buffers that both runs have. Those of a batch norm are of a rank's own samples."""
    ours, theirs = actual.tensors(step, "buffers"), reference.tensors(step, "buffers")
    before = reference.tensors(step, "buffers_before")
    for name in [name for name in theirs if name in ours]:
        for whole in ours[name]:
            of_rank = [copy for copy in theirs[name] if copy.ranks == whole.ranks] if same_layout else []
            expected = (of_rank or theirs[name])[0]
            changes = name in before and distance(expected, before[name][0]) > 0
            more = drift.of_buffer(expected.norm, unit) if changes else 0.0
            result = judge_whole(whole, expected, unit, more, norm_eps)
            if result.passed or same_layout or not changes or not isfinite(result.eps):
                found.add(step, ("buffers", name), whole.ranks, result)
            else:
                found.skipped[UPDATED][name].add(step)


def worst_element(first: Finding, reference: Recording, actual: Recording) -> dict | None:
    """Return where a parameter or gradient differs most, None if it was recorded without --full."""
    kind, step = ("before", 1) if first.step == 0 else (first.kind, first.step)
    if first.kind not in ("gradients", "parameters") or first.name not in actual.tensors(step, kind):
        return None
    pair = []
    for run in (reference, actual):
        copies = run.tensors(step, kind).get(first.name, [])
        ranks = next((copy.ranks for copy in copies if run is reference or first.rank in copy.ranks), ())
        pair.append(put_together(run.entries(step, kind).get(first.name, {}), ranks))
    if any(tensor is None for tensor in pair):
        return None
    expected, got = pair
    place = int((got - expected).abs().nan_to_num(nan=inf).argmax())
    index = [int(number) for number in torch.unravel_index(torch.tensor(place), expected.shape)]
    return {
        "index": index,
        "reference": expected.flatten()[place].item(),
        "actual": got.flatten()[place].item(),
    }


def check_same_model(reference: Recording, actual: Recording) -> None:
    """Raise InputError unless both have the same steps and parameters of the same names and shapes."""
    if reference.steps != actual.steps:
        raise InputError(
            f"the runs differ in steps: reference {reference.steps}, actual {actual.steps}; record as many"
        )
    if reference.metadata["saved_at"] == actual.metadata["saved_at"]:
        raise InputError("the two directories hold the same run, one is a copy; give two runs")
    theirs, ours = reference.start, actual.start
    other_names = {
        name for run in (reference, actual) for names in run.metadata["tied"].values() for name in names
    }
    different = sorted((theirs.keys() ^ ours.keys()) - other_names)
    if different:
        run = "actual" if different[0] in ours else "reference"
        raise InputError(
            f"parameter {different[0]} is in the {run} run only ({len(different)} such): another model, or "
            "an optimizer that holds other tensors"
        )
    for name in theirs.keys() & ours.keys():
        shapes = [run[name][0].shape for run in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"parameter {name} is {shapes[0]} in the reference, {shapes[1]} in the actual run: a plain "
                "tensor that was sharded by hand cannot be put together; make it a DTensor"
            )
