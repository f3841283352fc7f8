"""Find out in seconds whether this machine can run the job, instead of after a hang.

    python preflight.py --device neuron --ranks 64      # what make runs before every job on a device
    python preflight.py --device cpu                    # how many ranks would fit here
    python preflight.py --cores                         # the number of logical NeuronCores, and nothing else

One line per check: ok, warn, or FAIL with what to do. Exit status 0 without a FAIL, 1 with one, 2 for wrong
usage. Needs nothing but Python, and works alone. What needs torch comes last, and only if nothing failed
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
from typing import NamedTuple

DEFAULT_BACKEND = {"cpu": "gloo", "neuron": "neuron", "cuda": "nccl"}
LOGICAL_CORE_CONFIG = "2"  # physical NeuronCores that make a logical one: 64 of 24 GiB on a trn2.48xlarge
# What the environment of the runs has to be (make sets it); None: not set.
ENVIRONMENT = {
    "NEURON_RT_VISIBLE_CORES": None,
    "NEURON_RT_NUM_CORES": None,
    "TORCH_NEURONX_ENABLE_STREAMS": None,
    "NEURON_LOGICAL_NC_CONFIG": LOGICAL_CORE_CONFIG,
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
FITTING_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch and features divide by them

Line = tuple[str, str, str]  # level ("ok", "warn" or "FAIL"); what was checked; what was found, and the fix


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


class NotListed(Exception):
    """neuron-ls listed no devices: a level and the reason."""

    def __init__(self, level: str, reason: str):
        super().__init__(reason)
        self.level = level


class Device(NamedTuple):
    """A Neuron device as neuron-ls lists it."""

    number: int
    core_configuration: str  # physical cores that make a logical one; "None" if it is not given
    cores: list[int]  # ids of its logical cores
    processes: list[str]  # that use the device, each as "pid 1234 (command)"


def list_devices() -> list[Device]:
    """Return the devices of this machine, at least one. Raises NotListed."""
    output, errors = run_neuron_ls()
    entries = find_list(output)
    if entries is None:
        said = (errors or output or "nothing").splitlines()[0][:100]
        reason = f"printed no list of devices but: {said}; run it by hand, see that the driver is loaded"
        raise NotListed("FAIL", f"{reason} (sudo modprobe neuron)")
    if not entries:
        reason = "lists no Neuron device; use a Trn2 or Trn3 instance, and load the driver"
        raise NotListed("FAIL", f"{reason} (sudo modprobe neuron)")
    if any(entry.get("neuroncore_ids") is None for entry in entries):
        raise NotListed("warn", "gives no core ids, so no core was checked; update aws-neuronx-tools")
    try:
        return [read_device(entry) for entry in entries]
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"printed fields of another kind than expected ({error}), so no core was checked"
        raise NotListed("warn", f"{reason}; look at them by hand") from None


def run_neuron_ls() -> tuple[str, str]:
    """Return what neuron-ls -j writes to stdout and stderr. Raises NotListed if it does not run or hangs."""
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=NEURON_TOOLS)
    if tool is None:
        reason = f"not on PATH nor in {NEURON_TOOLS}, so no core was checked; install aws-neuronx-tools"
        raise NotListed("warn", reason)
    try:
        ((status, output, errors),) = run_all([([tool, "-j"], dict(os.environ))], NEURON_LS_SECONDS)
    except OSError as error:
        raise NotListed("FAIL", f"{tool} does not start: {error.strerror}; install it again") from None
    if status is None:
        reason = f"did not end in {NEURON_LS_SECONDS} s: the driver hangs; reload it (sudo rmmod neuron; "
        raise NotListed("FAIL", reason + "sudo modprobe neuron) or restart the instance")
    return output, errors


def find_list(text: str) -> list[dict] | None:
    """Return the JSON list of objects in a text that may have other lines, such as "[INFO] ...", too."""
    for start in re.finditer(r"^\[", text, re.MULTILINE):
        with contextlib.suppress(ValueError, RecursionError):
            found, _ = json.JSONDecoder().raw_decode(text, start.start())
            if all(isinstance(entry, dict) for entry in found):
                return found
    return None


def read_device(entry: dict) -> Device:
    """Read one entry of the list; a field of another kind raises what its conversion raises."""
    return Device(
        number=entry.get("neuron_device"),
        core_configuration=str(entry.get("logical_neuroncore_config")),
        cores=[int(core) for core in entry["neuroncore_ids"]],
        processes=[
            f"pid {process.get('pid')} ({str(process.get('command', '?'))[:60]})"
            for process in entry.get("neuron_processes") or []
        ],
    )


def check_devices(ranks: int) -> list[Line]:
    """Return lines about the Neuron devices and their cores."""
    try:
        devices = list_devices()
    except NotListed as why:
        return [(why.level, "neuron-ls", str(why))]
    return [
        ("ok", "neuron-ls", f"{len(devices)} Neuron devices"),
        check_core_configuration(devices),
        check_cores(devices, ranks),
        check_cores_in_use(devices, ranks),
    ]


def check_core_configuration(devices: list[Device]) -> Line:
    """Return a line on how many physical cores make a logical one."""
    what = "core configuration"
    found = {device.core_configuration for device in devices}
    chosen = os.environ.get("NEURON_LOGICAL_NC_CONFIG", LOGICAL_CORE_CONFIG)
    if found == {LOGICAL_CORE_CONFIG}:
        return "ok", what, LOGICAL_CORE_CONFIG
    if found == {"None"}:
        return "warn", what, "neuron-ls does not tell it; update aws-neuronx-tools"
    if found == {chosen}:
        chosen = f"{chosen}, as NEURON_LOGICAL_NC_CONFIG asks for"
        return "warn", what, f"{chosen}; the tutorial's is {LOGICAL_CORE_CONFIG}"
    fix = f"export NEURON_LOGICAL_NC_CONFIG={LOGICAL_CORE_CONFIG} before anything uses the cores"
    return "FAIL", what, f"{', '.join(sorted(found))}, expected {LOGICAL_CORE_CONFIG}; {fix}"


def check_cores(devices: list[Device], ranks: int) -> Line:
    """Return a line on whether there is a core for every rank: rank r takes core r."""
    cores = {core for device in devices for core in device.cores}
    missing = set(range(ranks)) - cores
    if not missing:
        return "ok", "cores", f"0 to {ranks - 1} are there"
    found = f"{len(cores)} are there, {ranks} ranks need 0 to {ranks - 1}: {min(missing)} is missing"
    fix = "start fewer ranks (RANKS=), or use an instance with all cores (trn2.48xlarge: 64)"
    return "FAIL", "cores", f"{found}; {fix}"


def check_cores_in_use(devices: list[Device], ranks: int) -> Line:
    """Return a line on other processes that use the ranks' devices.

    neuron-ls tells which device a process uses, not which of its cores: only a device on which the ranks
    take every core is surely in use.
    """
    surely, perhaps = [], []
    for device in devices:
        taken = [core for core in device.cores if core < ranks]
        uses = [f"{process} uses device {device.number}" for process in device.processes]
        if taken and taken == device.cores:
            surely += uses
        elif taken:
            perhaps += uses
    if not surely and not perhaps:
        return "ok", "cores in use", "by no other process"
    first, *more = surely + perhaps
    found = first + (f", and {len(more)} more" if more else "")
    found += "" if surely else ", perhaps only cores that no rank takes"
    fix = f"wait for it or end it: kill {first.split()[1]}"
    return "FAIL" if surely else "warn", "cores in use", f"{found}; {fix}"


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


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str | None) -> tuple[int, ...]:
    """Return the first two numbers of a version; none of None."""
    return tuple(map(int, re.findall(r"\d+", version or "")[:2]))


def is_stand_in() -> bool:
    """Return whether torch-neuronx is the tests' stand-in, which is not Neuron."""
    return "standin" in (version_of("torch-neuronx") or "")


