"""Run many commands that import torch, each in forks of this process: torch is imported once for all.

    echo '[{"name": "a", "ranks": 2, "command": ["script.py", "--option"]}]' | python fork_ranks.py FOLDER

Each rank finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as a launcher other than torchrun sets them.
FOLDER/<name>-<rank>.out and .err get what it prints, FOLDER/statuses.json the exit statuses of all ranks;
those of a command that takes longer than --timeout seconds are "timeout".
"""

import argparse
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from launch import PRELOAD  # noqa: E402

for name in PRELOAD:
    importlib.import_module(name)


def start(folder: Path, job: dict, rank: int, port: int) -> int:
    """Fork one rank of a command; return its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{job['name']}-{rank}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        if job["ranks"]:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["ranks"]), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        sys.argv = job["command"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Running:
    """The ranks of a command, forked."""

    def __init__(self, folder: Path, job: dict, timeout: float) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.name = job["name"]
        self.end = time.monotonic() + timeout
        self.children = [start(folder, job, rank, port) for rank in range(max(1, job["ranks"]))]
        self.statuses: dict[int, int | str] = {}

    def has_ended(self) -> bool:
        """Say whether all ranks have, and end those that take too long."""
        late = time.monotonic() > self.end
        for child in self.children:
            if child not in self.statuses:
                if late:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if ended:
                    self.statuses[child] = "timeout" if late else os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self.children)


def main() -> None:
    """Run the commands that stdin names, as many at a time as there are cores for their ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()
    statuses, running = {}, []
    waiting = sorted(json.load(sys.stdin), key=lambda job: job["ranks"])
    while waiting or running:
        for job in [job for job in running if job.has_ended()]:
            running.remove(job)
            statuses[job.name] = [job.statuses[child] for child in job.children]
        busy = sum(len(job.children) for job in running)
        if waiting and (not busy or busy + max(1, waiting[0]["ranks"]) <= (os.cpu_count() or 1)):
            running.append(Running(args.folder, waiting.pop(0), args.timeout))
        else:
            time.sleep(0.01)
    (args.folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
