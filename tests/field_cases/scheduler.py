"""accelerate#2926: a schedule of the learning rate, which the wrapper advances once per process.

right: StepLR, advanced once a step
wrong: once per process
right_warmup, wrong_warmup: the same with a warm-up
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 16

parser = argparse.ArgumentParser()
parser.add_argument(
    "variant", nargs="?", default="right", choices=["right", "wrong", "right_warmup", "wrong_warmup"]
)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if variant.endswith("warmup"):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 8))
else:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 12, generator=generator), torch.randint(5, (SAMPLES,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for _ in range(world_size if variant.startswith("wrong") else 1):  # as with split_batches=False
        scheduler.step()

dist.destroy_process_group()
