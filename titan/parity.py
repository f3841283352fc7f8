"""Does SimpleFSDP, compiled, train like eager FSDP2, and like one rank? Parity of TorchTitan's recipes.

    python titan/parity.py --family llama3
    python titan/parity.py --family deepseek_v3 --steps 5
    python titan/parity.py --compare REFERENCE.pt ACTUAL.pt     two records of titan/parity_train.py

Four runs of two layers of a debug recipe, from one seed checkpoint and on the same global batches:

    one-rank           eager FSDP2 on one rank: no communication
    fsdp2-tp2          eager FSDP2, four ranks, TP2 x FSDP2
    simplefsdp-tp2     SimpleFSDP, compiled in mode jit, four ranks, TP2 x FSDP2
    simplefsdp-fsdp4   SimpleFSDP, compiled in mode jit, four ranks, FSDP4

For each step: the loss, the gradient norm that the trainer reports, every parameter's full gradient
before clipping, and in a mixture of experts how many tokens each expert got. Errors are norm-wise,
||actual - reference|| / ||reference||, in float32 eps (2^-23).

Tolerances, and where they come from:

* Gradients and loss: 16 eps, as in training_tolerance.py. Another mesh adds the same terms in another
  order. TTrace (arXiv 2506.09280) bounds the effect by k C^(L+1-l) eps, k = 4, C = 1.03: about 4 eps a
  step for two layers; times 4 for the steps before. Measured: 6 eps across meshes, 0 on the same mesh.
* Gradients of a mixture of experts on another mesh: one bfloat16 eps (2^-7) more, because TorchTitan
  runs the routed experts in bfloat16 whatever the recipe says. And 2 sqrt(2m/n) more where m of n token
  slots went to another expert: where two experts are nearly equal for a token, a rounding decides, and
  the token's whole share of the gradient moves from one to the other. At most 0.5 % of the slots may
  move, and no part of the error may be a common factor. The loss is allowed one bfloat16 eps, averaged
  over the step's tokens. On the same mesh the 16 eps hold, and no token moves.
* The gradient norm that a run reports, against the norm of its recorded gradients in float64:
  4 sqrt(n) eps, n the largest gradient's elements, because the CPU's float32 norm is a running sum of n
  squares. Two runs are not compared by it: it is too coarse for that.

Exit status: 0 parity, 1 mismatch, 2 invalid input or a run that failed.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from training_common import InputError, make_parser  # noqa: E402
from training_tolerance import NORM_EPS, factor, relative_error  # noqa: E402

EPS = 2.0**-23
BFLOAT16_EPS = 2.0**-7
TOLERANCE = NORM_EPS * EPS
NORM_TOLERANCE = 4 * EPS  # times the square root of the largest gradient's number of elements
MOVED_TOLERANCE = 0.005  # share of a layer's token slots that may go to another expert; measured 0.0007

FAMILIES = ["llama3", "deepseek_v3"]
# name: plan, ranks, tensor-parallel degree
RUNS = {
    "one-rank": ("fsdp2", 1, 1),
    "fsdp2-tp2": ("fsdp2", 4, 2),
    "simplefsdp-tp2": ("simple_fsdp", 4, 2),
    "simplefsdp-fsdp4": ("simple_fsdp", 4, 1),
}
# reference, actual
COMPARISONS = [
    ("fsdp2-tp2", "simplefsdp-tp2"),
    ("one-rank", "fsdp2-tp2"),
    ("one-rank", "simplefsdp-fsdp4"),
]
# What a record holds, and each step of it.
RECORD_FIELDS = {
    "family": str,
    "seed": int,
    "steps": int,
    "world_size": int,
    "tp": int,
    "replicate": int,
    "tokens": int,
    "records": list,
}
STEP_FIELDS = {"loss": float, "grad_norm": float, "gradients": dict, "tokens_per_expert": dict}


def has_fields(record: object, fields: dict[str, type]) -> bool:
    """Return whether a record is a dictionary with these fields, of these types."""
    return isinstance(record, dict) and all(isinstance(record.get(k), kind) for k, kind in fields.items())


def load(path: Path) -> dict:
    """Return a record of parity_train.py.

    Raises:
        InputError: the file is missing, unreadable or not such a record, or it has no step.
    """
    try:
        run = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"no record {path}: make titan-parity writes it") from None
    except Exception as error:
        raise InputError(f"{path} is not a record of titan/parity_train.py: {error!r:.100}") from None
    if not has_fields(run, RECORD_FIELDS) or not all(
        has_fields(step, STEP_FIELDS) for step in run["records"]
    ):
        raise InputError(f"{path} is not a record of titan/parity_train.py: it lacks a field or has another")
    for step in run["records"]:
        gradients = [gradient for gradient in step["gradients"].values() if gradient is not None]
        counts = list(step["tokens_per_expert"].values())
        if not all(isinstance(value, torch.Tensor) for value in gradients + counts):
            raise InputError(f"{path} is not a record of titan/parity_train.py: a gradient is no tensor")
    if not run["records"]:
        raise InputError(f"{path} has no step: nothing to compare")
    world_size, tp, replicate = run["world_size"], run["tp"], run["replicate"]
    if min(tp, replicate, run["tokens"]) < 1 or world_size % (tp * replicate):
        raise InputError(f"{path}: {world_size} ranks, tp {tp}, replicate {replicate}")
    return run


def check_comparable(reference: dict, actual: dict) -> None:
    """Refuse two runs of different jobs.

    Raises:
        InputError: model, seed, number of steps, batch, parameters or layers of experts differ, or
            there are none.
    """
    for option in ("family", "seed", "steps", "tokens"):
        if reference[option] != actual[option]:
            raise InputError(
                f"{option} is {reference[option]} in the reference and {actual[option]} in the actual run"
            )
    for name, run in (("reference", reference), ("actual run", actual)):
        if len(run["records"]) != run["steps"]:
            raise InputError(f"the {name} recorded {len(run['records'])} of {run['steps']} steps")
    first = reference["records"][0]
    for record in reference["records"] + actual["records"]:
        for field, what in (("gradients", "parameters"), ("tokens_per_expert", "layers of experts")):
            if different := first[field].keys() ^ record[field].keys():
                raise InputError(f"the runs have different {what}: {', '.join(sorted(different)[:3])}")
        for layer, count in record["tokens_per_expert"].items():
            if count.shape != first["tokens_per_expert"][layer].shape:
                raise InputError(f"the runs have different numbers of experts in {layer}")
    if not first["gradients"]:
        raise InputError("the runs have no parameter: nothing to compare")
    if reference["family"] == "deepseek_v3" and not first["tokens_per_expert"]:
        raise InputError("the runs have no tokens_per_expert: the routing would not be compared")


def moved_slots(count: torch.Tensor, got: torch.Tensor) -> float:
    """Return how many token slots went to another expert. Moves that cancel each other are not seen."""
    return (count - got).abs().sum().item() / 2


def moved_tokens(reference: dict, actual: dict) -> tuple[float, float]:
    """Return how many token slots went to another expert where most did, and how many a layer has."""
    moved, slots = 0.0, 0.0
    for name, count in reference["tokens_per_expert"].items():
        moved = max(moved, moved_slots(count, actual["tokens_per_expert"][name]))
        slots = count.sum().item()
    return moved, slots


def tolerances(reference: dict, actual: dict, same_mesh: bool, tokens: int) -> tuple[float, float]:
    """Return the tolerances of the gradients and of the loss of one step, relative; see the top."""
    if same_mesh or not reference["tokens_per_expert"]:
        return TOLERANCE, TOLERANCE
    moved, slots = moved_tokens(reference, actual)
    gradients = TOLERANCE + BFLOAT16_EPS + 2 * math.sqrt(2 * moved / max(slots, 1.0))
    return gradients, TOLERANCE + BFLOAT16_EPS / math.sqrt(tokens)


def check_routing(reference: dict, actual: dict, same_mesh: bool) -> list[str]:
    """Return the mismatches between how many tokens each expert got in a step."""
    mismatches = []
    for layer, count in reference["tokens_per_expert"].items():
        got = actual["tokens_per_expert"][layer]
        slots, moved = count.sum().item(), moved_slots(count, got)
        allowed = 0 if same_mesh else MOVED_TOLERANCE * slots
        if not (slots > 0 and got.sum().item() == slots):
            mismatches.append(f"{layer} counts {got.sum():.0f} tokens, reference {slots:.0f}")
        elif not moved <= allowed:
            mismatches.append(f"{layer}: {moved:.0f} of {slots:.0f} tokens go to other experts")
    return mismatches


def check_factor(reference: dict, actual: dict) -> list[str]:
    """Return a mismatch if all gradients of a step together are the reference's times a factor.

    What routing moves is nearly at right angles to the gradients: it changes the factor by a small part of
    its size. Hence the quarter.
    """
    pairs = [(actual["gradients"][name], gradient) for name, gradient in reference["gradients"].items()]
    if any(a is None or r is None or a.shape != r.shape for a, r in pairs):
        return []  # check_gradient says so
    all_actual = torch.cat([a.flatten() for a, _ in pairs])
    all_reference = torch.cat([r.flatten() for _, r in pairs])
    error = relative_error(all_actual, all_reference)
    if math.isinf(error):
        return []  # check_gradient says so
    times = factor(all_actual, all_reference)
    if abs(times - 1) <= max(TOLERANCE, error / 4):
        return []
    return [f"all gradients together are {times:.4g}x the reference"]


def check_norm(run: str, record: dict) -> list[str]:
    """Return a mismatch if a run reports another gradient norm in a step than its gradients have."""
    present = [gradient for gradient in record["gradients"].values() if gradient is not None]
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in present))
    limit = NORM_TOLERANCE * math.sqrt(max((gradient.numel() for gradient in present), default=0))
    if abs(record["grad_norm"] - norm) <= limit * norm:
        return []
    return [f"the {run} reports gradient norm {record['grad_norm']:.6f}, its gradients have {norm:.6f}"]


def check_gradient(name: str, reference: dict, actual: dict, tolerance: float) -> tuple[float, list[str]]:
    """Return the error of a parameter's gradient in a step, relative, and the mismatch if it is one."""
    r, a = reference["gradients"][name], actual["gradients"][name]
    missing = [run for run, gradient in (("reference", r), ("actual run", a)) if gradient is None]
    if missing:
        return math.inf, [f"{name} has no gradient in the {' and the '.join(missing)}"]
    error = relative_error(a, r)
    if error <= tolerance:
        return error, []
    return error, [describe(name, a, r, error)]


