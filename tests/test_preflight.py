"""preflight.py: each thing that a run needs is looked at, and what is missing is printed with its fix.

neuron-ls is replaced by a script that prints what the real one prints, in the fields of its JSON output.
"""

import importlib.metadata
import json
import os
import pathlib
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, run

import preflight

# A trn2.48xlarge: 16 devices of 96 GiB, each with four logical cores of 24 GiB.
NODE = [
    {
        "neuron_device": i,
        "bdf": f"{i:02x}:00.0",
        "cpu_affinity": "0-95",
        "numa_node": "0",
        "connected_to": [(i + 1) % 16, (i - 1) % 16],
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 96 * 2**30,
        "neuroncore_ids": list(range(4 * i, 4 * i + 4)),
        "neuron_processes": [],
    }
    for i in range(16)
]


def node(**changes):
    """The node with changes to its last device; None removes a field."""
    devices = [dict(device) for device in NODE]
    devices[-1].update(changes)
    return [{key: value for key, value in device.items() if value is not None} for device in devices]


@pytest.fixture
def check(call, monkeypatch, tmp_path):
    """Run preflight in this process, on a machine with all that Neuron needs: status and lines."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(preflight, "NEURON_TOOLS", str(tmp_path / "none"))
    monkeypatch.setattr(preflight, "NEURON_LS_SECONDS", 0.5)
    for name, value in preflight.ENVIRONMENT.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    versions = {"torch": "2.14.1+cu130", "torch-neuronx": "2.14.3.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions[name])
    monkeypatch.setattr(sys, "version_info", (3, 12, 4))
    monkeypatch.setattr(preflight, "free_memory", lambda: 100.0)
    monkeypatch.setattr(preflight, "check_device", lambda *arguments: ("ok", "device", "tried"))

    def main(*arguments, neuron_ls=None):
        if neuron_ls is not None:
            script = neuron_ls if isinstance(neuron_ls, str) else f"cat <<'END'\n{json.dumps(neuron_ls)}\nEND"
            (tools / "neuron-ls").write_text(
                f'#!/bin/sh\n[ "$1" = -j ] || exit 3\nPATH=/bin:/usr/bin\n{script}\n'
            )
            (tools / "neuron-ls").chmod(0o755)
        done = call(preflight.main, "--results", tmp_path / "results", *arguments)
        lines = done.out.splitlines()
        return SimpleNamespace(status=done.status, lines=lines, out=done.out, err=done.err)

    main.versions = versions
    return main


def problems(done):
    return [line for line in done.lines if line.startswith(("warn", "FAIL"))]


def assert_first_problem(done, line):
    """The first problem is this one, and the exit status follows from it."""
    assert done.status == (1 if line.startswith("FAIL") else 0)
    assert problems(done)[0].startswith(line)


def test_healthy_node(check):
    done = check(neuron_ls=NODE)
    assert (done.status, problems(done)) == (0, [])
    assert "ok    neuron-ls: 16 Neuron devices" in done.lines
    assert "ok    cores: 0 to 63 are there" in done.lines
    assert "ok    device: tried" in done.lines
    assert done.lines[-1].startswith("== preflight for 64 ranks on neuron: ")
    assert done.lines[-1].endswith(" ok, 0 warn, 0 FAIL")


PROCESS = {"pid": 113985, "command": "python train.py", "neuron_runtime_version": "2.0.0"}


@pytest.mark.parametrize(
    ("neuron_ls", "line"),
    [
        (node(logical_neuroncore_config=1), "FAIL  core configuration: 1, 2, expected 2; export "),
        (NODE[:8], "FAIL  cores: 32 are there, 64 ranks need 0 to 63: 32 is missing; start fewer"),
        (node(neuroncore_ids=[64, 65, 66, 67]), "FAIL  cores: 64 are there, 64 ranks need 0 to 63: 60 is"),
        (
            node(neuron_processes=[PROCESS]),
            "FAIL  cores in use: pid 113985 (python train.py) uses device 15; wait for it or end it: kill",
        ),
        (
            node(neuron_processes=[PROCESS] * 3),
            "FAIL  cores in use: pid 113985 (python train.py) uses device 15, and 2 more; wait",
        ),
        ([], "FAIL  neuron-ls: lists no Neuron device; use a Trn2 or Trn3 instance"),
        ("echo 'no driver' >&2; exit 1", "FAIL  neuron-ls: printed no list of devices but: no driver;"),
        ("echo '{\"a\": 0}'", 'FAIL  neuron-ls: printed no list of devices but: {"a": 0}'),
        ("echo '[1]'", "FAIL  neuron-ls: printed no list of devices but: [1]"),
        ("printf '[%.0s' $(seq 20000)", "FAIL  neuron-ls: printed no list of devices but: [[[["),
        (f"echo '{json.dumps(NODE)[:-9]}'", "FAIL  neuron-ls: printed no list of devices but: [{"),
        ("echo '[INFO] none'", "FAIL  neuron-ls: printed no list of devices but: [INFO] none"),
        ("true", "FAIL  neuron-ls: printed no list of devices but: nothing"),
        ("exec sleep 20", "FAIL  neuron-ls: did not end in 0.5 s: the driver hangs; reload it"),
    ],
)
def test_node_that_is_not_fit(check, neuron_ls, line):
    started = time.monotonic()
    done = check(neuron_ls=neuron_ls)
    assert done.status == 1
    assert any(text.startswith(line) for text in done.lines), done.out
    assert "warn  device: not tried, because of the above" in done.lines
    assert time.monotonic() - started < 10


def test_cores_of_ranks_that_are_not_started_may_be_in_use(check):
    done = check("--ranks", 60, neuron_ls=node(neuron_processes=[PROCESS]))
    assert (done.status, problems(done)) == (0, [])
    done = check("--ranks", 62, neuron_ls=node(neuron_processes=[PROCESS]))
    assert done.status == 0
    assert "uses device 15, perhaps only cores that no rank takes; wait" in problems(done)[0]


def test_core_surely_in_use_comes_before_one_perhaps_in_use(check):
    devices = node(neuron_processes=[PROCESS])[::-1]  # device 15 first, of which rank 60 takes one core
    devices[-1] = devices[-1] | {"neuron_processes": [PROCESS | {"pid": 7}]}
    done = check("--ranks", 61, neuron_ls=devices)
    assert done.status == 1
    assert problems(done)[0].startswith(
        "FAIL  cores in use: pid 7 (python train.py) uses device 0, and 1 more;"
    )


def test_older_neuron_ls_that_gives_no_core_ids(check):
    devices = [{key: d[key] for key in ("neuron_device", "nc_count", "memory_size")} for d in NODE]
    done = check(neuron_ls=devices)
    assert done.status == 0
    line = "neuron-ls: gives no core ids, so no core was checked; update aws-neuronx-tools"
    assert [line for line in problems(done) if "neuron-ls" in line] == [f"warn  {line}"]
    done = check("--cores", neuron_ls=devices)
    assert (done.status, done.out, done.err) == (1, "", f"error: {line}\n")


def test_neuron_ls_that_gives_no_core_configuration(check):
    devices = [{key: value for key, value in d.items() if "config" not in key} for d in NODE]
    assert (
        "warn  core configuration: neuron-ls does not tell it; update aws-neuronx-tools"
        in check(neuron_ls=devices).lines
    )


def test_cores_of_another_size_on_request(check, monkeypatch):
    devices = [
        d | {"logical_neuroncore_config": 1, "neuroncore_ids": list(range(8 * i, 8 * i + 8))}
        for i, d in enumerate(NODE)
    ]
    assert check("--ranks", 128, neuron_ls=devices).status == 1
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    done = check("--ranks", 128, neuron_ls=devices)
    assert done.status == 0
    assert problems(done)[0].startswith("warn  core configuration: 1, as NEURON_LOGICAL_NC_CONFIG asks for")


@pytest.mark.parametrize(
    ("neuron_ls", "status", "out", "err"),
    [
        (NODE, 0, "64\n", ""),
        (NODE[:3], 0, "12\n", ""),
        (f"echo '[INFO] [1] of 2'; echo '{json.dumps(NODE)}'; echo done", 0, "64\n", ""),
        (None, 1, "", "error: neuron-ls: not on PATH nor in "),
        ([], 1, "", "error: neuron-ls: lists no Neuron device; use a Trn2 or Trn3 instance"),
        ("echo no driver", 1, "", "error: neuron-ls: printed no list of devices but: no driver"),
        ("exec sleep 20", 1, "", "error: neuron-ls: did not end in 0.5 s: the driver hangs"),
        ([NODE[0] | {"neuroncore_ids": ["a"]}], 1, "", "error: neuron-ls: printed fields of another kind"),
    ],
)
def test_number_of_cores(check, neuron_ls, status, out, err):
    done = check("--cores", neuron_ls=neuron_ls)
    assert (done.status, done.out) == (status, out)
    assert done.err.startswith(err) and done.err.count("\n") == status


@pytest.mark.parametrize(
    ("version", "default", "named"),
    [
        ("2.14.3.0", "neuron neuron", "neuron neuron"),
        ("2.13.0", "cpu cpu", "neuron neuron"),
        ("2.14.0+standin", "cpu cpu", "neuron the stand-in for Neuron"),
        (None, "cpu cpu", "neuron neuron"),
    ],
)
def test_device_and_its_name_for_make(check, monkeypatch, version, default, named):
    monkeypatch.setattr(preflight, "version_of", lambda package: version)
    for arguments, printed in (((), default), (("neuron",), named), (("cpu",), "cpu cpu")):
        done = check("--print-device", *arguments)
        assert (done.status, done.out, done.err) == (0, f"{printed}\n", "")


@pytest.mark.parametrize(
    "change",
    [
        {"neuron_processes": ["x"]},
        *({"neuroncore_ids": ids} for ids in ([[0]], ["four"], [1e999], 4)),
    ],
)
def test_fields_of_another_kind(check, change):
    done = check(neuron_ls=[NODE[0] | change, *NODE[1:]])
    assert done.status == 0
    assert any(line.startswith("warn  neuron-ls: printed fields of another kind") for line in done.lines)


@pytest.mark.parametrize(
    "before", ["", "WARNING: a new version is there\\n", "[INFO] [1] of 2\\n[1]\\n", "\\0377\\n"]
)
def test_numbers_as_text_and_words_before_the_list(check, before):
    devices = [
        d | {"logical_neuroncore_config": "2", "neuroncore_ids": list(map(str, d["neuroncore_ids"]))}
        for d in NODE
    ]
    done = check(neuron_ls=f"printf '{before}'; cat <<'END'\n{json.dumps(devices)}\nEND")
    assert (done.status, problems(done)) == (0, [])


def test_results_that_are_a_file(check, tmp_path):
    (tmp_path / "file").touch()
    done = check("--device", "cpu", "--results", tmp_path / "file")
    assert problems(done)[0].startswith(f"FAIL  disk: {tmp_path / 'file'} is no directory")


def test_without_neuron_ls(check):
    done = check()
    assert done.status == 0
    assert problems(done)[0].startswith("warn  neuron-ls: not on PATH nor in ")


def test_neuron_ls_that_is_not_on_path(check, monkeypatch, tmp_path):
    check(neuron_ls=NODE)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(preflight, "NEURON_TOOLS", str(tmp_path / "bin"))
    assert "ok    cores: 0 to 63 are there" in check().lines


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("NEURON_RT_VISIBLE_CORES", "0-3", "FAIL  NEURON_RT_VISIBLE_CORES: is '0-3', must not be set; unset"),
        (
            "NEURON_RT_NUM_CORES",
            "4",
            "FAIL  NEURON_RT_NUM_CORES: is '4', must not be set; unset NEURON_RT_NUM",
        ),
        ("TORCH_NEURONX_ENABLE_STREAMS", "0", "FAIL  TORCH_NEURONX_ENABLE_STREAMS: is '0', must not be set"),
        (
            "NEURON_LOGICAL_NC_CONFIG",
            "1",
            "warn  NEURON_LOGICAL_NC_CONFIG: is '1', expected 2; export NEURON_L",
        ),
        (
            "TORCH_NEURONX_ENABLE_HOST_CC",
            None,
            "warn  TORCH_NEURONX_ENABLE_HOST_CC: is not set, expected 0; exp",
        ),
        ("OMP_NUM_THREADS", "8", "warn  OMP_NUM_THREADS: is '8', expected 1; export OMP_NUM_THREADS=1"),
    ],
)
def test_environment(check, monkeypatch, name, value, line):
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    done = check(neuron_ls=NODE)
    assert_first_problem(done, line)


@pytest.mark.parametrize(
    ("package", "version", "line"),
    [
        ("torch", "2.13.0", "FAIL  torch: 2.13.0, expected 2.14; pip install 'torch>=2.14,<2.15'"),
        (
            "torch-neuronx",
            "2.8.0.2.10",
            "FAIL  torch-neuronx: 2.8.0.2.10 is older than 2.14, perhaps the XLA",
        ),
        ("torch-neuronx", "1.13.1.1.16.1", "FAIL  torch-neuronx: 1.13.1.1.16.1 is older than 2.14, perhaps"),
        ("torch-neuronx", "2.15.0", "FAIL  torch-neuronx: 2.15.0 with torch 2.14.1+cu130; install"),
        (
            "torch-neuronx",
            "2.14.0+standin",
            "warn  torch-neuronx: 2.14.0+standin: the tests' stand-in, which",
        ),
    ],
)
def test_versions(check, package, version, line):
    check.versions[package] = version
    done = check(neuron_ls=NODE)
    assert_first_problem(done, line)


@pytest.mark.parametrize("package", ["torch", "torch-neuronx"])
def test_package_that_is_not_installed(check, monkeypatch, package):
    def version(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError
        return "2.14.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = check(neuron_ls=NODE)
    assert done.status == 1
    assert problems(done)[0].startswith(f"FAIL  {package}: not installed")


@pytest.mark.parametrize("version", [(3, 11, 9), (3, 15, 0)])
def test_python_that_torch_neuronx_does_not_take(check, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    found = f"3.{version[1]}, expected 3.12 to 3.14"
    assert f"FAIL  Python: {found}; make an environment with such a Python" in check(neuron_ls=NODE).lines
    assert check("--device", "cpu").status == 0


@pytest.mark.parametrize(
    ("free", "status", "words"),
    [
        (
            2.0,
            1,
            "FAIL  memory: 2.0 GiB free, 64 ranks need about 5.7 with launch.py; up to RANKS=16 would fit",
        ),
        (
            8.0,
            0,
            "ok    memory: 8.0 GiB free, 64 ranks need about 5.7 with launch.py; up to RANKS=64 would fit",
        ),
        (
            0.1,
            1,
            "FAIL  memory: 0.1 GiB free, 64 ranks need about 5.7 with launch.py; free some: not even one",
        ),
        (None, 0, "warn  memory: this system does not tell what is free"),
    ],
)
def test_memory_of_a_laptop(check, monkeypatch, free, status, words):
    monkeypatch.setattr(preflight, "free_memory", lambda: free)
    done = check("--device", "cpu")
    assert done.status == status
    assert any(line.startswith(words) for line in done.lines), done.out
    assert not any("neuron" in line.lower() for line in done.lines)


def test_free_memory_is_what_the_kernel_says():
    assert 0 < preflight.free_memory() < 1e6


def test_disk_and_network(check, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**28))

    monkeypatch.setattr(socket, "getfqdn", lambda: "no.such.name.invalid")
    done = check("--device", "cpu")
    assert done.status == 1
    network, disk, shared = problems(done)[:3]
    assert network.startswith("FAIL  network: this machine does not reach its own ports as no.such")
    assert disk.startswith("FAIL  disk: 0.2 GiB free for ") and "RESULTS=" in disk
    assert shared.startswith("warn  shared memory: 0.25 GiB free; a container gets more with --shm-size=1g")


def test_quiet_prints_what_is_wrong_only(check):
    done = check("--quiet", "--device", "cpu")
    assert len(done.lines) == 1 and done.status == 0


@pytest.mark.parametrize("arguments", [("--ranks", 0), ("--device", "tpu")])
def test_wrong_usage(check, arguments):
    done = check(*arguments)
    assert done.status == 2
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_device_is_tried_for_real_on_the_cpu(tmp_path):
    done = run(sys.executable, ROOT / "preflight.py", "--device", "cpu", "--ranks", 2, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "ok    cpu with gloo: a tensor came back unchanged, and the sum over 2 ranks is right" in done.out
    assert list(tmp_path.iterdir()) == []


def test_reader_that_stops_early_sees_no_traceback(tmp_path):
    script = f"{sys.executable} {ROOT / 'preflight.py'} --device cpu --ranks 100000 | true"
    done = run("sh", "-c", script, cwd=tmp_path)
    assert (done.status, done.out, done.err) == (0, "", "")


def test_device_that_fails_is_shown_in_one_line(monkeypatch, tmp_path):
    python = tmp_path / "python"
    fails = "sleep 60 & echo Traceback >&2; echo 'RuntimeError: no core' >&2; exit 1"
    python.write_text(f"#!/bin/sh\n[ $RANK = 0 ] && exec sleep 60\n{fails}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    started = time.monotonic()
    level, what, found = preflight.check_device("neuron", "neuron", 64)
    assert time.monotonic() - started < 10  # neither rank 0 nor what rank 1 left behind is waited for
    assert (level, what) == ("FAIL", "neuron with neuron")
    assert found.startswith("rank 1: RuntimeError: no core; to see more, run each rank by hand: RANK=<rank> ")
    assert "\n" not in found


def test_nothing_stays_behind_after_an_interrupt(monkeypatch, tmp_path):
    def interrupted(seconds):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            pause(0.01)
        raise KeyboardInterrupt

    pause = time.sleep
    monkeypatch.setattr(time, "sleep", interrupted)
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait"]
    with pytest.raises(KeyboardInterrupt):
        preflight.run_all([(command, dict(os.environ))], 30)
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):  # until init has reaped it
        state = pathlib.Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        pause(0.05)
    pytest.fail(f"process {child} is still there")


def test_device_that_hangs(monkeypatch):
    monkeypatch.setattr(preflight, "DEVICE_SECONDS", 0.2)
    level, _, found = preflight.check_device("cpu", "gloo", 2)
    assert level == "FAIL" and found.startswith("ranks [0, 1] did not end in 0.2 s; to see more, ")
