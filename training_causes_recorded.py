"""Name the likely cause of the first difference between two recordings.

Sketches are linear. So the hypotheses of training_causes_*.py that look at whole tensors, not at elements,
hold for sketches as they are: sums, factors, the gradient of the step before. Here are the order in which
they are tried, the evidence that they look at, and the hypotheses that only recordings allow: they tell
samples, buffers and the optimizer's settings.
"""

import re
from collections import Counter
from collections.abc import Callable
from math import prod

import torch

import training_causes_backward as backward
import training_causes_general as general
from training_divergence import CONVENTIONS, activations_of, keys_of, losses_of, rates_of, unit_of
from training_evidence import MAX_UNEXPLAINED, SAME_FACTOR, Evidence, numbered
from training_recordings import Recording, Whole, wholes
from training_records import LOSS, Finding, Steps
from training_sketches import NOT_FINITE_KEY, fold
from training_tolerance import factor

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
LOSS_EPS = 64  # relative difference in eps of float32 up to which two losses are the same number
# Settings of an optimizer that change how it computes, not what.
HOW = {"names", "foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay"}


def cause_of_recordings(
    first: Finding, ranks: list[int], reference: Recording | None, actual: Recording
) -> str | None:
    """Return the likely cause of the first finding in plain words, None if nothing explains it.

    ranks: those on which it differs.
    """
    key = (first.kind, first.name)
    if cause := not_finite(first, reference, actual):
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
        unit_of(reference or actual, actual),
    )
    hypotheses = (
        FACTORS
        if first.step == 0
        else {"gradients": GRADIENTS, "parameters": UPDATES}.get(first.kind, FACTORS)
    )
    for hypothesis in hypotheses:
        if cause := hypothesis(evidence):
            return cause
    if first.step and len(ranks) < actual.world_size / 2 and first.kind != "activations":
        return few_ranks(first, ranks, actual)
    return None


# ---------------------------------------------------------------- the evidence


def steps_of(
    recording: Recording, key: tuple[str, str], step: int, other: Recording | None, own: bool
) -> Callable[[int], Steps]:
    """Return a function that gives a rank's tensors of all steps, sketches in place of the tensors.

    own: each rank's; otherwise rank 0's for all, but of an activation the rank's samples in the other run.
    """
    known: dict[int, Steps] = {}

    def steps(rank: int) -> Steps:
        of = rank if own else 0
        if of not in known:
            known[of] = steps_of_rank(recording, of)
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


def steps_of_rank(recording: Recording, rank: int) -> Steps:
    """Return a rank's parameters, gradients, deltas and loss of all steps, as it has them."""

    def seen(step: int, kind: str) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, by_rank in recording.entries(step, kind).items():
            own = [whole.sketch for whole in wholes(by_rank) if rank in whole.ranks]
            tensors.update({name: sketch for sketch in own})
        return tensors

    start = {("parameters", name): sketch for name, sketch in seen(1, "before").items()}
    start |= {("buffers", name): sketch for name, sketch in seen(1, "buffers_before").items()}
    steps = [start]
    for step in range(1, recording.steps + 1):
        before, after = seen(step, "before"), seen(step, "parameters")
        tensors = {("gradients", name): sketch for name, sketch in reversed(seen(step, "gradients").items())}
        tensors |= {("parameters", name): sketch for name, sketch in after.items()}
        tensors |= {("deltas", name): after[name] - before[name] for name in after}
        tensors |= {("buffers", name): sketch for name, sketch in seen(step, "buffers").items()}
        loss = losses_of(recording, step, CONVENTIONS[0])
        if loss is not None:
            tensors[LOSS] = torch.tensor(loss, dtype=torch.float64)
        steps.append(tensors)
    return steps


