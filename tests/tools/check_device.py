"""Run with the stand-in on the path: it behaves like a device, and refuses what any device refuses.

Prints one line per check that fails, and how many passed.
"""

import io
import sys

import torch
import torch.nn.functional as F
import torch_neuronx  # noqa: F401 - registers the device

NEURON = torch.device("neuron")
here, there = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4).to(NEURON)
scalar = torch.tensor(2.0)

# Each mixes the devices, and CUDA refuses it.
MIXTURES = {
    "add": lambda: there + here,
    "add to the CPU's": lambda: here + there,
    "add in place": lambda: here.clone().add_(there),
    "add to a CPU scalar in place": lambda: scalar.clone().add_(there.sum()),
    "mm": lambda: there @ here.t(),
    "mm with the CPU's first": lambda: here @ there.t(),
    "linear": lambda: F.linear(there, torch.ones(2, 4), torch.ones(2)),
    "cat": lambda: torch.cat([there, here]),
    "stack": lambda: torch.stack([there, here]),
    "where": lambda: torch.where(there > 1, here, there),
    "mse_loss": lambda: F.mse_loss(there, here),
    "cross_entropy": lambda: F.cross_entropy(there, torch.tensor([0, 1, 2])),
    "layer_norm": lambda: F.layer_norm(there, (4,), torch.ones(4)),
    "embedding": lambda: F.embedding(torch.tensor([0]), there),
    "out=": lambda: torch.add(there, there, out=here.clone()),
    "equal": lambda: torch.equal(there, here),
    "foreach": lambda: torch._foreach_add([there], [here]),
    "index_select": lambda: there.index_select(0, torch.tensor([0])),
    "a parameter's data": lambda: setattr(torch.nn.Parameter(there), "data", here),
    "numpy": lambda: there.numpy(),
    "a device that is not there": lambda: torch.neuron.set_device(torch.neuron.device_count()),
    "compiled for it": lambda: torch.compile(torch.neg, backend="neuron", fullgraph=True)(here),
    "pinned on the device": lambda: torch.empty(2, device=NEURON, pin_memory=True),
}


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    losses = []
    for device in ("cpu", NEURON):
        copy = torch.nn.Sequential(*(layer for layer in model)).to(device)
        F.cross_entropy(copy(here.to(device)), torch.tensor([0, 1, 2], device=device)).backward()
        losses.append(copy[0].weight.grad.cpu().clone())
        model.zero_grad()
    return torch.equal(*losses)


def generator(device):
    return torch.Generator(device=device).manual_seed(3)


def counted():
    before = torch.neuron.memory_allocated()
    block = torch.empty(1 << 20, device=NEURON)
    during = torch.neuron.memory_allocated()
    del block
    return (during - before, torch.neuron.memory_allocated()) == (4 << 20, before)


def streamed():
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        inside = torch.neuron.current_stream() == stream
    return inside and torch.neuron.current_stream() == torch.neuron.default_stream()


def timed():
    first, second = (torch.neuron.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    return first.elapsed_time(second) >= 0


# Each holds on a device that works.
RIGHTS = {
    "there and back": lambda: torch.equal(there.cpu(), here),
    "a copy across": lambda: torch.equal(there.clone().copy_(here + 1).cpu(), here + 1),
    "views": lambda: torch.equal(there.t()[1:, ::2].contiguous().cpu(), here.t()[1:, ::2]),
    "a CPU scalar is read": lambda: torch.equal((there + scalar).cpu(), here + 2),
    "CPU indices": lambda: torch.equal(there[torch.tensor([2, 0])].cpu(), here[[2, 0]]),
    "conjugate views": lambda: torch.equal((here * 1j).to(NEURON).conj().cpu(), (here * 1j).conj()),
    "training": trained,
    "random numbers": lambda: torch.equal(
        torch.randn(3, device=NEURON, generator=generator("neuron")).cpu(),
        torch.randn(3, generator=generator("cpu")),
    ),
    "save and load": lambda: torch.load(saved(there), weights_only=True).device.type == "neuron",
    "load on the CPU": lambda: torch.load(saved(there), map_location="cpu", weights_only=True).is_cpu,
    "memory": counted,
    "pinned memory": lambda: (here.pin_memory().is_pinned(), here.is_pinned()) == (True, False),
    "streams": streamed,
    "events": timed,
    "accelerator": lambda: torch.accelerator.current_accelerator().type == "neuron",
    "resize": lambda: there.clone().resize_(4, 4).shape == (4, 4),
}

failed = 0
for name, mix in MIXTURES.items():
    try:
        mix()
    except Exception:
        continue
    print(f"not refused: {name}")
    failed += 1
for name, holds in RIGHTS.items():
    if not holds():
        print(f"does not hold: {name}")
        failed += 1
print(f"{len(MIXTURES) + len(RIGHTS) - failed} checks passed")
sys.exit(1 if failed else 0)