def default_device() -> str:
    """Return the device that make uses unless told otherwise: never the stand-in."""
    neuron = release_of(version_of("torch-neuronx")) >= (2, 14) and not is_stand_in()
    return "neuron" if neuron else "cpu"


def name_of(device: str) -> str:
    """Return the device's name in what is printed: the stand-in is never called Neuron."""
    return "the stand-in for Neuron" if device == "neuron" and is_stand_in() else device


def check_python(device: str) -> Line:
    """Return a line on the version of Python."""
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if device == "neuron" and not is_stand_in():
        fits, expected = (3, 12) <= sys.version_info[:2] <= (3, 14), "3.12 to 3.14"
    else:
        fits, expected = sys.version_info[:2] >= (3, 11), "3.11 or newer"
    if fits:
        return "ok", "Python", found
    return "FAIL", "Python", f"{found}, expected {expected}; make an environment with such a Python"


def check_torch() -> Line:
    """Return a line on the version of torch."""
    version = version_of("torch")
    if release_of(version) == (2, 14):
        return "ok", "torch", version
    found = f"{version or 'not installed'}, expected 2.14"
    return "FAIL", "torch", f"{found}; pip install 'torch>=2.14,<2.15'"


def check_torch_neuronx() -> Line:
    """Return a line on the version of torch-neuronx, which goes with the one of torch."""
    version, torch = version_of("torch-neuronx"), version_of("torch")
    fix = "install the torch-neuronx 2.14 that AWS ships for torch 2.14, see requirements-neuron.txt"
    if version is None:
        return "FAIL", "torch-neuronx", f"not installed; {fix}"
    if release_of(version) < (2, 14):
        found = f"{version} is older than 2.14, perhaps the XLA-based product of the same name"
        return "FAIL", "torch-neuronx", f"{found}; {fix}"
    if release_of(version) != release_of(torch):
        return "FAIL", "torch-neuronx", f"{version} with torch {torch}; {fix}"
    if is_stand_in():
        found = f"{version}: the tests' stand-in, which computes on the CPU and proves nothing about Neuron"
        return "warn", "torch-neuronx", found
    return "ok", "torch-neuronx", version


