"""Compare two recorded training runs rank by rank, step by step, tensor by tensor.

    python compare_training.py --reference-dir results/cpu-ddp --actual-dir results/ddp --world-size 64
    python compare_training.py --reference-dir results/oracle-eager --actual-dir results/ddp --world-size 64
    python compare_training.py --actual-dir results/ddp --world-size 64         # without a reference

A reference of one rank, such as the oracle's, is the whole job in one process: each rank is held
against its part of it. Compared are initial parameters (step 0), outputs, global losses, full
gradients, updated parameters and deltas, under the names that the files give them. Each run is also
checked by itself. What makes a tensor pass is in training_tolerance.py, what has to hold in any run in
training_invariants.py, how a likely cause is found in training_diagnosis.py.

Exit status: 0 parity, 1 mismatch, 2 nothing that could be compared. Needs training_*.py beside it.
"""

import argparse
import json
import shlex
import sys
import traceback
from math import inf
from pathlib import Path

from training_common import InputError, make_parser, write_then_rename
from training_comparison import Outcome, cause_of, compare_runs, in_causal_order, ranks_of
from training_evidence import ROUNDING_EPS
from training_recorded_comparison import compare_recordings
from training_recorded_diagnosis import cause_of_recordings
from training_recorded_runs import Recording
from training_recorded_witness import judge_by_witness
from training_recordings import is_recording
from training_records import SHOWN, Run, check_same_job, ranges
from training_summary import Runs, describe_growth, plain, summarize
from training_tolerance import ELEMENT_EPS, NORM_EPS, Tolerance

# ---------------------------------------------------------------- what is printed

NAMED = 8  # of tensors that are zero but for rounding, by name


def print_runs(runs: Runs) -> None:
    """Print where each run is and what it ran on."""
    for title, run in runs.items():
        if run:
            known = [key for key in SHOWN if run.metadata.get(key) is not None]
            print(f"{title}: {run.directory}", *(f"{key}={run.metadata[key]}" for key in known))


def print_ranks(summary: dict, outcome: Outcome) -> None:
    """Print a line for each rank."""
    for rank in range(summary["world_size"]):
        failed = [finding.check for finding in outcome.findings if finding.rank == rank]
        mismatched = failed.count("reference")
        broken = f" broken_invariants={len(failed) - mismatched}" if len(failed) > mismatched else ""
        if summary["reference"]:
            parity = f"FAILED mismatched_tensors={mismatched}{broken}" if failed else "passed"
            print(f"rank={rank} parity={parity}")
        else:
            print(f"rank={rank} invariants={f'FAILED{broken}' if failed else 'held'}")


def print_losses(summary: dict) -> None:
    """Print the global losses of all runs by step."""
    names = [name for name in ("oracle", "reference", "actual") if summary[name]]
    head = ""
    for name in names:
        label = name if name == "oracle" else f"{name} {summary[name]['label']}"
        head += f"{label:>20}"
    if summary["reference"]:
        head += f"{'difference':>12}"
    what = "loss of backward, mean over all" if "path" in summary else "global loss"
    print(f"\nstep{head}   ({what})")
    for losses in summary["losses"]:
        line = f"{losses['step']:4}"
        for name in names:
            line += f"{'none':>20}" if losses[name] is None else f"{losses[name]:20.9f}"
        if summary["reference"] and None not in (losses["actual"], losses["reference"]):
            line += f"{losses['actual'] - losses['reference']:12.1e}"
        print(line)


