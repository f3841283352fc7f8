"""Causes of a first difference in the gradients or the updates.

Hypotheses, one function each, and their helpers. training_evidence.py says what a hypothesis is,
training_diagnosis.py in which order they are tried.
"""

from math import inf
from typing import NamedTuple

import torch

from training_causes_general import narrow_type, rounded_values
from training_evidence import (
    MAX_UNEXPLAINED,
    SAME_FACTOR,
    Evidence,
    known_factor,
    numbered,
    remainder_in_words,
    times_the_reference,
)
from training_records import ranges
from training_tolerance import ELEMENT_EPS, eps_of, factor

SAME_GRADIENT = 1e-4  # norm of the difference of two ranks' copies of a gradient, over its norm
SGD_RULE = "-learning rate x gradient"

# ---------------------------------------------------------------- gradients: whole tensors


def no_gradient(evidence: Evidence) -> str | None:
    """No gradient arrives at the parameter."""
    if evidence.actual_tensor(kind="gradients") is not None:
        return None
    steps, expected = evidence.actual(evidence.rank), (evidence.reference or evidence.actual)(0)[1]
    trained = [name for kind, name in expected if kind == "parameters" and ("gradients", name) in expected]
    frozen = [name for name in trained if ("gradients", name) not in steps[evidence.step]]
    if not frozen:
        return None
    count = sum(("gradients", frozen[0]) not in tensors for tensors in steps[1:])
    keys = [("parameters", name) for name in frozen]
    changed = [key[1] for key in keys if not torch.equal(steps[0][key], steps[-1][key])]
    values = f"yet {', '.join(changed)} change" if changed else "and the values do not change"
    return (
        f"{evidence.ranks_in_words}: no gradient of {', '.join(frozen)} in {count} of {len(steps) - 1} "
        f"steps, {values}: frozen (requires_grad is False), not used, or cut off from the loss"
    )


def not_reduced(evidence: Evidence) -> str | None:
    """Ranks hold gradients of their own, and the mean or the sum of these is right."""
    pair, gradients = evidence.pair(), gradients_by_rank(evidence)
    if pair is None or not gradients or some_are_right(evidence):
        return None
    actual, reference = pair
    total, groups = sum(gradients), equal_groups(gradients)
    if len(groups) == 1:
        return None
    for operation, reduced in (("mean", total / len(gradients)), ("sum", total)):
        rest = evidence.unexplained(actual, actual + reference - reduced, reference)
        if rest <= MAX_UNEXPLAINED:
            why = "reduced over the wrong group"
            if one_group_a_replica(evidence, groups):
                why = "not reduced"
                if max(about.get("microbatches", 1) for about in evidence.metadata) > 1:
                    why += ", or only some of the microbatches'"
                if all(differs_between_replicas(evidence, name) for name in evidence.names("gradients")):
                    why += (
                        ", nor is any other gradient: is the wrapper's forward bypassed, or no_sync still on?"
                    )
            return (
                f"{groups_in_words(evidence, groups)}, and their {operation} over all ranks is the "
                f"reference{remainder_in_words(rest)}: {why}"
            )
    return not_reduced_over_tp(evidence, gradients, groups)


def some_are_right(evidence: Evidence) -> bool:
    """Say whether a rank has the right gradient: it was reduced, and changed later on the others."""
    return len(evidence.ranks) < len(evidence.metadata)


def not_reduced_over_tp(
    evidence: Evidence, gradients: list[torch.Tensor], groups: list[list[int]]
) -> str | None:
    """Return whether the tensor-parallel ranks of a replica have parts that were not summed."""
    if sorted(groups) != sorted(ranks_by(evidence, "tp_rank")):
        return None
    actual, reference = evidence.pair()
    total = sum(gradients[group[0]] for group in groups)
    rest = evidence.unexplained(actual, actual + reference - total, reference)
    if rest > MAX_UNEXPLAINED:
        return None
    replicas = " ".join("{" + ranges(replica) + "}" for replica in ranks_by(evidence, "dp_rank")[:8])
    return (
        f"{evidence.tensor_name} differ within the tensor-parallel groups {replicas}, and their sum over "
        f"such a group is the reference{remainder_in_words(rest)}: not reduced over the tensor-parallel ranks"
    )


