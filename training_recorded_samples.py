"""Samples of a recording, and activations by sample: which a rank has, and those of two runs compared.

A sample is known by its content, whichever rank has it.
"""

from collections import Counter, defaultdict
from math import isfinite
from typing import NamedTuple

import torch

from training_recorded_runs import Recording, shard_group
from training_recorded_tolerance import Divergence, Drift, judge
from training_records import Key, ranges
from training_sketches import fold
from training_tolerance import NORM_EPS, Result, bound_of, mismatch

SAMPLES = ("inputs", "samples")
# Why activations, or buffers, are not compared.
CHOSEN = "of rows that the module takes out of the batch, as an expert does"
REORDERED = "with rows in another order, or not used: the loss and all gradients agree"
UPDATED = "which each rank updates from its own samples, as a batch norm does"


class Rows(NamedTuple):
    """The activation of one module in one call, as some ranks have it together."""

    ranks: tuple[int, ...]
    keys: list  # of each sample
    samples: torch.Tensor  # their sketches
    along_1: torch.Tensor | None  # the same if the second dimension is the samples', where it may be
    whole: torch.Tensor | None  # of all of them, where the first dimension is not the samples'
    shape: tuple[int, ...]
    batch_dim: int | None  # which dimension is the samples'
    dtype: str
    not_finite: int

    @property
    def shape_of_one(self) -> tuple[int, ...]:
        """The shape without the dimension of the samples."""
        place = self.batch_dim or 0
        return self.shape[:place] + self.shape[place + 1 :]

    def along(self, batch_dim: int | None) -> "Rows":
        """Return it with another dimension as the samples', if it may be that one."""
        if batch_dim != 1 or self.along_1 is None:
            return self
        return self._replace(samples=self.along_1, batch_dim=1)


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


def matched_keys(reference: Recording, actual: Recording, step: int) -> tuple[list, list, float]:
    """Return the keys of both runs, those that differ by rounding made equal, and by how many eps they do.

    A sample of whole numbers, such as words, has an exact key. One of other numbers may have been computed
    otherwise, on another device. It is the reference's if their keys differ by at most 16 eps of float32.
    """
    theirs, ours = keys_of(reference, step), keys_of(actual, step)
    known = [{key for of_rank in keys for call in of_rank for key in call} for keys in (theirs, ours)]
    new, free = (
        [key for key in keys if key[0] != "call" and not all(float(number).is_integer() for number in key)]
        for keys in (sorted(known[1] - known[0], key=str), sorted(known[0] - known[1], key=str))
    )
    if not new or not free:
        return theirs, ours, 0.0
    one, other = (torch.tensor(keys, dtype=torch.float64) for keys in (new, free))
    nearest = (torch.cdist(one, other) / other.norm(dim=1)).min(dim=1)
    near = {
        key: (free[place], share / 2**-23)
        for key, place, share in zip(new, nearest.indices.tolist(), nearest.values.tolist(), strict=True)
        if share <= NORM_EPS * 2**-23
    }
    ours = [[[near.get(key, (key,))[0] for key in call] for call in of_rank] for of_rank in ours]
    return theirs, ours, max((eps for _, eps in near.values()), default=0.0)


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
                along_1 = first.get("samples_along_1") if len(shards) == 1 else None
                whole = None if first["sketch"] is None else sum(shard["sketch"] for shard in shards)
                bad = sum(shard["not_finite"] for shard in shards)
                rows = Rows(
                    *(group, names, samples, along_1, whole, tuple(first["shape"]), first["batch_dim"]),
                    *(first["dtype"], bad),
                )
                found[key].append(rows)
    return found


def rows_of_modules(reference: Recording, actual: Recording) -> dict[tuple[int, str], str]:
    """Say by step and module what the rows of its output are: "samples", "fixed" or "chosen".

    There are as many for each sample in all calls of both runs; or as many in all, as of positions; or the
    module takes some and leaves others, as a mixture of experts does. "unsure": by chance it may have taken
    as many for each sample in this step, but does not in others.
    """
    sizes, shares = defaultdict(set), defaultdict(lambda: defaultdict(set))
    for content in (*reference.contents, *actual.contents):
        for number, record in enumerate(content["steps"], start=1):
            samples = [1 if keys is None else len(keys) for keys in record["calls"]]
            for entry in record["activations"]:
                rows = entry["shape"][entry["batch_dim"] or 0]
                sizes[entry["name"]].add(rows)
                shares[entry["name"]][number].add(rows / max(1, samples[entry["call"]]))
    found = {}
    for name, by_step in shares.items():
        always = len(set().union(*by_step.values())) == 1
        for step, of_step in by_step.items():
            if len(of_step) > 1:
                found[step, name] = "fixed" if len(sizes[name]) == 1 else "chosen"
            else:
                found[step, name] = "samples" if always else "unsure"
    return found


