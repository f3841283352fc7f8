"""Causes in what a recording has sample by sample: the samples, activations, the loss.

A hypothesis is a function of the first finding, the ranks that show it, and the two recordings. It returns
its cause in words, or None. training_recorded_diagnosis.py says in which order they are tried.
"""

import re
from collections import Counter
from math import prod

import torch

from training_evidence import MAX_UNEXPLAINED, numbered
from training_recorded_runs import CONVENTIONS, Recording, choose_conventions, compared_losses, unit_of
from training_recorded_samples import activations_of, keys_of, matched_keys
from training_records import Finding
from training_sketches import NOT_FINITE_KEY, fold

LOSS_ROUNDING = 0.25  # relative difference in eps of the run that rounding may make in a loss; 0.15 was seen
LOSS_EPS = 64  # relative difference in eps of float32 up to which two losses are the same number


def activation_pair(
    actual: Recording, reference: Recording, key: tuple[str, str], step: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return an activation of a rank's samples in both runs, side by side, None if none is in both."""
    of_theirs, of_ours, _ = matched_keys(reference, actual, step)
    ours = activations_of(actual, step, of_ours).get(key, [])
    theirs = activations_of(reference, step, of_theirs).get(key, [])
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


def samples_of_own(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Ranks that have the same samples in the reference have different ones here."""
    if first.kind not in ("inputs", "activations") or reference.world_size != actual.world_size:
        return None
    for replica in range(max(reference.replicas) + 1):
        together = [rank for rank, of_rank in enumerate(reference.replicas) if of_rank == replica]
        if len({actual.replicas[rank] for rank in together}) > 1:
            return (
                f"{numbered('rank', together)} have the same samples in the reference, and different ones "
                "here: samples chosen by the rank, not by the data-parallel replica"
            )
    return None


def other_samples(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """All ranks have the same batch, or it is that of another step."""
    if first.kind != "inputs":
        return None
    step = first.step
    expected, got = samples_of(reference, step), samples_of(actual, step)
    total, world = sum(expected.values()), actual.world_size
    if len(actual.first_ranks) == 1 < world and not got - expected:
        return (
            f"all {world} ranks have the same {sum(got.values())} of the reference's {total} samples: the "
            "same batch on every rank"
        )
    if got == expected + expected:
        return f"each of the {total} samples is there twice: the model ran twice in this step"
    broken = sum(count for key, count in got.items() if max(map(abs, key)) >= NOT_FINITE_KEY)
    if broken and not any(max(map(abs, key)) >= NOT_FINITE_KEY for key in expected):
        return f"{broken} of the {sum(got.values())} samples hold values that are not finite"
    twice = [key for key, count in got.items() if count > expected[key] > 0]
    if twice and expected - got and not got.keys() - expected.keys():
        return (
            f"{len(twice)} of the reference's {total} samples are on two ranks or more, and "
            f"{len(expected - got)} on none: slices overlap"
        )
    if cause := samples_of_another_step(step, reference, actual):
        return cause
    keys = keys_of(actual, step)
    strangers = [
        rank for rank in actual.first_ranks if not any(key in expected for call in keys[rank] for key in call)
    ]
    if strangers and len(strangers) < len(actual.first_ranks):
        return (
            f"{numbered('rank', strangers)} {'have' if len(strangers) > 1 else 'has'} none of the "
            f"reference's {total} samples, the other ranks do: each rank draws samples with a seed of its own"
        )
    if not expected & got:
        return f"none of the reference's {total} samples is there: shuffled by another seed, or other data"
    return None


def samples_of(recording: Recording, step: int) -> Counter:
    """Return how often a step has each sample, by its key. The ranks of a replica count once."""
    keys = keys_of(recording, step)
    return Counter(key for rank in recording.first_ranks for call in keys[rank] for key in call)


def samples_of_another_step(step: int, reference: Recording, actual: Recording) -> str | None:
    """The samples are those of an earlier step, of either run, or of a later one of the reference."""

    def again(step: int, other: int) -> bool:
        return samples_of(actual, step) in (samples_of(reference, other), samples_of(actual, other))

    for other in range(1, step):
        if again(step, other):
            if other + 1 < step < actual.steps and again(step + 1, other + 1):
                return (
                    f"the samples of steps {step} and {step + 1} are those of steps {other} and {other + 1}, "
                    "again: the epoch before in the same order, such as without set_epoch"
                )
            return f"the samples of step {step} are those of step {other}, again"
    for other in range(step + 1, actual.steps + 1):
        if samples_of(reference, other) == samples_of(actual, step):
            return f"the samples of step {step} are those of step {other}, too early"
    return None


def other_type(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """It is of a narrower type than in the reference."""
    found = re.match(r": its type is (bfloat16|float16), expected (float32|float64)", first.message)
    if not found:
        return None
    return (
        f"{first.kind} {first.name} is of type {found[1]}, the reference's of type {found[2]}: computed in "
        f"{found[1]}, such as under autocast"
    )


def batch_statistics(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """A batch norm is in evaluation mode, or computes its statistics over other numbers of samples."""
    counter = f"{first.name}.num_batches_tracked"
    if first.kind != "activations" or f"{first.name}.running_mean" not in actual.tensors(1, "buffers"):
        return None
    grows = []
    for run in (reference, actual):
        before, after = (run.tensors(first.step, kind).get(counter) for kind in ("buffers_before", "buffers"))
        grows.append(before and after and after[0].largest > before[0].largest)
    if grows == [True, False]:
        return (
            f"{first.name} is in evaluation mode: it has not counted this step's batches, the reference has"
        )
    calls = [run.of_step(first.step)[0]["calls"] for run in (reference, actual)]
    sizes = [len(of[0]) if of and of[0] is not None else None for of in calls]
    if None in sizes or sizes[0] == sizes[1]:
        return None
    return (
        f"{first.name} is a batch norm, which normalizes by the samples of one call: {sizes[1]} here, "
        f"{sizes[0]} in the reference. That is another computation. Compare with a run of as many ranks, or "
        "one that calls the model with each rank's samples in turn"
    )


def dropout(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The module drops values at random, and everything before it agrees."""
    if first.kind != "activations":
        return None
    name = first.name.partition(" call ")[0]
    shares = [run.metadata.get("dropout", {}).get(name, 0.0) for run in (reference, actual)]
    if shares[0] != shares[1]:
        return f"dropout: {name} drops {shares[1]:g} of its values, the reference's {shares[0]:g}"
    if not shares[0]:
        return None
    return (
        f"dropout: {name} drops {shares[0]:g} of its values at random, and each plan and device draws "
        "others. Nothing after it can be compared: record both runs without dropout"
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
        f"{first.kind} {first.name}: the sum over the {len(replica)} tensor-parallel ranks is the reference "
        f"but for {unexplained:.0e} of the difference: not reduced"
    )


def loss_factor(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The loss is a known multiple of the reference's, exactly: a sum, a scale."""
    one, other = compared_losses(reference, actual, first.step) if first.kind == "losses" else (None, None)
    if not one or not other:
        return None
    record = actual.of_step(first.step)[actual.first_ranks[0]]
    known = []
    for entry in record["activations"][-1:]:
        shape = entry["shape"]
        counts = {prod(shape): "elements of the output", prod(shape[:-1]): "rows of it", shape[0]: "samples"}
        known = [(count, f"summed over {count} {what} instead of averaged") for count, what in counts.items()]
    known += [(2.0**power, f"a loss scale of {2**power} that was not removed") for power in range(4, 33)]
    readings = []
    ways = {1: ""}
    if (microbatches := len(record["losses"])) > 1:
        ways[microbatches] = f", then divided by the {microbatches} microbatches"
    for factor, divided in ways.items():
        for value, text in known:
            if value > 1 and abs(other / one * factor / value - 1) <= LOSS_EPS * 2.0**-23:
                readings.append(text + divided)
    return (
        f"the loss is {other / one:.7g} times the reference's: {', or '.join(readings)}" if readings else None
    )


def weighted_equally(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """Ranks or microbatches have different numbers of labels or samples, and their means count the same.

    In a narrow type the loss may differ too little to fail, and the gradients show it first. Then the weights
    have to explain most of a difference that is larger than rounding's.
    """
    if first.kind not in ("losses", "gradients"):
        return None
    expected, plain = compared_losses(reference, actual, first.step)
    records = [actual.of_step(first.step)[rank] for rank in actual.first_ranks]
    over_microbatches, over_replicas = choose_conventions(reference, actual)[1]
    times = {"mean": 1.0, "sum": len(records), "share": 1 / len(records)}[over_replicas]
    # Each as the script would have it alone: their mean is the loss that is compared.
    losses = [
        loss * times * (len(record["losses"]) if over_microbatches == "sum" else 1)
        for record in records
        for loss in record["losses"]
    ]
    labels = [count for record in records for count in record["labels"]]
    samples = [len(keys) for record in records for keys in record["calls"] if keys is not None]
    exact = LOSS_EPS * 2.0**-23
    least = max(exact, LOSS_ROUNDING * unit_of(reference, actual))
    for what, sizes in (("valid labels", labels), ("samples", samples)):
        if not expected or len(sizes) != len(losses) or len(set(sizes)) < 2 or not all(sizes):
            continue
        mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
        off, rest = abs(plain / expected - 1), abs(mean / expected - 1)
        if (first.kind == "losses" or off > least) and rest <= max(exact, MAX_UNEXPLAINED * off):
            listed = ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")
            return (
                f"a mean of means: ranks or microbatches have {listed} of {sum(sizes)} {what}, and count the "
                f"same: the loss is {plain:.9g}; weighted by these it is {mean:.9g}, the reference's "
                f"{expected:.9g}"
            )
    return None


def other_loss(first: Finding, ranks: list[int], reference: Recording, actual: Recording) -> str | None:
    """The outputs agree and the loss does not."""
    names = [
        {entry["name"] for entry in run.of_step(first.step)[0]["activations"]} for run in (reference, actual)
    ]
    if first.kind != "losses" or not names[0] & names[1]:
        return None
    one, other = compared_losses(reference, actual, first.step)
    *keys, _ = matched_keys(reference, actual, first.step)
    theirs, ours = ({key for of_rank in run for call in of_rank for key in call} for run in keys)
    text = "every activation agrees, and " if theirs & ours else ""
    text += f"the loss is {other / one:.6g} times the reference's"
    microbatches = len(actual.of_step(first.step)[actual.first_ranks[0]]["losses"])
    if microbatches > 1 and choose_conventions(reference, actual)[1] == CONVENTIONS[0]:
        text += f" ({other / one * microbatches:.6g} times if its {microbatches} microbatches' are summed)"
    return (
        f"{text}: the target or the loss function is another, or scaled, or its mean is over something else "
        "(each rank's own tokens, not all)"
    )
