"""What a hook in torch asks before it looks at a tensor, and how it stays out of compiled code."""

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn


def in_backward() -> bool:
    """Return whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: tensors have no values then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def tensors_have_no_values() -> bool:
    """Return whether tensors stand for others: in a trace, functorch's transforms, or fake tensors' mode."""
    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


def is_compiled_graph(module: nn.Module) -> bool:
    """Return whether a module is a graph that a compiler backend calls, and no module of the script's.

    It has no parameters: they are inputs; and its outputs are also what it keeps for the backward. A model
    that torch.fx has traced has parameters.
    """
    return isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None


def is_running(wanted: FrameType | None) -> bool:
    """Return whether a frame is among those that have led here."""
    frame = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


def never_compile(function: Callable) -> None:
    """Keep torch.compile from compiling a hook by itself, as it does where a graph breaks.

    torch._dynamo.disable would do that, too, but would break the graphs that a hook is traced into.
    """
    eval_frame = torch._C._dynamo.eval_frame  # its users are in torch._dynamo, which takes long to import
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
