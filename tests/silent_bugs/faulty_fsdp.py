"""Mistakes in FSDP2: shards, how they are gathered and reduced, and what is made of them."""

import torch
import torch.distributed as dist
from faulty_cases import (
    FIRST_UPDATE,
    LAST_GRADIENT,
    RANK,
    case,
    change_gradients,
    change_model,
    local,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.optim import SGD

import distributed_train as eager
import training_common
from training_common import make_model
from training_records import OUTPUT


def change_fsdp(patch, change=None, **changed):
    """Shard with other options, and call change(model) on the sharded model."""

    def shard(module, **options):
        fully_shard(module, **options | changed)
        if change and isinstance(module, torch.nn.Sequential):  # the last call shards the root
            with torch.no_grad():
                change(module)

    patch(eager, "fully_shard", shard)


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