# ---------------------------------------------------------------- judging


def judge_rows(
    rows: list[Rows],
    references: list[Rows],
    kind: str,
    name: str,
    drift: Drift,
    unit: float,
    norm_eps: float | None,
) -> Result | str:
    """Judge an activation of one rank, of all its calls; why it cannot be, if there is nothing to compare.

    kind: what its rows are, see rows_of_modules.
    """
    place = next((row.batch_dim for row in (*rows, *references) if row.along_1 is None), 0)
    rows, references = ([row.along(place) for row in some] for some in (rows, references))
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

    def judged(one: torch.Tensor, expected: torch.Tensor, shape: tuple[int, ...]) -> Result:
        norm = expected.norm().item()
        more = drift.of_activation(name, shape, norm) + drift.of_all(norm, eps)
        bound = bound_of(eps, len(shape), norm_eps)
        return judge((one - expected).norm().item(), norm, eps, more, bound)

    if first.shape == other.shape and first.whole is not None and other.whole is not None:
        result = judged(first.whole, other.whole, first.shape)
        if kind == "fixed" or result.passed:
            return result
    if kind == "chosen":
        return CHOSEN
    if kind == "fixed" and first.shape == other.shape and len(first.samples) == len(other.samples) == 1:
        return judged(first.samples, other.samples, first.shape)
    if first.shape_of_one != other.shape_of_one:
        return "of another shape in each run"
    if any(len(row.samples) != len(row.keys) for row in (*rows, *references)):
        return "with a number of rows that is no multiple of the samples'"
    width = min(row.samples.shape[1] for row in (*rows, *references))
    theirs = torch.cat([fold(row.samples, width) for row in references])
    places: dict = {}
    for i, key in enumerate(key for row in references for key in row.keys):
        places.setdefault(key, i)
    ours = torch.cat([fold(row.samples, width) for row in rows])
    keys = [key for row in rows for key in row.keys]
    pairs = [(i, places[key]) for i, key in enumerate(keys) if key in places]
    if not pairs:
        return "of samples that are not in the reference"
    own, other_places = (list(numbers) for numbers in zip(*pairs, strict=True))
    count = len(pairs) * first.shape[first.batch_dim or 0] // max(1, len(first.keys))
    result = judged(ours[own], theirs[other_places], (count, *first.shape_of_one))
    return result if result.passed or kind == "samples" else CHOSEN


def rerouted(
    reference: Recording, actual: Recording, step: int, kinds: dict[tuple[int, str], str]
) -> tuple[list[str], float]:
    """Return the modules, such as experts, that got more or fewer rows than in the reference.

    Also the share of all rows of such modules that went to another one.
    """
    counts = [Counter(), Counter()]
    for run, rows in zip((reference, actual), counts, strict=True):
        for rank in run.first_ranks:
            for entry in run.of_step(step)[rank]["activations"]:
                if kinds[step, entry["name"]] in ("chosen", "unsure"):
                    rows[entry["name"]] += entry["shape"][0]
    moved = {name: abs(counts[1][name] - rows) for name, rows in counts[0].items()}
    share = sum(moved.values()) / 2 / max(1, counts[0].total())
    return [name for name, rows in moved.items() if rows], share


def compare_samples(
    step: int,
    reference: list[list[list]],
    actual: list[list[list]],
    eps: float,
    recordings: tuple,
    found: Divergence,
) -> None:
    """Compare which samples the two runs had in a step. eps: by how much those differ that are the same."""
    lists = [
        [key for rank in recording.first_ranks for call in keys[rank] for key in call]
        for recording, keys in zip(recordings, (reference, actual), strict=True)
    ]
    counts = [Counter(keys) for keys in lists]
    if not all(counts):
        found.note("calls of the model were not seen in one of the runs: samples are not compared")
        return
    if any(key[0] == "call" for key in (*counts[0], *counts[1])):
        found.note("the models are called without a tensor of samples: activations are compared call by call")
        return
    missing, extra = counts[0] - counts[1], counts[1] - counts[0]
    total = sum(counts[0].values())
    ranks = tuple(range(recordings[1].world_size))
    if not missing and not extra:
        found.add(step, SAMPLES, ranks, Result(True, score=eps / NORM_EPS, eps=eps))
        if lists[0] != lists[1]:
            found.note("the ranks got the reference's samples in another order, such as round robin")
        return
    if reason := cut_otherwise(step, *recordings, *counts):
        found.note(f"samples are not compared: {reason}")
        return
    gone, others = sum(missing.values()), sum(extra.values())
    message = f": {gone} of the reference's {total} samples are missing, {others} others are there"
    found.add(step, SAMPLES, ranks, mismatch(message))


