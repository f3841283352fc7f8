"""Every command in the README runs.

torchrun and python lines run for real at two or four ranks. make lines are checked with make -n: for
real they run in test_makefile.py and in CI, which runs every mode at 64 ranks.
"""

import re
import shlex
import shutil
import sys

import pytest
from conftest import ROOT, run

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
INLINE = re.findall(r"`(make [^`]+)`", README)


def test_there_are_commands():
    assert "make ddp" in COMMANDS and "make test" in COMMANDS
    assert sum(command.startswith("torchrun") for command in COMMANDS) == 5
    assert sum("mine.py" in command for command in COMMANDS) == 2
    assert all(command.split()[0] in ("make", "torchrun", "python") for command in COMMANDS)


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS + INLINE if c.startswith("make")}))
def test_make_command_is_understood(command):
    words = shlex.split(command.replace("<mode>", "fsdp"))
    done = run("make", "-n", f"PYTHON={sys.executable}", *words[1:])
    assert done.status == 0, done.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (script,) = re.findall(r"```python\n(# mine.py\n.*?)```", README, re.DOTALL)
    (folder / "mine.py").write_text(script)
    shutil.copy(ROOT / "training_common.py", folder)
    return folder


# In the order of the README: the last one compares what the ones before wrote.
@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("make")])
def test_command_line_works_apart_from_the_rank_count(folder, command):
    ranks = "4" if "simplefsdp" in command else "2"
    for option in ("--nproc-per-node=", "--world-size "):
        command = command.replace(f"{option}64", f"{option}{ranks}")
    words = shlex.split(command)
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    else:
        words[0] = sys.executable
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    if "--world-size" not in command and "--expected-world-size" not in command:
        words += ["--expected-world-size", ranks]
    done = run(*words, cwd=folder)
    if "--device" in command or "reference_train" in command:
        assert done.status == 0, done.err
        passes = re.findall(rf"PASS rank=\d mode=\w+ world_size={ranks}", done.out)
        assert len(passes) == int(ranks) or "mine.py" in command
    elif "compare_training.py" in command:
        assert done.status == 0, done.err
        assert done.out.endswith("PASS comparison ranks=2 steps=10\n")
    else:  # the default device, which this machine lacks
        assert done.status != 0
        assert "error: --device neuron: package torch-neuronx is not installed" in done.err


def test_named_files_exist():
    for name in re.findall(r"^\| `([\w.]+)` \|", README, re.MULTILINE):
        if "." in name or name == "Makefile":
            assert (ROOT / name).exists(), name
