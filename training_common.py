"""Model, data, training loop, options and result files that all training scripts share.

A training script and this file are all that has to be copied to run elsewhere: nothing
but torch is imported. Edit the constants, or replace make_model and make_batch by your own.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

# Edit these defaults, or use the options of the training scripts.
DEVICE_TYPE = "neuron"  # cpu, neuron or cuda
PROCESS_GROUP_BACKEND = "neuron"  # gloo for cpu, neuron for neuron, nccl or gloo for cuda
RANKS_PER_NODE = 64  # a trn2.48xlarge at logical NeuronCore configuration 2
TP_DEGREE = 4  # tensor-parallel ranks of the SimpleFSDP + TP mesh: one Trainium2 chip
SEED = 0
STEPS = 10
GLOBAL_BATCH_SIZE = 512  # samples per step, over all ranks together
INPUT_FEATURES = 128
HIDDEN_FEATURES = 256
LEARNING_RATE = 0.01

FORMAT = "parity-record-3"  # marks a rank file as ours; raise the number when its layout changes
BACKENDS = {"cpu": ("gloo",), "neuron": ("neuron",), "cuda": ("nccl", "gloo")}
PROBE = ".parity-probe-"  # prefix of a file that shows whether a directory can be written
RANK_FILE = re.compile(r"rank-\d+\.pt(\.tmp)?")


class InputError(Exception):
    """Something the user can put right: reported in one line, exit status 2, no traceback."""


def make_model(kind: str, seed: int) -> torch.nn.Sequential:
    """Return the two-layer float32 model on the CPU, the same on every rank for one seed.

    kind "eager" has biases (parameters 0.weight, 0.bias, 2.weight, 2.bias); "simplefsdp" has none.
    """
    if kind not in ("eager", "simplefsdp"):
        raise ValueError(f"model kind is {kind!r}; use 'eager' or 'simplefsdp'")
    torch.manual_seed(seed)
    bias = kind == "eager"
    return torch.nn.Sequential(
        torch.nn.Linear(INPUT_FEATURES, HIDDEN_FEATURES, bias=bias),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN_FEATURES, INPUT_FEATURES, bias=bias),
    )


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of one step (counted from 0) and its target.

    Both are float32 of shape (GLOBAL_BATCH_SIZE, INPUT_FEATURES):
    batch[i, j] = ((i * INPUT_FEATURES + j) mod 257) / INPUT_FEATURES - 1 + step / 10,
    target = cos(batch). Rows repeat after 257, no sooner, so ranks' slices differ from one another.
    """
    shape = (GLOBAL_BATCH_SIZE, INPUT_FEATURES)
    position = torch.arange(GLOBAL_BATCH_SIZE * INPUT_FEATURES).reshape(shape)
    batch = (position % 257).float() / INPUT_FEATURES - 1 + step / 10
    return batch, batch.cos()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a DTensor."""
    # Imported here because the comparison imports this file: it needs no DTensor, which takes 0.6 s.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU copy of the whole tensor; the shards of a DTensor are all-gathered."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


def full_cpu_list(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what full_cpu returns for each tensor, in two collectives where the backend is Gloo.

    These copies exist only for the record. They are no part of the training plan, so we may choose how
    they travel. Gloo's all-gather goes from rank to rank in a ring: at 64 ranks on 2 cores each
    full_tensor() takes 0.3 s whatever its size, a gather and a broadcast together 0.04 s. On any
    other backend full_tensor() is kept: the device is known to support it, and a run checks it.
    """
    tensors = [tensor.detach() for tensor in tensors]
    sharded = [tensor for tensor in tensors if _is_sharded_evenly_over_all_ranks(tensor)]
    if not sharded or dist.get_backend() != "gloo":
        return [full_cpu(tensor) for tensor in tensors]

    # As bytes, tensors of any dtype travel together. Row r of `gathered` holds rank r's shards.
    shards = [tensor.to_local().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in sharded]
    gathered = torch.empty(dist.get_world_size(), sum(map(len, shards)), dtype=torch.uint8)
    dist.gather(torch.cat(shards), list(gathered) if dist.get_rank() == 0 else None, dst=0)
    dist.broadcast(gathered, src=0)

    columns = iter(gathered.split([len(shard) for shard in shards], dim=1))
    full = {id(tensor): _assemble(tensor, next(columns)) for tensor in sharded}
    return [full[id(tensor)] if id(tensor) in full else full_cpu(tensor) for tensor in tensors]


