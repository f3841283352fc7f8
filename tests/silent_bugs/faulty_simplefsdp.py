"""Mistakes in SimpleFSDP + TP, with 2 replicas of 4 tensor-parallel ranks."""

import torch
from faulty_cases import (
    LAST_GRADIENT_WITHOUT_BIAS,
    RANK,
    case,
    change_backward,
    change_slices,
    local,
    own_rows,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import simplefsdp_tp_train as simplefsdp
from training_common import average_losses, make_model
from training_records import LOSS, OUTPUT

COMPILE = torch.compile  # the real one, not what a case or the command puts in its place


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
