"""Two recordings, step by step: where the one first leaves the other, as far as sketches tell.

In a step the order is causal: the samples, activations in the order of execution, the loss, gradients from
the last layer to the first, parameters, buffers. A tensor passes if

    norm(actual - reference) <= 16 eps * norm(reference) + what is allowed on top

Both norms are estimated from sketches. Allowed on top is, from the second step on, what follows from the
parameters' own differences, and for an optimizer such as Adam what it makes of gradients that are near
zero: see adaptive_allowance and allowed_of_parameters. RECORDING.md has the measurements behind them.
"""

from collections import Counter, defaultdict
from itertools import product
from math import inf, isfinite, prod
from typing import NamedTuple

import torch

from training_common import InputError
from training_recordings import Recording, Whole, shard_group, wholes
from training_comparison import Outcome, in_causal_order
from training_records import LOSS, Finding, Key, ranges
from training_sketches import fold
from training_tolerance import NEGLIGIBLE, NORM_EPS, Result, Tolerance, mismatch

SAMPLES = ("inputs", "samples")
KINDS = ("inputs", "activations", "losses", "gradients", "parameters", "buffers")
# Optimizers whose update is proportional to the gradient. Any other may turn a gradient that is zero but
# for rounding into a full step.
LINEAR = ("SGD", "ASGD")
CHECKS = {
    "finite": "no value is NaN or infinite",
    "ranks agree": "copies of gradients and parameters are the same on every rank that has one",
    "nonzero": "the gradients of a step are not all zero",
    "sgd": "an update of plain SGD is -learning rate x (gradient + weight decay x parameter)",
}
# How losses may be put together: over microbatches, then over replicas. "share": each rank scales its loss by
# the number of replicas, because gradients are averaged.
CONVENTIONS = tuple(product(("mean", "sum"), ("mean", "sum", "share")))
SAME_SAMPLE = 1e-2  # relative difference of the keys of one sample in two types


class Checks:
    """What must hold in one recording; counts and findings as training_invariants.py has them."""

    def __init__(self, run: str) -> None:
        self.run, self.texts = run, CHECKS
        self.checked = dict.fromkeys(CHECKS, 0)
        self.findings: list[Finding] = []

    def failed(self, check: str) -> int:
        """Return how often one was broken."""
        return sum(finding.check == f"{check} ({self.run} run)" for finding in self.findings)

    def fail(self, step: int, key: Key, ranks: tuple[int, ...], check: str, message: str) -> None:
        """Keep a finding for each of the ranks."""
        self.findings += [Finding(step, rank, *key, f"{check} ({self.run} run)", message) for rank in ranks]


class Divergence:
    """What comparing two recordings has found; with the fields that training_comparison.Comparison has."""

    def __init__(self, world_size: int, steps: int) -> None:
        self.results: dict[Key, list[tuple[int, int, Result]]] = defaultdict(list)  # (rank, step, result)
        self.findings: list[Finding] = []
        self.scores = [[0.0] * (steps + 1) for _ in range(world_size)]  # by rank and step
        self.notes: list[str] = []  # what is to be known, and no mistake
        self.order: list[Key] = []  # keys as they come in a step

    def add(self, step: int, key: Key, ranks: tuple[int, ...], result: Result) -> None:
        """Keep the result of a tensor that these ranks have."""
        if key not in self.results:
            self.order.append(key)
        for rank in ranks:
            self.results[key].append((rank, step, result))
            self.scores[rank][step] = max(self.scores[rank][step], result.score)
            if not result.passed:
                self.findings.append(Finding(step, rank, *key, "reference", result.message))

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def path(self) -> list[dict]:
        """The way through the model: of each activation and gradient, by step, the worst error in eps.

        Activations are in the order of execution, gradients from the last layer to the first.
        """
        found = []
        for kind in ("activations", "gradients"):
            for key in [key for key in self.order if key[0] == kind]:
                by_step = defaultdict(float)
                for _, step, result in self.results[key]:
                    by_step[step] = max(by_step[step], result.eps)
                errors = [by_step.get(step) for step in range(1, len(self.scores[0]))]
                found.append({"kind": kind, "name": key[1], "eps": errors})
        return found

    def by_kind(self) -> dict[str, list[Result]]:
        """Return the results of each kind of tensor."""
        kinds = {kind: [] for kind in KINDS}
        for (kind, _), results in self.results.items():
            kinds[kind] += [result for _, _, result in results]
        return kinds


