"""The Makefile: the chain of a mode, what is run again and what is not, and what it sets."""

import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, copy_scripts, run

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
    for script in ("distributed_train.py", "training_common.py", "launch.py"):
        (make.directory / script).touch()
        assert launches("STEPS=1"), script
        last.touch()
        assert not launches("STEPS=1")
    assert completed(make("cpu-fsdp", "LAUNCH=echo")) == ["cpu-fsdp"]  # with other settings
    assert not launches("STEPS=1")
    last.unlink()  # a run that was cut off has no rank-0.pt, whatever else it wrote
    assert launches("STEPS=1")


def replace_oracle(folder):
    """Put an oracle that computes nothing in the place of the real one."""
    (folder / "oracle_train.py").write_text(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1])\n"
        "folder.mkdir(exist_ok=True)\n"
        "(folder / 'rank-0.pt').touch()\n"
    )


def test_oracle_is_made_again_when_its_settings_or_its_script_change(make):
    replace_oracle(make.directory)

    def computes(*settings):
        done = make("oracle", *settings)
        assert done.status == 0, done.err
        return re.findall(r"^== (\S+): \d steps in float64", done.out, re.MULTILINE)

    both = ["oracle-eager", "oracle-simplefsdp"]
    assert computes() == both
    assert computes("RANKS=4") == []
    assert computes("STEPS=1") == both
    assert computes("STEPS=1") == []
    (make.directory / "oracle_train.py").touch()
    assert computes("STEPS=1") == both


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    return path


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("arguments", [(), ("RESULTS=results-2",), ("RESULTS=results/second",)])
def test_clean_removes_what_make_made(make, arguments):
    before = files(make.directory)
    other = write(make.directory / "another" / "thesis.txt")
    assert make("cpu-ddp", "LAUNCH=echo", *arguments).status == 0
    results = make.directory / (arguments or ("RESULTS=results",))[0].partition("=")[2]
    assert (results / "made-by-make.txt").exists()
    for path in (
        "ddp/rank-0.pt",
        "logs/ddp/1/0.log",
        "titan/x.log",
        "titan-parity/x/y",
        "titan-memory/z.json",
    ):
        write(results / path)
    for path in (".titan/tokenizer/x", ".standin/x", ".pytest_cache/x", "tests/silent_bugs/__pycache__/x"):
        write(make.directory / path)
    done = make("clean", *arguments)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert files(make.directory) == before | {"another/thesis.txt"}
    assert not results.exists() and other.exists()
    assert make("clean", *arguments).status == 0  # nothing is there


@pytest.mark.parametrize("folder", ["results", "mine"])
@pytest.mark.parametrize("used", [False, True])
def test_clean_refuses_a_folder_with_files_from_before(make, folder, used):
    write(make.directory / folder / "thesis.txt")
    write(make.directory / ".titan" / "x")
    if used:
        assert make("cpu-ddp", "LAUNCH=echo", f"RESULTS={folder}").status == 0
    before = files(make.directory)
    done = make("clean", f"RESULTS={folder}")
    assert done.status == 2 and done.out == ""
    assert done.err.startswith(
        f"error: {folder} was not made by make, so nothing was removed: remove or rename"
    )
    assert len([line for line in done.err.splitlines() if not line.startswith("make: ***")]) == 1
    assert files(make.directory) == before


def test_empty_folder_becomes_makes_own_also_behind_a_link(make):
    (make.directory / "disk").mkdir()
    (make.directory / "results").symlink_to("disk")
    assert make("cpu-ddp", "LAUNCH=echo").status == 0
    write(make.directory / "elsewhere" / "thesis.txt")
    (make.directory / "results" / "link").symlink_to(make.directory / "elsewhere")
    assert make("clean").status == 0
    assert list((make.directory / "disk").iterdir()) == []
    assert (make.directory / "elsewhere" / "thesis.txt").exists()


def test_parallel_make_runs_one_after_the_other(make):
    done = make("-j2", "cpu-fsdp", "cpu-tp", "LAUNCH=sleep 1; echo")
    assert completed(done) == ["cpu-fsdp", "cpu-tp"]
    lines = [line for line in done.out.splitlines() if line.startswith("==")]
    assert [line.split()[1] for line in lines] == ["cpu-fsdp:"] * 3 + ["cpu-tp:"] * 3


