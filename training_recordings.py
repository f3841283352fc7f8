"""The recording of a run: what record_training.py writes, how it is read, and shards put together.

results/four/rank-1.pt, of a run of three steps on four ranks, as torch.load(path, weights_only=True)
returns it:

    {
        "metadata": {
            "format": "parity-sketches-1",
            "rank": 1, "world_size": 4, "steps": 3,
            "command": ["train.py", "--plan", "fsdp"],
            "device": "cpu", "backend": "gloo",
            "torch_version": "2.14.1", "torch_neuronx_version": None, "host": "...", "environment": {...},
            "tied": {"tok.weight": ["head.weight"]},     # a parameter's other names
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
what describe_samples returns. A rank that holds a whole tensor has "mesh" None there.
"""

import os
import re
import socket
import time
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from training_common import InputError, is_stand_in, torch_neuronx_version
from training_records import read_file

FORMAT = "parity-sketches-1"  # marks a rank file; raise the number when its layout changes
ENVIRONMENT = re.compile(r"(OMP|MKL|CUDA|CUBLAS|NCCL|NEURON|TORCH|PYTORCH|GLOO)_")  # what is kept of it


def environment(command: list[str], tied: dict[str, list[str]], steps: list[dict]) -> dict:
    """Return the metadata of a rank file."""
    version = torch_neuronx_version()
    started = dist.is_available() and dist.is_initialized()
    return {
        "format": FORMAT,
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "steps": len(steps),
        "command": command,
        "backend": dist.get_backend() if started else None,
        "torch_version": str(torch.__version__),
        "torch_neuronx_version": version,
        "stand_in": is_stand_in(version),
        "host": socket.gethostname(),
        "environment": {key: value for key, value in os.environ.items() if ENVIRONMENT.match(key)},
        "tied": tied,
        "saved_at": time.time(),
    }


def is_recording(directory: Path) -> bool:
    """Say whether a directory's rank files are record_training.py's, as far as rank 0's tells."""
    path = directory / "rank-0.pt"
    if not path.is_file():
        return False
    content = read_file(path)
    return isinstance(content, dict) and "steps" in content


class Recording:
    """All rank files of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        first = self._load(0)
        self.world_size = first["metadata"]["world_size"]
        self.contents = [first, *(self._load(rank) for rank in range(1, self.world_size))]
        self.metadata = first["metadata"]
        self.steps = self.metadata["steps"]

    def _load(self, rank: int) -> dict:
        path = self.directory / f"rank-{rank}.pt"
        content = read_file(path)
        if not isinstance(content, dict) or content.get("metadata", {}).get("format") != FORMAT:
            raise InputError(f"{path} is no recording of format {FORMAT}; record the run again")
        return content

    def entries(self, step: int, kind: str) -> dict[str, dict[int, dict]]:
        """Return what was recorded of each tensor of a kind, by its name and by rank."""
        found: dict[str, dict[int, dict]] = {}
        for rank, content in enumerate(self.contents):
            for name, entry in content["steps"][step][kind].items():
                found.setdefault(name, {})[rank] = entry
        return found

    def whole(self, by_rank: dict[int, dict], key: str = "sketch") -> dict[tuple[int, ...], torch.Tensor]:
        """Return the sketch of the whole tensor, by the ranks that hold its shards together.

        A tensor that every rank has whole gives one sketch a rank: copies, that should be equal.
        """
        found = {}
        for rank, entry in by_rank.items():
            group = shard_group(rank, entry)
            if group not in found:
                found[group] = sum(by_rank[other][key] for other in group)
        return found


def shard_group(rank: int, entry: dict) -> tuple[int, ...]:
    """Return the ranks whose shards make up the tensor of which this rank has one."""
    if entry["mesh"] is None:
        return (rank,)
    ranks = torch.tensor(entry["ranks"]).reshape(entry["mesh"])
    own = [int(place) for place in (ranks == rank).nonzero()[0]]
    replicated = [placement == "replicate" for placement in entry["placements"]]
    places = product(
        *(
            [place] if keep else range(size)
            for place, keep, size in zip(own, replicated, entry["mesh"], strict=True)
        )
    )
    return tuple(sorted(int(ranks[place]) for place in places))
