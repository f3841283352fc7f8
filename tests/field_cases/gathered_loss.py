"""lightly#1977, open_clip#616: a loss over the features of all ranks: the collective must pass gradients.

right: Barlow Twins' cross-correlation, reduced with gradients
wrong: without
right_clip: CLIP's contrastive loss, gathered with gradients
wrong_clip: without, but for the rank's own features
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 16

parser = argparse.ArgumentParser()
parser.add_argument(
    "variant", nargs="?", default="right", choices=["right", "wrong", "right_clip", "wrong_clip"]
)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def correlation_loss(z):
    c = z[:, 0].T @ z[:, 1] / SAMPLES  # this rank's part of the cross-correlation matrix
    if variant == "wrong":
        dist.all_reduce(c)  # as lightly did: the backward does not know of it
    else:
        c = dist_nn.all_reduce(c)
    return (c - torch.eye(6)).square().sum()


def contrastive_loss(z):
    gathered = []
    for own in (normalize(z[:, 0], dim=-1), normalize(z[:, 1], dim=-1)):
        if variant == "wrong_clip":
            parts = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(parts, own.detach())
            parts[rank] = own  # the rank's own keep their gradient
        else:
            parts = dist_nn.all_gather(own)
        gathered.append(torch.cat(list(parts)))
    logits, target = gathered[0] @ gathered[1].T / 0.2, torch.arange(SAMPLES)
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 8, generator=generator)
    views = torch.stack([x + 0.1 * torch.randn(SAMPLES, 8, generator=generator) for _ in range(2)], 1)
    views = views.chunk(world_size)[rank]
    z = model(views.flatten(0, 1)).unflatten(0, (-1, 2))
    loss = contrastive_loss(z) if variant.endswith("clip") else correlation_loss(z)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
