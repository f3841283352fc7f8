"""Compare two recorded training runs rank by rank, step by step, tensor by tensor.

    python compare_training.py --reference-dir results/cpu-ddp --actual-dir results/ddp --world-size 64

Compared are outputs, global losses, full gradients, updated parameters and deltas, under the names
that the files give them. An element passes if |actual - reference| <= atol + rtol * |reference|.
Exit status: 0 parity, 1 mismatch, 2 nothing that could be compared. This file works alone.
"""

import argparse
import re
import sys
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch

# Measured: between CPU runs of one job in different modes (DDP, FSDP2, TP; float32, 64 ranks, ten
# steps), gradients differ by up to 7 eps = 8e-7 of their tensor's largest magnitude, parameters by
# less than 1 eps. The default leaves a factor of 12 for another device's order of summation.
RTOL = 1e-5

FORMAT = "parity-record-1"
# What makes two runs the same job. Anything else in the metadata may differ, and is shown.
SAME_JOB = (
    *("format", "model", "mode", "world_size", "dp_degree", "tp_degree"),
    *("seed", "steps", "global_batch_size", "learning_rate"),
)
SHOWN = ("device", "backend", "compile_backend", "torch_version")
# Causal order within a step: each kind follows from the ones before it.
KINDS = ("outputs", "losses", "gradients", "parameters", "deltas")


class InputError(Exception):
    """Files that cannot be compared: reported in one line, exit status 2."""


class Result(NamedTuple):
    """How one tensor of one rank and step compares."""

    passed: bool
    needed_rtol: float  # smallest rtol under which it would have passed; inf if none would
    eps: float  # norm of the error over norm of the reference, in eps of the dtype
    message: str  # for a failed one: where and by how much


def load_run(directory: Path, world_size: int) -> list[dict]:
    """Return the contents of rank-0.pt to rank-<world_size - 1>.pt, checked for completeness.

    Raises InputError for a missing, extra, unreadable or inconsistent file. Files are opened with
    weights_only: a pickle that would run code is refused, not run.
    """
    try:
        if not directory.is_dir():
            raise InputError(f"{directory} is not a directory; give the --output-dir of a finished run")
        names = {path.name for path in directory.iterdir() if re.fullmatch(r"rank-.*\.pt", path.name)}
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}") from None
    if len(names) < world_size:
        missing = next(rank for rank in range(world_size) if f"rank-{rank}.pt" not in names)
        raise InputError(
            f"{directory} has {len(names)} of {world_size} rank files, rank-{missing}.pt is missing: "
            "the run did not finish, or --world-size is wrong"
        )
    extra = names - {f"rank-{rank}.pt" for rank in range(world_size)}
    if extra:
        raise InputError(
            f"{directory} holds {min(extra)}, too many for --world-size {world_size}: "
            "give the world size of the run"
        )
    run = [load_rank(directory / f"rank-{rank}.pt", rank, world_size) for rank in range(world_size)]
    for content in run[1:]:
        for key in (*SAME_JOB, *SHOWN, "run_id"):
            first, other = run[0]["metadata"].get(key), content["metadata"].get(key)
            if first != other:
                raise InputError(
                    f"{directory} mixes runs: {key} is {first!r} in rank-0.pt and {other!r} in "
                    f"rank-{content['metadata']['rank']}.pt; run the job again"
                )
    return run


def load_rank(path: Path, rank: int, world_size: int) -> dict:
    """Return one rank's {"metadata", "records"}; raise InputError if it is not what it should be."""
    if not path.is_file():
        raise InputError(f"{path} is not a file; run the job again")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read, it is truncated or no result file: {reason}") from None
    problem = describe_problem(content)
    if problem:
        raise InputError(f"{path} is no result file of format {FORMAT}: {problem}")
    metadata, records = content["metadata"], content["records"]
    for name, expected in (("rank", rank), ("world_size", world_size)):
        if metadata[name] != expected:
            raise InputError(
                f"{path} says {name} {metadata[name]!r}, expected {expected!r}: "
                "files were renamed or swapped, or --world-size is wrong"
            )
    if not records or len(records) != metadata["steps"]:
        raise InputError(f"{path} has {len(records)} step records, expected {metadata['steps']}")
    return content


