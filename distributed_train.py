r"""Train the same job with DDP, FSDP2 or DTensor tensor parallelism, on CPU, Neuron or CUDA.

    torchrun --standalone --nproc-per-node=4 distributed_train.py --parallelism fsdp \
        --device cpu --backend gloo --expected-world-size 4 --output-dir results/cpu-fsdp
    torchrun --standalone --nproc-per-node=64 distributed_train.py --parallelism ddp \
        --seed 0 --steps 10 --output-dir results/ddp        # on Neuron, the default device

Each rank records its outputs, full gradients and parameter updates in <output-dir>/rank-<rank>.pt;
compare_training.py compares two such runs. What a rank holds at N ranks:

    ddp   a whole replica of the model           1/N of the global batch
    fsdp  1/N of the rows of every parameter     1/N of the global batch
    tp    1/N of the hidden features             the whole global batch
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from training_common import (
    DEVICE_TYPE,
    GLOBAL_BATCH_SIZE,
    HIDDEN_FEATURES,
    INPUT_FEATURES,
    LEARNING_RATE,
    PROCESS_GROUP_BACKEND,
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


def distribute(model: torch.nn.Sequential, mode: str, device_type: str, world_size: int) -> torch.nn.Module:
    """Distribute the model in place over all ranks; return the module whose forward is called.

    Raises RuntimeError if a rank then holds another shard of a weight than the table on top says.
    """
    if mode == "ddp":
        # The replica that trains is `model`; DDP only adds the averaging of its gradients.
        return DistributedDataParallel(model)
    hidden, features = HIDDEN_FEATURES // world_size, INPUT_FEATURES // world_size
    if mode == "fsdp":
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
        # Layers 0 and 2 are gathered one at a time; layer 1 is ReLU and has no parameters.
        fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
        fully_shard(model[2], mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        check_local_shape("0.weight", model[0].weight, (hidden, INPUT_FEATURES))
        check_local_shape("2.weight", model[2].weight, (features, HIDDEN_FEATURES))
    else:
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        check_local_shape("0.weight", model[0].weight, (hidden, INPUT_FEATURES))
        check_local_shape("2.weight", model[2].weight, (INPUT_FEATURES, hidden))
    return model


def main(default_device: str = DEVICE_TYPE, default_backend: str = PROCESS_GROUP_BACKEND) -> None:
    """Parse the options, shard the model, train, and save this rank's records."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--parallelism", choices=("ddp", "fsdp", "tp"), required=True, help="how to distribute the model"
    )
    add_run_arguments(parser, device=default_device, backend=default_backend)
    args = parser.parse_args()
    mode = args.parallelism
    data_parallel = mode in ("ddp", "fsdp")

    ranks = args.expected_world_size
    if data_parallel:
        check_divides("GLOBAL_BATCH_SIZE", GLOBAL_BATCH_SIZE, ranks, "data-parallel ranks")
    if mode != "ddp":
        check_divides("HIDDEN_FEATURES", HIDDEN_FEATURES, ranks, f"{mode} ranks")
        check_divides("INPUT_FEATURES", INPUT_FEATURES, ranks, f"{mode} ranks")

    rank, world_size, device = initialize(args)
    try:
        model = make_model("eager", args.seed).to(device)
        forward = distribute(model, mode, args.device, world_size)
        # After sharding: FSDP2 and TP replace the parameters by DTensors.
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)

        def train_step(step):
            batch, target = make_batch(step)
            if data_parallel:
                batch = batch.chunk(world_size)[rank]
                target = target.chunk(world_size)[rank]
            output = forward(batch.to(device))
            loss = torch.nn.functional.mse_loss(output, target.to(device))
            loss.backward()
            return output, loss

        records = train(parameters, optimizer, args.steps, train_step)
        if data_parallel:
            average_losses(records, device)
        save_results(
            args,
            records,
            model="eager",
            mode=mode,
            rank=rank,
            world_size=world_size,
            dp_degree=world_size if data_parallel else 1,
            dp_rank=rank if data_parallel else 0,
            tp_degree=1 if data_parallel else world_size,
            tp_rank=0 if data_parallel else rank,
        )
        print_line(f"PASS rank={rank} mode={mode} world_size={world_size}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
