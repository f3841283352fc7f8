"""Record what a PyTorch training script computes, without a change to the script.

    python record_training.py --output-dir results/one --steps 3 train.py ARGS...
    torchrun --standalone --nproc-per-node=4 record_training.py --output-dir results/four train.py ARGS...
    torchrun --standalone --nproc-per-node=4 record_training.py --output-dir results/four -m package.train ARGS...
    python compare_training.py --reference-dir results/one --actual-dir results/four

The two runs may differ in ranks, parallelism, device or compilation. Each rank writes what it sees to
rank-<rank>.pt: of every tensor a sketch of a few KB (training_sketches.py), which needs no collective.
RECORDING.md says what is recorded and what cannot be. Needs training_*.py beside it.

Exit status: the script's own; 0 if it was stopped after --steps; 2 if nothing could be recorded.
"""

import argparse
import fnmatch
import functools
import gc
import os
import re
import runpy
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from training_common import InputError, full_cpu, make_parser, print_line, write_then_rename
from training_recordings import environment
from training_sketches import describe, describe_samples, sample_keys

# What wrappers put into the names of modules and parameters.
WRAPPERS = re.compile(r"^module(\.|$)|\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)")
PARAMETRIZED = re.compile(r"\bparametrizations\.(\w+)\.original\d*$")


def clean(name: str) -> str:
    """Return the name of a module or parameter without what wrappers add: DDP, compile, checkpoints."""
    return PARAMETRIZED.sub(r"\1", WRAPPERS.sub("", name)).rstrip(".")


class Names:
    """The names of modules, parameters and buffers of the models that are trained.

    A model is a module that is no part of another and holds a parameter of an optimizer.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.modules: dict[nn.Module, str] = {}
        self.parameters: dict[int, str] = {}  # by id; wrappers such as FSDP replace the objects
        self.tied: dict[str, list[str]] = {}  # a parameter's name: its other names

    def find(self, trained: list[torch.Tensor]) -> None:
        """Look for the models of these parameters among all live modules, if one has no name yet."""
        self._name_all()
        if all(id(parameter) in self.parameters for parameter in trained):
            return
        wanted = {id(parameter) for parameter in trained}
        # By type: isinstance would ask weak references whose object is gone.
        live = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        parts = {id(child) for module in live for child in module.children()}
        tops = [module for module in live if id(module) not in parts and module not in self.models]
        found = [top for top in tops if any(id(parameter) in wanted for parameter in top.parameters())]
        order = {id(parameter): place for place, parameter in enumerate(trained)}
        found.sort(key=lambda top: min(order.get(id(p), len(order)) for p in top.parameters()))
        for top in found:
            if any(type(module).__name__ == "FullyShardedDataParallel" for module in top.modules()):
                raise InputError(
                    "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no "
                    "names or shapes to compare; use fully_shard (FSDP2)"
                )
        # torch.compile(model) is a module around the model. Nothing holds it but the script, as a wrapper's.
        self.models += [top for top in found if not self._is_wrapped(top, found)]
        self._name_all()

    def _is_wrapped(self, model: nn.Module, others: list[nn.Module]) -> bool:
        own = {id(parameter) for parameter in model.parameters()}
        return any(
            other is not model
            and own <= {id(parameter) for parameter in other.parameters()}
            and sum(1 for _ in other.modules()) > sum(1 for _ in model.modules())
            for other in others
        )

    def _name_all(self) -> None:
        self.modules.clear(), self.parameters.clear(), self.tied.clear()
        for model, prefix in zip(self.models, self._prefixes(), strict=True):
            for name, module in model.named_modules():
                self.modules.setdefault(module, (prefix + clean(name)).rstrip("."))
            for name, parameter in model.named_parameters(remove_duplicate=False):
                name = prefix + clean(name)
                first = self.parameters.setdefault(id(parameter), name)
                if first != name and name not in self.tied.get(first, ()):
                    self.tied.setdefault(first, []).append(name)

    def _prefixes(self) -> list[str]:
        if len(self.models) == 1:
            return [""]
        prefixes, count = [], defaultdict(int)
        for model in self.models:
            inner = model
            while type(inner).__name__ in ("DistributedDataParallel", "OptimizedModule"):
                inner = next(inner.children())
            kind = type(inner).__name__
            count[kind] += 1
            prefixes.append(f"{kind}{count[kind] if count[kind] > 1 else ''}.")
        return prefixes

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return all buffers by name."""
        return {
            prefix + clean(name): buffer
            for model, prefix in zip(self.models, self._prefixes(), strict=True)
            for name, buffer in model.named_buffers()
        }


