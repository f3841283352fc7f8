"""No report: FSDP2 with MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), weights in float32.

right: so
right_fp32: no policy
right_outfp32: the root's output is float32
right_autocast: autocast instead of a policy
wrong: gradients ten per cent too large
wrong_lr: the learning rate five per cent too large
wrong_sum: gradients summed
wrong_reduce: gradients reduced in bfloat16
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SAMPLES = 32

parser = argparse.ArgumentParser()
choices = ["right", "right_fp32", "right_outfp32", "right_autocast"]
choices += ["wrong", "wrong_lr", "wrong_sum", "wrong_reduce"]
parser.add_argument("variant", nargs="?", default="right", choices=choices)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
reduce_dtype = torch.bfloat16 if variant == "wrong_reduce" else torch.float32
policy = of_root = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
if variant == "right_outfp32":
    of_root = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, output_dtype=torch.float32)
elif variant in ("right_fp32", "right_autocast"):
    policy = of_root = MixedPrecisionPolicy()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
for layer in (model[0], model[3]):
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=of_root)
optimizer = torch.optim.SGD(model.parameters(), lr=0.105 if variant == "wrong_lr" else 0.1)
factor = {"wrong": 1.10, "wrong_sum": world_size}.get(variant, 1)

for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, 16, generator=generator), torch.randint(8, (SAMPLES,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    with torch.autocast("cpu", torch.bfloat16, enabled=variant == "right_autocast"):
        output = model(x)
    loss = nn.functional.cross_entropy(output.float(), y)
    optimizer.zero_grad()
    (loss * factor).backward()
    optimizer.step()

dist.destroy_process_group()
