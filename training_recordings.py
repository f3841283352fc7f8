"""The recording of a run: what record_training.py writes, and how a file is read.

results/four/rank-1.pt, of a run of three steps on four ranks, as read_rank_file returns it:

    {
        "metadata": {
            "format": "parity-sketches-3",
            "rank": 1, "world_size": 4, "steps": 3,
            "command": ["train.py", "--plan", "fsdp"],
            "device": "cpu", "backend": "gloo",
            "torch_version": "2.14.1", "torch_neuronx_version": None, "host": "...", "environment": {...},
            "tied": {"tok.weight": ["head.weight"]},     # a parameter's other names
            "reduced_in": {"tok.weight": "bfloat16"},    # the type in which FSDP2 reduces its gradient
            "dropout": {"drop": 0.1},                    # modules that drop values, and which share
            "saved_at": 1764486000.0,                    # seconds since 1970
        },
        "steps": [                                       # one for each optimizer step
            {
                "calls": [Tensor(2, 8), ...],            # one for each call of the model: a key a sample
                "buffers_before": {"rotary.inv_freq": {...}, ...},
                "activations": [                         # in execution order
                    {"name": "blocks.0.q", "call": 0, "occurrence": 1, "samples": Tensor(2, 32), ...},
                    ...
                ],
                "losses": [5.0350],                      # of each backward
                "labels": [256],     # valid ones in calls of cross_entropy, before each backward
                "held": [],          # how many parameters have a gradient, before each backward but the first
                "clips": [{"max_norm": 1.0, "norm": 3.2, "after_step": False}],  # of clip_grad_norm_
                "ready": ["head.weight", ...],           # as backward completed their gradients
                "gradients": {"blocks.0.q.weight": {...}, ...},  # as the optimizer gets them
                "before": {"blocks.0.q.weight": {...}, ...},     # parameters before the optimizer's step
                "parameters": {"blocks.0.q.weight": {...}, ...}, # and after it
                "buffers": {"rotary.inv_freq": {...}, ...},      # after it
                "optimizers": [{"class": "AdamW", "groups": [{"lr": 0.001, ...}], "skipped": False}],
            },
            ...
        ],
    }

Each {...} is what training_sketches.describe returns of this rank's shard, each entry of "activations"
what describe_samples returns; those of "before" also have "requires_grad". A rank that holds a whole
tensor has "mesh" None there. In the file "steps" is JSON, and the small tensors of a type are one: with
thousands of tensors, torch.load takes most of a comparison's time.
"""

import json
import os
import re
import socket
import sys
import time
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from training_common import (
    InputError,
    is_stand_in,
    print_line,
    torch_neuronx_version,
    write_tensors,
    write_then_rename,
)
from training_records import read_file

FORMAT = "parity-sketches-3"  # marks a rank file; raise the number when its layout changes
FIELDS_OF_A_STEP = {"calls", "activations", "losses", "labels", "held", "clips", "ready"}
FIELDS_OF_A_STEP |= {"gradients", "before", "parameters", "buffers", "optimizers"}
PATIENCE = timedelta(seconds=30)  # how long a rank waits for the others before it says so
SMALL = 2**16  # elements up to which a tensor is stored together with others
TUPLES = "shape", "offset", "mesh", "ranks", "placements"  # which JSON returns as lists
ENVIRONMENT = re.compile(r"(OMP|MKL|CUDA|CUBLAS|NCCL|NEURON|TORCH|PYTORCH|GLOO)_")  # what is kept of it


def environment(command: list[str], device: str, steps: list[dict]) -> dict:
    """Return the metadata of a rank file, all but what the model tells."""
    version = torch_neuronx_version()
    started = dist.is_available() and dist.is_initialized()
    # Not every launcher sets RANK: under srun a script may take its rank from SLURM_PROCID.
    return {
        "format": FORMAT,
        "rank": dist.get_rank() if started else int(os.environ.get("RANK", 0)),
        "world_size": dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", 1)),
        "steps": len(steps),
        "command": command,
        "device": "stand-in" if is_stand_in(version) and device == "neuron" else device,
        "backend": backend_of(device) if started else None,
        "torch_version": str(torch.__version__),
        "torch_neuronx_version": version,
        "host": socket.gethostname(),
        "environment": {key: value for key, value in os.environ.items() if ENVIRONMENT.match(key)},
        "saved_at": time.time(),
    }


def backend_of(device: str) -> str:
    """Return the backend of the default process group for a type of device."""
    name = dist.get_backend()
    if name != "undefined":  # torch has one for each type of device
        return name
    config = dist.distributed_c10d.get_backend_config()  # "cpu:gloo,cuda:nccl"
    return dict(part.split(":") for part in config.split(",")).get(device, config)


