"""Real runs that many tests look at: each mode once, at four ranks, started by launch.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
# The Makefile exports these to its recipes, `make test` among them: tests choose their own.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


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


def cpu_options(ranks: int, output: Path, steps: int = STEPS) -> list[str]:
    """Return the options of a CPU run."""
    options = (
        f"--device cpu --backend gloo --expected-world-size {ranks} --steps {steps} --output-dir {output}"
    )
    return options.split()


def copy_run(source, target):
    """Copy a run and make the copy pass for one of its own."""
    shutil.copytree(source, target)
    edit(target, 0, lambda content: content["metadata"].update(saved_at=1.0))


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
    made = {}

    def make(mode: str) -> SimpleNamespace:
        if mode not in made:
            base = tmp_path_factory.mktemp(mode)
            directory, logs = base / "results", base / "logs"
            script, *options = SCRIPTS[mode]
            done = launch(
                RANKS,
                logs,
                ROOT / "tests" / "observe.py",
                ROOT / script,
                *options,
                *cpu_options(RANKS, directory),
                OBSERVED=str(base),
            )
            stderr = "".join(path.read_text() for path in logs.rglob("stderr.log"))
            assert done.status == 0, done.err + stderr
            imported = {name for path in base.glob("imports-*") for name in path.read_text().split()}
            stdout = [path.read_text() for path in logs.rglob("stdout.log")]
            made[mode] = SimpleNamespace(directory=directory, stdout=stdout, imported=imported)
        return made[mode]

    return make


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """A function that returns the folder of a model's oracle, made by the script when first asked for."""
    made = {}

    def make(model):
        if model not in made:
            folder = tmp_path_factory.mktemp("oracle") / model
            options = ["--model", model, "--steps", STEPS, "--output-dir", folder]
            done = run(sys.executable, "-O", ROOT / "oracle_train.py", *options)
            assert done.status == 0, done.err
            assert done.out.startswith("step=1/3 loss=0.75")
            made[model] = folder
        return made[model]

    return make
