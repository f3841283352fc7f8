"""After huggingface/transformers 26221: a layer that is trained gets no gradient.

wrong: what it computes is detached; so it is with reentrant checkpoints whose inputs need no gradient
frozen: requires_grad is False
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong", "frozen"])
variant = parser.parse_args().variant


class Net(nn.Module):
    """Two layers, of which the first may be cut off."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.last(hidden.detach() if variant == "wrong" else hidden)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Net()
model.first.requires_grad_(variant != "frozen")
model = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 + step)).chunk(world_size)[rank]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

dist.destroy_process_group()
