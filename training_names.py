"""Names of modules, parameters and buffers, the same with and without wrappers; a step by these names.

And what is recorded of an optimizer, and the tensors in what a module takes and returns.
"""

import fnmatch
import gc
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from training_common import InputError, torch_class
from training_records import without_wrappers
from training_sketches import local_shard

PARAMETRIZED = re.compile(r"\bparametrizations\.(\w+)\.original\d*$")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
AROUND_A_MODEL = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


def clean(name: str) -> str:
    """Return the name of a module or parameter without what wrappers inside a model add to it."""
    return PARAMETRIZED.sub(r"\1", without_wrappers(name)).rstrip(".")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile, which has the names of a run without them."""
    while type(model).__name__ in AROUND_A_MODEL:
        model = next(model.children())
    return model


class Names:
    """The names of modules, parameters and buffers of the models that are trained.

    A model is a module that is no part of another and holds a parameter of an optimizer. With several
    models a name begins with the model's class. That there are several may turn out only when another
    optimizer steps: names are made when all steps are recorded.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self._modules: dict[nn.Module, tuple[nn.Module, str]] = {}
        self._parameters: dict[int, tuple[nn.Module, str]] = {}  # by id: DTensors cannot be keys
        self._others: dict[int, str] = {}  # parameters of no module
        self._kept: dict[int, torch.Tensor] = {}  # so that no id is used again

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for the models of an optimizer's parameters among all live modules, if one has no name yet."""
        trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if trained.keys() <= self._parameters.keys() | self._others.keys():
            return
        self._kept |= trained
        # By type: isinstance would ask weak references whose object is gone.
        live = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        parts = {id(child) for module in live for child in module.children()}
        place = {key: number for number, key in enumerate(trained)}
        found = []
        for top in live:
            if id(top) not in parts and top not in self.models:
                places = [place[id(p)] for p in top.parameters() if id(p) in place]
                found += [(min(places), top)] if places else []
        found = [top for _, top in sorted(found, key=lambda pair: pair[0])]
        if any(type(m).__name__ == "FullyShardedDataParallel" for top in found for m in top.modules()):
            raise InputError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no "
                "names or shapes to compare; use fully_shard (FSDP2)"
            )
        for number, top in enumerate(found):
            if not self._is_inside(top, found[:number], found[number + 1 :]):
                self.models.append(top)
        for model in self.models:
            self._look_at(model)
        kind = f"{type(optimizer).__name__}{len(self._others) or ''}"
        for number, key in enumerate(trained):
            if key not in self._parameters:
                self._others.setdefault(key, f"{kind}.{number}")

    @staticmethod
    def _is_inside(model: nn.Module, before: list[nn.Module], after: list[nn.Module]) -> bool:
        # torch.compile(model) beside DDP(model): two modules, neither part of the other, for one model.
        own = {id(parameter) for parameter in model.parameters()}
        size = sum(1 for _ in model.modules())
        for others, least in ((before, size), (after, size + 1)):
            for other in others:
                theirs = {id(parameter) for parameter in other.parameters()}
                if own <= theirs and (own < theirs or sum(1 for _ in other.modules()) >= least):
                    return True
        return False

    def _look_at(self, model: nn.Module) -> None:
        for name, module in unwrap(model).named_modules():
            self._modules.setdefault(module, (model, clean(name)))
        self._modules.setdefault(model, (model, ""))
        for name, parameter in unwrap(model).named_parameters():
            self._kept[id(parameter)] = parameter
            self._parameters.setdefault(id(parameter), (model, clean(name)))

    def _full(self, model: nn.Module, name: str) -> str:
        if len(self.models) == 1:
            return name
        kinds = [type(unwrap(other)).__name__ for other in self.models]
        place = next(i for i, other in enumerate(self.models) if other is model)
        same = kinds[: place + 1].count(kinds[place])
        return f"{kinds[place]}{same if same > 1 else ''}.{name}".rstrip(".")

    def of_module(self, module: nn.Module) -> str | None:
        """Return a module's name, "(model)" for the model itself, None if it belongs to no model."""
        if module not in self._modules:
            return None
        return self._full(*self._modules[module]) or "(model)"

    def of_parameter(self, key: int) -> str:
        """Return the name of the parameter with this id."""
        return self._full(*self._parameters[key]) if key in self._parameters else self._others[key]

    def knows(self, key: int) -> bool:
        """Say whether a parameter with this id has a name."""
        return key in self._parameters

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters of the models, also those that no optimizer has."""
        # Those that were found: FSDP puts others in their place while it has gathered them.
        return [self._kept[key] for key in self._parameters]

    def device(self) -> str:
        """Return the type of the device that has the parameters."""
        return next((parameter.device.type for parameter in self.parameters()), "cpu")

    def modules(self) -> set[str]:
        """Return the names of all modules that can be called."""
        # A ModuleList cannot.
        return {self.of_module(m) for m in self._modules if type(m).forward is not nn.Module.forward}

    def buffers(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Return all buffers, by the module that has them and their name in it."""
        return {
            (module, name): buffer
            for model in self.models
            for module in unwrap(model).modules()
            for name, buffer in module.named_buffers(recurse=False)
            if not is_lazy(buffer)
        }

    def of_tensor(self, module: nn.Module, name: str) -> str | None:
        """Return the name of a module's own buffer or parameter, None if the module belongs to no model."""
        if module not in self._modules:
            return None
        model, prefix = self._modules[module]
        return self._full(model, clean(f"{prefix}.{name}".lstrip(".")))

    def tied(self) -> dict[str, list[str]]:
        """Return the other names of parameters that have several."""
        found: dict[str, list[str]] = {}
        for model in self.models:
            for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
                if id(parameter) in self._parameters:
                    first, name = self.of_parameter(id(parameter)), self._full(model, clean(name))
                    if name != first and name not in found.get(first, ()):
                        found.setdefault(first, []).append(name)
        return found

    def dropout(self) -> dict[str, float]:
        """Return the modules that drop some of their values at random, and which share."""
        shares = {
            self.of_module(module): module.p if isinstance(module, DROPOUTS) else module.dropout
            for module in self._modules
            if isinstance(module, (*DROPOUTS, nn.MultiheadAttention, nn.RNNBase))
        }
        return {name: float(share) for name, share in shares.items() if share}

    def _fsdp_groups(self) -> list:
        # FSDP2's groups of parameters. The attributes are torch's own: without them nothing is known.
        states = [
            module._get_fsdp_state()
            for model in self.models
            for module in model.modules()
            if hasattr(module, "_get_fsdp_state")
        ]
        return [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]

    def unsharded_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that FSDP2 accumulates without reducing them."""
        parts = [part for group in self._fsdp_groups() for part in group.fsdp_params]
        whole = [getattr(part, "_unsharded_param", None) for part in parts]
        gradients = [parameter.grad for parameter in whole if parameter is not None]
        gradients += [getattr(part, "unsharded_accumulated_grad", None) for part in parts]
        return [
            gradient for gradient in gradients if gradient is not None and gradient.untyped_storage().size()
        ]

    def reduced_in(self) -> dict[str, str]:
        """Return the type in which FSDP2 reduces the gradient of each parameter that it shards."""
        found = {}
        for group in self._fsdp_groups():
            for part in group.fsdp_params:
                dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or part.orig_dtype
                if self.knows(id(part.sharded_param)):
                    found[self.of_parameter(id(part.sharded_param))] = str(dtype).removeprefix("torch.")
        return found


class Step:
    """What is recorded of one step. Parameters are known by their id, modules and buffers by the module."""

    def __init__(self) -> None:
        self.start: dict[tuple[nn.Module, str], dict] = {}  # buffers before the step
        self.calls: list[tuple[nn.Module, torch.Tensor | None]] = []
        self.activations: list[tuple[nn.Module, int, int, dict]] = []
        self.losses: list[torch.Tensor] = []
        self.labels: list[int] = []
        self.held: list[int] = []
        self.clips: list[dict] = []
        self.ready: dict[tuple[nn.Module, str], int] = {}  # the parameter's place in its module, and its id
        self.gradients: dict[int, dict] = {}
        self.before: dict[int, dict] = {}
        self.parameters: dict[int, dict] = {}
        self.buffers: dict[tuple[nn.Module, str], dict] = {}
        self.optimizers: list[dict] = []
        self.stepped: list[torch.optim.Optimizer] = []

    def named(self, names: Names, wanted: str) -> dict:
        """Return it as it is saved. wanted: a pattern of the names of modules."""
        # Losses and transforms of the input are modules, too, but no part of a model.
        numbers = [i for i, (module, _) in enumerate(self.calls) if names.of_module(module) is not None]
        number = {old: new for new, old in enumerate(numbers)}
        activations = {}
        for module, call, occurrence, described in self.activations:
            name = names.of_module(module)
            if name is None or ".parametrizations." in f".{name}":  # such as SimpleFSDP's gathers
                continue
            if call in number and fnmatch.fnmatchcase(name, wanted):
                # A wrapper has the name of what it wraps, and ends after it.
                key = (name, number[call], occurrence)
                entry = {"name": name, "call": number[call], "occurrence": occurrence, **described}
                activations.setdefault(key, entry)
        return {
            "buffers_before": _named_buffers(names, self.start),
            "calls": [self.calls[i][1] for i in numbers],
            "activations": list(activations.values()),
            "losses": [_number(loss) for loss in self.losses],
            "labels": self.labels,
            "held": self.held,
            "clips": [self._clip(**clip) for clip in self.clips],
            "ready": self._ready(names),
            "gradients": {names.of_parameter(key): entry for key, entry in self.gradients.items()},
            "before": {names.of_parameter(key): entry for key, entry in self.before.items()},
            "parameters": {names.of_parameter(key): entry for key, entry in self.parameters.items()},
            "buffers": _named_buffers(names, self.buffers),
            "optimizers": [_named_optimizer(names, optimizer) for optimizer in self.optimizers],
        }

    def _clip(self, max_norm: float, norm: float | None, stepped: int) -> dict:
        # After the step: when all optimizers of the step had stepped.
        after = 0 < len(self.stepped) <= stepped
        return {"max_norm": max_norm, "norm": norm, "after_step": after}

    def _ready(self, names: Names) -> list[str]:
        # Names of parameters in the order in which their gradients were complete.
        found = [
            names.of_parameter(key) if names.knows(key) else names.of_tensor(*place)
            for place, key in self.ready.items()
        ]
        return [name for name in dict.fromkeys(found) if name is not None]


def _named_buffers(names: Names, buffers: dict) -> dict:
    named = {names.of_tensor(*key): entry for key, entry in buffers.items()}
    return {name: entry for name, entry in named.items() if name is not None}


def _named_optimizer(names: Names, optimizer: dict) -> dict:
    groups = [
        {**group, "names": list(map(names.of_parameter, group["names"]))} for group in optimizer["groups"]
    ]
    return {**optimizer, "groups": groups}


def _number(loss: torch.Tensor) -> float:
    return float(local_shard(loss))


# ---------------------------------------------------------------- what torch holds tensors in


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in tuples, lists and dictionaries."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def main_tensor(output: object) -> torch.Tensor | None:
    """Return the largest tensor of numbers that a module returns."""
    if hasattr(output, "__dataclass_fields__"):
        output = vars(output)
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim()]
    return max(found, key=torch.Tensor.numel, default=None)


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer has."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def describe_optimizer(optimizer: torch.optim.Optimizer, skipped: bool) -> dict:
    """Return its class, and of each group the settings at this step and the ids of its parameters."""
    groups = []
    for group in optimizer.param_groups:
        settings = {key: plain(value) for key, value in group.items() if key != "params"}
        groups.append({**settings, "names": [id(parameter) for parameter in group["params"]]})
    return {"class": torch_class(optimizer), "groups": groups, "skipped": skipped}


def plain(value: object) -> object:
    """Return a setting as a rank file can hold it."""
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, int | float | str | None):
        return value
    return getattr(value, "__qualname__", type(value).__name__)  # not its address, which is another each time