# ---------------------------------------------------------------- one tensor against another


def distance(one: Whole, other: Whole) -> float:
    """Return the norm of the difference of two tensors, as their sketches estimate it."""
    return (one.sketch - other.sketch).norm().item()


def judge(
    difference: float, norm: float, eps: float, more: float = 0.0, norm_eps: float = NORM_EPS
) -> Result:
    """Judge a norm of a difference. eps: 0 for whole numbers, which must be equal; more: allowed on top."""
    allowed = norm_eps * eps * norm + more
    unit = eps or 1.0
    relative = difference / unit / (norm or 1.0)
    passed = difference <= allowed
    score = difference / allowed if allowed else (inf if difference else 0.0)
    needed = max(0.0, difference - more) / (unit * norm) if norm else (inf if difference else 0.0)
    if passed:
        return Result(True, score, relative, 0.0, needed)
    text = f": the norm differs by {relative:.3g} eps, allowed {allowed / unit / (norm or 1.0):.3g} eps"
    return Result(False, score, relative, 0.0, needed, text)


def judge_whole(
    actual: Whole | None, reference: Whole | None, unit: float, more: float = 0.0, norm_eps: float = NORM_EPS
) -> Result:
    """Judge a parameter, gradient or buffer; unit: the eps of the run, in which it is computed."""
    if actual is None or reference is None:
        return mismatch(f": there is none in the {'actual' if actual is None else 'reference'} run")
    if actual.dtype != reference.dtype:
        return mismatch(f": its type is {actual.dtype}, expected {reference.dtype}".replace("torch.", ""))
    for run, tensor in (("reference", reference), ("actual", actual)):
        if tensor.not_finite:
            return mismatch(f": {tensor.not_finite} values are not finite in the {run} run")
    eps = max(unit, torch.finfo(actual.dtype).eps) if actual.dtype.is_floating_point else 0.0
    return judge(distance(actual, reference), reference.norm, eps, more, norm_eps)


# ---------------------------------------------------------------- samples and activations


class Rows(NamedTuple):
    """The activation of one module in one call, as some ranks have it together."""

    ranks: tuple[int, ...]
    keys: list  # of each sample
    samples: torch.Tensor  # their sketches
    whole: torch.Tensor | None  # of all of them, where the first dimension is not the samples'
    shape: tuple[int, ...]
    dtype: str
    not_finite: int


def keys_of(recording: Recording, step: int) -> list[list[list]]:
    """Return by rank and call of the model the key of each sample. Calls without a tensor are numbered."""
    found = []
    for rank, record in enumerate(recording.of_step(step)):
        replica = recording.replicas[rank]
        found.append(
            [
                [tuple(key) for key in keys.tolist()] if keys is not None else [("call", replica, call)]
                for call, keys in enumerate(record["calls"])
            ]
        )
    return found


