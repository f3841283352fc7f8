"""The record of a run: what a rank file holds, how it is read, and which runs are of the same job.

results/cpu-ddp/rank-1.pt, of a DDP run of three steps on four ranks, as
torch.load(path, weights_only=True) returns it:

    {
        "metadata": {
            "format": "parity-record-3",
            "model": "eager", "mode": "ddp",
            "rank": 1, "world_size": 4,
            "dp_degree": 4, "dp_rank": 1,           # data-parallel replicas, and this rank's
            "tp_degree": 1, "tp_rank": 0,           # tensor-parallel ranks of a replica, and this one
            "seed": 0, "steps": 3, "global_batch_size": 512,
            "learning_rate": 0.01, "optimizer": "SGD",
            "device": "cpu", "backend": "gloo", "compile_backend": None,
            "torch_version": "2.14.1", "torch_neuronx_version": None,
            "run_id": "...", "saved_at": 1764486000.0,  # seconds since 1970
        },
        "records": [                                # one for each step
            {
                "initial": {"0.weight": Tensor(256, 128), ...},  # before training, in step 1's record only
                "output": Tensor(128, 128),         # of this rank's samples
                "loss": 0.754203,                   # the mean over the replicas
                "local_loss": 0.751905,             # this rank's own
                "weight": 1.0,                      # its weight in the mean, such as a number of tokens
                "gradients": {"0.weight": Tensor(256, 128), ...},   # as the optimizer got them
                "parameters": {"0.weight": Tensor(256, 128), ...},  # after the optimizer's step
                "deltas": {"0.weight": Tensor(256, 128), ...},      # parameters after minus before
                "optimizer": {"0.weight": ("SGD", 0.01), ...},      # class and learning rate of this step
                "slack": {"0.weight": Tensor(256, 128), ...},       # of oracle_train.py alone: see train_step
            },
            ...
        ],
    }

Every tensor is whole, on the CPU, and of the dtype that the run computed it in. "output", "loss" and
"local_loss" are None if the script returned none. Parameters without a gradient are in "initial" and
"parameters" only. Class "SGD" is the plain one, without momentum or weight decay; a loop other than train()
may have no "optimizer". training_common.py writes these files. Whoever reads them gets `Steps`: what is
compared and what is checked goes through these, by kind and name, and knows nothing of the layout above.
"""

import re
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch

from training_common import FORMAT, InputError

SCHEMA = "parity-comparison-1"  # of what compare_training.py --json writes; see NUMERICS.md

# Metadata in which two runs of the same job agree.
JOB = ("model", "seed", "steps", "global_batch_size", "learning_rate", "optimizer")
LAYOUT = ("mode", "world_size", "dp_degree", "tp_degree")  # a run of one rank may differ in these
# Metadata that is printed of each run, and in which two runs may differ.
SHOWN = ("mode", "device", "backend", "compile_backend", "torch_version", "torch_neuronx_version")

# In causal order within a step: each kind follows from the ones before it.
KINDS = ("outputs", "losses", "gradients", "parameters", "deltas")
PARAMETER_KINDS = ("gradients", "parameters", "deltas")  # one tensor for each parameter, by its name
OUTPUT = ("outputs", "output")
LOSS = ("losses", "global loss")

# What wrappers put into the names of modules and parameters.
WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)")

Key = tuple[str, str]  # kind and name of a tensor
Place = tuple[int, Key, int | None]  # step, key and, for an output, the replica: see place_of
Tensors = dict[Key, torch.Tensor]  # of one rank and step, in causal order
Steps = list[Tensors]  # of one rank; step 0 is before training and has parameters only


class Finding(NamedTuple):
    """Something that failed: of which tensor, and why."""

    step: int  # 0 is before training
    rank: int
    kind: str
    name: str
    check: str  # "reference", or the name of an invariant and the run that breaks it
    message: str  # follows the tensor's name: "[12, 7]: reference 0.1, actual 0.2, ..."


