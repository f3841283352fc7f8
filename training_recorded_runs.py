"""A recorded run: the files of all its ranks, shards put together, settings and losses.

training_recordings.py says what a file holds.
"""

from functools import cached_property, lru_cache
from itertools import product
from math import inf, isclose, isfinite
from pathlib import Path
from typing import NamedTuple

import torch

from training_common import InputError
from training_recordings import read_rank_file
from training_records import check_rank_files
from training_tolerance import bound_of

# How losses may be put together: over microbatches, then over replicas. "share": each rank scales its loss by
# the number of replicas, because gradients are averaged.
CONVENTIONS = tuple(product(("mean", "sum"), ("mean", "sum", "share")))
UNUSUAL = ("mean", "sum", "share")  # the last one most
# Settings of an optimizer that are given to it. Others may follow from the gradients.
KNOWN = {"lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps", "alpha", "maximize"}
KNOWN |= {"amsgrad", "centered", "rho", "lambd", "lr_decay", "etas", "step_sizes"}
# Settings of an optimizer that change how it computes, not what.
HOW = {"names", "foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay"}
NEAR = 0.1  # relative difference of two losses that are likely meant to be the same


class Recording:
    """All rank files of a run."""

    def __init__(self, directory: Path) -> None:
        """Read them. Raises InputError if one is missing, of another run, or no recording."""
        self.directory = directory
        self._tensors: dict[tuple[int, str], dict[str, list[Whole]]] = {}
        first = self._load(0)
        self.metadata = first["metadata"]
        self.world_size, self.steps = self.metadata["world_size"], self.metadata["steps"]
        check_rank_files(directory, self.world_size)
        self.contents = [first, *(self._load(rank) for rank in range(1, self.world_size))]

    def _load(self, rank: int) -> dict:
        path = self.directory / f"rank-{rank}.pt"
        content = read_rank_file(path)
        metadata = content["metadata"]
        if metadata["rank"] != rank:
            raise InputError(f"{path} says rank {metadata['rank']}: files were renamed or swapped")
        if rank and (of_rank_0 := self._other_run(metadata)):
            raise InputError(f"{self.directory} mixes runs: {of_rank_0}; record the run again")
        return content

    def _other_run(self, metadata: dict) -> str | None:
        for key in ("world_size", "steps", "command", "torch_version"):
            if metadata[key] != self.metadata[key]:
                return f"{key} is {self.metadata[key]!r} in rank-0.pt, {metadata[key]!r} in another rank's"
        return None

    @property
    def label(self) -> str:
        """What the run is called in a table: the device that it ran on."""
        return self.metadata["device"]

    @cached_property
    def replicas(self) -> list[int]:
        """Which data-parallel replica each rank is of. Ranks with the same samples are of the same one."""
        known: dict[tuple, int] = {}
        numbers = []
        for content in self.contents:
            calls = content["steps"][0]["calls"]
            keys = tuple(tuple(map(tuple, key.tolist())) if key is not None else None for key in calls)
            if None in keys:  # a call without a tensor: ranks with other losses have other samples
                keys += tuple(content["steps"][0]["losses"])
            numbers.append(known.setdefault(keys, len(known)))
        return numbers

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each replica."""
        return [self.replicas.index(replica) for replica in range(max(self.replicas) + 1)]

    @cached_property
    def start(self) -> dict[str, list["Whole"]]:
        """Each parameter before its first step: not the run's where optimizers take turns."""
        found: dict[str, list[Whole]] = {}
        for step in range(self.steps, 0, -1):
            found = {**found, **self.tensors(step, "before")}
        return found

    def of_step(self, step: int) -> list[dict]:
        """Return what each rank recorded of a step, counted from 1."""
        return [content["steps"][step - 1] for content in self.contents]

    def tensors(self, step: int, kind: str) -> dict[str, list["Whole"]]:
        """Return each tensor of a kind as the ranks have it; see `wholes`."""
        if (step, kind) not in self._tensors:
            entries = self.entries(step, kind)
            self._tensors[step, kind] = {name: wholes(by_rank) for name, by_rank in entries.items()}
        return self._tensors[step, kind]

    def entries(self, step: int, kind: str) -> dict[str, dict[int, dict]]:
        """Return what was recorded of each tensor of a kind, by its name and by rank."""
        found: dict[str, dict[int, dict]] = {}
        for rank, record in enumerate(self.of_step(step)):
            for name, entry in record[kind].items():
                found.setdefault(name, {})[rank] = entry
        return found


