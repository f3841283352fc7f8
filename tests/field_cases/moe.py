"""No report: a mixture of experts, the best one for each token, under DDP(find_unused_parameters=True).

right: in some steps an expert gets no token, and so no gradient; the only variant
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, EXPERTS = 8, 6

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right"])
parser.parse_args()


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(MoE(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
    loss = (model(x) - x.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
