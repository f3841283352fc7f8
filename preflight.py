"""Find out in seconds whether this machine can run the job, instead of after a hang.

    python preflight.py --device neuron --ranks 64      # what make runs before every job on a device
    python preflight.py --device cpu                    # how many ranks would fit here

One line per check: ok, warn, or FAIL with what to do. Exit status 0 without a FAIL, 1 with one, 2 for wrong
usage. Needs nothing but Python, and works alone; what needs torch comes last, and only if nothing failed
before: a tensor's round trip to the device and a collective of two ranks.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEFAULT_BACKEND = {"cpu": "gloo", "neuron": "neuron", "cuda": "nccl"}
LOGICAL_CORE_CONFIG = 2  # physical NeuronCores that make a logical one: 64 of 24 GiB on a trn2.48xlarge
# What the environment of the runs has to be (make sees to it); None: not set.
ENVIRONMENT = {
    "NEURON_RT_VISIBLE_CORES": None,
    "NEURON_RT_NUM_CORES": None,
    "TORCH_NEURONX_ENABLE_STREAMS": None,
    "NEURON_LOGICAL_NC_CONFIG": str(LOGICAL_CORE_CONFIG),
    "TORCH_NEURONX_ENABLE_HOST_CC": "0",
    "OMP_NUM_THREADS": "1",
}
NEURON_TOOLS = "/opt/aws/neuron/bin"  # where they are installed, on PATH or not
NEURON_LS_SECONDS = 10
DEVICE_SECONDS = 300  # the first operations on Neuron compile
# Measured at 64 ranks, ten steps: 2.7 to 4.9 GiB forked by launch.py, 504 to 662 MiB of rank files per run.
FIRST_RANK_GIB, MORE_RANK_GIB = 0.6, 0.08
RESULT_MIB_PER_RANK = 11
RUNS = 8  # of make all-parity: four modes, on the CPU and on the device
FITTING_RANKS = (1, 2, 4, 8, 16, 32, 64, 128)  # batch and features divide by them

Line = tuple[str, str, str]  # "ok", "warn" or "FAIL"; what was checked; what was found, and the fix


def run_all(commands: list[tuple[list[str], dict]], seconds: float) -> list[tuple[int | None, str, str]]:
    """Run commands, each with its environment, at the same time: status, stdout and stderr of each.

    The status is None for what did not end in time, or was ended because another one failed. Nothing that
    they started stays behind, and nothing that cannot be killed (a hung driver) is waited for.
    """
    with contextlib.ExitStack() as cleanup:
        started = []
        for command, environment in commands:
            out, err = (cleanup.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, start_new_session=True
            )
            cleanup.callback(kill_all, process)  # also after Ctrl-C: a device must not stay taken
            started.append((process, out, err))
        deadline = time.monotonic() + seconds
        statuses = [None] * len(started)
        while None in statuses and not any(statuses) and time.monotonic() < deadline:
            time.sleep(0.02)
            statuses = [process.poll() for process, _, _ in started]
        texts = []
        for _, *outputs in started:
            for file in outputs:
                file.seek(0)
            texts.append([file.read(2**22).decode(errors="replace").strip() for file in outputs])
    return [(status, *text) for status, text in zip(statuses, texts, strict=True)]


def kill_all(process: subprocess.Popen) -> None:
    """End a process that leads a session, and all that it started, without waiting for long."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)


def neuron_ls() -> tuple[list[dict] | None, Line]:
    """Return what neuron-ls -j tells of each Neuron device, or None, and a line about it."""
    what = "neuron-ls"
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=NEURON_TOOLS)
    if tool is None:
        found = f"not on PATH nor in {NEURON_TOOLS}, so no core was checked; install aws-neuronx-tools"
        return None, ("warn", what, found)
    try:
        ((status, out, err),) = run_all([([tool, "-j"], dict(os.environ))], NEURON_LS_SECONDS)
    except OSError as error:
        return None, ("FAIL", what, f"{tool} does not start: {error.strerror}; install it again")
    if status is None:
        found = f"did not end in {NEURON_LS_SECONDS} s: the driver hangs; reload it (sudo rmmod neuron; "
        return None, ("FAIL", what, found + "sudo modprobe neuron) or restart the instance")
    try:
        devices = json.loads(out[max(0, out.find("[")) :])  # a warning may stand before it
    except (ValueError, RecursionError):
        devices = None
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        said = (err or out or "nothing").splitlines()[0][:100]
        found = f"printed no list of devices but: {said}; run it by hand, see that the driver is loaded"
        return None, ("FAIL", what, f"{found} (sudo modprobe neuron)")
    if not devices:
        found = "lists no Neuron device; use a Trn2 or Trn3 instance, and load the driver"
        return None, ("FAIL", what, f"{found} (sudo modprobe neuron)")
    return devices, ("ok", what, f"{len(devices)} Neuron devices")


