"""Measure the memory of one rank's training step, for titan/predict_memory.py, which starts this script.

    TITAN_DEVICE=cpu python titan/measure_memory.py LAYOUT OUTPUT

One process plays rank 0 of a layout. Its collectives go nowhere (the fake process group), and its tensors
have no memory (FakeTensorMode). It builds the recipe, parallelizes it, compiles it and trains two steps. In
the third step it notes every storage that is made and freed.

LAYOUT is a JSON object, for instance
    {"model": "llama3_8b", "plan": "simplefsdp", "ranks": 64, "tp": 4, "replicate": 1,
     "checkpointing": "full", "sequence": null, "batch": null, "loss": "bracket", "dtype": "bfloat16",
     "layers": [2, 4]}
null is the recipe's own value; the layers are how many to run, null for all. OUTPUT is a file for a JSON
list: what measure() returns.
"""

import argparse
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from titan import cpu_adapter  # noqa: E402

cpu_adapter.adapt()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.experiments.graph_trainer import simple_fsdp as upstream_simple_fsdp  # noqa: E402
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig  # noqa: E402
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402

from titan import deepseek_v3, llama3  # noqa: E402
from titan.simple_fsdp import SelectiveWithCpuAttention  # noqa: E402
from training_common import make_parser, write_then_rename  # noqa: E402

RECIPES = {
    "llama3_8b": llama3.simple_fsdp_llama3_8b,
    "llama3_70b": llama3.simple_fsdp_llama3_70b_fullac,
    "llama3_debugmodel": llama3.simple_fsdp_llama3_debugmodel,
    "deepseek_v3_16b": deepseek_v3.simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16,
    "deepseek_v3_debugmodel": deepseek_v3.simple_fsdp_deepseek_v3_debugmodel_tp2,
}
FSDP2 = {
    "llama3": parallelize_llama,
    "deepseek": parallelize_deepseekv3,
}  # by the model's family
CHECKPOINTING = {"full": FullAC.Config(), "selective": SelectiveAC.Config(), "none": None}
BOUNDS = ("lower", "upper")
LABELS = 12  # the largest are kept


# ---- DeepSeek's attention, as one operator ----
#
# Its values have another width than its queries and keys. No fused kernel of the CPU takes that: the CPU
# would run matmuls and a softmax of sequence x sequence, which no accelerator does. The operator here only
# allocates what flash attention allocates.


def allocate_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sums of flash attention, without values; q, k, v are [B, N, L, H]."""
    batch, heads, length, _ = q.shape
    output = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return output, q.new_empty(batch, heads, length, dtype=torch.float32)


def allocate_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, without values."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def keep_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    """Keep what flash attention keeps for its backward."""
    ctx.save_for_backward(*inputs, *output)


def run_backward(ctx, gradient: torch.Tensor, gradient_of_log_sums: torch.Tensor) -> tuple:
    """Run the operator of the backward; nothing depends on the log-sums."""
    return attention_backward(gradient, *ctx.saved_tensors)


attention = torch.library.custom_op("titan_memory::attention", allocate_attention, mutates_args=())
attention.register_fake(allocate_attention)
attention_backward = torch.library.custom_op(
    "titan_memory::attention_backward", allocate_attention_backward, mutates_args=()
)
attention_backward.register_fake(allocate_attention_backward)
attention.register_autograd(run_backward, setup_context=keep_for_backward)


def forward(self, q_BLNH, k_BLNH, v_BLNH, **kwargs):  # noqa: N803, sharding goes by these names
    """Take the place of ScaledDotProductAttention.forward."""
    output, _ = attention(q_BLNH.transpose(1, 2), k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2))
    return output.transpose(1, 2)


def make_attention_one_operator() -> None:
    """Replace TorchTitan's attention by the operator, whose output selective checkpointing keeps."""
    ScaledDotProductAttention.forward = forward
    SelectiveWithCpuAttention.attention_ops.add(torch.ops.titan_memory.attention.default)


# ---- The model of a layout ----


def make_config(layout: dict) -> GraphTrainer.Config:
    """Return the recipe's configuration, changed as the layout says."""
    config = RECIPES[layout["model"]]()
    config.activation_checkpoint = CHECKPOINTING[layout["checkpointing"]]
    config.compile.components = ["model", "loss"]
    config.compile.backend = "aot_eager"
    if layout["plan"] != "simplefsdp":
        family = layout["model"].partition("_")[0]
        config.model_spec = replace(config.model_spec, parallelize_fn=FSDP2[family])
        compiled = layout["plan"] == "fsdp2-compiled"  # each layer by itself
        config.compile = GraphTrainerCompileConfig(
            enable=compiled, mode=None, components=["model", "loss"], backend="aot_eager"
        )
    config.training.mixed_precision_param = layout["dtype"]
    config.training.seq_len = layout["sequence"] or config.training.seq_len
    config.training.local_batch_size = layout["batch"] or config.training.local_batch_size
    config.parallelism.tensor_parallel_degree = layout["tp"]
    config.parallelism.data_parallel_replicate_degree = layout["replicate"]
    if layout["loss"] == "chunked":
        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    return config


