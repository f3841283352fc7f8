"""Activations of a recording by sample. A sample is known by its content, whichever rank has it."""

from collections import defaultdict
from typing import NamedTuple

import torch

from training_recorded_tolerance import Drift, judge
from training_recordings import Recording, shard_group
from training_records import Key
from training_sketches import fold
from training_tolerance import Result, mismatch


class Rows(NamedTuple):
    """The activation of one module in one call, as some ranks have it together."""

    ranks: tuple[int, ...]
    keys: list  # of each sample
    samples: torch.Tensor  # their sketches
    whole: torch.Tensor | None  # of all of them, where the first dimension is not the samples'
    shape: tuple[int, ...]
    dtype: str
    not_finite: int


def keys_of(recording: Recording, step: int) -> list[list[list]]:
    """Return by rank and call of the model the key of each sample. Calls without a tensor are numbered."""
    found = []
    for rank, record in enumerate(recording.of_step(step)):
        replica = recording.replicas[rank]
        found.append(
            [
                [tuple(key) for key in keys.tolist()] if keys is not None else [("call", replica, call)]
                for call, keys in enumerate(record["calls"])
            ]
        )
    return found


def activations_of(recording: Recording, step: int, keys: list[list[list]]) -> dict[Key, list[Rows]]:
    """Return the activations of a step by module, in the order of execution."""
    by_call: dict[Key, dict[int, dict[int, dict]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in enumerate(recording.of_step(step)):
        for entry in record["activations"]:
            more = f" call {entry['occurrence']}" if entry["occurrence"] > 1 else ""
            by_call["activations", entry["name"] + more][entry["call"]][rank] = entry
    found: dict[Key, list[Rows]] = {}
    for key, calls in by_call.items():
        found[key] = []
        for call, by_rank in calls.items():
            for group in dict.fromkeys(shard_group(rank, entry) for rank, entry in by_rank.items()):
                shards = [by_rank[rank] for rank in group if rank in by_rank]
                first = shards[0]
                names = keys[group[0]][call] if call < len(keys[group[0]]) else []
                samples = sum(shard["samples"] for shard in shards)
                if names and len(samples) != len(names) and len(samples) % len(names) == 0:
                    samples = samples.reshape(len(names), -1, samples.shape[1]).sum(1)
                whole = None if first["sketch"] is None else sum(shard["sketch"] for shard in shards)
                bad = sum(shard["not_finite"] for shard in shards)
                rows = Rows(group, names, samples, whole, tuple(first["shape"]), first["dtype"], bad)
                found[key].append(rows)
    return found


def judge_rows(
    rows: list[Rows], references: list[Rows], name: str, drift: Drift, unit: float, norm_eps: float
) -> Result | str:
    """Judge an activation of one rank, of all its calls; why it cannot be, if there is nothing to compare."""
    first, other = rows[0], references[0]
    bad = {
        "reference": sum(row.not_finite for row in references),
        "actual": sum(row.not_finite for row in rows),
    }
    for run, count in bad.items():
        if count:
            return mismatch(f": {count} values are not finite in the {run} run")
    if first.dtype != other.dtype:
        return mismatch(f": its type is {first.dtype}, expected {other.dtype}")
    eps = max(unit, torch.finfo(getattr(torch, first.dtype)).eps)
    both_whole = first.whole is not None and other.whole is not None
    if both_whole and first.shape == other.shape and len(first.keys) != len(other.keys):
        # It does not depend on the samples, as position embeddings do not.
        difference, norm = (first.whole - other.whole).norm().item(), other.whole.norm().item()
        more = drift.of_activation(name, first.shape, norm) + drift.of_all(norm, eps)
        return judge(difference, norm, eps, more, norm_eps)
    if first.shape == other.shape and len(first.samples) == len(other.samples) == 1 != len(first.keys):
        # Nor does what is one row for all samples, where the recorder did not know how many there are.
        difference, norm = (first.samples - other.samples).norm().item(), other.samples.norm().item()
        more = drift.of_activation(name, first.shape, norm) + drift.of_all(norm, eps)
        return judge(difference, norm, eps, more, norm_eps)
    if first.shape[1:] != other.shape[1:]:
        return "of another shape in each run"
    if any(len(row.samples) != len(row.keys) for row in (*rows, *references)):
        return "with a number of rows that is no multiple of the samples'"
    width = min(row.samples.shape[1] for row in (*rows, *references))
    theirs = torch.cat([fold(row.samples, width) for row in references])
    place: dict = {}
    for i, key in enumerate(key for row in references for key in row.keys):
        place.setdefault(key, i)
    ours = torch.cat([fold(row.samples, width) for row in rows])
    pairs = [(i, place[key]) for i, key in enumerate(key for row in rows for key in row.keys) if key in place]
    size = len(pairs)
    if not size:
        return "of samples that are not in the reference"
    own, other_places = (list(numbers) for numbers in zip(*pairs, strict=True))
    expected = theirs[other_places]
    difference, norm = (ours[own] - expected).norm().item(), expected.norm().item()
    shape = (size * first.shape[0] // max(1, len(first.keys)), *first.shape[1:])
    more = drift.of_activation(name, shape, norm) + drift.of_all(norm, eps)
    return judge(difference, norm, eps, more, norm_eps)
