"""Made-up runs: tiny, exact and quick, on a mesh of two replicas by two tensor-parallel ranks.

A test alters one thing in a run and sees what the comparison says. Whatever must hold in any run holds
here, so that a test with an unaltered run passes.
"""

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

SAMPLES = 8  # of the global batch
FEATURES = 24  # of an output
KINDS = ("outputs", "losses", "gradients", "parameters", "deltas")
CLOCK = count(1)


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_parameters() -> dict[str, torch.Tensor]:
    """Return two parameters of float32."""
    return {"weight": noise(6, 4, seed=1), "bias": noise(6, seed=2)}


def some_gradients(step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step for these parameters."""
    return {"weight": 0.1 * noise(6, 4, seed=10 + step), "bias": 0.1 * noise(6, seed=20 + step)}


def some_outputs(step: int) -> torch.Tensor:
    """Return the outputs of the whole batch, of shape (SAMPLES, FEATURES)."""
    return noise(SAMPLES, FEATURES, seed=30 + step)


def make_run(
    directory: Path,
    parameters: dict[str, torch.Tensor] | None = None,
    gradients: Callable[[int], dict[str, torch.Tensor]] = some_gradients,
    outputs: Callable[[int], torch.Tensor] = some_outputs,
    *,
    dp: int = 2,
    tp: int = 2,
    steps: int = 2,
    rate: float = 0.01,
    slack: dict[str, torch.Tensor] | None = None,
    **metadata,
) -> Path:
    """Write the rank files of a run and return its directory; with dp and tp 1 it is the whole job.

    gradients, outputs: functions of the step, from 1. A parameter without a gradient stays as it is.
    The loss of sample i in step s is 1 + i/8 + s/16, so that all means are exact. metadata: more of it.
    """
    directory.mkdir(parents=True)
    losses = 1 + torch.arange(SAMPLES, dtype=torch.float64) / 8
    initial = parameters or some_parameters()
    for rank in range(dp * tp):
        records, before = [], initial
        for step in range(1, steps + 1):
            gradient = {name: value.clone() for name, value in gradients(step).items()}
            after = {
                name: value - (rate * gradient[name]).to(value.dtype) if name in gradient else value
                for name, value in before.items()
            }
            records.append(
                {
                    "output": outputs(step).chunk(dp)[rank // tp].clone(),
                    "loss": (losses + step / 16).mean().item(),
                    "local_loss": (losses + step / 16).chunk(dp)[rank // tp].mean().item(),
                    "gradients": gradient,
                    "parameters": after,
                    "deltas": {name: after[name] - before[name] for name in gradient},
                    "slack": slack or {},
                }
            )
            before = after
        records[0]["initial"] = initial
        about = {
            **{"format": "parity-record-3", "model": "made up", "seed": 0, "steps": steps},
            **{"global_batch_size": SAMPLES, "learning_rate": rate, "optimizer": "SGD"},
            **{"mode": "oracle" if dp * tp == 1 else "mesh", "world_size": dp * tp, "rank": rank},
            **{"dp_degree": dp, "dp_rank": rank // tp, "tp_degree": tp, "tp_rank": rank % tp},
            **{"device": "cpu", "backend": "gloo", "compile_backend": None, "torch_version": "2"},
            **{"torch_neuronx_version": None, "run_id": "made", "saved_at": float(next(CLOCK))},
        }
        torch.save({"metadata": about | metadata, "records": records}, directory / f"rank-{rank}.pt")
    return directory


def mismatched(out: str) -> dict[str, int]:
    """Return how many tensors of each kind failed against the reference, by the printed table."""
    rows = re.findall(rf"^({'|'.join(KINDS)}) +\d+ +(\d+) ", out, re.MULTILINE)
    return {kind: int(failed) for kind, failed in rows if int(failed)}


def broken(out: str) -> set[str]:
    """Return the invariants that are broken in a run, by the printed table."""
    return set(re.findall(r"^  broken \d+ times: (.+?): ", out, re.MULTILINE))