class Whole(NamedTuple):
    """A tensor as some ranks have it: the shards of these ranks together, or a copy that one has whole."""

    ranks: tuple[int, ...]
    sketch: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    not_finite: int
    largest: float
    magnitudes: torch.Tensor  # see training_sketches.count
    zeros: int
    bfloat16_exact: int  # elements that bfloat16 can hold, of all
    elements: int

    @property
    def norm(self) -> float:
        """The norm of the tensor, as its sketch estimates it."""
        return self.sketch.norm().item()


def wholes(by_rank: dict[int, dict]) -> list[Whole]:
    """Return a tensor as the ranks have it: once for each group of ranks that has all shards.

    by_rank: what each rank recorded of its shard.
    """
    found: dict[tuple[int, ...], Whole] = {}
    for rank, entry in by_rank.items():
        group = shard_group(rank, entry)
        if group in found:
            continue
        shards = [by_rank[other] for other in group if other in by_rank]
        found[group] = Whole(
            group,
            sum(shard["sketch"] for shard in shards),
            tuple(entry["shape"]),
            getattr(torch, entry["dtype"]),
            int(sum(shard["magnitudes"][255] for shard in shards)),
            max(shard["largest"] for shard in shards),
            sum(shard["magnitudes"].long() for shard in shards),
            sum(shard["zeros"] for shard in shards),
            sum(shard["bfloat16_exact"] for shard in shards),
            sum(shard["elements"] for shard in shards),
        )
    return list(found.values())


def put_together(by_rank: dict[int, dict], ranks: tuple[int, ...]) -> torch.Tensor | None:
    """Return a tensor, in float64, from the shards of these ranks; None unless they have it with --full."""
    shards = [by_rank[rank] for rank in ranks if rank in by_rank]
    if not shards or any("full" not in shard for shard in shards):
        return None
    shape = shards[0]["shape"]
    whole = torch.zeros(shape, dtype=torch.float64)
    for shard in shards:
        part = shard["full"].double()
        block = zip(shard["offset"], part.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in block)] += part  # partial ones add up
    return whole


def shard_group(rank: int, entry: dict) -> tuple[int, ...]:
    """Return the ranks whose shards make up the tensor of which this rank has one."""
    if entry["mesh"] is None:
        return (rank,)
    return _shard_groups(entry["mesh"], entry["ranks"], entry["placements"])[rank]


@lru_cache(maxsize=64)
def _shard_groups(
    mesh: tuple[int, ...], ranks: tuple[int, ...], placements: tuple[str, ...]
) -> dict[int, tuple[int, ...]]:
    # For each rank of a mesh those that differ from it only in the dimensions that are not replicated.
    groups: dict[tuple, list[int]] = {}
    place_of = {}
    for place, rank in zip(product(*map(range, mesh)), ranks, strict=True):
        copy = tuple(i for i, name in zip(place, placements, strict=True) if name == "replicate")
        groups.setdefault(copy, []).append(rank)
        place_of[rank] = copy
    return {rank: tuple(sorted(groups[copy])) for rank, copy in place_of.items()}


# ---------------------------------------------------------------- optimizers and losses


def rates_of(records: list[dict]) -> dict[str, tuple[str, dict]]:
    """Return for each parameter the class of its optimizer, and its group's settings."""
    return {
        name: (optimizer["class"], group)
        for record in records
        for optimizer in record["optimizers"]
        for group in optimizer["groups"]
        for name in group["names"]
    }


