"""Name the likely cause of the first difference between two runs, with the number that supports it.

Below are the hypotheses in the order in which they are tried. The first that explains the difference is
named. If none does, no cause is named. What "explains" means is in training_evidence.py.

    training_causes_general.py    causes that any tensor may show
    training_causes_forward.py    causes in the initial parameters, the outputs and the losses
    training_causes_backward.py   causes in the gradients and the updates
"""

from collections.abc import Callable

import training_causes_backward as backward
import training_causes_forward as forward
import training_causes_general as general
from training_evidence import Evidence
from training_records import Steps

START = [
    general.not_finite,
    forward.separate,
    general.transposed,
    general.shards,
    forward.other_start,
    general.scaled_by_own_factors,
    general.scaled,
]
OUTPUTS = [
    general.not_finite,
    forward.uneven_slices,
    forward.other_samples,
    forward.other_step,
    general.scaled_by_own_factors,
    general.scaled,
    forward.partial_sum,
    forward.bias_added_again,
    forward.scaled_without_bias,
    forward.dropped,
    general.narrow_type,
    general.rounded_values,
    # What the reference does not explain may still be the outputs of another replica.
    forward.same_samples,
    forward.returned_others,
]
OUTPUTS_WITHOUT_REFERENCE = [
    general.not_finite,
    forward.uneven_slices,
    forward.same_samples,
    general.narrow_type,
]
LOSSES = [
    general.not_finite,
    forward.own_losses_reported,
    general.scaled_by_own_factors,
    general.scaled,
    forward.averaged_wrongly,
    forward.mean_of_means,
    forward.other_target,
]
GRADIENTS = [
    backward.no_gradient,
    general.not_finite,
    backward.few_ranks,
    backward.not_reduced,
    backward.not_reduced_and_scaled,
    backward.ranks_disagree,
    backward.accumulated,
    backward.earlier_gradient,
    general.scaled_by_own_factors,
    general.scaled,
    general.transposed,
    general.shards,
    general.narrow_type,
    general.rounded_values,
    forward.weighs_replicas_equally,
]
UPDATES = [
    general.not_finite,
    backward.no_gradient,
    backward.not_updated,
    backward.rounded_parameters,
    backward.scaled_learning_rate,
    backward.stale_gradient,
    backward.momentum,
    backward.weight_decay,
    backward.other_optimizer,
    backward.memory_changed,
    backward.like_adam,
]


def find_cause(
    first: tuple[int, str, str],
    ranks: list[int],
    actual: Callable[[int], Steps],
    reference: Callable[[int], Steps] | None,
    metadata: list[dict],
    losses: list[list[tuple[float | None, float | None]]],
    invariant: bool = False,
) -> str | None:
    """Return the likely cause of the first difference in one line, None if nothing explains it.

    first: (step, kind, name) of the first tensor that differs.
    ranks: those on which it differs.
    actual, reference: return a rank's Steps, the reference as this rank sees it.
    metadata: by rank.
    losses: by rank, (global loss, own loss) of each step.
    invariant: it breaks an invariant of one run, and the reference may agree with it.
    """
    evidence = Evidence(*first, ranks, actual, reference, metadata, losses)
    hypotheses = hypotheses_for(evidence)
    if not invariant:
        hypotheses = [general.rounding, *hypotheses]
    causes = (hypothesis(evidence) for hypothesis in hypotheses)
    return next(filter(None, causes), None)


def hypotheses_for(evidence: Evidence) -> list[Callable[[Evidence], str | None]]:
    """Return the hypotheses about a tensor of this kind, in the order in which they are tried."""
    if evidence.step == 0:
        return START
    if evidence.kind == "outputs":
        return OUTPUTS if evidence.reference else OUTPUTS_WITHOUT_REFERENCE
    kinds = {"losses": LOSSES, "gradients": GRADIENTS, "parameters": UPDATES, "deltas": UPDATES}
    return kinds[evidence.kind]
