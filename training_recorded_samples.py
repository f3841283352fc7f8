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
) -> Result | None:
    """Judge an activation of one rank, of all its calls; None if the shapes do not allow it."""
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
        return judge(difference, norm, eps, drift.of_activation(name, first.shape, norm), norm_eps)
    if first.shape[1:] != other.shape[1:] or len(first.samples) != len(first.keys):
        return None
    known: dict = {}
    for other in references:
        for place, key in enumerate(other.keys):
            known.setdefault(key, (other, place))
    square, norm_square, size = 0.0, 0.0, 0
    for row in rows:
        for i, key in enumerate(row.keys):
            if key in known:
                one, place = known[key]
                width = min(one.samples.shape[1], row.samples.shape[1])
                expected = fold(one.samples[place : place + 1], width)
                square += (fold(row.samples[i : i + 1], width) - expected).square().sum().item()
                norm_square += expected.square().sum().item()
                size += 1
    if not size:
        return None
    norm = norm_square**0.5
    shape = (size * first.shape[0] // max(1, len(first.keys)), *first.shape[1:])
    return judge(square**0.5, norm, eps, drift.of_activation(name, shape, norm), norm_eps)
