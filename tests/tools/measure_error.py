"""Measure the error of clean float32 CPU runs against the oracle: the ground of the default tolerances.

    python tests/tools/measure_error.py --ranks 4 8 16 64 --seeds 20 --steps 10

Prints, for each mode and rank count, the worst of all ranks, steps and seeds: by kind of tensor the
norm-wise error in eps, the element-wise one in eps of |r| + max |r|, and the largest share of the
default tolerance that any tensor used (above 1 would be a false alarm). No result is asserted.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SCRIPTS = {
    "ddp": ("distributed_train", ["--parallelism", "ddp"]),
    "fsdp": ("distributed_train", ["--parallelism", "fsdp"]),
    "tp": ("distributed_train", ["--parallelism", "tp"]),
    "simplefsdp-tp": ("simplefsdp_tp_train", ["--compile-backend", "aot_eager"]),
}


def worker(mode: str, seeds: int, steps: int, folder: Path) -> None:
    """In one rank: train with each seed and write the worst figures of this rank to a file."""
    import importlib

    import torch
    import torch.distributed as dist

    import training_common
    from oracle_train import train_oracle
    from training_comparison import Comparison
    from training_records import OUTPUT, slacks_of, steps_of
    from training_tolerance import DEFAULTS

    name, options = SCRIPTS[mode]
    script = importlib.import_module(name)
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    worst = {}

    def keep(args, records, **metadata):
        whole = {
            "metadata": {"learning_rate": 0.01},
            "records": train_oracle(metadata["model"], args.seed, steps),
        }
        expected = steps_of(whole)
        for tensors in expected[1:]:  # the oracle's output is that of the whole batch
            tensors[OUTPUT] = tensors[OUTPUT].chunk(metadata["dp_degree"])[metadata["dp_rank"]]
        comparison = Comparison(DEFAULTS, any_type=True)
        comparison.add(metadata, expected, steps_of({"records": records}), slacks_of(whole))
        for kind, results in comparison.by_kind().items():
            for field in ("eps", "needed_rtol", "score"):
                largest = max(getattr(result, field) for result in results)
                worst.setdefault(kind, {})[field] = max(worst.get(kind, {}).get(field, 0.0), largest)

    dist.init_process_group("gloo")
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(training_common, "check_same_options"),
        mock.patch.object(script, "save_results", keep),
        # One mesh for all seeds: each has process groups, and each of those has threads.
        mock.patch.object(script, "init_device_mesh", functools.cache(script.init_device_mesh)),
        # aot_eager runs the operations of the eager model, and compiling 64 times takes most of the time.
        mock.patch.object(torch, "compile", lambda model, **options: model),
    ):
        for seed in range(seeds):
            sys.argv = [
                name,
                *options,
                "--device",
                "cpu",
                "--backend",
                "gloo",
                "--expected-world-size",
                ranks,
            ]
            sys.argv += ["--seed", str(seed), "--steps", str(steps), "--output-dir", str(folder / "out")]
            script.main()
    (folder / f"worst-{rank}.json").write_text(json.dumps(worst))
    dist.destroy_process_group()


def main() -> None:
    """Launch all runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--modes", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.seeds, args.steps, args.folder)
        return
    kinds = ("outputs", "losses", "gradients", "parameters", "deltas")
    print(
        f"{args.seeds} seeds, {args.steps} steps; norm-wise error / element-wise error, in eps; share of "
        "the tolerance"
    )
    print(f"{'mode':15}{'ranks':>6}" + "".join(f"{kind:>16}" for kind in kinds) + f"{'share':>8}", flush=True)
    for ranks in args.ranks:
        for mode in args.modes:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, ROOT / "launch.py", "--standalone", f"--nproc-per-node={ranks}"]
                command += ["--redirects", "3", "--log-dir", f"{folder}/logs", __file__, "--worker", mode]
                command += ["--seeds", args.seeds, "--steps", args.steps, "--folder", folder]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run([str(part) for part in command], check=True, env=environment)
                files = [json.loads(path.read_text()) for path in Path(folder).glob("worst-*.json")]
            if len(files) != ranks:
                raise SystemExit(f"error: {len(files)} of {ranks} ranks measured")
            cells, share = "", 0.0
            for kind in kinds:
                worst = {f: max(file[kind][f] for file in files) for f in ("eps", "needed_rtol", "score")}
                cells += f"{worst['eps']:9.2f} /{worst['needed_rtol'] * 2**23:5.2f}"
                share = max(share, worst["score"])
            print(f"{mode:15}{ranks:6}{cells}{share:8.3f}", flush=True)


if __name__ == "__main__":
    main()
