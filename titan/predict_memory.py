"""Will it fit? Peak memory of a rank of a recipe, predicted on a laptop in a minute or two.

    python titan/predict_memory.py                                     the tutorial's table, predicted
    python titan/predict_memory.py --model llama3_8b --tp 4 --checkpointing full
    python titan/predict_memory.py --model llama3_70b --tp 8 --batch 1 --memory 24
    python titan/predict_memory.py --model llama3_8b --plan fsdp2 --ranks 8 --memory 80

The plan is SimpleFSDP, compiled whole; or upstream's FSDP2: eager, or with each layer compiled by itself.

titan/measure_memory.py runs three and five layers of a layout, as one rank of 64, of DeepSeek four and six.
Layers are alike: the rest is a straight line through the two. --exact runs all layers.

The prediction is a bracket. What makes it wide is the loss, which a compiler may or may not fuse: one
float32 copy of the logits of 8,192 tokens is 3.91 GiB. Gradients are there from the start, as in every
microbatch of an accumulated step but the first.

    lower   loss fused into one kernel that keeps float32 log-probabilities, unless the plan is eager;
            optimizer fused
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
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
GIB = 2**30
MODELS = {  # the recipe's tensor-parallel degree and activation checkpointing
    "llama3_8b": (1, "selective"),
    "llama3_70b": (8, "full"),
    "llama3_debugmodel": (1, "selective"),
    "deepseek_v3_16b": (4, "selective"),
    "deepseek_v3_debugmodel": (2, "selective"),
}
# The numbers of layers from which the line is drawn. In the smaller one a layer must have one of its kind
# before and behind it; DeepSeek's first is of another kind.
LAYERS = {"llama3": [3, 5], "deepseek": [4, 6]}
PLANS = ("simplefsdp", "fsdp2", "fsdp2-compiled")  # compiled whole, not at all, layer by layer
# model, TP degree, checkpointing: GiB that the tutorial measured of 24 on a trn2.48xlarge (by AWS, not by
# us); "OOM": out of memory; "": not published.
TABLE = {
    ("llama3_8b", 1, "selective"): "OOM",
    ("llama3_8b", 1, "full"): 11.91,
    ("llama3_8b", 4, "selective"): 8.21,
    ("llama3_8b", 4, "full"): 4.71,
    ("deepseek_v3_16b", 4, "selective"): "",
    ("deepseek_v3_16b", 4, "full"): "",
}
MEASURED_BY = ["measure_memory.py", "simple_fsdp.py", "llama3.py", "deepseek_v3.py", "cpu_adapter.py"]


class InputError(ValueError):
    """The layout cannot be predicted; str() is one line for people."""


class Prediction(NamedTuple):
    """What is predicted for a layout. Sizes are in GiB."""

    lower: float
    upper: float
    static: float  # parameters, buffers and optimizer state
    phases: dict[str, dict[str, float]]  # for each bound: phase: its peak
    where: dict[str, str]  # for each bound: the phase of its peak
    largest: dict[str, float]  # what is alive at the upper peak, by label, with measured_layers
    measured_layers: int
    layers: int
    sequence: int
    batch: int


def title(layout: dict) -> str:
    """Return a layout's name for people."""
    shards = layout["ranks"] // layout["tp"] // layout["replicate"]
    replicas = f" x {layout['replicate']} replicas" if layout["replicate"] > 1 else ""
    plan = "" if layout["plan"] == "simplefsdp" else f" {layout['plan']}"
    return f"{layout['model']} TP{layout['tp']} x FSDP{shards}{replicas} {layout['checkpointing']}{plan}"


def fingerprint(layout: dict) -> str:
    """Return a name for a measurement that changes with the layout, the recipes and the packages."""
    digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode())
    for name in MEASURED_BY:
        digest.update((HERE / name).read_bytes())
    for package in ("torch", "torchtitan"):
        digest.update(version(package).encode())
    return digest.hexdigest()[:16]