def activations_of(recording: Recording, step: int, keys: list[list[list]]) -> dict[Key, list[Rows]]:
    """Return the activations of a step by module, in the order of execution."""
    by_call: dict[Key, dict[int, dict[int, dict]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in enumerate(recording.of_step(step)):
        for entry in record["activations"]:
            more = f" call {entry['occurrence']}" if entry["occurrence"] > 1 else ""
            by_call["activations", entry["name"] + more][entry["call"]][rank] = entry
    found: dict[Key, list[Rows]] = {}
    for key, calls in by_call.items():
        found[key] = []
        for call, by_rank in calls.items():
            for group in dict.fromkeys(shard_group(rank, entry) for rank, entry in by_rank.items()):
                shards = [by_rank[rank] for rank in group if rank in by_rank]
                first = shards[0]
                names = keys[group[0]][call] if call < len(keys[group[0]]) else []
                samples = sum(shard["samples"] for shard in shards)
                if names and len(samples) != len(names) and len(samples) % len(names) == 0:
                    samples = samples.reshape(len(names), -1, samples.shape[1]).sum(1)
                whole = None if first["sketch"] is None else sum(shard["sketch"] for shard in shards)
                bad = sum(shard["not_finite"] for shard in shards)
                rows = Rows(group, names, samples, whole, tuple(first["shape"]), first["dtype"], bad)
                found[key].append(rows)
    return found


def compare_samples(
    step: int, reference: list[list[list]], actual: list[list[list]], recordings: tuple, found: Divergence
) -> bool:
    """Compare which samples the two runs had in a step; return whether they are the same."""
    lists = [
        [key for rank in recording.first_ranks for call in keys[rank] for key in call]
        for recording, keys in zip(recordings, (reference, actual), strict=True)
    ]
    counts = [Counter(keys) for keys in lists]
    if not all(counts):
        found.note("calls of the model were not seen in one of the runs: samples are not compared")
        return True
    if any(key[0] == "call" for key in (*counts[0], *counts[1])):
        found.note("the models are called without a tensor of samples: activations are compared call by call")
        return True
    missing, extra = counts[0] - counts[1], counts[1] - counts[0]
    total = sum(counts[0].values())
    ranks = tuple(range(recordings[1].world_size))
    if not missing and not extra:
        found.add(step, SAMPLES, ranks, Result(True))
        if lists[0] != lists[1]:
            found.note("the ranks got the reference's samples in another order, such as round robin")
        return True
    message = f": {sum(missing.values())} of the reference's {total} samples are missing, {sum(extra.values())} others"
    found.add(step, SAMPLES, ranks, mismatch(f"{message} are there"))
    return False


def compare_activations(
    step: int,
    reference: dict[Key, list[Rows]],
    actual: dict[Key, list[Rows]],
    same_layout: bool,
    drift: "Drift",
    unit: float,
    norm_eps: float,
    found: Divergence,
) -> None:
    """Compare the activations of modules that both runs have, sample by sample.

    same_layout: ranks have the same places in both runs.
    """
    for key, rows in actual.items():
        if key not in reference:
            continue
        by_group = defaultdict(list)
        for row in rows:
            by_group[row.ranks].append(row)
        for ranks, of_ranks in by_group.items():
            # A plain tensor may be a shard: with the same ranks in both runs, a rank's own is the one to match.
            own = [row for row in reference[key] if same_layout and row.ranks == ranks] or reference[key]
            result = judge_rows(of_ranks, own, key[1], drift, unit, norm_eps)
            if result is None:
                found.note(f"{key[1]}: its output has another shape in each run, not compared")
            else:
                found.add(step, key, ranks, result)
    if step == 1 and (only := reference.keys() ^ actual.keys()):
        where = "compiled or wrapped in the other"
        names = ", ".join(name for _, name in sorted(only)[:3])
        found.note(f"activations of {len(only)} modules are in one run only ({names}, ...): {where}")


def judge_rows(
    rows: list[Rows], references: list[Rows], name: str, drift: "Drift", unit: float, norm_eps: float
) -> Result | None:
    """Judge an activation of one rank, of all its calls; None if the shapes do not allow it."""
    first, other = rows[0], references[0]
    bad = {
        "reference": sum(row.not_finite for row in references),
        "actual": sum(row.not_finite for row in rows),
    }
    for run, count in bad.items():
        if count:
            return mismatch(f": {count} values are not finite in the {run} run")
    if first.dtype != other.dtype:
        return mismatch(f": its type is {first.dtype}, expected {other.dtype}")
    eps = max(unit, torch.finfo(getattr(torch, first.dtype)).eps)
    if first.shape == other.shape and first.whole is not None and other.whole is not None:
        if len(first.keys) != len(other.keys):  # it does not depend on the samples
            difference, norm = (first.whole - other.whole).norm().item(), other.whole.norm().item()
            return judge(difference, norm, eps, drift.of_activation(name, first.shape, norm), norm_eps)
    if first.shape[1:] != other.shape[1:] or len(first.samples) != len(first.keys):
        return None
    known: dict = {}
    for other in references:
        for place, key in enumerate(other.keys):
            known.setdefault(key, (other, place))
    square, norm_square, size = 0.0, 0.0, 0
    for row in rows:
        for i, key in enumerate(row.keys):
            if key in known:
                one, place = known[key]
                width = min(one.samples.shape[1], row.samples.shape[1])
                expected = fold(one.samples[place : place + 1], width)
                square += (fold(row.samples[i : i + 1], width) - expected).square().sum().item()
                norm_square += expected.square().sum().item()
                size += 1
    if not size:
        return None
    norm = norm_square**0.5
    shape = (size * first.shape[0] // max(1, len(first.keys)), *first.shape[1:])
    return judge(square**0.5, norm, eps, drift.of_activation(name, shape, norm), norm_eps)


# ---------------------------------------------------------------- what is allowed on top


class Drift:
    """By how much parameters differ at the start of a step, and may: later steps start from them."""

    def __init__(self) -> None:
        self.measured: dict[str, tuple[float, float, int]] = {}  # difference, norm, dimensions
        self.allowed: dict[str, float] = defaultdict(float)  # by adaptive_allowance, added up over the steps
        self.explained: dict[str, str] = {}  # parameters that pass by that alone, and their optimizer

    def of_activation(self, name: str, shape: tuple[int, ...], norm: float) -> float:
        """Return what a module's own parameters allow of its output; of a container, its parts'.

        A bias, or a norm's weight, that differs by d changes each row of the output by d. A matrix changes
        the output by about the share by which it differs itself. Twice that is allowed: d and the error of
        the output are both estimated, and the estimates are off by up to a third.
        """
        name = name.partition(" call ")[0]
        rows = prod(shape[:-1])
        by_module: dict[str, float] = defaultdict(float)
        for parameter, (difference, own_norm, dimensions) in self.measured.items():
            module = parameter.rpartition(".")[0]
            if name in (module, "(model)") or module.startswith(f"{name}."):
                share = difference / own_norm * norm if own_norm else 0.0
                by_module[module] += 2 * (rows**0.5 * difference if dimensions < 2 else share)
        return max(by_module.values(), default=0.0)


def adaptive_allowance(gradient: Whole, rate: float, eps: float, floor: float) -> float:
    """Return the norm by which one step of Adam, or its kin, may differ because of rounding.

    Its step is about rate * g / sqrt(mean of g squared), for each element by itself. Rounding of a gradient
    is of the size r = 16 eps * (root mean square of the gradient), whatever the element. So an element of size
    g may move by rate * min(2, r / g) more or less. A gradient that is zero is so in both runs. One that
    stays below the floor is nothing but rounding.
    """
    count = int(gradient.magnitudes.sum()) + gradient.zeros
    rounding = inf if gradient.largest <= floor else NORM_EPS * eps * gradient.norm / max(1, count) ** 0.5
    size = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)  # the least of each magnitude
    size[0] = 0.0
    share = (rounding / size).clamp(max=2.0).nan_to_num(nan=0.0, posinf=2.0)
    return rate * (gradient.magnitudes * share.square()).sum().item() ** 0.5


def rates_of(records: list[dict]) -> dict[str, tuple[str, dict]]:
    """Return for each parameter the class of its optimizer, and its group's settings."""
    return {
        name: (optimizer["class"], group)
        for record in records
        for optimizer in record["optimizers"]
        for group in optimizer["groups"]
        for name in group["names"]
    }


# ---------------------------------------------------------------- losses


def losses_of(recording: Recording, step: int, convention: tuple[str, str]) -> float | None:
    """Return the loss of a step: the mean or sum over microbatches, then over replicas; None without one."""
    records = recording.of_step(step)
    values = [records[rank]["losses"] for rank in recording.first_ranks]
    if not all(values):
        return None
    over = {
        "mean": lambda numbers: sum(numbers) / len(numbers),
        "sum": sum,
        "share": lambda numbers: sum(numbers) / len(numbers) ** 2,
    }
    return over[convention[1]]([over[convention[0]](of_rank) for of_rank in values])


def choose_conventions(reference: Recording, actual: Recording, allowed: float) -> tuple[tuple, tuple]:
    """Return how the losses of each run are put together, so that those of step 1 agree best.

    Scripts scale what they call backward on differently. The mean over everything comes first.
    """

    def error(pair: tuple) -> float:
        one, other = (
            losses_of(run, 1, convention) for run, convention in zip((reference, actual), pair, strict=True)
        )
        return abs(other - one) / abs(one) if one and other is not None and isfinite(one) else inf

    pairs = [(one, other) for one in CONVENTIONS for other in CONVENTIONS]
    best = min(pairs, key=lambda pair: max(error(pair), allowed))
    return best if error(best) <= allowed else pairs[0]


# ---------------------------------------------------------------- the comparison


def compare_recordings(reference: Recording | None, actual: Recording, tolerance: Tolerance) -> Outcome:
    """Compare two recordings, or check one by itself. Raises InputError if they are not of the same job."""
    if reference is None:
        check = check_recording("actual", actual, unit_of(actual, actual))
        losses = [{"actual": losses_of(actual, step, CONVENTIONS[0])} for step in range(1, actual.steps + 1)]
        return Outcome(None, [check], [], losses, in_causal_order(check.findings, {}))
    check_same_model(reference, actual)
    norm_eps = NORM_EPS if tolerance.norm_eps is None else tolerance.norm_eps
    unit = unit_of(reference, actual)
    found, drift, losses = Divergence(actual.world_size, actual.steps), Drift(), []
    checks = [check_recording("actual", actual, unit), check_recording("reference", reference, unit)]
    same_layout = reference.replicas == actual.replicas
    compare_start(reference, actual, found)
    conventions = choose_conventions(reference, actual, norm_eps * max(unit, 2.0**-23))
    say_conventions(conventions, found)
    for step in range(1, actual.steps + 1):
        keys = keys_of(reference, step), keys_of(actual, step)
        compare_samples(step, *keys, (reference, actual), found)
        activations = activations_of(reference, step, keys[0]), activations_of(actual, step, keys[1])
        compare_activations(step, *activations, same_layout, drift, unit, norm_eps, found)
        losses.append(compare_losses(step, reference, actual, conventions, unit, norm_eps, found))
        compare_gradients(step, reference, actual, unit, norm_eps, found)
        compare_parameters(step, reference, actual, unit, norm_eps, drift, found)
        compare_kind(step, "buffers", reference, actual, unit, norm_eps, found)
    if drift.explained and not found.findings:
        optimizer = next(iter(drift.explained.values()))
        names = ", ".join(drift.explained)
        found.note(f"{optimizer} turns gradients that are zero but for rounding into full steps: {names}")
    findings = found.findings + [finding for check in checks for finding in check.findings]
    keys = sorted(found.results, key=lambda key: KINDS.index(key[0]))  # each kind as it came
    order = {key: place for place, key in enumerate(keys)}
    return Outcome(found, checks, [], losses, in_causal_order(findings, order))


def compare_start(reference: Recording, actual: Recording, found: Divergence) -> None:
    """Compare parameters and buffers before training; the tolerance of a copy, 16 eps of their type."""
    for kind, name in (("buffers_before", "buffers"), ("before", "parameters")):
        ours, theirs = actual.entries(1, kind), reference.entries(1, kind)
        for tensor in [tensor for tensor in theirs if tensor in ours]:
            expected = wholes(theirs[tensor])[0]
            for whole in wholes(ours[tensor]):
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
    norm_eps: float,
    found: Divergence,
) -> dict:
    """Compare the loss of a step; return both."""
    one, other = losses_of(reference, step, conventions[0]), losses_of(actual, step, conventions[1])
    ranks = tuple(range(actual.world_size))
    if one is not None and other is not None:
        if isfinite(one) and isfinite(other):
            result = judge(abs(other - one), abs(one), max(unit, 2.0**-23), 0.0, norm_eps)
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
    step: int, reference: Recording, actual: Recording, unit: float, norm_eps: float, found: Divergence
) -> None:
    """Compare gradients from the last layer to the first. Those that are zero but for rounding pass."""
    ours, theirs = actual.entries(step, "gradients"), reference.entries(step, "gradients")
    expected = {name: wholes(by_rank)[0] for name, by_rank in theirs.items()}
    floor = floor_of(expected)
    everyone = tuple(range(actual.world_size))
    for name in reversed(list({**theirs, **ours})):
        key = ("gradients", name)
        if name not in ours or name not in theirs:
            run = "actual" if name not in ours else "reference"
            found.add(step, key, everyone, mismatch(f": there is none in the {run} run"))
            continue
        for whole in wholes(ours[name]):
            if max(whole.largest, expected[name].largest) <= floor and not whole.not_finite:
                text = "zero but for rounding in both runs, not compared"
                found.add(step, key, whole.ranks, Result(True, message=text))
            else:
                found.add(step, key, whole.ranks, judge_whole(whole, expected[name], unit, 0.0, norm_eps))


