"""Causes that any tensor may show: not finite, a factor, shards in the wrong place, a narrower type.

Hypotheses, one function each, and their helpers. training_evidence.py says what a hypothesis is,
training_diagnosis.py in which order they are tried.
"""

from collections.abc import Iterator
from math import hypot, inf
from typing import NamedTuple

import torch

from training_evidence import (
    MAX_UNEXPLAINED,
    ROUNDING_EPS,
    SAME_FACTOR,
    Evidence,
    correlation,
    known_factor,
    numbered,
    times_the_reference,
    unrelated,
)
from training_tolerance import NEGLIGIBLE, factor

NARROW_TYPES = (torch.bfloat16, torch.float16)

# ---------------------------------------------------------------- whole tensors


def rounding(evidence: Evidence) -> str | None:
    """The difference is so small that rounding explains it.

    This comes first: any other prediction would also be within rounding of such a difference.
    """
    for rank in evidence.ranks:
        pair = evidence.pair(rank)
        if pair is None:
            return None
        actual, reference = pair
        allowed = ROUNDING_EPS * reference
        if evidence.kind == "deltas":
            # A delta has the rounding of its parameter: measured on clean runs, 0.24 eps of it.
            allowed = evidence.reference_tensor(rank, kind="parameters")
        if allowed is None or not (actual - reference).norm() <= evidence.eps() * allowed.norm() < inf:
            return None
    return "rounding: the runs differ by no more than two right computations do, the tolerance is tighter"


def scaled_by_own_factors(evidence: Evidence) -> str | None:
    """Each rank has a factor of its own."""
    factors = factors_by_rank(evidence)
    if not factors or all(evidence.same_factor(one, factors[0]) for one in factors):
        return None
    return (
        f"{evidence.tensor_name} is the reference times a factor that each rank has for itself, "
        f"{min(factors):.4g} to {max(factors):.4g}: scaled by a norm or a count of the rank's own"
    )


def scaled(evidence: Evidence) -> str | None:
    """A constant factor: summed instead of averaged, divided twice, clipped, ..."""
    factors = factors_by_rank(evidence)
    if not factors or not all(evidence.same_factor(one, factors[0]) for one in factors):
        return None
    common = factors[0]
    norms = {name: evidence.actual_tensor(name=name).norm().item() for name in evidence.names(evidence.kind)}
    # What is zero but for rounding is a multiple of nothing.
    names = [name for name, norm in norms.items() if not norm <= NEGLIGIBLE * max(norms.values())]
    all_tensors = all(is_multiple(evidence, name, common) for name in names)
    what = evidence.kind if all_tensors else evidence.tensor_name
    text = f"{what} of {evidence.ranks_in_words} are {times_the_reference(common)}"
    meaning = known_factor(evidence, common, all_tensors)
    if meaning:
        return f"{text}: {meaning}"
    if evidence.kind != "gradients":
        return f"{text}, a factor that is no degree of the mesh"
    if not all_tensors or common <= 0:
        return None
    if len(evidence.ranks) < len(evidence.metadata):
        return f"{text}, all by the same factor, and right on the other ranks: scaled there"
    if common > 1:
        return f"{text}, all by the same factor: scaled, or of a loss that is"
    norm = sum(norm**2 for norm in norms.values()) ** 0.5
    return f"{text}, all by the same factor: clipped to a total norm of {norm:.4g}, or scaled with the loss"


def factors_by_rank(evidence: Evidence) -> list[float]:
    """Return for each rank the factor of its tensor to the reference, [] if that explains nothing."""
    factors = []
    for rank in evidence.ranks:
        pair = evidence.pair(rank)
        if pair is None:
            return []
        actual, reference = pair
        factors.append(factor(actual, reference))
        if not evidence.explained(actual, factors[-1] * reference, reference):
            return []
    # Any number is a multiple of another: of a single one, only a known factor says something.
    if actual.numel() == 1 and not known_factor(evidence, factors[0]):
        return []
    return [] if evidence.same_factor(factors[0], 1.0) else factors