def activation_pair(
    actual: Recording, reference: Recording, key: tuple[str, str], step: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return an activation of a rank's samples in both runs, side by side, None if none is in both."""
    ours = activations_of(actual, step, keys_of(actual, step)).get(key, [])
    theirs = activations_of(reference, step, keys_of(reference, step)).get(key, [])
    known = {name: row for rows in theirs for name, row in zip(rows.keys, rows.samples, strict=False)}
    pairs = [
        (row, known[name])
        for rows in ours
        if rank in rows.ranks
        for name, row in zip(rows.keys, rows.samples, strict=False)
        if name in known
    ]
    if not pairs:
        return None
    width = min(min(len(one), len(other)) for one, other in pairs)
    one, other = (fold(torch.stack(rows), width).flatten() for rows in zip(*pairs, strict=True))
    return one, other


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


# ---------------------------------------------------------------- hypotheses


def not_finite(first: Finding, reference: Recording | None, actual: Recording) -> str | None:
    """NaN or infinity appears here first."""
    kind = "before" if first.step == 0 and first.kind == "parameters" else first.kind
    for title, recording in (("reference", reference), ("actual run", actual)):
        if recording is None or kind not in ("before", "gradients", "parameters", "buffers"):
            continue
        by_rank = recording.entries(max(1, first.step), kind).get(first.name, {})
        bad = [whole for whole in wholes(by_rank) if whole.not_finite]
        if bad:
            ranks = sorted({rank for whole in bad for rank in whole.ranks})
            return (
                f"the first value that is not finite in the {title} is in {first.kind} {first.name} of step "
                f"{first.step}, on {numbered('rank', ranks)}: {bad[0].not_finite} elements; everything before is finite"
            )
    return None


def samples_of_own(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Ranks that have the same samples in the reference have different ones here."""
    if first.kind not in ("inputs", "activations") or reference.world_size != actual.world_size:
        return None
    for replica in range(max(reference.replicas) + 1):
        together = [rank for rank, of_rank in enumerate(reference.replicas) if of_rank == replica]
        if len({actual.replicas[rank] for rank in together}) > 1:
            return (
                f"{numbered('rank', together)} have the same samples in the reference, and different ones here: samples "
                "chosen by the rank, not by the data-parallel replica"
            )
    return None


def other_samples(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """All ranks have the same batch, or it is that of another step."""
    if first.kind != "inputs":
        return None
    step = first.step

    def samples(recording: Recording, step: int) -> Counter:
        keys = keys_of(recording, step)
        return Counter(key for rank in recording.first_ranks for call in keys[rank] for key in call)

    expected, got = samples(reference, step), samples(actual, step)
    total, world = sum(expected.values()), actual.world_size
    if len(actual.first_ranks) == 1 < world and not got - expected:
        return (
            f"all {world} ranks have the same {sum(got.values())} of the reference's {total} samples: the same "
            "batch on every rank"
        )
    if got == expected + expected:
        return f"each of the {total} samples is there twice: the model ran twice in this step"
    broken = sum(count for key, count in got.items() if max(map(abs, key)) >= NOT_FINITE_KEY)
    if broken and not any(max(map(abs, key)) >= NOT_FINITE_KEY for key in expected):
        return f"{broken} of the {sum(got.values())} samples hold values that are not finite"
    twice = [key for key, count in got.items() if count > expected[key] > 0]
    if twice and expected - got and not got.keys() - expected.keys():
        return (
            f"{len(twice)} of the reference's {total} samples are on two ranks or more, and {len(expected - got)} on "
            "none: slices overlap"
        )
    for other in range(1, actual.steps + 1):
        if other != step and (
            samples(reference, other) == got or (other < step and samples(actual, other) == got)
        ):
            again = "again" if other < step else "too early"
            return f"the samples of step {step} are those of step {other}, {again}"
    if not expected & got:
        return f"none of the reference's {total} samples is there: shuffled by another seed, or other data"
    return None


def other_settings(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The optimizer has other settings in this step: its class, learning rate, momentum, weight decay."""
    step, name = first.step, first.name
    ours = rates_of(actual.of_step(step)[ranks[0] : ranks[0] + 1]).get(name)
    theirs = rates_of(reference.of_step(step)[:1]).get(name)
    if first.kind != "parameters" or not step or ours is None or theirs is None:
        return None
    where = f" on {numbered('rank', ranks)}" if len(ranks) < actual.world_size else ""
    if ours[0] != theirs[0]:
        return f"the optimizer of {name}{where} is {ours[0]}, the reference's {theirs[0]}"
    for key in theirs[1]:
        one, other = theirs[1][key], ours[1].get(key)
        if key in HOW or one == other:
            continue
        word = "learning rate" if key == "lr" else key.replace("_", " ")
        text = f"the {word} of {name}{where} is {shown(other)} in step {step}, the reference's {shown(one)}"
        return text + (reason_for_rate(one, other, first, reference, actual) if key == "lr" else "")
    return None


def reason_for_rate(
    expected: float, rate: float, first: Finding, reference: Recording, actual: Recording
) -> str:
    """Return why a learning rate may be another than expected, with a colon before it; nothing if unknown."""
    world = actual.world_size
    if world > 1 and abs(rate - world * expected) <= 1e-6 * abs(rate):
        return f": scaled by the world size {world}"
    for step in range(1, reference.steps + 1):
        settings = rates_of(reference.of_step(step)[:1]).get(first.name, ("", {}))[1]
        if step > first.step and settings.get("lr") == rate:
            return f": it is the reference's of step {step}, the scheduler is advanced more than once a step"
        if step < first.step and settings.get("lr") == rate:
            return f": it is the reference's of step {step}, the scheduler is not advanced"
    return ""


def shown(value: object) -> str:
    """Return a setting as it is written in a message."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def other_type(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """It is of a narrower type than in the reference."""
    found = re.match(r": its type is (bfloat16|float16), expected (float32|float64)", first.message)
    if not found:
        return None
    return (
        f"{first.kind} {first.name} is of type {found[1]}, the reference's of type {found[2]}: computed in "
        f"{found[1]}, such as under autocast"
    )


def pairs_of(
    first: Finding, ranks: list[int], reference: Recording, actual: Recording
) -> tuple[dict[int, dict], Whole, Whole] | None:
    """Return what each rank recorded of the first tensor, and it as a whole in the actual run and the reference."""
    kind = {"parameters": "parameters" if first.step else "before", "gradients": "gradients"}.get(first.kind)
    if kind is None:
        return None
    theirs = reference.entries(max(1, first.step), kind).get(first.name)
    ours = actual.entries(max(1, first.step), kind).get(first.name)
    if not theirs or not ours:
        return None
    own = next(whole for whole in wholes(ours) if ranks[0] in whole.ranks)
    return ours, own, wholes(theirs)[0]


def other_start(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Before training, the tensor or some of its shards hold other random values of the same spread."""
    pair = pairs_of(first, ranks, reference, actual) if first.step == 0 else None
    if pair is None:
        return None
    ours, own, expected = pair
    parts = [(ranks, own.sketch, expected.sketch)]
    if (of_shards := shards_of(first, ours, reference)) and len(own.ranks) > 1:
        parts = [([rank], *sketches) for rank, sketches in of_shards.items()]
    different, cosines = [], []
    for of_ranks, one, other in parts:
        if torch.equal(one, other):
            continue
        cosine = (one.dot(other) / (one.norm() * other.norm()).clamp(min=1e-300)).item()
        spread = (one.norm() / other.norm().clamp(min=1e-300)).item()
        # The cosine of two independent sketches is of the size of 1 / sqrt(their numbers).
        bound = min(0.5, 4 / min(expected.elements / len(parts), len(one)) ** 0.5)
        if abs(cosine) >= bound or not 0.8 < spread < 1.25:
            return None
        different += of_ranks
        cosines.append(cosine)
    if not different or expected.elements < 64:
        return None
    everyone = len(different) == actual.world_size and len(parts) == 1
    who = "every rank" if everyone else numbered("rank", different)
    if everyone:
        why = "another seed, or a broadcast from a rank that has one"
    else:
        why = "another seed there, and no broadcast"
    return (
        f"{who} start{'s' if everyone or len(different) == 1 else ''} from other values of {first.name} (correlation "
        f"{max(cosines, key=abs):.2f} with the expected, the same spread): {why}"
    )


def shards_of(
    first: Finding, ours: dict[int, dict], reference: Recording
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return by rank the sketch of its shard in both runs; nothing unless both cut the tensor alike."""
    kind = {"parameters": "parameters" if first.step else "before"}.get(first.kind, first.kind)
    theirs = reference.entries(max(1, first.step), kind)[first.name]
    layout = [
        {rank: (entry["mesh"], entry["ranks"], entry["placements"]) for rank, entry in run.items()}
        for run in (ours, theirs)
    ]
    if layout[0] != layout[1]:
        return {}
    return {rank: (ours[rank]["sketch"], theirs[rank]["sketch"]) for rank in ours}


def shards_scaled(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Each shard has a factor of its own."""
    pair = pairs_of(first, ranks, reference, actual) if first.step else None
    if pair is None or len(pair[1].ranks) < 2:
        return None
    factors, rest, difference = [], 0.0, 0.0
    for one, other in shards_of(first, pair[0], reference).values():
        if not other.any():
            return None
        factors.append(factor(one, other))
        rest += (one - factors[-1] * other).square().sum().item()
        difference += (one - other).square().sum().item()
    if not factors or max(factors) - min(factors) <= SAME_FACTOR or rest > MAX_UNEXPLAINED**2 * difference:
        return None
    return (
        f"each of the {len(factors)} shards of {first.kind} {first.name} is the reference's times a factor of its own, "
        f"{min(factors):.4g} to {max(factors):.4g}: scaled by a norm of the local shard"
    )


def shards(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """A shard is zero, all ranks have the same one, or the reference's values are in other places.

    Which values a shard holds, wherever they are, its counts by magnitude tell.
    """
    if (pair := pairs_of(first, ranks, reference, actual)) is None:
        return None
    ours, own, expected = pair
    what = f"{first.kind} {first.name}"
    parts = {rank: ours[rank] for rank in own.ranks}
    if len(parts) > 1:
        zero = [rank for rank, part in parts.items() if part["elements"] and not part["largest"]]
        if zero and len(zero) < len(parts) and expected.zeros < expected.elements / 2:
            return f"the shard of {what} on {numbered('rank', zero)} is zero: it was never filled"
        values = {values_of(part["largest"], part["magnitudes"], part["zeros"]) for part in parts.values()}
        if len(values) == 1 and own.elements >= 16 * len(parts):
            return (
                f"the {len(parts)} shards of {what} have as many values of each magnitude and the same largest one, "
                f"{own.largest:.6g}: every rank holds the same shard"
            )
    if expected.elements >= 64 and values_of(own.largest, own.magnitudes, own.zeros) == values_of(
        expected.largest, expected.magnitudes, expected.zeros
    ):
        return (
            f"{what} has as many values of each magnitude as the reference, and the same largest one, "
            f"{own.largest:.6g}, in other places: shards gathered or cut in the wrong order, or transposed"
        )
    return None


def values_of(largest: float, magnitudes: torch.Tensor, zeros: int) -> tuple:
    """Return what tells values, wherever they are."""
    return (largest, zeros, *magnitudes.tolist())


def narrow_values(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """All values are exact in bfloat16, and most of the reference's are not."""
    if (pair := pairs_of(first, ranks, reference, actual)) is None:
        return None
    _, own, expected = pair
    share = (expected.bfloat16_exact - expected.zeros) / max(1, expected.elements - expected.zeros)
    count = own.elements - own.zeros
    if own.dtype == torch.bfloat16 or count < 16 or own.bfloat16_exact < own.elements or share >= 0.5:
        return None
    return (
        f"{first.kind} {first.name}: all {count} values are exact in bfloat16, of the reference's {share:.1%}: computed "
        "or reduced in bfloat16"
    )


def sum_of_ranks(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The ranks of a replica have the same samples and each a part of the output."""
    key = (first.kind, first.name)
    if first.kind != "activations":
        return None
    replica = [rank for rank, number in enumerate(actual.replicas) if number == actual.replicas[ranks[0]]]
    pairs = [activation_pair(actual, reference, key, first.step, rank) for rank in replica]
    if len(replica) < 2 or None in pairs:
        return None
    total, expected = sum(one for one, _ in pairs), pairs[0][1]
    unexplained = ((total - expected).norm() / (pairs[0][0] - expected).norm()).item()
    if not unexplained <= MAX_UNEXPLAINED:
        return None
    return (
        f"{first.kind} {first.name}: the sum over the {len(replica)} tensor-parallel ranks is the reference but for "
        f"{unexplained:.0e} of the difference: not reduced"
    )


def loss_factor(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The loss is a known multiple of the reference's, exactly: a sum, a scale."""
    if first.kind != "losses":
        return None
    one, other = (losses_of(run, first.step, CONVENTIONS[0]) for run in (reference, actual))
    if not one or not other:
        return None
    ratio, known = other / one, []
    outputs = [entry["shape"] for entry in actual.of_step(first.step)[0]["activations"][-1:]]
    for shape in outputs:
        elements, samples = prod(shape), shape[0]
        known += [
            (elements, f"summed over the {elements} elements of the output instead of averaged"),
            (
                elements // shape[-1],
                f"summed over the {elements // shape[-1]} rows of the output instead of averaged",
            ),
            (samples, f"summed over the {samples} samples instead of averaged"),
        ]
    known += [(2.0**power, f"a loss scale of {2**power} that was not removed") for power in range(4, 33)]
    for value, text in known:
        if value > 1 and abs(ratio / value - 1) <= LOSS_EPS * 2.0**-23:
            return f"the loss is {ratio:.7g} times the reference's: {text}"
    return None


def weighted_equally(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Ranks have different numbers of samples, and their means count the same."""
    if first.kind != "losses":
        return None
    records, sizes, losses = actual.of_step(first.step), [], []
    for rank in actual.first_ranks:
        calls = [keys for keys in records[rank]["calls"] if keys is not None]
        if len(calls) != len(records[rank]["losses"]):
            return None
        sizes += map(len, calls)
        losses += records[rank]["losses"]
    expected = losses_of(reference, first.step, CONVENTIONS[0])
    if len(set(sizes)) < 2 or not expected:
        return None
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    if abs(mean / expected - 1) > LOSS_EPS * 2.0**-23:
        return None
    return (
        f"ranks or microbatches have uneven numbers of samples, {min(sizes)} to {max(sizes)}, and their losses count "
        f"the same: weighted by the samples the loss is {mean:.9g}, the reference's"
    )


def other_loss(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The outputs agree and the loss does not."""
    if first.kind != "losses" or not actual.of_step(first.step)[0]["activations"]:
        return None
    one, other = (losses_of(run, first.step, CONVENTIONS[0]) for run in (reference, actual))
    return (
        f"every activation agrees, and the loss is {other / one:.6g} times the reference's: the target or the loss "
        "function is another, or its mean is over something else (each rank's own tokens, not all)"
    )


RECORDED = [
    samples_of_own,
    other_samples,
    other_type,
    other_settings,
    shards,
    other_start,
    shards_scaled,
    narrow_values,
    sum_of_ranks,
    loss_factor,
    weighted_equally,
    other_loss,
]


def few_ranks(first: Finding, ranks: list[int], actual: Recording) -> str:
    """Most ranks have the right tensor. A mistake in the plan would show on all of them."""
    right = actual.world_size - len(ranks)
    return (
        f"{first.kind} {first.name} is wrong on {numbered('rank', ranks)} alone, and right on the other {right}: not "
        "the plan, but something that happened there"
    )