def in_stages(recording: Recording, step: int) -> bool:
    """Say whether ranks hold different parameters, as the stages of a pipeline do."""
    return len({frozenset(record["before"]) for record in recording.of_step(step)}) > 1


def whole_modules(reference: Recording, actual: Recording, step: int, rows: dict[Key, list[Rows]]) -> dict:
    """Return the activations without those of modules of which a stage of a pipeline has only a part."""
    if not in_stages(actual, step):
        return rows
    held = [record["before"].keys() for record in actual.of_step(step)]
    found = {}
    for key, of_module in rows.items():
        module = key[1].partition(" call ")[0]
        inside = "" if module == "(model)" else f"{module}."
        needed = {name for name in reference.start if name.startswith(inside)}
        if whole := [row for row in of_module if needed <= held[row.ranks[0]]]:
            found[key] = whole
    return found


def cut_otherwise(
    step: int, reference: Recording, actual: Recording, theirs: Counter, ours: Counter
) -> str | None:
    """Say why ranks cannot have the reference's samples as they are, None if they can.

    They have a piece of each sequence, or what an earlier stage of a pipeline has computed.
    """
    if in_stages(actual, step) and theirs & ours:
        return "ranks hold different parameters, as the stages of a pipeline do"
    shapes = [
        {entry["name"]: entry["shape"] for entry in reversed(run.of_step(step)[0]["activations"])}
        for run in (reference, actual)
    ]
    for name, shape in shapes[1].items() if not theirs & ours else ():
        pairs = list(zip(shapes[0].get(name, ())[1:], shape[1:], strict=False))
        cut = [one // other for one, other in pairs if one != other and other and one % other == 0]
        if len(cut) == sum(one != other for one, other in pairs) == 1 and actual.world_size % cut[0] == 0:
            return f"ranks have a part of each, 1 of {cut[0]}, as with context parallelism ({name})"
    return None


def judge_activations(
    step: int,
    reference: dict[Key, list[Rows]],
    actual: dict[Key, list[Rows]],
    kinds: dict[tuple[int, str], str],
    same_layout: bool,
    drift: Drift,
    unit: float,
    norm_eps: float | None,
    found: Divergence,
) -> list[tuple[Key, tuple[int, ...], Result]]:
    """Judge the activations of modules that both runs have, sample by sample.

    kinds: what the rows are, see rows_of_modules. same_layout: ranks have the same places in both runs.
    """
    results = []
    for key, rows in actual.items():
        if key not in reference:
            continue
        by_group = defaultdict(list)
        for row in rows:
            by_group[row.ranks].append(row)
        for ranks, of_ranks in by_group.items():
            # A plain tensor may be a shard. With the same ranks in both runs, a rank's own is meant.
            own = [row for row in reference[key] if same_layout and row.ranks == ranks] or reference[key]
            kind = kinds[step, key[1].partition(" call ")[0]]
            result = judge_rows(of_ranks, own, kind, key[1], drift, unit, norm_eps)
            if isinstance(result, Result):
                results.append((key, ranks, result))
            else:
                found.skipped[result][key[1]].add(step)
    if step == 1 and (only := reference.keys() ^ actual.keys()):
        where = "compiled or wrapped in the other"
        names = some_of([name for _, name in sorted(only)])
        found.note(f"activations of {len(only)} modules are in one run only ({names}): {where}")
    return results


def add_activations(
    step: int, results: list[tuple[Key, tuple[int, ...], Result]], agrees: bool, found: Divergence
) -> None:
    """Keep the results of activations. agrees: the loss and all gradients of the step do.

    Then one that does not holds the samples in an order of its own, such as sorted by their length, or
    two views one after the other; or nothing depends on it. No order explains another type, or NaN: those
    have an error that cannot be measured.
    """
    for key, ranks, result in results:
        if agrees and not result.passed and isfinite(result.eps):
            found.skipped[REORDERED][key[1]].add(step)
        else:
            found.add(step, key, ranks, result)


def say_skipped(found: Divergence) -> None:
    """Note which activations and buffers were not compared, and why."""
    for reason, by_name in found.skipped.items():
        steps = sorted(set().union(*by_name.values()))
        when = f"step{'s' if len(steps) > 1 else ''} {ranges(steps)}"
        what = "buffers" if reason == UPDATED else "activations"
        found.note(f"{what} not compared in {when}: {len(by_name)}, {reason} ({some_of(list(by_name))})")


def some_of(names: list[str]) -> str:
    """Return the first names of many."""
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
