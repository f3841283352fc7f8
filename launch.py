"""torchrun with a warm fork server: torch is imported once and every rank is forked from it.

    python launch.py --standalone --nproc-per-node=64 distributed_train.py --parallelism ddp ...

A drop-in for torchrun: its parser and its elastic agent do the work, and all of their options are
understood. What is gained: 64 imports of torch take minutes on two cores and, with a CUDA build
of torch, more memory than a laptop has; 64 forks of one process take seconds and share its memory.
A failed run ends with one line that names the first rank that failed, its error and its log.
"""

import argparse
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import socket
import sys
import time
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

# Each rank hands two file descriptors per rank through one message, which may hold 253 of them.
MOST_FORKED_RANKS = 120


def requested_ranks() -> int:
    """Return the ranks per node that the command line asks for, before torch is imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    own = itertools.takewhile(lambda word: not word.endswith(".py"), sys.argv[1:])  # not the script's
    value = parser.parse_known_args(list(own))[0].nproc_per_node
    return int(value) if value.lstrip("-").isdecimal() else os.cpu_count() or 1  # auto, cpu, gpu


def start_fork_server(ranks: int) -> None:
    """Start the process that imports torch and from which the ranks are forked."""
    # A Neuron build of torch loads torch_neuronx with torch: not in the fork server.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # Connect only ranks that talk to each other, when they do, instead of all pairs at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("TORCH_MP_PARALLEL_START", "1")
    if ranks > (os.cpu_count() or 1) and hasattr(os, "SCHED_BATCH"):
        # Ranks take turns on the cores. Without preemption at every message that arrives, each
        # turn gets more done: Gloo collectives take a tenth to a third less time.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


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


def describe_failure(error, log_dir: str | None, started: float) -> tuple[str, int]:
    """Return one line about the first rank that failed, and the exit status to end with.

    Logs from before `started`, in seconds since 1970, belong to earlier runs.
    """
    rank, failure = error.get_first_failure()
    logs = list(Path(log_dir).glob(f"*/attempt_*/{failure.local_rank}/stderr.log")) if log_dir else []
    logs = [path for path in logs if path.stat().st_mtime >= started]
    log = logs[0] if logs else None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log else []
    if failure.exitcode < 0:
        reason = f"killed by {failure.signal_name()}"
        if -failure.exitcode == signal.SIGKILL:
            reason += " (if nobody sent it: the kernel does when memory runs out)"
    elif lines:
        # Behind an exception there may be advice, as torch.compile gives.
        errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception|Interrupt)\b", line)]
        reason = (errors or lines)[-1].removeprefix("error: ")
    else:
        reason = f"exit status {failure.exitcode}"
    where = f"; its log: {log}" if log else "; its messages are above, or use --log-dir DIR --redirects 3"
    return f"rank {rank} failed first: {reason}{where}", max(failure.exitcode, 1)


def main() -> int:
    """Launch the script named on the command line; return its exit status."""
    ranks = requested_ranks()
    if ranks < 1:
        print(f"error: --nproc-per-node is {ranks}; start at least one rank", file=sys.stderr)
        return 2
    if ranks > 1:  # torchrun sets it too, and warns that it did
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if ranks <= MOST_FORKED_RANKS:
        start_fork_server(ranks)

    # Only now: this process and the fork server import torch at the same time.
    import logging

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if ranks > MOST_FORKED_RANKS:
        print(f"{ranks} ranks: more than a fork server can start, each imports torch itself", flush=True)
        args = parse_args(sys.argv[1:])
    else:
        args = parse_args(["--start-method=forkserver", "--run-path", *sys.argv[1:]])
        if args.module or args.no_python:
            print(
                "error: launch.py starts a script file; use torchrun for -m and --no-python", file=sys.stderr
            )
            return 2
        args.training_script = str(Path(args.training_script).absolute())
        sys.path[0] = str(Path(args.training_script).parent)  # where a script finds its neighbours
    if not Path(args.training_script).is_file():
        print(f"error: there is no script {args.training_script}", file=sys.stderr)
        return 2

    if args.nnodes in ("1", "1:1") and (port := taken_port(args.rdzv_endpoint or f":{args.master_port}")):
        print(
            f"error: port {port} is in use or no port; name another, or --standalone for a free one",
            file=sys.stderr,
        )
        return 2

    # The agent's account of a failure: a traceback and a line per rank that it stops. Ours is below.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.stdout.reconfigure(line_buffering=True)  # show progress in a pipe, too
    started = time.time()
    try:
        run(args)
    except ChildFailedError as error:
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


if __name__ == "launch":
    # Imported by the fork server, last of all. Objects that the garbage collector does not visit
    # are not written to, so that their memory stays shared by all ranks.
    gc.freeze()
elif __name__ == "__main__":
    sys.exit(main())
