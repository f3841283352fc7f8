"""Real runs that many tests look at: each mode once, at four ranks, started by launch.py."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from filelock import FileLock  # torch depends on it

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
RANKS = 4
STEPS = 3
SCRIPTS = {
    "ddp": ["distributed_train.py", "--parallelism", "ddp"],
    "fsdp": ["distributed_train.py", "--parallelism", "fsdp"],
    "tp": ["distributed_train.py", "--parallelism", "tp"],
    "simplefsdp_tp": ["simplefsdp_tp_train.py", "--compile-backend", "aot_eager"],
}
# make exports these to its recipes, `make test` among them: tests choose their own.
OF_MAKE = re.compile("MAKE|MFLAGS|PYTHON$")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not OF_MAKE.match(key)}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


# Files whose tests start many processes come first, so that the last ones to end are short.
LONG = (
    "test_neuron.py",
    "test_readme.py",
    "test_bad_input.py",
    "test_training.py",
    "test_makefile.py",
    "test_recordings.py",
    "test_field_cases.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def run(*command, cwd=ROOT, timeout=180, **environment) -> SimpleNamespace:
    """Run a command to its end; return its status, stdout and stderr."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


def launch(ranks: int, logs: Path, *script, **options) -> SimpleNamespace:
    """Run a script under launch.py, its output in one log per rank and stream."""
    command = [sys.executable, ROOT / "launch.py", "--standalone", f"--nproc-per-node={ranks}"]
    return run(*command, "--log-dir", logs, "--redirects", "3", *script, **options)