def measure(layout: dict, results: Path) -> list[dict]:
    """Return what measure_memory.py finds for each number of layers, from the cache if it is there.

    Raises:
        InputError: the layout cannot be built; the message is the last line of the error.
    """
    cached = results / f"{fingerprint(layout)}.json"
    try:
        return json.loads(cached.read_text())
    except (FileNotFoundError, ValueError):
        pass  # not measured yet, or the file is cut
    layers = " and ".join(str(count or "all") for count in layout["layers"])
    print(f"== {title(layout)}: running {layers} layers", file=sys.stderr, flush=True)
    results.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "measure_memory.py"), json.dumps(layout), str(cached)],
        capture_output=True,
        text=True,
        env=os.environ | {"TITAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        log = cached.with_suffix(".err")
        log.write_text(done.stderr)
        errors = [line for line in done.stderr.splitlines() if re.search(r"\w(Error|Exception): ", line)]
        reason = errors[-1].strip() if errors else f"exit status {done.returncode}"
        raise InputError(f"{title(layout)}: {reason[:200]}; all of it: {log}")
    return json.loads(cached.read_text())


def line_through(points: list[tuple[int, float]], at: int) -> float:
    """Return the value at a number of layers on the line through the first and last point."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    return y1 if x1 == x2 else y1 + (y2 - y1) * (at - x1) / (x2 - x1)


def predict(layout: dict, results: Path) -> Prediction:
    """Return the prediction for a layout.

    Raises:
        InputError: the layout cannot be built.
    """
    runs = measure(layout, results)
    total = runs[0]["layers"]
    counts = [min(count or total, total) for count in layout["layers"]]

    phases: dict[str, dict[str, float]] = {}
    for bound in ("lower", "upper"):
        phases[bound] = {}
        for phase in runs[0][bound]:
            sizes = [run[bound][phase]["bytes"] / GIB for run in runs]
            phases[bound][phase] = line_through(list(zip(counts, sizes, strict=True)), total)
        static = phases[bound].pop("static")

    # Where fusing the loss costs more than it saves, the two change places.
    low, high = sorted(phases, key=lambda bound: max(phases[bound].values()))
    where_low, where_high = (max(phases[bound], key=phases[bound].get) for bound in (low, high))
    largest = runs[-1][high][where_high]["labels"]
    return Prediction(
        lower=phases[low][where_low],
        upper=phases[high][where_high],
        static=static,
        phases={"lower": phases[low], "upper": phases[high]},
        where={"lower": where_low, "upper": where_high},
        largest={label: size / GIB for label, size in largest.items()},
        measured_layers=counts[-1],
        layers=total,
        sequence=runs[0]["sequence"],
        batch=runs[0]["batch"],
    )


def fit(prediction: Prediction, memory: float) -> str:
    """Return whether a prediction fits into some GiB, in words."""
    if prediction.upper <= memory:
        return "fits"
    return "does not fit" if prediction.lower > memory else "too close to call"


def knobs(layout: dict, prediction: Prediction) -> dict[str, dict]:
    """Return what could be changed of a layout to save memory: in words, the changed layout.

    In the tutorial's order: checkpointing, tensor parallelism, and last what changes the job.
    """
    changed = {}
    if layout["checkpointing"] != "full":
        changed["full checkpointing"] = layout | {"checkpointing": "full"}
    degree = layout["tp"] * 2
    if layout["ranks"] % (degree * layout["replicate"]) == 0:
        changed[f"TP{degree}"] = layout | {"tp": degree}
    if layout["loss"] != "chunked":
        changed["chunked loss"] = layout | {"loss": "chunked"}
    if prediction.batch % 2 == 0:
        changed[f"batch {prediction.batch // 2}"] = layout | {"batch": prediction.batch // 2}
    if prediction.sequence % 2 == 0:
        changed[f"sequence {prediction.sequence // 2}"] = layout | {"sequence": prediction.sequence // 2}
    return changed


def parse_args() -> argparse.Namespace:
    """Return the command line's options. Raises InputError for one that is not known."""
    parser = argparse.ArgumentParser(description="Predict the peak memory of a recipe's rank.")
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    parser.add_argument("--model", choices=list(MODELS), help="default: the tutorial's table")
    parser.add_argument("--plan", choices=PLANS, default="simplefsdp", help="default: simplefsdp")
    parser.add_argument("--ranks", type=int, default=64, help="default: 64")
    parser.add_argument("--tp", type=int, help="tensor-parallel degree (default: the recipe's)")
    parser.add_argument(
        "--replicate", type=int, default=1, help="replicas, each sharded by itself (HSDP; default: 1)"
    )
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
    args, others = parser.parse_known_args()
    if others:
        raise InputError(
            f"{others[0]} cannot be predicted: not modelled are expert, context and pipeline parallelism, "
            "float8, and an optimizer in bfloat16"
        )
    return args


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be predicted.

    Raises:
        InputError: a number that is not positive, degrees that do not divide, no torchtitan.
    """
    for option in ("ranks", "tp", "replicate", "sequence", "batch", "memory"):
        value = getattr(args, option)
        if value is not None and not value > 0:
            raise InputError(f"--{option} is {value}; give a positive number")
    if not args.model and (args.tp or args.checkpointing or args.no_knobs):
        raise InputError("--tp, --checkpointing and --no-knobs are for one layout: give --model, too")
    for layout in layouts_of(args):
        degree = layout["tp"]
        if args.ranks % (degree * args.replicate):
            times = f" x {args.replicate} replicas" if args.replicate > 1 else ""
            raise InputError(f"TP degree {degree}{times} does not divide --ranks {args.ranks}")
        if args.sequence and args.sequence % degree:
            raise InputError(f"TP degree {degree} does not divide --sequence {args.sequence}")
    try:
        version("torchtitan")
    except PackageNotFoundError:
        needed = HERE.parent / "requirements-titan.txt"
        raise InputError(
            f"torchtitan is not installed: {sys.executable} -m pip install -r {needed}"
        ) from None


def layouts_of(args: argparse.Namespace) -> list[dict]:
    """Return the layouts that the options ask for: one, or the table's."""
    rows = list(TABLE)
    if args.model:
        tp, checkpointing = MODELS[args.model]
        rows = [(args.model, args.tp or tp, args.checkpointing or checkpointing)]
    return [
        {
            "model": model,
            "plan": args.plan,
            "ranks": args.ranks,
            "tp": tp,
            "replicate": args.replicate,
            "checkpointing": checkpointing,
            "sequence": args.sequence,
            "batch": args.batch,
            "loss": args.loss,
            "dtype": args.dtype,
            "layers": [None] if args.exact else LAYERS[model.partition("_")[0]],
        }
        for model, tp, checkpointing in rows
    ]


def published(layout: dict) -> str:
    """Return what the tutorial measured for a layout, in GiB, or "" for a job that it did not run."""
    usual = {
        "plan": "simplefsdp",
        "ranks": 64,
        "replicate": 1,
        "sequence": None,
        "batch": None,
        "loss": "bracket",
        "dtype": "bfloat16",
    }
    if any(layout[option] != value for option, value in usual.items()):
        return ""
    measured = TABLE.get((layout["model"], layout["tp"], layout["checkpointing"]), "")
    return f"{measured:.2f}" if isinstance(measured, float) else measured


def explain(prediction: Prediction) -> None:
    """Print where the peak stands and what is alive in it."""
    for bound in ("lower", "upper"):
        phases = ", ".join(f"{phase} {size:.2f}" for phase, size in prediction.phases[bound].items())
        print(f"  {bound}: peak in {prediction.where[bound]}; {phases}")
    print(f"  static: {prediction.static:.2f} (parameters, buffers, optimizer state)")
    layers = f"{prediction.measured_layers} of {prediction.layers} layers"
    print(f"  live at the upper peak, with {layers}:")
    for label, size in list(prediction.largest.items())[:8]:
        print(f"    {size:7.3f} {label}")


def difference_of(prediction: Prediction, changed: Prediction) -> str:
    """Return what a changed layout saves or takes in GiB, from the lower end to the upper, in words."""
    lower, upper = prediction.lower - changed.lower, prediction.upper - changed.upper
    if lower >= 0 and upper >= 0:
        return f"saves {lower:.2f} to {upper:.2f}"
    if lower <= 0 and upper <= 0:
        return f"takes {-lower:.2f} to {-upper:.2f} more"
    return f"from {-min(lower, upper):.2f} more to {max(lower, upper):.2f} less"


def try_knobs(layout: dict, prediction: Prediction, args: argparse.Namespace, pool: Executor) -> None:
    """Print what changing one thing of a layout would save, or why it cannot be changed."""
    started = [
        (name, pool.submit(predict, changed, args.results))
        for name, changed in knobs(layout, prediction).items()
    ]
    for name, running in started:
        try:
            changed = running.result()
        except InputError as error:
            print(f"  with {name:37} cannot be built: {error}")
            continue
        bracket = f"{changed.lower:7.2f} {changed.upper:7.2f}"
        difference = f"{fit(changed, args.memory)}; {difference_of(prediction, changed)}"
        print(f"  with {name:37} {bracket} {'':9}   {difference}")


def print_row(layout: dict, prediction: Prediction, memory: float) -> None:
    """Print a layout's line of the table."""
    bracket = f"{prediction.lower:7.2f} {prediction.upper:7.2f}"
    print(f"{title(layout):44} {bracket} {published(layout):>9}   {fit(prediction, memory)}", flush=True)


def main() -> int:
    """Predict the layout of the command line, or the tutorial's table; return the exit status."""
    try:
        args = parse_args()
        check_options(args)
        layouts = layouts_of(args)
        print(f"{'':44} {'lower':>7} {'upper':>7} {'measured':>9}   of {args.memory:g} GiB, in GiB per rank")
        with ThreadPoolExecutor(2) as pool:  # a measurement uses one core
            if not args.model:
                predictions = pool.map(lambda layout: predict(layout, args.results), layouts)
                for layout, prediction in zip(layouts, predictions, strict=True):
                    print_row(layout, prediction, args.memory)
                return 0
            (layout,) = layouts
            prediction = predict(layout, args.results)
            print_row(layout, prediction, args.memory)
            explain(prediction)
            if not args.no_knobs:
                try_knobs(layout, prediction, args, pool)
            return 0 if fit(prediction, args.memory) == "fits" else 1
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