def check_loss(reference: float, actual: float, tolerance: float) -> list[str]:
    """Return a mismatch if a step's loss is off."""
    error = abs(actual - reference) / abs(reference) if reference else math.inf
    if error <= tolerance:
        return []
    eps = f"{error / EPS:.1f} eps, tolerance {tolerance / EPS:.0f}"
    return [f"loss {actual:.6f}, reference {reference:.6f}: {eps}"]


def compare(reference: dict, actual: dict) -> tuple[list[str], list[str]]:
    """Compare two runs, every step and parameter.

    Returns:
        The table's lines, and the mismatches in order of step, one line each: none means parity.

    Raises:
        InputError: the runs are not of the same job.
    """
    check_comparable(reference, actual)
    same_mesh = all(reference[key] == actual[key] for key in ("world_size", "tp", "replicate"))
    pairs = list(zip(reference["records"], actual["records"], strict=True))
    errors: dict[str, list[float]] = {name: [] for name in pairs[0][0]["gradients"]}
    limits, mismatches = [], []
    for number, (r, a) in enumerate(pairs, 1):
        tolerance, loss_tolerance = tolerances(r, a, same_mesh, reference["tokens"])
        limits.append(tolerance)
        found = check_loss(r["loss"], a["loss"], loss_tolerance)
        found += check_routing(r, a, same_mesh)
        for name in errors:
            error, mismatch = check_gradient(name, r, a, tolerance)
            errors[name].append(error)
            found += mismatch
        found += check_factor(r, a) + check_norm("reference", r) + check_norm("actual run", a)
        mismatches += [f"step {number}: {line}" for line in found]
    return table(pairs, errors, limits), mismatches


