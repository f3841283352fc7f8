"""Causes in the tensors of a recording, which ranks have in shards: parameters, gradients, buffers, settings.

A hypothesis is a function of the first finding, the ranks that show it, and the two recordings. It returns
its cause in words, or None. training_recorded_diagnosis.py says in which order they are tried.
"""

import torch

from training_evidence import MAX_UNEXPLAINED, SAME_FACTOR, numbered
from training_recorded_runs import Recording, Whole, other_setting, rates_of, shown, wholes
from training_records import Finding
from training_tolerance import factor, largest_step


def not_finite(first: Finding, reference: Recording | None, actual: Recording) -> str | None:
    """NaN or infinity appears here first."""
    kind = "before" if first.step == 0 and first.kind == "parameters" else first.kind
    for title, recording in (("reference", reference), ("actual run", actual)):
        if recording is None or kind not in ("before", "gradients", "parameters", "buffers"):
            continue
        copies = recording.tensors(max(1, first.step), kind).get(first.name, [])
        bad = [whole for whole in copies if whole.not_finite]
        if bad:
            ranks = sorted({rank for whole in bad for rank in whole.ranks})
            return (
                f"the first value that is not finite in the {title} is in {first.kind} {first.name} of step "
                f"{first.step}, on {numbered('rank', ranks)}: {bad[0].not_finite} elements; everything "
                "before is finite"
            )
    return None


