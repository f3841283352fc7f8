"""No report: AdamW with two parameter groups, warm-up and cosine schedule, clip_grad_norm_, FSDP2.

right: so
right_wide: 100 times wider
wrong: each rank clips by the norm of its own shards
wrong_clip_after: clips after the step
wrong_decay: decays vectors, too
wrong_l2: Adam instead of AdamW
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

SAMPLES, MAX_NORM = 32, 0.5

parser = argparse.ArgumentParser()
choices = ["right", "right_wide", "wrong", "wrong_clip_after", "wrong_decay", "wrong_l2"]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
width = 6400 if variant == "right_wide" else 64
model = nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 8))
fully_shard(model)
matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
if variant == "wrong_decay":
    vectors["weight_decay"] = 0.1
kind = torch.optim.Adam if variant == "wrong_l2" else torch.optim.AdamW
optimizer = kind([matrices, vectors], lr=3e-3)
schedules = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)]
scheduler = SequentialLR(optimizer, schedules, [3])

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 16, generator=generator), torch.randint(8, (SAMPLES,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if variant == "wrong":
        local = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in local]).norm()  # of the shards alone
        for gradient in local:
            gradient.mul_((MAX_NORM / norm).clamp(max=1.0))
    elif variant != "wrong_clip_after":
        clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    if variant == "wrong_clip_after":
        clip_grad_norm_(model.parameters(), MAX_NORM)
    scheduler.step()

dist.destroy_process_group()
