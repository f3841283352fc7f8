"""Mistakes end in one line that says what is wrong and what to do, without a traceback or a hang."""

import argparse
import contextlib
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, cpu_options, launch, run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import distributed_train
import launch as launch_script
import simplefsdp_tp_train
import training_common
from training_common import InputError, add_run_arguments, check_same_options, initialize


def arguments(*options):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return parser.parse_args([str(option) for option in options])


@pytest.fixture
def started(monkeypatch, tmp_path):
    """initialize(options), as one rank of a launch would call it, up to the first collective."""
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: None)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(training_common, "check_same_options", lambda store, rank, world_size, args: None)

    def start(*options, rank=0, world_size=4, local_rank=None):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank if local_rank is None else local_rank))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, str(world_size))
        defaults = ["--expected-world-size", world_size, "--output-dir", tmp_path / "results"]
        return initialize(arguments(*defaults, *options))

    return start


CPU = ("--device", "cpu", "--backend", "gloo")
LAUNCH_TWO = (sys.executable, ROOT / "launch.py", "--standalone", "--nproc-per-node=2")


def test_valid_options_start(started, tmp_path):
    assert started(*CPU, rank=2) == (2, 4, torch.device("cpu"))
    assert (tmp_path / "results").is_dir()


def test_defaults_are_the_tutorials():
    args = arguments()
    assert (args.device, args.backend, args.expected_world_size) == ("neuron", "neuron", 64)
    assert (args.seed, args.steps) == (0, 10)


def test_help_states_every_default(capsys):
    with pytest.raises(SystemExit):
        arguments("--help")
    text = " ".join(capsys.readouterr().out.split())
    for default in ("neuron", "64", "0", "10", "results/latest"):
        assert f"(default: {default})" in text


@pytest.mark.parametrize("steps", ["0", "-1", "x", "1.5"])
def test_steps_that_are_no_count(capsys, steps):
    with pytest.raises(SystemExit) as stop:
        arguments("--steps", steps)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: argument --steps: ") and err.count("\n") == 1


def test_not_started_by_a_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        InputError, match="start this script with torchrun, for instance: torchrun --standalone"
    ):
        initialize(arguments(*CPU))


@pytest.mark.parametrize(
    ("device", "backend", "fix"),
    [
        ("cpu", "neuron", "use --device cpu --backend gloo"),
        ("cpu", "nccl", "use --device cpu --backend gloo"),
        ("neuron", "gloo", "use --device neuron --backend neuron"),
        ("cuda", "neuron", "use --device cuda --backend nccl or gloo"),
    ],
)
def test_device_and_backend_that_do_not_go_together(started, device, backend, fix):
    with pytest.raises(InputError, match=f"--device {device} does not go with --backend {backend}; {fix}"):
        started("--device", device, "--backend", backend)


def test_wrong_world_size(started):
    with pytest.raises(InputError, match="started 4 ranks, --expected-world-size is 8"):
        started(*CPU, "--expected-world-size", 8)


@pytest.fixture
def options_of_ranks(monkeypatch):
    """check_same_options on three ranks at once: what each rank raised, None for nothing."""

    def check(*namespaces):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))

        def rank_in_thread(rank):
            try:
                check_same_options(store, rank, len(namespaces), namespaces[rank])
            except InputError as error:
                return str(error)

        with ThreadPoolExecutor(len(namespaces)) as ranks:
            return list(ranks.map(rank_in_thread, range(len(namespaces))))

    return check


@pytest.mark.parametrize("change", [("--steps", 9), ("--seed", 1), ("--device", "cuda")])
def test_ranks_of_different_jobs_all_end_with_one_line(options_of_ranks, change):
    option, value = change
    name, default = option.removeprefix("--"), getattr(arguments(), option.removeprefix("--"))
    line = f"rank 2 was started with {name} {value}, rank 0 with {default}; start the same job on every node"
    assert options_of_ranks(arguments(), arguments(), arguments(*change)) == [line, line, line]


def test_ranks_of_one_job_start(options_of_ranks):
    # The output directory may be another one on another node.
    assert options_of_ranks(arguments(), arguments(), arguments("--output-dir", "x")) == [None, None, None]
    assert options_of_ranks(arguments()) == [None]


