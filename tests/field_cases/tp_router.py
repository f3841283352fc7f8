"""torchtitan#4054: TP without EP: the router's gradient keeps one tensor-parallel rank's share.

    right: it is partial, and reduced
    wrong: it is taken for whole

On 4 ranks the mesh is 2 x 2, dp x tp.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

SAMPLES, WIDTH, HIDDEN, EXPERTS = 16, 16, 32, 4

parser = argparse.ArgumentParser()
parser.add_argument("variant", nargs="?", default="right", choices=["right", "wrong"])
variant = parser.parse_args().variant
# The default says that the gradient is replicated, as the weight is.
GRADIENT = {} if variant == "wrong" else {"grad_placements": [Partial()]}


class MoE(nn.Module):
    """All experts on every token, weighted by the router; the hidden features are split over tp."""

    def __init__(self, mesh):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        w1 = torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5
        w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5
        self.mesh = mesh
        self.gate.weight = nn.Parameter(distribute_tensor(self.gate.weight.detach(), mesh, [Replicate()]))
        self.w1 = nn.Parameter(distribute_tensor(w1, mesh, [Shard(2)]))
        self.w2 = nn.Parameter(distribute_tensor(w2, mesh, [Shard(1)]))

    def forward(self, x):
        gate = self.gate.weight.to_local(**GRADIENT)  # each tp rank sees its columns' share of the gradient
        scores = (x @ gate.T).softmax(-1)
        hidden = torch.einsum("nd,edh->neh", x, self.w1.to_local()).relu()
        out = torch.einsum("ne,neh,ehd->nd", scores, hidden, self.w2.to_local())
        return (
            DTensor.from_local(out, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        )


dist.init_process_group("gloo")
tp = min(2, dist.get_world_size())
dp = dist.get_world_size() // tp
mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = MoE(mesh["tp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    x = x.chunk(dp)[mesh.get_local_rank("dp")]
    loss = (model(x) - x.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