def build_model(config: GraphTrainer.Config, ranks: int) -> nn.Module:
    """Return the model of a configuration, on meta, parallelized for a fake job of some ranks."""
    torch._dynamo.reset()
    upstream_simple_fsdp._wrap_class_cache.clear()  # it keeps the first mesh for all later models
    dims = ParallelDims.from_config(config.parallelism, ranks)
    dims.build_mesh()  # before there is a fake mode
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    return model.train()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- What is alive, and when ----


@dataclass
class Allocation:
    """One storage: its size in bytes, and what it holds."""

    size: int
    label: str


@dataclass
class Event:
    """An allocation was made (sign 1) or freed (sign -1) in a phase."""

    phase: str
    allocation: Allocation
    sign: int


class LiveBytes(TorchDispatchMode):
    """Notes every storage: when it is made and freed, by which operator, and in which phase."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: Dynamo refuses to run compiled code under any other mode."""
        return True

    def __init__(self):
        super().__init__()
        self.phase = "static"
        self.alive: dict[int, Allocation] = {}  # by the address of the storage
        self.events: list[Event] = []

    def see(self, tensor: torch.Tensor, label: str) -> None:
        """Note the tensor's storage, unless it is known, until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.note(storage, storage.nbytes(), label)

    def note(self, storage: torch.UntypedStorage, size: int, label: str) -> None:
        """Note a storage that has been made."""
        allocation = self.alive[storage._cdata] = Allocation(size, label)
        self.events.append(Event(self.phase, allocation, 1))
        weakref.finalize(storage, self.free, storage._cdata)

    @contextmanager
    def follow_resizes(self) -> Iterator[None]:
        """Note storages that are resized: FSDP2 keeps unsharded parameters, with empty storages."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self.free(storage._cdata)
            if size:
                self.note(storage, size, "unsharded parameters")
            return resize(storage, size)

        torch.UntypedStorage.resize_ = noted
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def free(self, address: int) -> None:
        """Note that a storage is freed."""
        if address in self.alive:
            self.events.append(Event(self.phase, self.alive.pop(address), -1))

    def rename(self, tensor: torch.Tensor, label: str) -> None:
        """Give the tensor's storage another label, if it is known."""
        allocation = self.alive.get(tensor.untyped_storage()._cdata)
        if allocation is not None:
            allocation.label = label

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operator, and note the storages of its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on local tensors first
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as the real one does; the fake one makes a new tensor
        result = function(*args, **(kwargs or {}))
        operator = function.__name__.partition(".")[0]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                shape = "x".join(map(str, tensor.shape))
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.see(tensor, f"{operator} {shape} {dtype}")
        return result

    def peaks(self, first: int, last: int) -> dict[str, dict]:
        """Return for each phase its peak ("bytes"), and the largest of what was alive then ("labels").

        The backward is two phases, which may overlap: its first and its last so many allocations.
        """
        spans: dict[str, tuple[int, int]] = {}  # of events
        for index, event in enumerate(self.events):
            spans[event.phase] = (spans.get(event.phase, (index, 0))[0], index + 1)
        begin, end = spans["backward"]
        allocations = [index for index in range(begin, end) if self.events[index].sign > 0]
        ends = {"start of backward": (begin, allocations[first - 1] + 1)}
        ends["end of backward"] = (allocations[-last], end)

        sizes = list(accumulate(event.sign * event.allocation.size for event in self.events))
        peaks = {}
        for phase, span in spans.items():
            for part, (begin, end) in (ends if phase == "backward" else {phase: span}).items():
                # What is left of the phase before counts, too.
                peak = max(range(max(0, begin - 1), end), key=sizes.__getitem__)
                peaks[part] = {"bytes": sizes[peak], "labels": self.largest(self.events[: peak + 1])}
        return peaks

    def largest(self, events: list[Event]) -> dict[str, int]:
        """Return the bytes that are alive after the events, by label, the largest first."""
        sizes: dict[str, int] = {}
        for event in events:
            label = event.allocation.label
            sizes[label] = sizes.get(label, 0) + event.sign * event.allocation.size
        alive = sorted(((size, label) for label, size in sizes.items() if size), reverse=True)
        return {label: size for size, label in alive[:LABELS]}