def print_errors(summary: dict) -> None:
    """Print the errors by kind of tensor, and the tolerances with which all would pass."""
    if not summary["kinds"]:
        return

    def needed(rtol: float, norm_eps: float) -> str:
        # Above what was measured, so that rounding the figure does not take it below.
        by_norm = f"--norm-eps {1.05 * norm_eps:.2g}"
        return by_norm if "path" in summary else f"--rtol {1.05 * rtol:.1e} {by_norm}"

    print(f"\n{'tensors':12}{'compared':>9}{'mismatched':>12}{'largest error':>16}   would pass with")
    for row in summary["kinds"]:
        error = f"{row['eps']:.3g} eps"
        passes = needed(row["needed_rtol"], row["needed_norm_eps"])
        print(f"{row['kind']:12}{row['compared']:9}{row['mismatched']:12}{error:>16}   {passes}")
    rtol = max(row["needed_rtol"] for row in summary["kinds"])
    norm_eps = max(row["needed_norm_eps"] for row in summary["kinds"])
    print(f"{'all':49}   {needed(rtol, norm_eps)}")
    negligible = [row for row in summary["tensors"] if row["negligible"]]
    for row in negligible[:NAMED]:
        times = f"{row['negligible']} times not compared"
        print(f"{row['kind']} {row['name']}: zero but for rounding, {times}")
    if len(negligible) > NAMED:
        print(f"and so are {len(negligible) - NAMED} more tensors")


def print_oracle_errors(summary: dict) -> None:
    """Print how far reference and actual run are from the oracle."""
    if not summary["oracle_errors"]:
        return
    reference, actual = (f"{summary[name]['label']} ({name})" for name in ("reference", "actual"))
    print(f"\n{'against the oracle':20}{reference:>18}{actual:>18}{'ratio':>8}")
    for row in summary["oracle_errors"]:
        one, other = f" {row['reference_eps']:.3g} eps", f" {row['actual_eps']:.3g} eps"
        ratio = "-" if row["ratio"] is None else f" {row['ratio']:.3g}"
        print(f"{row['kind']:20}{one:>18}{other:>18}{ratio:>8}")


def print_invariants(summary: dict) -> None:
    """Print for each run how many invariants hold, and those that do not."""
    print()
    for run in dict.fromkeys(row["run"] for row in summary["invariants"]):
        rows = [row for row in summary["invariants"] if row["run"] == run]
        # With one rank, or another optimizer than SGD, some have nothing to check.
        idle = [row["name"] for row in rows if not row["checked"]]
        rows = [row for row in rows if row["checked"] or row["failed"]]
        broken = [row for row in rows if row["failed"]]
        more = f"; nothing to check for {', '.join(idle)}" if idle else ""
        print(f"invariants of the {run} run: {len(rows) - len(broken)} of {len(rows)} hold{more}")
        for row in broken:
            print(f"  broken {row['failed']} times: {row['name']}: {row['text']}")
    print()


def print_first(summary: dict) -> None:
    """Print the likely cause in plain words, then where the runs first differ."""
    first = summary["first"]
    print(f"Likely cause: {summary['cause'] or 'not known, nothing that we look for explains it'}")
    ranks = f"rank{'s' if len(first['ranks']) > 1 else ''} {ranges(first['ranks'])}"
    step = f"step {first['step']}" if first["step"] else "step 0 (before training)"
    print(f"First in causal order: {ranks}, {step}, {first['kind']} {first['name']}{first['message']}")
    if "path" in summary and first["check"] == "reference" and first["step"]:
        print("Everything before it agrees.")
    print_growth(summary, before=first["step"])
    print_worst_element(summary)
    if first["check"] != "reference":
        recorded = "learning_rate" not in summary["actual"]["metadata"]
        fix = '; another optimizer than plain SGD? Name it: save_results(..., optimizer="AdamW")'
        of_sgd = first["check"].startswith("sgd") and not recorded
        print(f"Broken invariant: {first['check']}{fix if of_sgd else ''}")
    mismatched = sum(row["mismatched"] for row in summary["kinds"])
    compared = sum(row["compared"] for row in summary["kinds"])
    failed, ranks = len(summary["failed_ranks"]), summary["world_size"]
    print(f"{mismatched} of {compared} tensors failed, on {failed} of {ranks} ranks." if compared else "")


