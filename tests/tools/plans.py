"""A small transformer in many parallel plans, each recorded; some with a mistake.

    python launch.py --standalone --nproc-per-node=4 tests/tools/plans.py --output-dir DIR
    python launch.py --standalone --nproc-per-node=1 tests/tools/plans.py --output-dir DIR --runs one:adamw

One launch makes all runs of --runs, plan:optimizer or plan:optimizer:mistake, one after another. The
recording of each goes into DIR/<plan>-<optimizer>[-<mistake>]. Every run trains on the same samples.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import register_parametrization

from training_recorder import Recorder

WORDS, LENGTH, WIDTH, HEADS, BATCH, STEPS = 128, 32, 64, 4, 8, 3
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
RUNS = [
    *("ddp:adamw", "fsdp:adamw", "hsdp:adamw", "tp:adamw", "tpfsdp:adamw", "simplefsdp:adamw"),
    *("ddp:sgd", "tpfsdp:sgd", "fsdp:momentum", "accumulate:adamw", "robin:adamw", "compiled:adamw"),
    *("ddp:sgd:summed", "ddp:adamw:summed", "ddp:sgd:same_batch"),
    *("accumulate:sgd:undivided", "ddp:adamw:rate", "fsdp:sgd:warm", "ddp:sgd:decay", "ddp:sgd:buffer"),
    *("ddp:adamw:gelu", "ddp:sgd:untied", "ddp:sgd:target", "tpfsdp:sgd:element"),
]


class Block(nn.Module):
    """Attention, with a bias of the keys whose gradient is zero but for rounding, and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.exact = "none"

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.exact))


class Transformer(nn.Module):
    """Embeddings, two blocks, a head whose weight is the embedding's, and a scale that is a buffer."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


class Gathered(nn.Module):
    """SimpleFSDP: a parameter on (dp, tp) as dp's ranks have it together; backward averages over dp."""

    def __init__(self, in_tp: bool):
        super().__init__()
        self.in_tp = in_tp  # otherwise the parameter is whole on each rank of tp, and no DTensor

    def forward(self, parameter: DTensor) -> torch.Tensor:
        mesh, (_, of_tp) = parameter.device_mesh, parameter.placements
        whole = parameter.redistribute(placements=[Replicate(), of_tp])
        whole = whole.to_local(grad_placements=[Partial("avg"), of_tp])
        return DTensor.from_local(whole, mesh["tp"], [of_tp]) if self.in_tp else whole


def shard_and_gather(model: nn.Module, mesh) -> None:
    """Shard every parameter over dp beside tp. It is gathered where a module uses it."""
    sharded = {}  # a tied parameter once
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            in_tp = isinstance(parameter, DTensor)
            of_tp = parameter.placements[0] if in_tp else Replicate()
            # The other dimension of a matrix; of a vector that tp has cut, dp has copies.
            of_dp = Shard(1 if of_tp == Shard(0) else 0) if parameter.dim() > 1 else Replicate()
            if id(parameter) not in sharded:
                whole = parameter.full_tensor() if in_tp else parameter
                whole = distribute_tensor(whole.detach(), mesh, [of_dp, of_tp], src_data_rank=None)
                sharded[id(parameter)] = nn.Parameter(whole)
            setattr(module, name, sharded[id(parameter)])
            register_parametrization(module, name, Gathered(in_tp), unsafe=True)


def parallelize(model: nn.Module, plan: str) -> tuple[nn.Module, int, int]:
    """Return the model in this plan, the number of data-parallel replicas, and which this rank is of."""
    replicas, replica = WORLD, RANK
    if plan in ("ddp", "accumulate", "robin"):
        model = nn.parallel.DistributedDataParallel(model)
    if plan == "compiled":
        model = torch.compile(nn.parallel.DistributedDataParallel(model), backend="aot_eager")
    mesh = None
    if plan in ("fsdp", "hsdp"):
        shape = (1, WORLD) if plan == "fsdp" else (2, WORLD // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh["shard"] if plan == "fsdp" else mesh
    if plan in ("tp", "tpfsdp", "simplefsdp"):
        shape = (1, WORLD) if plan == "tp" else (WORLD // 2, 2)
        of_tp = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        ways = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallelize_module(
                block, of_tp["tp"], {**ways, "o": RowwiseParallel(), "down": RowwiseParallel()}
            )
        replicas, replica = of_tp["dp"].size(), of_tp["dp"].get_local_rank()
        mesh = of_tp["dp"] if plan == "tpfsdp" else None
        if plan == "simplefsdp":
            shard_and_gather(model, of_tp)
    if mesh is not None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return model, replicas, replica


def build(mistake: str, seed: int) -> Transformer:
    """Return the model as every plan starts from it, or with a mistake in it."""
    torch.manual_seed(seed)
    model = Transformer()
    model.head.weight = model.words.weight
    if mistake == "untied":
        model.head.weight = nn.Parameter(model.words.weight.detach().clone())
    if mistake == "gelu":
        model.blocks[1].exact = "tanh"
    return model


def run(seed: int, plan: str, optimizer: str, mistake: str = "") -> None:
    """Train STEPS steps."""
    model, replicas, replica = parallelize(build(mistake, seed), plan)
    if mistake == "buffer":  # DDP has made them equal when it wrapped the model
        model.broadcast_buffers = False
        model.module.scale *= 1.01 if RANK == 1 else 1
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if mistake == "rate":
        optimizer.param_groups[0]["lr"] *= 1.05
    if mistake == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.01
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
        if plan == "robin":
            words = words[replica::replicas]
        elif mistake == "same_batch":
            words = words.chunk(replicas)[0]
        else:
            words = words.chunk(replicas)[replica]
        parts = 2 if plan == "accumulate" else 1
        optimizer.zero_grad()
        for part in words.chunk(parts):
            logits, targets = model(part[:, :-1]), part[:, 1:]
            if mistake == "target":
                targets = part[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            scale = replicas if mistake == "summed" else 1 if mistake == "undivided" else 1 / parts
            (loss * scale).backward()
        if mistake == "element" and RANK == WORLD - 1:  # which has rows 32 to 63, columns 128 to 255
            model.blocks[0].down.weight.grad.to_local()[3, 5] += 1
        optimizer.step()
        schedule.step()
        if mistake == "warm":
            schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for name in args.runs:
        directory = args.output_dir / name.replace(":", "-")
        directory.mkdir(parents=True, exist_ok=True)
        options = {
            "steps": STEPS,
            "skip": 0,
            "activations": "*",
            "full": ["blocks.0.d*"],
            "afterwards": "continue",
        }
        recorder = Recorder(argparse.Namespace(output_dir=directory, script=name, arguments=[], **options))
        run(args.seed, *name.split(":"))
        recorder.end_of_script()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