def _is_sharded_evenly_over_all_ranks(tensor: torch.Tensor) -> bool:
    # Replicated dimensions are left to full_tensor(), which gives each rank the values of its own replica.
    # If all ranks recorded one replica's values, nobody would see that another replica differs.
    from torch.distributed.tensor import Shard

    if not is_dtensor(tensor) or tensor.device_mesh.size() != dist.get_world_size():
        return False
    if any(type(placement) is not Shard for placement in tensor.placements):
        return False
    parts = [1] * tensor.dim()
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        parts[placement.dim] *= size
    return all(size % count == 0 for size, count in zip(tensor.shape, parts, strict=True))


def _assemble(tensor: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    # One block per rank, laid out as (mesh dimensions..., local tensor dimensions...). Each mesh dimension
    # moves in front of the tensor dimension that it shards. The final reshape merges the two.
    mesh = tensor.device_mesh
    blocks = columns[mesh.mesh.flatten()].clone(memory_format=torch.contiguous_format)
    blocks = blocks.view(tensor.dtype).view(*mesh.shape, *tensor.to_local().shape)
    order = []
    for dim in range(tensor.dim()):
        order += [i for i, placement in enumerate(tensor.placements) if placement.dim == dim]
        order.append(mesh.ndim + dim)
    return blocks.permute(order).reshape(tensor.shape)


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print to stdout in one write: ranks that share a terminal then do not write into each other's lines."""
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


def train(
    parameters: Mapping[str, torch.Tensor] | Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    train_step: Callable[[int], tuple],
) -> list[dict]:
    """Train and return one record per step, every tensor in full and on the CPU.

    parameters: name -> parameter, for instance dict(model.named_parameters()), or only the parameters.
    train_step(step): runs forward and backward and returns this rank's output and loss, None for
    what it does not have; and where ranks' losses are means over other numbers of tokens, this number.
    A record holds "output", "loss" and "local_loss" (floats, equal until average_losses is called),
    "weight" (the number of tokens, or 1), and by parameter name "gradients", "parameters" (after the
    optimizer's step), "deltas" and "optimizer", which is (class, learning rate). The first one also holds
    "initial", the parameters before training. A parameter without a gradient, because it is frozen or
    nothing used it in this step, has none of "gradients" and "deltas".

    On purpose, three things differ from the tutorial's train. Records are dictionaries by name, so that a
    finding names its parameter; from a list the names are "0", "1" and so on. Each rank returns its own
    loss, and average_losses reduces all steps' at once. Not every parameter needs a gradient.

    Raises ValueError for fewer than one step, RuntimeError if no parameter got a gradient or none
    changed: nothing was trained then, and there would be nothing to compare.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; use at least one training step")
    if not isinstance(parameters, Mapping):
        parameters = {str(index): parameter for index, parameter in enumerate(parameters)}
    updated = initial = dict(zip(parameters, full_cpu_list(parameters.values()), strict=True))
    records = []
    for step in range(steps):
        before = updated
        optimizer.zero_grad()
        output, loss, *weight = train_step(step)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
        if not trained:
            raise RuntimeError(f"step {step + 1}: no gradient reached any parameter; does the loss use them?")
        settings = _describe_optimizer(optimizer, trained)
        # Copied before the step, because an optimizer may change gradients in place.
        gradients = [parameter.grad.detach().clone() for parameter in trained.values()]
        optimizer.step()
        full = full_cpu_list([*gradients, *parameters.values()])
        updated = dict(zip(parameters, full[len(gradients) :], strict=True))
        deltas = {name: updated[name] - before[name] for name in trained}
        if not any(torch.count_nonzero(delta) for delta in deltas.values()):
            raise RuntimeError(f"step {step + 1}: the optimizer changed no parameter")
        loss = None if loss is None else float(loss.detach())
        records.append(
            {
                "output": None if output is None else full_cpu(output),
                "loss": loss,
                "local_loss": loss,
                "weight": float(weight[0]) if weight else 1.0,
                "gradients": dict(zip(trained, full[: len(gradients)], strict=True)),
                "parameters": updated,
                "deltas": deltas,
                "optimizer": settings,
            }
        )
        print_line(f"step={step + 1}/{steps} training=completed")
    records[0]["initial"] = initial
    return records


def torch_class(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of its class, or of the one in torch.optim from which the script's own is derived."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    return next((kind for kind in kinds if kind != "Optimizer"), type(optimizer).__name__)


def _describe_optimizer(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, float]]:
    # By parameter its optimizer's class and learning rate; "SGD" is the plain one, without momentum.
    names = {id(parameter): name for name, parameter in trained.items()}
    torch_kind, found = torch_class(optimizer), {}
    for group in optimizer.param_groups:
        more = [key for key in ("momentum", "weight_decay", "maximize") if group.get(key)]
        kind = f"{torch_kind} with {', '.join(more)}" if torch_kind == "SGD" and more else torch_kind
        for parameter in group["params"]:
            if id(parameter) in names:
                found[names[id(parameter)]] = kind, float(group["lr"])
    return found


def average_losses(records: list[dict], device: torch.device, group=None) -> None:
    """Replace each record's "loss" by its mean over the ranks of a group (default: all), by their weights.

    The losses of all steps travel in one all-reduce after training, not in one per step. A rank without
    a loss (None) stays so, and the others' mean is NaN: give the group of the ranks that have one.
    """
    local = [record["local_loss"] for record in records]
    losses = [float("nan") if loss is None else loss for loss in local]
    weights = torch.tensor([record.get("weight", 1.0) for record in records], device=device)
    total = torch.stack([torch.tensor(losses, device=device) * weights, weights])
    dist.all_reduce(total, group=group)
    for record, loss in zip(records, (total[0] / total[1]).tolist(), strict=True):
        record["loss"] = None if record["local_loss"] is None else loss


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser that keeps the description's lines and reports an error in one line, exit status 2."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    _report_in_one_line(parser)
    return parser


def _report_in_one_line(parser: argparse.ArgumentParser) -> None:
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every script has which trains, distributed or not."""
    _add(parser, "--seed", SEED, "seed of the initial parameters", type=_whole_number(0))
    _add(parser, "--steps", STEPS, "training steps", type=_whole_number(1))
    _add(parser, "--output-dir", "results/latest", "where rank-<rank>.pt is written", type=Path)
    _report_in_one_line(parser)  # for a parser that make_parser did not make


def add_run_arguments(
    parser: argparse.ArgumentParser,
    device: str = DEVICE_TYPE,
    backend: str = PROCESS_GROUP_BACKEND,
) -> None:
    """Add the options that every distributed script has; device and backend are their defaults."""
    _add(parser, "--device", device, "where tensors live", choices=tuple(BACKENDS))
    _add(parser, "--backend", backend, "process-group backend", choices=("gloo", "neuron", "nccl"))
    ranks_help = "fail unless this many ranks were started"
    _add(parser, "--expected-world-size", RANKS_PER_NODE, ranks_help, type=_whole_number(1))
    add_job_arguments(parser)


def _add(parser, name, default, help, **settings):
    parser.add_argument(name, default=default, help=f"{help} (default: {default})", **settings)


def _whole_number(least):
    def parse(text):
        value = int(text)
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    parse.__name__ = "whole number"  # argparse names the type in its message
    return parse


def initialize(args: argparse.Namespace) -> tuple[int, int, torch.device]:
    """Check the options against the launch, start the process group, return rank, size and device.

    All ranks compare their options first, and then each checks the same before the first collective: a
    mistake ends all of them with one line instead of leaving some waiting. An earlier run's files are
    removed last, when everything is in order. Raises InputError.
    """
    try:
        rank, world_size, local_rank, local_world_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except (KeyError, ValueError) as error:
        raise InputError(
            f"RANK or WORLD_SIZE is not set ({error}): start this script with torchrun, for instance: "
            f"torchrun --standalone --nproc-per-node={args.expected_world_size} {' '.join(sys.argv)}"
        ) from None
    store = next(dist.rendezvous("env://"))[0]
    store.set_timeout(default_pg_timeout)  # as init_process_group does with a store of its own
    check_same_options(store, rank, world_size, args)
    if args.backend not in BACKENDS[args.device]:
        raise InputError(
            f"--device {args.device} does not go with --backend {args.backend}; "
            f"use --device {args.device} --backend {' or '.join(BACKENDS[args.device])}"
        )
    if world_size != args.expected_world_size:
        raise InputError(
            f"the launcher started {world_size} ranks, --expected-world-size is "
            f"{args.expected_world_size}; make --nproc-per-node and --expected-world-size agree"
        )
    device = _open_device(args, local_rank, local_world_size)
    compile_backend = getattr(args, "compile_backend", None)  # only of scripts that compile
    if compile_backend and compile_backend not in torch.compiler.list_backends(exclude_tags=None):
        raise InputError(
            f"--compile-backend {compile_backend} is not known to torch; "
            f"use {'neuron' if args.device == 'neuron' else 'aot_eager'} with --device {args.device}"
        )
    prepare_output_dir(args.output_dir, clear=local_rank == 0)
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size)
    return rank, world_size, device