def test_ranks_of_different_scripts(monkeypatch):
    store = dist.HashStore()
    store.set("parity-difference", "")  # as if all had been compared
    for path in ("/here/distributed_train.py", "/there/distributed_train.py"):
        monkeypatch.setattr(sys, "argv", [path])
        check_same_options(store, int(path.startswith("/there")), 3, arguments())
    monkeypatch.setattr(sys, "argv", ["reference_train.py"])
    with pytest.raises(InputError, match="script reference_train.py, rank 0 with distributed_train.py;"):
        check_same_options(store, 2, 3, arguments())


def test_nodes_of_different_jobs_both_end(tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    nodes = []
    for node in (0, 1):
        command = [sys.executable, ROOT / "launch.py", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command += [ROOT / "distributed_train.py", "--parallelism", "ddp"]
        command += cpu_options(2, tmp_path / str(node), steps=2 + node)
        command = [str(part) for part in command]
        nodes.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True))
    try:
        errors = [node.communicate(timeout=120)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    line = "error: rank 1 was started with steps 3, rank 0 with 2; start the same job on every node\n"
    assert all(line in text for text in errors), errors
    assert [node.returncode for node in nodes] == [2, 2]


def test_neuron_without_the_package(started):
    with pytest.raises(
        InputError, match="package torch-neuronx is not installed; install torch-neuronx 2.14"
    ):
        started()


@pytest.mark.parametrize("version", ["1.13.1.1.16.1", "2.8.0.2.10.16998", "2.13.3.0"])
def test_neuron_package_without_a_native_device(started, monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(InputError, match=f"torch-neuronx {version} is older than 2.14"):
        started()


def test_neuron_package_that_fails_to_import(started, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.14.3.0")
    with pytest.raises(InputError, match="torch-neuronx 2.14.3.0 does not import: No module named"):
        started()


def install_neuron(monkeypatch):
    """As if a torch-neuronx were there that registers nothing."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.14.3.0")
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))


def test_neuron_package_that_brings_no_device(started, monkeypatch):
    install_neuron(monkeypatch)
    with pytest.raises(InputError, match="torch-neuronx 2.14.3.0 brings no native device, as the XLA-based"):
        started()


@pytest.mark.parametrize(("cores", "taken"), [(64, [3]), (4, [3]), (1, [])])
def test_each_rank_takes_its_core(started, monkeypatch, cores, taken):
    took = []
    install_neuron(monkeypatch)
    device = types.SimpleNamespace(device_count=lambda: cores, set_device=took.append)
    monkeypatch.setattr(torch, "neuron", device, raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)  # "neuron" is unknown to it here
    assert started(rank=3)[2] == "neuron" and took == taken


def test_fewer_cores_than_ranks(started, monkeypatch):
    install_neuron(monkeypatch)
    device = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "neuron", device, raising=False)
    with pytest.raises(InputError, match="2 cores are visible to 4 ranks; start at most 2 ranks, or unset"):
        started(rank=3)


def test_cuda_without_a_gpu(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="torch sees no GPU; use --device cpu --backend gloo"):
        started("--device", "cuda", "--backend", "nccl")


def test_nccl_with_more_ranks_than_gpus(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(InputError, match="one GPU per rank: 4 ranks, 3 GPUs"):
        started("--device", "cuda", "--backend", "nccl")
    assert started("--device", "cuda", "--backend", "gloo", rank=3)[2] == torch.device("cuda", 0)


def test_output_directory_below_a_file(started, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written: Not a directory; use another directory"):
        started(*CPU, "--output-dir", tmp_path / "file" / "results")


@pytest.mark.parametrize("rank", [0, 1])
def test_someone_elses_files_are_refused_and_left_untouched(started, tmp_path, rank):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "rank-0.pt").write_bytes(b"mine too")
    (tmp_path / f"rank-{rank}.pt.tmp").write_bytes(b"and mine")
    with pytest.raises(InputError, match="holds notes.txt, which no run of these scripts wrote"):
        started(*CPU, "--output-dir", tmp_path, rank=rank)
    (tmp_path / "notes.txt").unlink()
    for name in ("rank-0.pt", f"rank-{rank}.pt.tmp"):
        with pytest.raises(InputError, match=f"holds {name}, which no run of these scripts wrote"):
            started(*CPU, "--output-dir", tmp_path)
        assert (tmp_path / name).read_bytes() in (b"mine too", b"and mine")
        (tmp_path / name).unlink()


@pytest.mark.parametrize("name", ["rank-0.pt", "rank-7.pt.tmp"])
def test_no_regular_file_with_a_rank_files_name_is_refused(started, tmp_path, name):
    (tmp_path / name).mkdir()
    for _ in range(2):
        with pytest.raises(InputError, match=f"holds {name}, which no run of these scripts wrote"):
            started(*CPU, "--output-dir", tmp_path)
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()
            (tmp_path / name).symlink_to("nowhere")
    assert (tmp_path / name).is_symlink()


def test_an_earlier_runs_files_are_cleared(started, tmp_path):
    for name in ("rank-0.pt", "rank-63.pt"):
        torch.save({"metadata": {"format": training_common.FORMAT}, "records": []}, tmp_path / name)
    (tmp_path / "rank-5.pt.tmp").touch()
    started(*CPU, "--output-dir", tmp_path, rank=1)
    assert len(list(tmp_path.iterdir())) == 3  # the first rank of a node clears, no other
    started(*CPU, "--output-dir", tmp_path, rank=2, local_rank=0)  # of the second node
    assert list(tmp_path.iterdir()) == []


def test_bad_sizes_leave_an_earlier_runs_files(monkeypatch, capsys, tmp_path):
    torch.save({"metadata": {"format": training_common.FORMAT}, "records": []}, tmp_path / "rank-0.pt")
    monkeypatch.setattr(sys, "argv", ["distributed_train.py", "--parallelism=tp", *cpu_options(3, tmp_path)])
    with pytest.raises(SystemExit) as stop:
        training_common.run_script(distributed_train.main)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: HIDDEN_FEATURES = 256 does not divide evenly over 3")
    assert (tmp_path / "rank-0.pt").exists()


@pytest.mark.parametrize(
    ("error", "written", "status"),
    [
        (InputError("--steps is 0"), r"error: --steps is 0\n", 2),
        (RuntimeError("diverged"), r"Traceback .*\nRuntimeError: diverged\n", 1),
    ],
)
def test_an_exception_is_one_write_and_a_failure(monkeypatch, error, written, status):
    stderr = Mock()
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(SystemExit) as stop:
        training_common.run_script(Mock(side_effect=error))
    assert stop.value.code == status
    ((text,),) = (call.args for call in stderr.write.call_args_list)  # ranks share a terminal
    assert re.fullmatch(written, text, re.DOTALL)


def test_an_unknown_option_is_one_write(monkeypatch):
    stderr = Mock()
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(SystemExit):
        arguments("--unknown")
    stderr.write.assert_called_once_with(
        "error: unrecognized arguments: --unknown; --help lists the options\n"
    )


@pytest.fixture
def launch_here(call, monkeypatch):
    """Call launch.py's main in this process, for what it refuses before it starts a rank."""
    monkeypatch.setattr(launch_script, "start_fork_server", lambda ranks: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return partial(call, launch_script.main, "--standalone")


@pytest.fixture
def rank_here(launch_here, monkeypatch, tmp_path):
    """Launch a script whose only rank is this process, in place of the one that torchrun's agent starts.

    This is for the many things that a script may raise. That the agent does its part, a test below sees.
    """

    def run_agent(args):
        folder = Path(args.log_dir) / "job" / "attempt_0" / "0"
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        with contextlib.ExitStack() as redirected:
            if args.redirects == "3":
                log = redirected.enter_context((folder / "stderr.log").open("w"))
                redirected.enter_context(contextlib.redirect_stderr(log))
            with pytest.raises(SystemExit) as stop:
                launch_script.run_as_rank(*args.training_script_args[1:])
        raise ChildFailedError(
            "script", {0: ProcessFailure(0, 7, exitcode=stop.value.code, error_file=folder / "error.json")}
        )

    monkeypatch.setattr("torch.distributed.run.run", run_agent)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return launch_here


def failed_launch(done):
    """Return the one line that a failed launch ends with."""
    assert done.status != 0
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and done.err.endswith(lines[0] + "\n"), done.err
    assert "Traceback" not in done.err and "Traceback" not in done.out
    return lines[0]


def test_launch_reports_the_first_failing_rank_its_error_and_log(tmp_path):
    script = [ROOT / "distributed_train.py", "--parallelism", "tp"]
    done = launch(3, tmp_path / "logs", *script, *cpu_options(3, tmp_path / "results"))
    line = failed_launch(done)
    assert done.status == 2
    assert "failed first: HIDDEN_FEATURES = 256 does not divide evenly over 3 tp ranks" in line
    log = Path(line.rpartition("its log: ")[2]).read_text()
    assert log.startswith("error: HIDDEN_FEATURES = 256 does not divide") and log.count("\n") == 1


def test_launch_without_logs_says_so(rank_here, tmp_path):
    done = rank_here(ROOT / "distributed_train.py", "--parallelism", "pp", *cpu_options(1, tmp_path))
    assert done.status == 2
    lines = done.err.splitlines()
    assert lines[-1].startswith("error: rank ") and "use --log-dir DIR --redirects 3" in lines[-1]
    assert any("invalid choice: 'pp'" in line for line in lines[:-1])


# What a script may raise where run_script does not catch it: its text, the line that quotes it, its status.
RAISES = {
    "import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "name": ("x = undefined", "NameError: name 'undefined' is not defined"),
    "syntax": ("with open('x')\n    pass", "SyntaxError: expected ':' (fails.py, line 1)"),
    "raise": ("def f():\n    raise ValueError('two\\nlines')\nf()", "ValueError: two"),
    "empty": ("assert False", "AssertionError"),
    "exit": ("import sys; sys.exit('no data found')", "no data found"),
}


@pytest.mark.parametrize("kind", RAISES)
def test_launch_shows_what_a_script_raises_once_and_quotes_it(rank_here, tmp_path, kind):
    see_what_is_raised(kind, tmp_path, rank_here)


def test_torchruns_agent_passes_on_what_a_script_raises(tmp_path):
    see_what_is_raised("raise", tmp_path, partial(run, *LAUNCH_TWO, TMPDIR=str(tmp_path)))


def see_what_is_raised(kind, folder, launch_script):
    text, quoted = RAISES[kind]
    (folder / "fails.py").write_text(text + "\n")
    done = launch_script(folder / "fails.py")
    assert (done.status, done.out) == (1, "")
    *shown, line = done.err.splitlines()
    assert re.fullmatch(
        rf"error: rank [01] failed first: {re.escape(quoted)}; its messages are above", line
    ), done.err
    if kind == "exit":
        assert shown == [quoted]
    else:
        # As Python shows it, and without the launcher's own frames.
        python = run(sys.executable, folder / "fails.py")
        assert shown == python.err.splitlines()
    assert not list(folder.glob("launch-*"))  # the temporary folder


@pytest.mark.parametrize("kind", ["name", "exit"])
def test_launch_with_logs_puts_what_a_script_raises_there_too(rank_here, tmp_path, kind):
    text, quoted = RAISES[kind]
    (tmp_path / "fails.py").write_text(
        f"import sys\nsys.stderr.write('x: UserWarning: no error\\n')\n{text}\n"
    )
    done = rank_here("--log-dir", tmp_path / "logs", "--redirects", "3", tmp_path / "fails.py")
    *shown, line = done.err.splitlines()
    words, _, log = line.partition("; its log: ")
    assert re.fullmatch(rf"error: rank [01] failed first: {re.escape(quoted)}", words), done.err
    assert Path(log).read_text().endswith(shown[-1] + "\n") and quoted in shown[-1]
    assert done.err.count(shown[-1] + "\n") == 1


def test_launch_of_many_ranks_shows_what_a_script_raises_once(tmp_path):
    (tmp_path / "fails.py").write_text("import no_such_module\n")
    command = [sys.executable, ROOT / "launch.py", "--standalone", "--nproc-per-node=128"]
    done = run(*command, tmp_path / "fails.py")
    assert done.status == 1
    assert done.err.count("Traceback") == 1 and done.err.count("\n") == 5, done.err
    assert re.search(r"error: rank \d+ failed first: ModuleNotFoundError: No module named 'no_s", done.err)


def test_launch_shows_nothing_twice_that_a_rank_prints_itself(rank_here, tmp_path):
    (tmp_path / "fails.py").write_text(
        "from training_common import run_script\ndef main():\n    raise OSError('mine')\nrun_script(main)\n"
    )
    done = rank_here(tmp_path / "fails.py")
    assert done.status == 1 and done.err.count("OSError: mine\n") == 1
    assert done.err.splitlines()[-1].startswith("error: rank 0 failed first: exit status 1; its messages are")


def test_launch_of_a_script_that_ends_well_says_nothing(tmp_path):
    (tmp_path / "neighbour.py").write_text("import sys\nwords = sys.argv[1:]\n")
    (tmp_path / "ends.py").write_text(
        "import sys\nfrom neighbour import words\nsys.exit(words != ['--as-rank', 'x'] or 0)\n"
    )
    done = run(*LAUNCH_TWO, tmp_path / "ends.py", "--as-rank", "x")
    assert (done.status, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    ("ranks", "backend", "words"),
    [
        (4, "nope", "--compile-backend nope is not known to torch; use aot_eager"),
        (6, "aot_eager", "6 ranks do not divide into groups of TP_DEGREE = 4"),
    ],
)
def test_simplefsdp_with_wrong_options(started, monkeypatch, capsys, tmp_path, ranks, backend, words):
    started(*CPU)  # the launcher's environment
    options = ["--compile-backend", backend, *cpu_options(ranks, tmp_path)]
    monkeypatch.setattr(sys, "argv", ["simplefsdp_tp_train.py", *options])
    with pytest.raises(SystemExit) as stop:
        training_common.run_script(simplefsdp_tp_train.main)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_256_ranks_are_forked_from_one_process(tmp_path):
    (tmp_path / "hello.py").write_text("import os\nprint(os.environ['RANK'], os.getppid())\n")
    done = launch(256, tmp_path / "logs", tmp_path / "hello.py")
    assert (done.status, done.err) == (0, "")
    said = [path.read_text().split() for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log")]
    assert {int(rank) for rank, _ in said} == set(range(256))
    assert len({parent for _, parent in said}) == 1


@pytest.mark.parametrize("ranks", ["0", "-1", "many"])
def test_launch_of_no_ranks(launch_here, ranks):
    done = launch_here("--nproc-per-node", ranks, ROOT / "distributed_train.py")
    assert done.status == 2
    assert ranks in failed_launch(done)


def test_a_scripts_own_options_do_not_change_the_launch(monkeypatch):
    script = ["hello.py", "--nproc-per-node=200"]
    for own, ranks in (["--nproc-per-node=2"], 2), (["--nproc_per_node", "3"], 3), ([], 1):
        monkeypatch.setattr(sys, "argv", ["launch.py", "--standalone", *own, *script])
        assert launch_script.requested_ranks() == ranks


def test_log_of_an_earlier_launch_is_not_blamed(tmp_path):
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=3, error_file="none")
    log = tmp_path / "launch" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("its last words\n")
    for started, words in (
        (log.stat().st_mtime - 1, f"rank 5 failed first: its last words; its log: {log}"),
        (log.stat().st_mtime + 1, "rank 5 failed first: exit status 3; its messages are above, or use"),
    ):
        error = ChildFailedError("fail.py", {5: failure})
        line, status = launch_script.describe_failure(error, str(tmp_path), started)
        assert line.startswith(words) and status == 3


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("error: --steps is 0\n", "--steps is 0"),
        ("x.BackendFailed: y raised:\nRuntimeError: no\n\nSet VERBOSE=1 for more\n", "RuntimeError: no"),
        ("Traceback\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("segfault\nat 0x0\n", "at 0x0"),
        ("a.py: error: no such option: --x\na.py:3: UserWarning: old\n  warn('old')\n", "a.py: error: no su"),
        ("╭─ Error ──╮\n│ Unknown: --x  │\n│ ─── │\n│ See --help │\n╰────╯\n", "Unknown: --x"),
    ],
)
def test_reason_is_the_error_not_what_is_printed_after_it(tmp_path, log, reason):
    path = tmp_path / "launch" / "attempt_0" / "0" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(log)
    error = ChildFailedError("x.py", {0: ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file="none")})
    line = launch_script.describe_failure(error, str(tmp_path), 0.0)[0]
    assert line.startswith(f"rank 0 failed first: {reason}") and line.endswith(f"; its log: {path}")


@pytest.mark.parametrize(
    "log", ["", "\n", "a.py:3: UserWarning: old\n  warn('old')\n", "[W1130 a.cpp:1] slow\n[x] - INFO - go\n"]
)
def test_log_without_a_message_is_neither_quoted_nor_named(tmp_path, log):
    path = tmp_path / "launch" / "attempt_0" / "0" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(log)
    error = ChildFailedError("x.py", {0: ProcessFailure(local_rank=0, pid=7, exitcode=3, error_file="none")})
    line, status = launch_script.describe_failure(error, str(tmp_path), 0.0)
    assert (line, status) == ("rank 0 failed first: exit status 3, without a message", 3)


def test_launch_of_what_is_no_script(launch_here, tmp_path):
    assert "there is no script" in failed_launch(launch_here(tmp_path / "absent.py"))
    assert "use torchrun for -m" in failed_launch(launch_here("-m", "json.tool"))


@pytest.mark.parametrize("option", ["--master-port={}", "--rdzv-backend=c10d --rdzv-endpoint=localhost:{}"])
def test_launch_on_a_port_that_is_in_use(call, launch_here, tmp_path, option):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = [*option.format(port).split(), "--nproc-per-node=2", ROOT / "distributed_train.py"]
        done = call(launch_script.main, *options, "--parallelism", "ddp", *cpu_options(2, tmp_path))
    assert f"port {port} is in use or no port; name another" in failed_launch(done)


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "stubborn" else signal.SIG_DFL)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def is_running(pid):
    """Say whether a process is there and has not ended; one that nobody waits for stays as a zombie."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


# A hangup alone does not end a launch that was started under nohup.
@pytest.mark.parametrize(
    ("name", "rank"), [("SIGTERM", "stubborn"), ("SIGINT", "plain"), ("SIGKILL", "plain")]
)
def test_a_stopped_launch_leaves_no_rank(tmp_path, name, rank):
    def ignore_hangup():  # as nohup does
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    (tmp_path / "waits.py").write_text(WAITS)
    options = ["--standalone", "--nproc-per-node=2", tmp_path / "waits.py", rank]
    with subprocess.Popen(
        [str(part) for part in (sys.executable, ROOT / "launch.py", *options)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_hangup,
    ) as process:
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        assert all(map(is_running, ranks))
        process.send_signal(getattr(signal, name))
        # The agent alone would wait for a stubborn rank for 30 s.
        _, err = process.communicate(timeout=25)
    number = getattr(signal, name)
    if name == "SIGKILL":
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"error: stopped by {name}; no rank is left running" in err.splitlines()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in ranks)


def test_killed_rank_ends_the_run_and_leaves_no_complete_result(tmp_path):
    script = [ROOT / "distributed_train.py", "--parallelism", "ddp"]
    command = [sys.executable, ROOT / "launch.py", "--standalone", "--nproc-per-node=4"]
    command += [
        "--log-dir",
        tmp_path / "logs",
        "--redirects",
        "3",
        ROOT / "tests" / "tools" / "observe.py",
        *script,
    ]
    process = subprocess.Popen(
        [str(part) for part in [*command, *cpu_options(4, tmp_path / "results", steps=100_000)]],
        env=ENVIRONMENT | {"OBSERVED": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        log = "attempt_0/2/stdout.log"
        while not any("step=3/" in path.read_text() for path in tmp_path.glob(f"logs/*/{log}")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(4)]
        os.kill(pids[2], signal.SIGKILL)
        killed = time.monotonic()
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert time.monotonic() - killed < 30
    assert err.startswith("error: rank 2 failed first: killed by SIGKILL") and err.count("\n") == 1
    assert not (tmp_path / "results" / "rank-0.pt").exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


FULL = """
import pathlib, resource, sys, torch
sys.path.insert(0, {root!r})
from training_common import InputError, write_then_rename, write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
try:
    with write_then_rename(pathlib.Path({path!r})) as temporary:
        write_tensors({{"records": [{{"a": torch.zeros(2**20)}}], "metadata": {{"format": "x"}}}}, temporary)
except InputError as error:
    print(error)
"""


def test_a_rank_file_that_does_not_fit(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(FULL.format(root=str(ROOT), path=str(tmp_path / "rank-0.pt")))
    done = run(sys.executable, script)
    assert done.status == 0, done.err
    assert re.fullmatch(
        rf"rank-0\.pt cannot be written in {tmp_path}: .+; it needs 4\.0 MiB, [\d.]+ MiB are free: "
        "free some, or use another directory\n",
        done.out,
    )
    assert list(tmp_path.iterdir()) == [script]


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(training_common.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**20))
    monkeypatch.setattr(
        training_common.torch, "save", Mock(side_effect=RuntimeError("unexpected pos 64 vs 0"))
    )
    with pytest.raises(InputError, match="the disk is full; it needs 4.0 MiB, 1.0 MiB are free"):
        training_common.write_tensors({"a": torch.zeros(2**20)}, tmp_path / "rank-0.pt.tmp")
