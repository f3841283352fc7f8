"""Parity at the full width: one layer of Llama 3.1 8B and of DeepSeek-V3 16B.

    python titan/parity_full.py                    both models, parameters in float32 and in bfloat16
    python titan/parity_full.py --family llama3 --dtype float32
    python titan/parity_full.py --device cuda      also on a device, compared with the CPU

Two runs of two training steps, DeepSeek's of one, from one seed checkpoint, under record_training.py:

    one-rank     eager, on one rank: no communication
    <device>     SimpleFSDP, compiled in mode jit, four ranks, TP2 x FSDP2; on the CPU, and on --device

compare_training.py compares the second with the first, and a device's with the CPU's. DeepSeek's routed
experts compute in bfloat16 whatever the parameters are: one bfloat16 eps is allowed, 65,536 of float32's.
After the first step, rounding may send a token to another expert. Its blocks are not checkpointed: the
load-balancing hook would halve the tokens that jit counts once.

A step has 32 tokens, and SGD takes it, without clipping: AdamW's state would be twice the parameters. It
needs 20 GiB of memory, and 5 GiB in --results for the seed checkpoint, which is removed.

Exit status: 0 parity, 1 mismatch, 2 invalid input or a run that failed.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from titan.parity import FAMILIES, launch  # noqa: E402
from training_common import InputError, make_parser  # noqa: E402

DTYPES = ["float32", "bfloat16"]
BFLOAT16_EPS = 65_536  # in eps of float32
STEPS = {"llama3": 2, "deepseek_v3": 1}


def record(folder: Path, device: str, ranks: int, steps: int, options: list[object]) -> None:
    """Record parity_train.py in a folder, with its options.

    Raises:
        InputError: a rank failed.
    """
    recorder = [HERE.parent / "record_training.py", "--output-dir", folder, "--steps", steps]
    log = folder.parent / "logs" / folder.name
    started = time.monotonic()
    launch(ranks, [*recorder, HERE / "parity_train.py", *options], log, device)
    seconds = time.monotonic() - started
    print(f"== {folder}: {ranks} ranks on the {device}, {steps} step(s) in {seconds:.0f} s", flush=True)


def compare(reference: Path, actual: Path, options: list[object]) -> int:
    """Compare two recordings, with options; return the exit status of compare_training.py."""
    print(f"== {actual} against {reference}", flush=True)
    script = [sys.executable, HERE.parent / "compare_training.py"]
    runs = ["--reference-dir", reference, "--actual-dir", actual, "--json", f"{actual}.json"]
    return subprocess.run([str(word) for word in [*script, *runs, *options]]).returncode


def check(family: str, dtype: str, args: argparse.Namespace) -> int:
    """Train a family with parameters of a type by both plans; return the comparisons' worst status.

    Raises:
        InputError: a run failed.
    """
    folder = args.results / f"{family}-{dtype}"
    seed, steps = folder / "seed", STEPS[family]
    shutil.rmtree(seed, ignore_errors=True)
    common = ["--size", "full", "--family", family, "--dtype", dtype, "--steps", steps]
    common += ["--assets", args.assets, "--seed-checkpoint", seed]
    common += ["--checkpointing", "none"] if family == "deepseek_v3" else []
    common += ["--vocabulary", args.vocabulary] if args.vocabulary else []
    devices = list(dict.fromkeys(["cpu", args.device]))
    try:
        launch(1, [HERE / "parity_train.py", *common, "--plan", "seed"], folder / "logs/seed")
        record(folder / "one-rank", "cpu", 1, steps, [*common, "--plan", "fsdp2"])
        for device in devices:
            record(folder / device, device, 4, steps, [*common, "--plan", "simple_fsdp", "--tp", 2])
    finally:
        shutil.rmtree(seed, ignore_errors=True)
    options = ["--norm-eps", BFLOAT16_EPS] if (family, dtype) == ("deepseek_v3", "float32") else []
    status = compare(folder / "one-rank", folder / "cpu", options)
    for device in devices[1:]:
        status = max(status, compare(folder / "cpu", folder / device, options))
    return status


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: both; repeatable")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both; repeatable")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "neuron"],
        default="cpu",
        help="of one more run (default: cpu, none)",
    )
    parser.add_argument("--vocabulary", type=int, help="words, to use less memory (default: all)")
    parser.add_argument("--assets", type=Path, default=Path(".titan"), help="from make_assets.py")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results/titan-parity-full"),
        help="recordings and logs, in a folder each",
    )
    return parser.parse_args()


def main() -> int:
    """Train and compare; return the exit status."""
    args = parse_args()
    try:
        return max(
            [
                check(family, dtype, args)
                for family in args.family or FAMILIES
                for dtype in args.dtype or DTYPES
            ]
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