def check_same_options(store: dist.Store, rank: int, world_size: int, args: argparse.Namespace) -> None:
    """Raise InputError on every rank unless all were started with rank 0's script and options.

    Ranks that differ in steps or mode, as on a second node, would wait for each other in a collective.
    Here they meet in the store that the launcher provides: each compares its options with rank 0's, and
    all wait until one has found a difference or the last one has found none.
    """
    options = {"script": Path(sys.argv[0]).name} | {key: str(value) for key, value in vars(args).items()}
    del options["output_dir"]
    if rank == 0:
        store.set("parity-options", json.dumps(options))
    of_rank_0 = json.loads(store.get("parity-options"))
    different = [key for key in options | of_rank_0 if options.get(key) != of_rank_0.get(key)]
    if different:
        key = different[0]
        store.set(
            "parity-difference",
            f"rank {rank} was started with {key} {options.get(key)}, rank 0 with {of_rank_0.get(key)}; "
            "start the same job on every node",
        )
    elif store.add("parity-same-options", 1) == world_size:
        store.set("parity-difference", "")
    difference = store.get("parity-difference").decode()
    if difference:
        raise InputError(difference)


def _open_device(args: argparse.Namespace, local_rank: int, local_world_size: int) -> torch.device:
    if args.device == "cuda":
        return _open_cuda(args.backend, local_rank, local_world_size)
    if args.device == "neuron":
        _open_neuron(local_rank, local_world_size)
    return torch.device(args.device)