def floor_of(gradients: dict[str, Whole]) -> float:
    """Return the magnitude below which a gradient of this step is zero but for rounding."""
    return NEGLIGIBLE * max((whole.largest for whole in gradients.values()), default=0.0)


def compare_parameters(
    step: int,
    reference: Recording,
    actual: Recording,
    unit: float,
    norm_eps: float,
    drift: Drift,
    found: Divergence,
) -> None:
    """Compare parameters after a step, and keep for the next one by how much they differ."""
    ours, theirs = actual.entries(step, "parameters"), reference.entries(step, "parameters")
    start, gradients = reference.entries(1, "before"), reference.entries(step, "gradients")
    settings = rates_of(reference.of_step(step)[:1])
    expected_gradients = {name: wholes(by_rank)[0] for name, by_rank in gradients.items()}
    floor = floor_of(expected_gradients)
    for name in theirs:
        expected, initial = wholes(theirs[name])[0], wholes(start[name])[0]
        optimizer, group = settings[name]
        if name in gradients and optimizer not in LINEAR:
            gradient = expected_gradients[name]
            drift.allowed[name] += adaptive_allowance(gradient, group.get("lr", 0.0), unit, floor)
        more = NORM_EPS * unit * distance(expected, initial) + drift.allowed[name]
        differences = []
        for whole in wholes(ours.get(name, {})):
            eps = torch.finfo(whole.dtype).eps
            result = judge_whole(whole, expected, eps, more, norm_eps)
            found.add(step, ("parameters", name), whole.ranks, result)
            differences.append(distance(whole, expected))
            explained = NORM_EPS * (eps * expected.norm + unit * distance(expected, initial))
            if result.passed and differences[-1] > explained:
                drift.explained[name] = optimizer
        drift.measured[name] = (max(differences, default=0.0), expected.norm, len(expected.shape))


