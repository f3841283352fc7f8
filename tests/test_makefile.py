"""The Makefile: the chain of a mode, what is run again and what is not, and what it sets."""

import os
import re
import sys
from functools import partial

import pytest
from conftest import copy_scripts, run

MODES = ("ddp", "fsdp", "tp", "simplefsdp-tp")


@pytest.fixture
def make(tmp_path):
    """make(targets and variables...), in a copy of the scripts, two ranks and two steps."""
    copy_scripts(tmp_path)

    def call(*arguments, **environment):
        settings = ["RANKS=2", "STEPS=2", f"PYTHON={sys.executable}"]
        return run("make", "--no-print-directory", *settings, *arguments, cwd=tmp_path, **environment)

    call.directory = tmp_path
    return call


def completed(done):
    """Return the names of the runs that a make completed, in order."""
    return re.findall(r"^== (\S+): 2 ranks completed in \d+ s", done.out, re.MULTILINE)


def test_a_modes_chain_and_what_is_not_run_again(make):
    done = make("ddp")
    assert done.status == 0, done.out + done.err
    assert "== oracle-eager: 2 steps in float64" in done.out and "oracle-simplefsdp" not in done.out
    assert completed(done) == ["cpu-ddp"]
    assert "== ddp: no device run was made: DEVICE is cpu" in done.out
    assert "== compare-cpu-ddp: results/cpu-ddp with results/oracle-eager" in done.out
    assert "No accelerator was checked" in done.out
    assert done.out.endswith("PASS comparison ranks=2 steps=2\n")
    assert done.out.count("step=1/2 training=completed") == 1  # rank 0's
    assert "PASS rank=1" not in done.out
    logs = [path.read_text() for path in make.directory.glob("results/logs/cpu-ddp/*/attempt_0/1/stdout.log")]
    assert len(logs) == 1 and "PASS rank=1 mode=ddp world_size=2" in logs[0]

    done = make("compare-ddp")
    assert done.status == 2
    assert "error: no finished run in results/ddp: make device-ddp" in done.err
    assert "== oracle-eager:" not in done.out
    (make.directory / "results" / "ddp").mkdir()

    # From here on a launcher that only says what it would start: is the reference made again?
    def launches(*settings):
        done = make("cpu-ddp", "LAUNCH=echo", *settings)
        assert done.status == 0, done.err
        return completed(done) == ["cpu-ddp"]

    last = make.directory / "results" / "cpu-ddp" / "rank-0.pt"
    assert not launches()
    assert launches("STEPS=1")
    assert launches("STEPS=1")  # the run with these settings did not finish
    last.touch()
    assert not launches("STEPS=1")
    script = make.directory / "distributed_train.py"
    script.touch()
    assert not launches("STEPS=1")
    script.write_text(script.read_text() + "# changed\n")
    os.utime(script, (0, 0))  # as cp -p may do: newer content under an older date
    assert launches("STEPS=1")
    last.touch()
    assert not launches("STEPS=1")
    last.unlink()  # a run that was cut off has no rank-0.pt, whatever else it wrote
    assert launches("STEPS=1")

    for name in ("keep.txt", "ddp/rank-7.pt", "logs/thesis.txt"):
        (make.directory / "results" / name).write_text("mine")
    done = make("clean")
    assert (done.status, done.out, done.err) == (0, "", "")
    left = [path for path in (make.directory / "results").rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == ["keep.txt", "rank-7.pt", "thesis.txt"]


def test_parallel_make_runs_one_after_the_other(make):
    done = make("-j2", "cpu-fsdp", "cpu-tp", "LAUNCH=sleep 1; echo")
    assert completed(done) == ["cpu-fsdp", "cpu-tp"]
    lines = [line for line in done.out.splitlines() if line.startswith("==")]
    assert [line.split()[1] for line in lines] == ["cpu-fsdp:"] * 3 + ["cpu-tp:"] * 3


def test_failed_run_ends_the_chain_before_the_comparison(make):
    done = make("-k", "tp", "LAUNCH=echo 'error: rank 1 failed first' >&2; false")
    assert done.status != 0
    assert "error: rank 1 failed first\n" in done.err and "Traceback" not in done.err
    assert "== cpu-tp: " in done.out and completed(done) == []
    assert "compare" not in done.out


@pytest.mark.parametrize("results", ["", "my results"])
def test_results_that_are_no_one_directory(make, results):
    done = make("clean", f"RESULTS={results}")
    assert done.status == 2
    assert f"RESULTS is '{results}': name one directory, without spaces" in done.err


def test_help_lists_every_target(make):
    for done in (make(), make("help")):
        assert done.status == 0
        for target in (
            "<mode>",
            "all-parity",
            "cpu-<mode>",
            "device-<mode>",
            "compare-<mode>",
            "compare-cpu-<mode>",
            "oracle",
            "report",
            "silent-bugs",
            "titan-llama",
            "titan-deepseek",
            "titan-smoke",
            "titan-parity",
            "titan-memory",
            "neuron-test",
            "titan-test",
            "test",
            "lint",
        ):
            assert f"make {target} " in done.out
        assert all(mode in done.out for mode in MODES)


def test_report_without_a_comparison(make):
    done = make("report")
    assert done.status == 2
    assert "error: results holds no comparison; run make ddp or another mode first" in done.err


def test_with_a_device_there_are_three_witnesses(make):
    done = make("-n", "ddp", "DEVICE=cuda")
    steps = re.findall(r"== ([\w-]+): ", done.out)
    order = [
        step for step in steps if step in ("oracle-eager", "cpu-ddp", "compare-cpu-ddp", "ddp", "compare-ddp")
    ]
    assert list(dict.fromkeys(order)) == ["oracle-eager", "cpu-ddp", "compare-cpu-ddp", "ddp", "compare-ddp"]
    assert "no device run was made" not in done.out
    assert done.out.count("--oracle-dir") == 1


@pytest.mark.parametrize(
    ("settings", "backend", "compile_backend"),
    [
        (["DEVICE=neuron"], "neuron", "neuron"),
        (["DEVICE=cpu"], "gloo", "aot_eager"),
        (["DEVICE=cuda"], "nccl", "aot_eager"),
        (["DEVICE=cuda", "BACKEND=gloo", "COMPILE_BACKEND=inductor"], "gloo", "inductor"),
    ],
)
def test_backends_follow_from_the_device(make, settings, backend, compile_backend):
    printed = make("-n", "device-simplefsdp-tp", *settings, "LAUNCH=torchrun").out
    device = settings[0].partition("=")[2]
    for words in (f"--device {device}", f"--backend {backend}", f"--compile-backend {compile_backend}"):
        assert words in printed
    assert "torchrun --standalone --nproc-per-node=2" in printed
    reference = make("-n", "cpu-simplefsdp-tp", *settings).out
    assert "--compile-backend aot_eager" in reference and "--device cpu --backend gloo" in reference


def test_without_torch_neuronx_the_device_is_the_cpu(make):
    assert "DEVICE=cpu BACKEND=gloo COMPILE_BACKEND=aot_eager" in make("help").out


def test_environment_of_the_runs_is_the_tutorials(make):
    (make.directory / "show.py").write_text("import os\nprint(sorted(os.environ.items()))\n")
    unset = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "TORCH_NEURONX_ENABLE_STREAMS")
    done = make("device-ddp", f"LAUNCH={sys.executable} show.py", **dict.fromkeys(unset, "1"))
    for name, value in (
        ("NEURON_LOGICAL_NC_CONFIG", "2"),
        ("TORCH_NEURONX_ENABLE_HOST_CC", "0"),
        ("OMP_NUM_THREADS", "1"),
    ):
        assert f"('{name}', '{value}')" in done.out
    for name in unset:
        assert name not in done.out


def test_old_python_is_refused_in_one_line(make):
    old = make.directory / "python3.9"
    as_if = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{as_if}' \"$2\"\n")
    old.chmod(0o755)
    done = run("make", ".venv/installed", f"BASE_PYTHON={old}", cwd=make.directory)
    assert done.status != 0
    assert f"error: {old} is Python 3.9, 3.11 or newer is needed: make BASE_PYTHON=" in done.err
    assert not (make.directory / ".venv").exists()


def test_active_environment_with_torch_is_used_as_it_is(make):
    binaries = make.directory / "active" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    help_with = partial(run, "make", "help", cwd=make.directory, PATH=f"{binaries}:{os.environ['PATH']}")
    # A symlink to this environment's Python lies outside of it, and would not find its packages.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    active = help_with(VIRTUAL_ENV=str(binaries.parent), CONDA_PREFIX="", PYTHONPATH=site)
    assert "PYTHON=python LAUNCH=" in active.out
    inactive = help_with(VIRTUAL_ENV="", CONDA_PREFIX="", PYTHONPATH=site)
    assert "PYTHON=.venv/bin/python LAUNCH=" in inactive.out