def write_rank_file(path: Path, metadata: dict, steps: list[dict]) -> None:
    """Write what one rank recorded. Raises InputError if it cannot be written."""
    tensors, small = [], {}  # small: by type, the tensors that are stored as one, and their elements

    def place(value: torch.Tensor) -> dict:
        # What stands for a tensor in JSON: in which stored tensor it is, where it starts, and its shape.
        if value.numel() > SMALL:
            tensors.append(value)
            return {"tensor": [len(tensors) - 1, 0, list(value.shape)]}
        name = str(value.dtype).removeprefix("torch.")
        parts, start = small.setdefault(name, ([], 0))
        parts.append(value.reshape(-1))
        small[name] = parts, start + value.numel()
        return {"tensor": [name, start, list(value.shape)]}

    text = json.dumps(steps, default=place)
    together = {name: torch.cat(parts) for name, (parts, _) in small.items()}
    content = {"metadata": metadata, "steps": text, "tensors": tensors, "small": together}
    with write_then_rename(path) as temporary:
        write_tensors(content, temporary)


def wait_for_all(world_size: int, name: str) -> None:
    """Return when every rank has recorded its steps in the directory of this name.

    Through the store, not a collective. A rank that ends sooner would close connections that others use.
    Raises InputError if one does not come within the store's timeout.
    """
    if world_size == 1 or not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    try:
        if store.add(f"parity-recorded-{name}", 1) == world_size:
            store.set(f"parity-all-recorded-{name}", "")
        _wait_patiently(store, name, world_size)
        # Without an agent the store ends with rank 0, which stays until the others have their answer.
        if store.add(f"parity-left-{name}", 1) == world_size:
            store.set(f"parity-all-left-{name}", "")
        if dist.get_rank() == 0:
            store.wait([f"parity-all-left-{name}"])
    except RuntimeError as error:
        raise InputError(
            f"another rank did not reach this step: {str(error).splitlines()[0]}; all have to step as often"
        ) from None


def _wait_patiently(store: dist.Store, name: str, world_size: int) -> None:
    end = time.monotonic() + store.timeout.total_seconds()
    while True:
        try:
            return store.wait([f"parity-all-recorded-{name}"], PATIENCE)
        except RuntimeError:
            if time.monotonic() > end:
                raise
        recorded = store.add(f"parity-recorded-{name}", 0)
        print_line(
            f"rank {dist.get_rank()} has recorded its steps and waits: {recorded} of {world_size} ranks "
            "have; the others are slower, or have skipped a step",
            sys.stderr,
        )


def read_rank_file(path: Path) -> dict:
    """Return what one rank recorded. Raises InputError if the file is no recording."""
    content = read_file(path)
    if problem := find_problem(content):
        raise InputError(f"{path} is no recording of format {FORMAT}: {problem}; record the run again")
    tensors, small = content["tensors"], content["small"]

    def restore(entry: dict) -> object:
        if isinstance(place := entry.get("tensor"), list):
            stored, start, shape = place
            if isinstance(stored, int):
                return tensors[stored]
            return small[stored][start : start + prod(shape)].view(shape)
        for key in TUPLES:
            if isinstance(entry.get(key), list):
                entry[key] = tuple(entry[key])
        return entry

    try:
        steps = json.loads(content["steps"], object_hook=restore)
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {error}; record the run again") from None
    if problem := problem_of_steps(steps, content["metadata"]):
        raise InputError(f"{path} is no recording of format {FORMAT}: {problem}; record the run again")
    return {"metadata": content["metadata"], "steps": steps}


def find_problem(content: object) -> str | None:
    """Return what is wrong with the structure of a rank file's content, None if nothing is."""
    if not isinstance(content, dict) or not {"metadata", "steps"} <= content.keys():
        return "it does not hold metadata and steps"
    metadata = content["metadata"]
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        return f"its format is {metadata.get('format') if isinstance(metadata, dict) else None!r}"
    if not isinstance(content["steps"], str) or not {"tensors", "small"} <= content.keys():
        return "its steps are no text with tensors"
    return None


def problem_of_steps(steps: object, metadata: dict) -> str | None:
    """Return what is wrong with the steps of a rank file, None if nothing is."""
    if not isinstance(steps, list) or not steps or len(steps) != metadata.get("steps"):
        return f"it has not the {metadata.get('steps')} steps that its metadata gives"
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, dict) or not step.keys() >= FIELDS_OF_A_STEP:
            return f"step {number} lacks one of {', '.join(sorted(FIELDS_OF_A_STEP))}"
        if not step["parameters"]:
            return f"step {number} has no parameters"
    return None


def is_recording(directory: Path) -> bool:
    """Say whether a directory's rank files are record_training.py's, as far as rank 0's tells."""
    path = directory / "rank-0.pt"
    if not path.is_file():
        return False
    content = read_file(path)
    return isinstance(content, dict) and "steps" in content
