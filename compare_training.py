"""Compare two recorded training runs rank by rank, step by step, tensor by tensor.

    python compare_training.py --reference-dir results/cpu-ddp --actual-dir results/ddp --world-size 64
    python compare_training.py --reference-dir results/oracle-eager --actual-dir results/ddp --world-size 64
    python compare_training.py --actual-dir results/ddp --world-size 64         # without a reference

A reference of one rank, such as the oracle's, is the whole job in one process: each rank is held
against its part of it. Compared are initial parameters (step 0), outputs, global losses, full
gradients, updated parameters and deltas, under the names that the files give them; and each run is
checked for what must hold in any run (INVARIANTS). A tensor passes if both hold:

    element by element    |actual - reference| <= atol + rtol * |reference|
    as a whole            norm(actual - reference) <= norm_eps * eps * norm(reference)

Exit status: 0 parity, 1 mismatch, 2 nothing that could be compared. This file works alone. With
diagnose_training.py beside it, it also names the likely cause; with report_training.py, --report works.
"""

import argparse
import json
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import torch

# Measured by tests/measure_error.py: see "What is compared" in the README.
ELEMENT_EPS = 64.0  # default rtol, in eps of the dtype: 7.6e-6 in float32
NORM_EPS = 16.0  # default norm_eps
# A gradient below this share of the largest one of its step is zero but for rounding, such as that of a
# bias before a batch norm: 16 eps of float32, whatever the dtype.
NEGLIGIBLE = 16 * 2.0**-23

FORMAT = "parity-record-3"
SCHEMA = "parity-comparison-1"  # of --json; the README describes it
# What makes two runs the same job. Anything else in the metadata may differ, and is shown.
SAME_JOB = (
    *("format", "model", "seed", "steps", "global_batch_size", "learning_rate", "optimizer"),
    *("mode", "world_size", "dp_degree", "tp_degree"),
)
LAYOUT = SAME_JOB[-4:]  # in what a reference of one rank may differ
SHOWN = ("mode", "device", "backend", "compile_backend", "torch_version", "torch_neuronx_version")
# Causal order within a step: each kind follows from the ones before it.
KINDS = ("outputs", "losses", "gradients", "parameters", "deltas")
INVARIANTS = {
    "finite": "no value is NaN or infinite",
    "nonzero": "no tensor is zero throughout",
    "ranks agree": "full gradients, parameters and deltas are the same on every rank",
    "outputs": "outputs differ between data-parallel replicas and agree within one",
    "loss": "the global loss is the mean of the replicas' own losses",
    "update": "a delta is the difference of the parameters after and before the step",
    "sgd": "a delta is -learning rate x gradient",
}

Key = tuple[str, str]  # kind and name of a tensor
Tensors = dict[Key, torch.Tensor]  # of one rank and step, in causal order
Steps = list[Tensors]  # of one rank; step 0 is before training and has parameters only


class InputError(Exception):
    """Files that cannot be compared: reported in one line, exit status 2."""


class Tolerance(NamedTuple):
    """What --rtol, --atol and --norm-eps say; None where the default applies."""

    rtol: float | None = None
    atol: float | None = None
    norm_eps: float | None = None


DEFAULT = Tolerance()


class Result(NamedTuple):
    """How one tensor of one rank and step compares."""

    passed: bool
    score: float = 0.0  # the error as a share of what is allowed; above 1 it failed
    eps: float = 0.0  # norm of the error over norm of the reference, in eps of the dtype
    needed_rtol: float = 0.0  # smallest rtol under which it would have passed; inf if none would
    needed_norm_eps: float = 0.0  # the same for norm_eps
    message: str = ""  # for a failed one: where and by how much; for a passed one: why it was not compared


class Finding(NamedTuple):
    """Something that failed: of which tensor, and why."""

    step: int  # 0 is before training
    rank: int
    kind: str
    name: str
    check: str  # "reference", or the name of an invariant and the run that breaks it
    message: str


# ---------------------------------------------------------------- reading rank files


def find_ranks(directory: Path, world_size: int) -> None:
    """Raise InputError unless the directory holds rank-0.pt to rank-<world_size - 1>.pt and no other."""
    try:
        if not directory.is_dir():
            raise InputError(f"{directory} is not a directory; give the --output-dir of a finished run")
        names = {path.name for path in directory.iterdir() if re.fullmatch(r"rank-.*\.pt", path.name)}
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}") from None
    if len(names) < world_size:
        missing = next(rank for rank in range(world_size) if f"rank-{rank}.pt" not in names)
        raise InputError(
            f"{directory} has {len(names)} of {world_size} rank files, rank-{missing}.pt is missing: the "
            "run did not finish, or --world-size is wrong"
        )
    extra = names - {f"rank-{rank}.pt" for rank in range(world_size)}
    if extra:
        raise InputError(
            f"{directory} holds {min(extra)}, too many for --world-size {world_size}: give the world size "
            "of the run"
        )


def load_rank(directory: Path, rank: int, world_size: int) -> dict:
    """Return one rank's {"metadata", "records"}; raise InputError if it is not what it should be.

    Files are opened with weights_only: a pickle that would run code is refused, not run. They are
    mapped, not read: of a 64-rank run, only what is looked at is in memory at any time.
    """
    path = directory / f"rank-{rank}.pt"
    if not path.is_file():
        raise InputError(f"{path} is not a file; run the job again")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read, it is truncated or no result file: {reason}") from None
    problem = describe_problem(content)
    if problem:
        raise InputError(f"{path} is no result file of format {FORMAT}: {problem}")
    metadata, records = content["metadata"], content["records"]
    for name, expected in (("rank", rank), ("world_size", world_size)):
        if metadata[name] != expected:
            raise InputError(
                f"{path} says {name} {metadata[name]!r}, expected {expected!r}: files were renamed or "
                "swapped, or --world-size is wrong"
            )
    if not records or len(records) != metadata["steps"]:
        raise InputError(f"{path} has {len(records)} step records, expected {metadata['steps']}")
    return content


