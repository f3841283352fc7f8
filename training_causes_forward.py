"""Causes of a first difference in the initial parameters, the outputs or the losses.

Hypotheses, one function each, and their helpers. training_evidence.py says what a hypothesis is,
training_diagnosis.py in which order they are tried.
"""

import torch

from training_evidence import (
    MAX_UNEXPLAINED,
    SAME_FACTOR,
    Evidence,
    correlation,
    known_factor,
    times_the_reference,
    unrelated,
)
from training_records import ranges
from training_tolerance import factor, relative_error

MAX_UNEXPLAINED_BY_BATCH = 0.1  # for another step's batch: the parameters have changed since
ROW_ROUNDING = 1e-6  # norm of the difference of two right computations of an output, over its norm
SAME_LOSS = 1e-6  # relative difference of one loss, recorded twice
SAME_MEAN_LOSS = 1e-5  # relative difference of one mean, computed in two ways

# ---------------------------------------------------------------- before training


def separate(evidence: Evidence) -> str | None:
    """One run has a parameter that the other may have tied to one of the same shape."""
    tensors = {"actual": evidence.actual_tensor(), "reference": evidence.reference_tensor()}
    if evidence.reference is None or None not in tensors.values():
        return None
    run, tensor = next((run, tensor) for run, tensor in tensors.items() if tensor is not None)
    other = "reference" if run == "actual" else "actual"
    alike = [
        name
        for name in evidence.names("parameters")
        if name != evidence.name and evidence.actual_tensor(name=name).shape == tensor.shape
    ]
    return (
        f"{evidence.name} is a parameter of its own in the {run} run only: in the {other} run it may be tied "
        f"to {' or '.join(alike)}, of the same shape"
    )


def other_start(evidence: Evidence) -> str | None:
    """The whole tensor starts from other random values, on some ranks or on all."""
    correlations = []
    for rank in evidence.ranks:
        actual = evidence.actual_tensor(rank)
        expected = evidence.reference_tensor(rank) if evidence.reference else evidence.actual_tensor(0)
        if actual is None or expected is None or not unrelated(actual, expected):
            return None
        correlations.append(correlation(actual, expected))
    if len(evidence.ranks) == len(evidence.metadata):
        verb, why = "starts", "another seed, or a broadcast from a rank that has one"
    elif len(evidence.ranks) == 1:
        verb, why = "starts", "a seed of its own, and no broadcast"
    else:
        verb, why = "start", "seeds of their own, and no broadcast"
    return (
        f"{evidence.ranks_in_words} {verb} from other values of {evidence.name} (correlation "
        f"{max(correlations, key=abs):.2f} with the expected, the same spread): {why}"
    )


# ---------------------------------------------------------------- outputs: whole tensors


def other_step(evidence: Evidence) -> str | None:
    """The outputs are those of another step's batch."""
    pair = evidence.pair()
    if pair is None:
        return None
    actual, reference = pair
    unexplained = {}
    for step in range(1, len(evidence.actual(evidence.rank))):
        others = evidence.reference_tensor(step=step)
        if step != evidence.step and others is not None:
            unexplained[step] = evidence.unexplained(actual, others, reference)
    step = min(unexplained, key=unexplained.get, default=None)
    if step is None or unexplained[step] > MAX_UNEXPLAINED_BY_BATCH:
        return None
    if step < evidence.step:
        why = "an earlier batch is used again, such as a constant captured in a compiled graph"
    else:
        why = "batches are read ahead by one step too many"
    return (
        f"the outputs of step {evidence.step} are those of step {step}'s batch (they leave "
        f"{unexplained[step]:.1%} of the difference): {why}"
    )


