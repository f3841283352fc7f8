"""No report: HSDP: fully_shard on a mesh of replicas and shards, 2 x 2 on 4 ranks.

right: so
wrong_data: data are split over the replicas only: each sample is computed twice, the gradient is the same
wrong_shardonly: sharded within each replica, not reduced over them
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SAMPLES = 32

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong_data", "wrong_shardonly"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
shards = min(2, dist.get_world_size())
replicas = dist.get_world_size() // shards
mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
for module in (model[0], model[3], model):
    fully_shard(module, mesh=mesh["shard"] if variant == "wrong_shardonly" else mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if variant == "wrong_data":
    place, places = mesh.get_local_rank("replicate"), replicas
else:
    place, places = dist.get_rank(), dist.get_world_size()
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 16, generator=generator), torch.randint(8, (SAMPLES,), generator=generator)
    x, y = x.chunk(places)[place], y.chunk(places)[place]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
