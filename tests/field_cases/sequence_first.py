"""No report: a transformer layer with activations (length, samples, width), nn.Transformer's default.

right: the only variant
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, WORDS, LENGTH = 16, 30, 8

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right"])
parser.parse_args()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, 32)
        self.pos = nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        x = self.emb(tokens) + self.pos(torch.arange(LENGTH))
        return self.head(self.layer(x.transpose(0, 1)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(LM())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(world_size)[rank]
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).T.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