def tied(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Two names are one tensor in one run, and two tensors in the other."""
    one, other = (set(run.metadata["tied"].get(first.name, ())) for run in (reference, actual))
    if first.kind != "parameters" or first.step or one == other:
        return None
    names = f"{first.name} and {', '.join(sorted(one ^ other))}"
    if one - other:
        return f"{names} are tied in the reference, separate here, such as after to_empty() or a copy"
    return f"{names} are tied here, separate in the reference"


def not_initialized(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Before training a tensor is of another size altogether."""
    if first.step or first.kind not in ("parameters", "buffers"):
        return None
    theirs, ours = (
        run.start if first.kind == "parameters" else run.tensors(1, "buffers_before")
        for run in (reference, actual)
    )
    own = next(whole for whole in ours[first.name] if ranks[0] in whole.ranks)
    expected = theirs[first.name][0].norm
    if not own.norm or not expected:
        return None
    ratio = own.norm / expected
    if 1e-3 < ratio < 1e3:
        return None
    right = [rank for rank in range(actual.world_size) if rank not in ranks]
    where = f", and right on {numbered('rank', right)}" if right else ""
    return (
        f"the norm of {first.kind} {first.name} on {numbered('rank', ranks)} is {ratio:.2g} times the "
        f"reference's{where}: not initialized there, such as after to_empty()"
    )


def in_no_optimizer(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The optimizer does not hold the parameter."""
    if first.kind not in ("gradients", "parameters") or not first.step:
        return None
    theirs, ours = (rates_of(run.of_step(first.step)[:1]).keys() for run in (reference, actual))
    missing = sorted(theirs - ours)
    if first.name not in missing:
        return None
    strange = sorted(ours - actual.start.keys() | ours - theirs)
    other = f"; it holds {', '.join(strange[:3])}, which the reference's does not" if strange else ""
    return (
        f"no optimizer holds {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
        f"({len(missing)} of {len(theirs)} parameters): not updated by the optimizer{other}"
    )


def no_gradient(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """A parameter has no gradient, though the script trains it, or because it does not."""
    entries = actual.of_step(max(1, first.step))[ranks[0]]
    if first.kind != "gradients" or first.name in entries["gradients"]:
        return None
    trains = entries["before"].get(first.name, {}).get("requires_grad")
    if trains is None:
        return None
    without = sorted(reference.tensors(first.step, "gradients").keys() - entries["gradients"].keys())
    text = f"no gradient of {', '.join(without[:3])}{', ...' if len(without) > 3 else ''} on "
    text += f"{numbered('rank', ranks)} in step {first.step}: "
    if not trains:
        return f"{text}frozen (requires_grad is False)"
    return (
        f"{text}requires_grad is True, so they are not used, or cut off (detach, no_grad, a reentrant "
        "checkpoint whose inputs need no gradient), or FSDP2's set_requires_gradient_sync is off"
    )


def other_settings(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The optimizer has other settings in this step: its class, learning rate, momentum, weight decay."""
    step, name = first.step, first.name
    if first.kind != "parameters" or not step:
        return None
    theirs = rates_of(reference.of_step(step)[:1]).get(name)
    by_rank = {rank: rates_of(actual.of_step(step)[rank : rank + 1]).get(name) for rank in ranks}
    if theirs is None or None in by_rank.values():
        return None
    settings = {rank: other_setting(theirs, own) for rank, own in by_rank.items()}
    # A shard with another rate makes the tensor wrong on all ranks.
    others = [rank for rank, own in by_rank.items() if own[0] != theirs[0] or settings[rank]]
    if not others:
        return None
    where = f" on {numbered('rank', others)}" if len(others) < actual.world_size else ""
    if (optimizer := by_rank[others[0]][0]) != theirs[0]:
        return f"the optimizer of {name}{where} is {optimizer}, the reference's {theirs[0]}"
    word, one, other = settings[others[0]]
    text = f"the {word} of {name}{where} is {shown(other)} in step {step}, the reference's {shown(one)}"
    return text + (reason_for_rate(one, other, first, reference, actual) if word == "learning rate" else "")


def other_state(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """In step 1 the optimizer has no momentum or moments yet, the reference's has them from before.

    Not the other way round: any wrong update is none of a first step.
    """
    if (first.kind, first.step) != ("parameters", 1):
        return None
    if begins_without_state(reference) is not False or not begins_without_state(actual):
        return None
    return (
        "the optimizer begins without momentum or moments, the reference's has those of earlier steps: its "
        "state was not loaded from the checkpoint, or was made anew"
    )


def begins_without_state(run: Recording) -> bool | None:
    """Say whether an optimizer's first recorded update is one without a state; None if it does not show.

    SGD with momentum then takes the gradient alone: what is left of the update without it is at most 1 %.
    Adam and its kind then move every element by the rate: the norm is that of as many rates, but for the
    sketches' error (1.00 to 1.07 measured). With the state of five steps it was 0.39 to 0.52 times that.
    """
    update = left = expected = 0.0
    for name, (optimizer, group) in rates_of(run.of_step(1)[:1]).items():
        found = [run.tensors(1, kind).get(name) for kind in ("before", "parameters", "gradients")]
        if None in found:
            continue
        (before, *_), (after, *_), (gradient, *_) = found
        rate, decay = float(group.get("lr", 0.0)), group.get("weight_decay", 0.0)
        moved = after.sketch - before.sketch
        if optimizer == "SGD":
            if not group.get("momentum"):
                continue
            step = (gradient.sketch + decay * before.sketch) * (
                1 + group["momentum"] * bool(group["nesterov"])
            )
            left += (moved + rate * step).square().sum().item()
        elif optimizer in ("Adam", "AdamW", "Adagrad", "RMSprop"):
            if optimizer == "AdamW":
                moved = moved + rate * decay * before.sketch
            size = rate * largest_step(optimizer, group.get("alpha", 0.99))
            expected += size**2 * (gradient.elements - gradient.zeros)
        else:
            return None
        update += moved.square().sum().item()
    if not update or bool(expected) == bool(left):  # no such optimizer, or two kinds
        return None
    share = (update / expected if expected else left / update) ** 0.5
    without = 0.85 <= share <= 1.2 if expected else share <= 0.01
    having = share <= 0.6 if expected else share >= 0.1
    return without if without or having else None


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


def pairs_of(
    first: Finding, ranks: list[int], reference: Recording, actual: Recording
) -> tuple[dict[int, dict], Whole, Whole] | None:
    """Return what each rank recorded of the first tensor, and it as a whole in both runs."""
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
        f"{who} start{'s' if everyone or len(different) == 1 else ''} from other values of {first.name} "
        f"(correlation {max(cosines, key=abs):.2f} with the expected, the same spread): {why}"
    )


def clipping(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Gradients are clipped in one run only, to another norm, after the step, or by the norm of a shard."""
    if first.kind != "gradients":
        return None
    theirs, ours = (clipped_to(run, first.step) for run in (reference, actual))
    if theirs == ours:
        return None
    if theirs is None:
        return f"clip_grad_norm_ clips the gradients to {ours:.3g}, the reference's are not clipped"
    norm = total_norm(actual, first.step)
    has = f"the gradients have a norm of {norm:.3g}, and the reference clips them to {theirs:.3g}"
    if any(call["after_step"] for call in actual.of_step(first.step)[0]["clips"]):
        return f"{has}: here clip_grad_norm_ is called after the optimizer's step"
    if ours is not None:
        return f"clip_grad_norm_ clips the gradients to {ours:.3g}, the reference's to {theirs:.3g}"
    if norm < 1.1 * theirs:
        return None
    text = f"{has}: here clip_grad_norm_ is not called"
    gradients = actual.tensors(first.step, "gradients")
    shards = len(next(iter(gradients.values()))[0].ranks)
    if shards > 1 and abs(norm / theirs / shards**0.5 - 1) < 0.15:
        text += (
            f", or each of {shards} ranks clips by the norm of its own shards (times the root of {shards})"
        )
    return text


def clipped_to(recording: Recording, step: int) -> float | None:
    """Return the norm to which a step's gradients are clipped before the optimizer's step."""
    norm, calls = total_norm(recording, step), recording.of_step(step)[0]["clips"]
    # A call that changes nothing only tells the norm. If it does, the norm is what it clips to.
    before = [call["max_norm"] for call in calls if not call["after_step"]]
    return min((most for most in before if most < 1.1 * norm), default=None)


def total_norm(recording: Recording, step: int) -> float:
    """Return the norm of all gradients of a step together, as sketches estimate it."""
    copies = recording.tensors(step, "gradients").values()
    return sum(max(copy.norm for copy in of_tensor) ** 2 for of_tensor in copies) ** 0.5


def reduced_in(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """FSDP2 reduces the gradient in another type."""
    one, other = (run.metadata["reduced_in"].get(first.name) for run in (reference, actual))
    if first.kind != "gradients" or None in (one, other) or one == other:
        return None
    return (
        f"gradients {first.name} are reduced in {other}, the reference's in {one}: MixedPrecisionPolicy has "
        "another reduce_dtype"
    )


def last_microbatch(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The gradients of earlier microbatches were gone when the last backward of a step began."""
    if first.kind != "gradients":
        return None
    ours, theirs = (run.tensors(first.step, "gradients") for run in (actual, reference))
    if any(
        (ours[name][0].sketch - theirs[name][0].sketch).norm() <= 1e-3 * theirs[name][0].norm
        for name in ours.keys() & theirs.keys()
        if theirs[name][0].norm
    ):
        return None  # those of the others arrive
    for step in range(2, actual.steps + 1):  # in the first one it is not known what is trained
        held = [record["held"] for record in actual.of_step(step)]
        expected = [record["held"] for record in reference.of_step(step)]
        if not all(held) or any(of_rank[-1] for of_rank in held):
            return None
        if all(of_rank and of_rank[-1] for of_rank in expected):
            return (
                f"those of the last microbatch alone: when the last of {len(held[0]) + 1} backwards began, "
                f"no parameter had a gradient from those before; in the reference {expected[0][-1]} had one "
                f"(in step {step}: which parameters are trained is known after step 1)"
            )
    return None


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
        f"each of the {len(factors)} shards of {first.kind} {first.name} is the reference's times a factor "
        f"of its own, {min(factors):.4g} to {max(factors):.4g}: scaled by a norm of the local shard"
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
                f"the {len(parts)} shards of {what} have as many values of each magnitude and the same "
                f"largest one, {own.largest:.6g}: every rank holds the same shard"
            )
    elsewhere = (own.sketch - expected.sketch).norm() > 0.1 * expected.sketch.norm()  # not by rounding
    if (
        elsewhere
        and expected.elements >= 64
        and values_of(own.largest, own.magnitudes, own.zeros)
        == values_of(expected.largest, expected.magnitudes, expected.zeros)
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
        f"{first.kind} {first.name}: all {count} values are exact in bfloat16, of the reference's "
        f"{share:.1%}: computed or reduced in bfloat16"
    )


def few_ranks(first: Finding, ranks: list[int], actual: Recording) -> str:
    """Half the ranks or more have the right tensor. A mistake in the plan would show on all of them."""
    right = actual.world_size - len(ranks)
    why = "not the plan, but something that happened there"
    if right <= len(ranks):
        why = "something that happened there"
    if not first.step:
        why = "not initialized, or not broadcast"
    return (
        f"{first.kind} {first.name} is wrong on {numbered('rank', ranks)} alone, and right on the other "
        f"{right}: {why}"
    )
