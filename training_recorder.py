"""The recorder: hooks in torch that see what a training script computes, and what they keep of it.

record_training.py runs a script under them. training_recordings.py says what a rank file holds.
"""

import argparse
import fnmatch
import functools
import os
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from training_common import InputError, is_dtensor, print_line
from training_hooks import (
    in_backward,
    is_capturing,
    is_compiled_graph,
    is_running,
    never_compile,
    tensors_have_no_values,
)
from training_names import Names, Step, describe_optimizer, main_tensor, tensors_in, trained_by
from training_recordings import environment, wait_for_all, write_rank_file
from training_sketches import describe, describe_samples, local_shard, sample_keys


class Stop(SystemExit):
    """Ends the script when the steps are recorded: `finally` blocks run, `except Exception` ones do not."""


class Recorder:
    """Hooks in torch that see every call of a module, every backward and every optimizer step.

    A step ends when the next one begins: with a forward, a backward, or a second step of an optimizer that
    has stepped already. So several optimizers that step one after another make one step. The last step
    ends sooner, when the optimizers of the step before have stepped: in a pipeline a rank begins the next
    step only if another one has sent it something, which this one then never does.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.names = Names()
        self.steps: list[Step] = []
        self._to_skip: int = args.skip
        self.seconds = 0.0  # spent here
        self.done = False
        self.problem: InputError | None = None  # why nothing can be recorded
        self._step = Step()
        self._here = os.getpid(), threading.get_ident()
        self._called: set[nn.Module] = set()
        self._unwanted: set[nn.Module] = set()  # known not to match --activations
        self._stack: list[nn.Module] = []  # calls of modules that have not returned
        self._training = False  # whether the outermost of them was called with gradients enabled
        self._continued = False  # whether it goes on with what the model computed in its last call
        self._open: list[torch.optim.Optimizer] = []  # steps that have not returned: a container steps others
        self._step_frame: FrameType | None = None  # in which torch calls the outermost of them
        self._inner = 0  # calls of the same optimizer's step inside its own
        self._closure: str | None = None  # of the open step: "waiting", "running" or "done"
        self._steps_seen = 0
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []  # losses, as scaled and as they were
        self._counting = False  # whether cross_entropy is running
        self._labels = 0  # valid ones since the last backward, in calls of cross_entropy
        self._watched: set[int] = set()  # ids of parameters whose gradients' order is seen
        self._install()

    def _install(self) -> None:
        # Hooks stay when recording has ended: without them, compiled functions would be compiled again.
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._recording_backward(torch.autograd.backward)
        torch.amp.GradScaler.scale = self._recording_scale(torch.amp.GradScaler.scale)
        torch.amp.GradScaler.step = self._recording_scaler_step(torch.amp.GradScaler.step)
        nn.Module.compile = self._recording_compile(nn.Module.compile)
        nn.functional.cross_entropy = self._recording_cross_entropy(nn.functional.cross_entropy)
        clipping = torch.nn.utils.clip_grad  # clip_grad_norm_ calls it by its private name
        clipping._clip_grads_with_norm_ = self._recording_clip(clipping._clip_grads_with_norm_)
        torch.nn.utils.clip_grads_with_norm_ = clipping._clip_grads_with_norm_
        for hook in (self._enter, self._leave, self._before_step, self._after_step):
            never_compile(hook)
        # torch.compile says that hooks see the module that it puts around a model. They are to.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        # For what is done here: the time counts as ours, and what the script has set for its own tensors,
        # such as a default device, does not hold. Nor are modes to see it: selective checkpointing keeps the
        # results of operations in order, and would give the model ours.
        started = time.perf_counter()
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                yield
        except InputError as error:
            self.problem, self.done = error, True
            raise Stop(2) from None
        finally:
            self.seconds += time.perf_counter() - started

    def _blind(self) -> bool:
        # A worker of a data loader inherits the hooks; what runs there is no training.
        return self.done or os.getpid() != self._here[0] or is_capturing()

    def _blind_to_calls(self) -> bool:
        # A module that runs in a backward is recomputed: activation checkpointing.
        return (
            self._blind()
            or in_backward()
            or threading.get_ident() != self._here[1]
            or tensors_have_no_values()
        )

    # ------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, inputs: tuple, named: dict | None = None) -> None:
        # While torch.compile traces, this question is all that it sees of the hook.
        if torch.compiler.is_compiling() or self._blind_to_calls() or is_compiled_graph(module):
            return
        if named is None and self._stack[-1:] == [module] and module._compiled_call_impl is not None:
            return  # compiled in place, and called a second time by what is not compiled of it
        if not self._stack:
            self._training = torch.is_grad_enabled() and (not self._open or self._closure == "running")
            if named is None:  # hooks get no keyword arguments; the frame that calls this one has them
                named = sys._getframe(1).f_locals.get("kwargs", {})
            first = next((x for x in tensors_in((inputs, named)) if x.dim()), None)
            if first is not None and first.device.type == "meta":
                self._training = False
            if self._training:
                self._close_if_stepped()
                if self.done:
                    return
                self._continued = self._continues(module, first)
                if not self._continued:
                    self._batch = None if first is None else len(local_shard(first))
                    self._occurrences = defaultdict(int)
                if not self.steps and not any(module is called for called, _ in self._step.calls):
                    self._keep_start(module)
        self._stack.append(module)

    def _continues(self, module: nn.Module, first: torch.Tensor | None) -> bool:
        # A part of the model that is called by itself, with what the model has computed: a head, in a loss
        # that takes the sequence in chunks.
        if first is None or not first.requires_grad or not self._step.calls:
            return False
        last = self._step.calls[-1][0]
        return module is not last and any(part is module for part in last.modules())

    def _leave(self, module: nn.Module, inputs: tuple, *rest: object) -> None:
        # rest: keyword arguments and the output; of a call that has raised something, only None.
        if torch.compiler.is_compiling() or self._blind_to_calls() or module not in self._stack:
            return
        while self._stack.pop() is not module:
            pass
        if not self._training or len(rest) < 2:
            return
        named, output = rest
        with self._aside():
            self._called.add(module)
            self._watch(module)
            self._occurrences[module] += 1
            if self.args.activations != "none" and module not in self._unwanted:
                tensor = main_tensor(output)
                described = None if tensor is None else describe_samples(tensor, self._batch)
                if described is not None:
                    call = len(self._step.calls) - self._continued
                    entry = (module, call, self._occurrences[module], described)
                    self._step.activations.append(entry)
            if not self._stack and not self._continued:
                keys = sample_keys([x for x in tensors_in((inputs, named)) if x.dim()])
                self._step.calls.append((module, keys))

    def _watch(self, module: nn.Module) -> None:
        # The parameters as autograd knows them: FSDP puts others in their place for a call.
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                keep = functools.partial(self._keep_ready, module, name)
                parameter.register_post_accumulate_grad_hook(keep)

    def _keep_ready(self, module: nn.Module, name: str, parameter: torch.Tensor) -> None:
        self._step.ready.setdefault((module, name), id(parameter))

    def _recording_compile(self, compile: Callable) -> Callable:
        # A module that is compiled in place is called without hooks; inside a compiled one it has none.
        @functools.wraps(compile)
        def recorded(module, *args, **kwargs):
            compile(module, *args, **kwargs)
            compiled = module._compiled_call_impl

            @functools.wraps(compiled)
            def call(*inputs, **named):
                self._enter(module, inputs, named)
                try:
                    output = compiled(*inputs, **named)
                except Exception:
                    self._leave(module, inputs, None)
                    raise
                self._leave(module, inputs, named, output)
                return output

            module._compiled_call_impl = call

        return recorded

    def _keep_start(self, called: nn.Module) -> None:
        # Buffers before training. Which modules are trained is not known yet: those of any that is called.
        with self._aside():
            for module in called.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if not is_lazy(buffer):
                        self._step.start.setdefault((module, name), describe(buffer))

    def _recording_backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def recorded(tensors, *args, **kwargs):
            seen = not (torch.compiler.is_compiling() or self._blind() or in_backward())
            if seen and (not self._open or self._closure == "running"):
                self._close_if_stepped()
                if self._step.losses:
                    self._step.held.append(self._count_gradients())
                self._keep_losses(tensors if isinstance(tensors, list | tuple) else [tensors])
            return backward(tensors, *args, **kwargs)

        return recorded

    def _keep_losses(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if torch.is_tensor(tensor) and tensor.numel() == 1:
                loss = next((loss for scaled, loss in self._scaled if scaled is tensor), tensor)
                self._step.losses.append(loss.detach().clone())  # the script may change it in place
                self._step.labels.append(self._labels)
                self._labels = 0

    def _count_gradients(self) -> int:
        # How many parameters have a gradient, of an earlier backward of the step.
        with self._aside():
            gradients = [parameter.grad for parameter in self.names.parameters()]
            gradients += self.names.unsharded_gradients()
            return sum(bool(local_shard(gradient).any()) for gradient in gradients if gradient is not None)

    def _recording_cross_entropy(self, cross_entropy: Callable) -> Callable:
        @functools.wraps(cross_entropy)
        def recorded(input, target, *args, **kwargs):
            if torch.compiler.is_compiling() or self._counting:
                return cross_entropy(input, target, *args, **kwargs)
            plain = type(target) is torch.Tensor or is_dtensor(target)  # no fake one, no fx proxy
            if (
                plain
                and target.device.type != "meta"
                and torch.is_grad_enabled()
                and not self._blind_to_calls()
            ):
                with self._aside():
                    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
                    labels = local_shard(target)
                    whole = not labels.is_floating_point()  # otherwise they are probabilities of classes
                    self._labels += int((labels != ignored).sum()) if whole else len(labels)
            self._counting = True  # a mode such as that of a default device calls this function again
            try:
                return cross_entropy(input, target, *args, **kwargs)
            finally:
                self._counting = False

        recorded.__prepare_scriptable__ = lambda: cross_entropy  # what torch.jit.script compiles
        return recorded

    def _recording_clip(self, clip: Callable) -> Callable:
        @functools.wraps(clip)
        def recorded(parameters, max_norm, total_norm, *args, **kwargs):
            if not torch.compiler.is_compiling() and not self._blind():
                # The norm of DTensors is one, and to know it would take a collective.
                known = torch.is_tensor(total_norm) and not is_dtensor(total_norm)
                norm = float(total_norm) if known else None
                stepped = len(self._step.stepped)
                self._step.clips.append({"max_norm": float(max_norm), "norm": norm, "stepped": stepped})
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        return recorded

    # ------------------------------------------------------------ the optimizer's step

    def _recording_scale(self, scale: Callable) -> Callable:
        @functools.wraps(scale)
        def recorded(scaler, outputs):
            scaled = scale(scaler, outputs)
            if torch.is_tensor(outputs) and not self._blind():
                self._scaled.append((scaled, outputs.detach().clone()))
            return scaled

        return recorded

    def _recording_scaler_step(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def recorded(scaler, optimizer, *args, **kwargs):
            seen = self._steps_seen
            result = step(scaler, optimizer, *args, **kwargs)
            if not self._blind() and self._steps_seen == seen:  # it found gradients that are not finite
                self._before_step(optimizer, (), {}, skipped=True)
                self._after_step(optimizer, (), {})
            return result

        return recorded

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict, skipped: bool = False
    ) -> tuple | None:
        if torch.compiler.is_compiling() or self._blind():
            return None
        if optimizer in self._open:
            if is_running(self._step_frame):  # a class of the script's own calls its base class's step
                self._inner += 1
                return None
            del self._open[self._open.index(optimizer) :]  # that step has raised something
            self._inner = 0
        if not self._open and self._makes_its_state(optimizer):
            return None
        if not self._open and optimizer in self._step.stepped:
            self._close_if_stepped()
            if self.done:
                return None
        self._open.append(optimizer)
        if len(self._open) == 1:
            self._step_frame = sys._getframe(1)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        closure = closure if callable(closure) and len(self._open) == 1 else None
        with self._aside():
            self.names.find(optimizer)
            # A fused optimizer skips the step itself.
            skipped = skipped or bool(getattr(optimizer, "found_inf", 0))
            self._step.optimizers.append(describe_optimizer(optimizer, skipped))
            for parameter in (*trained_by(optimizer), *self.names.parameters()):
                if id(parameter) not in self._step.before:
                    described = self._described(parameter, parameter)
                    described["requires_grad"] = parameter.requires_grad
                    self._step.before[id(parameter)] = described
            if closure is None:
                self._describe_gradients(optimizer)
        if len(self._open) > 1:
            return None
        self._outermost = len(self._step.optimizers) - 1
        self._closure = closure and "waiting"
        if closure is None:
            return None
        closure = self._recording_closure(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _makes_its_state(self, optimizer: torch.optim.Optimizer) -> bool:
        # A checkpoint is loaded into an optimizer that has stepped once: without a forward, and at rate zero.
        if self._step.calls or self._step.losses:
            return False
        return all(group.get("lr", 1.0) == 0 for group in optimizer.param_groups)

    def _recording_closure(self, closure: Callable, optimizer: torch.optim.Optimizer) -> Callable:
        # The forward and backward of a step are in the closure's first call: those of later calls are
        # with other parameters.
        @functools.wraps(closure)
        def recorded(*args, **kwargs):
            if self._closure != "waiting" or self.done:
                return closure(*args, **kwargs)
            self._closure = "running"
            try:
                result = closure(*args, **kwargs)
            finally:
                self._closure = "done"
            with self._aside():
                self._describe_gradients(optimizer)
            return result

        return recorded

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or self._blind() or optimizer not in self._open:
            return
        if self._inner:
            self._inner -= 1
            return
        place = self._open.index(optimizer)
        del self._open[place:]
        if not place:
            self._drop_container()
        with self._aside():
            self._steps_seen += 1
            self._step.stepped.append(optimizer)
            if not place and self._closure == "waiting":  # it never called its closure
                self._describe_gradients(optimizer)
            for parameter in trained_by(optimizer):
                self._step.parameters[id(parameter)] = self._described(parameter, parameter)
        last = len(self.steps) + 1 == self.args.steps and self.steps and not in_backward()
        if last and not place and set(self._step.stepped) == set(self.steps[-1].stepped):
            self._close_if_stepped()

    def _drop_container(self) -> None:
        # The settings of an optimizer that steps others are theirs.
        outer, *inner = (
            {key for group in optimizer["groups"] for key in group["names"]}
            for optimizer in self._step.optimizers[self._outermost :]
        )
        if inner and outer <= set().union(*inner):
            del self._step.optimizers[self._outermost]

    def _describe_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        for parameter in trained_by(optimizer):
            if parameter.grad is not None:
                described = self._described(parameter, parameter.grad, scale)
                self._step.gradients[id(parameter)] = described

    def _described(self, parameter: torch.Tensor, tensor: torch.Tensor, scale=None) -> dict:
        name = self.names.of_parameter(id(parameter)) if self.args.full else ""
        full = any(wanted == "all" or fnmatch.fnmatchcase(name, wanted) for wanted in self.args.full)
        return describe(tensor, scale, full)

    # ------------------------------------------------------------ steps

    def _close_if_stepped(self) -> None:
        if not self._step.stepped or self._open:
            return
        with self._aside():
            for parameter in self.names.parameters():  # that no optimizer has
                if id(parameter) not in self._step.parameters:
                    self._step.parameters[id(parameter)] = self._described(parameter, parameter)
            self._step.buffers = {key: describe(buffer) for key, buffer in self.names.buffers().items()}
            self.steps.append(self._step)
            self._step, self._scaled = Step(), []
            self._step.start = self.steps[-1].buffers
            wanted = self.args.activations
            self._unwanted = {
                module
                for module in self._called
                if (name := self.names.of_module(module)) and not fnmatch.fnmatchcase(name, wanted)
            }
            if self._to_skip:
                self._to_skip -= 1
                self.steps.clear()
            if len(self.steps) < self.args.steps:
                return
            self.done = True
            rank = self._save()
        if rank == 0:
            print_line(self._summary())
        self.steps.clear()
        if self.args.afterwards == "stop":
            raise Stop(0)

    # ------------------------------------------------------------ the end

    def _save(self) -> int:
        command = [self.args.script, *self.args.arguments]
        steps = [step.named(self.names, self.args.activations) for step in self.steps]
        metadata = environment(command, self.names.device(), steps)
        metadata |= {"tied": self.names.tied(), "reduced_in": self.names.reduced_in()}
        metadata["dropout"] = self.names.dropout()
        rank, world_size = metadata["rank"], metadata["world_size"]
        path = self.args.output_dir / f"rank-{rank}.pt"
        # A launcher ends the ranks that wait for one that has failed: there is no file yet.
        wait_for_all(world_size, self.args.output_dir.name)
        write_rank_file(path, metadata, steps)
        return rank

    def _summary(self) -> str:
        text = f"recorded {len(self.steps)} steps in {self.args.output_dir}"
        text += f"; recording took {self.seconds:.1f} s"
        if self.args.activations == "none":
            return text
        known = {name for name in self.names.modules() if fnmatch.fnmatchcase(name, self.args.activations)}
        unseen = sorted(known - {self.names.of_module(module) for module in self._called})
        if unseen:
            some = ", ".join(unseen[:3]) + (", ..." if len(unseen) > 3 else "")
            text += (
                f"; {len(unseen)} of {len(known)} modules were not seen, inside a compiled region or never "
            )
            text += f"called: {some}"
        return text

    def end_of_script(self) -> None:
        """Complete the records when the script has ended. Raises InputError if there are too few steps."""
        if not self.done:
            self._open.clear()
            self._close_if_stepped()
        if self.problem:
            raise self.problem
        if self.done:
            return
        seen = self.args.skip - self._to_skip + len(self.steps)
        why = "give fewer steps" if seen else "no step of a torch.optim optimizer was seen (a compiled "
        why += "" if seen else "function's cannot be)"
        wanted = f"--skip {self.args.skip} and --steps" if self.args.skip else "--steps"
        raise InputError(
            f"the script ended after {seen} of {wanted} {self.args.steps} optimizer steps: nothing was "
            f"recorded; {why}"
        )
