"""A STAND-IN for torch_neuronx, for tests: it computes on the host and says nothing about Neuron.

Device, process group and compile backend are called "neuron", as the real package's are. Importing
this registers the first two; torch.compile finds the third through the package's entry point.
"""

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _C

torch.utils.rename_privateuse1_backend("neuron")

from . import neuron  # noqa: E402 - its streams and events need the device's name

torch._register_device_module("neuron", neuron)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _process_group(store, rank, size, timeout):
    # A core is held by one process. (The store is the group's own, all its ranks are on this machine.)
    core = neuron.current_device()
    others = store.add(f"core-{core}", 1) - 1
    if others:
        raise RuntimeError(f"neuron core {core} is already used by another rank; set_device(LOCAL_RANK)")
    return _C.over_gloo(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("neuron", _process_group, devices=["neuron"])

# STANDIN_ERROR names a training step: each is over with the optimizer's.
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _C.next_step())