def test_failed_run_ends_the_chain_before_the_comparison(make):
    replace_oracle(make.directory)
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
            "titan-parity-full",
            "titan-memory",
            "neuron-test",
            "titan-test",
            "test",
            "lint",
        ):
            assert f"make {target} " in done.out
        assert all(mode in done.out for mode in MODES)
        assert not re.search(r"\d+ (real )?mistakes", done.out)  # grows with the bank


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


@pytest.mark.parametrize(
    ("version", "default", "name"),
    [
        (None, "cpu", "neuron"),
        ("2.14.3.0", "neuron", "neuron"),
        ("2.13.9", "cpu", "neuron"),
        ("2.14.0+standin", "cpu", "the stand-in for Neuron"),
    ],
)
def test_device_and_its_name_follow_from_torch_neuronx(make, version, default, name):
    packages = make.directory / "packages"
    if version:
        metadata = write(packages / f"torch_neuronx-{version}.dist-info" / "METADATA")
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    device = partial(make, PYTHONPATH=str(packages))
    assert f" DEVICE={default} " in device("help").out
    assert f" DEVICE={default} " in device("help", DEVICE="").out
    assert " DEVICE=cuda " in device("help", DEVICE="cuda").out
    printed = device("-n", "ddp", "all-parity", "DEVICE=neuron").out
    assert f"== ddp: 2 ranks, 2 steps on {name} with neuron" in printed
    assert f"and with the CPU on {name}, 2 ranks" in printed
    assert "== cpu-ddp: 2 ranks, 2 steps on cpu with gloo" in printed


def test_unknown_device(make):
    done = make("ddp", "DEVICE=tpu")
    assert done.status == 2
    assert "DEVICE is 'tpu': cpu, neuron or cuda" in done.err


UNSET = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "TORCH_NEURONX_ENABLE_STREAMS")
SET = {"NEURON_LOGICAL_NC_CONFIG": "2", "TORCH_NEURONX_ENABLE_HOST_CC": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("given", [{}, dict.fromkeys(SET, "7")], ids=["by default", "on the command line"])
def test_environment_of_the_runs_is_the_tutorials(make, given):
    (make.directory / "show.py").write_text("import os\nprint(sorted(os.environ.items()))\n")
    inherited = dict.fromkeys((*UNSET, *SET), "5")
    arguments = [f"{name}={value}" for name, value in given.items()]
    for target in ("device-ddp", "cpu-ddp"):
        done = make(target, f"LAUNCH={sys.executable} show.py", *arguments, **inherited)
        for name, value in (SET | given).items():
            assert f"('{name}', '{value}')" in done.out
        for name in UNSET:
            assert f"'{name}'" not in done.out


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


@pytest.fixture
def base_python(make):
    """A Python whose environments log what pip is to install, and fail at the file that FAILS names."""
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, make.directory)
    python = make.directory / "base-python"
    python.write_text(
        """#!/bin/sh
case "$1" in
-c) exit 0 ;;
-m) mkdir -p "$3/bin"; echo "made $3" >> log; ln -sf "$PWD/base-pip" "$3/bin/python" ;;
esac
"""
    )
    pip = make.directory / "base-pip"
    pip.write_text(
        """#!/bin/sh
[ "$1 $2 $3" = "-m pip install" ] || exit 1
for file in "$@"; do :; done
echo "$file" >> log
[ "$file" != "$FAILS" ]
"""
    )
    for path in (python, pip):
        path.chmod(0o755)

    def call(*targets, **environment):
        (make.directory / "log").write_text("")
        variables = ["PYTHON=python3", f"BASE_PYTHON={python}"]
        done = run("make", "--no-print-directory", *variables, *targets, cwd=make.directory, **environment)
        return done, (make.directory / "log").read_text().splitlines()

    return call


def test_environment_is_made_once_with_what_is_asked_for(make, base_python):
    done, log = base_python(".venv/installed-dev")
    assert done.status == 0, done.err
    assert log == ["made .venv", "requirements.txt", "requirements-dev.txt"]
    assert done.out.startswith("== installing torch into .venv, once: some minutes, some GB\n")
    assert "== installing requirements-dev.txt into .venv, once\n" in done.out
    everything = [f".venv/installed{name}" for name in ("", "-dev", "-report", "-titan")]
    assert base_python(*everything)[1] == ["requirements-report.txt", "requirements-titan.txt"]
    assert base_python(*everything)[1] == []
    (make.directory / "requirements-report.txt").touch()  # a part of requirements-dev.txt
    assert base_python(*everything)[1] == ["requirements-dev.txt", "requirements-report.txt"]
    assert base_python("VENV=second", "second/installed")[1] == ["made second", "requirements.txt"]