def _open_cuda(backend: str, local_rank: int, local_world_size: int) -> torch.device:
    count = torch.cuda.device_count()
    if count == 0:
        raise InputError("--device cuda: torch sees no GPU; use --device cpu --backend gloo")
    if backend == "nccl" and local_world_size > count:
        raise InputError(
            f"nccl needs one GPU per rank: {local_world_size} ranks, {count} GPUs; start at most "
            f"{count} ranks, or share GPUs with --backend gloo"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def _open_neuron(local_rank: int, local_world_size: int) -> None:
    fix = "install torch-neuronx 2.14 or newer, or use --device cpu --backend gloo"
    version = torch_neuronx_version()
    if version is None:
        raise InputError(f"--device neuron: package torch-neuronx is not installed; {fix}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 14):
        raise InputError(
            f"--device neuron: torch-neuronx {version} is older than 2.14, the first release for torch "
            f"2.14 with a native device (the XLA-based product has the same name); {fix}"
        )
    try:
        importlib.import_module("torch_neuronx")  # registers the device and both backends
    except (ImportError, OSError, RuntimeError) as error:  # a library or driver is missing, too
        raise InputError(f"--device neuron: torch-neuronx {version} does not import: {error}") from None
    if not hasattr(torch, "neuron"):
        raise InputError(
            f"--device neuron: torch-neuronx {version} brings no native device, as the XLA-based product "
            f"of the same name; {fix}"
        )
    # Each rank takes a core of its own. A rank that is shown a single core takes that one.
    cores = torch.neuron.device_count()
    if cores > local_rank:
        torch.neuron.set_device(local_rank)
    elif cores != 1:
        raise InputError(
            f"--device neuron: {cores} cores are visible to {local_world_size} ranks; start at most "
            f"{cores} ranks, or unset NEURON_RT_VISIBLE_CORES and NEURON_RT_NUM_CORES"
        )


def torch_neuronx_version() -> str | None:
    """Return the version of the installed torch-neuronx, or None without one."""
    try:
        return importlib.metadata.version("torch-neuronx")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_stand_in(version: str | None) -> bool:
    """Return whether a torch-neuronx version is our tests' stand-in, which computes on the CPU."""
    return version is not None and "standin" in version


@contextlib.contextmanager
def write_then_rename(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which the block writes; rename it to `path` at the block's end.

    A block that raises leaves neither, and `path` as it was: what stands under this name is complete.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_tensors(content: dict, path: Path) -> None:
    """Write a rank file with torch.save. Raises InputError, which says how much space it needs."""
    try:
        torch.save(content, path)
    except (OSError, RuntimeError) as error:  # torch raises the latter when the disk is full
        path.unlink(missing_ok=True)
        needed, free = (size / 2**20 for size in (_size_of(content), shutil.disk_usage(path.parent).free))
        reason = "the disk is full" if free < needed else str(error).splitlines()[0]
        raise InputError(
            f"{path.name.removesuffix('.tmp')} cannot be written in {path.parent}: {reason}; it needs "
            f"{needed:.1f} MiB, {free:.1f} MiB are free: free some, or use another directory"
        ) from None


def _size_of(value: object) -> int:
    # Bytes of all tensors and texts in nested dictionaries and lists.
    if torch.is_tensor(value):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size_of, value))
    return len(value) if isinstance(value, str) else 0


def prepare_output_dir(directory: Path, clear: bool = True) -> None:
    """Make the directory, check that it can be written, and with clear remove an earlier run's files.

    Raises InputError, and changes nothing, if it holds anything that no run of these scripts wrote.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [path for path in sorted(directory.iterdir()) if not path.name.startswith(PROBE)]
        # All ranks look at the names; one per node, the one that clears, also into the files.
        foreign = [path for path in paths if not RANK_FILE.fullmatch(path.name)]
        foreign = foreign or [path for path in paths if clear and not _is_ours(path)]
        if foreign:
            raise InputError(
                f"--output-dir {directory} holds {foreign[0].name}, which no run of these scripts wrote; "
                "nothing was changed: use a new or empty directory"
            )
        with tempfile.TemporaryFile(prefix=PROBE, dir=directory):
            pass
        if clear:  # rank-0.pt goes first: where it stands, the run is complete
            for path in paths:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"--output-dir {directory} cannot be written: {error.strerror}; use another directory"
        ) from None


def _is_ours(path: Path) -> bool:
    # save_results puts the format's name at the head of a file; one that it just opened is empty.
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1024)
    return FORMAT.encode() in head or (not head and path.suffix == ".tmp")


def check_divides(name: str, size: int, parts: int, what: str) -> None:
    """Raise InputError unless size, the constant called name, splits evenly into parts."""
    if size % parts:
        raise InputError(
            f"{name} = {size} does not divide evenly over {parts} {what}; start a number of ranks "
            f"that divides it (1, 2, 4, ... as configured), or edit {name} in training_common.py"
        )


def check_local_shape(name: str, parameter: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise RuntimeError unless parameter is a DTensor whose local shard has the expected shape."""
    if not is_dtensor(parameter):
        raise RuntimeError(f"{name} is a {type(parameter).__name__}, expected a DTensor: not sharded")
    actual = tuple(parameter.to_local().shape)
    if actual != expected:
        raise RuntimeError(f"{name}: local shape is {actual}, expected {expected}")


def save_results(
    args: argparse.Namespace,
    records: list[dict],
    *,
    model: str,
    mode: str,
    rank: int,
    world_size: int,
    dp_degree: int | None = None,
    dp_rank: int | None = None,
    tp_degree: int = 1,
    tp_rank: int = 0,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    learning_rate: float = LEARNING_RATE,
    optimizer: str = "SGD",
) -> None:
    """Write this rank's records to <output-dir>/rank-<rank>.pt: plain CPU tensors and metadata.

    Raises InputError if the file cannot be written, as on a full disk.
    Without degrees and ranks of a mesh, every rank is a data-parallel replica.
    learning_rate and optimizer tell one job from another. Which optimizer updated a parameter, and with
    which rate, is in each step's record, as train() reads it. Records of another loop may lack it: then
    "SGD" states that each update is -learning_rate times the gradient, which the comparison checks.
    The file loads with torch.load(path, weights_only=True). Rank 0's gets its name after all others:
    a directory with a rank-0.pt is a finished run.
    """
    metadata = {
        "format": FORMAT,
        "model": model,
        "mode": mode,
        "rank": rank,
        "world_size": world_size,
        "dp_degree": world_size if dp_degree is None else dp_degree,
        "dp_rank": rank if dp_rank is None else dp_rank,
        "tp_degree": tp_degree,
        "tp_rank": tp_rank,
        "global_batch_size": global_batch_size,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        **_describe_launch(args),
    }
    with write_then_rename(args.output_dir / f"rank-{rank}.pt") as temporary:
        write_tensors({"metadata": metadata, "records": records}, temporary)
        if dist.is_initialized() and rank == 0:
            dist.barrier()
    if dist.is_initialized() and rank != 0:
        dist.barrier()


def _describe_launch(args: argparse.Namespace) -> dict:
    version = torch_neuronx_version() if args.device == "neuron" else None
    return {
        "seed": args.seed,
        "steps": args.steps,
        "device": "stand-in" if is_stand_in(version) else args.device,
        "backend": args.backend,
        "compile_backend": getattr(args, "compile_backend", None),
        "torch_version": str(torch.__version__),
        "torch_neuronx_version": version,
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "saved_at": time.time(),  # seconds since 1970; tells a run from its copy
    }


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main. Bad input ends in one line and exit status 2, other errors in 1."""
    try:
        main()
    except InputError as error:
        print_line(f"error: {error}", sys.stderr)
        sys.exit(2)
    except Exception as error:
        print_line(traceback.format_exc().rstrip(), sys.stderr)
        if re.search("[Cc]onnection (closed|reset|refused)", str(error)):
            # Another rank died first. Let the launcher notice that one before it notices us.
            time.sleep(2)
        sys.exit(1)
