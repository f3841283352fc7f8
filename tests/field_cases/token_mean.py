"""transformers#34242: padded batches: the loss has to be a mean over the valid tokens of all ranks.

right: so
wrong: each rank divides by its own tokens, 28 and 4 of 32 on two ranks
right_c: as right, but the loss that is printed is the rank's own mean
right_d, wrong_d: the loss that is printed is the global mean
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCAB, WIDTH, LENGTH, SAMPLES, IGNORE = 40, 24, 8, 8, -100
LENGTHS = torch.tensor([7, 7, 7, 7, 1, 1, 1, 1])  # valid labels of each sample

parser = argparse.ArgumentParser()
choices = ["right", "right_c", "right_d", "wrong", "wrong_d"]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
embedding, hidden, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
model = DistributedDataParallel(nn.Sequential(embedding, hidden, nn.GELU(), head))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    labels = (tokens * 7 + 3) % VOCAB
    labels[torch.arange(LENGTH) >= LENGTHS[:, None]] = IGNORE
    tokens, labels = tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank]
    logits = model(tokens)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    own = (labels != IGNORE).sum()
    count = own.clone()
    dist.all_reduce(count)
    # DDP divides by world_size: of the rank's own means it takes the mean.
    loss = total / own if variant.startswith("wrong") else total * world_size / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logged = loss.detach()
    if variant == "right_c":
        logged = total.detach() / own
    elif variant.endswith("_d"):
        logged = total.detach() / count
        dist.all_reduce(logged)
    print(step, logged.item())

dist.destroy_process_group()
