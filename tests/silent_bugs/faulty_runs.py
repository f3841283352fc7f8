"""Run the training scripts with one real mistake at a time, and without any, in a single launch.

    python launch.py --standalone --nproc-per-node=4 tests/silent_bugs/faulty_runs.py --output-dir DIR
    python launch.py --standalone --nproc-per-node=8 tests/silent_bugs/faulty_runs.py --output-dir DIR

Four ranks run the cases of ddp, fsdp and tp, eight those of simplefsdp_tp (2 replicas of TP_DEGREE 4
ranks). Each case replaces a piece of the real script, whose own main() then trains with it: what is
recorded is what the faulty run computed. A case's rank files go into DIR/<case>, those of a second
run of the same case into DIR/<case>.again (--repeat 2), and those of the unchanged scripts into
DIR/clean-<mode>-seed<0, 1, 2>. Nothing is compared here: the cases say what a comparison with the
clean run of seed 0 has to find.

Compiling takes seconds per run. aot_eager runs the same operations as the uncompiled model, and the
records have the same bits, so of simplefsdp_tp only the clean run of seed 0 and the case whose
mistake is in the compiled graph are compiled; --compile compiles all.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distributed_train as eager  # noqa: E402
import simplefsdp_tp_train as simplefsdp  # noqa: E402
import training_common  # noqa: E402
from training_common import average_losses, make_batch, make_model  # noqa: E402

RANK = int(os.environ.get("RANK", 0))
RANKS = {"ddp": 4, "fsdp": 4, "tp": 4, "simplefsdp_tp": 8}
SEEDS = (0, 1, 2)  # of the clean runs; a faulty run has the first
STEPS = 3  # every mistake shows by the second
COMPILE = torch.compile  # the real one, not what main() puts in its place for most cases

LOSS = ("losses", "global loss")
OUTPUT = ("outputs", "output")
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


def change_ddp(patch, hook=None, state=None, **options):
    """Wrap the model with a communication hook or other options of DistributedDataParallel."""

    def wrap(model):
        replica = DistributedDataParallel(model, **options)
        if hook:
            replica.register_comm_hook(state, hook)
        return replica

    patch(eager, "DistributedDataParallel", wrap)


def summed(buffer, divisor=1):
    """Start the all-reduce that a communication hook has to return."""
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(divisor))


def change_fsdp(patch, change=None, **changed):
    """Shard with other options, and call change(model) on the sharded model."""

    def shard(module, **options):
        fully_shard(module, **options | changed)
        if change and isinstance(module, torch.nn.Sequential):  # the last call shards the root
            with torch.no_grad():
                change(module)

    patch(eager, "fully_shard", shard)


def change_tp(patch, change):
    """Call change(model, mesh) on the parallelized model."""

    def parallelize(model, mesh, plan):
        parallelize_module(model, mesh, plan)
        with torch.no_grad():
            change(model, mesh)

    patch(eager, "parallelize_module", parallelize)


def local(parameter):
    """Return the part of a parameter that this rank holds, to be changed in place."""
    return parameter.detach().to_local()


def scale_gradients(parameters, factor):
    """Multiply all gradients by a factor."""
    for parameter in parameters.values():
        parameter.grad.mul_(factor)


# ---------------------------------------------------------------- ddp: how gradients are reduced


@case("ddp", 1, LAST_GRADIENT, "instead of averaged")
def gradients_summed_ddp(patch):
    """A communication hook sums the gradients over the replicas and nobody divides.

    Own hooks and own all-reduces do: a sum is what the collective gives by default.
    """
    change_ddp(patch, lambda _, bucket: summed(bucket.buffer()))


@case("ddp", 1, LAST_GRADIENT, "once too often")
def gradients_divided_twice_ddp(patch):
    """The script divides the loss by the number of replicas, and DDP averages as well.

    Happens when a loop written for summed gradients is moved to DDP.
    """
    change_backward(patch, 1 / 4)


@case("ddp", 1, LAST_GRADIENT, "not reduced")
def layer_left_out_of_reduction_ddp(patch):
    """Layer 2 is on DDP's list of ignored parameters, so each replica keeps its own gradients.

    The list is meant for parts that something else synchronizes, such as sharded embeddings.
    """

    def wrap(model):
        ignored = ["2.weight", "2.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model)

    patch(eager, "DistributedDataParallel", wrap)


@case("ddp", 1, LAST_GRADIENT, "group")
def wrong_group_ddp(patch):
    """Gradients are averaged in the groups {0, 1} and {2, 3} instead of over all ranks.

    A process group made for each node, or for another dimension of parallelism, is passed to DDP.
    """
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    change_ddp(patch, process_group=pairs[RANK // 2])


@case("ddp", 2, LAST_GRADIENT, "not reduced")
def no_sync_left_on_ddp(patch):
    """Step 2 runs under no_sync(), as all but the last of several accumulated batches do.

    An off-by-one in the accumulation counter: the step that should reduce does not.
    """
    replicas = []
    patch(
        eager,
        "DistributedDataParallel",
        lambda model: replicas.append(DistributedDataParallel(model)) or replicas[0],
    )

    def wrap(train_step, parameters):
        def wrapped(step):
            with replicas[0].no_sync() if step + 1 == 2 else nullcontext():
                return train_step(step)

        return wrapped

    change_step(patch, eager, wrap)


@case("ddp", 1, LAST_GRADIENT, "bfloat16")
def gradients_reduced_in_bf16_ddp(patch):
    """bf16_compress_hook is registered: gradients are rounded, reduced and averaged in bfloat16.

    A hook that was switched on to save bandwidth and that nobody remembers.
    """
    change_ddp(patch, bf16_compress_hook)


@case("ddp", 1, LAST_GRADIENT, None)
def gradients_clipped_before_reduction_ddp(patch):
    """Every rank scales its own gradients to norm 0.01 before they are averaged.

    Clipping inside a hook, or under no_sync(), sees the local norm, not the one of the mean.
    """

    def hook(_, bucket):
        buffer = bucket.buffer()
        buffer.mul_(torch.clamp(0.01 / buffer.norm(), max=1.0))
        return summed(buffer, divisor=4)

    change_ddp(patch, hook)


@case("ddp", 2, ("gradients", "2.weight"), "not finite")
def nan_gradient_on_one_rank_ddp(patch):
    """At step 2 one element of rank 1's reduced gradient of 2.weight is NaN.

    A defective device or a racing kernel: all other ranks received the right mean.
    """

    def change(parameters, step):
        if step == 2 and RANK == 1:
            parameters["2.weight"].grad[3, 5] = torch.nan

    change_gradients(patch, eager, change)


# ---------------------------------------------------------------- ddp: data


@case("ddp", 1, OUTPUT, "same slice|same samples")
def same_slice_on_every_rank_ddp(patch):
    """Every rank takes the first slice: the data loader has no distributed sampler."""
    change_slices(patch, eager, lambda part, parts: own_rows(0, parts))


@case("ddp", 1, OUTPUT, "wrong ranks")
def slices_permuted_ddp(patch):
    """Rank r takes the slice of rank r + 1: another rank order in the loader than in the job.

    The gradients are right all the same: a mean does not depend on the order of its terms.
    """
    change_slices(patch, eager, lambda part, parts: own_rows((part + 1) % parts, parts))


@case("ddp", 1, OUTPUT, "overlap")
def slices_overlap_ddp(patch):
    """Neighbouring slices share a row: rank r starts r rows too early.

    An end that is taken as included when the slices are cut.
    """

    def rows(part, parts):
        own = own_rows(part, parts)
        return slice(own.start - part, own.stop - part)

    change_slices(patch, eager, rows)


@case("ddp", 1, OUTPUT, "uneven")
def uneven_slices_ddp(patch):
    """Rank 0 has 131 rows and the others 127, and the means over them are averaged with equal weights.

    A last batch that does not divide evenly, or packed sequences of different length.
    """

    def rows(part, parts):
        ends = [0, 131, 258, 385, 512]
        return slice(ends[part], ends[part + 1])

    change_slices(patch, eager, rows)


@case("ddp", 1, LOSS, "target")
def targets_of_neighbour_ddp(patch):
    """Inputs are right, targets are those of the next rank's slice.

    Inputs and labels come from two loaders, and only one of them got the right rank.
    """

    def change(batch, target, step):
        return batch, Slices(target, lambda part, parts: own_rows((part + 1) % parts, parts))

    change_batch(patch, eager, change)


@case("ddp", 1, OUTPUT, "read ahead")
def next_batch_ddp(patch):
    """Every step trains on the batch of the next one: the loader was advanced once before training.

    Typical of a sanity check that takes one batch, and of resuming from a checkpoint.
    """
    patch(eager, "make_batch", lambda step: make_batch(step + 1))


@case("ddp", 2, OUTPUT, "earlier batch is used again")
def batch_never_advances_ddp(patch):
    """Every step trains on the first batch: the iterator is made anew in each step."""
    patch(eager, "make_batch", lambda step: make_batch(0))


@case("ddp", 2, OUTPUT, "not finite")
def nan_in_batch_ddp(patch):
    """At step 2 one input value of rank 1's slice is NaN: a corrupt sample.

    The reduction takes the NaN to the gradients of all ranks.
    """

    def change(batch, target, step):
        if step == 2:
            batch[own_rows(1, 4)][7, 11] = torch.nan
        return batch, target

    change_batch(patch, eager, change)


# ---------------------------------------------------------------- ddp: model and initial values


@case("ddp", 0, ("parameters", "2.weight"), "seeds of their own")
def seed_per_rank_ddp(patch):
    """2.weight is drawn from seed + rank, and DDP does not send rank 0's to the others.

    init_sync=False saves start-up time and is right only where all ranks make the same model.
    """

    def change(model, kind, seed):
        model[2].weight.copy_(make_model(kind, seed + RANK)[2].weight)

    change_model(patch, eager, change)
    change_ddp(patch, init_sync=False)


@case("ddp", 0, ("parameters", "0.weight"), "another seed")
def broadcast_from_wrong_seed_ddp(patch):
    """Rank 0 makes its model from another seed, and DDP sends it to all ranks.

    Rank 0 loads another checkpoint than the job was meant to start from; all ranks agree.
    """
    patch(eager, "make_model", lambda kind, seed: make_model(kind, seed + (RANK == 0)))


@case("ddp", 1, ("gradients", "0.bias"), "frozen")
def frozen_layer_ddp(patch):
    """Layer 0 has requires_grad=False, left over from fine-tuning: it has no gradients and stays."""
    change_model(patch, eager, lambda model, kind, seed: model[0].requires_grad_(False) and None)


@case("ddp", 1, OUTPUT, None)
def dropout_left_on_ddp(patch):
    """The hidden layer drops a tenth of its values: the reference ran in eval mode, this run did not.

    All ranks draw the same mask, because they all seeded the generator alike.
    """

    def change(model, kind, seed):
        model[1] = torch.nn.Sequential(model[1], torch.nn.Dropout(0.1))

    change_model(patch, eager, change)


@case("ddp", 1, OUTPUT, "dropout")
def dropout_on_output_ddp(patch):
    """The output drops a tenth of its values: dropout after the last layer, where it was not wanted."""
    change_model(patch, eager, lambda model, kind, seed: model.append(torch.nn.Dropout(0.1)))


@case("ddp", 1, OUTPUT, None)
def dropout_unseeded_ddp(patch):
    """The hidden layer drops a tenth of its values by a generator that nobody seeded.

    Every rank has another mask, and a second run of the same plan is another run.
    """

    def change(model, kind, seed):
        model[1] = torch.nn.Sequential(model[1], torch.nn.Dropout(0.1))
        torch.seed()

    change_model(patch, eager, change)


@case("ddp", 1, OUTPUT, None)
def gelu_instead_of_relu_ddp(patch):
    """The activation is GELU, not ReLU: a wrong line in a configuration, and another model."""

    def change(model, kind, seed):
        model[1] = torch.nn.GELU()

    change_model(patch, eager, change)


@case("ddp", 1, OUTPUT, "bfloat16")
def autocast_left_on_ddp(patch):
    """Forward runs under bfloat16 autocast in a run that was meant to be float32."""

    def wrap(train_step, parameters):
        def wrapped(step):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return train_step(step)

        return wrapped

    change_step(patch, eager, wrap)


class StaleMask(torch.autograd.Function):
    """ReLU whose backward lets pass what a given mask says."""

    @staticmethod
    def forward(ctx, values, mask):
        """Return the ReLU."""
        ctx.save_for_backward(mask)
        return values.relu()

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient where the mask is set."""
        return gradient * ctx.saved_tensors[0], None


