"""Will it fit? Peak memory of a rank of a SimpleFSDP recipe, predicted on a laptop in a minute or two.

    python titan/predict_memory.py                                     the tutorial's table, predicted
    python titan/predict_memory.py --model llama3_8b --tp 4 --checkpointing full
    python titan/predict_memory.py --model llama3_70b --tp 8 --batch 1 --memory 24

One process plays one rank of 64: its collectives go nowhere (the fake process group), its tensors have
no memory (FakeTensorMode). It builds the recipe of titan/llama3.py or titan/deepseek_v3.py, parallelizes,
compiles and trains a step, and in the next one notes every storage that is made and freed. Two and four
layers are run that way; layers are alike, and the rest is a straight line. --exact runs all layers.

The prediction is a bracket. What makes it wide is the loss, which a compiler may or may not fuse: one
float32 copy of the logits of 8,192 tokens is 3.91 GiB. Gradients are there from the start, as in every
microbatch of an accumulated step but the first.

    lower   loss fused into one kernel that keeps float32 log-probabilities; optimizer fused
    upper   loss and optimizer as the operators that PyTorch runs, one after the other

Not modelled: scratch memory of the compiler's kernels, bucketing and prefetching of all-gathers, buffers
of the collectives, fragmentation, imbalance of the experts, expert parallelism, the runtime itself.

Exit status: 0 the layout fits, or the table was printed; 1 it does not fit or is too close to call;
2 invalid input.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
GIB = 2**30
LAYERS = (2, 4)  # from which the line is drawn
MODELS = {  # recipe module, recipe, its tensor-parallel degree and activation checkpointing
    "llama3_8b": ("llama3", "simple_fsdp_llama3_8b", 1, "selective"),
    "llama3_70b": ("llama3", "simple_fsdp_llama3_70b_fullac", 8, "full"),
    "llama3_debugmodel": ("llama3", "simple_fsdp_llama3_debugmodel", 1, "selective"),
    "deepseek_v3_16b": ("deepseek_v3", "simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16", 4, "selective"),
    "deepseek_v3_debugmodel": ("deepseek_v3", "simple_fsdp_deepseek_v3_debugmodel_tp2", 2, "selective"),
}
# model, TP degree, checkpointing: GiB that the tutorial measured of 24 on a trn2.48xlarge (by AWS, not by
# us); "OOM": out of memory; None: not published.
TABLE = {
    ("llama3_8b", 1, "selective"): "OOM",
    ("llama3_8b", 1, "full"): 11.91,
    ("llama3_8b", 4, "selective"): 8.21,
    ("llama3_8b", 4, "full"): 4.71,
    ("deepseek_v3_16b", 4, "selective"): None,
    ("deepseek_v3_16b", 4, "full"): None,
}


# ---- In a process of its own, which imports torch: a layout is built and measured. ----


def make_attention_one_operator() -> None:
    """Replace DeepSeek's attention by one operator that has the memory of flash attention.

    Its values have another width than its queries and keys, which no fused kernel of the CPU takes:
    there it would be matmuls and a softmax of sequence x sequence, as on no accelerator.
    """
    import torch
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from titan.simple_fsdp import SelectiveWithCpuAttention

    if hasattr(torch.ops.titan_memory, "attention"):
        return

    def outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, length, _ = q.shape
        output = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        return output, q.new_empty(batch, heads, length, dtype=torch.float32)

    @torch.library.custom_op("titan_memory::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs(q, v)

    @torch.library.custom_op("titan_memory::attention_backward", mutates_args=())
    def backward(
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    attention.register_fake(lambda q, k, v: outputs(q, v))
    backward.register_fake(
        lambda gradient, q, k, v, output, log_sums: tuple(map(torch.empty_like, (q, k, v)))
    )
    attention.register_autograd(
        lambda ctx, gradient, _: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )

    def forward(self, q_BLNH, k_BLNH, v_BLNH, **kwargs):  # noqa: N803, sharding goes by these names
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        return attention(q, k, v)[0].transpose(1, 2)

    ScaledDotProductAttention.forward = forward
    save_ops = SelectiveWithCpuAttention.get_save_ops
    SelectiveWithCpuAttention.get_save_ops = lambda self: (
        save_ops(self) | {torch.ops.titan_memory.attention.default}
    )


def build(layout: dict, layers: int | None):
    """Return a layout's model with its first layers (None: all), its configuration, and how many it has."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from titan import deepseek_v3, llama3

    module, recipe, _, _ = MODELS[layout["model"]]
    if module == "deepseek_v3":
        make_attention_one_operator()
    config = getattr({"llama3": llama3, "deepseek_v3": deepseek_v3}[module], recipe)()
    policies = {"full": FullAC.Config(), "selective": SelectiveAC.Config(), "none": None}
    config.activation_checkpoint = policies[layout["checkpointing"]]
    config.compile.components = ["model", "loss"]
    config.compile.backend = "aot_eager"
    config.training.mixed_precision_param = layout["dtype"]
    config.training.seq_len = layout["sequence"] or config.training.seq_len
    config.training.local_batch_size = layout["batch"] or config.training.local_batch_size
    config.parallelism.tensor_parallel_degree = layout["tp"]
    if layout["loss"] == "chunked":
        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    total = len(config.model_spec.model.layers)
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return build_model(config, layout["ranks"]), config, total