def describe_problem(content: object) -> str | None:
    """Return what is wrong with the structure of a rank file's content, None if nothing is."""
    if not isinstance(content, dict) or not {"metadata", "records"} <= content.keys():
        return "it does not hold metadata and records"
    metadata, records = content["metadata"], content["records"]
    if not isinstance(metadata, dict) or not isinstance(records, list):
        return "metadata is no dictionary or records is no list"
    if metadata.get("format") != FORMAT:
        return f"its format is {metadata.get('format')!r}"
    for key in (*SAME_JOB, *SHOWN):
        if not isinstance(metadata.get(key, ()), str | int | float | None):
            return f"metadata {key} is missing or no plain value"
    for key in ("rank", "world_size", "dp_degree", "dp_rank", "tp_degree", "tp_rank"):
        if type(metadata.get(key)) is not int:
            return f"metadata {key} is missing or no whole number"
    for key in ("dp", "tp"):
        rank, degree = metadata[f"{key}_rank"], metadata[f"{key}_degree"]
        if not 0 <= rank < degree:
            return f"{key}_rank is {rank} of {key}_degree {degree}"
    rate = metadata["learning_rate"]
    if metadata["optimizer"] == "SGD" and not (type(rate) in (int, float) and isfinite(rate)):
        return f"learning_rate is {rate!r}, expected a number with optimizer SGD"
    for step, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not {"output", "loss", "local_loss", *KINDS[2:]} <= record.keys():
            return f"step {step} lacks one of output, loss, local_loss, {', '.join(KINDS[2:])}"
        for name in ("loss", "local_loss"):
            if not isinstance(record[name], float):
                return f"step {step}: {name} is a {type(record[name]).__name__}, expected a float"
        named = [record[kind] for kind in KINDS[2:]]
        if not all(isinstance(tensors, dict) for tensors in named):
            return f"step {step}: gradients, parameters and deltas must be dictionaries by name"
        gradients, parameters, deltas = named
        if not gradients or gradients.keys() != deltas.keys() or not gradients.keys() <= parameters.keys():
            return f"step {step}: gradients and deltas must have the same names, all among the parameters"
        initial = records[0].get("initial")
        if not isinstance(initial, dict) or initial.keys() != parameters.keys():
            return f"step {step}: the parameters must have the names of step 1's initial parameters"
        tensors = flatten(record)
        if step == 1:
            tensors.update({("initial parameters", name): tensor for name, tensor in initial.items()})
        slack = record.get("slack", {})
        if not isinstance(slack, dict) or not slack.keys() <= gradients.keys():
            return f"step {step}: slack is no dictionary by names of gradients"
        tensors.update({("slack", name): tensor for name, tensor in slack.items()})
        for (kind, name), tensor in tensors.items():
            if not isinstance(name, str) or not name.isprintable():
                return f"step {step}: the name {name!r} of one of the {kind} is no printable text"
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
                return f"step {step}: {kind} {name} is {type(tensor).__name__}, expected a plain dense tensor"
            if tensor.device.type != "cpu" or not tensor.numel():
                return f"step {step}: {kind} {name} holds no values"
            if kind not in ("outputs", "losses") and tensor.shape != getattr(parameters[name], "shape", None):
                return f"step {step}: {kind} {name} has another shape than the parameter"
    return None


def flatten(record: dict) -> Tensors:
    """Return one step's tensors by (kind, name), in causal order.

    Gradients are in reverse order of the names: backward computes those of the last layer first.
    """
    tensors = {
        ("outputs", "output"): record["output"],
        ("losses", "global loss"): torch.tensor(record["loss"], dtype=torch.float64),
    }
    for kind in KINDS[2:]:
        items = record[kind].items()
        tensors.update(
            {(kind, name): tensor for name, tensor in (reversed(items) if kind == "gradients" else items)}
        )
    return tensors


def steps_of(content: dict) -> Steps:
    """Return the tensors of step 0 (the initial parameters), 1, 2, ... of a rank file's content."""
    initial = {("parameters", name): tensor for name, tensor in content["records"][0]["initial"].items()}
    return [initial, *map(flatten, content["records"])]


class Run:
    """The rank files of one directory, opened one at a time."""

    def __init__(self, directory: Path, world_size: int, may_be_whole: bool = False) -> None:
        """Open rank 0's. may_be_whole: a run of one rank will do, the whole job in one process."""
        self.directory = directory
        self.whole = may_be_whole and not (directory / "rank-1.pt").exists() and self._is_of_one_rank()
        self.world_size = 1 if self.whole else world_size
        find_ranks(directory, self.world_size)
        self.first = load_rank(directory, 0, self.world_size)
        self.metadata = self.first["metadata"]
        self.last: tuple[int, dict] | None = None  # the rank opened last; no more are kept

    def _is_of_one_rank(self) -> bool:
        try:
            path = self.directory / "rank-0.pt"
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return content["metadata"]["world_size"] == 1
        except Exception:
            return False  # load_rank will say what is wrong with it

    @property
    def label(self) -> str:
        """What the run is called in a table: oracle, or the device it ran on."""
        return "oracle" if self.metadata["mode"] == "oracle" else self.metadata["device"]

    def rank(self, rank: int) -> dict:
        """Return the content of a rank's file. Raises InputError, also if it is of another run."""
        if rank == 0 or self.whole:
            return self.first
        if self.last and self.last[0] == rank:
            return self.last[1]
        content = load_rank(self.directory, rank, self.world_size)
        for key in (*SAME_JOB, *SHOWN, "run_id"):
            first, other = self.metadata.get(key), content["metadata"].get(key)
            if first != other:
                raise InputError(
                    f"{self.directory} mixes runs: {key} is {first!r} in rank-0.pt and {other!r} in "
                    f"rank-{rank}.pt; run the job again"
                )
        self.last = rank, content
        return content

    def steps(self, rank: int, like: dict) -> Steps:
        """Return a rank's steps; of a whole run, the part that a rank with metadata `like` sees."""
        steps = steps_of(self.rank(rank))
        if not self.whole:
            return steps
        parts = like["dp_degree"]
        for tensors in steps[1:]:
            output = tensors["outputs", "output"]
            if parts > 1 and (output.dim() == 0 or len(output) % parts):
                raise InputError(
                    f"{self.directory}: the output of the whole batch, {tuple(output.shape)}, does not "
                    f"divide over {parts} data-parallel replicas; compare with a run of as many ranks"
                )
            if parts > 1:
                tensors["outputs", "output"] = output.chunk(parts)[like["dp_rank"]]
        return steps


def check_same_job(reference: Run, actual: Run) -> None:
    """Raise InputError unless both runs trained the same model on the same data in the same way."""
    first, second = reference.metadata, actual.metadata
    for key in SAME_JOB:
        if first[key] != second[key] and not (reference.whole and key in LAYOUT):
            raise InputError(
                f"the runs differ in {key}: reference {first[key]!r}, actual {second[key]!r}; run both with "
                "the same settings"
            )
    if None is not first.get("saved_at") == second.get("saved_at"):
        raise InputError("the two directories hold the same run, one is a copy; give two runs")


