"""Run the training scripts with one real mistake at a time, and without any, in a single launch.

    python launch.py --standalone --nproc-per-node=4 tests/silent_bugs/faulty_runs.py --output-dir DIR
    python launch.py --standalone --nproc-per-node=8 tests/silent_bugs/faulty_runs.py --output-dir DIR

Four ranks run the cases of ddp, fsdp and tp, eight those of simplefsdp_tp (2 replicas of TP_DEGREE 4
ranks). The cases are in faulty_<mode>.py, what they share in faulty_cases.py. Each case replaces a
piece of the real script, whose own main() then trains with it: what is recorded is what the faulty
run computed. A case's rank files go into DIR/<case>, those of a second run of the same case into
DIR/<case>.again (--repeat 2), and those of the unchanged scripts into DIR/clean-<mode>-seed<0, 1, 2>.
Nothing is compared here: the cases say what a comparison with the clean run of seed 0 has to find.

Compiling takes seconds per run. aot_eager runs the same operations as the uncompiled model, and the
records have the same bits, so of simplefsdp_tp only the clean run of seed 0 and the case whose
mistake is in the compiled graph are compiled; --compile compiles all.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from faulty_cases import CASES, RANK, RANKS, SEEDS, STEPS

import distributed_train as eager
import simplefsdp_tp_train as simplefsdp
import training_common
from training_recorder import Recorder

# Each registers its cases when it is imported, in the order in which they run.
for module in ("ddp_setup", "ddp_loop", "fsdp", "tp", "simplefsdp"):
    importlib.import_module(f"faulty_{module}")


def run(mode: str, seed: int, apply: Callable | None, compiled: bool, directory: Path, steps: int) -> None:
    """Run the mode's script as if it had been started with these options, with a case's mistake if any.

    record_training.py's recording of it goes into a folder beside it, whose name ends in .sketches.
    """
    options = f"--device cpu --backend gloo --expected-world-size {RANKS[mode]} --seed {seed} --steps {steps}"
    if mode == "simplefsdp_tp":
        main = simplefsdp.main
        options += " --compile-backend aot_eager"
        torch._dynamo.reset()  # compiled code would outlive the case whose mistake is in it
    else:
        main = eager.main
        options += f" --parallelism {mode}"
    with ExitStack() as patches:

        def patch(target, name, replacement):
            patches.enter_context(mock.patch.object(target, name, replacement))

        patch(sys, "argv", [mode, *options.split(), "--output-dir", str(directory)])
        if not compiled:
            patch(torch, "compile", lambda model, **options: model)
        if apply:
            apply(patch)
        if directory.suffix == ".again":  # the first run's is enough
            main()
            return
        sketches = directory.with_name(f"{directory.name}.sketches")
        sketches.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(
            argparse.Namespace(
                **{"output_dir": sketches, "steps": steps, "skip": 0, "activations": "*"},
                **{"full": [], "afterwards": "continue", "script": mode, "arguments": []},
            )
        )
        main()
        recorder.end_of_script()


def main() -> None:
    """Run the clean scripts and the cases of this number of ranks one after another."""
    parser = training_common.make_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, help="one directory per run is made here")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument(
        "--repeat", type=int, choices=(1, 2), default=1, help="runs of each case (default: 1)"
    )
    parser.add_argument("--only", help="names of cases or clean runs, separated by commas (default: all)")
    parser.add_argument("--compile", action="store_true", help="compile the cases of simplefsdp_tp, too")
    args = parser.parse_args()

    modes = [mode for mode, ranks in RANKS.items() if ranks == int(os.environ["WORLD_SIZE"])]
    runs = {f"clean-{mode}-seed{seed}": (mode, seed, None) for mode in modes for seed in SEEDS}
    for name, faulty in CASES.items():
        if faulty.mode in modes:
            runs[name] = (faulty.mode, SEEDS[0], faulty.apply)
            if args.repeat == 2:
                runs[f"{name}.again"] = runs[name]
    wanted = args.only.split(",") if args.only else list(runs)
    if not modes:
        raise training_common.InputError(f"start {' or '.join(map(str, sorted(set(RANKS.values()))))} ranks")
    if unknown := [name for name in wanted if name not in runs]:
        raise training_common.InputError(f"--only: {', '.join(unknown)}: no such run at this number of ranks")
    wanted += [f"{name}.again" for name in wanted if args.only and f"{name}.again" in runs]

    # One process group for all runs. Each script still waits for all ranks where it would have
    # started its own: until then, a rank may be removing the files of an earlier run.
    dist.init_process_group("gloo")
    with ExitStack() as kept:
        kept.enter_context(mock.patch.object(dist, "init_process_group", lambda *_, **kw: dist.barrier()))
        kept.enter_context(mock.patch.object(dist, "rendezvous", lambda url: iter([[mock.Mock()]])))
        kept.enter_context(mock.patch.object(training_common, "check_same_options", lambda *_: None))
        kept.enter_context(mock.patch.object(dist, "destroy_process_group", lambda: None))
        for module in (training_common, eager, simplefsdp):
            kept.enter_context(mock.patch.object(module, "print_line", lambda text: None))
        for name in wanted:
            mode, seed, apply = runs[name]
            started = time.monotonic()
            try:
                compiled = args.compile or (apply is None and seed == SEEDS[0])
                run(mode, seed, apply, compiled, args.output_dir / name, args.steps)
            except Exception as error:
                raise RuntimeError(f"{name}: {error}") from error
            if RANK == 0:
                print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    training_common.run_script(main)