def table(pairs: list[tuple[dict, dict]], errors: dict[str, list[float]], limits: list[float]) -> list[str]:
    """Return the lines of the table: losses, gradient norms, errors in eps, tokens per expert."""
    width = max(len(name) for name in errors) + 2
    lines = [" " * width + "".join(f"{f'step {number}':>11}" for number in range(1, len(pairs) + 1))]

    def add(label: str, values: list[float], digits: int) -> None:
        lines.append(f"{label:{width}}" + "".join(f"{value:11.{digits}f}" for value in values))

    for label, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
        add(f"{label}, reference", [reference[key] for reference, _ in pairs], 6)
        add(label, [actual[key] for _, actual in pairs], 6)
    lines.append("gradients, error in eps:")
    for name, row in errors.items():
        add(f"  {name}", [error / EPS for error in row], 1)
    add("  tolerance", [limit / EPS for limit in limits], 1)
    for number, (reference, actual) in enumerate(pairs, 1):
        for layer in reference["tokens_per_expert"]:
            lines.append(f"{layer}, step {number}:")
            for label, run in (("reference", reference), ("actual", actual)):
                counts = run["tokens_per_expert"][layer].tolist()
                lines.append(f"  {label:10}" + "".join(f"{count:6.0f}" for count in counts))
    return lines