class StaleReLU(torch.nn.Module):
    """ReLU that keeps its mask in one buffer and, in backward, reads the mask of the step before."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, values):
        """Return the ReLU."""
        mask, self.mask = self.mask, values.detach() > 0
        return StaleMask.apply(values, self.mask if mask is None else mask)


@case("ddp", 2, ("gradients", "0.bias"), None)
def stale_relu_mask_ddp(patch):
    """ReLU's backward uses the mask of the step before: a fused kernel that reuses its buffer.

    Layer 2 does not notice: its gradients are computed before backward gets there.
    """

    def change(model, kind, seed):
        model[1] = StaleReLU()

    change_model(patch, eager, change)


# ---------------------------------------------------------------- ddp: loss and backward


@case("ddp", 1, LOSS, "elements of the output|not finite")
def loss_summed_ddp(patch):
    """The loss is the sum over all elements, not their mean: reduction="sum" in an otherwise equal script."""
    mean = torch.nn.functional.mse_loss
    patch(torch.nn.functional, "mse_loss", lambda output, target: mean(output, target, reduction="sum"))


@case("ddp", 1, LOSS, "not averaged")
def losses_not_averaged_ddp(patch):
    """Each rank reports the loss of its own slice as the global one; training itself is right."""
    patch(eager, "average_losses", lambda records, device: None)


@case("ddp", 1, LAST_GRADIENT, "1024")
def loss_scale_not_removed_ddp(patch):
    """The loss is scaled by 1024 for backward, and the gradients are not scaled back.

    A mixed-precision loop whose unscale step got lost.
    """
    change_backward(patch, 1024)


@case("ddp", 1, LAST_GRADIENT, "twice")
def step_run_twice_ddp(patch):
    """Forward and backward run twice before the update: the gradients are twice what they should be.

    A warm-up, a profiler or a retry runs the step once more and does not clear what it left.
    """

    def wrap(train_step, parameters):
        def wrapped(step):
            train_step(step)
            return train_step(step)

        return wrapped

    change_step(patch, eager, wrap)


@case("ddp", 1, LAST_GRADIENT, "twice|not reduced")
def backward_called_twice_ddp(patch):
    """backward() is called twice after one forward: the second adds each rank's own gradients.

    DDP reduces in the first backward after a forward only, so ranks get mean + own.
    """
    backward = torch.Tensor.backward

    def twice(loss):
        backward(loss, retain_graph=True)
        backward(loss)

    patch(torch.Tensor, "backward", twice)


@case("ddp", 1, LAST_GRADIENT, "clipped")
def gradients_clipped_ddp(patch):
    """Gradients are scaled to a global norm of 0.01 before the update: clipping left on."""
    change_gradients(
        patch,
        eager,
        lambda parameters, step: torch.nn.utils.clip_grad_norm_(parameters.values(), 0.01),
    )


@case("ddp", 1, LAST_GRADIENT, "bfloat16")
def gradients_in_bf16_ddp(patch):
    """The reduced gradients are rounded to bfloat16 in a float32 run.

    A buffer for main gradients whose dtype was taken from the mixed-precision configuration.
    """

    def change(parameters, step):
        for parameter in parameters.values():
            parameter.grad.copy_(parameter.grad.bfloat16())

    change_gradients(patch, eager, change)


# ---------------------------------------------------------------- ddp: optimizer


@case("ddp", 2, LAST_GRADIENT, "zero_grad")
def zero_grad_forgotten_ddp(patch):
    """Gradients are never cleared: every step adds its own to those of all steps before."""

    class Keeping(SGD):
        def zero_grad(self, set_to_none=True):
            pass

    patch(torch.optim, "SGD", Keeping)


@case("ddp", 2, FIRST_UPDATE, "before the gradient has arrived")
def stale_gradient_ddp(patch):
    """From step 2 on, the update uses the gradients of the step before; the recorded ones are right.

    Overlapping the update with the next backward, without waiting for the reduction.
    """

    class Stale(SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                fresh, state = parameter.grad, self.state[parameter]
                parameter.grad = state.get("stale", fresh)
                state["stale"] = fresh
            return super().step(closure)

    patch(torch.optim, "SGD", Stale)


@case("ddp", 1, ("parameters", "2.weight"), "not updated by the optimizer")
def parameter_missing_from_optimizer_ddp(patch):
    """The optimizer does not know 2.weight, which has gradients and never changes.

    A head that was replaced or tied after the optimizer had been made.
    """

    def make(parameters, lr):
        first, first_bias, _, second_bias = parameters
        return SGD([first, first_bias, second_bias], lr=lr)

    patch(torch.optim, "SGD", make)


@case("ddp", 2, FIRST_UPDATE, "momentum")
def momentum_left_on_ddp(patch):
    """Plain SGD was meant, momentum 0.9 is on: the first step is the same, later ones are larger."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9))


