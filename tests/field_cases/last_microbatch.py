"""Megatron-LM#7186: gradient accumulation where only the last microbatch arrives. FSDP2.

right: 2 microbatches
wrong: the gradient is cleared before each
wrong_undivided: the loss is not divided by their number
right_4, wrong_undivided_4: 4 microbatches
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
choices = ["right", "wrong", "wrong_undivided", "right_4", "wrong_undivided_4"]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant
SAMPLES, MICRO = 16, 4 if variant.endswith("_4") else 2

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        if variant == "wrong":
            optimizer.zero_grad()  # clears what the microbatch before has added
        loss = nn.functional.cross_entropy(model(xs), ys)
        if "undivided" not in variant:
            loss = loss / MICRO
        loss.backward()
    optimizer.step()

dist.destroy_process_group()