def check_same_parameters(left: Steps, right: Steps, names: tuple[str, str]) -> None:
    """Raise InputError unless both have parameters of the same names and shapes.

    names: what the two are called in the message.
    """
    for step, (one, other) in enumerate(zip(left, right, strict=True)):
        known = [{name for kind, name in tensors if kind == "parameters"} for tensors in (one, other)]
        if known[0] != known[1]:
            name = min(known[0] ^ known[1])
            raise InputError(
                f"step {step}: parameter {name} is in only one of {' and '.join(names)}; run both anew"
            )
        for key in one:
            if key[0] != "outputs" and key in other and one[key].shape != other[key].shape:
                raise InputError(
                    f"step {step}: {' '.join(key)} is {tuple(one[key].shape)} in {names[0]}, "
                    f"{tuple(other[key].shape)} in {names[1]}; run both anew"
                )


# ---------------------------------------------------------------- one tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 or complex128, in which every dtype can be computed with."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def eps_of(*tensors: torch.Tensor) -> float:
    """Return the coarsest eps of the floating-point tensors among these; 0 if there are none."""
    return max(
        (torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()), default=0.0
    )


def compare_tensor(
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance = DEFAULT,
    *,
    eps: float = 0.0,
    parameter: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    slack: torch.Tensor | None = None,
    floor: float = 0.0,
    any_type: bool = False,
) -> Result:
    """Compare two tensors, element by element and by the norm of their difference.

    eps is the unit, by default the coarser of the tensors' own. Without an rtol, it is ELEMENT_EPS units;
    without an atol, it is rtol times the reference's largest magnitude: elements near zero are the sum
    of larger terms and carry their rounding error. With an rtol or atol and no norm_eps, only elements
    are judged.

    parameter: for a delta, its parameter. The difference of two nearly equal numbers has the rounding
    error of those: 2 eps of the largest parameter is allowed on top, and in norm; the error's norm is
    then given relative to the parameter's.
    initial: for a parameter, its value before training. What moved since is judged in units, the rest
    in eps of its own dtype: float32 parameters under bfloat16 gradients.
    slack: for each element an absolute error that is allowed on top.
    floor: where both tensors stay below it, they are zero but for rounding, and pass.
    any_type: the reference may be of another dtype, as a float64 one is.
    """
    if actual.shape != reference.shape:
        shapes = f"{list(actual.shape)}, expected {list(reference.shape)}"
        return Result(False, inf, inf, inf, inf, f": its shape is {shapes}")
    if actual.dtype != reference.dtype and not any_type:
        types = f"{actual.dtype}, expected {reference.dtype}".replace("torch.", "")
        return Result(False, inf, inf, inf, inf, f": its type is {types}")
    own = eps_of(actual, reference)
    unit = (eps or own) if own else 0.0  # whole numbers must be equal
    a, r = wide(actual), wide(reference)
    for name, tensor in (("reference", r), ("actual", a)):
        finite = torch.isfinite(tensor)
        if not finite.all():
            index = tuple(torch.nonzero(~finite)[0].tolist())
            values = f"reference {r[index].item():.9g}, actual {a[index].item():.9g}"
            message = f"{position(index)}: {values}: not finite in the {name} run"
            return Result(False, inf, inf, inf, inf, message)
    error = (a - r).abs()
    if not error.any():
        return Result(True)
    if max(a.abs().max(), r.abs().max()) <= floor:
        return Result(True, message="zero but for rounding in both runs, not compared")

    largest, norm = r.abs().max(), r.norm().item()
    extra, norm_extra, whole = 0.0, 0.0, norm
    if parameter is not None:
        p = wide(parameter)
        extra, norm_extra, whole = 2 * own * p.abs().max(), 2 * own * p.norm().item(), p.norm().item()
    judged = own if initial is not None else unit
    rtol = ELEMENT_EPS * judged if tolerance.rtol is None else tolerance.rtol
    norm_eps = tolerance.norm_eps
    if norm_eps is None:
        norm_eps = NORM_EPS if tolerance.rtol is None and tolerance.atol is None else inf
    if initial is not None and tolerance.rtol is None:
        moved = r - wide(initial)
        extra, norm_extra = ELEMENT_EPS * unit * moved.abs().max(), NORM_EPS * unit * moved.norm().item()
    if slack is not None:
        extra, norm_extra = extra + slack, norm_extra + slack.norm().item()
    weight = r.abs() if tolerance.atol is not None else r.abs() + largest
    allowed = extra + (tolerance.atol or 0.0) + rtol * weight
    # Not "error > allowed": values near the largest float overflow, and inf is not below inf.
    bad = ~((error <= allowed) & torch.isfinite(allowed))
    # An explicit tolerance takes the place of the allowance for what has moved.
    kept, kept_norm = (0.0, 0.0) if initial is not None else (extra, norm_extra)
    needed = (error - kept - (tolerance.atol or 0.0)).clamp(min=0) / weight
    needed = needed.nan_to_num(nan=0.0, posinf=inf).max().item()
    distance = error.norm().item()
    allowed_norm = norm_extra + norm_eps * judged * norm if norm_eps < inf else inf
    relative = distance / (judged or 1.0) / (whole or 1.0)
    needed_norm = max(0.0, distance - kept_norm) / ((judged or 1.0) * norm) if norm else inf
    norm_failed = not (distance <= allowed_norm)
    score = max(
        (error / allowed).nan_to_num(nan=0.0).max().item(), distance / allowed_norm if allowed_norm else inf
    )
    if not bad.any() and not norm_failed:
        return Result(True, score, relative, needed, needed_norm)
    worst = int((error - allowed).nan_to_num(nan=inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), r.shape))
    message = (
        f"{position(index)}: reference {r[index].item():.9g}, actual {a[index].item():.9g}, difference "
        f"{error[index]:.3g}, allowed {allowed[index] if allowed.dim() else allowed:.3g}; {int(bad.sum())} "
        f"of {r.numel()} elements differ, the norm by {relative:.3g} eps"
    )
    return Result(False, score, relative, needed, needed_norm, message)


def position(index: tuple[int, ...]) -> str:
    """Return how an element is written behind its tensor's name; nothing for a scalar."""
    return str(list(index)) if index else ""