def print_growth(summary: dict, before: int | None = None) -> None:
    """Print how errors grow over the steps, or how large they were before the first step that fails."""
    if text := describe_growth(summary["largest_errors"], before):
        print(text)


def print_worst_element(summary: dict) -> None:
    """Print where in the first tensor of a recording the runs differ most, or how to find out."""
    first = summary["first"]
    if "path" not in summary or first["kind"] not in ("gradients", "parameters"):
        return
    if element := summary["worst_element"]:
        numbers = f"reference {element['reference']:.9g}, actual {element['actual']:.9g}"
        print(f"It differs most in element {element['index']}: {numbers}.")
    elif first["check"] == "reference":
        print(f"For its elements record both runs again with: --full {shlex.quote(first['name'])}")


def print_what_was_not_checked(runs: Runs) -> None:
    """Say so if no accelerator took part: a CPU's PASS must not be taken for a device's."""
    labels = {run.label for run in runs.values() if run}
    if "stand-in" in labels:
        print("No accelerator was checked: the stand-in for Neuron computes on the CPU.")
    elif labels <= {"cpu", "oracle"}:
        print("No accelerator was checked: this was computed on a CPU.")


def show_progress(text: str) -> None:
    """Show what is being done, on a terminal only; nothing stays of it."""
    if sys.stderr.isatty():
        print(f"\r{text:40}\r", end="", file=sys.stderr)


# ---------------------------------------------------------------- the command


def tolerance_number(text: str) -> float:
    """Return a tolerance given on the command line."""
    value = float(text)
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def parse_arguments() -> argparse.Namespace:
    """Return the options, checked as far as that is possible without opening a file of results."""
    parser = make_parser(__doc__)
    option = parser.add_argument
    option("--reference-dir", type=Path, help="the trusted run: of as many ranks, or of one (the oracle's)")
    option("--actual-dir", type=Path, required=True, help="the run in question")
    option(
        "--oracle-dir",
        type=Path,
        help="a run of one rank: shows both runs' errors against it, allows its slack",
    )
    option(
        "--witness",
        type=Path,
        help="for recordings in bfloat16: one of the same script in float32 on one rank",
    )
    option("--world-size", type=int, help="ranks of the run in question; recordings say it themselves")
    option("--rtol", type=tolerance_number, help=f"default: {ELEMENT_EPS:g} eps of the dtype")
    option(
        "--atol",
        type=tolerance_number,
        help="default: rtol times the largest magnitude in the reference tensor",
    )
    option(
        "--norm-eps",
        type=tolerance_number,
        help=f"default: {NORM_EPS:g}; with --rtol or --atol: not judged",
    )
    option("--json", type=Path, help="write everything that was found to this file")
    args = parser.parse_args()
    recorded = is_recording(args.actual_dir)
    if args.world_size is None and not (args.actual_dir / "rank-0.pt").is_file():
        raise InputError(f"{args.actual_dir} has no rank-0.pt: give the directory of a run that finished")
    if args.world_size is None and not recorded:
        raise InputError(f"{args.actual_dir} holds no recording; give --world-size for results of train()")
    if args.world_size is not None and args.world_size < 1:
        raise InputError(f"--world-size is {args.world_size}; nothing to compare, use at least 1")
    others = [path for path in (args.reference_dir, args.oracle_dir, args.witness) if path]
    if args.actual_dir.resolve() in [path.resolve() for path in others]:
        raise InputError(f"{args.actual_dir} would be compared with itself; give two runs")
    if args.witness and not (recorded and args.reference_dir):
        raise InputError(
            "--witness judges two recordings; give --reference-dir and --actual-dir of recordings"
        )
    if args.oracle_dir and not args.reference_dir:
        raise InputError("--oracle-dir is shown beside a reference; give it as --reference-dir instead")
    if args.oracle_dir and (args.oracle_dir / "rank-1.pt").exists():
        raise InputError(f"--oracle-dir {args.oracle_dir} holds a run of several ranks; give one of one rank")
    if args.json and (args.json.suffix != ".json" or not args.json.parent.is_dir()):
        raise InputError(f"--json {args.json}: give a name ending in .json in an existing directory")
    return args


