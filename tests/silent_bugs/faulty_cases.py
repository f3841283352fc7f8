"""What a case is, and the ways in which cases change a training script."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

# Of the files with the cases, too: each imports this one first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import training_common  # noqa: E402
from training_common import make_batch, make_model  # noqa: E402

RANK = int(os.environ.get("RANK", 0))
RANKS = {"ddp": 4, "fsdp": 4, "tp": 4, "simplefsdp_tp": 8}
SEEDS = (0, 1, 2)  # of the clean runs; a faulty run has the first
STEPS = 3  # every mistake shows by the second

# Backward computes the last layer first, so this is where a fault of all gradients shows.
LAST_GRADIENT = ("gradients", "2.bias")
LAST_GRADIENT_WITHOUT_BIAS = ("gradients", "2.weight")
# Updated parameters come in the model's order, and before their deltas.
FIRST_UPDATE = ("parameters", "0.weight")


class Case(NamedTuple):
    """A mistake: the mode it is made in, and what a comparison with the clean run has to say of it."""

    mode: str
    step: int  # of the first divergence, counted from 1; 0 is before training
    kind: str  # of the tensor that diverges first
    name: str  # of that tensor
    cause: str | None  # words that the right diagnosis contains, "|" between ways to say it; None if the
    # values cannot tell
    apply: Callable  # makes the mistake; called with a function patch(object, "attribute", replacement)

    @property
    def about(self) -> str:
        """What the mistake is and where it happens."""
        return self.apply.__doc__


CASES: dict[str, Case] = {}


def case(mode, step, first, cause):
    """Register a function as the case of its name."""

    def register(function):
        CASES[function.__name__] = Case(mode, step, *first, cause, function)
        return function

    return register


# ---------------------------------------------------------------- ways to change a script


class Slices:
    """A global batch whose chunk() hands out the rows that a faulty data loader takes."""

    def __init__(self, tensor, rows):
        self.tensor, self.rows = tensor, rows

    def chunk(self, parts):
        """Return one slice per part, as Tensor.chunk does."""
        return [self.tensor[self.rows(part, parts)] for part in range(parts)]


def own_rows(part, parts):
    """Return the rows of a part, as Tensor.chunk takes them."""
    size = training_common.GLOBAL_BATCH_SIZE // parts
    return slice(part * size, (part + 1) * size)


def change_batch(patch, module, change):
    """Train on change(batch, target, step), with the step counted from 1."""
    patch(module, "make_batch", lambda step: change(*make_batch(step), step + 1))


def change_slices(patch, module, rows):
    """Give part i of n the rows(i, n) of batch and target."""
    change_batch(patch, module, lambda batch, target, step: (Slices(batch, rows), Slices(target, rows)))


def change_model(patch, module, change):
    """Train the model that change makes of the new model and its seed."""

    def make(kind, seed):
        model = make_model(kind, seed)
        with torch.no_grad():
            return change(model, kind, seed) or model

    patch(module, "make_model", make)


def change_backward(patch, factor):
    """Run backward on the loss times a factor; the loss that is recorded is the right one."""
    backward = torch.Tensor.backward
    patch(torch.Tensor, "backward", lambda loss: backward(loss * factor))


def change_step(patch, module, wrap):
    """Train with wrap(train_step, parameters) instead of train_step."""

    def train(parameters, optimizer, steps, train_step):
        return training_common.train(parameters, optimizer, steps, wrap(train_step, parameters))

    patch(module, "train", train)


def change_gradients(patch, module, change):
    """Call change(parameters, step), the step counted from 1, between backward and the update."""

    def wrap(train_step, parameters):
        def wrapped(step):
            result = train_step(step)
            with torch.no_grad():
                change(parameters, step + 1)
            return result

        return wrapped

    change_step(patch, module, wrap)


def local(parameter):
    """Return the part of a parameter that this rank holds, to be changed in place."""
    return parameter.detach().to_local()