def place_of(step: int, key: Key, replica: int) -> Place:
    """Return where in a run a tensor belongs: ranks that have one there should have the same.

    Outputs are the same within a data-parallel replica, everything else is the same on all ranks.
    """
    return step, key, replica if key == OUTPUT else None


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as they are written in a message: 0-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def without_wrappers(name: str) -> str:
    """Return the name of a module or parameter without what wrappers inside a model add to it."""
    return WRAPPERS.sub("", name)


# ---------------------------------------------------------------- from a file to Steps


def steps_of(content: dict) -> Steps:
    """Return the tensors of step 0 (the initial parameters), 1, 2, ... of a rank file's content."""
    initial = {("parameters", name): tensor for name, tensor in content["records"][0]["initial"].items()}
    return [initial, *map(tensors_of, content["records"])]


def tensors_of(record: dict) -> Tensors:
    """Return one step's tensors by (kind, name), in causal order.

    Gradients are in reverse order of the names: backward computes those of the last layer first.
    """
    tensors = {}
    if record["output"] is not None:
        tensors[OUTPUT] = record["output"]
    if record["loss"] is not None:
        tensors[LOSS] = torch.tensor(record["loss"], dtype=torch.float64)
    for name in reversed(record["gradients"]):
        tensors["gradients", name] = record["gradients"][name]
    for kind in ("parameters", "deltas"):
        for name, tensor in record[kind].items():
            tensors[kind, name] = tensor
    return tensors


def optimizer_of(content: dict, step: int, name: str) -> tuple[str, float | None]:
    """Return the class and the learning rate of the optimizer that updated a parameter in a step from 1."""
    metadata, recorded = content["metadata"], content["records"][step - 1].get("optimizer", {})
    return recorded.get(name, (metadata["optimizer"], metadata["learning_rate"]))


def slacks_of(content: dict) -> list[Tensors]:
    """Return by step what the oracle allows on top for gradients and deltas; nothing for step 0."""
    rate = content["metadata"]["learning_rate"]
    slacks: list[Tensors] = [{}]
    for record in content["records"]:
        slack = record.get("slack", {})
        slacks.append({("gradients", name): tensor for name, tensor in slack.items()})
        slacks[-1].update({("deltas", name): rate * tensor for name, tensor in slack.items()})
    return slacks


def trained(steps: Steps) -> list[torch.Tensor]:
    """Return the initial values of the parameters that get gradients; all of them if none does."""
    names = {name for kind, name in steps[1] if kind == "gradients"}
    return [tensor for (_, name), tensor in steps[0].items() if name in names] or list(steps[0].values())


# ---------------------------------------------------------------- one file


def check_rank_files(directory: Path, world_size: int) -> None:
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


def read_file(path: Path) -> object:
    """Return what a file holds; raise InputError if it is none that torch.save wrote.

    It is opened with weights_only: a pickle that would run code is refused, not run. It is mapped, not
    read: of a 64-rank run, only what is looked at is in memory at any time.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file; run the job again")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read, it is truncated or no result file: {reason}") from None


def load_rank(directory: Path, rank: int, world_size: int) -> dict:
    """Return one rank's {"metadata", "records"}; raise InputError if it is not what it should be."""
    path = directory / f"rank-{rank}.pt"
    content = read_file(path)
    if problem := find_problem(content):
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
    for record in records:
        for kind in {*PARAMETER_KINDS, "initial", "optimizer", "slack"} & record.keys():
            renamed = {without_wrappers(name): value for name, value in record[kind].items()}
            record[kind] = renamed if len(renamed) == len(record[kind]) else record[kind]
    return content


def find_problem(content: object) -> str | None:
    """Return what is wrong with the structure of a rank file's content, None if nothing is."""
    if not isinstance(content, dict) or not {"metadata", "records"} <= content.keys():
        return "it does not hold metadata and records"
    metadata, records = content["metadata"], content["records"]
    if not isinstance(metadata, dict) or not isinstance(records, list):
        return "metadata is no dictionary or records is no list"
    if problem := problem_of_metadata(metadata):
        return problem
    for step, record in enumerate(records, start=1):
        if problem := problem_of_record(record, records[0]):
            return f"step {step}{problem}"
    return None