def other_setting(
    reference: tuple[str, dict], actual: tuple[str, dict], only: set[str] | None = None
) -> tuple[str, object, object] | None:
    """Return the first setting of an optimizer that differs: its name, the reference's value, the actual one.

    Only settings that both have, and that change what is computed: not "foreach" or "fused". only: these.
    """
    for key, one in reference[1].items():
        other = actual[1].get(key, one)
        if key not in HOW and (only is None or key in only) and not same_setting(one, other):
            return "learning rate" if key == "lr" else key.replace("_", " "), one, other
    return None


def same_setting(one: object, other: object) -> bool:
    """Say whether two settings are the same, numbers up to rounding."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(same_setting, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    return one == other


def shown(value: object) -> str:
    """Return a setting as it is written in a message."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def losses_of(recording: Recording, step: int, convention: tuple[str, str]) -> float | None:
    """Return the loss of a step: the mean or sum over microbatches, then over replicas; None without one.

    Of a pipeline the ranks of the last stage have one.
    """
    records = recording.of_step(step)
    values = [losses for rank in recording.first_ranks if (losses := records[rank]["losses"])]
    if not values:
        return None
    over = {
        "mean": lambda numbers: sum(numbers) / len(numbers),
        "sum": sum,
        "share": lambda numbers: sum(numbers) / len(numbers) ** 2,
    }
    return over[convention[1]]([over[convention[0]](of_rank) for of_rank in values])


def compared_losses(reference: Recording, actual: Recording, step: int) -> tuple[float | None, float | None]:
    """Return the losses of a step in both runs, put together as choose_conventions says."""
    conventions = choose_conventions(reference, actual)
    return losses_of(reference, step, conventions[0]), losses_of(actual, step, conventions[1])


def loss_bound(unit: float, norm_eps: float | None = None) -> float:
    """Return the relative difference up to which two losses agree; they are at best of float32."""
    eps = max(unit, 2.0**-23)
    return bound_of(eps, 2, norm_eps) * eps  # a mean over many, as a matrix is


def choose_conventions(reference: Recording, actual: Recording) -> tuple[tuple, tuple]:
    """Return how the losses of each run are put together, so that those of step 1 agree best.

    Scripts scale what they call backward on differently. The mean over everything comes first; with other
    samples, or a mistake, no losses agree, and those that come near are more likely than it if it does not.
    Of those that agree as well, microbatches that are divided by their number come before replicas.
    """

    def error(pair: tuple) -> float:
        one, other = (
            losses_of(run, 1, convention) for run, convention in zip((reference, actual), pair, strict=True)
        )
        return abs(other - one) / abs(one) if one and other is not None and isfinite(one) else inf

    def unusual(pair: tuple) -> int:
        return sum(UNUSUAL.index(microbatches) + 3 * UNUSUAL.index(ranks) for microbatches, ranks in pair)

    allowed = loss_bound(unit_of(reference, actual))
    pairs = sorted(product(CONVENTIONS, CONVENTIONS), key=unusual)
    best = min(pairs, key=lambda pair: max(round(error(pair), 9), allowed))
    return best if error(best) <= max(allowed, min(NEAR, error(pairs[0]) / 16)) else pairs[0]


def unit_of(reference: Recording, actual: Recording) -> float:
    """Return the eps in which errors are judged: the coarsest of the trained parameters and of what the
    reference computes. A coarser type in the actual run alone is a difference, no reason to allow more.
    """
    types = {entry["dtype"] for run in (reference, actual) for entry in run.of_step(1)[0]["before"].values()}
    types |= {entry["dtype"] for entry in reference.of_step(1)[0]["activations"]}
    types |= {entry["dtype"] for entry in reference.of_step(1)[0]["gradients"].values()}
    floating = [getattr(torch, name) for name in types if getattr(torch, name).is_floating_point]
    return max(torch.finfo(dtype).eps for dtype in floating)
