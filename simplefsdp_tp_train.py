r"""Train with SimpleFSDP and tensor parallelism in one compiled graph, on CPU, Neuron or CUDA.

    torchrun --standalone --nproc-per-node=64 simplefsdp_tp_train.py \
        --device cpu --backend gloo --compile-backend aot_eager --output-dir results/cpu-simplefsdp-tp
    torchrun --standalone --nproc-per-node=64 simplefsdp_tp_train.py \
        --seed 0 --steps 10 --output-dir results/simplefsdp-tp      # on Neuron, the default device

The mesh at 64 ranks and TP_DEGREE 4. A row is one replica: its four ranks see the same 32 samples.
A column holds the same quarter of the hidden features, each rank a sixteenth of that quarter.

             tp=0  tp=1  tp=2  tp=3
    dp=0        0     1     2     3      weight            placements (dp, tp)   local shape
    dp=1        4     5     6     7      0.weight 256x128  Shard(1), Shard(0)    64x8
     ...                                 2.weight 128x256  Shard(0), Shard(1)    8x64
    dp=15      60    61    62    63
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from training_common import (
    GLOBAL_BATCH_SIZE,
    HIDDEN_FEATURES,
    INPUT_FEATURES,
    LEARNING_RATE,
    TP_DEGREE,
    InputError,
    add_run_arguments,
    average_losses,
    check_divides,
    check_local_shape,
    initialize,
    make_batch,
    make_model,
    make_parser,
    print_line,
    run_script,
    save_results,
    train,
)

COMPILE_BACKEND = "neuron"  # aot_eager on a CPU: the same graphs, run operation by operation


class SimpleFSDPWeight(torch.nn.Module):
    """Turn a weight sharded over (dp, tp) into one sharded over tp alone, differentiably.

    The gather over dp is a DTensor operation inside the model, where a compiler sees it; its
    backward sums the gradients over dp and scatters them to the shards. This is SimpleFSDP.
    """

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, int], dp_dim: int, tp_dim: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.dp_mesh, self.tp_mesh = mesh["dp"], mesh["tp"]
        self.shape = shape
        self.dp_dim, self.tp_dim = dp_dim, tp_dim
        self.tp_shape = tuple(
            size // self.tp_mesh.size() if dim == tp_dim else size for dim, size in enumerate(shape)
        )

    def gather(self, weight: DTensor) -> DTensor:
        # Seen on the dp mesh alone, the local shard is a part of this rank's tp partition.
        partition = DTensor.from_local(
            weight.to_local(),
            self.dp_mesh,
            [Shard(self.dp_dim)],
            shape=self.tp_shape,
            stride=(self.tp_shape[1], 1),
        )
        whole = partition.redistribute(placements=[Replicate()])
        # Every replica computes the gradient of its own samples: a term of the sum over dp.
        local = whole.to_local(grad_placements=[Partial("sum")])
        return DTensor.from_local(
            local, self.tp_mesh, [Shard(self.tp_dim)], shape=self.shape, stride=(self.shape[1], 1)
        )

    def forward(self, weight: DTensor) -> DTensor:
        # Without the checkpoint, the gathered weights would stay in memory until backward; with
        # it, backward gathers them again.
        return checkpoint(self.gather, weight, use_reentrant=False)


class SimpleFSDPModel(torch.nn.Module):
    """The two-layer model with its weights sharded over a (dp, tp) mesh."""

    def __init__(self, model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tp_mesh = mesh["tp"]
        # Column-wise, then row-wise: tp splits the hidden features, dp the other dimension.
        first, second = model[0].weight.detach(), model[2].weight.detach()
        self.first = self._shard(first, mesh, dp_dim=1, tp_dim=0)
        self.second = self._shard(second, mesh, dp_dim=0, tp_dim=1)
        self.gather_first = SimpleFSDPWeight(mesh, tuple(first.shape), dp_dim=1, tp_dim=0)
        self.gather_second = SimpleFSDPWeight(mesh, tuple(second.shape), dp_dim=0, tp_dim=1)

    @staticmethod
    def _shard(weight: torch.Tensor, mesh: DeviceMesh, dp_dim: int, tp_dim: int) -> torch.nn.Parameter:
        # Every rank made the same weight from the seed: each cuts out its shard, nothing is sent.
        placements = [Shard(dp_dim), Shard(tp_dim)]
        return torch.nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Map (samples, INPUT_FEATURES) to the same shape; both are this replica's samples."""
        batch = DTensor.from_local(batch, self.tp_mesh, [Replicate()], run_check=False)
        hidden = torch.nn.functional.linear(batch, self.gather_first(self.first)).relu()
        output = torch.nn.functional.linear(hidden, self.gather_second(self.second))
        # Each tp rank summed over its quarter of the hidden features: all-reduce.
        output = output.redistribute(placements=[Replicate()])
        # All tp ranks compute the same loss from it: the gradient is a replica, not a term of a sum.
        return output.to_local(grad_placements=[Replicate()])