def is_multiple(evidence: Evidence, name: str, expected: float) -> bool:
    """Say whether the tensor of this name is the reference times the expected factor."""
    pair = evidence.pair(name=name)
    if pair is None:
        return False
    actual, reference = pair
    same = evidence.same_factor(factor(actual, reference), expected)
    return same and evidence.explained(actual, expected * reference, reference)


# ---------------------------------------------------------------- elements


def not_finite(evidence: Evidence) -> str | None:
    """NaN or infinity appears here first."""
    tensors = {"reference": evidence.reference_tensor(), "actual run": evidence.actual_tensor()}
    for run, tensor in tensors.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            return (
                f"the first value that is not finite in the {run} is in {evidence.tensor_name} of step "
                f"{evidence.step}, on {evidence.ranks_in_words}: {count} of {tensor.numel()} elements; "
                "everything before is finite"
            )
    return None


def narrow_type(evidence: Evidence) -> str | None:
    """The tensor is of a narrower type than the parameters."""
    steps = evidence.actual(evidence.rank)
    tensor = steps[evidence.step].get((evidence.kind, evidence.name))
    parameter = steps[0].get(("parameters", evidence.name), next(iter(steps[0].values())))
    if tensor is None or tensor.dtype not in NARROW_TYPES or tensor.dtype == parameter.dtype:
        return None
    name = type_name(tensor.dtype)
    return (
        f"{evidence.tensor_name}: all {tensor.numel()} values are of type {name}, the parameters of type "
        f"{type_name(parameter.dtype)}: computed in {name}, such as under autocast"
    )


def rounded_values(evidence: Evidence) -> str | None:
    """All values are exact in a narrower type, and most of the reference's are not."""
    tensor = evidence.actual(evidence.rank)[evidence.step].get((evidence.kind, evidence.name))
    if tensor is None or tensor.dtype not in (torch.float32, torch.float64):
        return None
    reference = evidence.reference_tensor()
    if reference is None and evidence.kind == "parameters":
        reference = evidence.actual_tensor(step=0)
    count = int(tensor.count_nonzero())
    if reference is None or count < 16:
        return None
    for dtype in NARROW_TYPES:
        share = share_exact(reference.float(), dtype)
        if share_exact(tensor, dtype) == 1.0 and share < 0.5:
            name = type_name(dtype)
            return (
                f"{evidence.tensor_name}: all {count} values are exact in {name}, of the reference's "
                f"{share:.1%}: computed or reduced in {name}"
            )
    return None


def share_exact(tensor: torch.Tensor, dtype: torch.dtype) -> float:
    """Return which share of the values other than zero are exact in a type; NaN if there are none."""
    values = tensor[tensor != 0]
    return (values.to(dtype).to(values.dtype) == values).double().mean().item()


def type_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def transposed(evidence: Evidence) -> str | None:
    """A square matrix is transposed."""
    pair = evidence.pair()
    if pair is None or pair[0].dim() != 2 or pair[0].shape[0] != pair[0].shape[1]:
        return None
    actual, reference = pair
    rest = evidence.unexplained(actual, reference.T, reference)
    if rest > MAX_UNEXPLAINED:
        return None
    return f"{evidence.tensor_name} is transposed (that leaves {rest:.0e} of the difference)"


# ---------------------------------------------------------------- elements: shards


def shards(evidence: Evidence) -> str | None:
    """Equal parts of the tensor are exchanged, repeated, zero, made from another seed, or scaled."""
    hypotheses = [
        shards_exchanged,
        same_shard_everywhere,
        shards_not_filled,
        shards_repeated,
        shards_of_another_seed,
        shards_scaled,
    ]
    causes = (hypothesis(cut) for cut in cuts(evidence) for hypothesis in hypotheses)
    return next(filter(None, causes), None)


class Cut(NamedTuple):
    """A tensor cut into equal shards along one dimension, as the ranks of a mesh would hold it."""

    step: int
    actual: list[torch.Tensor]
    reference: list[torch.Tensor]
    source: list[int | None]  # of each actual shard: which reference shard it equals, None if none
    wrong: list[int]  # which actual shards are not the reference's in the same place
    of_shards: str  # "of the 4 shards of parameters 0.weight along dimension 0"


