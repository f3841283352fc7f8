"""Three small models, optimizers and precisions in parallel plans, each recorded; some with a mistake.

    python launch.py --standalone --nproc-per-node=4 tests/tools/sweep.py --output-dir DIR [mistakes]
    python tests/tools/sweep.py --output-dir DIR judge

A launch makes the runs for its number of ranks (1, 2 or 4), of all or of --runs, each
model:optimizer:precision:plan or model:optimizer:precision:plan:mistake. Their recordings go into
DIR/<seed>-<model>-... All runs of a seed train on the same samples. judge compares those in DIR with one
rank's: it prints which do not pass, what is found of those with a mistake, and a table of errors in eps.
"""

import argparse
import functools
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plans import BATCH, LENGTH, OPTIMIZERS, RANK, WIDTH, WORDS, WORLD, Block, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from training_comparison import ranks_of
from training_recorded_comparison import compare_recordings
from training_recorded_diagnosis import cause_of_recordings
from training_recorded_runs import Recording
from training_recorder import Recorder
from training_tolerance import DEFAULTS

FEATURES, CLASSES, EXPERTS, TOKENS, STEPS, IGNORED = 16, 8, 4, 4, 5, -100
RANKS = {"one": 1, "ddp2": 2, "tp2": 2, "ddp4": 4, "fsdp4": 4, "hsdp4": 4}
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
TP = {  # what of a model tensor-parallel ranks split
    "mlp": {"up": COLUMNS, "out": ROWS},
    "transformer": {"blocks.*.[qkvu]*": COLUMNS, "blocks.*.[od]*": ROWS},
    "moe": {"experts.*.0": COLUMNS, "experts.*.2": ROWS},
}
CLEAN = [
    f"{model}:{optimizer}:{precision}:{plan}"
    for model in ("mlp", "transformer", "moe", "idle")
    for optimizer in ("momentum", "adamw")
    for precision in ("float32", "autocast", "policy")
    for plan in RANKS
    # The policy is one of fully_shard. An expert that is not called has no gradient to shard.
    if (precision != "policy" or plan in ("one", "fsdp4", "hsdp4"))
    and (model != "idle" or (plan in ("one", "ddp2", "ddp4") and precision != "policy"))
]
MISTAKES = ("factor", "unreduced", "rate", "means", "stale")
WRONG = [f"{run}:{mistake}" for run in CLEAN if run.endswith(("ddp4", "fsdp4")) for mistake in MISTAKES]