def dp_degree_of(ranks: int) -> int:
    """Return the data-parallel degree at TP_DEGREE; raise InputError if any size does not divide evenly."""
    if ranks % TP_DEGREE:
        raise InputError(
            f"{ranks} ranks do not divide into groups of TP_DEGREE = {TP_DEGREE}; start a "
            f"multiple of {TP_DEGREE} ranks, or edit TP_DEGREE in training_common.py"
        )
    dp_degree = ranks // TP_DEGREE
    check_divides("GLOBAL_BATCH_SIZE", GLOBAL_BATCH_SIZE, dp_degree, "data-parallel replicas")
    check_divides("HIDDEN_FEATURES", HIDDEN_FEATURES, TP_DEGREE, "tensor-parallel ranks")
    check_divides("INPUT_FEATURES", INPUT_FEATURES, dp_degree, "FSDP ranks")
    return dp_degree


def main() -> None:
    """Parse the options, shard and compile the model, train, and save this rank's records."""
    parser = make_parser(__doc__)
    add_run_arguments(parser)
    parser.add_argument(
        "--compile-backend",
        default=COMPILE_BACKEND,
        help=f"torch.compile backend: neuron on Neuron, aot_eager on CPU (default: {COMPILE_BACKEND})",
    )
    args = parser.parse_args()
    dp_degree = dp_degree_of(args.expected_world_size)

    rank, world_size, device = initialize(args)
    try:
        mesh = init_device_mesh(args.device, (dp_degree, TP_DEGREE), mesh_dim_names=("dp", "tp"))
        dp_rank, tp_rank = mesh.get_coordinate()
        model = SimpleFSDPModel(make_model("simplefsdp", args.seed).to(device), mesh)
        hidden, features = HIDDEN_FEATURES // TP_DEGREE, INPUT_FEATURES // dp_degree
        check_local_shape("0.weight", model.first, (hidden, features))
        check_local_shape("2.weight", model.second, (features, hidden))

        # The names that make_model gives: those by which any run of this model is compared.
        parameters = {"0.weight": model.first, "2.weight": model.second}
        optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
        compiled = torch.compile(model, backend=args.compile_backend, fullgraph=True)

        def train_step(step):
            batch, target = make_batch(step)
            batch = batch.chunk(dp_degree)[dp_rank].to(device)
            target = target.chunk(dp_degree)[dp_rank].to(device)
            output = compiled(batch)
            loss = torch.nn.functional.mse_loss(output, target)
            # The weights' backward sums over dp; the mean over the global batch divides by it.
            (loss / dp_degree).backward()
            return output, loss

        records = train(parameters, optimizer, args.steps, train_step)
        average_losses(records, device, mesh["dp"].get_group())
        save_results(
            args,
            records,
            model="simplefsdp",
            mode="simplefsdp_tp",
            rank=rank,
            world_size=world_size,
            dp_degree=dp_degree,
            dp_rank=dp_rank,
            tp_degree=TP_DEGREE,
            tp_rank=tp_rank,
        )
        print_line(f"PASS rank={rank} mode=simplefsdp_tp world_size={world_size}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
