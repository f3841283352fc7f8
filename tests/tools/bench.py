"""Time the CPU runs by phase, launch.py beside torchrun, and the comparison of two such runs.

    python tests/tools/bench.py --ranks 64                     launch.py, four modes
    python tests/tools/bench.py --ranks 4 16 64 128 256        how each grows
    python tests/tools/bench.py --ranks 8 --beside-torchrun    each mode also under torchrun

Prints one table. No result is asserted.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Seconds on one clock, each column from where the one before ends. Together they are the total.
PHASES = (
    "start",  # from the command until the last rank runs the first line of its script
    "init",  # until the last rank has its process group; under torchrun, each rank imports torch here
    "wrap",  # until the last rank has its model, wrapped or sharded, and its optimizer
    "steps",  # until the last rank has trained and gathered its record
    "save",  # until the last rank has written its file
    "end",  # until the command has ended
)
# Not part of the total: the fall of MemAvailable during the run; the size of all rank files; the seconds
# in which a new process compares the run with a copy of itself, and in which one only reads the same files.
COLUMNS = (*PHASES, "total", "GiB", "MiB", "compare", "read")
SCRIPTS = {
    "ddp": ["distributed_train.py", "--parallelism", "ddp"],
    "fsdp": ["distributed_train.py", "--parallelism", "fsdp"],
    "tp": ["distributed_train.py", "--parallelism", "tp"],
    "simplefsdp-tp": ["simplefsdp_tp_train.py", "--compile-backend", "aot_eager"],
}


def worker() -> None:
    """Run the script on the command line in this rank and write down when each phase ended, except "end"."""
    ended = {"start": time.monotonic()}
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    import training_common

    def marked(name, before=None, after=None):
        original = getattr(training_common, name)

        def call(*args, **kwargs):
            if before:
                ended[before] = time.monotonic()
            result = original(*args, **kwargs)
            if after:
                ended[after] = time.monotonic()
            return result

        setattr(training_common, name, call)

    marked("initialize", after="init")
    marked("train", before="wrap")
    marked("save_results", before="steps", after="save")
    runpy.run_path(sys.argv[0], run_name="__main__")
    Path(os.environ["BENCH_FOLDER"], f"ended-{os.environ['RANK']}.json").write_text(json.dumps(ended))


def available_gib() -> float:
    """Return the memory that this machine can still give, in GiB; 0 where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def measure_run(launcher: list[str], mode: str, ranks: int, folder: Path) -> dict | None:
    """Run one mode; return its seconds by phase and in total, and its memory. None if it failed."""
    script, *options = SCRIPTS[mode]
    command = [*launcher, "--standalone", f"--nproc-per-node={ranks}", "--log-dir", f"{folder}/logs"]
    command += ["--redirects", "3", str(Path(__file__).resolve()), str(ROOT / script), *options]
    command += ["--device", "cpu", "--backend", "gloo", "--expected-world-size", str(ranks)]
    command += ["--output-dir", f"{folder}/results"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(folder)}
    before = least = available_gib()
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            least = min(least, available_gib())
            time.sleep(0.1)
        if process.returncode:
            print(process.stderr.read().strip().splitlines()[-1], file=sys.stderr)
            return None
    finished = time.monotonic()
    of_ranks = [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(ranks)]
    ended = {phase: max(rank[phase] for rank in of_ranks) for phase in PHASES[:-1]} | {"end": finished}
    begun = [started, *ended.values()]
    seconds = {phase: ended[phase] - begin for phase, begin in zip(PHASES, begun, strict=False)}
    size = sum(path.stat().st_size for path in (folder / "results").iterdir()) / 2**20
    return seconds | {"total": finished - started, "GiB": before - least, "MiB": size}


def measure_comparison(ranks: int, folder: Path) -> dict:
    """Compare the run in a folder with a copy of it, and read both; return the seconds of each."""
    import torch

    reference, actual = folder / "reference", folder / "results"
    shutil.copytree(actual, reference)
    content = torch.load(reference / "rank-0.pt", weights_only=True)
    content["metadata"]["saved_at"] -= 1  # a copy would be refused
    torch.save(content, reference / "rank-0.pt")
    compare = [ROOT / "compare_training.py", "--reference-dir", reference, "--actual-dir", actual]
    compare += ["--world-size", str(ranks)]
    read = ["-c", "import sys, torch\nfor path in sys.argv[1:]: torch.load(path, weights_only=True)"]
    read += [*reference.iterdir(), *actual.iterdir()]
    seconds = {}
    for name, command in (("compare", compare), ("read", read)):
        started = time.monotonic()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        seconds[name] = time.monotonic() - started
    return seconds


def measure(launcher: list[str], mode: str, ranks: int) -> dict | None:
    """Run one mode and compare the run with a copy; return the columns. None if the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        row = measure_run(launcher, mode, ranks, Path(folder))
        return row and row | measure_comparison(ranks, Path(folder))


def main() -> int:
    """Measure and print the table; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64], help="default: 64")
    parser.add_argument("--beside-torchrun", action="store_true", help="run each mode under torchrun, too")
    parser.add_argument("--modes", nargs="+", default=list(SCRIPTS), choices=SCRIPTS)
    args = parser.parse_args()
    launchers = {"launch.py": [sys.executable, str(ROOT / "launch.py")]}
    if args.beside_torchrun:
        launchers["torchrun"] = [sys.executable, "-m", "torch.distributed.run"]

    print(f"ten steps, {os.cpu_count()} cores; seconds until the last rank is done")
    heads = "".join(f"{name:>8}" for name in COLUMNS)
    print(f"{'mode':15}{'ranks':>5} {'launcher':10}{heads}   total to launch.py's")
    failed = False
    for ranks in args.ranks:
        sums = dict.fromkeys(launchers, 0.0)
        for mode in args.modes:
            ours = None
            for launcher, command in launchers.items():
                row = measure(command, mode, ranks)
                if row is None:
                    print(f"{mode:15}{ranks:5} {launcher:10}  failed", flush=True)
                    failed = True
                    continue
                ours = ours or row["total"]
                sums[launcher] += row["total"]
                ratio = f"{row['total'] / ours:.1f}x" if launcher != "launch.py" else ""
                cells = "".join(f"{row[name]:8.1f}" for name in COLUMNS)
                print(f"{mode:15}{ranks:5} {launcher:10}{cells}   {ratio}", flush=True)
        for launcher, total in sums.items():
            print(f"{'all':15}{ranks:5} {launcher:10}{total:{8 * (len(PHASES) + 1)}.1f}")
    return int(failed)


if __name__ == "__main__":
    if "BENCH_FOLDER" in os.environ:
        worker()
    else:
        sys.exit(main())