def not_reduced_and_scaled(evidence: Evidence) -> str | None:
    """Ranks hold gradients of their own, and the mean of these is the reference times a known factor."""
    pair, gradients = evidence.pair(), gradients_by_rank(evidence)
    if pair is None or not gradients or some_are_right(evidence):
        return None
    reference, mean = pair[1], sum(gradients) / len(gradients)
    scale = factor(mean, reference)
    meaning = known_factor(evidence, scale)
    if not meaning or not evidence.explained(mean, scale * reference, reference):
        return None
    groups = equal_groups(gradients)
    if len(groups) == 1:
        return None
    return (
        f"{groups_in_words(evidence, groups)}, and their mean over all ranks is "
        f"{times_the_reference(scale)}: {meaning}, and at least once not reduced"
    )


def ranks_disagree(evidence: Evidence) -> str | None:
    """Ranks hold gradients of their own, and there is no reference for their mean."""
    gradients = gradients_by_rank(evidence)
    if evidence.reference_tensor() is not None or not gradients:
        return None
    groups = equal_groups(gradients)
    if len(groups) == 1:
        return None
    fewest, most = min(groups, key=len), max(groups, key=len)
    if len(groups) == 2 and len(fewest) < len(most):
        odd = numbered("rank", fewest)
        return f"{evidence.tensor_name} of {odd} differ from those of all other ranks, which agree"
    return f"{groups_in_words(evidence, groups)}: not reduced over all replicas"


def gradients_by_rank(evidence: Evidence) -> list[torch.Tensor]:
    """Return every rank's copy of the gradient, an empty list if a rank has none."""
    gradients = [evidence.actual_tensor(rank) for rank in range(len(evidence.metadata))]
    return [] if any(gradient is None for gradient in gradients) else gradients


def equal_groups(gradients: list[torch.Tensor]) -> list[list[int]]:
    """Return the ranks in groups whose gradients are equal up to rounding."""
    groups: list[list[int]] = []
    for rank, gradient in enumerate(gradients):
        for group in groups:
            if (gradient - gradients[group[0]]).norm() <= SAME_GRADIENT * gradient.norm():
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def one_group_a_replica(evidence: Evidence, groups: list[list[int]]) -> bool:
    """Say whether the groups are the data-parallel replicas."""
    return sorted(groups) == sorted(ranks_by(evidence, "dp_rank"))


def differs_between_replicas(evidence: Evidence, name: str) -> bool:
    """Say whether the first two replicas have gradients of their own."""
    one, other = (evidence.actual_tensor(group[0], name=name) for group in ranks_by(evidence, "dp_rank")[:2])
    if one is None or other is None or one.shape != other.shape:
        return False
    return (one - other).norm().item() > SAME_GRADIENT * one.norm().item() or not one.any()


def ranks_by(evidence: Evidence, place: str) -> list[list[int]]:
    """Return the ranks in groups that have the same place in the mesh, "dp_rank" or "tp_rank"."""
    groups: dict[int, list[int]] = {}
    for rank, metadata in enumerate(evidence.metadata):
        groups.setdefault(metadata[place], []).append(rank)
    return list(groups.values())


def groups_in_words(evidence: Evidence, groups: list[list[int]]) -> str:
    """Return which ranks have equal gradients."""
    if one_group_a_replica(evidence, groups):
        return f"each of the {len(groups)} replicas has its own {evidence.tensor_name}"
    listed = " ".join("{" + ranges(group) + "}" for group in groups[:8]) + (" ..." if len(groups) > 8 else "")
    return f"{evidence.tensor_name} agree only within the groups of ranks {listed}"


def accumulated(evidence: Evidence) -> str | None:
    """Gradients of the step before were not cleared."""
    remainder = remainder_of_step_before(evidence, added=True)
    return remainder and (
        f"gradients of step {evidence.step} are the reference plus those of step "
        f"{evidence.step - 1}{remainder}: they were not cleared by zero_grad"
    )


def earlier_gradient(evidence: Evidence) -> str | None:
    """The gradients are those of the step before."""
    remainder = remainder_of_step_before(evidence, added=False)
    return remainder and (
        f"gradients of step {evidence.step} are those of step {evidence.step - 1}{remainder}: stale"
    )


def remainder_of_step_before(evidence: Evidence, added: bool) -> str | None:
    """Return in words how well the gradients of the step before explain these; None if they do not.

    added: together with the reference, as if they were added to it.
    """
    pair, earlier = evidence.pair(), evidence.actual_tensor(step=evidence.step - 1)
    if pair is None or earlier is None:
        return None
    actual, reference = pair
    rest = evidence.unexplained(actual, reference + earlier if added else earlier, reference)
    return remainder_in_words(rest) if rest <= MAX_UNEXPLAINED else None


