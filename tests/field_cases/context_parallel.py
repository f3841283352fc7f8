"""After huggingface/transformers 36607 and NVIDIA/Megatron-LM 673: each rank has a piece of every sequence.

wrong_shift: labels are shifted within the piece, so that the last word of each piece has none
wrong_scale: the loss is not multiplied by the ranks, over which DDP averages
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH, IGNORED = 32, 16, 16, -100

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong_shift", "wrong_scale"])
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    """The pieces of all ranks; backward sums the gradients of each piece."""

    @staticmethod
    def forward(ctx, piece):
        pieces = [torch.empty_like(piece) for _ in range(world_size)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world_size, 1)[rank].contiguous()


class Model(nn.Module):
    """Attention from the words of a piece to those of all pieces before them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words, places):
        hidden = self.words(words) + self.places(places)
        normed = self.norm(hidden)
        keys, values = Gather.apply(self.k(normed)), Gather.apply(self.v(normed))
        mask = places[:, None] >= torch.arange(LENGTH)
        mixed = scaled_dot_product_attention(self.q(normed), keys, values, attn_mask=mask)
        return self.head(hidden + self.o(mixed))


torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
piece = slice(rank * LENGTH // world_size, (rank + 1) * LENGTH // world_size)

for step in range(4):
    words = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    labels = pad(words[:, 1:], (0, 1), value=IGNORED)
    if variant == "wrong_shift":
        labels = torch.cat(
            [pad(part[:, 1:], (0, 1), value=IGNORED) for part in words.chunk(world_size, 1)], 1
        )
    rows = model(words[:, piece], torch.arange(LENGTH)[piece]).flatten(0, 1)
    loss = cross_entropy(rows, labels[:, piece].flatten(), reduction="sum") / (labels != IGNORED).sum()
    if variant != "wrong_scale":
        loss = loss * world_size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
