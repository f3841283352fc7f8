"""Mistakes in tensor parallelism."""

import torch
from faulty_cases import (
    LAST_GRADIENT,
    RANK,
    case,
    change_batch,
    change_gradients,
    local,
)
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import distributed_train as eager
from training_common import make_model
from training_records import OUTPUT


def change_tp(patch, change):
    """Call change(model, mesh) on the parallelized model."""

    def parallelize(model, mesh, plan):
        parallelize_module(model, mesh, plan)
        with torch.no_grad():
            change(model, mesh)

    patch(eager, "parallelize_module", parallelize)


def scale_gradients(parameters, factor):
    """Multiply all gradients by a factor."""
    for parameter in parameters.values():
        parameter.grad.mul_(factor)


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
