"""No report: as GPT-2: tied embedding; padded sequences, the loss a mean over all ranks' tokens; AdamW.

right: so
wrong: each rank divides by its own tokens, of which both have as many in step 1
right_sgd, wrong_sgd: the same with SGD
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SAMPLES, WORDS, WIDTH, HEADS, LENGTH, PAD = 8, 32, 32, 2, 10, 0

parser = argparse.ArgumentParser()
parser.add_argument(
    "variant", nargs="?", default="right", choices=["right", "wrong", "right_sgd", "wrong_sgd"]
)
variant = parser.parse_args().variant


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(WORDS, WIDTH, padding_idx=PAD), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        mask = (tokens != PAD)[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.emb(tokens) + self.pos(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = GPT()
ddp = DistributedDataParallel(model)
if variant.endswith("sgd"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    tokens[torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)] = PAD
    tokens = tokens.chunk(world_size)[rank]
    logits, labels = ddp(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    total = cross_entropy(logits, labels, ignore_index=PAD, reduction="sum")
    count = (labels != PAD).sum()
    if variant.startswith("wrong"):
        loss = total / count
    else:
        dist.all_reduce(count)
        loss = total * world_size / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
