"""What TorchTitan 0.3.0 lacks to run on a machine without an accelerator, in one place.

    import cpu_adapter
    cpu_adapter.adapt()  # before the first import of torchtitan
    from torchtitan.train import main

Without an accelerator TorchTitan takes the device to be "cuda" and fails in its first call to it.
adapt() gives it the CPU: device type "cpu", process-group backend Gloo, and a device module that has
the functions TorchTitan calls. Where there is an accelerator it changes nothing, unless TITAN_DEVICE=cpu
is in the environment. Upstream, the four changes of adapt() would be a few lines in
torchtitan/tools/utils.py and torchtitan/distributed/utils.py.
"""

import os
import resource
import sys
import types

import torch
import torch.distributed as dist


def memory_stats(device: object = None) -> dict[str, int]:
    """Return the peak resident memory of this process, in bytes, under the allocator's names.

    Resident memory is all that the process ever held, not only tensors, and it cannot be reset.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts in bytes there, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def cpu_module() -> types.ModuleType:
    """Return torch.cpu with the functions that TorchTitan calls on torch.cuda."""
    module = types.ModuleType("torch.cpu")
    module.__dict__.update(vars(torch.cpu))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module.current_device = lambda: 0  # torch.cpu answers "cpu", not an index
    module.device_count = lambda: 1
    module.get_device_name = lambda device=None: "CPU"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(name="CPU", total_memory=total)
    module.memory_stats = memory_stats
    module.reset_peak_memory_stats = lambda device=None: None
    module.empty_cache = lambda: None
    return module


def allow_barrier_with_devices() -> None:
    """Let dist.barrier take device_ids on Gloo too, which has no use for them and refuses them."""
    barrier = dist.barrier

    def barrier_without_devices(group=None, async_op=False, device_ids=None):
        return barrier(group, async_op)

    dist.barrier = barrier_without_devices


def adapt() -> None:
    """Make TorchTitan run on the CPU, unless there is an accelerator and TITAN_DEVICE is not cpu.

    Raises:
        RuntimeError: torchtitan is already imported, and with it its choice of a device.
    """
    wanted = os.environ.get("TITAN_DEVICE")
    if torch._utils._get_available_device_type() is not None and wanted != "cpu":
        return
    if getattr(torch._utils._get_available_device_type, "adapted", False):
        return
    if "torchtitan" in sys.modules:
        raise RuntimeError(
            "torchtitan is imported already and took the device to be cuda: call adapt() first"
        )
    module = cpu_module()
    get_device_module = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_available_device_type.adapted = True
    torch._utils._get_device_module = lambda kind: module if kind == "cpu" else get_device_module(kind)
    allow_barrier_with_devices()

    from torchtitan.tools import utils

    # Its table has no CPUs and would take the peak of an A100. Of an infinite peak the logged share is 0 %.
    utils.get_peak_flops = lambda device_name: float("inf")