def compare(args: argparse.Namespace) -> int:
    """Compare as the options say, print and write what was found; return the exit status."""
    if args.json:
        args.json.unlink(missing_ok=True)  # what an earlier comparison left would be taken for this one's
    tolerance = Tolerance(args.rtol, args.atol, args.norm_eps)
    if is_recording(args.actual_dir):
        runs, outcome, cause = compare_sketches(args, tolerance)
    else:
        runs, outcome, cause = compare_tensors(args, tolerance)
    actual, reference = runs["actual"], runs["reference"]
    summary = summarize(outcome, runs, tolerance, cause)

    print_runs(runs)
    print_ranks(summary, outcome)
    print_losses(summary)
    print_errors(summary)
    print_oracle_errors(summary)
    print_invariants(summary)
    for note in summary["notes"]:
        print(f"note: {note}")
    if outcome.findings:
        print_first(summary)
    else:
        print_growth(summary)
        print_what_was_not_checked(runs)
    if args.json:
        with write_then_rename(args.json) as temporary:
            temporary.write_text(json.dumps(plain(summary), indent=1, allow_nan=False, default=str) + "\n")
    what = "comparison" if reference else "invariants"
    print(f"{summary['verdict']} {what} ranks={actual.world_size} steps={summary['steps']}")
    return 1 if outcome.findings else 0


def compare_tensors(args: argparse.Namespace, tolerance: Tolerance) -> tuple[Runs, Outcome, str | None]:
    """Compare runs that hold whole tensors."""
    actual = Run(args.actual_dir, args.world_size)
    reference = args.reference_dir and Run(args.reference_dir, args.world_size, may_be_whole=True)
    oracle = args.oracle_dir and Run(args.oracle_dir, 1, may_be_whole=True)
    for run in filter(None, (reference, oracle)):
        check_same_job(run, actual)
    outcome = compare_runs(reference, actual, oracle, tolerance, show_progress)
    cause = cause_of(outcome, reference, actual) if outcome.findings else None
    return {"reference": reference, "actual": actual, "oracle": oracle}, outcome, cause


def compare_sketches(args: argparse.Namespace, tolerance: Tolerance) -> tuple[Runs, Outcome, str | None]:
    """Compare recordings. Raises InputError for options that need whole tensors."""
    for option in ("rtol", "atol", "oracle_dir"):
        if getattr(args, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise InputError(
                f"{name} needs whole tensors, and {args.actual_dir} holds sketches; use --norm-eps"
            )
    actual = Recording(args.actual_dir)
    if args.world_size not in (None, actual.world_size):
        raise InputError(
            f"--world-size is {args.world_size}, {args.actual_dir} is of {actual.world_size} ranks; leave it "
            "out"
        )
    reference = args.reference_dir and Recording(args.reference_dir)
    outcome, cause, unit = compare_recordings(reference, actual, tolerance), None, 0.0
    if args.witness:
        added, own_errors = judge_by_witness(outcome.comparison, reference, actual, Recording(args.witness))
        outcome = outcome._replace(findings=in_causal_order(outcome.findings + added, outcome.order))
    if outcome.findings:
        first = outcome.findings[0]
        if args.witness and first in added:
            unit = own_errors[(first.kind, first.name), first.step] / ROUNDING_EPS
        cause = cause_of_recordings(first, ranks_of(first, outcome.findings), reference, actual, unit)
    return {"reference": reference, "actual": actual, "oracle": None}, outcome, cause


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        return compare(parse_arguments())
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:  # status 1 is a mismatch, which this is not
        traceback.print_exc()
        print("error: the comparison broke off, nothing is known of the runs", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