# ---------------------------------------------------------------- gradients: elements


def few_ranks(evidence: Evidence) -> str | None:
    """Half the ranks or more have the right gradients. A mistake in the plan would show on all of them."""
    pair, right = evidence.pair(), len(evidence.metadata) - len(evidence.ranks)
    if pair is None or right < len(evidence.ranks):
        return None
    actual, reference = pair
    wrong = (actual - reference).abs() > ELEMENT_EPS * evidence.eps() * reference.abs().max()
    not_the_plan = "not the plan, but " if right > len(evidence.ranks) else ""
    return (
        f"{evidence.tensor_name} are wrong on {evidence.ranks_in_words} alone, in {int(wrong.sum())} of "
        f"{actual.numel()} elements, and right on the other {right}: {not_the_plan}something that "
        "happened there"
    )


# ---------------------------------------------------------------- updates: whole tensors


class Update(NamedTuple):
    """An update that does not follow from its gradient, which agrees."""

    delta: torch.Tensor
    expected: torch.Tensor
    rule: str  # what is expected, in words
    rate: float | None  # the learning rate, None if it was not recorded
    before: torch.Tensor  # the parameter before the step
    rounding: float  # norm of the delta's rounding error: it is the difference of rounded parameters
    difference: float  # norm of delta - expected

    def is_explained(self, predicted: torch.Tensor) -> bool:
        """Say whether a prediction of the delta explains it, up to rounding."""
        if predicted.shape != self.delta.shape:
            return False
        return (self.delta - predicted).norm().item() <= MAX_UNEXPLAINED * self.difference + self.rounding


def wrong_update(evidence: Evidence) -> Update | None:
    """Return what is known of the update, None if it is as expected or a tensor is missing."""
    job = evidence.metadata[0]
    rate = job["learning_rate"] if isinstance(job["learning_rate"], int | float) else None
    delta, gradient = (evidence.actual_tensor(kind=kind) for kind in ("deltas", "gradients"))
    before = evidence.actual_tensor(kind="parameters", step=evidence.step - 1)
    if delta is None or gradient is None or before is None:
        return None
    if job["optimizer"] == "SGD" and rate is not None:
        expected, rule = -rate * gradient, SGD_RULE
    else:
        expected, rule = evidence.reference_tensor(kind="deltas"), "the reference's"
    if expected is None or expected.shape != delta.shape:
        return None
    delta_tensor = evidence.actual(evidence.rank)[evidence.step]["deltas", evidence.name]
    dtype_eps = evidence.unit or eps_of(delta_tensor)
    rounding = dtype_eps * before.norm().item()
    difference = (delta - expected).norm().item()
    if not difference > 10 * rounding:
        return None
    return Update(delta, expected, rule, rate, before, rounding, difference)


def not_updated(evidence: Evidence) -> str | None:
    """The gradient is not zero, and the parameter does not change: never, or not in this step."""
    delta = evidence.actual_tensor(kind="deltas")
    if delta is None or evidence.actual_tensor(kind="gradients") is None or delta.any():
        return None
    steps = evidence.actual(evidence.rank)
    deltas = [(name, evidence.actual_tensor(kind="deltas", name=name)) for name in evidence.names("deltas")]
    still = [name for name, delta in deltas if not delta.any()]
    do_not = "do not" if len(still) > 1 else "does not"
    what = f"{', '.join(still)} of {evidence.ranks_in_words} {do_not} change"
    by_step = [evidence.actual_tensor(kind="deltas", step=step) for step in range(1, len(steps))]
    if not any(delta is not None and delta.any() for delta in by_step):
        return (
            f"{what} in any of {len(by_step)} steps, though the gradient is not zero: not updated by the "
            "optimizer"
        )
    return f"{what} in step {evidence.step}, though the gradient is not zero: the update was skipped"


def scaled_learning_rate(evidence: Evidence) -> str | None:
    """The update has a constant factor."""
    update = wrong_update(evidence)
    if update is None:
        return None
    scale = factor(update.delta, update.expected)
    if not update.is_explained(scale * update.expected):
        return None
    text = f"the update of {evidence.name} on {evidence.ranks_in_words} is {scale:.4g}x {update.rule}"
    if update.rate is not None:
        text += f": the learning rate acts as {scale * update.rate:.4g}, not {update.rate:g}"
    meaning = known_update_factor(evidence, scale)
    return f"{text}, {meaning}" if meaning else text


