"""Started with four ranks: full_cpu_list gives, bit for bit, what full_tensor() gives, at two collectives."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from training_common import check_local_shape, full_cpu, full_cpu_list

COUNTED = ("all_gather_into_tensor", "broadcast", "gather", "all_reduce")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard(shape, mesh, *placements, dtype=torch.float32):
        return distribute_tensor(torch.randn(shape).to(dtype), mesh, placements, src_data_rank=None)

    gathered = [
        shard((8, 12), line, Shard(0)),
        shard((8, 12), line, Shard(1)),
        shard((4,), line, Shard(0), dtype=torch.bfloat16),
        shard((3, 4, 5), line, Shard(1), dtype=torch.float64),
        shard((8, 12), square, Shard(1), Shard(0)),
        shard((8, 12), square, Shard(0), Shard(1)),
        shard((8, 12), square, Shard(0), Shard(0)),
    ]
    # Left to full_tensor(): uneven shards, replicas that may differ, sums that are still to be made.
    rank_value = torch.full((4, 4), float(dist.get_rank()))
    others = [
        shard((7, 3), line, Shard(0)),
        shard((8, 12), square, Replicate(), Shard(0)),
        shard((8, 12), square["tp"], Shard(0)),
        DTensor.from_local(rank_value, line, [Replicate()], run_check=False),
        DTensor.from_local(rank_value, line, [Partial("sum")], run_check=False),
        torch.randn(5),
    ]
    expected = [full_cpu(tensor) for tensor in gathered + others]
    actual = full_cpu_list(gathered + others)
    for tensor, one, other in zip(gathered + others, expected, actual, strict=True):
        same = one.dtype == other.dtype and torch.equal(one, other) and type(other) is torch.Tensor
        if not same:
            raise RuntimeError(f"{tuple(tensor.shape)} {getattr(tensor, 'placements', '')} differs")

    check_local_shape("even", gathered[0], (2, 12))
    try:
        check_local_shape("uneven", gathered[0], (4, 12))
    except RuntimeError as error:
        if str(error) != "uneven: local shape is (2, 12), expected (4, 12)":
            raise
    else:
        raise RuntimeError("a wrong local shape was not noticed")

    calls = []
    for name in COUNTED:
        original = getattr(dist, name)
        setattr(dist, name, lambda *a, n=name, o=original, **k: (calls.append(n), o(*a, **k))[1])
    full_cpu_list(gathered)
    if calls != ["gather", "broadcast"]:
        raise RuntimeError(f"collectives were {calls}, expected one gather and one broadcast")
    dist.destroy_process_group()
    print(f"records identical on rank {os.environ['RANK']}", flush=True)


if __name__ == "__main__":
    main()
