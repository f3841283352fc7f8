"""Made-up runs: tiny, exact and quick, on a mesh of two replicas by two tensor-parallel ranks.

A test alters one thing in a run and sees what the comparison says. Whatever must hold in any run holds
here, so that a test with an unaltered run passes.
"""

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

SAMPLES = 8  # of the global batch
FEATURES = 24  # of an output
KINDS = ("outputs", "losses", "gradients", "parameters", "deltas")
CLOCK = count(1)

NOT_KNOWN = "not known, nothing that we look for explains it"
# What a factor of 2 or 1/2 may mean on this mesh.
SUMMED = (
    "summed over the 2 data-parallel replicas instead of averaged, or summed over the 2 tensor-parallel "
    "ranks once too often"
)
DIVIDED = (
    "divided by the 2 data-parallel replicas once too often, or divided by the 2 tensor-parallel ranks, "
    "over which it must not be averaged"
)


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_parameters() -> dict[str, torch.Tensor]:
    """Return two parameters of float32, one of which could be the bias of the outputs."""
    return {"weight": noise(24, 4, seed=1), "bias": noise(24, seed=2)}


def some_gradients(step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step for these parameters."""
    return {"weight": 0.1 * noise(24, 4, seed=10 + step), "bias": 0.1 * noise(24, seed=20 + step)}


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


# ---------------------------------------------------------------- changes, each of one rank's content


def fault(change, sentence: str, *ranks: int):
    """Return the parameters of a test: a change, the cause that is named, and the ranks it is made on."""
    return pytest.param(change, sentence, ranks or (0, 1, 2, 3))


def output(change, step=1):
    """Replace a rank's output by change(output), or by change(output, metadata) where it takes more."""

    def edit_output(content):
        record, about = content["records"][step - 1], content["metadata"]
        two = change.__code__.co_argcount > 1
        record["output"] = (change(record["output"], about) if two else change(record["output"])).clone()

    return edit_output


def gradient(change, *names, step=1):
    """Replace the gradients of these names, of all without any."""

    def edit_gradients(content):
        gradients, about = content["records"][step - 1]["gradients"], content["metadata"]
        for name in names or tuple(gradients):
            two = change.__code__.co_argcount > 1
            value = change(gradients[name], about) if two else change(gradients[name])
            gradients[name] = value.contiguous().clone()

    return edit_gradients


def loss(change, step=1):
    """Replace (global, own) by change(global, own)."""

    def edit_loss(content):
        record = content["records"][step - 1]
        record["loss"], record["local_loss"] = change(record["loss"], record["local_loss"])

    return edit_loss


def start(change, name="weight"):
    """Replace an initial parameter."""

    def edit_start(content):
        initial = content["records"][0]["initial"]
        initial[name] = change(initial[name], content["metadata"]).contiguous().clone()

    return edit_start


def follow(update):
    """Train with update(gradient, parameter, last update, last gradient), the last two None at first."""

    def retrain(content):
        before, last = content["records"][0]["initial"], {}
        for record in content["records"]:
            gradients, after = record["gradients"], {}
            for name, value in before.items():
                delta = update(gradients[name], value, *last.get(name, (None, None)))
                after[name] = (value + delta).to(value.dtype)
            record["deltas"] = {name: after[name] - before[name] for name in gradients}
            last = {name: (record["deltas"][name], gradients[name]) for name in gradients}
            record["parameters"], before = after, after

    return retrain


def without(*names, moved=False):
    """Freeze parameters: they have no gradient, and change only if moved."""

    def change(content):
        initial = content["records"][0]["initial"]
        for step, record in enumerate(content["records"], start=1):
            for name in names:
                del record["gradients"][name], record["deltas"][name]
                record["parameters"][name] = initial[name] + (0.1 * step if moved else 0)

    return change


def other(tensor, size, seed=5):
    """Return noise of a size relative to a tensor, in norm."""
    values = noise(*tensor.shape, seed=seed).to(tensor.dtype)
    return values * (size * tensor.norm() / values.norm())


def near(size, change=lambda tensor: tensor):
    """Return a change that leaves so much, relative to the result."""
    return lambda tensor: change(tensor) + other(change(tensor), size)


def put(value):
    def change(tensor):
        tensor.view(-1)[3] = value
        return tensor

    return change


def chunks(order, dim=0):
    """Return the tensor's shards in another order."""
    return lambda g: torch.cat([g.chunk(len(order), dim)[i] for i in order], dim)