@case("ddp", 1, FIRST_UPDATE, "weight decay")
def weight_decay_left_on_ddp(patch):
    """Plain SGD was meant, weight decay 0.01 is on: a default of many training configurations."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr, weight_decay=0.01))


@case("ddp", 1, FIRST_UPDATE, "world size")
def learning_rate_scaled_ddp(patch):
    """The learning rate is multiplied by the number of replicas, the linear scaling rule.

    The rule is for batches that grow with the replicas; here the global batch is fixed.
    """
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr * dist.get_world_size()))


@case("ddp", 2, FIRST_UPDATE, "acts as 0.009")
def learning_rate_decays_ddp(patch):
    """A scheduler multiplies the learning rate by 0.9 after every step, where it was meant constant."""

    def make(parameters, lr):
        optimizer = SGD(parameters, lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    patch(torch.optim, "SGD", make)


@case("ddp", 1, FIRST_UPDATE, "twice")
def update_applied_twice_ddp(patch):
    """optimizer.step() runs twice: once in the loop and once in a callback or a scaler."""

    class Twice(SGD):
        def step(self, closure=None):
            super().step()
            return super().step(closure)

    patch(torch.optim, "SGD", Twice)


@case("ddp", 1, FIRST_UPDATE, "Adam")
def adam_instead_of_sgd_ddp(patch):
    """The optimizer is Adam, not SGD: its first update is the learning rate times the gradient's sign."""
    patch(torch.optim, "SGD", torch.optim.Adam)


