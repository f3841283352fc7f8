"""torch.neuron: the functions that PyTorch and its users call on any device's module."""

import contextlib

import torch

from ._C import current_device, device_count, is_initialized
from ._C import set_device as _set_device

__all__ = ["current_device", "device_count", "is_initialized"]


def _index(device=None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def init():
    pass


def _is_in_bad_fork() -> bool:
    return False


def _lazy_call(function, **kwargs):
    function()


def set_device(device):
    _set_device(_index(device))


@contextlib.contextmanager
def device(device):
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


# Streams and events are PyTorch's own, over the guard in device.cpp.


class Stream:
    def __new__(cls, device=None, priority=0, **kwargs):
        device = torch.device("neuron", _index(device))
        return torch.Stream(**kwargs) if kwargs else torch.Stream(device=device, priority=priority)


class Event:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event(device="neuron", enable_timing=enable_timing)


def current_stream(device=None):
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=current_stream().device_type)


set_stream = torch.accelerator.set_stream


@contextlib.contextmanager
def stream(stream):
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device=None):
    pass


# Random numbers come from the CPU's generator.


def manual_seed(seed):
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def get_rng_state(device=None):
    return torch.get_rng_state()


def set_rng_state(state, device=None):
    torch.set_rng_state(state)


# Memory is counted by the allocator in device.cpp, and torch.accelerator reads the counts.


def memory_allocated(device=None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device=None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device=None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device=None) -> dict:
    return torch.accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache():
    pass


def get_amp_supported_dtype() -> list:
    return [torch.bfloat16, torch.float16, torch.float32]