def cuts(evidence: Evidence) -> Iterator[Cut]:
    """Cut the tensor in each way that the mesh may have cut it."""
    pair = evidence.pair()
    if pair is None:
        return
    actual, reference = pair
    # What two equal shards may differ by: rounding, and a little of the difference to explain.
    difference, rounding_error = (actual - reference).norm(), evidence.eps() * reference.norm()
    near = (MAX_UNEXPLAINED * difference + ROUNDING_EPS * rounding_error).item()
    for parts in evidence.mesh_sizes():
        for dim in range(actual.dim()):
            if actual.shape[dim] % parts:
                continue
            ours, theirs = actual.chunk(parts, dim), reference.chunk(parts, dim)
            equal = [[(one - other).norm().item() <= near / parts**0.5 for other in theirs] for one in ours]
            source = [row.index(True) if True in row else None for row in equal]
            wrong = [i for i in range(parts) if not equal[i][i]]
            of_shards = f"of the {parts} shards of {evidence.tensor_name} along dimension {dim}"
            if not wrong:
                return  # the difference is no more than rounding
            yield Cut(evidence.step, ours, theirs, source, wrong, of_shards)


def shards_exchanged(cut: Cut) -> str | None:
    """All shards are there, in another order."""
    if None in cut.source or len(set(cut.source)) < len(cut.source):
        return None
    return f"each {cut.of_shards} is another's, in the order {cut.source}: gathered or cut in the wrong order"


def same_shard_everywhere(cut: Cut) -> str | None:
    """One shard takes the place of all."""
    if None in cut.source or len(set(cut.source)) > 1:
        return None
    return f"each {cut.of_shards} is the reference's shard {cut.source[0]}: every rank holds the same shard"


def shards_not_filled(cut: Cut) -> str | None:
    """Some shards are zero, the others are right."""
    if len(cut.wrong) == len(cut.actual) or any(cut.actual[i].any() for i in cut.wrong):
        return None
    shards_are = f"{numbered('shard', cut.wrong)} {cut.of_shards} {'are' if len(cut.wrong) > 1 else 'is'}"
    return f"{shards_are} zero, the others agree: it was never filled"


def shards_repeated(cut: Cut) -> str | None:
    """Some shards take the place of others."""
    if None in cut.source or len(set(cut.source)) == len(cut.source):
        return None
    return (
        f"each {cut.of_shards} is one of the reference's, in the order {cut.source}: some twice, some missing"
    )


def shards_of_another_seed(cut: Cut) -> str | None:
    """Before training, some shards have other random values, the others are right."""
    if cut.step != 0 or len(cut.wrong) == len(cut.actual):
        return None
    actual = torch.cat([cut.actual[i].flatten() for i in cut.wrong])
    reference = torch.cat([cut.reference[i].flatten() for i in cut.wrong])
    if not unrelated(actual, reference):
        return None
    start = f"{numbered('shard', cut.wrong)} {cut.of_shards} {'start' if len(cut.wrong) > 1 else 'starts'}"
    return (
        f"{start} from other values (correlation {correlation(actual, reference):.2f} with the reference), "
        "the others agree: another seed on the ranks that made it"
    )


def shards_scaled(cut: Cut) -> str | None:
    """Each shard has a factor of its own."""
    if cut.step == 0 and len(cut.wrong) < len(cut.actual):
        return None  # a wrong initialization scales every shard
    if cut.actual[0].numel() == 1:
        return None  # any number is a multiple of another
    factors = [factor(*shards) for shards in zip(cut.actual, cut.reference, strict=True)]
    predicted = [scale * shard for scale, shard in zip(factors, cut.reference, strict=True)]
    explained = distance(cut.actual, predicted) <= MAX_UNEXPLAINED * distance(cut.actual, cut.reference)
    if not explained or max(factors) - min(factors) <= SAME_FACTOR:
        return None
    return (
        f"each {cut.of_shards} is the reference's times a factor of its own, {min(factors):.4g} to "
        f"{max(factors):.4g}: scaled by a norm of the local shard"
    )


def distance(actual: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the norm of the difference of two tensors that are given in parts."""
    return hypot(*((one - two).norm().item() for one, two in zip(actual, other, strict=True)))
