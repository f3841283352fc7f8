"""pytorch#13711, #96136: BatchNorm under DDP: each rank normalizes by its own samples; buffers are rank 0's.

right: so
ghost: one rank takes the slices of two in turn
wrong: broadcast_buffers=False
ckpt: recomputation updates the running statistics twice
eval: left in eval mode
sgd_ulp: the input is off by one rounding, as on another device
adam, adam_ulp: right and sgd_ulp with Adam
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SAMPLES = 32

parser = argparse.ArgumentParser()
choices = ["right", "ghost", "wrong", "ckpt", "eval", "sgd_ulp", "adam", "adam_ulp"]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant


class Net(nn.Sequential):
    def forward(self, x):
        if variant == "ckpt":
            x = checkpoint(lambda x: self[2](self[1](self[0](x))), x, use_reentrant=False)
            return self[4](self[3](x))
        return super().forward(x)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Net(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
if variant == "eval":
    model[1].eval()  # left so by an evaluation
ddp = DistributedDataParallel(model, broadcast_buffers=variant != "wrong")
if variant.startswith("adam"):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    y = torch.randint(5, (SAMPLES,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    if variant.endswith("ulp"):
        x = x * (1 + 2.0**-23)
    parts = 2 // world_size if variant == "ghost" else 1
    optimizer.zero_grad()
    for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = nn.functional.cross_entropy(ddp(xs), ys) / parts
        loss.backward()
    optimizer.step()

dist.destroy_process_group()