@case("ddp", 1, FIRST_UPDATE, "bfloat16")
def parameters_in_bf16_ddp(patch):
    """Updated parameters are rounded to bfloat16: there is no float32 master copy of the weights.

    Updates smaller than half a unit of bfloat16 are lost altogether.
    """

    class Rounding(SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(parameter.bfloat16())

    patch(torch.optim, "SGD", Rounding)


@case("ddp", 1, FIRST_UPDATE, "rank 3")
def learning_rate_differs_on_one_rank_ddp(patch):
    """Rank 3 updates with twice the learning rate: a node that was started with another configuration."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr * (2 if RANK == 3 else 1)))


@case("ddp", 2, ("parameters", "2.weight"), "memory was changed")
def bit_flip_ddp(patch):
    """At step 2 one bit flips in one element of rank 1's 2.weight: silent data corruption in memory."""

    class Flipping(SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            if RANK == 1 and self.steps == 2:
                bits = self.param_groups[0]["params"][2].detach().view(torch.int32)
                bits[3, 5] ^= 1 << 23  # the lowest bit of the exponent: twice or half the value

    patch(torch.optim, "SGD", Flipping)


@case("ddp", 2, FIRST_UPDATE, "update was skipped")
def update_skipped_on_one_rank_ddp(patch):
    """At step 2 rank 2 does not update layer 0; all other ranks do.

    An optimizer with sharded state, whose owner's broadcast of updated parameters missed a rank.
    """

    class Skipping(SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if RANK == 2 and self.steps == 2:
                for parameter in self.param_groups[0]["params"][:2]:
                    parameter.grad = None
            return super().step(closure)

    patch(torch.optim, "SGD", Skipping)


# ---------------------------------------------------------------- fsdp


@case("fsdp", 1, LAST_GRADIENT, "instead of averaged")
def gradients_summed_fsdp(patch):
    """The reduce-scatter's divisor is set to 1: meant for a loss that is divided by hand, and it is not."""

    def change(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale within a reduction

    change_fsdp(patch, change)


@case("fsdp", 1, LAST_GRADIENT, "norm of the local shard")
def gradients_clipped_by_shard_fsdp(patch):
    """Every rank scales its shards of the gradients by the norm of those shards, to 0.01.

    Clipping code that was written for whole tensors sees a local shard as the whole.
    """

    def change(parameters, step):
        shards = [local(parameter.grad) for parameter in parameters.values()]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard.mul_(torch.clamp(0.01 / norm, max=1.0))

    change_gradients(patch, eager, change)


@case("fsdp", 0, ("parameters", "2.weight"), "another seed")
def seed_per_rank_fsdp(patch):
    """2.weight is drawn from seed + rank, and every rank cuts its shard out of its own.

    FSDP sends nothing at the start: the shards make up a matrix that no rank ever drew.
    """

    def change(model, kind, seed):
        model[2].weight.copy_(make_model(kind, seed + RANK)[2].weight)

    change_model(patch, eager, change)


@case("fsdp", 0, ("parameters", "0.weight"), "same shard")
def shards_identical_fsdp(patch):
    """Every rank holds rank 0's shard of every parameter: all of them loaded the same shard file."""

    def change(model):
        for parameter in model.parameters():
            dist.broadcast(local(parameter), src=0)

    change_fsdp(patch, change)


@case("fsdp", 0, ("parameters", "0.weight"), "never filled")
def shard_left_zero_fsdp(patch):
    """Rank 2's rows of 0.weight are zero: memory that the initialization on this rank never filled."""

    def change(model):
        if RANK == 2:
            local(model[0].weight).zero_()

    change_fsdp(patch, change)


class ReversedAllGather(DefaultAllGather):
    """All-gather that puts the ranks' shards in reversed order."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """Gather the shards into output_tensor."""
        super().__call__(output_tensor, input_tensor, group)
        output_tensor.copy_(output_tensor.view(group.size(), -1).flip(0).flatten())


@case("fsdp", 1, OUTPUT, None)
def shards_gathered_in_wrong_order_fsdp(patch):
    """The weights of the forward are gathered with the ranks in reversed order.

    A collective over a group whose ranks are listed in another order than the shards were cut.
    """

    def change(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(ReversedAllGather())

    change_fsdp(patch, change)


@case("fsdp", 0, ("parameters", "0.weight"), "wrong order")
def shards_recorded_in_wrong_order_fsdp(patch):
    """The record puts the shards together in reversed order; training itself is right.

    A script that merges checkpoint shards in the wrong order, such as rank-10 before rank-2.
    """
    assemble = training_common._assemble
    patch(training_common, "_assemble", lambda tensor, columns: assemble(tensor, columns.flip(0)))


@case("fsdp", 1, FIRST_UPDATE, "world size")
def learning_rate_scaled_fsdp(patch):
    """The learning rate is multiplied by the number of ranks, the global batch is not."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr * dist.get_world_size()))


@case("fsdp", 1, LAST_GRADIENT, "group")
def replicas_not_reduced_fsdp(patch):
    """Each half of the ranks is a sharded replica of its own: gradients are averaged within pairs.

    Hybrid sharding whose mesh lost its replicate dimension on the way to fully_shard.
    """

    def mesh(device, shape, mesh_dim_names):
        return init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]

    patch(eager, "init_device_mesh", mesh)
    patch(eager, "check_local_shape", lambda *_: None)  # expects shards over all ranks


@case("fsdp", 1, LAST_GRADIENT, "bfloat16")
def gradients_reduced_in_bf16_fsdp(patch):
    """The mixed-precision policy reduces gradients in bfloat16: copied from a bfloat16 run."""
    change_fsdp(patch, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


@case("fsdp", 1, OUTPUT, "bfloat16")
def weights_gathered_in_bf16_fsdp(patch):
    """The mixed-precision policy gathers the weights, and computes, in bfloat16."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    change_fsdp(patch, mp_policy=policy)


# ---------------------------------------------------------------- tp


@case("tp", 1, OUTPUT, None)
def different_batches_tp(patch):
    """Tensor-parallel ranks see different batches: rank r has the rows rotated by r.

    A loader that deals samples out by the global rank, as data parallelism wants it.
    """
    change_batch(
        patch, eager, lambda batch, target, step: (batch.roll(RANK, dims=0), target.roll(RANK, dims=0))
    )


@case("tp", 1, OUTPUT, "added 4 times")
def bias_added_on_every_rank_tp(patch):
    """Every rank adds the row-wise layer's bias before the all-reduce, so it counts four times."""

    def change(model, mesh):
        row = model[2]

        def forward(hidden):
            bias = row.bias.to_local(grad_placements=[Replicate()])
            part = torch.nn.functional.linear(hidden.to_local(), row.weight.to_local(), bias)
            return DTensor.from_local(part, mesh, [Partial()], run_check=False)

        row.forward = forward

    change_tp(patch, change)


class UnreducedRowwise(RowwiseParallel):
    """Row-wise layer that returns each rank's partial sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local()


@case("tp", 1, OUTPUT, "not reduced")
def output_not_reduced_tp(patch):
    """The row-wise layer's output is not all-reduced: each rank goes on with its partial sum."""
    patch(eager, "RowwiseParallel", UnreducedRowwise)


class TwiceReducedRowwise(RowwiseParallel):
    """Row-wise layer whose output is summed over the ranks a second time."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        output = RowwiseParallel._prepare_output_fn(output_layouts, True, mod, outputs, device_mesh)
        again = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
        return again.redistribute(placements=[Replicate()]).to_local()


@case("tp", 1, OUTPUT, "once too often")
def output_reduced_twice_tp(patch):
    """The row-wise layer's output is all-reduced twice, by the layer and by the model around it."""
    patch(eager, "RowwiseParallel", TwiceReducedRowwise)


@case("tp", 1, LAST_GRADIENT, "must not be averaged")
def gradients_divided_tp(patch):
    """All gradients are divided by the number of tensor-parallel ranks, as if they were replicas.

    Gradients averaged over all ranks of the job, where only the data-parallel ones may be.
    """
    change_gradients(patch, eager, lambda parameters, step: scale_gradients(parameters, 1 / 4))


@case("tp", 0, ("parameters", "2.weight"), "another seed")
def shard_of_another_seed_tp(patch):
    """Rank 1's shard of 2.weight is drawn from another seed: a generator that one rank advanced."""

    def change(model, mesh):
        other = make_model("eager", 1)[2].weight
        if RANK == 1:
            local(model[2].weight).copy_(other.chunk(4, dim=1)[RANK])

    change_tp(patch, change)


@case("tp", 0, ("parameters", "0.weight"), "wrong order")
def column_shards_in_wrong_order_tp(patch):
    """The shards of 0.weight lie on the ranks in reversed order; those of its bias and 2.weight do not.

    Checkpoint shards that were merged and split again by another rank order.
    """

    def change(model, mesh):
        whole = model[0].weight.full_tensor()
        local(model[0].weight).copy_(whole.chunk(4)[3 - RANK])

    change_tp(patch, change)


@case("tp", 0, ("parameters", "2.bias"), "seed of its own")
def replicated_bias_differs_tp(patch):
    """2.bias, which all ranks hold, starts from another seed on rank 1: nobody sent rank 0's."""

    def change(model, mesh):
        if RANK == 1:
            local(model[2].bias).copy_(make_model("eager", 1)[2].bias)

    change_tp(patch, change)


# ---------------------------------------------------------------- simplefsdp_tp


@case("simplefsdp_tp", 1, LAST_GRADIENT_WITHOUT_BIAS, "instead of averaged")
def loss_not_divided_simplefsdp(patch):
    """The loss is not divided by the number of replicas, over which backward sums."""
    change_backward(patch, 2)  # undoes the script's division: exact in binary


@case("simplefsdp_tp", 1, LAST_GRADIENT_WITHOUT_BIAS, "once too often")
def loss_divided_twice_simplefsdp(patch):
    """The loss is divided by the number of replicas twice, by the loss function and by the loop."""
    change_backward(patch, 1 / 2)


def change_gather(patch, before=None, after=None, gradient=Partial):
    """Gather weights with a change before or after it, or with another placement of the gradient."""

    def gather(self, weight):
        shard = weight.to_local()
        if before:
            shard = before(self, shard)
        stride = (self.tp_shape[1], 1)
        placements = [Shard(self.dp_dim)]
        partition = DTensor.from_local(shard, self.dp_mesh, placements, shape=self.tp_shape, stride=stride)
        whole = partition.redistribute(placements=[Replicate()])
        whole = whole.to_local(grad_placements=[gradient()])
        if after:
            whole = after(self, whole)
        stride = (self.shape[1], 1)
        return DTensor.from_local(whole, self.tp_mesh, [Shard(self.tp_dim)], shape=self.shape, stride=stride)

    patch(simplefsdp.SimpleFSDPWeight, "gather", gather)


@case("simplefsdp_tp", 1, LAST_GRADIENT_WITHOUT_BIAS, None)
def gradient_not_summed_simplefsdp(patch):
    """The gathered weight's gradient is declared a replica over dp: each rank cuts it, nobody sums."""
    change_gather(patch, gradient=Replicate)


@case("simplefsdp_tp", 1, LAST_GRADIENT_WITHOUT_BIAS, None)
def gradient_summed_over_tp_simplefsdp(patch):
    """The weights' gradients are summed over the tp dimension of the mesh instead of over dp."""

    def after(self, whole):
        # Declared a replica over tp whose gradient is a term of a sum: backward all-reduces it there.
        replica = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return replica.to_local(grad_placements=[Partial()])

    change_gather(patch, after=after, gradient=Replicate)


@case("simplefsdp_tp", 1, OUTPUT, "same samples")
def slice_chosen_by_rank_simplefsdp(patch):
    """The slice is chosen by the global rank, not by the replica: tp ranks see different samples."""
    change_slices(patch, simplefsdp, lambda part, parts: own_rows(RANK % parts, parts))


@case("simplefsdp_tp", 1, LAST_GRADIENT_WITHOUT_BIAS, "once too often")
def output_gradient_summed_over_tp_simplefsdp(patch):
    """The gradient of the output is declared a term of a sum over tp, and it is a replica: four times."""

    def forward(self, batch):
        batch = DTensor.from_local(batch, self.tp_mesh, [Replicate()], run_check=False)
        hidden = torch.nn.functional.linear(batch, self.gather_first(self.first)).relu()
        output = torch.nn.functional.linear(hidden, self.gather_second(self.second))
        output = output.redistribute(placements=[Replicate()])
        return output.to_local(grad_placements=[Partial("sum")])

    patch(simplefsdp.SimpleFSDPModel, "forward", forward)


@case("simplefsdp_tp", 2, OUTPUT, "earlier batch is used again")
def batch_captured_in_graph_simplefsdp(patch):
    """The batch of step 1 became a constant of the compiled graph, and every later step reuses it.

    Tracing with example inputs that are reached through a global, an attribute or a cache.
    """

    def compile_with_constant(model, **options):
        graphs = []

        def run(batch):
            if not graphs:
                graphs.append(COMPILE(lambda: model(batch), **options))
            return graphs[0]()

        return run

    patch(torch, "compile", compile_with_constant)


@case("simplefsdp_tp", 2, OUTPUT, None)
def stale_gathered_weights_simplefsdp(patch):
    """Every step computes with the weights that were gathered at step 1; updates go to the live shards.

    A cache of gathered weights that the update does not invalidate.
    """
    shard_weight = simplefsdp.SimpleFSDPModel._shard
    initial = []

    def shard(weight, mesh, dp_dim, tp_dim):
        parameter = shard_weight(weight, mesh, dp_dim, tp_dim)
        initial.append((dp_dim, local(parameter).clone()))
        return parameter

    def before(self, shard):
        stale = dict(initial)[self.dp_dim]
        return shard + (stale - shard.detach())  # the value of the one, the gradient of the other

    patch(simplefsdp.SimpleFSDPModel, "_shard", staticmethod(shard))
    change_gather(patch, before=before)


@case("simplefsdp_tp", 1, LOSS, "not averaged")
def losses_averaged_over_tp_simplefsdp(patch):
    """The reported losses are averaged over the tp group, whose ranks all have the same one."""
    meshes = []

    def mesh(*arguments, **options):
        meshes.append(init_device_mesh(*arguments, **options))
        return meshes[-1]

    def average(records, device, group):
        average_losses(records, device, meshes[-1]["tp"].get_group())

    patch(simplefsdp, "init_device_mesh", mesh)
    patch(simplefsdp, "average_losses", average)


@case("simplefsdp_tp", 0, ("parameters", "0.weight"), "another seed")
def seed_per_replica_simplefsdp(patch):
    """Each replica draws its weights from seed + dp rank and cuts its shards out of them.

    Nothing is sent at the start: halves of two different matrices are trained as one.
    """
    patch(simplefsdp, "make_model", lambda kind, seed: make_model(kind, seed + RANK // 4))


# ---------------------------------------------------------------- running them


def run(mode: str, seed: int, apply: Callable | None, compiled: bool, directory: Path, steps: int) -> None:
    """Run the mode's script as if it had been started with these options, with a case's mistake if any."""
    options = f"--device cpu --backend gloo --expected-world-size {RANKS[mode]} --seed {seed} --steps {steps}"
    if mode == "simplefsdp_tp":
        main = simplefsdp.main
        options += " --compile-backend aot_eager"
        torch._dynamo.reset()  # compiled code would outlive the case whose mistake is in it
    else:
        main = eager.main
        options += f" --parallelism {mode}"
    with ExitStack() as patches:

        def patch(target, name, replacement):
            patches.enter_context(mock.patch.object(target, name, replacement))

        patch(sys, "argv", [mode, *options.split(), "--output-dir", str(directory)])
        if not compiled:
            patch(torch, "compile", lambda model, **options: model)
        if apply:
            apply(patch)
        main()


def main() -> None:
    """Run the clean scripts and the cases of this number of ranks one after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="one directory per run is made here")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument(
        "--repeat", type=int, choices=(1, 2), default=1, help="runs of each case (default: 1)"
    )
    parser.add_argument("--only", help="names of cases or clean runs, separated by commas (default: all)")
    parser.add_argument("--compile", action="store_true", help="compile the cases of simplefsdp_tp, too")
    args = parser.parse_args()

    modes = [mode for mode, ranks in RANKS.items() if ranks == int(os.environ["WORLD_SIZE"])]
    runs = {f"clean-{mode}-seed{seed}": (mode, seed, None) for mode in modes for seed in SEEDS}
    for name, faulty in CASES.items():
        if faulty.mode in modes:
            runs[name] = (faulty.mode, SEEDS[0], faulty.apply)
            if args.repeat == 2:
                runs[f"{name}.again"] = runs[name]
    wanted = args.only.split(",") if args.only else list(runs)
    if not modes:
        raise training_common.InputError(f"start {' or '.join(map(str, sorted(set(RANKS.values()))))} ranks")
    if unknown := [name for name in wanted if name not in runs]:
        raise training_common.InputError(f"--only: {', '.join(unknown)}: no such run at this number of ranks")
    wanted += [f"{name}.again" for name in wanted if args.only and f"{name}.again" in runs]

    # One process group for all runs. Each script still waits for all ranks where it would have
    # started its own: until then, a rank may be removing the files of an earlier run.
    dist.init_process_group("gloo")
    with ExitStack() as kept:
        kept.enter_context(mock.patch.object(dist, "init_process_group", lambda *_, **kw: dist.barrier()))
        kept.enter_context(mock.patch.object(dist, "rendezvous", lambda url: iter([[mock.Mock()]])))
        kept.enter_context(mock.patch.object(training_common, "check_same_options", lambda *_: None))
        kept.enter_context(mock.patch.object(dist, "destroy_process_group", lambda: None))
        for module in (training_common, eager, simplefsdp):
            kept.enter_context(mock.patch.object(module, "print_line", lambda text: None))
        for name in wanted:
            mode, seed, apply = runs[name]
            started = time.monotonic()
            try:
                compiled = args.compile or (apply is None and seed == SEEDS[0])
                run(mode, seed, apply, compiled, args.output_dir / name, args.steps)
            except Exception as error:
                raise RuntimeError(f"{name}: {error}") from error
            if RANK == 0:
                print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    training_common.run_script(main)
