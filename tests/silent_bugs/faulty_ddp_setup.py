"""Mistakes in what a DDP loop is given: how gradients are reduced, the data, the model."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from faulty_cases import (
    LAST_GRADIENT,
    RANK,
    Slices,
    case,
    change_backward,
    change_batch,
    change_gradients,
    change_model,
    change_slices,
    change_step,
    own_rows,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import distributed_train as eager
from training_common import make_batch, make_model
from training_records import LOSS, OUTPUT


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


# ---------------------------------------------------------------- how gradients are reduced


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


# ---------------------------------------------------------------- data


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


# ---------------------------------------------------------------- model and initial values


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
