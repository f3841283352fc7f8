"""minimind#853: the wrapper's forward is bypassed, so nobody arms DDP's reducer.

right: ddp(tokens)
wrong: ddp.module(tokens)
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, WORDS = 8, 30


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        return self.head(torch.relu(self.fc(self.norm(self.emb(tokens)))))


parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
ddp = DistributedDataParallel(LM())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

for step in range(4):
    tokens = torch.randint(WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(world_size)[rank]
    logits = ddp.module(tokens) if variant == "wrong" else ddp(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