# ---------------------------------------------------------------- one run by itself


class RunChecks:
    """Check the INVARIANTS of one run, which gets its ranks one after another."""

    def __init__(self, run: str, metadata: dict, tolerance: Tolerance = DEFAULT) -> None:
        self.run, self.metadata, self.tolerance = run, metadata, tolerance
        self.checked = dict.fromkeys(INVARIANTS, 0)
        self.findings: list[Finding] = []
        self.first: Steps = []  # rank 0's steps
        self.outputs: dict[int, list[torch.Tensor]] = {}  # by replica, of its first rank, for each step
        self.heads: dict[int, torch.Tensor] = {}  # by step: their first elements, a row for each replica
        self.losses: list[tuple[int, list[tuple[float, float]]]] = []  # by rank: replica, (global, own)
        self.nonzero: dict[tuple[Key, int], bool] = {}  # by tensor and the replica whose output it is
        self.not_finite: dict[tuple[int, Key, int], str] = {}
        self.broken_updates: dict[tuple[int, str], dict[str, str]] = {}  # of rank 0, by step and name
        self.eps = 0.0

    def fail(self, step: int, key: Key, rank: int, check: str, message: str) -> None:
        """Note that a tensor of this rank and step breaks an invariant."""
        self.findings.append(Finding(step, rank, *key, f"{check} ({self.run} run)", message))

    def add(self, content: dict, steps: Steps) -> list[set[Key]]:
        """Check a rank; return for each step the tensors that are not bitwise those of an earlier rank.

        Full tensors are compared with rank 0's, outputs with those of the replica's first rank.
        """
        metadata, records = content["metadata"], content["records"]
        rank, replica = metadata["rank"], metadata["dp_rank"]
        if not self.first:
            self.first = steps
            self.eps = eps_of(*trained(steps), *(t for (k, _), t in steps[1].items() if k in KINDS[::2]))
        self.losses.append((replica, [(record["loss"], record["local_loss"]) for record in records]))
        if rank:
            names = f"rank 0 of the {self.run} run", f"rank {rank}"
            check_same_parameters(self.first, steps, names)
        new_replica = replica not in self.outputs
        if new_replica:
            self._compare_with_other_replicas(rank, steps)
            # Copies: a view of the file would keep all of it in memory.
            self.outputs[replica] = [tensors["outputs", "output"].clone() for tensors in steps[1:]]
        fresh = []
        for step, tensors in enumerate(steps):
            fresh.append(set())
            first = self.first[step]
            for key in first.keys() - tensors.keys():
                fresh[step].add(key)
                self.fail(step, key, rank, "ranks agree", ": rank 0 has it, this rank has not")
            for key, tensor in tensors.items():
                output = key[0] == "outputs"
                new = new_replica if output else rank == 0
                twin = self.outputs[replica][step - 1] if output else first.get(key)
                place = step, key, replica if output else 0
                if twin is None:
                    fresh[step].add(key)
                    self.fail(step, key, rank, "ranks agree", ": this rank has it, rank 0 has not")
                    continue
                if not new and key[0] != "losses":
                    self.checked["outputs" if output else "ranks agree"] += 1
                if new or twin.dtype != tensor.dtype or not torch.equal(twin, tensor):
                    fresh[step].add(key)
                    self._check_fresh(place, rank, tensor, None if new else twin)
                elif place in self.not_finite:
                    self.fail(step, key, rank, "finite", self.not_finite[place])
            if step:
                self._check_updates(step, rank, steps, fresh)
        return fresh

    def _compare_with_other_replicas(self, rank: int, steps: Steps) -> None:
        others = list(self.outputs)
        for step, tensors in enumerate(steps[1:], start=1):
            output, message = tensors["outputs", "output"], None
            self.checked["outputs"] += len(others)
            # The first elements, of all replicas at once, settle it for nearly all pairs.
            head = torch.zeros(1, 16, dtype=wide(output).dtype)
            head[0, : output.numel()] = wide(output.reshape(-1)[:16])
            heads = self.heads.get(step, head[:0])
            self.heads[step] = torch.cat([heads, head])
            near = (heads - head).abs().amax(dim=1) <= NEGLIGIBLE * wide(output).abs().max()
            if others and output.shape != self.outputs[others[0]][step - 1].shape:
                shape = list(self.outputs[others[0]][step - 1].shape)
                message = f": its shape is {list(output.shape)}, replica {others[0]}'s {shape}"
            for other in [other for other, alike in zip(others, near.tolist(), strict=True) if alike]:
                theirs = self.outputs[other][step - 1]
                if output.shape == theirs.shape and not message:
                    error = (wide(output) - wide(theirs)).abs().max()
                    if error <= NEGLIGIBLE * wide(output).abs().max():
                        message = f": the same as those of replica {other}: both got the same samples"
            if message:
                self.fail(step, ("outputs", "output"), rank, "outputs", message)

    def _check_fresh(
        self, place: tuple[int, Key, int], rank: int, tensor: torch.Tensor, twin: torch.Tensor | None
    ) -> None:
        step, key, replica = place
        kind = key[0]
        self.checked["finite"] += 1
        finite = torch.isfinite(wide(tensor))
        if not finite.all():
            index = tuple(torch.nonzero(~finite)[0].tolist())
            message = f"{position(index)}: it is {wide(tensor)[index].item()}"
            if twin is None:
                self.not_finite[place] = message
            self.fail(step, key, rank, "finite", message)
        elif twin is not None and kind != "losses":
            check = "outputs" if kind == "outputs" else "ranks agree"
            parameter = self.first[step]["parameters", key[1]] if kind == "deltas" else None
            result = compare_tensor(
                *(tensor, twin, self.tolerance),
                eps=self.eps,
                floor=NEGLIGIBLE * largest(self.first[step], kind)
                if kind in ("gradients", "deltas")
                else 0.0,
                parameter=parameter,
            )
            if not result.passed:
                message = result.message.replace("reference", "an earlier rank").replace(
                    "actual", "this rank"
                )
                self.fail(step, key, rank, check, message)
        at = key, replica
        self.nonzero[at] = self.nonzero.get(at, False) or bool(wide(tensor).any())

    def _check_updates(self, step: int, rank: int, steps: Steps, fresh: list[set[Key]]) -> None:
        for name in [name for kind, name in steps[step] if kind == "deltas"]:
            keys = [("parameters", name), ("deltas", name), ("gradients", name)]
            if not (fresh[step] & set(keys) or keys[0] in fresh[step - 1]):
                # Bitwise what rank 0 has: right or wrong alike.
                broken = self.broken_updates.get((step, name), {})
            else:
                broken = self._broken_update(steps[step - 1][keys[0]], *(steps[step][key] for key in keys))
                if rank == 0:
                    self.broken_updates[step, name] = broken
            for check, message in broken.items():
                self.fail(step, ("deltas", name), rank, check, message)
        for key in [
            key for key in steps[step] if key[0] == "parameters" and ("deltas", key[1]) not in steps[step]
        ]:
            if not torch.equal(steps[step][key], steps[step - 1][key]):
                self.fail(step, key, rank, "update", ": it changes, though it has no gradient")

    def _broken_update(
        self, before: torch.Tensor, after: torch.Tensor, delta: torch.Tensor, gradient: torch.Tensor
    ) -> dict[str, str]:
        if not all(torch.isfinite(wide(tensor)).all() for tensor in (before, after, delta, gradient)):
            return {}
        checks = {"update": wide(after) - wide(before)}
        if self.metadata["optimizer"] == "SGD":
            checks["sgd"] = -self.metadata["learning_rate"] * wide(gradient)
        broken = {}
        for check, expected in checks.items():
            self.checked[check] += 1
            result = compare_tensor(delta, expected, eps=self.eps, parameter=after, any_type=True)
            if not result.passed:
                broken[check] = result.message.replace("reference", "expected", 1)
        return broken

    def finish(self) -> list[Finding]:
        """Check what takes all ranks, and return everything found."""
        key = ("losses", "global loss")
        for step in range(1, len(self.first)):
            own = defaultdict(list)  # by replica
            for replica, losses in self.losses:
                own[replica].append(losses[step - 1][1])
            mean = sum(sum(values) / len(values) for values in own.values()) / len(own)
            allowed = NORM_EPS * max(self.eps, torch.finfo(torch.float32).eps) * abs(mean)
            for rank, (_, losses) in enumerate(self.losses):
                self.checked["loss"] += 1
                loss, own_loss = losses[step - 1]
                if not isfinite(own_loss):
                    self.fail(step, key, rank, "finite", f": the rank's own loss is {own_loss}")
                elif isfinite(loss) and isfinite(mean) and not abs(loss - mean) <= allowed:
                    message = (
                        f": it is {loss:.9g}, the mean of the {len(own)} replicas' own losses is {mean:.9g}"
                    )
                    self.fail(step, key, rank, "loss", message)
        for (key, replica), nonzero in self.nonzero.items():
            self.checked["nonzero"] += 1
            frozen = key[0] == "parameters" and ("gradients", key[1]) not in self.first[1]
            if not nonzero and not frozen:
                for rank, (rank_replica, _) in enumerate(self.losses):
                    if key[0] != "outputs" or rank_replica == replica:
                        self.fail(1, key, rank, "nonzero", ": all zero at every step, nothing is compared")
        for step, tensors in enumerate(self.first[1:], start=1):
            gradients = {key: tensor for key, tensor in tensors.items() if key[0] == "gradients"}
            if not any(wide(tensor).any() for tensor in gradients.values()):
                self.fail(step, next(iter(gradients)), 0, "nonzero", ": all gradients of this step are zero")
        return self.findings

    def failed(self, check: str) -> int:
        """Return how often an invariant was broken."""
        return sum(finding.check.startswith(check) for finding in self.findings)