def problem_of_metadata(metadata: dict) -> str | None:
    """Return what is wrong with a rank file's metadata, None if nothing is."""
    if metadata.get("format") != FORMAT:
        return f"its format is {metadata.get('format')!r}"
    for key in (*JOB, *LAYOUT, *SHOWN):
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
    return None


def problem_of_record(record: object, first: object) -> str | None:
    """Return what is wrong with a step's record, None if nothing is.

    The text follows "step 2". first: the record of step 1, which has the initial parameters.
    """
    if (
        not isinstance(record, dict)
        or not {"output", "loss", "local_loss", *PARAMETER_KINDS} <= record.keys()
    ):
        return f" lacks one of output, loss, local_loss, {', '.join(PARAMETER_KINDS)}"
    for name in ("loss", "local_loss", "weight"):
        if not isinstance(record.get(name), float | None):
            return f": {name} is a {type(record[name]).__name__}, expected a float"
    gradients, parameters, deltas = (record[kind] for kind in PARAMETER_KINDS)
    if not all(isinstance(tensors, dict) for tensors in (gradients, parameters, deltas)):
        return ": gradients, parameters and deltas must be dictionaries by name"
    if not gradients or gradients.keys() != deltas.keys() or not gradients.keys() <= parameters.keys():
        return ": gradients and deltas must have the same names, all among the parameters"
    initial = first.get("initial")
    if not isinstance(initial, dict) or initial.keys() != parameters.keys():
        return ": the parameters must have the names of step 1's initial parameters"
    if not isinstance(record.get("optimizer", {}), dict) or not all(
        isinstance(kind, str) and isinstance(rate, int | float)
        for kind, rate in record.get("optimizer", {}).values()
    ):
        return ": optimizer must hold a class and a learning rate by name"
    slack = record.get("slack", {})
    if not isinstance(slack, dict) or not slack.keys() <= gradients.keys():
        return ": slack is no dictionary by names of gradients"
    tensors = tensors_of(record)
    tensors |= {("slack", name): tensor for name, tensor in slack.items()}
    if record is first:
        tensors |= {("initial parameters", name): tensor for name, tensor in initial.items()}
    for key, tensor in tensors.items():
        if problem := problem_of_tensor(key, tensor, parameters):
            return f": {problem}"
    return None


def problem_of_tensor(key: Key, tensor: object, parameters: dict) -> str | None:
    """Return what is wrong with one tensor of a record, None if nothing is."""
    kind, name = key
    if not isinstance(name, str) or not name.isprintable():
        return f"the name {name!r} of one of the {kind} is no printable text"
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return f"{kind} {name} is {type(tensor).__name__}, expected a plain dense tensor"
    if tensor.device.type != "cpu" or not tensor.numel():
        return f"{kind} {name} holds no values"
    if kind not in ("outputs", "losses") and tensor.shape != getattr(parameters[name], "shape", None):
        return f"{kind} {name} has another shape than the parameter"
    return None


# ---------------------------------------------------------------- all files of a run


