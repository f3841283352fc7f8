"""Name the likely cause of the first difference between two recordings.

Sketches are linear. So the hypotheses of training_causes_*.py that look at whole tensors, not at elements,
hold for sketches as they are: sums, factors, the gradient of the step before. Here are the order in which
they are tried, and the evidence that they look at. training_recorded_causes_*.py have those that only
recordings allow.
"""

from collections.abc import Callable

import torch

import training_causes_backward as backward
import training_causes_general as general
import training_recorded_causes_samples as of_samples
import training_recorded_causes_tensors as of_tensors
from training_evidence import Evidence
from training_recorded_causes_samples import activation_pair
from training_recorded_runs import (
    CONVENTIONS,
    Recording,
    Whole,
    choose_conventions,
    losses_of,
    rates_of,
    unit_of,
)
from training_records import LOSS, Finding, Steps

RECORDED = [
    of_tensors.tied,
    of_tensors.in_no_optimizer,
    of_tensors.no_gradient,
    of_samples.samples_of_own,
    of_samples.other_samples,
    of_samples.other_type,
    of_tensors.other_settings,
    of_tensors.other_state,
    of_tensors.shards,
    of_tensors.other_start,
    of_tensors.not_initialized,
    of_samples.batch_statistics,
    of_samples.dropout,
    of_tensors.shards_scaled,
    of_tensors.clipping,
    of_tensors.reduced_in,
    of_tensors.narrow_values,
    of_samples.sum_of_ranks,
    of_samples.loss_factor,
    of_samples.weighted_equally,
    of_samples.other_loss,
]
FACTORS = [general.scaled_by_own_factors, general.scaled]
GRADIENTS = [
    backward.no_gradient,
    backward.not_reduced,
    backward.not_reduced_and_scaled,
    backward.ranks_disagree,
    backward.accumulated,
    backward.earlier_gradient,
    general.scaled_by_own_factors,
    general.scaled,
]
UPDATES = [
    backward.not_updated,
    backward.scaled_learning_rate,
    backward.stale_gradient,
    backward.momentum,
    backward.weight_decay,
]


def cause_of_recordings(
    first: Finding,
    ranks: list[int],
    reference: Recording | None,
    actual: Recording,
    unit: float = 0.0,
) -> str | None:
    """Return the likely cause of the first finding in plain words, None if nothing explains it.

    ranks: those on which it differs. unit: eps in which rounding is measured, by default the recordings'.
    """
    key = (first.kind, first.name)
    if cause := of_tensors.not_finite(first, reference, actual):
        return cause
    for hypothesis in RECORDED if reference else ():
        if cause := hypothesis(first, ranks, reference, actual):
            return cause
    evidence = Evidence(
        first.step,
        first.kind,
        first.name,
        ranks,
        steps_of(actual, key, first.step, reference, own=True),
        steps_of(reference, key, first.step, actual, own=False) if reference else None,
        describe_ranks(actual, first),
        [[(None, None)] * actual.steps for _ in range(actual.world_size)],
        unit or unit_of(reference or actual, actual),
    )
    hypotheses = (
        FACTORS
        if first.step == 0
        else {"gradients": GRADIENTS, "parameters": UPDATES}.get(first.kind, FACTORS)
    )
    for hypothesis in hypotheses:
        if cause := hypothesis(evidence):
            return cause
    if reference and (cause := of_tensors.last_microbatch(first, ranks, reference, actual)):
        return cause
    of_start = first.step == 0 and first.kind == "buffers" and len(ranks) < actual.world_size
    few = first.step and first.kind != "activations" and len(ranks) <= actual.world_size / 2
    if of_start or few:
        return of_tensors.few_ranks(first, ranks, actual)
    return None


# ---------------------------------------------------------------- the evidence


def steps_of(
    recording: Recording, key: tuple[str, str], step: int, other: Recording | None, own: bool
) -> Callable[[int], Steps]:
    """Return a function that gives a rank's tensors of all steps, sketches in place of the tensors.

    own: each rank's; otherwise rank 0's for all, but of an activation the rank's samples in the other run.
    """
    known: dict[int, Steps] = {}
    convention = CONVENTIONS[0]
    if other is not None:
        convention = choose_conventions(*((other, recording) if own else (recording, other)))[own]

    def steps(rank: int) -> Steps:
        of = rank if own else 0
        if of not in known:
            known[of] = steps_of_rank(recording, of, convention)
        if key[0] != "activations" or other is None:
            return known[of]
        pair = (
            activation_pair(recording, other, key, step, rank)
            if own
            else activation_pair(other, recording, key, step, rank)
        )
        found = [dict(tensors) for tensors in known[of]]
        if pair is not None:
            found[step][key] = pair[0 if own else 1]
        return found

    return steps


def steps_of_rank(recording: Recording, rank: int, convention: tuple[str, str]) -> Steps:
    """Return a rank's parameters, gradients, deltas and loss of all steps, as it has them.

    convention: how losses are put together, see choose_conventions.
    """

    def of_rank(tensors: dict[str, list[Whole]]) -> dict[str, torch.Tensor]:
        found = {}
        for name, copies in tensors.items():
            for whole in copies:
                if rank in whole.ranks:
                    found[name] = whole.sketch
        return found

    def seen(step: int, kind: str) -> dict[str, torch.Tensor]:
        return of_rank(recording.tensors(step, kind))

    start = {("parameters", name): sketch for name, sketch in of_rank(recording.start).items()}
    start |= {("buffers", name): sketch for name, sketch in seen(1, "buffers_before").items()}
    steps = [start]
    for step in range(1, recording.steps + 1):
        before, after = seen(step, "before"), seen(step, "parameters")
        tensors = {("gradients", name): sketch for name, sketch in reversed(seen(step, "gradients").items())}
        tensors |= {("parameters", name): sketch for name, sketch in after.items()}
        tensors |= {("deltas", name): after[name] - before[name] for name in after}
        tensors |= {("buffers", name): sketch for name, sketch in seen(step, "buffers").items()}
        loss = losses_of(recording, step, convention)
        if loss is not None:
            tensors[LOSS] = torch.tensor(loss, dtype=torch.float64)
        steps.append(tensors)
    return steps


def describe_ranks(recording: Recording, first: Finding) -> list[dict]:
    """Return for each rank what Evidence.metadata holds, as far as a recording tells."""
    replicas = recording.replicas
    step = max(1, first.step)
    optimizer, group = rates_of(recording.of_step(step)[:1]).get(first.name, ("", {}))
    plain = optimizer == "SGD" and not any(group.get(key) for key in ("momentum", "weight_decay", "maximize"))
    degree = max(replicas) + 1
    return [
        {
            "rank": rank,
            "world_size": recording.world_size,
            "dp_degree": degree,
            "dp_rank": replica,
            "tp_degree": recording.world_size // degree,
            "tp_rank": replicas[:rank].count(replica),
            "learning_rate": group.get("lr"),
            "optimizer": "SGD" if plain else optimizer,
            "microbatches": len(recording.of_step(step)[rank]["losses"]) or 1,
        }
        for rank, replica in enumerate(replicas)
    ]
