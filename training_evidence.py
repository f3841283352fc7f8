"""The first difference between two runs, and what a hypothesis about its cause may look at and measure.

A hypothesis is a function of an Evidence. It predicts the faulty tensor from others: "the gradients were
summed instead of averaged" predicts dp_degree times the reference. It returns its cause in words if the
prediction leaves at most MAX_UNEXPLAINED of the difference unexplained, and None otherwise. It also
returns None if it does not apply, such as when a tensor that it takes was not recorded.

There are two sorts of hypotheses, and in each file they stand apart. Some take sums, factors and norms of
whole tensors. Others look at elements: at rows, shards, or exact values.
"""

from collections.abc import Callable
from math import inf, isfinite
from typing import NamedTuple

import torch

from training_records import Steps, ranges
from training_tolerance import eps_of, wide

MAX_UNEXPLAINED = 1e-3  # share of the difference that a named cause may leave unexplained, without rounding
ROUNDING_EPS = 4.0  # norm of the difference of two right computations, in eps times the norm of the tensor
SAME_FACTOR = 1e-3  # relative deviation up to which a measured factor is taken for a known one
NO_SPREAD = 1e-300  # keeps the correlation with a constant tensor from dividing by zero


class Evidence(NamedTuple):
    """The first difference, and both runs."""

    step: int  # 0 is before training
    kind: str  # of the tensor that differs, and its name
    name: str
    ranks: list[int]  # those that show the difference
    actual: Callable[[int], Steps]  # a rank's tensors of all steps
    reference: Callable[[int], Steps] | None
    metadata: list[dict]  # by rank
    losses: list[list[tuple[float | None, float | None]]]  # by rank and step from 1: global and own loss
    unit: float = 0.0  # eps of what the tensors stand for, if they are sketches

    @property
    def rank(self) -> int:
        """The first rank that shows the difference. Most hypotheses look at this one alone."""
        return self.ranks[0]

    @property
    def tensor_name(self) -> str:
        """What the tensor that differs is called in a message."""
        return f"{self.kind} {self.name}"

    @property
    def ranks_in_words(self) -> str:
        """Which ranks show the difference."""
        if len(self.ranks) == len(self.metadata):
            return "every rank" if len(self.ranks) > 1 else "the rank"
        return numbered("rank", self.ranks)

    def actual_tensor(
        self, rank: int | None = None, kind: str = "", name: str = "", step: int | None = None
    ) -> torch.Tensor | None:
        """Return a tensor of the actual run in float64, None if it was not recorded.

        By default it is the tensor that differs, on the first rank that shows the difference. Complex
        numbers are pairs of real ones, in a last dimension of size 2.
        """
        return self._tensor(self.actual, rank, kind, name, step)

    def reference_tensor(
        self, rank: int | None = None, kind: str = "", name: str = "", step: int | None = None
    ) -> torch.Tensor | None:
        """Return a tensor of the reference in the same way, None also if there is no reference."""
        return self._tensor(self.reference, rank, kind, name, step)

    def _tensor(self, run, rank, kind, name, step):
        steps = run(self.rank if rank is None else rank) if run else []
        step = self.step if step is None else step
        tensors = steps[step] if 0 <= step < len(steps) else {}
        tensor = tensors.get((kind or self.kind, name or self.name))
        if tensor is None:
            return None
        tensor = wide(tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    def pair(self, rank: int | None = None, **which) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a tensor of the actual run and the reference's, None unless both have it in one shape."""
        actual, reference = self.actual_tensor(rank, **which), self.reference_tensor(rank, **which)
        if actual is None or reference is None or actual.shape != reference.shape:
            return None
        return actual, reference

    def names(self, kind: str) -> list[str]:
        """Return the names of the actual run's tensors of a kind, in the step of the difference."""
        return [name for one, name in self.actual(self.rank)[self.step] if one == kind]

    def eps(self) -> float:
        """Return the eps of the parameters' dtype: rounding is of this size."""
        return self.unit or eps_of(*self.actual(0)[0].values())

    def unexplained(self, actual: torch.Tensor, predicted: torch.Tensor, reference: torch.Tensor) -> float:
        """Return which share of the difference of actual and reference a prediction does not explain.

        Rounding is not counted. If the tensor is smaller than the difference, the share is of the tensor:
        otherwise a prediction of zero would explain any small tensor. Infinite if nothing can be said.
        """
        if not actual.shape == predicted.shape == reference.shape:
            return inf
        difference = min((actual - reference).norm().item(), actual.norm().item())
        error = (actual - predicted).norm().item()
        if not isfinite(difference) or not isfinite(error) or not difference:
            return inf
        return max(0.0, error - ROUNDING_EPS * self.eps() * actual.norm().item()) / difference

    def explained(self, actual: torch.Tensor, predicted: torch.Tensor, reference: torch.Tensor) -> bool:
        """Say whether a prediction explains the difference of actual and reference."""
        return self.unexplained(actual, predicted, reference) <= MAX_UNEXPLAINED

    def same_factor(self, measured: float, known: float) -> bool:
        """Say whether a measured factor is a known one, up to rounding."""
        return abs(measured - known) <= max(SAME_FACTOR, 2 * self.eps()) * abs(known)

    def mesh_sizes(self) -> list[int]:
        """Return the sizes above 1 of the mesh's dimensions and of the whole mesh."""
        job = self.metadata[0]
        sizes = (job["dp_degree"], job["tp_degree"], job["world_size"])
        return [size for size in dict.fromkeys(sizes) if size > 1]

    def replicas(self) -> list[int]:
        """Return the first rank of each data-parallel replica."""
        first_ranks = {}
        for rank, metadata in enumerate(self.metadata):
            first_ranks.setdefault(metadata["dp_rank"], rank)
        return [first_ranks[replica] for replica in sorted(first_ranks)]

    def own_losses(self) -> dict[int, float] | None:
        """Return each replica's own loss in the step of the difference, None if one was not recorded."""
        losses = [of_rank[self.step - 1][1] for of_rank in self.losses]
        if None in losses:
            return None
        return {job["dp_rank"]: loss for job, loss in zip(self.metadata, losses, strict=True)}


# ---------------------------------------------------------------- measuring elements


def correlation(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the correlation coefficient of the elements of two tensors."""
    a, r = actual.flatten() - actual.mean(), reference.flatten() - reference.mean()
    return (a.dot(r) / (a.norm() * r.norm()).clamp(min=NO_SPREAD)).item()


def unrelated(actual: torch.Tensor, reference: torch.Tensor) -> bool:
    """Say whether these are other random values of the same spread, as another seed makes them."""
    if reference.numel() < 64 or actual.shape != reference.shape or not reference.std() > 0:
        return False
    spread = (actual.std() / reference.std()).item()
    differ = ((actual - reference).abs() > 1e-3 * reference.std()).double().mean().item()
    # The correlation of n independent pairs is of the size of 1 / sqrt(n).
    bound = min(0.5, 4 / reference.numel() ** 0.5)
    return abs(correlation(actual, reference)) < bound and 0.8 < spread < 1.25 and differ > 0.9


# ---------------------------------------------------------------- numbers in words


def numbered(word: str, numbers: list[int]) -> str:
    """Return "shard 2" or "shards 1-3"."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def times_the_reference(factor: float) -> str:
    """Return "4.00x the reference", with more digits where two places do not give the factor."""
    exact = abs(factor - round(factor, 2)) <= SAME_FACTOR * abs(factor)
    return f"{factor:.2f}x the reference" if exact else f"{factor:.4g}x the reference"


def remainder_in_words(unexplained: float) -> str:
    """Return what a prediction leaves unexplained."""
    return f" but for {unexplained:.0e} of the difference" if unexplained else " but for rounding"


def known_factor(evidence: Evidence, factor: float, all_tensors: bool = True) -> str | None:
    """Return which mistake makes a tensor this factor times what it should be, None if no known one does.

    all_tensors: all tensors of the kind have the factor. Some mistakes cannot change a single one.
    """
    known = reduction_factors(evidence)
    if all_tensors:
        dp = evidence.metadata[0]["dp_degree"]
        if evidence.kind == "gradients" and "microbatches" not in evidence.metadata[0]:
            known.append((dp, f"not divided by {dp} microbatches"))
        if evidence.kind not in ("outputs", "losses"):
            known += [(2, "applied or accumulated twice"), (-1, "of the wrong sign")]
        known += mean_factors(evidence)
    texts = [text for value, text in known if value != 1 and evidence.same_factor(factor, value)]
    if not texts and all_tensors and evidence.kind == "gradients":
        texts = loss_scale(evidence, factor)
    return ", or ".join(dict.fromkeys(texts)) or None


def reduction_factors(evidence: Evidence) -> list[tuple[float, str]]:
    """Return the factors that come from summing or averaging over the wrong ranks, and what they mean."""
    job, known = evidence.metadata[0], []
    dp, tp, world = job["dp_degree"], job["tp_degree"], job["world_size"]
    microbatches = job.get("microbatches", 1)  # recordings know them
    if microbatches > 1:
        known += [
            (microbatches, f"not divided by the {microbatches} microbatches"),
            (1 / microbatches, f"divided by the {microbatches} microbatches once too often"),
        ]
    if dp > 1:
        known += [
            (dp, f"summed over the {dp} data-parallel replicas instead of averaged"),
            (1 / dp, f"divided by the {dp} data-parallel replicas once too often"),
            (1 / dp**2, f"divided by the {dp} data-parallel replicas twice too often"),
        ]
        if evidence.kind == "gradients":  # with the loss right, which is looked at before
            known.append((1 / dp, "a collective in the loss that passes no gradient, such as all_reduce"))
    if tp > 1:
        known += [
            (tp, f"summed over the {tp} tensor-parallel ranks once too often"),
            (1 / tp, f"divided by the {tp} tensor-parallel ranks, over which it must not be averaged"),
        ]
    if world not in (1, dp, tp):
        known += [
            (world, f"multiplied by the world size {world}"),
            (1 / world, f"divided by the world size {world}"),
        ]
    return known


def mean_factors(evidence: Evidence) -> list[tuple[float, str]]:
    """Return the factors of a loss that is a sum where it should be a mean, and what they mean."""
    output = evidence.actual_tensor(kind="outputs", name="output")
    if output is None:
        return []
    elements, samples = output.numel(), len(output) if output.dim() else 1
    return [
        (elements, f"summed over the {elements} elements of the output instead of averaged"),
        (samples, "summed over the samples instead of averaged"),
    ]


def loss_scale(evidence: Evidence, factor: float) -> list[str]:
    """Return in words that a factor is the loss scale of mixed precision: a power of two, at least 16."""
    power = torch.tensor(abs(factor)).log2().round().item()
    if power >= 4 and evidence.same_factor(factor, 2**power):
        return [f"a loss scale of {2**power:.0f} that was not removed"]
    return []
