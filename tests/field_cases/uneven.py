"""No report: DDP, where the last batch of an epoch does not divide: 3, 3, 2, 2 of 10 on 4 ranks.

right: each rank's mean is weighted by its share of the samples
wrong: DDP weighs the ranks equally
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES = (16, 16, 10)

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    size, generator = SIZES[step % 3], torch.Generator().manual_seed(step)
    x, y = torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)
    x, y = x.tensor_split(world_size)[rank], y.tensor_split(world_size)[rank]
    output = model(x)
    if variant == "wrong":
        loss = nn.functional.cross_entropy(output, y)
    else:
        loss = nn.functional.cross_entropy(output, y, reduction="sum") * world_size / size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
