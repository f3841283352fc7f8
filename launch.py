"""torchrun with a warm fork server: torch is imported once and every rank is forked from it.

    python launch.py --standalone --nproc-per-node=64 distributed_train.py --parallelism ddp ...

A drop-in for torchrun: its parser and its elastic agent do the work, and all of their options are
understood. What is gained: 64 imports of torch take minutes on two cores and, with a CUDA build
of torch, more memory than a laptop has; 64 forks of one process take seconds and share its memory.
A failed run ends with one line that names the first rank that failed, its error and its log. What the
script raised stands above it, if the rank has not printed it itself. A run that is stopped, by Ctrl-C or
kill, ends within ten seconds. However this process ends, no rank is left running (on Linux).
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.sharedctypes
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

# The few modules that pull in every other one that a rank would import on its own: at the first
# DDP or FSDP wrap, torch.compile or torch.save. "launch", this file, comes last: see the end.
# torch_neuronx is left out on purpose: the device runtime has to start in the rank's own process.
PRELOAD = [
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_dynamo",
    "torch._export.passes._node_metadata_hook",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.utils.serialization.config",
    "launch",
]

STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOP_SECONDS = 8  # that the agent has to stop its ranks
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
FILE_CLOCK = 0.1  # seconds; a file's time is up to 10 ms behind time.time(), and a forked rank fails sooner


class Answer:
    """Whether a rank has run its script to the end: a byte in memory that all ranks share.

    It takes the place of the queue that torchrun's agent makes for each rank. The agent gives every rank the
    file descriptors of all queues. No more than 253 may travel with a fork, so it ends at 120 ranks. What a
    script that is run by its path answers is always None.
    """

    def __init__(self, ended: ctypes.Array, rank: int) -> None:
        self.ended, self.rank = ended, rank

    def put(self, _answer: None) -> None:
        self.ended[self.rank] = 1

    def empty(self) -> bool:
        return not self.ended[self.rank]

    def get(self) -> None:
        return None


class CommandError(Exception):
    """The command line asks for what cannot be launched: reported in one line, exit status 2."""


def requested_ranks() -> int:
    """Return the ranks per node that the command line asks for, before torch is imported.

    Raises CommandError for fewer than one.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    own = itertools.takewhile(lambda word: not word.endswith(".py"), sys.argv[1:])  # not the script's
    value = parser.parse_known_args(list(own))[0].nproc_per_node
    if not value.lstrip("-").isdecimal():
        return os.cpu_count() or 1  # auto, cpu, gpu
    if int(value) < 1:
        raise CommandError(f"--nproc-per-node is {value}; start at least one rank")
    return int(value)


def start_fork_server(ranks: int) -> None:
    """Start the process that imports torch and from which the ranks are forked."""
    # A Neuron build of torch loads torch_neuronx with torch: not in the fork server.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # Connect only ranks that talk to each other, when they do, instead of all pairs at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    if ranks > (os.cpu_count() or 1) and hasattr(os, "SCHED_BATCH"):
        # Ranks take turns on the cores. A rank of a batch is not interrupted whenever a message arrives
        # for another one: Gloo collectives take a tenth to a third less time.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def parse_command() -> argparse.Namespace:
    """Return torchrun's options for a launch in which each rank runs this file, and this file the script.

    Raises CommandError for what cannot be launched.
    """
    # Only now: this process and the fork server import torch at the same time.
    from torch.distributed.run import parse_args

    args = parse_args(["--start-method=forkserver", "--run-path", *sys.argv[1:]])
    if args.module or args.no_python:
        raise CommandError("launch.py starts a script file; use torchrun for -m and --no-python")
    script = Path(args.training_script).absolute()
    if not script.is_file():
        raise CommandError(f"there is no script {script}")
    if args.nnodes in ("1", "1:1") and (port := taken_port(args.rdzv_endpoint or f":{args.master_port}")):
        raise CommandError(f"port {port} is in use or no port; name another, or --standalone for a free one")
    args.training_script = str(Path(__file__).absolute())
    args.training_script_args = ["--as-rank", str(script), *args.training_script_args]
    return args


def taken_port(endpoint: str) -> int | None:
    """Return the port of a host:port on which this machine cannot listen; None if it can, or any will do.

    torchrun would take whatever listens there for the rendezvous of its job, and wait for it.
    """
    port = endpoint.rpartition(":")[2]
    if port.isdecimal():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except (OSError, OverflowError):
                return int(port)
    return None


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it has ended; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def run_as_rank(script: str, *arguments: str) -> None:
    """Run the script in this rank. If it raises, tell the launcher and exit with status 1."""
    end_with_parent()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)  # where a script finds its neighbours
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            raise
        report_exception(str(stop.code), f"{stop.code}\n")
        sys.exit(1)
    except Exception as error:
        # The frames above the script's own are this launcher's.
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        printed = "".join(traceback.format_exception(error.with_traceback(frames)))
        report_exception(f"{type(error).__name__}: {error}", printed)
        sys.exit(1)


