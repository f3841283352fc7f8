"""Train a small model in one of many ways, named by the argument, for record_training.py to record.

    python record_training.py --output-dir OUT tests/tools/record_cases.py CASE

Losses are printed in hexadecimal, all of their bits; at the end a sum of the parameters, and how many
collectives the process groups have seen.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FEATURES, WIDTH, HIDDEN, OUTPUTS = 5, 8, 14, 3  # of which 4 ranks can split only one evenly
BATCH, STEPS = 8, 4
CASES = {}


class Block(nn.Module):
    """A residual block with a buffer."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.recompute = recompute

    def _inner(self, x):
        return self.down(F.relu(self.up(self.norm(x) * self.scale.to(x.dtype))))

    def forward(self, x):
        if self.recompute:
            return x + checkpoint(self._inner, x, use_reentrant=self.recompute == "reentrant")
        return x + self._inner(x)


class Net(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def case(function):
    CASES[function.__name__] = function
    return function


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batch(step, parts=1, part=0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x.chunk(parts)[part], (x[:, :OUTPUTS] * 2).sin().chunk(parts)[part]


def show(loss):
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    print("loss", float(loss.detach()).hex(), flush=True)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model, optimizer=None, parts=1, part=0, steps=STEPS, scale=1.0):
    optimizer = optimizer or adamw(model)
    for step in range(steps):
        x, y = batch(step, parts, part)
        loss = F.mse_loss(model(x).float(), y)
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


def finish(*models):
    total = 0.0
    for model in models:
        for parameter in model.parameters():
            parameter = parameter.detach()
            parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            total += float(parameter.double().abs().sum())
    print("parameters", total.hex())
    if dist.is_initialized():
        counts = {}
        for group in dist.distributed_c10d._world.pg_map:
            counts[group.group_name] = group._get_sequence_number_for_group()
        print("collectives", sum(counts.values()), counts)
        dist.destroy_process_group()


# ---------------------------------------------------------------- one rank


@case
def plain():
    train(net())


@case
def evaluates():
    model = net()
    optimizer = adamw(model)
    for step in range(STEPS):
        loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        with torch.no_grad():
            model(batch(100 + step)[0])  # between the backward and the step
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
        model.eval()
        with torch.no_grad():
            show(F.mse_loss(model(batch(200 + step)[0]), batch(200 + step)[1]))
        model.train()
    finish(model)


@case
def accumulates():
    model = net()
    optimizer = adamw(model)
    for step in range(STEPS):
        for part in range(2):
            x, y = batch(step, 2, part)
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            show(loss)
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


class Headless(Net):
    """A model that leaves its last layer to the loss."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@case
def calls_the_head():
    torch.manual_seed(0)
    model = Headless()
    optimizer = adamw(model)
    for step in range(STEPS):
        x, y = batch(step)
        hidden = model(x)
        loss = sum(F.mse_loss(model.last(hidden * scale), y) for scale in (1.0, 0.5))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


@case
def checkpoints():
    train(net(recompute="yes"))


@case
def checkpoints_reentrant():
    train(net(recompute="reentrant"))


@case
def wraps_checkpoints():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    train(model)


def _compiled(compile):
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    backend = CompileCounterWithBackend("eager")
    model = net()
    compiled = compile(model, backend)
    train(model if compiled is None else compiled, adamw(model))
    print("graphs", backend.frame_count, backend.op_count, sum(counters["graph_break"].values()))
    print("stats", dict(counters["stats"]), sum(counters["frames"].values()))


@case
def compiles():
    # A buffer that counts in the graph is a change of state, which is no graph break.
    _compiled(lambda model, backend: torch.compile(model, backend=backend, fullgraph=True))


@case
def compiles_in_place():
    _compiled(lambda model, backend: model.compile(backend=backend, fullgraph=True))


@case
def compiles_blocks():
    def compile(model, backend):
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)

    _compiled(compile)


@case
def compiles_blocks_in_place():
    def compile(model, backend):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)

    _compiled(compile)


@case
def compiles_twice():
    def compile(model, backend):
        model.blocks[0].compile(backend=backend, fullgraph=True)
        return torch.compile(model, backend=backend, fullgraph=True)

    _compiled(compile)


@case
def compiles_checkpoints():
    def compile(model, backend):
        for block in model.blocks:
            block.recompute = "yes"
        return torch.compile(model, backend=backend, fullgraph=True)

    _compiled(compile)


@case
def breaks_graphs():
    class Breaking(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = self.inner.first(x)
            torch._dynamo.graph_break()
            for block in self.inner.blocks:
                x = block(x)
            return self.inner.last(x)

    _compiled(lambda model, backend: torch.compile(Breaking(model), backend=backend))


@case
def compiles_the_step():
    model = net()
    optimizer = adamw(model)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(STEPS):
        loss = F.mse_loss(model(batch(number)[0]), batch(number)[1])
        loss.backward()
        step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


def _scaled(**options):
    model = net()
    optimizer, scaler = adamw(model, **options), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        x, y = batch(step)
        x = x * float("inf") if step == 1 else x
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        show(loss)
    finish(model)


@case
def scales():
    _scaled()


@case
def scales_fused():
    _scaled(fused=True)


@case
def two_optimizers():
    model = net()
    head = list(model.last.parameters())
    optimizers = [
        torch.optim.AdamW(
            [p for name, p in model.named_parameters() if not name.startswith("last")], lr=0.01
        ),
        torch.optim.SGD(head, lr=0.1),
    ]
    for step in range(STEPS):
        loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        show(loss)
    finish(model)


class Container(torch.optim.Optimizer):
    """An optimizer that only steps others, one for each parameter."""

    def __init__(self, parameters) -> None:
        parameters = list(parameters)
        self.inner = [torch.optim.AdamW([parameter], lr=0.01) for parameter in parameters]
        super().__init__(parameters, {})

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


@case
def contains():
    model = net()
    train(model, Container(model.parameters()))


def _adversaries(wrap=lambda model: model):
    # Two models of one class and one of another; the first optimizer steps before the second is known.
    one, two, judge = net(1), net(2), nn.Sequential(nn.Linear(OUTPUTS, 4), nn.ReLU(), nn.Linear(4, 1))
    one, two, judge = wrap(one), wrap(two), wrap(judge)
    of_judge = adamw(judge)
    of_models = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.01)
    for step in range(STEPS):
        x, y = batch(step, WORLD, RANK)
        loss = (judge(y) - 1).square().mean() + judge((one(x) + two(x)).detach()).square().mean()
        loss.backward()
        of_judge.step()
        show(loss)
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        loss = (judge(one(x) + two(x)) - 1).square().mean()
        loss.backward()
        of_models.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
        for optimizer in (of_judge, of_models):
            optimizer.zero_grad()
        show(loss)
    finish(one, two, judge)


@case
def adversaries():
    _adversaries()


@case
def ties():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    model.append(nn.Linear(FEATURES, OUTPUTS))
    train(model)


@case
def begins_on_meta():
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    source = net().state_dict()
    model.load_state_dict(source)
    train(model)


@case
def schedules():
    model = net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


def _with_closure(optimizer, model):
    for step in range(STEPS):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])  # noqa: B023
            loss.backward()
            return loss

        show(optimizer.step(closure))
    finish(model)


@case
def lbfgs():
    model = net()
    _with_closure(torch.optim.LBFGS(model.parameters(), max_iter=3), model)


@case
def closure():
    model = net()
    _with_closure(adamw(model), model)


@case
def keywords():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, *, place, samples):
            return {"place": place, "out": self.inner(samples["x"])}

    model = Model()
    optimizer = adamw(model)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(samples={"x": x}, place=torch.tensor(3))["out"], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


@case
def steps_in_backward():
    model = net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        loss = F.mse_loss(model(batch(number)[0]), batch(number)[1])
        loss.backward()
        show(loss)
    finish(model)


@case
def loads_data():
    # A transform that is a module, in worker processes that begin after steps; a loss that is a module.
    class Data(torch.utils.data.Dataset):
        transform = nn.Hardtanh(-2, 2)

        def __len__(self):
            return BATCH

        def __getitem__(self, index):
            x, y = batch(0)
            return self.transform(x[index]), y[index]

    model = net()
    optimizer, criterion = adamw(model), nn.MSELoss()
    for _ in range(STEPS):
        for x, y in torch.utils.data.DataLoader(
            Data(), batch_size=BATCH, num_workers=1, multiprocessing_context="fork"
        ):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            show(loss)
    finish(model)


@case
def embeds():
    # Sparse gradients; samples that are the second dimension; positions.
    torch.manual_seed(0)
    embedding, position, out = nn.Embedding(20, 6, sparse=True), nn.Embedding(7, 6), nn.Linear(6, 1)
    model = nn.ModuleList([embedding, position, out])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            h = embedding(x) + position(torch.arange(7))
            return out(h.transpose(0, 1)).squeeze(-1)

    whole = Model()
    optimizers = [torch.optim.SparseAdam(embedding.parameters()), adamw(nn.ModuleList([position, out]))]
    for step in range(STEPS):
        x = torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(step))
        loss = (whole(x) - 1).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        show(loss)
    finish(whole)


@case
def other_defaults():
    model = net()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.ones(BATCH, FEATURES, device="cpu", dtype=torch.float32) * step
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    torch.set_default_device("cpu")
    finish(model)


@case
def catches_errors():
    model = net()
    optimizer = adamw(model)
    for step in range(STEPS):
        try:
            model(torch.ones(BATCH, FEATURES + 1))
        except RuntimeError:
            print("caught")
        loss = F.mse_loss(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


@case
def transforms_functions():
    # Modules inside torch.func: their tensors have no values of their own.
    model = net()
    optimizer = adamw(model)
    for step in range(STEPS):
        x, y = batch(step)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss_of(parameters, x, y):
            return F.mse_loss(torch.func.functional_call(model.eval(), parameters, (x[None],)), y[None])

        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        show(sum(grad.square().sum() for grad in grads.values()))
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


# ---------------------------------------------------------------- one rank: what ends with an error


@case
def raises():
    train(net(), steps=1)
    raise ValueError("the script's own")


@case
def raises_after_recording():
    train(net())
    raise ValueError("the script's own")


@case
def never_steps():
    show(net()(batch(0)[0]).sum())


@case
def ends_soon():
    train(net(), steps=2)
    sys.exit(0)


@case
def ends_just_then():
    train(net(), steps=3)
    sys.exit(0)


@case
def exits_with_5():
    train(net(), steps=1)
    sys.exit(5)


# ---------------------------------------------------------------- several ranks


def start():
    dist.init_process_group("gloo")
    return WORLD, RANK


@case
def ddp():
    parts, part = start()
    train(DistributedDataParallel(net()), parts=parts, part=part)


@case
def ddp_accumulates():
    start()
    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    for step in range(STEPS):
        x, y = (tensor.chunk(2) for tensor in batch(step, WORLD, RANK))
        with model.no_sync():
            loss = F.mse_loss(model(x[0]), y[0]) / 2
            loss.backward()
        loss = F.mse_loss(model(x[1]), y[1]) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)
    finish(model)


@case
def ddp_unused():
    parts, part = start()
    model = net()
    model.unused = nn.Linear(2, 2)
    train(DistributedDataParallel(model, find_unused_parameters=True), parts=parts, part=part)


@case
def ddp_static():
    parts, part = start()
    train(DistributedDataParallel(net(recompute="reentrant"), static_graph=True), parts=parts, part=part)


@case
def ddp_compiled():
    parts, part = start()
    model = net()
    inner = DistributedDataParallel(model)
    train(torch.compile(inner, backend="aot_eager"), adamw(model), parts, part)


@case
def ddp_adversaries():
    start()
    _adversaries(DistributedDataParallel)


def _sharded(mesh=None, **options):
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@case
def fsdp():
    parts, part = start()
    train(_sharded(), parts=parts, part=part)


@case
def fsdp_offloads():
    parts, part = start()
    train(_sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), parts=parts, part=part)


@case
def fsdp_mixed():
    parts, part = start()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(_sharded(mp_policy=policy), parts=parts, part=part)


@case
def fsdp_on_meta():
    parts, part = start()
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    source = net()
    with torch.no_grad():
        for target, value in zip(model.parameters(), source.parameters(), strict=True):
            from torch.distributed.tensor import distribute_tensor

            target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
        for target, value in zip(model.buffers(), source.buffers(), strict=True):
            target.copy_(value)
    train(model, parts=parts, part=part)


@case
def hsdp():
    parts, part = start()
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    train(_sharded(mesh), parts=parts, part=part)


def _tensor_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@case
def tp():
    start()
    train(_tensor_parallel(net(), init_device_mesh("cpu", (WORLD,))))


@case
def tp_fsdp():
    start()
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(net(), mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, adamw(model, foreach=False), WORLD // 2, RANK // 2)


@case
def fsdp1():
    parts, part = start()
    train(FullyShardedDataParallel(net(), device_id=torch.device("cpu")), parts=parts, part=part)


@case
def pipeline():
    # A rank begins its next step when the one before it has sent something.
    start()
    whole = net()
    model = (
        nn.Sequential(whole.first, whole.blocks[0])
        if RANK == 0
        else nn.Sequential(whole.blocks[1], whole.last)
    )
    optimizer = adamw(model)
    for step in range(STEPS):
        x, y = batch(step)
        if RANK == 0:
            hidden = model(x)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(BATCH, WIDTH, requires_grad=True)
            with torch.no_grad():
                dist.recv(hidden, 0)
            loss = F.mse_loss(model(hidden), y)
            loss.backward()
            dist.send(hidden.grad, 0)
            show(loss)
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


@case
def cleans_up():
    start()
    model = DistributedDataParallel(net())
    copied = copy.deepcopy(model)
    try:
        optimizer = adamw(model)
        for step in range(1000):
            loss = F.mse_loss(model(batch(step, WORLD, RANK)[0]), batch(step, WORLD, RANK)[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            show(loss)
    finally:
        dist.barrier()
        del copied
        dist.destroy_process_group()
        print("cleaned up", flush=True)


if __name__ == "__main__":
    CASES[sys.argv[1]]()