def compare_kind(
    step: int,
    kind: str,
    reference: Recording,
    actual: Recording,
    unit: float,
    norm_eps: float,
    found: Divergence,
) -> None:
    """Compare the tensors of a kind that both runs have."""
    ours, theirs = actual.entries(step, kind), reference.entries(step, kind)
    for name in [name for name in theirs if name in ours]:
        expected = wholes(theirs[name])[0]
        for whole in wholes(ours[name]):
            found.add(step, (kind, name), whole.ranks, judge_whole(whole, expected, unit, 0.0, norm_eps))


def unit_of(reference: Recording, actual: Recording) -> float:
    """Return the eps in which errors are judged: the coarsest of the trained parameters and of what the
    reference computes. A coarser type in the actual run alone is a difference, no reason to allow more.
    """
    types = {entry["dtype"] for run in (reference, actual) for entry in run.of_step(1)[0]["before"].values()}
    types |= {entry["dtype"] for entry in reference.of_step(1)[0]["activations"]}
    types |= {entry["dtype"] for entry in reference.of_step(1)[0]["gradients"].values()}
    floating = [getattr(torch, name) for name in types if getattr(torch, name).is_floating_point]
    return max(torch.finfo(dtype).eps for dtype in floating)


def check_same_model(reference: Recording, actual: Recording) -> None:
    """Raise InputError unless both have the same steps and parameters of the same names and shapes."""
    if reference.steps != actual.steps:
        raise InputError(
            f"the runs differ in steps: reference {reference.steps}, actual {actual.steps}; record as many"
        )
    if reference.metadata["saved_at"] == actual.metadata["saved_at"]:
        raise InputError("the two directories hold the same run, one is a copy; give two runs")
    theirs, ours = reference.entries(1, "before"), actual.entries(1, "before")
    other_names = {
        name for run in (reference, actual) for names in run.metadata["tied"].values() for name in names
    }
    different = sorted((theirs.keys() ^ ours.keys()) - other_names)
    if different:
        run = "actual" if different[0] in ours else "reference"
        raise InputError(
            f"parameter {different[0]} is in the {run} run only ({len(different)} such): another model, or an "
            "optimizer that holds other tensors"
        )
    for name in theirs.keys() & ours.keys():
        shapes = [wholes(run[name])[0].shape for run in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"parameter {name} is {shapes[0]} in the reference, {shapes[1]} in the actual run: a plain tensor "
                "that was sharded by hand cannot be put together; make it a DTensor"
            )