# ---------------------------------------------------------------- one run against a reference


class Comparison:
    """Compare a run with a reference; both give their ranks one after another."""

    def __init__(self, tolerance: Tolerance, any_type: bool) -> None:
        """any_type: the reference may be of other dtypes, as the oracle's float64 is."""
        self.tolerance, self.any_type = tolerance, any_type
        self.findings: list[Finding] = []
        self.results: dict[Key, list[tuple[int, int, Result]]] = defaultdict(list)  # (rank, step, result)
        self.scores: list[list[float]] = []  # by rank and step: worst error as a share of what is allowed
        self.cache: dict[tuple, Result] = {}

    def add(
        self,
        metadata: dict,
        expected: Steps,
        steps: Steps,
        fresh: list[set[Key]],
        slacks: list[Tensors],
    ) -> int:
        """Compare a rank; return how many of its tensors failed.

        fresh: by step the tensors that differ from an earlier rank's in either run. All other pairs
        were compared before. slacks: by step, what the oracle allows on top (see oracle_train.py).
        """
        rank, replica = metadata["rank"], metadata["dp_rank"]
        count = len(self.findings)
        self.scores.append([])
        # The unit is that of the model and of what the reference computed: autocast that only the run in
        # question used is a difference.
        computed = [] if self.any_type else [t for (kind, _), t in expected[1].items() if kind in KINDS[::2]]
        eps = eps_of(*trained(steps), *computed)
        for step, (left, right) in enumerate(zip(expected, steps, strict=True)):
            worst = 0.0
            for key in left | right:
                cached = (step, key, replica if key[0] == "outputs" else None)
                result = None if key in fresh[step] else self.cache.get(cached)
                if result is None:
                    result = self._compare(key, left, right, expected[0], eps, slacks[step])
                    self.cache.setdefault(cached, result)
                self.results[key].append((rank, step, result))
                worst = max(worst, result.score)
                if not result.passed:
                    self.findings.append(Finding(step, rank, *key, "reference", result.message))
            self.scores[-1].append(worst)
        return len(self.findings) - count

    def _compare(
        self, key: Key, left: Tensors, right: Tensors, initial: Tensors, eps: float, slack: dict
    ) -> Result:
        kind, name = key
        if key not in left or key not in right:
            which = "reference" if key not in left else "actual"
            message = f": there is none in the {which} run: the parameter is frozen there, or left out"
            return Result(False, inf, inf, inf, inf, message)
        reference, settings = left[key], {}
        if kind == "losses":
            eps = max(eps, torch.finfo(torch.float32).eps)
        if kind == "deltas":
            settings["parameter"] = left["parameters", name]
        if kind == "parameters":
            settings["initial"] = initial[key]
        if kind in KINDS[2:]:
            settings["slack"] = slack.get(key)
            # A parameter as small as a negligible delta is made of such deltas.
            floor = NEGLIGIBLE * largest(left, "gradients" if kind == "gradients" else "deltas")
            settings["floor"] = floor
        return compare_tensor(
            right[key], reference, self.tolerance, eps=eps, any_type=self.any_type, **settings
        )

    def by_kind(self) -> dict[str, list[Result]]:
        """Return the results of each kind of tensor."""
        kinds = {kind: [] for kind in KINDS}
        for (kind, _), results in self.results.items():
            kinds[kind] += [result for _, _, result in results]
        return kinds