@pytest.mark.parametrize("fails", ["requirements.txt", "requirements-dev.txt"])
def test_failed_installation_is_tried_again(make, base_python, fails):
    done, log = base_python(".venv/installed-dev", FAILS=fails)
    assert done.status == 2 and log[-1] == fails
    assert not (
        make.directory / fails.replace("requirements", ".venv/installed").removesuffix(".txt")
    ).exists()
    done, log = base_python(".venv/installed-dev")
    assert done.status == 0 and fails in log
    assert (make.directory / ".venv/installed-dev").exists()


@pytest.fixture
def newest_python(tmp_path):
    """.ci/newest-python where python3.14 to 3.12 on PATH start nothing, and pyenv has the versions given.

    `make` is replaced: it makes a Python that prints its version.
    """
    tools = tmp_path / "tools"

    def script(path, text):
        write(path).write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    write(tmp_path / ".ci" / "newest-python")
    shutil.copy(ROOT / ".ci" / "newest-python", tmp_path / ".ci")
    for name in ("python3.14", "python3.13", "python3.12"):
        script(tools / name, "echo 'pyenv: command not found'; exit 127")
    script(tools / "pyenv", f"echo {tmp_path / 'pyenv'}")
    script(tools / "made", "echo Python 3.x")
    copy = f'mkdir -p "${{1%/*}}/bin"; cp {tools / "made"} "${{1%/*}}/bin/python"'
    script(tools / "make", f'echo "$@" > made; {copy}; exit $STATUS')

    def call(used, *versions, status=0):
        own = f'[ "$1" = --version ] && echo Python 3.{used}.0 || echo {used}'
        script(tmp_path / ".venv" / "bin" / "python", own)
        for version in versions:
            python = tmp_path / "pyenv" / "versions" / version / "bin" / "python"
            script(python, f'case "$2" in *"(3, {version.split(".")[1]})"*) exit 0 ;; esac; exit 1')
        done = run(tmp_path / ".ci" / "newest-python", PATH=f"{tools}:/usr/bin:/bin", STATUS=str(status))
        done.made = (tmp_path / "made").read_text() if (tmp_path / "made").exists() else None
        return done

    return call


def test_newest_python_in_an_environment_of_its_own(newest_python, tmp_path):
    done = newest_python(11, "3.12.9", "3.13.2", "3.11.7")
    assert (done.status, done.out) == (0, ".venv-3.13/bin/python\n"), done.err
    python = tmp_path / "pyenv" / "versions" / "3.13.2" / "bin" / "python"
    assert done.made == f".venv-3.13/installed-dev VENV=.venv-3.13 BASE_PYTHON={python}\n"
    assert done.err == "== newest Python: Python 3.x, .venv has 3.11\n"


@pytest.mark.parametrize(("used", "versions"), [(11, ["3.11.7", "3.8.18"]), (13, ["3.12.1", "3.13.0"])])
def test_no_newer_python(newest_python, used, versions):
    done = newest_python(used, *versions)
    assert (done.status, done.out) == (0, ".venv/bin/python\n")
    assert done.err == f"== newest Python: Python 3.{used}.0, .venv has 3.{used}\n"
    assert done.made is None


def test_newest_python_that_cannot_be_installed(newest_python):
    done = newest_python(11, "3.13.2", status=1)
    assert done.status == 1 and done.out == ""


WAITS = """#!/bin/sh
echo $$ > launched
exec sleep 100
"""


def test_a_results_folder_has_one_run_at_a_time_and_kill_ends_it(make):
    # A launcher that waits in place of ours, which has tests of its own.
    (make.directory / "waits").write_text(WAITS)
    (make.directory / "waits").chmod(0o755)
    command = ["make", "cpu-ddp", "RANKS=2", f"PYTHON={sys.executable}", "LAUNCH=./waits"]
    with subprocess.Popen(command, cwd=make.directory, stderr=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 60
        while not (make.directory / "launched").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        done = make("cpu-fsdp")
        assert done.status == 2
        in_use = f"error: results is in use: process {first.pid}, make cpu-ddp, started "
        assert re.search(
            rf"^{in_use}[-\d]+ [:\d]+; wait for it, or give another RESULTS$", done.err, re.MULTILINE
        )
        first.terminate()
        assert first.wait(timeout=30) != 0
    launched = int((make.directory / "launched").read_text())
    while Path(f"/proc/{launched}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{launched}").exists()
    assert make("cpu-ddp", "LAUNCH=echo").status == 0  # nobody has the folder