def check_recording(run: str, recording: Recording, unit: float) -> Checks:
    """Check what must hold in a recording by itself."""
    checks = Checks(run)
    for step in range(1, recording.steps + 1):
        nonzero = False
        for kind in ("gradients", "before", "parameters"):
            name_of_kind = "parameters" if kind == "before" else kind
            for name, by_rank in recording.entries(step, kind).items():
                copies = wholes(by_rank)
                nonzero |= kind == "gradients" and any(copy.largest for copy in copies)
                key = (name_of_kind, name)
                at = step - 1 if kind == "before" else step
                if kind != "before" or step == 1:
                    check_copies(checks, at, key, copies, unit)
        checks.checked["nonzero"] += 1
        if not nonzero:
            name = next(iter(recording.entries(step, "parameters")))
            ranks = tuple(range(recording.world_size))
            checks.fail(step, ("gradients", name), ranks, "nonzero", ": all gradients of this step are zero")
        check_sgd(checks, step, recording, unit)
    return checks


def check_copies(checks: Checks, step: int, key: Key, copies: list[Whole], unit: float) -> None:
    """Check that a tensor is finite, and that ranks that each have a copy of it have the same."""
    first = copies[0]
    for copy in copies:
        checks.checked["finite"] += 1
        if copy.not_finite:
            checks.fail(step, key, copy.ranks, "finite", f": {copy.not_finite} values are not finite")
    for copy in copies[1:]:
        checks.checked["ranks agree"] += 1
        result = judge_whole(copy, first, unit)
        if not result.passed and not first.not_finite:
            of_first = f", from that of rank{'s' if len(first.ranks) > 1 else ''} {ranges(first.ranks)}"
            checks.fail(step, key, copy.ranks, "ranks agree", result.message + of_first)


