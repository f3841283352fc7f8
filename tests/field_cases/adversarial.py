"""After Lightning-AI/pytorch-lightning 591: two networks, and two optimizers that take turns.

right: each optimizer starts from gradients of zero
wrong: the generator's backward leaves gradients in the discriminator, which its optimizer takes, too
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12)))
discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

for step in range(4):
    draw = torch.Generator().manual_seed(1000 + step)
    noise = torch.randn(8, 8, generator=draw).chunk(world_size)[rank]
    real = torch.randn(8, 12, generator=draw).chunk(world_size)[rank]
    for_generator.zero_grad()
    fake = generator(noise)
    softplus(-discriminator(fake)).mean().backward()
    for_generator.step()
    if variant == "right":
        for_discriminator.zero_grad()
    loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
    loss.backward()
    for_discriminator.step()
    for_discriminator.zero_grad()

dist.destroy_process_group()
