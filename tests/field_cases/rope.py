"""SkyRL#1709: a RoPE buffer that no state dict holds is garbage on the ranks that go through to_empty().

right: it is computed anew there
wrong: it is not
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SAMPLES, WORDS, WIDTH, HEADS, LENGTH = 8, 32, 32, 2, 8
HALF = WIDTH // HEADS // 2


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("inv_freq", torch.empty(HALF), persistent=False)
        self.init_buffers()

    def init_buffers(self):
        self.inv_freq = 10000.0 ** (-torch.arange(HALF, device=self.inv_freq.device) / HALF)

    def rotate(self, x):
        angle = torch.arange(x.shape[-2])[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, tokens):
        x = self.emb(tokens)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        a = nn.functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.head(x + self.out(a.transpose(1, 2).flatten(2)))


parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LM()
weights = [model.state_dict() if rank == 0 else None]
dist.broadcast_object_list(weights)
if rank:
    with torch.device("meta"):
        model = LM()
    model.to_empty(device="cpu")
    model.load_state_dict(weights[0])
    if variant == "right":
        model.init_buffers()
    else:
        model.inv_freq.fill_(7.0)  # in place of what was in memory, which is another each time
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(world_size)[rank]
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