class Run:
    """The rank files of one directory, opened one at a time."""

    def __init__(self, directory: Path, world_size: int, may_be_whole: bool = False) -> None:
        """Open rank 0's. may_be_whole: a run of one rank will do, the whole job in one process."""
        self.directory = directory
        self.whole = may_be_whole and self._is_of_one_rank()
        self.world_size = 1 if self.whole else world_size
        check_rank_files(directory, self.world_size)
        self.first = load_rank(directory, 0, self.world_size)
        self.metadata = self.first["metadata"]
        self._last: tuple[int, dict] | None = None  # the rank opened last; no more are kept
        self._seen: dict[Place, torch.Tensor] = {}  # the first rank's tensor at each place
        # Of a whole run: by step and replica, which samples a replica has, if they are no equal slices.
        self.dealt: dict[int, list[torch.Tensor]] = {}

    def _is_of_one_rank(self) -> bool:
        if (self.directory / "rank-1.pt").exists():
            return False
        try:
            return read_file(self.directory / "rank-0.pt")["metadata"]["world_size"] == 1
        except Exception:
            return False  # load_rank says what is wrong with it

    @property
    def label(self) -> str:
        """What the run is called in a table: oracle, or the device it ran on."""
        return "oracle" if self.metadata["mode"] == "oracle" else self.metadata["device"]

    def rank(self, rank: int) -> dict:
        """Return the content of a rank's file. Raises InputError, also if it is of another run."""
        if rank == 0 or self.whole:
            return self.first
        if self._last and self._last[0] == rank:
            return self._last[1]
        content = load_rank(self.directory, rank, self.world_size)
        for key in (*JOB, *LAYOUT, *SHOWN, "run_id"):
            first, other = self.metadata.get(key), content["metadata"].get(key)
            if first != other:
                raise InputError(
                    f"{self.directory} mixes runs: {key} is {first!r} in rank-0.pt and {other!r} in "
                    f"rank-{rank}.pt; run the job again"
                )
        self._last = rank, content
        return content

    def steps(self, rank: int, like: dict) -> Steps:
        """Return a rank's steps; of a whole run, the part that a rank with metadata `like` sees.

        Most tensors are the same on many ranks. One that equals the first rank's at its place is replaced
        by the first rank's object. Whoever compares ranks one after another then sees by `is` that this
        tensor was compared before.
        """
        steps = steps_of(self.rank(rank))
        for step, tensors in enumerate(steps):
            if self.whole and OUTPUT in tensors:
                tensors[OUTPUT] = self._part_of(tensors[OUTPUT], step, like)
            for key in tensors:
                tensors[key] = self._first_equal(place_of(step, key, like["dp_rank"]), tensors[key], rank)
        return steps

    def _first_equal(self, place: Place, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        first = self._seen.get(place)
        if first is None:
            # Copied unless it is rank 0's, whose file stays open: a view keeps all of a file in memory.
            self._seen[place] = tensor if rank == 0 or self.whole else tensor.clone()
            return self._seen[place]
        return first if same_values(first, tensor) else tensor

    def _part_of(self, output: torch.Tensor, step: int, like: dict) -> torch.Tensor:
        replicas = like["dp_degree"]
        if replicas == 1:
            return output
        if step in self.dealt:
            return self.dealt[step][like["dp_rank"]]
        if output.dim() == 0 or len(output) % replicas:
            raise InputError(
                f"{self.directory}: the output of the whole batch, {tuple(output.shape)}, does not "
                f"divide over {replicas} data-parallel replicas; compare with a run of as many ranks"
            )
        return output.chunk(replicas)[like["dp_rank"]]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are of one dtype and equal in every element; NaN equals nothing."""
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


# ---------------------------------------------------------------- two runs


def check_same_job(reference: Run, actual: Run) -> None:
    """Raise InputError unless both runs trained the same model on the same data in the same way."""
    first, second = reference.metadata, actual.metadata
    for key in JOB if reference.whole else (*JOB, *LAYOUT):
        if first[key] != second[key]:
            raise InputError(
                f"the runs differ in {key}: reference {first[key]!r}, actual {second[key]!r}; run both with "
                "the same settings"
            )
    saved_at = first.get("saved_at")
    if saved_at is not None and saved_at == second.get("saved_at"):
        raise InputError("the two directories hold the same run, one is a copy; give two runs")


def may_be_tied(left: Steps, right: Steps) -> set[str]:
    """Return the parameters that one run alone has, if the other may have tied them to others.

    They then have the shapes of parameters that both have, and the other run has none of its own.
    """
    known = [{name for kind, name in steps[0] if kind == "parameters"} for steps in (left, right)]
    shapes = {left[0]["parameters", name].shape for name in known[0] & known[1]}
    only = {**left[0], **right[0]}
    alone = known[0] ^ known[1]
    fitting = all(only["parameters", name].shape in shapes for name in alone)
    return alone if fitting and alone in (known[0] - known[1], known[1] - known[0]) else set()


def check_same_parameters(
    left: Steps, right: Steps, names: tuple[str, str], tied: set[str] = frozenset()
) -> None:
    """Raise InputError unless both have parameters of the same names and shapes.

    names: what the two are called in the message. tied: parameters that one may have alone.
    """
    for step, (one, other) in enumerate(zip(left, right, strict=True)):
        known = [{name for kind, name in tensors if kind == "parameters"} - tied for tensors in (one, other)]
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
