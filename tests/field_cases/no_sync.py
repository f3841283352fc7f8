"""No report: DDP, gradient accumulation over 2 microbatches with no_sync on all but the last.

right: each rank's slice in 2 microbatches
right_microfirst: each microbatch in slices: ranks and microbatches have the samples in another order
wrong: no_sync on the last one, too
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, MICRO = 16, 2

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "right_microfirst", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    if variant != "right_microfirst":
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    optimizer.zero_grad()
    for i, (xs, ys) in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO), strict=True)):
        if variant == "right_microfirst":
            xs, ys = xs.chunk(world_size)[rank], ys.chunk(world_size)[rank]
        with nullcontext() if i == MICRO - 1 and variant != "wrong" else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(xs), ys) / MICRO
            loss.backward()
    optimizer.step()

dist.destroy_process_group()