def describe_problem(content: object) -> str | None:
    """Return what is wrong with the structure of a rank file's content, None if nothing is."""
    if not isinstance(content, dict) or not {"metadata", "records"} <= content.keys():
        return "it does not hold metadata and records"
    metadata, records = content["metadata"], content["records"]
    if not isinstance(metadata, dict) or not isinstance(records, list):
        return "metadata is no dictionary or records is no list"
    for key in (*SAME_JOB, *SHOWN, "rank"):
        if not isinstance(metadata.get(key, ()), str | int | float | None):
            return f"metadata {key} is missing or no plain value"
    if metadata["format"] != FORMAT:
        return f"its format is {metadata['format']!r}"
    for step, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not {"output", "loss", *KINDS[2:]} <= record.keys():
            return f"step {step} lacks one of output, loss, {', '.join(KINDS[2:])}"
        if not isinstance(record["loss"], float):
            return f"step {step}: loss is a {type(record['loss']).__name__}, expected a float"
        named = [record[kind] for kind in KINDS[2:]]
        if not all(isinstance(tensors, dict) for tensors in named):
            return f"step {step}: gradients, parameters and deltas must be dictionaries by name"
        if not named[0] or any(tensors.keys() != named[0].keys() for tensors in named):
            return f"step {step}: gradients, parameters and deltas must have the same names, at least one"
        for (kind, name), tensor in flatten(record).items():
            if not isinstance(name, str):
                return f"step {step}: the name {name!r} of one of the {kind} is no text"
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
                return f"step {step}: {kind} {name} is {type(tensor).__name__}, expected a plain dense tensor"
            if tensor.device.type != "cpu" or not tensor.numel():
                return f"step {step}: {kind} {name} holds no values"
    return None


def flatten(record: dict) -> dict[tuple[str, str], torch.Tensor]:
    """Return one step's tensors by (kind, name), in causal order."""
    tensors = {
        ("outputs", "output"): record["output"],
        ("losses", "global loss"): torch.tensor(record["loss"], dtype=torch.float32),
    }
    for kind in KINDS[2:]:
        tensors.update({(kind, name): tensor for name, tensor in record[kind].items()})
    return tensors


def check_same_job(reference: list[dict], actual: list[dict]) -> None:
    """Raise InputError unless both runs trained the same model on the same data in the same way."""
    first, second = reference[0]["metadata"], actual[0]["metadata"]
    for key in SAME_JOB:
        if first[key] != second[key]:
            raise InputError(
                f"the runs differ in {key}: reference {first[key]!r}, actual {second[key]!r}; "
                "run both with the same settings"
            )
    if None is not first.get("saved_at") == second.get("saved_at"):
        raise InputError("the two directories hold the same run, one is a copy; give two runs")
    for rank, (one, other) in enumerate(zip(reference, actual, strict=True)):
        for step, (left, right) in enumerate(zip(one["records"], other["records"], strict=True), start=1):
            left, right = flatten(left), flatten(right)
            where = f"rank {rank}, step {step}"
            if left.keys() != right.keys():
                kind, name = min(left.keys() ^ right.keys())
                raise InputError(f"{where}: {kind} {name} is in only one of the runs; run both anew")
            for (kind, name), tensor in left.items():
                twin = right[kind, name]
                if (tensor.shape, tensor.dtype) != (twin.shape, twin.dtype):
                    raise InputError(
                        f"{where}: {kind} {name} is {tuple(tensor.shape)} {tensor.dtype} in the "
                        f"reference, {tuple(twin.shape)} {twin.dtype} in the actual run"
                    )


def compare_tensor(
    actual: torch.Tensor,
    reference: torch.Tensor,
    rtol: float,
    atol: float | None,
    parameter: torch.Tensor | None = None,
) -> Result:
    """Compare two tensors of one shape.

    Without an atol, it is rtol times the reference's largest magnitude: elements near zero are the
    sum of larger terms and carry their rounding error. A delta is the difference of two nearly
    equal parameters: given that parameter, its rounding, 2 eps of its largest magnitude, is allowed
    too, and the error's norm is taken relative to it.
    """
    exact = not (reference.is_floating_point() or reference.is_complex())
    eps = 0.0 if exact else torch.finfo(reference.dtype).eps
    wide = torch.complex128 if reference.is_complex() else torch.float64
    a, r = actual.to(wide), reference.to(wide)
    for name, tensor in (("reference", r), ("actual", a)):
        finite = torch.isfinite(tensor)
        if not finite.all():
            index = tuple(torch.nonzero(~finite)[0].tolist())
            values = f"reference {r[index].item():.9g}, actual {a[index].item():.9g}"
            return Result(False, inf, inf, f"{position(index)}: {values}: not finite in the {name} run")
    if not r.any() and not a.any():
        return Result(False, inf, 0.0, ": all zero in both runs, nothing is compared")
    error = (a - r).abs()
    if not error.any():
        return Result(True, 0.0, 0.0, "")

    scale = r if parameter is None else parameter.to(wide)
    if atol is None:
        slack = 0.0 if parameter is None else 2 * eps * scale.abs().max()
        weight = r.abs() + r.abs().max()
    else:
        slack, weight = atol, r.abs()
    allowed = slack + rtol * weight
    # Not "error > allowed": values near the largest float overflow, and inf is not below inf.
    bad = ~((error <= allowed) & torch.isfinite(allowed))
    needed = ((error - slack).clamp(min=0) / weight).nan_to_num(nan=0.0).max().item()
    norm = (a - r).norm().item() / (scale.norm().item() or 1.0)
    relative = norm / (eps or 1.0)
    if not bad.any():
        return Result(True, needed, relative, "")
    worst = int((error - allowed).nan_to_num(nan=inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), r.shape))
    message = (
        f"{position(index)}: reference {r[index].item():.9g}, actual {a[index].item():.9g}, difference "
        f"{error[index]:.3g}, allowed {allowed[index]:.3g}; {int(bad.sum())} of {r.numel()} elements differ"
    )
    return Result(False, needed, relative, message)


