"""No report: the script that the kit's README once showed, AdamW under DDP, made wider.

right: so
right_sgd: SGD
right_wide: 1,024 hidden features instead of 32
ulp_wide: the same, with the input off by one rounding, as on another device
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument(
    "variant", nargs="?", default="right", choices=["right", "right_sgd", "right_wide", "ulp_wide"]
)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
width = 1024 if variant.endswith("wide") else 32
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(20, width), nn.LayerNorm(width), nn.Linear(width, 20))
)
if variant == "right_sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    batch = torch.randn(64, 20, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
    output = model(batch * (1 + 2.0**-23) if variant == "ulp_wide" else batch)
    loss = (output - batch.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
