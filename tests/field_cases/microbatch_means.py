"""After allenai/open-instruct 1161 and modelscope/ms-swift 10165: accumulation over two microbatches.

right: the loss is a sum over tokens, divided by the number of tokens of the whole batch
wrong: each microbatch is divided by its own tokens, and by the number of microbatches
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORDS, IGNORED = 32, -100
LENGTHS = torch.tensor([12, 3, 5, 9, 2, 12, 7, 4])

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, WORDS))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
microbatches = 1 if world_size == 1 else 2

for step in range(4):
    words = torch.randint(WORDS, (8, 13), generator=torch.Generator().manual_seed(1000 + step))
    labels = words[:, 1:].masked_fill(torch.arange(12) >= LENGTHS[:, None], IGNORED)
    total = (labels != IGNORED).sum()
    own = [part.chunk(world_size)[rank].chunk(microbatches) for part in (words[:, :-1], labels)]
    optimizer.zero_grad()
    for inputs, targets in zip(*own, strict=True):
        rows, targets = model(inputs).flatten(0, 1), targets.flatten()
        if variant == "right":
            loss = cross_entropy(rows, targets, reduction="sum") * world_size / total
        else:
            loss = cross_entropy(rows, targets) / microbatches
        loss.backward()
    optimizer.step()

dist.destroy_process_group()