def check_sgd(checks: Checks, step: int, recording: Recording, unit: float) -> None:
    """Check the updates of plain SGD: momentum adds what no single step tells."""
    settings = rates_of(recording.of_step(step)[:1])
    kinds = [recording.entries(step, kind) for kind in ("gradients", "before", "parameters")]
    skipped = any(optimizer["skipped"] for optimizer in recording.of_step(step)[0]["optimizers"])
    for name, (optimizer, group) in settings.items():
        if skipped or optimizer != "SGD" or group.get("momentum") or not all(name in kind for kind in kinds):
            continue
        for gradient, before, after in zip(*(wholes(kind[name]) for kind in kinds), strict=True):
            sign = -1 if group.get("maximize") else 1
            decay = group.get("weight_decay", 0) or 0
            expected = -group["lr"] * (sign * gradient.sketch + decay * before.sketch)
            checks.checked["sgd"] += 1
            if gradient.not_finite or before.not_finite or after.not_finite:
                continue
            error = (after.sketch - before.sketch - expected).norm().item()
            eps = torch.finfo(after.dtype).eps
            # Twice the rounding of the parameter, and of the product.
            allowed = 2 * eps * after.norm + NORM_EPS * unit * expected.norm().item()
            if error > allowed:
                text = f": the update differs from its gradient's by {error:.3g}, allowed {allowed:.3g}"
                checks.fail(step, ("parameters", name), after.ranks, "sgd", text)
