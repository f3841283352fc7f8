"""Time a comparison beside reading the same files once with torch.load, and show its memory.

    python tests/bench_compare.py --reference-dir results/cpu-ddp --actual-dir results/ddp --world-size 64

Both in a fresh process that has imported torch, alternating, the files in the page cache. Memory is the
largest resident set, mapped files included. No result is asserted.
"""

import argparse
import contextlib
import io
import multiprocessing
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def measure(what: str, arguments: list[str], queue: multiprocessing.Queue) -> None:
    """Read or compare in this process; put seconds and MiB into the queue."""
    import torch

    import compare_training

    sys.argv = ["compare_training.py", *arguments]
    started = time.perf_counter()
    if what == "read":
        for directory in (arguments[1], arguments[3]):
            for path in Path(directory).glob("rank-*.pt"):
                torch.load(path, weights_only=True)
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            compare_training.main()
    seconds = time.perf_counter() - started
    queue.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    """Measure three times and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference-dir", required=True)
    parser.add_argument("--actual-dir", required=True)
    parser.add_argument("--world-size", required=True)
    args = parser.parse_args()
    arguments = ["--reference-dir", args.reference_dir, "--actual-dir", args.actual_dir]
    arguments += ["--world-size", args.world_size]
    context = multiprocessing.get_context("spawn")
    print("read s  compare s  ratio   read MiB  compare MiB")
    for _ in range(3):
        rows = []
        for what in ("read", "compare"):
            queue = context.Queue()
            process = context.Process(target=measure, args=(what, arguments, queue))
            process.start()
            rows.append(queue.get())
            process.join()
        (read, read_memory), (compare, memory) = rows
        print(f"{read:6.2f} {compare:10.2f} {compare / read:6.2f} {read_memory:10.0f} {memory:12.0f}")


if __name__ == "__main__":
    main()