def shared_ends(runs: list[LiveBytes]) -> tuple[int, int]:
    """Return how many allocations runs with few and many layers share at the start and the end of backward.

    The backward begins with the last layer, when all activations are there, and ends with the first ones,
    when all gradients are. Which is more depends on the number of layers: each end is a line of its own. Both
    share the layers of one kind. The end leaves out half of them: in the shorter run the first of these still
    has what the loss left.

    Raises:
        ValueError: not all of the shorter run is at one of its ends: layers between are of another kind.
    """

    def allocated(run: LiveBytes) -> list[str]:
        return [
            event.allocation.label for event in run.events if event.phase == "backward" and event.sign > 0
        ]

    def shared(one: list[str], other: list[str]) -> int:
        differ = (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        return next(differ, min(len(one), len(other)))

    few, many = allocated(runs[0]), allocated(runs[-1])
    first, last = shared(few, many), shared(few[::-1], many[::-1])
    twice = first + last - len(few)
    if twice < 0:
        raise ValueError(
            f"of {len(few)} allocations in backward {first} and {last} are alike with more layers: no line "
            "can be drawn; --exact runs all layers"
        )
    return first, last - twice // 2


# ---- A training step ----


class FusedLoss(torch.autograd.Function):
    """A loss with the memory of one fused kernel, which keeps float32 log-probabilities; without values."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor) -> torch.Tensor:
        ctx.dtype = logits.dtype
        ctx.save_for_backward(torch.empty_like(logits, dtype=torch.float32))
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (log_probabilities,) = ctx.saved_tensors
        return torch.empty_like(log_probabilities, dtype=ctx.dtype)


def is_loss_fused(layout: dict, bound: str) -> bool:
    """Return whether the loss is one fused kernel in a bound; without a compiler nothing fuses it."""
    if layout["loss"] == "bracket":
        return bound == "lower" and layout["plan"] != "fsdp2"
    return layout["loss"] == "fused"


class Job:
    """A layout's training job in one of the bounds, on fake or real tensors."""

    def __init__(self, layout: dict, layers: int | None):
        """Build the model with its first layers; None: with all."""
        if layout["model"].startswith("deepseek_v3"):
            make_attention_one_operator()
        self.layout = layout
        self.config = make_config(layout)
        model_config = self.config.model_spec.model
        self.total_layers = len(model_config.layers)
        model_config.layers = model_config.layers[:layers]
        self.model = build_model(self.config, layout["ranks"])
        self.loss = self.config.loss.build(compile_config=self.config.compile)
        if layout["loss"] == "chunked":
            self.loss.set_lm_head(self.model.lm_head)
            self.model._skip_lm_head = True

    def allocate(self) -> None:
        """Make the parameters."""
        self.model.to_empty(device="cpu")

    def choose(self, bound: str) -> None:
        """Take the loss and the optimizer of a bound; the optimizer's state comes with its first step."""
        self.fused_loss = is_loss_fused(self.layout, bound)
        fused = bound == "lower"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused, foreach=not fused)

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients."""
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def step(self, memory: LiveBytes | None = None) -> None:
        """Train a step; gradients stay. memory learns of the phases, and which tensors are gradients."""
        memory = memory or LiveBytes()  # one that notes nothing: it is not entered
        training = self.config.training
        memory.phase = "forward"
        tokens = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.long)
        labels, positions = torch.zeros_like(tokens), tokens.to(torch.int32)
        output = self.model(tokens, positions=positions)
        memory.phase = "loss"
        if self.fused_loss:
            value = FusedLoss.apply(local(output))
        else:
            value, _ = self.loss(output, labels, torch.tensor(1))
        del output
        memory.phase = "backward"
        value.backward()
        for gradient in self.gradients():
            memory.rename(gradient, "gradients")
        memory.phase = "optimizer"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def trace(self, bound: str) -> LiveBytes:
        """Return what a step allocates; the phase "static" is parameters, buffers and optimizer state."""
        self.choose(bound)
        for _ in range(2):  # compile, make the optimizer's state, find all placements
            self.step()
        memory = LiveBytes()
        for parameter in self.model.parameters():
            memory.see(local(parameter), "parameters")
        for buffer in self.model.buffers():
            memory.see(local(buffer), "buffers")
        for state in self.optimizer.state.values():
            for name, value in state.items():
                memory.see(local(value), f"optimizer state {name}")
        memory.phase = "forward"
        for gradient in self.gradients():
            memory.see(gradient, "gradients")
        with memory, memory.follow_resizes():
            self.step(memory)
        return memory


def measure(layout: dict) -> list[dict]:
    """Return for each number of layers the peaks by phase of both bounds, and what the recipe has.

    The keys are "lower" and "upper"; "layers", how many the recipe has; "sequence" in tokens; "batch" in
    sequences of a rank.
    """
    results, runs = [], {bound: [] for bound in BOUNDS}
    for layers in layout["layers"]:
        job = Job(layout, layers)
        # Fake tensors of the CPU: on meta, attention would take another path.
        with FakeTensorMode(allow_non_fake_inputs=True):
            job.allocate()
            for bound in BOUNDS:
                runs[bound].append(job.trace(bound))
        training = job.config.training
        results.append({"layers": job.total_layers, "sequence": training.seq_len})
        results[-1]["batch"] = training.local_batch_size
    for bound in BOUNDS:
        ends = shared_ends(runs[bound])
        for result, run in zip(results, runs[bound], strict=True):
            result[bound] = run.peaks(*ends)
    return results


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = make_parser(__doc__)
    parser.add_argument("layout", type=json.loads, help="JSON object, see above")
    parser.add_argument("output", type=Path, help="file for the JSON list of results")
    return parser.parse_args()


def main() -> None:
    """Measure the layout with each of its numbers of layers."""
    args = parse_args()
    dist_utils.init_fake_mode(args.layout["ranks"])
    results = measure(args.layout)
    with write_then_rename(args.output) as new:
        new.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