class Stop(SystemExit):
    """Ends the script when the steps are recorded: its `finally` blocks run, its `except Exception` do not."""


class Recorder:
    """Hooks in torch that see every call of a module, every backward and every optimizer step.

    A step ends when the next one begins: with a forward, a backward, or a second step of an optimizer that
    has stepped already. So several optimizers that step one after another make one step.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.names = Names()
        self.steps: list[dict] = []
        self.seconds = 0.0  # spent here
        self.done = False
        self._begin_step()
        self._depth = 0  # of module calls
        self._training = False  # whether the outermost module was called with gradients enabled
        self._stepping = 0  # depth of optimizer steps: a container steps others
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._patches = [(torch.autograd, "backward", torch.autograd.backward)]
        torch.autograd.backward = self._recording_backward(torch.autograd.backward)
        self._patches.append((torch.amp.GradScaler, "step", torch.amp.GradScaler.step))
        torch.amp.GradScaler.step = self._recording_scaler(torch.amp.GradScaler.step)

    # ------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, inputs: tuple) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        if self._depth == 0:
            self._training = torch.is_grad_enabled() and not self._stepping
            if self._training:
                self._close_if_stepped()
                if self.done:
                    return
                first = next((x for x in inputs if torch.is_tensor(x) and x.dim()), None)
                self._batch = None if first is None else len(first)
                self._occurrences = defaultdict(int)
                if not self.steps and not self._calls:
                    self._keep_start(module)
        self._depth += 1

    def _leave(self, module: nn.Module, inputs: tuple, named: dict, output: object) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        self._depth = max(0, self._depth - 1)
        if not self._training or self.done:
            return
        started = time.perf_counter()
        self._occurrences[module] += 1
        if self.args.activations != "none" and (tensor := _main_tensor(output)) is not None:
            described = describe_samples(tensor, self._batch)
            self._activations.append((module, len(self._calls), self._occurrences[module], described))
        if self._depth == 0:
            tensors = [x for x in (*inputs, *named.values()) if torch.is_tensor(x) and x.dim()]
            self._calls.append(sample_keys(tensors))
        self.seconds += time.perf_counter() - started

    def _keep_start(self, module: nn.Module) -> None:
        # Buffers before training: of the model that is called, under the names that it has for them.
        started = time.perf_counter()
        self._start = {clean(name): describe(buffer) for name, buffer in module.named_buffers()}
        self.seconds += time.perf_counter() - started

    def _recording_backward(self, backward):
        @functools.wraps(backward)
        def recorded(tensors, *args, **kwargs):
            if not torch.compiler.is_compiling() and not self._stepping and not self.done:
                self._close_if_stepped()
                for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
                    if torch.is_tensor(tensor) and tensor.numel() == 1:
                        self._losses.append(tensor.detach())
            return backward(tensors, *args, **kwargs)

        return recorded

    # ------------------------------------------------------------ the optimizer's step

    def _recording_scaler(self, step):
        @functools.wraps(step)
        def recorded(scaler, optimizer, *args, **kwargs):
            count = self._stepped.get(optimizer, 0)
            result = step(scaler, optimizer, *args, **kwargs)
            if not self.done and self._stepped.get(optimizer, 0) == count:  # it found gradients not finite
                self._before_step(optimizer, (), {})
                self._after_step(optimizer, (), {})
                self._optimizers[-1]["skipped"] = True
            return result

        return recorded

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._stepping += 1
        if self._stepping > 1 or self.done:
            return
        if optimizer in self._stepped:
            self._close_if_stepped()
            if self.done:
                return
        started = time.perf_counter()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.names.find(trained)
        named = self._named(optimizer)
        self._device = next((p.device.type for p in named.values()), "cpu")
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        for name, parameter in named.items():
            if parameter.grad is not None:
                self._gradients[name] = self._described(name, parameter.grad, scale)
            self._before[name] = self._described(name, parameter)
        self._optimizers.append(_describe_optimizer(optimizer, named))
        self.seconds += time.perf_counter() - started

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._stepping -= 1
        if self._stepping or self.done:
            return
        started = time.perf_counter()
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        for name, parameter in self._named(optimizer).items():
            self._parameters[name] = self._described(name, parameter)
        self.seconds += time.perf_counter() - started

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        known = self.names.parameters
        return {
            known.get(id(parameter), f"{type(optimizer).__name__}.group{i}.{j}"): parameter
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }

    def _described(self, name: str, tensor: torch.Tensor, scale=None) -> dict:
        described = describe(tensor, scale)
        if any(fnmatch.fnmatchcase(name, wanted) or wanted == "all" for wanted in self.args.full):
            described["full"] = full_cpu(tensor)
        return described

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        self._start: dict[str, dict] = {}
        self._calls: list[dict] = []
        self._activations: list[tuple] = []
        self._losses: list[torch.Tensor] = []
        self._gradients: dict[str, dict] = {}
        self._before: dict[str, dict] = {}
        self._parameters: dict[str, dict] = {}
        self._optimizers: list[dict] = []
        self._stepped: dict[torch.optim.Optimizer, int] = {}

    def _close_if_stepped(self) -> None:
        if not self._stepped:
            return
        started = time.perf_counter()
        named = ((self.names.modules.get(module), *rest) for module, *rest in self._activations)
        wanted = self.args.activations
        self.steps.append(
            {
                "buffers_before": self._start if not self.steps else self.steps[-1]["buffers"],
                "calls": self._calls,
                "activations": [
                    {"name": name or "(model)", "call": call, "occurrence": occurrence, **described}
                    for name, call, occurrence, described in named
                    if name is not None and fnmatch.fnmatchcase(name or "(model)", wanted)
                ],
                "losses": [_number(loss) for loss in self._losses],
                "gradients": self._gradients,
                "before": self._before,
                "parameters": self._parameters,
                "buffers": {name: describe(buffer) for name, buffer in self.names.buffers().items()},
                "optimizers": self._optimizers,
            }
        )
        self._begin_step()
        self.seconds += time.perf_counter() - started
        if len(self.steps) == self.args.steps:
            self._finish()

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        self.done = True
        for handle in self._handles:
            handle.remove()
        for owner, name, original in self._patches:
            setattr(owner, name, original)
        rank = self._save()
        if rank == 0:
            print_line(self._summary())
        if self.args.afterwards == "stop":
            raise Stop(0)

    def _save(self) -> int:
        command = [self.args.script, *self.args.arguments]
        metadata = environment(command, self._device, self.names.tied, self.steps)
        rank, world_size = metadata["rank"], metadata["world_size"]
        path = self.args.output_dir / f"rank-{rank}.pt"
        with write_then_rename(path) as temporary:
            torch.save({"metadata": metadata, "steps": self.steps}, temporary)
            _wait_for_all(world_size, self.args.output_dir.name)
        return rank

    def _summary(self) -> str:
        seen = {entry["name"] for entry in self.steps[0]["activations"]}
        known = {name or "(model)" for module, name in self.names.modules.items() if _can_be_called(module)}
        text = (
            f"recorded {len(self.steps)} steps in {self.args.output_dir}; recording took {self.seconds:.1f} s"
        )
        if self.args.activations != "none" and len(seen) < len(known):
            text += f"; {len(known) - len(seen)} of {len(known)} modules were not seen: "
            text += "compiled, or never called"
        return text

    def end_of_script(self) -> None:
        """Complete the records when the script has ended. Raises InputError if there are too few steps."""
        if self.done:
            return
        self._close_if_stepped()
        if self.done:
            return
        raise InputError(
            f"the script ended after {len(self.steps)} of --steps {self.args.steps} optimizer steps: nothing "
            "was recorded; " + ("give fewer steps" if self.steps else "it calls no torch.optim optimizer")
        )


def _in_backward() -> bool:
    # A module that runs in a backward is recomputed: activation checkpointing.
    return torch._C._current_graph_task_id() != -1


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # a ModuleList cannot


def _main_tensor(output: object) -> torch.Tensor | None:
    # The largest tensor of numbers that a module returns, in tuples and dictionaries, too.
    if torch.is_tensor(output):
        return output if output.is_floating_point() and output.dim() else None
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    found = [tensor for tensor in map(_main_tensor, parts) if tensor is not None]
    return max(found, key=torch.Tensor.numel, default=None)


def _number(loss: torch.Tensor) -> float:
    return float(loss.to_local() if hasattr(loss, "to_local") else loss)


def _describe_optimizer(optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> dict:
    # Its class, and of each group the settings at this step and the names of its parameters.
    names = {id(parameter): name for name, parameter in named.items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({**settings, "names": [names[id(parameter)] for parameter in group["params"]]})
    known = (kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    return {"class": next(known, None) or type(optimizer).__name__, "groups": groups, "skipped": False}


def _plain(value: object) -> object:
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, int | float | str | None) else repr(value)


def _wait_for_all(world_size: int, name: str) -> None:
    # Through the store, not a collective. A rank that ends sooner would close connections that others use.
    if world_size == 1 or not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"parity-recorded-{name}", 1) == world_size:
        store.set(f"parity-all-recorded-{name}", "")
    store.wait([f"parity-all-recorded-{name}"])


# ---------------------------------------------------------------- the command


def parse_arguments() -> argparse.Namespace:
    """Return the options; what follows the script's name is the script's own."""
    parser = make_parser(__doc__)
    option = parser.add_argument
    option("--output-dir", type=Path, required=True, help="where rank-<rank>.pt is written")
    option("--steps", type=int, default=3, help="optimizer steps to record (default: 3)")
    option(
        "--activations",
        default="*",
        metavar="PATTERN",
        help="which modules, such as 'layers.0.*' (default: all), or none",
    )
    option(
        "--full",
        action="append",
        default=[],
        metavar="NAME",
        help="record this parameter whole, too; may be repeated, a pattern, or all",
    )
    option(
        "--afterwards",
        choices=("stop", "continue"),
        default="stop",
        help="what the script does when the steps are recorded (default: stop)",
    )
    option("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as of python -m")
    option("script", metavar="SCRIPT")
    option("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    if args.steps < 1:
        raise InputError(f"--steps is {args.steps}; record at least one step")
    if not args.module and not Path(args.script).is_file():
        raise InputError(f"there is no script {args.script}; for a module give -m")
    return args


def clear_output_dir(directory: Path) -> None:
    """Make the directory, and remove this rank's file of an earlier run; rank 0 also those of more ranks.

    Raises InputError if the directory cannot be written.
    """
    rank, world_size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("rank-*.pt"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and (int(number) == rank or (rank == 0 and int(number) >= world_size)):
                path.unlink()
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(f"--output-dir {directory} cannot be written: {error.strerror}") from None


def run_script(args: argparse.Namespace) -> None:
    """Run the script as python would: as __main__, with its arguments, its folder first on the path."""
    sys.argv = [args.script, *args.arguments]
    if args.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(args.script).resolve().parent)
        runpy.run_path(args.script, run_name="__main__")


def main() -> None:
    """Record the script. What it raises goes on to Python, without the frames of this file."""
    try:
        args = parse_arguments()
        clear_output_dir(args.output_dir)
        args.output_dir = args.output_dir.resolve()  # the script may change the working directory
        recorder = Recorder(args)
        try:
            run_script(args)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        recorder.end_of_script()
    except InputError as error:
        print_line(f"error: {error}", sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
