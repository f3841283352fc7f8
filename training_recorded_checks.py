"""What must hold in a recording by itself."""

from collections import defaultdict
from math import inf

import torch

from training_recorded_runs import Recording, Whole, rates_of
from training_recorded_tolerance import adaptive_allowance, floor_of, judge_whole, scale_of_rounding
from training_records import Finding, Key, ranges
from training_tolerance import LINEAR, NORM_EPS, bound_of, largest_step

CHECKS = {
    "finite": "no value is NaN or infinite",
    "ranks agree": "copies of gradients and parameters are the same on every rank that has one",
    "nonzero": "the gradients of a step are not all zero",
    "sgd": "an update of plain SGD is -learning rate x (gradient + weight decay x parameter)",
}


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


def check_recording(run: str, recording: Recording, unit: float) -> Checks:
    """Check what must hold in a recording by itself."""
    checks, allowed = Checks(run), defaultdict(float)  # on top, for copies of a parameter
    for step in range(1, recording.steps + 1):
        nonzero, gradients = False, recording.tensors(step, "gradients")
        floor = floor_of(gradients, unit)
        allow_adaptive_steps(allowed, recording, step, unit, floor)
        for kind in ("gradients", "before", "parameters"):
            name_of_kind = "parameters" if kind == "before" else kind
            for name, copies in recording.tensors(step, kind).items():
                nonzero |= kind == "gradients" and any(copy.largest for copy in copies)
                key = (name_of_kind, name)
                at = step - 1 if kind == "before" else step
                more = allowed[name] if kind == "parameters" else 0.0
                if kind == "gradients":
                    silent = max(copy.largest for copy in copies) <= floor
                    rounding = inf if silent else scale_of_rounding(name, gradients)
                    bound = bound_of(unit, len(copies[0].shape), None)
                    more = bound * unit * (rounding - copies[0].norm)
                if kind != "before" or step == 1:
                    check_copies(checks, at, key, copies, unit, more)
        checks.checked["nonzero"] += 1
        if not nonzero:
            name = next(iter(recording.tensors(step, "parameters")))
            ranks = tuple(range(recording.world_size))
            checks.fail(step, ("gradients", name), ranks, "nonzero", ": all gradients of this step are zero")
        check_sgd(checks, step, recording, unit)
    return checks


def allow_adaptive_steps(
    allowed: dict[str, float], recording: Recording, step: int, unit: float, floor: float
) -> None:
    """Add what Adam, or its kin, may make of the rounding by which copies of a gradient differ."""
    gradients, settings = recording.tensors(step, "gradients"), rates_of(recording.of_step(step)[:1])
    for name, (first, *others) in gradients.items():
        optimizer, group = settings.get(name, ("", {}))
        if optimizer not in LINEAR and any(not torch.equal(copy.sketch, first.sketch) for copy in others):
            rate = group.get("lr", 0.0) * largest_step(optimizer, group.get("alpha", 0.99))
            scale = scale_of_rounding(name, gradients)
            allowed[name] += adaptive_allowance(first, rate, unit, floor, scale)


def check_copies(
    checks: Checks, step: int, key: Key, copies: list[Whole], unit: float, more: float = 0.0
) -> None:
    """Check that a tensor is finite, and that ranks that each have a copy of it have the same.

    more: the norm that is allowed on top.
    """
    first = copies[0]
    for copy in copies:
        checks.checked["finite"] += 1
        if copy.not_finite:
            checks.fail(step, key, copy.ranks, "finite", f": {copy.not_finite} values are not finite")
    for copy in copies[1:]:
        checks.checked["ranks agree"] += 1
        result = judge_whole(copy, first, unit, more)
        if not result.passed and not first.not_finite:
            of_first = f", from that of rank{'s' if len(first.ranks) > 1 else ''} {ranges(first.ranks)}"
            checks.fail(step, key, copy.ranks, "ranks agree", result.message + of_first)


def check_sgd(checks: Checks, step: int, recording: Recording, unit: float) -> None:
    """Check the updates of plain SGD: momentum adds what no single step tells."""
    settings = rates_of(recording.of_step(step)[:1])
    kinds = [recording.tensors(step, kind) for kind in ("gradients", "before", "parameters")]
    skipped = any(optimizer["skipped"] for optimizer in recording.of_step(step)[0]["optimizers"])
    for name, (optimizer, group) in settings.items():
        if skipped or optimizer != "SGD" or group.get("momentum") or not all(name in kind for kind in kinds):
            continue
        for gradient, before, after in zip(*(kind[name] for kind in kinds), strict=True):
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