def trained(steps: Steps) -> list[torch.Tensor]:
    """Return the initial values of the parameters that get gradients; all of them if none does."""
    names = {name for kind, name in steps[1] if kind == "gradients"}
    return [tensor for (_, name), tensor in steps[0].items() if name in names] or list(steps[0].values())


def largest(tensors: Tensors, kind: str) -> float:
    """Return the largest magnitude among the tensors of a kind, 0 if there are none."""
    return max((wide(t).abs().max().item() for (k, _), t in tensors.items() if k == kind), default=0.0)


def slacks_of(content: dict) -> list[Tensors]:
    """Return by step what a whole run allows on top for gradients and deltas; nothing for step 0."""
    rate = content["metadata"]["learning_rate"]
    slacks = [{}]
    for record in content["records"]:
        slack = record.get("slack", {})
        slacks.append({("gradients", name): tensor for name, tensor in slack.items()})
        slacks[-1].update({("deltas", name): rate * tensor for name, tensor in slack.items()})
    return slacks


# ---------------------------------------------------------------- all ranks, and what is said of them


class Verdict(NamedTuple):
    """What compare_runs found."""

    comparison: Comparison | None
    checks: list[RunChecks]  # of the actual run and, if it has several ranks, of the reference
    against_oracle: list[Comparison]  # reference, actual
    losses: list[dict[str, float]]  # by step, of rank 0
    findings: list[Finding]  # in causal order


