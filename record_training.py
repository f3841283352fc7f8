"""Record what a PyTorch training script computes, without a change to the script.

    python record_training.py --output-dir results/one --steps 3 train.py ARGS...       # or -m package.train
    torchrun --standalone --nproc-per-node=4 record_training.py --output-dir results/four train.py ARGS...
    python compare_training.py --reference-dir results/one --actual-dir results/four

The two runs may differ in ranks, parallelism, device or compilation. Each rank writes what it sees to
rank-<rank>.pt: of every tensor a sketch of a few KB (training_sketches.py), which needs no collective.
RECORDING.md says what is recorded and what cannot be. Needs training_*.py beside it.

Exit status: the script's own; 0 if it was stopped after --steps; 2 if nothing could be recorded.
"""

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from training_common import InputError, make_parser, print_line
from training_recorder import Recorder

# ---------------------------------------------------------------- the command


def parse_arguments() -> argparse.Namespace:
    """Return the options; what follows the script's name is the script's own."""
    parser = make_parser(__doc__)
    option = parser.add_argument
    option("--output-dir", type=Path, required=True, help="where rank-<rank>.pt is written")
    option("--steps", type=int, default=3, help="optimizer steps to record (default: 3)")
    option(
        "--skip", type=int, default=0, help="optimizer steps before the first that is recorded (default: 0)"
    )
    option(
        "--activations",
        default="*",
        metavar="PATTERN",
        help="which modules, such as 'layers.0.*' (default: all), or none",
    )
    option(
        "--full",
        action="append",
        default=[],
        metavar="NAME",
        help="record this parameter whole, too; may be repeated, a pattern, or all",
    )
    option(
        "--afterwards",
        choices=("stop", "continue"),
        default="stop",
        help="what the script does when the steps are recorded (default: stop)",
    )
    option("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as of python -m")
    option("script", metavar="SCRIPT")
    option("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    args = parser.parse_args()
    if args.steps < 1:
        raise InputError(f"--steps is {args.steps}; record at least one step")
    if args.skip < 0:
        raise InputError(f"--skip is {args.skip}; give 0 or more steps")
    if not args.module and not Path(args.script).is_file():
        raise InputError(f"there is no script {args.script}; for a module give -m")
    return args


def check_module(name: str) -> None:
    """Raise InputError if there is no module of this name, or a package that cannot be run."""
    for part in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(part)
        except ModuleNotFoundError as error:  # of a package that the name begins with
            if not f"{part}.".startswith(f"{error.name}."):
                raise  # of another one, which that package imports
            spec = None
        if spec is None:
            raise InputError(f"there is no module {part}")
        if spec.submodule_search_locations is None:
            return


def clear_output_dir(directory: Path) -> None:
    """Make the directory, and remove this rank's file of an earlier run; rank 0 also those of more ranks.

    Raises InputError if the directory cannot be written.
    """
    rank, world_size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("rank-*.pt*"):
            number = path.name.removeprefix("rank-").removesuffix(".tmp").removesuffix(".pt")
            if number.isdecimal() and (int(number) == rank or (rank == 0 and int(number) >= world_size)):
                path.unlink(missing_ok=True)
        probe = directory / f"rank-{rank}.pt.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--output-dir {directory} cannot be written: {error.strerror}") from None


def prepare(args: argparse.Namespace) -> None:
    """Set what python sets for a script: its arguments, and its folder first on the path.

    Raises InputError if the script's module cannot be found.
    """
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(Path.cwd() if args.module else Path(args.script).resolve().parent)
    if args.module:
        check_module(args.script)


def run_script(args: argparse.Namespace) -> None:
    """Run the script as python would, as __main__."""
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(Path(args.script).absolute()), run_name="__main__")


def frames_of_script(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames above the script's own: this file's and runpy's."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code is not run_script.__code__:
        frames = frames.tb_next
    while frames and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames  # none for an error of syntax


def main() -> None:
    """Record the script. What it raises goes on to Python, without the frames of this file."""
    try:
        args = parse_arguments()
        prepare(args)
        clear_output_dir(args.output_dir)
        args.output_dir = args.output_dir.resolve()  # the script may change the working directory
        recorder = Recorder(args)
        try:
            run_script(args)
        except SystemExit as stop:
            if not recorder.problem and stop.code not in (None, 0):
                raise
        except Exception:
            if recorder.problem:
                raise recorder.problem from None
            show = sys.excepthook
            sys.excepthook = lambda kind, value, _: show(
                kind, value.with_traceback(frames_of_script(value)), value.__traceback__
            )
            raise
        recorder.end_of_script()
    except InputError as error:
        print_line(f"error: {error}", sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