def describe(name: str, actual: torch.Tensor, reference: torch.Tensor, error: float) -> str:
    """Return the message about a gradient that is off: not finite, scaled by a factor, or how far off."""
    if not actual.isfinite().all():
        return f"gradient of {name} is not finite in the actual run"
    if not reference.any():
        return f"gradient of {name} is zero in the reference: nothing to compare"
    line = f"gradient of {name} is off by {error:.2g} ({error / EPS:.0f} eps)"
    if actual.shape == reference.shape and actual.any():
        times = factor(actual, reference)
        rest = relative_error(times * reference.double(), actual)
        if abs(times - 1) > 4 * rest:
            line += f": {times:.4g}x the reference, but for {rest:.1g}"
    return line


def report(reference: Path, actual: Path, title: str) -> int:
    """Print the comparison of two records; return 0 for parity, 1 for a mismatch.

    Raises:
        InputError: the records cannot be read or compared.
    """
    runs = load(reference), load(actual)
    lines, mismatches = compare(*runs)
    print(f"== {title}")
    print("\n".join(lines))
    for line in mismatches[:10]:
        print(f"  {line}")
    if len(mismatches) > 10:
        print(f"  and {len(mismatches) - 10} more")
    if mismatches:
        print(f"FAIL {title}: {len(mismatches)} mismatches")
        return 1
    equal = ", gradients bitwise equal" if are_gradients_equal(*runs) else ""
    print(f"PASS {title}: steps={len(runs[0]['records'])}{equal}", flush=True)
    return 0


def are_gradients_equal(reference: dict, actual: dict) -> bool:
    """Return whether all gradients of all steps are bitwise equal."""
    for r, a in zip(reference["records"], actual["records"], strict=True):
        if not all(torch.equal(a["gradients"][name], gradient) for name, gradient in r["gradients"].items()):
            return False
    return True


def launch(ranks: int, command: list[object], log: Path, device: str = "cpu") -> None:
    """Run a script with its options on some ranks of a device, also where there is another one.

    Raises:
        InputError: a rank failed; the message names the first one's error and its log.
    """
    shutil.rmtree(log, ignore_errors=True)
    launcher = [sys.executable, HERE.parent / "launch.py", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "--log-dir", log, "--redirects", "3", *command]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TITAN_DEVICE": device}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if line.startswith("error: ")]  # Python may warn after it
        raise InputError((errors or lines)[-1].removeprefix("error: "))


def train(family: str, args: argparse.Namespace) -> Path:
    """Make the seed checkpoint and all runs of a family; return the folder of their records.

    Raises:
        InputError: the folder holds something that was not made here, or a run failed.
    """
    folder = args.results / family
    marker = folder / ".made-by-parity"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise InputError(f"{folder} holds other files: name another --results")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()
    common = [HERE / "parity_train.py", "--family", family, "--seed", args.seed]
    common += ["--steps", args.steps, "--assets", args.assets]
    common += ["--seed-checkpoint", folder / "seed"]
    launch(1, [*common, "--plan", "seed"], folder / "logs" / "seed")
    for name, (plan, ranks, tp) in RUNS.items():
        started = time.monotonic()
        options = [*common, "--plan", plan, "--tp", tp, "--output", folder / f"{name}.pt"]
        launch(ranks, options, folder / "logs" / name)
        seconds = time.monotonic() - started
        print(f"== {family} {name}: {ranks} ranks, {args.steps} steps in {seconds:.0f} s", flush=True)
    return folder


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: both; repeatable")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("REFERENCE", "ACTUAL"), help="no training")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the initial parameters (default: 42)")
    parser.add_argument("--assets", type=Path, default=Path(".titan"), help="from make_assets.py")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results/titan-parity"),
        help="records and logs, in a folder each",
    )
    return parser.parse_args()


def main() -> int:
    """Train and compare, or compare two records; return the exit status."""
    args = parse_args()
    try:
        if args.compare:
            reference, actual = args.compare
            return report(reference, actual, title=f"{actual} against {reference}")
        if args.steps < 1:
            raise InputError(f"--steps is {args.steps}; train at least one step")
        status = 0
        for family in args.family or FAMILIES:
            folder = train(family, args)
            for reference, actual in COMPARISONS:
                title = f"{family} {actual} against {reference}"
                status |= report(folder / f"{reference}.pt", folder / f"{actual}.pt", title=title)
        return status
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
