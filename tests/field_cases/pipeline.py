"""After pytorch/torchtitan 1733: two stages of a pipeline, whose schedule is called twice in each step.

wrong: the schedule scales the gradients that are there at each call, those of the call before again
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

CALLS, MICROBATCHES, LAYERS = 2, 2, 4

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant


class Net(nn.Module):
    """Layers, of which a stage has some."""

    def __init__(self):
        super().__init__()
        parts = {str(i): nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for i in range(LAYERS)}
        self.layers = nn.ModuleDict(parts)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(output, target):
    return (output - target).square().mean() / CALLS


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Net()
if world_size > 1:
    for number in [number for number in range(LAYERS) if number * world_size // LAYERS != rank]:
        del model.layers[str(number)]
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    scaled = variant == "wrong"
    loss = loss_of if scaled else lambda output, target: loss_of(output, target) / MICROBATCHES
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss, scale_grads=scaled)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    draw = torch.Generator().manual_seed(1000 + step)
    optimizer.zero_grad()
    for _ in range(CALLS):
        x, target = torch.randn(8, 12, generator=draw), torch.randn(8, 12, generator=draw)
        if world_size == 1:
            loss_of(model(x), target).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
    optimizer.step()

dist.destroy_process_group()
