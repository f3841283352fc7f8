"""Time the CPU runs by phase: launch.py beside torchrun, in one table. No result is asserted.

    python tests/bench_launch.py --ranks 64                     launch.py, four modes
    python tests/bench_launch.py --ranks 8 --beside-torchrun    each mode also under torchrun

Phases, in seconds of rank 0: start (from the command to the first line of the script), init (options,
device, process group), wrap (model, sharding), steps (training; with it the wait for slower ranks),
record (collectives that exist for the record only), save. Memory is the fall of MemAvailable.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("start", "init", "wrap", "steps", "record", "save")
SCRIPTS = {
    "ddp": ["distributed_train.py", "--parallelism", "ddp"],
    "fsdp": ["distributed_train.py", "--parallelism", "fsdp"],
    "tp": ["distributed_train.py", "--parallelism", "tp"],
    "simplefsdp-tp": ["simplefsdp_tp_train.py", "--compile-backend", "aot_eager"],
}


def worker() -> None:
    """Run the script on the command line in this rank, timing the functions it calls."""
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds["start"] = time.time() - float(os.environ["BENCH_STARTED"])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    import training_common

    initialized = 0.0

    def timed(name, phase):
        original = getattr(training_common, name)

        def call(*args, **kwargs):
            nonlocal initialized
            started = time.perf_counter()
            if name == "train":
                seconds["wrap"] = started - initialized
            result = original(*args, **kwargs)
            seconds[phase] += time.perf_counter() - started
            if name == "initialize":
                initialized = time.perf_counter()
            return result

        setattr(training_common, name, call)

    timed("initialize", "init")
    timed("train", "steps")
    timed("full_cpu_list", "record")
    timed("average_losses", "record")
    timed("save_results", "save")
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ["RANK"] == "0":
        seconds["steps"] -= seconds["record"]
        Path(os.environ["BENCH_OUTPUT"]).write_text(json.dumps(seconds))


def available_gib() -> float:
    """Return the memory that this machine can still give, in GiB; 0 where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def measure(launcher: list[str], mode: str, ranks: int) -> dict | None:
    """Run one mode; return its seconds by phase, in total, and its peak memory; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        script, *options = SCRIPTS[mode]
        command = [*launcher, "--standalone", f"--nproc-per-node={ranks}", "--log-dir", f"{folder}/logs"]
        command += ["--redirects", "3", str(Path(__file__).resolve()), str(ROOT / script), *options]
        command += ["--device", "cpu", "--backend", "gloo", "--expected-world-size", str(ranks)]
        command += ["--output-dir", f"{folder}/results"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_OUTPUT": f"{folder}/seconds.json"}
        before = least = available_gib()
        started = time.time()
        with subprocess.Popen(
            command, env=environment | {"BENCH_STARTED": str(started)}, stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None:
                least = min(least, available_gib())
                time.sleep(0.1)
            if process.returncode:
                print(process.stderr.read().strip().splitlines()[-1], file=sys.stderr)
                return None
        seconds = json.loads(Path(folder, "seconds.json").read_text())
        return seconds | {"total": time.time() - started, "GiB": before - least}


def main() -> int:
    """Measure and print the table; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64, help="default: 64")
    parser.add_argument("--beside-torchrun", action="store_true", help="run each mode under torchrun, too")
    parser.add_argument("--modes", nargs="+", default=list(SCRIPTS), choices=SCRIPTS)
    args = parser.parse_args()
    launchers = {"launch.py": [sys.executable, str(ROOT / "launch.py")]}
    if args.beside_torchrun:
        launchers["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]

    columns = (*PHASES, "total", "GiB")
    print(f"{args.ranks} ranks, ten steps, {os.cpu_count()} cores; seconds by phase of rank 0")
    print(
        f"{'mode':15}{'launcher':11}" + "".join(f"{name:>8}" for name in columns) + "   total to launch.py's"
    )
    failed, sums = False, dict.fromkeys(launchers, 0.0)
    for mode in args.modes:
        ours = None
        for launcher, command in launchers.items():
            row = measure(command, mode, args.ranks)
            if row is None:
                print(f"{mode:15}{launcher:11}  failed", flush=True)
                failed = True
                continue
            ours = ours or row["total"]
            sums[launcher] += row["total"]
            ratio = f"{row['total'] / ours:.1f}x" if launcher != "launch.py" else ""
            cells = "".join(f"{row[name]:8.1f}" for name in columns)
            print(f"{mode:15}{launcher:11}{cells}   {ratio}", flush=True)
    for launcher, total in sums.items():
        print(f"{'all':15}{launcher:11}{total:{8 * (len(PHASES) + 1)}.1f}")
    return int(failed)


if __name__ == "__main__":
    if "BENCH_OUTPUT" in os.environ:
        worker()
    else:
        sys.exit(main())