def position(index: tuple[int, ...]) -> str:
    """Return how an element is written behind its tensor's name; nothing for a scalar."""
    return str(list(index)) if index else ""


def compare_runs(
    reference: list[dict], actual: list[dict], rtol: float, atol: float | None
) -> tuple[dict[str, list[Result]], list[tuple]]:
    """Compare all ranks and steps, printing one line per rank.

    Returns the results by kind, and the mismatches as (step, place, rank, kind, name, message). The
    place is the tensor's among those of its step, so that they sort into causal order.
    """
    results = {kind: [] for kind in KINDS}
    mismatches = []
    for rank, (one, other) in enumerate(zip(reference, actual, strict=True)):
        count = len(mismatches)
        for step, (left, right) in enumerate(zip(one["records"], other["records"], strict=True)):
            left, right = flatten(left), flatten(right)
            for place, ((kind, name), tensor) in enumerate(left.items()):
                parameter = left["parameters", name] if kind == "deltas" else None
                result = compare_tensor(right[kind, name], tensor, rtol, atol, parameter)
                results[kind].append(result)
                if not result.passed:
                    mismatches.append((step, place, rank, kind, name, result.message))
        failed = len(mismatches) - count
        print(f"rank={rank} parity={f'FAILED mismatched_tensors={failed}' if failed else 'passed'}")
    return results, sorted(mismatches)


def print_tables(reference: list[dict], actual: list[dict], results: dict[str, list[Result]]) -> None:
    """Print the global losses by step, then the error by kind of tensor."""
    first, second = reference[0], actual[0]
    names = [f"reference {first['metadata']['device']}", f"actual {second['metadata']['device']}"]
    print(f"\nstep  {names[0]:>18}  {names[1]:>18}  {'difference':>10}   (global loss)")
    for step, (left, right) in enumerate(zip(first["records"], second["records"], strict=True)):
        difference = right["loss"] - left["loss"]
        print(f"{step + 1:4}  {left['loss']:18.9f}  {right['loss']:18.9f}  {difference:10.1e}")
    print(f"\n{'tensors':12}{'compared':>9}{'mismatched':>12}{'largest error':>16}{'passes at --rtol':>18}")
    for kind, items in results.items():
        failed = sum(not item.passed for item in items)
        error = f"{max(item.eps for item in items):.3g} eps"
        needed = f"{1.05 * max(item.needed_rtol for item in items):.1e}"  # rounding stays above
        print(f"{kind:12}{len(items):9}{failed:12}{error:>16}{needed:>18}")


def main() -> int:
    """Compare the two runs named on the command line; return the exit status."""

    def tolerance(text):
        value = float(text)
        if not 0 <= value < inf:
            raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    parser.add_argument("--reference-dir", type=Path, required=True, help="results of the trusted run")
    parser.add_argument("--actual-dir", type=Path, required=True, help="results of the run in question")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of both runs")
    parser.add_argument("--rtol", type=tolerance, default=RTOL, help=f"default: {RTOL}")
    atol_help = "default: rtol times the largest magnitude in the reference tensor"
    parser.add_argument("--atol", type=tolerance, help=atol_help)
    args = parser.parse_args()
    try:
        if args.world_size < 1:
            raise InputError(f"--world-size is {args.world_size}; nothing to compare, use at least 1")
        if args.reference_dir.resolve() == args.actual_dir.resolve():
            raise InputError(f"{args.actual_dir} would be compared with itself; give two runs")
        reference = load_run(args.reference_dir, args.world_size)
        actual = load_run(args.actual_dir, args.world_size)
        check_same_job(reference, actual)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    for title, directory, run in (
        ("reference", args.reference_dir, reference),
        ("actual", args.actual_dir, actual),
    ):
        print(f"{title}: {directory}", *(f"{key}={run[0]['metadata'][key]}" for key in SHOWN))
    results, mismatches = compare_runs(reference, actual, args.rtol, args.atol)
    print_tables(reference, actual, results)
    steps = reference[0]["metadata"]["steps"]
    summary = f"comparison ranks={args.world_size} steps={steps}"
    if mismatches:
        step, _, rank, kind, name, message = mismatches[0]
        tensors = sum(map(len, results.values()))
        ranks = len({mismatch[2] for mismatch in mismatches})
        print(f"\n{len(mismatches)} of {tensors} tensors failed, on {ranks} of {args.world_size} ranks.")
        print(f"First in causal order: rank {rank}, step {step + 1}, {kind} {name}{message}")
        print(f"FAIL {summary}")
        return 1
    if reference[0]["metadata"]["device"] == actual[0]["metadata"]["device"] == "cpu":
        print("\nBoth runs were made on a CPU: the job can be reproduced. No accelerator was checked.")
    print(f"PASS {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