def partial_sum(evidence: Evidence) -> str | None:
    """Tensor-parallel ranks hold terms of a sum that was never reduced."""
    pair, tp = evidence.pair(), evidence.metadata[0]["tp_degree"]
    if pair is None or tp == 1:
        return None
    actual, reference = pair
    replica = evidence.metadata[evidence.rank]["dp_rank"]
    terms = [
        evidence.actual_tensor(rank)
        for rank, metadata in enumerate(evidence.metadata)
        if metadata["dp_rank"] == replica
    ]
    if any(term is None or term.shape != actual.shape for term in terms):
        return None
    if all(torch.equal(term, actual) for term in terms):
        return None
    for name, bias in [("", 0.0), *biases(evidence)]:
        total = sum(terms) - (tp - 1) * bias
        if evidence.explained(actual, actual + reference - total, reference):
            with_bias = f" (with {name} in each of them)" if name else ""
            return (
                f"each tensor-parallel rank has its own outputs, and their sum over the {tp} ranks"
                f"{with_bias} is the reference: the output was not reduced"
            )
    return None


def bias_added_again(evidence: Evidence) -> str | None:
    """A bias is added several times, or it is scaled."""
    pair = evidence.pair()
    for name, bias in biases(evidence) if pair else []:
        actual, reference = pair
        times = factor(actual - reference, bias.expand_as(reference))
        if abs(times) > SAME_FACTOR and evidence.explained(actual, reference + times * bias, reference):
            is_count = abs(times - round(times)) <= 0.01 and times > -1.5
            how = f"it is added {times + 1:.0f} times" if is_count else "it is scaled"
            return f"the outputs differ from the reference by {times:.2f} times {name}, in every row: {how}"
    return None


def scaled_without_bias(evidence: Evidence) -> str | None:
    """Everything but the bias is scaled."""
    pair = evidence.pair()
    for name, bias in biases(evidence) if pair else []:
        actual, reference = pair
        scale = factor(actual - bias, reference - bias)
        if evidence.explained(actual, bias + scale * (reference - bias), reference):
            meaning = known_factor(evidence, scale) or "reduced or scaled wrongly before the bias is added"
            return f"apart from {name}, the outputs are {times_the_reference(scale)}: {meaning}"
    return None


def biases(evidence: Evidence) -> list[tuple[str, torch.Tensor]]:
    """Return name and value of the parameters that may be added to each row of the output.

    Their values are those of the reference before the step, with which the forward pass computed.
    """
    width, found = evidence.reference_tensor().shape[-1:], []
    for kind, name in evidence.reference(evidence.rank)[evidence.step - 1]:
        if kind == "parameters":
            value = evidence.reference_tensor(kind=kind, name=name, step=evidence.step - 1)
            if value.shape == width and value.numel() > 1 and value.std() > 0:
                found.append((name, value))
    return found


# ---------------------------------------------------------------- outputs: rows and elements


def samples_by_replica(evidence: Evidence) -> list[int]:
    """Return how many samples each replica has, as its output tells; empty if one has no output."""
    outputs = [evidence.actual_tensor(rank, kind="outputs", name="output") for rank in evidence.replicas()]
    if any(output is None or not output.dim() for output in outputs):
        return []
    return [len(output) for output in outputs]


def uneven_slices(evidence: Evidence) -> str | None:
    """Replicas have different numbers of samples."""
    rows = samples_by_replica(evidence)
    if len(set(rows)) <= 1:
        return None
    return (
        f"the replicas have {min(rows)} to {max(rows)} samples (replica 0 has {rows[0]}): the slices are "
        "uneven, and a mean over replicas weighs them equally"
    )


def same_samples(evidence: Evidence) -> str | None:
    """Other replicas have the outputs of replica 0."""
    outputs = [evidence.actual_tensor(rank) for rank in evidence.replicas()]
    if any(output is None or not output.dim() for output in outputs):
        return None
    same = [replica for replica in range(1, len(outputs)) if torch.equal(outputs[replica], outputs[0])]
    if not same:
        return None
    return f"the outputs of replica 0 are also those of replica {ranges(same)}: they got the same samples"