def compare_runs(
    reference: Run | None,
    actual: Run,
    oracle: Run | None = None,
    tolerance: Tolerance = DEFAULT,
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare all ranks, holding at most two of a run in memory. Raises InputError."""
    checks = [RunChecks("actual", actual.metadata, tolerance)]
    if reference:
        checks.append(RunChecks("reference", reference.metadata, tolerance))
        if reference.whole:
            checks[1].add(reference.first, steps_of(reference.first))
    comparison = Comparison(tolerance, any_type=reference.whole) if reference else None
    against_oracle = [Comparison(tolerance, any_type=True) for _ in range(2)] if oracle else []
    whole = oracle or (reference if reference and reference.whole else None)
    slacks = slacks_of(whole.first) if whole else [{}] * (actual.metadata["steps"] + 1)
    losses = [{} for _ in range(actual.metadata["steps"])]
    for rank in range(actual.world_size):
        progress(f"comparing rank {rank} of {actual.world_size}")
        content = actual.rank(rank)
        metadata = content["metadata"]
        runs = {"actual": steps_of(content)}
        fresh = checks[0].add(content, runs["actual"])
        either = fresh
        if reference:
            runs["reference"] = reference.steps(rank, metadata)
            names = "the reference", f"rank {rank} of the actual run"
            check_same_parameters(runs["reference"], runs["actual"], names)
            if not reference.whole:
                other = reference.rank(rank)["metadata"]
                for key in ("dp_rank", "tp_rank"):
                    if other[key] != metadata[key]:
                        raise InputError(
                            f"rank {rank} has {key} {other[key]} in the reference, {metadata[key]} in the "
                            "actual run; run both on the same mesh"
                        )
                fresh_too = checks[1].add(reference.rank(rank), runs["reference"])
                either = [one | other for one, other in zip(fresh, fresh_too, strict=True)]
            comparison.add(metadata, runs["reference"], runs["actual"], either, slacks)
        if oracle:
            runs["oracle"] = oracle.steps(rank, metadata)
            check_same_parameters(runs["oracle"], runs["actual"], ("the oracle", f"rank {rank}"))
            for one, name, new in zip(against_oracle, ("reference", "actual"), (either, fresh), strict=True):
                one.add(metadata, runs["oracle"], runs[name], new, slacks)
        if rank == 0:
            for name, steps in runs.items():
                for step, tensors in enumerate(steps[1:]):
                    losses[step][name] = tensors["losses", "global loss"].item()
    progress("")
    seen = {replica for replica, _ in checks[0].losses}
    if len(seen) != actual.metadata["dp_degree"]:
        raise InputError(
            f"the ranks of {actual.directory} name {len(seen)} data-parallel replicas, dp_degree is "
            f"{actual.metadata['dp_degree']}; save each rank's own dp_rank"
        )
    findings = [finding for check in checks for finding in check.finish()]
    findings += comparison.findings if comparison else []
    # Causal order within a step is that in which a record of the run holds its tensors.
    order = {key: place for place, key in enumerate(runs.get("reference", runs["actual"])[1])}
    findings.sort(
        key=lambda f: (
            f.step,
            order.get((f.kind, f.name), len(order)),
            f.rank,
            f.check != "reference",
            f.check,
        )
    )
    return Verdict(comparison, checks, against_oracle, losses, findings)


def find_cause(verdict: Verdict, reference: Run | None, actual: Run) -> str | None:
    """Return the likely cause of the first finding in plain words, None if nothing explains it."""
    if not find_spec("diagnose_training"):
        return None
    import diagnose_training

    def steps(run):
        cache = {}

        def of(rank):
            if rank not in cache:
                cache[rank] = run.steps(rank, actual.rank(rank)["metadata"])
            return cache[rank]

        return of

    first = verdict.findings[0]
    where = first.step, first.kind, first.name
    try:
        return diagnose_training.find_cause(
            where,
            sorted({f.rank for f in verdict.findings if (f.step, f.kind, f.name) == where}),
            steps(actual),
            steps(reference) if reference else None,
            [actual.rank(rank)["metadata"] for rank in range(actual.world_size)],
            [losses for _, losses in verdict.checks[0].losses],
            invariant=first.check != "reference",
        )
    except Exception as error:  # what was found must be told even so
        print(f"warning: the diagnosis broke off with {error!r}", file=sys.stderr)
        return None


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as they are written in a message: 0-3, 7."""
    parts = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def summarize(verdict: Verdict, runs: dict[str, Run | None], tolerance: Tolerance, cause: str | None) -> dict:
    """Return everything that --json writes and the report shows; the README describes the fields."""
    actual = runs["actual"]
    first = verdict.findings[0] if verdict.findings else None
    described = {
        name: run and {"label": run.label, "directory": str(run.directory), "metadata": run.metadata}
        for name, run in runs.items()
    }
    kinds, tensors = [], []
    if verdict.comparison:
        for kind, results in verdict.comparison.by_kind().items():
            kinds.append({"kind": kind} | figures(results))
        for (kind, name), results in verdict.comparison.results.items():
            rank, step, _ = max(results, key=lambda item: (item[2].score, -item[0], -item[1]))
            row = {"kind": kind, "name": name} | figures([result for _, _, result in results])
            tensors.append(row | {"worst_rank": rank, "worst_step": step})
    differences = []
    if runs["reference"]:
        keys = (*SAME_JOB, *SHOWN)
        pairs = [(key, runs["reference"].metadata[key], actual.metadata[key]) for key in dict.fromkeys(keys)]
        differences = [{"key": k, "reference": r, "actual": a} for k, r, a in pairs if r != a]
    oracle_errors = None
    if verdict.against_oracle:
        oracle_errors = []
        for kind in KINDS:
            errors = [max(r.eps for r in one.by_kind()[kind]) for one in verdict.against_oracle]
            ratio = errors[1] / errors[0] if errors[0] else None
            oracle_errors.append(
                {"kind": kind, "reference_eps": errors[0], "actual_eps": errors[1], "ratio": ratio}
            )
    return {
        "schema": SCHEMA,
        "verdict": "FAIL" if verdict.findings else "PASS",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": actual.world_size,
        "steps": actual.metadata["steps"],
        **described,
        "differences": differences,
        "tolerance": {**tolerance._asdict(), "element_eps": ELEMENT_EPS, "default_norm_eps": NORM_EPS},
        "losses": [{"step": step} | losses for step, losses in enumerate(verdict.losses, start=1)],
        "kinds": kinds,
        "tensors": tensors,
        "scores": verdict.comparison.scores if verdict.comparison else [],
        "invariants": [
            {
                "run": check.run,
                "name": name,
                "text": text,
                "checked": check.checked[name],
                "failed": check.failed(name),
            }
            for check in verdict.checks
            for name, text in INVARIANTS.items()
        ],
        "findings": len(verdict.findings),
        "failed_ranks": sorted({finding.rank for finding in verdict.findings}),
        "first": first
        and {
            **{key: getattr(first, key) for key in ("step", "rank", "kind", "name", "check", "message")},
            "ranks": sorted(
                {
                    f.rank
                    for f in verdict.findings
                    if (f.step, f.kind, f.name) == (first.step, first.kind, first.name)
                }
            ),
        },
        "cause": cause,
        "oracle_errors": oracle_errors,
    }


def figures(results: list[Result]) -> dict:
    """Return the numbers of a table's row."""
    return {
        "compared": len(results),
        "mismatched": sum(not result.passed for result in results),
        "negligible": sum(result.passed and bool(result.message) for result in results),
        **{
            name: max(getattr(result, name) for result in results)
            for name in ("eps", "score", "needed_rtol", "needed_norm_eps")
        },
    }


def print_tables(summary: dict) -> None:
    """Print the global losses by step, then the errors by kind of tensor, then the invariants."""
    names = [name for name in ("oracle", "reference", "actual") if summary[name]]
    heads = [f"{name} {summary[name]['label']}" if name != "oracle" else name for name in names]
    compared = len(names) > 1
    head = "".join(f"{text:>20}" for text in heads) + (f"{'difference':>12}" if compared else "")
    print(f"\nstep{head}   (global loss)")
    for losses in summary["losses"]:
        line = "".join(f"{losses[name]:20.9f}" for name in names)
        print(
            f"{losses['step']:4}{line}"
            + (f"{losses['actual'] - losses['reference']:12.1e}" if compared else "")
        )
    if summary["kinds"]:
        print(f"\n{'tensors':12}{'compared':>9}{'mismatched':>12}{'largest error':>16}   would pass with")
    for row in summary["kinds"]:
        # Above what was measured, so that rounding the figure does not take it below.
        needed = f"--rtol {1.05 * row['needed_rtol']:.1e} --norm-eps {1.05 * row['needed_norm_eps']:.2g}"
        error = f"{row['eps']:.3g} eps"
        print(f"{row['kind']:12}{row['compared']:9}{row['mismatched']:12}{error:>16}   {needed}")
    if summary["kinds"]:
        rtol, norm_eps = (max(row[n] for row in summary["kinds"]) for n in ("needed_rtol", "needed_norm_eps"))
        print(f"{'all':49}   --rtol {1.05 * rtol:.1e} --norm-eps {1.05 * norm_eps:.2g}")
    for row in summary["tensors"]:
        if row["negligible"]:
            print(
                f"{row['kind']} {row['name']}: zero but for rounding, {row['negligible']} times not compared"
            )
    if summary["oracle_errors"]:
        labels = [f"{summary[name]['label']} ({name})" for name in ("reference", "actual")]
        print(f"\n{'against the oracle':20}{labels[0]:>18}{labels[1]:>18}{'ratio':>8}")
        for row in summary["oracle_errors"]:
            errors = [f" {row[name]:.3g} eps" for name in ("reference_eps", "actual_eps")]
            ratio = "-" if row["ratio"] is None else f" {row['ratio']:.3g}"
            print(f"{row['kind']:20}{errors[0]:>18}{errors[1]:>18}{ratio:>8}")
    print()
    for run in dict.fromkeys(row["run"] for row in summary["invariants"]):
        rows = [row for row in summary["invariants"] if row["run"] == run]
        idle = [row["name"] for row in rows if not row["checked"]]  # one rank, or another optimizer
        rows = [row for row in rows if row["checked"] or row["failed"]]
        broken = [row for row in rows if row["failed"]]
        more = f"; nothing to check for {', '.join(idle)}" if idle else ""
        print(f"invariants of the {run} run: {len(rows) - len(broken)} of {len(rows)} hold{more}")
        for row in broken:
            print(f"  broken {row['failed']} times: {row['name']}: {row['text']}")


def print_first(summary: dict) -> None:
    """Print the likely cause in plain words, then where the runs first differ."""
    first = summary["first"]
    unknown = "not known, nothing that we look for explains it"
    if not find_spec("diagnose_training"):
        unknown = "not looked for, diagnose_training.py is not beside this script"
    print(f"Likely cause: {summary['cause'] or unknown}")
    ranks = f"rank{'s' if len(first['ranks']) > 1 else ''} {ranges(first['ranks'])}"
    step = f"step {first['step']}" if first["step"] else "step 0 (before training)"
    print(f"First in causal order: {ranks}, {step}, {first['kind']} {first['name']}{first['message']}")
    if first["check"] != "reference":
        fix = '; another optimizer than plain SGD? Name it: save_results(..., optimizer="AdamW")'
        print(f"Broken invariant: {first['check']}{fix if first['check'].startswith('sgd') else ''}")
    mismatched = sum(row["mismatched"] for row in summary["kinds"])
    compared = sum(row["compared"] for row in summary["kinds"])
    failed, ranks = len(summary["failed_ranks"]), summary["world_size"]
    print(f"{mismatched} of {compared} tensors failed, on {failed} of {ranks} ranks." if compared else "")


def print_all(summary: dict, verdict: Verdict, runs: dict[str, Run | None]) -> None:
    """Print everything but the last line."""
    for title, run in runs.items():
        if run:
            known = [key for key in SHOWN if run.metadata[key] is not None]
            print(f"{title}: {run.directory}", *(f"{key}={run.metadata[key]}" for key in known))
    for rank in range(summary["world_size"]):
        failed = [finding.check for finding in verdict.findings if finding.rank == rank]
        mismatched = failed.count("reference")
        broken = f" broken_invariants={len(failed) - mismatched}" if len(failed) > mismatched else ""
        if summary["reference"]:
            parity = f"FAILED mismatched_tensors={mismatched}{broken}" if failed else "passed"
            print(f"rank={rank} parity={parity}")
        else:
            print(f"rank={rank} invariants={f'FAILED{broken}' if failed else 'held'}")
    print_tables(summary)
    print()
    if verdict.findings:
        print_first(summary)
    else:
        labels = {run.label for run in runs.values() if run}
        if "stand-in" in labels:
            print("No accelerator was checked: the stand-in for Neuron computes on the CPU.")
        elif labels <= {"cpu", "oracle"}:
            print("No accelerator was checked: this was computed on a CPU.")


def plain(value: object) -> object:
    """Return a value as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(summary: dict, path: Path) -> None:
    """Write the summary under a temporary name and rename it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(plain(summary), indent=1, allow_nan=False, default=str) + "\n")
    temporary.replace(path)