class MLP(nn.Module):
    """Three layers and a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(F.gelu(self.up(F.gelu(self.norm(self.first(x))))))


class Experts(nn.Module):
    """A router gives each word to one expert, seldom to the last. One without a word is called on no rows,
    so that all ranks run the same collectives; or, with skips, not at all."""

    def __init__(self, skips: bool = False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.router.bias.data[-1] -= 1
        self.skips = skips

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        normed = self.norm(x).flatten(0, 1)
        shares, chosen = self.router(normed).float().softmax(-1).max(-1)
        mixed = torch.zeros_like(normed)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) or not self.skips:
                out = expert(normed[rows]) * shares[rows, None]
                mixed = mixed.index_add(0, rows, out.to(mixed.dtype))
        return self.head(self.last(x + mixed.unflatten(0, words.shape)))


def build(model: str, precision: str, seed: int) -> nn.Module:
    """Return the model as every plan starts from it."""
    torch.manual_seed(seed)
    built = {"mlp": MLP, "transformer": Transformer, "moe": Experts, "idle": lambda: Experts(True)}[model]()
    if model == "transformer":
        built.head.weight = built.words.weight
        if precision == "policy":  # which leaves buffers as they are
            built.scale = built.scale.bfloat16()
    return built


@functools.cache
def mesh_of(*shape: int):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def parallelize(model: nn.Module, ways: dict, plan: str, precision: str, mistake: str) -> nn.Module:
    """Return the model in this plan; with the mistake unreduced, each rank keeps its gradients of a norm."""
    if plan == "tp2":
        return parallelize_module(model, mesh_of(2), ways)
    own = ["norm.weight", "norm.bias"] if mistake == "unreduced" else []
    if plan.startswith("ddp"):
        ddp = nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, own)
        return ddp(model, find_unused_parameters=getattr(model, "skips", False))
    if plan == "one" and precision != "policy":
        return model
    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "policy" else {}
    options = {
        "mesh": mesh_of(*((2, 2) if plan == "hsdp4" else (WORLD,))),
        "mp_policy": MixedPrecisionPolicy(**types),
    }
    ignored = {model.get_parameter(name) for name in own}
    for part in [part for part in model.modules() if isinstance(part, Block | nn.Sequential)]:
        fully_shard(part, **options)
    return fully_shard(model, ignored_params=ignored, **options)


def draw(model: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples and labels of a step. Every other sample has all labels, the rest some."""
    if model == "mlp":
        x = torch.randn(BATCH, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    else:
        length = LENGTH if model == "transformer" else TOKENS
        words = torch.randint(WORDS, (BATCH, length + 1), generator=generator)
        x, labels = words[:, :-1], words[:, 1:].clone()
    dropped = torch.rand(labels.shape, generator=generator) < 0.6
    dropped[::2] = False
    return x, labels.masked_fill(dropped, IGNORED)


def run(seed: int, model: str, optimizer: str, precision: str, plan: str, mistake: str = "") -> None:
    """Train STEPS steps. The loss is the mean over all valid labels of the batch."""
    net = parallelize(build(model, precision, seed), TP.get(model), plan, precision, mistake)
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    if mistake == "rate" and RANK == 1:
        optimizer.param_groups[0]["lr"] *= 1.05
    replicas, replica = (1, 0) if plan == "tp2" else (WORLD, RANK)
    generator = torch.Generator().manual_seed(1000 + seed)
    batches = [draw(model, generator) for _ in range(STEPS)]
    if mistake == "stale":
        batches[2] = batches[1]
    for x, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            rows = net(x.chunk(replicas)[replica]).float().flatten(0, -2)
        targets = labels.chunk(replicas)[replica].flatten()
        loss = F.cross_entropy(rows, targets, reduction="mean" if mistake == "means" else "sum")
        share = (labels != IGNORED).sum() / replicas  # the plan takes the mean of the replicas
        (loss if mistake == "means" else loss / share).backward()
        for parameter in net.parameters() if mistake == "factor" else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1.05)
        optimizer.step()


def judge(directory: Path) -> None:
    """Compare every run with one rank's and print what is found."""
    worst, passes = defaultdict(lambda: defaultdict(float)), defaultdict(list)
    for folder in sorted(folder for folder in directory.iterdir() if "-one" not in folder.name):
        seed, model, optimizer, precision, plan, *mistake = folder.name.split("-")
        reference = Recording(directory / f"{seed}-{model}-{optimizer}-{precision}-one")
        actual = Recording(folder)
        outcome = compare_recordings(reference, actual, DEFAULTS)
        if outcome.findings or mistake:
            print(folder.name, "FAIL" if outcome.findings else "PASS")
            for first in outcome.findings[:1]:
                ranks = ranks_of(first, outcome.findings)
                print(f"    step {first.step} {first.kind} {first.name}{first.message}, ranks {ranks}")
                print(f"    cause: {cause_of_recordings(first, ranks, reference, actual)}", flush=True)
        if not mistake:
            for case in ((model, optimizer, precision), ("plan", plan, precision)):
                passes[case].append(not outcome.findings)
                for kind, results in outcome.comparison.by_kind().items():
                    worst[case][kind] = max([worst[case][kind], *(result.eps for result in results)])
                worst[case]["score"] = max(worst[case]["score"], *map(max, outcome.comparison.scores))
    for case, errors in worst.items():
        figures = "  ".join(f"{kind} {error:<8.3g}" for kind, error in errors.items())
        print(f"{' '.join(case):30}{figures}  {sum(passes[case])} of {len(passes[case])} pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", choices=("clean", "mistakes", "judge"), default="clean")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--runs", nargs="+")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    if args.task == "judge":
        return judge(args.output_dir)
    dist.init_process_group("gloo")
    for name in args.runs or (WRONG if args.task == "mistakes" else CLEAN):
        for seed in args.seed if RANKS[name.split(":")[3]] == WORLD else ():
            directory = args.output_dir / f"{seed}-{name.replace(':', '-')}"
            directory.mkdir(parents=True, exist_ok=True)
            options = {"steps": STEPS, "skip": 0, "activations": "*", "full": [], "afterwards": "continue"}
            recorder = Recorder(argparse.Namespace(output_dir=directory, script="", arguments=[], **options))
            run(seed, *name.split(":"))
            recorder.end_of_script()
    return dist.destroy_process_group()


if __name__ == "__main__":
    main()