def run_alone(*script, **options) -> SimpleNamespace:
    """Run a script as the only rank, without a launcher: torch is imported once."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return run(sys.executable, *script, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", **ranks, **options)


def fork(folder: Path, jobs: dict[str, tuple], timeout: float = 120) -> dict[str, list]:
    """Run commands under tests/tools/fork_ranks.py; by their names: ranks and command in, statuses out."""
    listed = [
        {"name": name, "ranks": ranks, "command": [str(part) for part in command]}
        for name, (ranks, *command) in jobs.items()
    ]
    script = [sys.executable, ROOT / "tests" / "tools" / "fork_ranks.py", "--timeout", timeout, folder]
    subprocess.run(
        [str(part) for part in script],
        input=json.dumps(listed),
        text=True,
        env=ENVIRONMENT,
        check=True,
        timeout=900,
    )
    return json.loads((folder / "statuses.json").read_text())


class Printed(io.TextIOWrapper):
    """A stream that keeps what a script prints that is called here, with all that sys.stdout has."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def getvalue(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def run_here(main, *arguments) -> SimpleNamespace:
    """Call a script's main in this process with a command line: exit status, stdout and stderr."""
    out, err = Printed(), Printed()
    words = ["script.py", *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
    return SimpleNamespace(status=status or 0, out=out.getvalue(), err=err.getvalue())


def read_logs(folder: Path, stream: str = "stderr") -> str:
    """Return what all ranks wrote to a stream of theirs."""
    return "".join(path.read_text() for path in folder.rglob(f"{stream}.log"))


def refusal(done: SimpleNamespace) -> str:
    """Return the line in which a command says why it refuses its input: status 2, nothing else on stderr."""
    assert done.status == 2, done.out + done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    return done.err


def cpu_options(ranks: int, output: Path, steps: int = STEPS) -> list[str]:
    """Return the options of a CPU run."""
    options = (
        f"--device cpu --backend gloo --expected-world-size {ranks} --steps {steps} --output-dir {output}"
    )
    return options.split()


def copy_run(source: Path, target: Path) -> Path:
    """Copy a run and make the copy pass for one of its own; return its directory."""
    shutil.copytree(source, target)
    edit(target, 0, lambda content: content["metadata"].update(saved_at=1.0))
    return target


def copy_scripts(target: Path) -> None:
    """Copy what make needs to run the scripts from another folder."""
    for path in (ROOT / "Makefile", ROOT / "requirements.txt", *ROOT.glob("*.py"), *ROOT.glob("*.html")):
        shutil.copy(path, target)


def edit(directory, rank, change):
    """Load a rank file, let change(content) alter it, write it back."""
    path = directory / f"rank-{rank}.pt"
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def edit_all(directory, change):
    """Change all rank files alike."""
    for rank in range(RANKS):
        edit(directory, rank, change)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A function that makes a mode's run when it is first asked for: .directory, .stdout, .imported."""
    # Where several pytest processes share the tests, the first to ask makes a run for all of them.
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    base = Path(os.environ.get("RUNS", base))  # make mutants keeps them from one pytest to the next

    def make(mode: str) -> SimpleNamespace:
        folder = base / f"runs-{mode}"
        directory, logs = folder / "results", folder / "logs"
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                folder.mkdir(exist_ok=True)
                script, *options = SCRIPTS[mode]
                options += cpu_options(RANKS, directory)
                script = ROOT / "tests" / "tools" / "observe.py", ROOT / script
                done = launch(RANKS, logs, *script, *options, OBSERVED=str(folder))
                assert done.status == 0, done.err + read_logs(logs)
                (folder / "done").touch()
        imported = {name for path in folder.glob("imports-*") for name in path.read_text().split()}
        stdout = [path.read_text() for path in logs.rglob("stdout.log")]
        return SimpleNamespace(directory=directory, stdout=stdout, imported=imported)

    return make


@pytest.fixture(scope="session")
def standin() -> dict[str, str]:
    """The environment in which torch_neuronx is the stand-in, compiled if need be."""
    from standin.build import build

    try:
        return {"PYTHONPATH": str(build())}
    except RuntimeError as error:
        if os.environ.get("REQUIRE_STANDIN"):  # in CI
            raise
        pytest.skip(f"the stand-in for torch_neuronx does not build: {error}")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """A function that returns the folder of a model's oracle, made when first asked for."""
    made = {}

    def make(model: str) -> Path:
        if model not in made:
            import oracle_train

            made[model] = tmp_path_factory.mktemp("oracle") / model
            arguments = ["--model", model, "--steps", STEPS, "--output-dir", made[model]]
            done = run_here(oracle_train.main, *arguments)
            assert done.status == 0, done.err
        return made[model]

    return make


@pytest.fixture
def call():
    """Call a script's main in this process with a command line: exit status, stdout and stderr."""
    return run_here


@pytest.fixture
def compare(call):
    """Call compare_training.py in this process."""
    import compare_training

    return partial(call, compare_training.main)


@pytest.fixture
def compare_made(compare, tmp_path):
    """Alter some ranks of a made-up run and judge it: exit status, stdout, stderr.

    against: None for the run alone, "run" for one of as many ranks, "whole" for one of one rank.
    of: which of the two is altered.
    """
    from made_runs import make_run

    def call(change, *ranks, against="run", of="actual", options=(), **made) -> SimpleNamespace:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        directory = {"actual": make_run(folder / "actual", **made)}
        arguments = ["--actual-dir", directory["actual"], "--world-size", 4]
        if against:
            whole = {"dp": 1, "tp": 1} if against == "whole" else {}
            directory["reference"] = make_run(folder / "reference", **{**made, **whole})
            arguments += ["--reference-dir", directory["reference"]]
        for rank in ranks:
            edit(directory[of], rank, change)
        return compare(*arguments, *options)

    return call


@pytest.fixture
def made_cause(compare_made):
    """Do the same and return the likely cause that is printed."""

    def call(change, ranks=(0, 1, 2, 3), against="run", **more) -> str:
        done = compare_made(change, *ranks, against=against, **more)
        assert (done.status, done.err) == (1, ""), done.err + done.out
        return next(line for line in done.out.splitlines() if line.startswith("Likely cause: "))[14:]

    return call


@pytest.fixture
def check_log(call, tmp_path):
    """Check a TorchTitan log of these lines: .status, .failed (the points), .out, .err."""
    from made_titan_logs import OK

    sys.path.insert(0, str(ROOT / "titan"))
    import check_run

    def check_lines(lines, *options) -> SimpleNamespace:
        path = tmp_path / "run.log"
        path.write_bytes(lines if isinstance(lines, bytes) else ("\n".join(lines) + "\n").encode())
        result = call(check_run.main, path, *options)
        failed = {line[5:27].strip() for line in result.out.splitlines() if line.startswith("FAIL ")}
        result.failed = failed & (OK | {"NeuronCores in use"})
        return result

    return check_lines
