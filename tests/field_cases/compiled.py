"""No report: a compiled module has other names for its parameters, with _orig_mod.

right: not compiled
compiled: torch.compile, under DDP
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "compiled"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.Linear(32, 20))
if variant == "compiled":
    model = torch.compile(model, backend="aot_eager")
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    batch = torch.randn(64, 20, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
    loss = (replica(batch) - batch.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