def free_memory() -> float | None:
    """Return the memory that new processes can have, in GiB; None if the system does not tell."""
    try:
        free = int(re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None
    with contextlib.suppress(OSError, TypeError, ValueError):  # a container may have less than the machine
        cgroup = Path("/sys/fs/cgroup")
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = int(re.search(r"inactive_file (\d+)", (cgroup / "memory.stat").read_text())[1])
        free = min(free, limit - used + cached)
    return free / 2**30


def check_processors(ranks: int) -> Line:
    """Return a line on how many processors the ranks share."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    turns = f", so {ranks} ranks take turns" if ranks > processors else ""
    return "ok", "processors", f"{processors}{turns}"


def check_memory(ranks: int) -> Line:
    """Return a line on the memory that the ranks need on the host, and how many would fit."""
    free = free_memory()
    if free is None:
        return "warn", "memory", "this system does not tell what is free; watch it during the run"
    fitting = [n for n in FITTING_RANKS if FIRST_RANK_GIB + n * MORE_RANK_GIB <= free]
    needed = FIRST_RANK_GIB + ranks * MORE_RANK_GIB
    found = f"{free:.1f} GiB free, {ranks} ranks need about {needed:.1f} with launch.py"
    if not fitting:
        return "FAIL", "memory", f"{found}; free some: not even one rank fits"
    level = "ok" if needed <= free else "FAIL"
    return level, "memory", f"{found}; up to RANKS={fitting[-1]} would fit"


def check_network() -> Line:
    """Return a line on whether the ranks can reach each other under the name that torchrun takes."""
    name = socket.getfqdn()
    try:
        with socket.create_server(("", 0)) as server:
            socket.create_connection((name, server.getsockname()[1]), timeout=5).close()
    except OSError as error:
        found = f"this machine does not reach its own ports as {name}: {error}"
        fix = f"add '127.0.0.1 {name}' to /etc/hosts, or open the firewall for it"
        return "FAIL", "network", f"{found}; {fix}"
    return "ok", "network", f"this machine reaches its own ports as {name}"


def check_disk(ranks: int, results: Path) -> Line:
    """Return a line on the place for the rank files: one run must fit, and make all-parity should."""
    existing = results.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return "FAIL", "disk", f"{existing} is no directory; give another place with RESULTS="
    if not os.access(existing, os.W_OK):
        return "FAIL", "disk", f"{existing} cannot be written; give another place with RESULTS="
    needed = ranks * RESULT_MIB_PER_RANK / 1024 * RUNS
    free = shutil.disk_usage(existing).free / 2**30
    found = f"{free:.1f} GiB free for {results}, make all-parity writes about {needed:.1f}"
    if free < needed / RUNS:
        return "FAIL", "disk", f"{found}; free some, or give another place with RESULTS="
    return "ok" if free >= needed else "warn", "disk", found


def check_shared_memory() -> list[Line]:
    """Return a line on /dev/shm, where there is one."""
    if not Path("/dev/shm").is_dir():
        return []
    free = shutil.disk_usage("/dev/shm").free / 2**30
    fix = "; a container gets more with --shm-size=1g" if free < 1 else ""
    return [("warn" if fix else "ok", "shared memory", f"{free:.2f} GiB free{fix}")]


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
    what = f"{name_of(device)} with {backend}"
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
    parser.add_argument("--cores", action="store_true", help="print the number of logical NeuronCores only")
    parser.add_argument("--print-device", nargs="?", const="", help="for make: a device, and its name")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
    args = parser.parse_args()
    backend = args.backend or DEFAULT_BACKEND[args.device]
    if args.ranks < 1:
        parser.error(f"--ranks is {args.ranks}, must be at least 1")
    if args.as_rank:
        be_rank(args.device, backend)
        return 0
    if args.print_device is not None:
        device = args.print_device or default_device()
        print(device, name_of(device))
        return 0
    if args.cores:
        return print_cores()
    return run_checks(args.device, backend, args.ranks, args.results, args.quiet)


def print_cores() -> int:
    """Print the number of logical cores, or an error; return the exit status."""
    try:
        print(sum(len(device.cores) for device in list_devices()))
    except NotListed as why:
        print(f"error: neuron-ls: {why}", file=sys.stderr)
        return 1
    return 0


def run_checks(device: str, backend: str, ranks: int, results: Path, quiet: bool) -> int:
    """Check one thing after the other; return the exit status."""
    levels = []

    def show(*lines: Line) -> None:
        for level, what, found in lines:
            levels.append(level)
            if level != "ok" or not quiet:
                print(f"{level:5} {what}: {found}", flush=True)

    if device == "neuron":
        show(*check_devices(ranks))
        show(*check_environment())
    show(check_python(device))
    show(check_torch())
    if device == "neuron":
        show(check_torch_neuronx())
    show(check_processors(ranks))
    show(check_memory(ranks))
    show(check_network())
    show(check_disk(ranks, results))
    show(*check_shared_memory())
    if "FAIL" in levels:
        show(("warn", "device", "not tried, because of the above"))
    else:
        show(check_device(device, backend, ranks))
    counts = ", ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "FAIL"))
    print(f"== preflight for {ranks} ranks on {name_of(device)}: {counts}")
    return 1 if "FAIL" in levels else 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
