"""pytorch#187276, #187279: right runs that end far apart: Adam makes a full step of a gradient's rounding.

right: a transformer layer as torch ships it
sep: separate projections, as in BERT, OPT and Qwen2: all of k.bias has no effect
llama: no bias anywhere
right_sgd, sep_sgd, llama_sgd: the same with SGD
right_ulp, sep_ulp, llama_ulp: the embedding's output is off by one rounding, as on another device
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
choices = [model + kind for model in ("right", "sep", "llama") for kind in ("", "_sgd", "_ulp")]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant
SAMPLES, WORDS, LENGTH = (16, 256, 32) if variant.startswith("llama") else (16, 30, 8)
FACTOR = 1 + 2.0**-23 if variant.endswith("ulp") else 1.0


def attend(q, k, v):
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """The key's bias has no effect on the softmax: its gradient is rounding."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        return self.head(self.layer(self.emb(tokens) * FACTOR + self.pos(torch.arange(LENGTH))))


class Separate(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(WORDS, 32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens):
        x = self.norm(self.emb(tokens) * FACTOR)
        return self.head(x + self.o(attend(self.q(x), self.k(x), self.v(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(128), nn.RMSNorm(128)
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.o(attend(self.q(h), self.k(h), self.v(h)))
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """400 thousand parameters."""

    def __init__(self):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(WORDS, 128), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(128), nn.Linear(128, WORDS, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.emb(tokens) * FACTOR)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = {"right": Layer, "sep": Separate, "llama": Llama}[variant.split("_")[0]]()
ddp = DistributedDataParallel(model)
if variant.endswith("sgd"):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if variant == "sep_sgd" else 0.1)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(world_size)[rank]
    logits = ddp(tokens)
    loss = cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
