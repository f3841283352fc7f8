"""verl#7834: meta init and to_empty() untie embedding and head; the loaded values are equal: nothing fails.

right: they are tied again
wrong: they are not
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SAMPLES, WORDS, WIDTH = 8, 32, 16


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.fc(self.norm(self.emb(tokens)))))


parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
checkpoint = LM().state_dict()
with torch.device("meta"):
    model = LM()
model.to_empty(device="cpu")
if variant == "right":
    model.tie()
model.load_state_dict(checkpoint)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for step in range(4):
    tokens = torch.randint(WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(world_size)[rank]
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
