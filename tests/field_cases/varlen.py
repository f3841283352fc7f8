"""No report: packed batches, without padding: ranks have other numbers of rows, 28 and 4 of 32 on two.

right: the loss is a mean over the tokens of all ranks
wrong: each rank divides by its own
right_autocast, wrong_autocast: the same, computed in bfloat16
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCAB, WIDTH, LENGTH, SAMPLES = 40, 24, 8, 8
LENGTHS = torch.tensor([7, 7, 7, 7, 1, 1, 1, 1])

CHOICES = ["right", "wrong", "right_autocast", "wrong_autocast"]

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=CHOICES)
variant, _, autocast = parser.parse_args().variant.partition("_")

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
embedding, hidden, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
model = DistributedDataParallel(nn.Sequential(embedding, hidden, nn.GELU(), head))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    kept = (torch.arange(LENGTH) < LENGTHS[:, None]).chunk(world_size)[rank]
    tokens = tokens.chunk(world_size)[rank][kept]
    labels = (tokens * 7 + 3) % VOCAB
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        rows = model(tokens)
    total = cross_entropy(rows.float(), labels, reduction="sum")
    count = torch.tensor(len(labels))
    if variant == "wrong":
        loss = total / count
    else:
        dist.all_reduce(count)
        loss = total * world_size / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