def check_cores(devices: list[dict], ranks: int) -> list[Line]:
    """Return lines about the logical core configuration, the cores of all ranks, and who uses them."""
    lines = []
    configs = {str(device.get("logical_neuroncore_config")) for device in devices}
    chosen = os.environ.get("NEURON_LOGICAL_NC_CONFIG", str(LOGICAL_CORE_CONFIG))
    if configs == {str(LOGICAL_CORE_CONFIG)}:
        lines.append(("ok", "core configuration", f"{LOGICAL_CORE_CONFIG}"))
    elif configs == {chosen}:
        found = f"{chosen}, as NEURON_LOGICAL_NC_CONFIG asks for; the tutorial's is {LOGICAL_CORE_CONFIG}"
        lines.append(("warn", "core configuration", found))
    elif configs == {"None"}:
        lines.append(("warn", "core configuration", "neuron-ls does not tell it; update aws-neuronx-tools"))
    else:
        found = f"{', '.join(sorted(configs))}, expected {LOGICAL_CORE_CONFIG}"
        fix = f"export NEURON_LOGICAL_NC_CONFIG={LOGICAL_CORE_CONFIG} before anything uses the cores"
        lines.append(("FAIL", "core configuration", f"{found}; {fix}"))

    cores_of, missing_ids = [], False  # (core, device)
    for device in devices:
        cores = device.get("neuroncore_ids")
        if not isinstance(cores, list):  # older releases give their number only
            missing_ids = True
            count = int(device.get("nc_count") or 0)
            if not 0 <= count <= 64:
                raise ValueError(f"nc_count {count}")
            cores = range(len(cores_of), len(cores_of) + count)
        cores_of += [(int(core), device) for core in cores]
    available = {core for core, _ in cores_of}
    missing = sorted(set(range(ranks)) - available)
    if missing:
        found = f"{len(available)} are there, {ranks} ranks need 0 to {ranks - 1}: {missing[0]} is missing"
        fix = "start fewer ranks (RANKS=), or use an instance with all cores (trn2.48xlarge: 64)"
        lines.append(("FAIL", "cores", f"{found}; {fix}"))
    else:
        found = f"0 to {ranks - 1} are there" + (
            ", by count: neuron-ls gives no numbers" if missing_ids else ""
        )
        lines.append(("ok", "cores", found))

    needed = {id(device): device for core, device in cores_of if core in range(ranks)}
    partly = {id(device) for core, device in cores_of if core not in range(ranks)}
    busy, verdict = [], "warn"  # neuron-ls does not tell which cores of a device are used
    for device in needed.values():
        if device.get("neuron_processes") and id(device) not in partly:
            verdict = "FAIL"
        for process in device.get("neuron_processes") or []:
            command = str(process.get("command", "?"))[:60]
            busy.append((process.get("pid"), command, device.get("neuron_device")))
    if busy:
        pid, command, number = busy[0]
        found = f"pid {pid} ({command}) uses device {number}"
        found += f", and {len(busy) - 1} more" if len(busy) > 1 else ""
        found += ", perhaps other cores of it than the ranks will" if verdict == "warn" else ""
        lines.append((verdict, "cores in use", f"{found}; wait for it or end it: kill {pid}"))
    else:
        lines.append(("ok", "cores in use", "by no other process"))
    return lines


def check_environment() -> list[Line]:
    """Return lines about the environment variables of a Neuron run; a core limit fails, the rest warns."""
    lines = []
    for name, expected in ENVIRONMENT.items():
        value = os.environ.get(name)
        if value == expected:
            continue
        if expected is None:
            lines.append(("FAIL", name, f"is {value!r}, must not be set; unset {name}"))
        else:
            found = "is not set" if value is None else f"is {value!r}"
            lines.append(("warn", name, f"{found}, expected {expected}; export {name}={expected}"))
    return lines or [("ok", "environment", "as the runs need it")]