def known_update_factor(evidence: Evidence, scale: float) -> str | None:
    """Return which mistake gives an update this factor, None if no known one does.

    Of the factors of a gradient, only the world size and 2 are also mistakes of a learning rate.
    """
    world = evidence.metadata[0]["world_size"]
    if world > 1 and abs(scale / world - 1) <= 10 * SAME_FACTOR:
        return f"scaled by the world size {world}"
    return known_factor(evidence, scale) if abs(scale - 2) <= 10 * SAME_FACTOR else None


def stale_gradient(evidence: Evidence) -> str | None:
    """The update is made with the gradient of the step before."""
    update = wrong_update(evidence)
    earlier = evidence.actual_tensor(kind="gradients", step=evidence.step - 1)
    if update is None or earlier is None or update.rule != SGD_RULE:
        return None
    if not update.is_explained(-update.rate * earlier):
        return None
    return (
        f"the update of step {evidence.step} is -learning rate x the gradient of step {evidence.step - 1}: "
        "the step is taken before the gradient has arrived"
    )


def momentum(evidence: Evidence) -> str | None:
    """A share of the update before is added."""
    update, earlier = wrong_update(evidence), evidence.actual_tensor(kind="deltas", step=evidence.step - 1)
    if update is None or earlier is None or earlier.shape != update.delta.shape:
        return None
    share = factor(update.delta - update.expected, earlier)
    if not 0 < share <= 1 or not update.is_explained(update.expected + share * earlier):
        return None
    return f"the update is {update.rule} plus {share:.3f} times the last update: momentum {share:.2f} is on"


def weight_decay(evidence: Evidence) -> str | None:
    """A share of the parameter is subtracted."""
    update = wrong_update(evidence)
    if update is None or update.rate is None:
        return None
    full_decay = -update.rate * update.before
    decay = factor(update.delta - update.expected, full_decay)
    if not decay > 0 or not update.is_explained(update.expected + decay * full_decay):
        return None
    return (
        f"the update is {update.rule} minus {decay:.3g} x learning rate x parameter: weight decay "
        f"{decay:.2g} is on"
    )


def other_optimizer(evidence: Evidence) -> str | None:
    """Another class of optimizer has the parameter."""
    job = evidence.metadata[evidence.rank]
    if job.get("own_optimizer", job["optimizer"]) == job["optimizer"]:
        return None
    return f"the optimizer of {evidence.name} is {job['own_optimizer']}, the reference's {job['optimizer']}"


# ---------------------------------------------------------------- updates: elements


def rounded_parameters(evidence: Evidence) -> str | None:
    """The updated parameter is of a narrower type than before training, or exact in one."""
    updated = evidence._replace(kind="parameters")
    return narrow_type(updated) or rounded_values(updated)


def memory_changed(evidence: Evidence) -> str | None:
    """At most one element in a thousand does not follow the rule of the optimizer."""
    update = wrong_update(evidence)
    if update is None:
        return None
    eps = eps_of(evidence.actual(evidence.rank)[0]["parameters", evidence.name])
    # One element may have all of the rounding error, of which the norm only has a share.
    near = 4 * eps * update.before.abs().max()
    if update.rule != SGD_RULE:  # Adam turns rounding of a gradient next to zero into a full step
        near = near.clamp(min=4 * update.rate) if update.rate is not None else inf
    strange = (update.delta - update.expected).abs() > near
    count = int(strange.sum())
    if not 0 < count * 1000 < strange.numel():
        return None
    index = tuple(torch.nonzero(strange)[0].tolist())
    before, after = update.before[index].item(), evidence.actual_tensor(kind="parameters")[index].item()
    return (
        f"{count} of {strange.numel()} elements of {evidence.name} on {evidence.ranks_in_words} do not "
        f"follow {update.rule}: {list(index)} went from {before:.6g} to {after:.6g}, not by the optimizer: "
        "memory was changed"
    )


def like_adam(evidence: Evidence) -> str | None:
    """All elements move equally far, whatever their gradients."""
    update = wrong_update(evidence)
    if update is None or update.delta.numel() == 1 or update.rule != SGD_RULE:
        return None
    size = update.delta.abs()
    if not size.std() < 0.1 * size.mean():
        return None
    return (
        f"every element of {evidence.name} moves by about {size.mean():.3g}, whatever its gradient: an "
        "optimizer such as Adam, not plain SGD"
    )