def report_exception(message: str, printed: str) -> None:
    """Write what Python would have printed to this rank's log, if it has one, and to the agent's error file.

    Without a log nothing is printed: the launcher prints it, once instead of once per rank.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # empty with --log-dir /dev/null
    if not error_file or Path(error_file).with_name("stderr.log").exists():
        sys.stderr.write(printed)
        sys.stderr.flush()
    if re.search("[Cc]onnection (closed|reset|refused)", message):
        # Another rank died first. Let the launcher notice that one before it notices us.
        time.sleep(2)
    if error_file:
        extra = {"py_callstack": printed, "timestamp": str(int(time.time()))}
        # Renamed when it is complete, because the launcher may end this rank at any time.
        temporary = Path(f"{error_file}.tmp")
        temporary.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        temporary.replace(error_file)


def find_message(lines: list[str]) -> str | None:
    """Return the line of a rank's stderr that says why it failed; None if there is none."""
    # Behind an exception there may be advice, as torch.compile gives.
    errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception|Interrupt)\b", line)]
    if errors:
        return errors[-1].removeprefix("error: ")
    # torchtitan's options are parsed by tyro, which draws a box around its message and puts that first.
    boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
    if boxed:
        return boxed[0]
    # The last line that is neither a warning, nor progress, nor a quoted (indented) line of source code.
    no_message = re.compile(r"\s|.*warning|.*\bINFO\b|\[?[WI]\d{4}|\W*$", re.IGNORECASE)
    return next((line for line in reversed(lines) if not no_message.match(line)), None)


def describe_failure(error, log_dir: str | None, started: float) -> tuple[str, int]:
    """Return one line about the first rank that failed, and the exit status to end with.

    Logs from before `started`, in seconds since 1970, belong to earlier runs.
    """
    rank, failure = error.get_first_failure()
    logs = list(Path(log_dir).glob(f"*/attempt_*/{failure.local_rank}/stderr.log")) if log_dir else []
    logs = [path for path in logs if path.stat().st_mtime >= started - FILE_CLOCK]
    log = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    message = find_message(log.read_text(errors="replace").splitlines()) if log else None
    if isinstance(failure.message, dict):
        reason = next(iter(failure.message["message"].splitlines()), "").rstrip(": ") or "exit status 1"
    elif failure.exitcode < 0:
        reason = f"killed by {failure.signal_name()}"
        if -failure.exitcode == signal.SIGKILL:
            reason += " (if nobody sent it: the kernel does when memory runs out)"
    else:
        reason = message or f"exit status {failure.exitcode}"
    if message:
        where = f"; its log: {log}"
    elif log:
        where = ", without a message"
    elif isinstance(failure.message, dict):
        where = "; its messages are above"
    else:
        where = "; its messages are above, or use --log-dir DIR --redirects 3"
    return f"rank {rank} failed first: {reason}{where}", max(failure.exitcode, 1)


def handle_signals(handler: Callable) -> None:
    """Have a function called when this process is to stop. Signals that are ignored, as by nohup, stay so."""
    for number in STOPPED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def end_now(number: int, _frame: object = None) -> None:
    """End this process; the ranks end with it."""
    print(f"error: stopped by {signal.Signals(number).name}; no rank is left running", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + number)


def stop_ranks(number: int, _frame: object) -> None:
    """Have the agent stop the ranks. End this process if a second signal comes, or they do not stop in time.

    The agent's own handler raises the same exception, and nothing happens where torch catches any.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    handle_signals(end_now)
    timer = threading.Timer(STOP_SECONDS, end_now, [number])
    timer.daemon = True
    timer.start()
    raise SignalException("stopped", signal.Signals(number))


def share_answers() -> None:
    """Have the agent take the ranks' answers from shared memory instead of from a queue for each."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    make = MultiprocessContext.__init__

    def make_with_answers(context: MultiprocessContext, *args, **kwargs) -> None:
        make(context, *args, **kwargs)
        ended = multiprocessing.sharedctypes.RawArray("b", context.nprocs)
        context._ret_vals = [Answer(ended, rank) for rank in range(context.nprocs)]

    MultiprocessContext.__init__ = make_with_answers


def run_ranks(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them; report the first failure and return the exit status."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException, Std, to_map
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    started = time.time()
    share_answers()
    handle_signals(stop_ranks)
    # The agent then sets no handlers for these.
    ours = {number.name for number in STOPPED_BY}
    args.signals_to_handle = ",".join(name for name in args.signals_to_handle.split(",") if name not in ours)
    try:
        run(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        tee = to_map(Std.from_str(args.tee), failure.local_rank + 1)[failure.local_rank]
        if isinstance(failure.message, dict) and not tee & Std.ERR:
            sys.stderr.write(failure.message["extraInfo"]["py_callstack"])
        line, status = describe_failure(error, args.log_dir, started)
        print(f"error: {line}", file=sys.stderr)
        return status
    except SignalException as stopped:
        print(f"error: stopped by {stopped.sigval.name}; no rank is left running", file=sys.stderr)
        return 128 + stopped.sigval
    except (DistError, RendezvousError, ValueError, OSError) as error:
        print(f"error: the launch failed: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


@contextlib.contextmanager
def log_folder(args: argparse.Namespace) -> Iterator[None]:
    """Give the agent a folder for its error files, where the command line names none for logs."""
    asked_for_logs = args.log_dir or args.redirects != "0" or args.tee != "0"
    args.log_dir = args.log_dir or tempfile.mkdtemp(prefix="launch-")
    try:
        yield
    finally:
        if not asked_for_logs:
            shutil.rmtree(args.log_dir, ignore_errors=True)


def main() -> int:
    """Launch the script named on the command line; return its exit status."""
    handle_signals(end_now)
    try:
        ranks = requested_ranks()
        if ranks > 1:  # torchrun sets it too, and warns that it did
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        start_fork_server(ranks)
        args = parse_command()
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # The agent describes a failure with a traceback and a line for each rank that it stops. We use one line.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.stdout.reconfigure(line_buffering=True)  # show progress in a pipe, too
    with log_folder(args):
        return run_ranks(args)


if __name__ == "launch":
    # Imported by the fork server, last of all. Objects that the garbage collector does not visit
    # are not written to, so that their memory stays shared by all ranks.
    gc.freeze()
    if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
        end_with_parent()  # the ranks' parent is the fork server
elif __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_as_rank(*sys.argv[2:])
    else:
        sys.exit(main())