def called(device: str) -> str:
    """Return the device's name in what is printed: the tests' stand-in is never called Neuron."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if device == "neuron" and "standin" in importlib.metadata.version("torch-neuronx"):
            return "the stand-in for Neuron"
    return device


def check_packages(device: str) -> list[Line]:
    """Return lines about the versions of Python, torch and, for Neuron, torch-neuronx."""
    versions = {}
    for name in ("torch", "torch-neuronx"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    release = {name: tuple(map(int, re.findall(r"\d+", text or "")[:2])) for name, text in versions.items()}
    stand_in = called(device) != device

    python, least = sys.version_info[:2], (3, 12) if device == "neuron" else (3, 11)
    most = (3, 14) if device == "neuron" else python
    if least <= python <= most or stand_in:
        lines = [("ok", "Python", f"{python[0]}.{python[1]}")]
    else:
        expected = f"3.{least[1]} to 3.{most[1]}" if device == "neuron" else f"3.{least[1]} or newer"
        found = f"{python[0]}.{python[1]}, expected {expected}"
        lines = [("FAIL", "Python", f"{found}; make an environment with such a Python")]
    if release["torch"] == (2, 14):
        lines.append(("ok", "torch", versions["torch"]))
    else:
        found = f"{versions['torch'] or 'not installed'}, expected 2.14"
        lines.append(("FAIL", "torch", f"{found}; pip install 'torch>=2.14,<2.15'"))
    if device != "neuron":
        return lines
    fix = "install the torch-neuronx 2.14 that AWS ships for torch 2.14, see requirements-neuron.txt"
    version = versions["torch-neuronx"]
    if version is None:
        lines.append(("FAIL", "torch-neuronx", f"not installed; {fix}"))
    elif release["torch-neuronx"] < (2, 14):
        found = f"{version} is older than 2.14, perhaps the XLA-based product of the same name"
        lines.append(("FAIL", "torch-neuronx", f"{found}; {fix}"))
    elif release["torch-neuronx"] != release["torch"]:
        lines.append(("FAIL", "torch-neuronx", f"{version} with torch {versions['torch']}; {fix}"))
    elif stand_in:
        found = f"{version}: the tests' stand-in, which computes on the CPU and proves nothing about Neuron"
        lines.append(("warn", "torch-neuronx", found))
    else:
        lines.append(("ok", "torch-neuronx", version))
    return lines


def free_memory() -> float | None:
    """Return the memory that new processes can have, in GiB; None if the system does not tell."""
    limits = []
    try:
        text = Path("/proc/meminfo").read_text()
        limits.append(int(re.search(r"MemAvailable: +(\d+) kB", text).group(1)) * 1024)
    except (OSError, AttributeError):
        return None
    try:  # a container may have less than the machine
        cgroup = Path("/sys/fs/cgroup")
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            cached = int(re.search(r"inactive_file (\d+)", (cgroup / "memory.stat").read_text()).group(1))
            limits.append(int(limit) - int((cgroup / "memory.current").read_text()) + cached)
    except (OSError, ValueError, AttributeError):
        pass
    return min(limits) / 2**30


def check_host(ranks: int, results: Path) -> list[Line]:
    """Return lines about processors, memory, the local network and disk."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    turns = f", so {ranks} ranks take turns" if ranks > processors else ""
    lines = [("ok", "processors", f"{processors}{turns}")]

    free = free_memory()
    if free is None:
        lines.append(("warn", "memory", "this system does not tell what is free; watch it during the run"))
    else:
        fitting = [n for n in FITTING_RANKS if FIRST_RANK_GIB + n * MORE_RANK_GIB <= free]
        needed = FIRST_RANK_GIB + ranks * MORE_RANK_GIB
        found = f"{free:.1f} GiB free, {ranks} ranks need about {needed:.1f} with launch.py"
        if not fitting:
            lines.append(("FAIL", "memory", f"{found}; free some: not even one rank fits"))
        elif needed > free:
            lines.append(("FAIL", "memory", f"{found}; up to RANKS={fitting[-1]} would fit"))
        else:
            lines.append(("ok", "memory", f"{found}; up to RANKS={fitting[-1]} would fit"))

    try:
        with socket.create_server(("", 0)) as server:
            name, port = socket.getfqdn(), server.getsockname()[1]  # the name that torchrun takes
            socket.create_connection((name, port), timeout=5).close()
        lines.append(("ok", "network", f"this machine reaches its own ports as {name}"))
    except OSError as error:
        found = f"this machine does not reach its own ports as {socket.getfqdn()}: {error}"
        fix = f"add '127.0.0.1 {socket.getfqdn()}' to /etc/hosts, or open the firewall for it"
        lines.append(("FAIL", "network", f"{found}; {fix}"))

    existing = results.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    needed = ranks * RESULT_MIB_PER_RANK / 1024 * RUNS
    space = shutil.disk_usage(existing).free / 2**30
    found = f"{space:.1f} GiB free for {results}, make all-parity writes about {needed:.1f}"
    if not existing.is_dir():
        lines.append(("FAIL", "disk", f"{existing} is no directory; give another place with RESULTS="))
    elif not os.access(existing, os.W_OK):
        lines.append(("FAIL", "disk", f"{existing} cannot be written; give another place with RESULTS="))
    elif space < needed / RUNS:
        lines.append(("FAIL", "disk", f"{found}; free some, or give another place with RESULTS="))
    else:
        lines.append(("ok" if space >= needed else "warn", "disk", found))
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / 2**30
        small = "; a container gets more with --shm-size=1g" if shared < 1 else ""
        lines.append(("warn" if small else "ok", "shared memory", f"{shared:.2f} GiB free{small}"))
    return lines