def build_model(config, ranks: int):
    """Return the model of a configuration, on meta, parallelized for a fake job of some ranks."""
    import torch
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.experiments.graph_trainer import simple_fsdp as upstream_simple_fsdp

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


def live_bytes():
    """Return a dispatch mode that notes every storage: when it is made and freed, by what, in which phase."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class LiveBytes(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls) -> bool:
            return True  # or Dynamo refuses to run compiled code under it

        def __init__(self):
            super().__init__()
            self.phase = "static"
            self.number_of = {}  # live storage: number of its allocation
            self.allocations = []  # [bytes, label]
            self.events = []  # phase, number of the allocation, +1 or -1

        def see(self, tensor: torch.Tensor, label: str) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.number_of:
                self.number_of[key] = len(self.allocations)
                self.events.append((self.phase, len(self.allocations), 1))
                self.allocations.append([storage.nbytes(), label])
                weakref.finalize(storage, self.free, key)

        def free(self, key: int) -> None:
            if (number := self.number_of.pop(key, None)) is not None:
                self.events.append((self.phase, number, -1))

        def rename(self, tensor: torch.Tensor, label: str) -> None:
            if (number := self.number_of.get(tensor.untyped_storage()._cdata)) is not None:
                self.allocations[number][1] = label

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it becomes operators on local tensors first
            if function is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]  # as the real one does; the fake one makes a new tensor
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    shape = "x".join(map(str, tensor.shape))
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self.see(tensor, f"{function.__name__.partition('.')[0]} {shape} {dtype}")
            return result

        def peaks(self) -> dict[str, dict]:
            """Return for each phase its peak, in bytes, and what was live then, by label."""
            live, best, at = 0, {}, {}
            for index, (phase, number, sign) in enumerate(self.events):
                if phase not in best:
                    best[phase], at[phase] = live, index - 1
                live += sign * self.allocations[number][0]
                if live > best[phase]:
                    best[phase], at[phase] = live, index
            return {phase: {"bytes": best[phase], "labels": self.labels(at[phase])} for phase in best}

        def labels(self, last: int) -> dict[str, int]:
            live = set()
            for _, number, sign in self.events[: last + 1]:
                (live.add if sign > 0 else live.discard)(number)
            sums: dict[str, int] = {}
            for size, label in (self.allocations[number] for number in live):
                sums[label] = sums.get(label, 0) + size
            return dict(sorted(sums.items(), key=lambda item: -item[1])[:12])

    return LiveBytes()


def fused_loss():
    """Return a loss whose memory is that of one fused kernel: a function of the local logits."""
    import torch

    class FusedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.dtype = logits.dtype
            ctx.save_for_backward(torch.empty_like(logits, dtype=torch.float32))
            return logits.new_zeros(())

        @staticmethod
        def backward(ctx, gradient):
            return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype)

    return FusedLoss.apply


def bounds(loss: str) -> dict[str, dict[str, bool]]:
    """Return for each bound whether loss and optimizer are fused; see the top."""
    return {
        bound: {"fused_loss": loss == "fused" or (loss == "bracket" and fused), "fused_optimizer": fused}
        for bound, fused in (("lower", True), ("upper", False))
    }


class Job:
    """A layout's training job, on fake or real tensors, of which single steps can be run."""

    def __init__(self, layout: dict, layers: int | None):
        self.model, self.config, self.total_layers = build(layout, layers)
        self.loss, self.fused = self.config.loss.build(compile_config=self.config.compile), fused_loss()
        if layout["loss"] == "chunked":
            self.loss.set_lm_head(self.model.lm_head)
            self.model._skip_lm_head = True

    def allocate(self) -> None:
        """Make the parameters."""
        self.model.to_empty(device="cpu")

    def make_optimizer(self, fused: bool) -> None:
        """Make the optimizer; its state comes with its first step."""
        import torch

        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)

    def local(self, tensor):
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gradients(self) -> list:
        return [self.local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def step(self, fused_loss: bool, memory=None) -> None:
        """Train a step, gradients stay. memory is told the phases, and which tensors are gradients."""
        import torch

        def phase(name: str) -> None:
            if memory:
                memory.phase = name

        phase("forward")
        tokens = torch.zeros(
            self.config.training.local_batch_size, self.config.training.seq_len, dtype=torch.long
        )
        labels, positions = torch.zeros_like(tokens), tokens.to(torch.int32)
        output = self.model(tokens, positions=positions)
        phase("loss")
        if fused_loss:
            value = self.fused(self.local(output))
        else:
            value, _ = self.loss(output, labels, torch.tensor(1))
        del output
        phase("backward")
        value.backward()
        if memory:
            for gradient in self.gradients():
                memory.rename(gradient, "gradients")
        phase("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def measure(self, fused_loss: bool, fused_optimizer: bool) -> dict[str, dict]:
        """Return the peaks of a step by phase; "static" is parameters, buffers and optimizer state."""
        self.make_optimizer(fused_optimizer)
        for _ in range(2):  # compile, make the optimizer's state, find all placements
            self.step(fused_loss)
        memory = live_bytes()
        for parameter in self.model.parameters():
            memory.see(self.local(parameter), "parameters")
        for buffer in self.model.buffers():
            memory.see(self.local(buffer), "buffers")
        for state in self.optimizer.state.values():
            for name, value in state.items():
                memory.see(self.local(value), f"optimizer state {name}")
        memory.phase = "forward"
        for gradient in self.gradients():
            memory.see(gradient, "gradients")
        with memory:
            self.step(fused_loss, memory)
        return memory.peaks()


def start_fake_job(ranks: int) -> None:
    """Make this process rank 0 of a job that nobody else is in, on the CPU."""
    os.environ["TITAN_DEVICE"] = "cpu"
    sys.path.insert(0, str(HERE.parent))
    from titan import cpu_adapter

    cpu_adapter.adapt()

    from torchtitan.distributed import utils as dist_utils

    dist_utils.init_fake_mode(ranks)


def measure(layout: dict, layers: int | None) -> dict:
    """Return "lower" and "upper", the peaks by phase with some layers, and what the recipe has.

    That is "layers", how many there are, "sequence" in tokens, and "batch" in sequences of a rank.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    job = Job(layout, layers)
    # Fake tensors of the CPU: on meta, attention would take another path.
    with FakeTensorMode(allow_non_fake_inputs=True):
        job.allocate()
        peaks = {bound: job.measure(**how) for bound, how in bounds(layout["loss"]).items()}
    training = job.config.training
    sizes = {"layers": job.total_layers, "sequence": training.seq_len, "batch": training.local_batch_size}
    return peaks | sizes


# ---- In the process that the user starts, which does not import torch. ----


class InvalidInput(ValueError):
    """The layout cannot be predicted; str() is one line for people."""


def title(layout: dict) -> str:
    shards = layout["ranks"] // layout["tp"]
    return f"{layout['model']} TP{layout['tp']} x FSDP{shards} {layout['checkpointing']}"


def fingerprint(layout: dict) -> str:
    """Return a name for a prediction that changes with the layout, the recipes and the packages."""
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode())
    for name in ("predict_memory.py", "simple_fsdp.py", "llama3.py", "deepseek_v3.py", "cpu_adapter.py"):
        digest.update((HERE / name).read_bytes())
    for package in ("torch", "torchtitan"):
        digest.update(version(package).encode())
    return digest.hexdigest()[:16]


def run_worker(layout: dict, results: Path) -> list[dict]:
    """Return what measure() tells of a layout for each number of layers, from the cache if it is there.

    Raises:
        InvalidInput: the layout cannot be built; the message is the last line of the error.
    """
    cached = results / f"{fingerprint(layout)}.json"
    try:
        return json.loads(cached.read_text())
    except (FileNotFoundError, ValueError):
        pass  # not predicted yet, or cut
    layers = " and ".join(str(count or "all") for count in layout["layers"])
    print(f"== {title(layout)}: running {layers} layers", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / "predict_memory.py"), "--worker", json.dumps(layout)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results.mkdir(parents=True, exist_ok=True)
    if done.returncode:
        log = cached.with_suffix(".err")
        log.write_text(done.stderr)
        lines = [line for line in done.stderr.splitlines() if re.search(r"\w(Error|Exception): ", line)]
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise InvalidInput(f"{title(layout)}: {reason[:200]}; all of it: {log}")
    new = cached.with_suffix(f".new-{os.getpid()}")
    measured = done.stdout.splitlines()[-1]
    new.write_text(measured)
    new.replace(cached)
    return json.loads(measured)


def line_through(points: list[tuple[int, float]], at: int) -> float:
    """Return the value at a number of layers on the line through the first and last point."""
    (x, y), (x2, y2) = points[0], points[-1]
    return y if x == x2 else y + (y2 - y) * (at - x) / (x2 - x)


def predict(layout: dict, results: Path) -> dict:
    """Return the prediction for a layout, sizes in GiB.

    lower and upper: the bracket; static: parameters, buffers and optimizer state; phases: for each
    bound the peak of each phase; where: for each bound the phase of the peak; largest: what is live in
    the upper bound's peak, by label, of the most layers that were run, with how many there were.
    """
    runs = run_worker(layout, results)
    total = runs[0]["layers"]
    counts = [min(count or total, total) for count in layout["layers"]]

    def at_all_layers(bound: str, phase: str) -> float:
        points = [(n, run[bound][phase]["bytes"] / GIB) for n, run in zip(counts, runs, strict=True)]
        return line_through(points, total)

    phases = {}
    for bound in ("lower", "upper"):
        phases[bound] = {phase: at_all_layers(bound, phase) for phase in runs[0][bound]}
        static = phases[bound].pop("static")
    low, high = sorted(phases, key=lambda bound: max(phases[bound].values()))
    where = {name: max(phases[of], key=phases[of].get) for name, of in (("lower", low), ("upper", high))}
    return {
        "lower": max(phases[low].values()),
        "upper": max(phases[high].values()),
        "static": static,
        "phases": {"lower": phases[low], "upper": phases[high]},
        "where": where,
        "largest": {label: size / GIB for label, size in runs[-1][high][where["upper"]]["labels"].items()},
        "measured_layers": counts[-1],
        **{key: runs[0][key] for key in ("layers", "sequence", "batch")},
    }


def verdict(prediction: dict, memory: float) -> str:
    if prediction["upper"] <= memory:
        return "fits"
    return "does not fit" if prediction["lower"] > memory else "too close to call"


def knobs(layout: dict, prediction: dict) -> list[tuple[str, dict]]:
    """Return what could be changed of a layout to save memory: in words, and the changed layout.

    In the tutorial's order: checkpointing, tensor parallelism, and last what changes the job.
    """
    changes = []
    if layout["checkpointing"] != "full":
        changes.append(("full checkpointing", {"checkpointing": "full"}))
    if layout["ranks"] % (layout["tp"] * 2) == 0:
        changes.append((f"TP{layout['tp'] * 2}", {"tp": layout["tp"] * 2}))
    if layout["loss"] != "chunked":
        changes.append(("chunked loss", {"loss": "chunked"}))
    for what in ("batch", "sequence"):
        if prediction[what] % 2 == 0:
            changes.append((f"{what} {prediction[what] // 2}", {what: prediction[what] // 2}))
    return [(name, layout | change) for name, change in changes]


def predict_or_tell(layout: dict, results: Path) -> dict | str:
    """Return the prediction for a layout, or why there is none."""
    try:
        return predict(layout, results)
    except InvalidInput as error:
        return str(error)


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Predict the peak memory of a SimpleFSDP recipe's rank.")
    parser.add_argument("--model", choices=list(MODELS), help="default: the tutorial's table")
    parser.add_argument("--ranks", type=int, default=64, help="default: 64")
    parser.add_argument("--tp", type=int, help="tensor-parallel degree (default: the recipe's)")
    parser.add_argument(
        "--checkpointing", choices=["full", "selective", "none"], help="default: the recipe's"
    )
    parser.add_argument("--sequence", type=int, help="tokens in a sequence (default: the recipe's)")
    parser.add_argument("--batch", type=int, help="sequences of a rank (default: the recipe's)")
    parser.add_argument(
        "--loss", choices=["bracket", "fused", "eager", "chunked"], default="bracket", help="default: bracket"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of computation")
    parser.add_argument("--memory", type=float, default=24.0, help="GiB that a rank has (default: 24)")
    parser.add_argument("--exact", action="store_true", help="run all layers: minutes instead of seconds")
    parser.add_argument("--no-knobs", action="store_true", help="do not predict what could be changed")
    parser.add_argument(
        "--results", type=Path, default=Path("results/titan-memory"), help="cache of predictions"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be predicted.

    Raises:
        InvalidInput: a number that is not positive, degrees that do not divide, no torchtitan.
    """
    for option in ("ranks", "tp", "sequence", "batch", "memory"):
        value = getattr(args, option)
        if value is not None and not value > 0:
            raise InvalidInput(f"--{option} is {value}; give a positive number")
    if not args.model and (args.tp or args.checkpointing or args.no_knobs):
        raise InvalidInput("--tp, --checkpointing and --no-knobs are for one layout: give --model, too")
    degrees = [args.tp or MODELS[args.model][2]] if args.model else [row[1] for row in TABLE]
    for degree in degrees:
        if args.ranks % degree:
            raise InvalidInput(f"TP degree {degree} does not divide --ranks {args.ranks}")
        if args.sequence and args.sequence % degree:
            raise InvalidInput(f"TP degree {degree} does not divide --sequence {args.sequence}")
    try:
        version("torchtitan")
    except PackageNotFoundError:
        needed = HERE.parent / "requirements-titan.txt"
        raise InvalidInput(
            f"torchtitan is not installed: {sys.executable} -m pip install -r {needed}"
        ) from None


def main() -> int:
    """Predict the layout of the command line, or the tutorial's table; return the exit status."""
    args = parse_args()
    if args.worker:
        layout = json.loads(args.worker)
        start_fake_job(layout["ranks"])
        print(json.dumps([measure(layout, layers) for layers in layout["layers"]]))
        return 0

    def layout_of(model: str, tp: int, checkpointing: str) -> dict:
        layout = {"model": model, "tp": tp, "checkpointing": checkpointing}
        layout |= {key: getattr(args, key) for key in ("ranks", "sequence", "batch", "loss", "dtype")}
        return layout | {"layers": [None] if args.exact else list(LAYERS)}

    try:
        check_options(args)
        if args.model:
            _, _, tp, checkpointing = MODELS[args.model]
            layout = layout_of(args.model, args.tp or tp, args.checkpointing or checkpointing)
            layouts = {title(layout): layout}
        else:
            layouts = {title(layout): layout for layout in (layout_of(*row) for row in TABLE)}
        published = {title(layout_of(*row)): measured for row, measured in TABLE.items()}
        usual = (args.ranks, args.loss, args.dtype) == (64, "bracket", "bfloat16")
        usual = usual and not (args.sequence or args.batch)
        rows = []
        print(f"{'':44} {'lower':>7} {'upper':>7} {'measured':>9}   of {args.memory:g} GiB, in GiB per rank")
        # Two at once: a worker uses one core.
        with ThreadPoolExecutor(2) as pool:
            for name, prediction in zip(
                layouts, pool.map(lambda layout: predict(layout, args.results), layouts.values()), strict=True
            ):
                measured = published.get(name) if usual else None
                rows.append((name, prediction, measured))
                shown = f"{measured:.2f}" if isinstance(measured, float) else measured or ""
                bracket = f"{prediction['lower']:7.2f} {prediction['upper']:7.2f}"
                print(f"{name:44} {bracket} {shown:>9}   {verdict(prediction, args.memory)}", flush=True)
            if args.model:
                explain(rows[0][1])
                others = [] if args.no_knobs else knobs(layout, rows[0][1])
                changed = pool.map(lambda other: predict_or_tell(other[1], args.results), others)
                for (name, _), other in zip(others, changed, strict=True):
                    show_knob(name, rows[0][1], other, args.memory)
    except (InvalidInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(bool(args.model) and verdict(rows[0][1], args.memory) != "fits")


def show_knob(name: str, prediction: dict, other: dict | str, memory: float) -> None:
    """Print what changing one thing would save, or why it cannot be changed."""
    if isinstance(other, str):
        print(f"  with {name:37} cannot be built: {other}")
        return
    bracket = f"{other['lower']:7.2f} {other['upper']:7.2f}"
    saves = " to ".join(f"{prediction[bound] - other[bound]:.2f}" for bound in ("lower", "upper"))
    print(f"  with {name:37} {bracket} {'':9}   {verdict(other, memory)}; saves {saves}")


def explain(prediction: dict) -> None:
    """Print where the peak stands and what is live in it."""
    for bound in ("lower", "upper"):
        phases = ", ".join(f"{phase} {size:.2f}" for phase, size in prediction["phases"][bound].items())
        print(f"  {bound}: peak in {prediction['where'][bound]}; {phases}")
    print(f"  static: {prediction['static']:.2f} (parameters, buffers, optimizer state)")
    layers = f"{prediction['measured_layers']} of {prediction['layers']} layers"
    print(f"  live at the upper peak, with {layers}:")
    for label, size in list(prediction["largest"].items())[:8]:
        print(f"    {size:7.3f} {label}")


if __name__ == "__main__":
    sys.exit(main())