def show_progress(text: str) -> None:
    """Show what is being done, on a terminal only; nothing stays of it."""
    if sys.stderr.isatty():
        print(f"\r{text:40}\r", end="", file=sys.stderr)


def write_report(summary: dict, path: Path) -> None:
    """Write the page. Raises InputError if that takes a package that is not installed."""
    import report_training

    try:
        report_training.write_report([plain(summary)], path)
    except report_training.InputError as error:
        raise InputError(str(error)) from None


def parse_arguments() -> argparse.Namespace:
    """Return the options, checked as far as that is possible without opening a file of results."""

    def number(text):
        value = float(text)
        if not 0 <= value < inf:
            raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    option = parser.add_argument
    option("--reference-dir", type=Path, help="the trusted run: of as many ranks, or of one (the oracle's)")
    option("--actual-dir", type=Path, required=True, help="the run in question")
    option(
        "--oracle-dir",
        type=Path,
        help="a run of one rank: shows both runs' errors against it, allows its slack",
    )
    option("--world-size", type=int, required=True, help="ranks of the run in question")
    option("--rtol", type=number, help=f"default: {ELEMENT_EPS:g} eps of the dtype")
    option("--atol", type=number, help="default: rtol times the largest magnitude in the reference tensor")
    option("--norm-eps", type=number, help=f"default: {NORM_EPS:g}; with --rtol or --atol: not judged")
    option("--json", type=Path, help="write everything that was found to this file")
    option("--report", type=Path, help="write a page that shows it (takes report_training.py)")
    args = parser.parse_args()
    if args.world_size < 1:
        raise InputError(f"--world-size is {args.world_size}; nothing to compare, use at least 1")
    others = [path for path in (args.reference_dir, args.oracle_dir) if path]
    if args.actual_dir.resolve() in [path.resolve() for path in others]:
        raise InputError(f"{args.actual_dir} would be compared with itself; give two runs")
    if args.oracle_dir and not args.reference_dir:
        raise InputError("--oracle-dir is shown beside a reference; give it as --reference-dir instead")
    if args.oracle_dir and (args.oracle_dir / "rank-1.pt").exists():
        raise InputError(f"--oracle-dir {args.oracle_dir} holds a run of several ranks; give one of one rank")
    for name, path, suffix in (("--json", args.json, ".json"), ("--report", args.report, ".html")):
        if path and (path.suffix != suffix or not path.parent.is_dir()):
            raise InputError(f"{name} {path}: give a name ending in {suffix} in an existing directory")
    if args.report and not find_spec("report_training"):
        raise InputError("--report takes report_training.py, which is not beside this script")
    return args


def main() -> int:
    """Compare as the command line says; return the exit status."""
    try:
        args = parse_arguments()
        for path in filter(None, (args.json, args.report)):
            path.unlink(missing_ok=True)  # what an earlier comparison left would be taken for this one's
        actual = Run(args.actual_dir, args.world_size)
        reference = args.reference_dir and Run(args.reference_dir, args.world_size, may_be_whole=True)
        oracle = args.oracle_dir and Run(args.oracle_dir, 1, may_be_whole=True)
        for run in filter(None, (reference, oracle)):
            check_same_job(run, actual)
        runs = {"reference": reference, "actual": actual, "oracle": oracle}
        tolerance = Tolerance(args.rtol, args.atol, args.norm_eps)
        verdict = compare_runs(reference, actual, oracle, tolerance, show_progress)
        cause = find_cause(verdict, reference, actual) if verdict.findings else None
        summary = summarize(verdict, runs, tolerance, cause)
        print_all(summary, verdict, runs)
        if args.json:
            write_json(summary, args.json)
        if args.report:
            write_report(summary, args.report)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:  # status 1 is a mismatch, which this is not
        traceback.print_exc()
        print("error: the comparison broke off, nothing is known of the runs", file=sys.stderr)
        return 2
    what = "comparison" if reference else "invariants"
    print(f"{summary['verdict']} {what} ranks={args.world_size} steps={summary['steps']}")
    return 1 if verdict.findings else 0


if __name__ == "__main__":
    sys.exit(main())