def other_samples(evidence: Evidence) -> str | None:
    """Replicas have the outputs of other rows of the batch than their own."""
    shifts = row_shifts(evidence)
    if not any(shifts):
        return None
    rows = len(evidence.reference_tensor())
    if any(shift % rows for shift in shifts):
        replica, shift = next((replica, shift) for replica, shift in enumerate(shifts) if shift)
        start, last = replica * rows, replica * rows + rows - 1
        return (
            f"the outputs of replica {replica} are those of rows {start + shift} to {last + shift} of the "
            f"batch, expected {start} to {last}: its slice is shifted by {shift}, slices overlap"
        )
    slices = [replica + shift // rows for replica, shift in enumerate(shifts)]
    if len(set(slices)) == 1:
        return f"every replica's outputs are those of slice {slices[0]} of the batch: all got the same slice"
    return f"the outputs of the replicas are those of slices {slices}: slices are given to the wrong ranks"


def row_shifts(evidence: Evidence) -> list[int]:
    """Return for each replica by how many rows its outputs are shifted in the batch.

    The reference's outputs say which row of the batch gives which output. Empty if they do not contain
    the outputs of each replica that is wrong.
    """
    pairs = [evidence.pair(rank) for rank in evidence.replicas()]
    if len(pairs) == 1 or None in pairs or not pairs[0][1].dim():
        return []
    if any(reference.shape != pairs[0][1].shape for _, reference in pairs):
        return []
    batch = torch.cat([one_row_a_sample(reference) for _, reference in pairs])
    rows = len(pairs[0][1])
    shifts = []  # by replica: all that fit, the smallest first
    for replica, rank in enumerate(evidence.replicas()):
        if rank not in evidence.ranks:
            shifts.append([0])
            continue
        actual, reference = map(one_row_a_sample, pairs[replica])
        near = (MAX_UNEXPLAINED * (actual - reference).norm() + ROW_ROUNDING * reference.norm()) / rows**0.5
        same = torch.cdist(actual, batch) <= near
        fitting = [shift for shift in range(-len(batch), len(batch)) if fits(same, replica * rows + shift)]
        shifts.append(sorted(fitting, key=abs))
    # Rows may repeat in the data. If shifts by whole slices explain all replicas, these are meant.
    whole_slices = [[shift for shift in fitting if shift % rows == 0] for fitting in shifts]
    if all(whole_slices):
        shifts = whole_slices
    return [fitting[0] for fitting in shifts] if all(shifts) else []


def fits(same: torch.Tensor, start: int) -> bool:
    """Say whether a replica's outputs are those of the batch's rows from `start` on.

    same: for each row of the replica and each of the batch, whether they are the same. Rows before or
    behind the batch cannot be compared; at least half of the replica's must lie within.
    """
    rows = torch.arange(start, start + len(same))
    inside = (rows >= 0) & (rows < same.shape[1])
    if inside.sum() * 2 < len(rows):
        return False
    return bool(same[torch.arange(len(rows))[inside], rows[inside]].all())


def one_row_a_sample(output: torch.Tensor) -> torch.Tensor:
    """Return an output as a matrix with one row for each sample."""
    return output.reshape(len(output), -1)


def dropped(evidence: Evidence) -> str | None:
    """Elements are zero at random, the rest are scaled up: dropout on the output."""
    pair = evidence.pair()
    if pair is None:
        return None
    actual, reference = pair
    kept = actual != 0
    share = (~kept & (reference != 0)).double().mean().item()
    if not 0 < share < 1:
        return None
    scale = factor(actual[kept], reference[kept])
    makes_up_for_zeros = abs(scale * (1 - share) - 1) <= 0.05
    if not makes_up_for_zeros or not evidence.explained(actual, scale * reference * kept, reference):
        return None
    return f"{share:.1%} of the outputs are zero and the rest {scale:.3f}x the reference: dropout is on"


def returned_others(evidence: Evidence) -> str | None:
    """All gradients agree, so what was trained on does, too."""
    if evidence.pair() is None or not gradients_agree(evidence):
        return None
    return (
        f"the outputs differ, but all gradients of step {evidence.step} agree: other outputs are returned "
        "than those that were trained on, such as one microbatch's of several, or they were changed later"
    )


# ---------------------------------------------------------------- losses


def own_losses_reported(evidence: Evidence) -> str | None:
    """Each rank reports its own loss as the global one."""
    own_losses = evidence.own_losses()
    reported = [losses[evidence.step - 1] for losses in evidence.losses]
    if own_losses is None or None in [global_loss for global_loss, _ in reported]:
        return None
    lowest, highest = min(own_losses.values()), max(own_losses.values())
    if lowest == highest or not all(abs(loss - own) <= SAME_LOSS * abs(own) for loss, own in reported):
        return None
    mean, expected = sum(own_losses.values()) / len(own_losses), evidence.reference_tensor()
    if expected is not None and not abs(mean - expected.item()) <= SAME_MEAN_LOSS * abs(mean):
        return None
    known = "" if expected is None else ", which is the reference"
    return (
        f"the losses are each replica's own, {lowest:.6g} to {highest:.6g}: they were not averaged over the "
        f"{len(own_losses)} replicas (their mean is {mean:.6g}{known})"
    )


def averaged_wrongly(evidence: Evidence) -> str | None:
    """The replicas' own losses are right, the global loss is not their mean."""
    pair, own_losses = evidence.pair(), evidence.own_losses()
    if pair is None or own_losses is None:
        return None
    loss, reference = (tensor.item() for tensor in pair)
    mean = sum(own_losses.values()) / len(own_losses)
    if not abs(mean - reference) <= SAME_MEAN_LOSS * abs(reference):
        return None
    return (
        f"the mean of the {len(own_losses)} replicas' own losses is the reference, {mean:.6g}, but on "
        f"{evidence.ranks_in_words} the global loss is {loss:.6g}: averaged over other ranks, or changed "
        "later"
    )


def gradients_agree(evidence: Evidence) -> bool:
    """Say whether all gradients of the step agree, far better than the loss or the output that differs."""
    error = relative_error(*evidence.pair())
    pairs = [evidence.pair(kind="gradients", name=name) for name in evidence.names("gradients")]
    return bool(pairs) and all(pair and relative_error(*pair) < 0.01 * error for pair in pairs)


def mean_of_means(evidence: Evidence) -> str | None:
    """Replicas have other numbers of samples, and the global loss weighs them equally."""
    pair, own_losses, rows = evidence.pair(), evidence.own_losses(), samples_by_replica(evidence)
    if pair is None or own_losses is None or len(set(rows)) <= 1:
        return None
    weighted = sum(count * own_losses[replica] for replica, count in enumerate(rows)) / sum(rows)
    if not abs(weighted - pair[1].item()) <= SAME_MEAN_LOSS * abs(weighted):
        return None
    text = (
        f"mean of the replicas' means: they have {', '.join(map(str, rows))} samples, and weighted by these "
        f"their losses give the reference, {weighted:.6g}"
    )
    if gradients_agree(evidence):
        text += "; all gradients agree, so it is only the loss that is reported"
    return text


def other_target(evidence: Evidence) -> str | None:
    """The outputs agree, the loss does not."""
    losses, outputs = evidence.pair(), evidence.pair(kind="outputs", name="output")
    if losses is None or outputs is None:
        return None
    loss_error, output_error = relative_error(*losses), relative_error(*outputs)
    if not output_error < 0.01 * loss_error:
        return None
    if gradients_agree(evidence):
        return (
            f"the loss is off by {loss_error:.2%}, but the outputs and all gradients agree: another loss is "
            "reported than the one of backward, such as a mean that weighs the ranks' tokens otherwise"
        )
    return (
        f"the outputs agree to {output_error:.1e}, but the loss is off by {loss_error:.2%}: the target, or "
        "the loss function, is another"
    )


# ---------------------------------------------------------------- what several kinds may come from


def weighs_replicas_equally(evidence: Evidence) -> str | None:
    """Nothing else explains the gradients, and replicas have other numbers of samples."""
    rows = samples_by_replica(evidence)
    if evidence.reference is None or len(set(rows)) <= 1:
        return None
    return (
        f"no factor explains it, but the replicas have {', '.join(map(str, rows))} samples: is each loss "
        "scaled by its share of these? A mean over the replicas weighs their gradients equally"
    )