def check_device(device: str, backend: str, ranks: int) -> Line:
    """Have up to two ranks send a tensor to the device and back, and sum over both; return a line on it."""
    ranks = min(ranks, 2)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--as-rank", "--device", device, "--backend", backend]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    done = run_all([(command, os.environ | variables) for variables in own], DEVICE_SECONDS)
    by_hand = "; to see more, run each rank by hand: RANK=<rank> LOCAL_RANK=<rank> "
    by_hand += " ".join(f"{key}={value}" for key, value in common.items()) + f" {' '.join(command)}"
    what = f"{called(device)} with {backend}"
    for rank, (status, _, err) in enumerate(done):
        if status:
            said = (err or f"exit status {status}").splitlines()[-1]
            return "FAIL", what, f"rank {rank}: {said[:300]}{by_hand}"
    late = [rank for rank, (status, _, _) in enumerate(done) if status is None]
    if late:
        last = [(rank, done[rank][2].splitlines()[-1]) for rank in late if done[rank][2]]
        said = "".join(f", rank {rank} last said: {line[:100]}" for rank, line in last)
        return "FAIL", what, f"ranks {late} did not end in {DEVICE_SECONDS} s{said}{by_hand}"
    return "ok", what, f"a tensor came back unchanged, and the sum over {ranks} ranks is right"


def be_rank(device: str, backend: str) -> None:
    """What each rank of check_device does. Raises RuntimeError if a value is wrong."""
    import torch
    import torch.distributed as dist

    for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 29500)):
        os.environ.setdefault(name, str(alone))  # when run by hand
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "neuron":
        import torch_neuronx  # noqa: F401 - registers the device

        if torch.neuron.device_count() > rank:
            torch.neuron.set_device(rank)
    elif device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU; check the driver with nvidia-smi")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    sent = torch.arange(1024, dtype=torch.float32)
    there = sent.to(device)
    if not torch.equal(there.cpu(), sent):
        raise RuntimeError("0 to 1023 came back from the device as something else")
    if not torch.allclose((there * 2).cpu(), sent * 2, rtol=1e-5, atol=0):
        raise RuntimeError("twice 0 to 1023 is something else on this device")
    dist.init_process_group(backend)
    total = torch.full((256,), float(rank + 1), device=device)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), torch.full((256,), ranks * (ranks + 1) / 2)):
        raise RuntimeError(f"the sum over {ranks} ranks is {total[0].item()}")
    dist.destroy_process_group()


def main() -> int:
    """Run the checks, printing each as it is done; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(DEFAULT_BACKEND), default="neuron", help="default: neuron")
    parser.add_argument("--backend", help="process-group backend (default: the device's own)")
    parser.add_argument("--ranks", type=int, default=64, help="how many are to run (default: 64)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where (default: results)")
    parser.add_argument("--quiet", action="store_true", help="print warn and FAIL only, and a summary")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    args = parser.parse_args()
    backend = args.backend or DEFAULT_BACKEND[args.device]
    if args.ranks < 1:
        parser.error(f"--ranks is {args.ranks}, must be at least 1")
    if args.as_rank:
        be_rank(args.device, backend)
        return 0

    verdicts = []

    def show(lines: list[Line]) -> None:
        for verdict, what, found in lines:
            verdicts.append(verdict)
            if verdict != "ok" or not args.quiet:
                print(f"{verdict:5} {what}: {found}", flush=True)

    if args.device == "neuron":
        devices, line = neuron_ls()
        show([line])
        if devices:
            try:
                show(check_cores(devices, args.ranks))
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                found = f"printed fields of another kind than expected ({error}), so no core was checked"
                show([("warn", "neuron-ls", f"{found}; look at them by hand")])
        show(check_environment())
    show(check_packages(args.device))
    show(check_host(args.ranks, args.results))
    if "FAIL" in verdicts:
        show([("warn", "device", "not tried, because of the above")])
    else:
        show([check_device(args.device, backend, args.ranks)])
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "warn", "FAIL"))
    print(f"== preflight for {args.ranks} ranks on {called(args.device)}: {counts}")
    return 1 if "FAIL" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
