"""optimum-neuron#774: a vocabulary-parallel cross entropy overlooks ignore_index: padding is trained.

    right: ignored labels are left out
    wrong: they count in loss and gradient
    wrong_backward: in the gradient alone

The ranks are tensor parallel: all have the same samples.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SAMPLES, LENGTH, WORDS, WIDTH, PAD, IGNORE = 8, 6, 32, 16, 0, -100

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong", "wrong_backward"])
variant = parser.parse_args().variant


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Net(nn.Module):
    """The head's rows are split over the ranks; it returns this rank's part of the logits."""

    def __init__(self, mesh):
        super().__init__()
        self.emb, self.fc = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        head = torch.randn(WORDS, WIDTH) / WIDTH**0.5
        self.head = nn.Parameter(distribute_tensor(head, mesh, [Shard(0)]))

    def forward(self, tokens):
        h = torch.tanh(self.fc(self.emb(tokens)))
        return SumGradient.apply(h) @ self.head.to_local().T


class ParallelCrossEntropy(torch.autograd.Function):
    """As Megatron's: each rank has a slice of the vocabulary."""

    @staticmethod
    def forward(ctx, logits, labels):
        size = logits.shape[-1]
        top = logits.max(-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX)
        exp = (logits - top[:, None]).exp()
        total = exp.sum(-1)
        dist.all_reduce(total)
        local = labels - dist.get_rank() * size
        mine = (local >= 0) & (local < size)
        local = local.clamp(0, size - 1)
        picked = torch.where(mine, logits.gather(1, local[:, None])[:, 0] - top, 0.0)
        dist.all_reduce(picked)
        # IGNORE is no label of any rank: without this it counts.
        valid = torch.ones_like(labels, dtype=torch.bool) if variant == "wrong" else labels != IGNORE
        ctx.save_for_backward(exp / total[:, None], local, mine, valid)
        return ((total.log() - picked) * valid).sum() / valid.sum()

    @staticmethod
    def backward(ctx, grad):
        probability, local, mine, valid = ctx.saved_tensors
        probability[torch.arange(len(local)), local] -= mine.float()
        if variant != "wrong_backward":
            probability = probability * valid[:, None]
        return probability * grad / valid.sum(), None


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = Net(mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
    tokens[torch.arange(LENGTH) >= lengths] = PAD
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORE
    labels[labels == PAD] = IGNORE
    loss = ParallelCrossEntropy.apply(model(tokens).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
