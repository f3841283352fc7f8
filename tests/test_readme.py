"""Every command in the README runs.

torchrun and python lines run for real at two or four ranks. make lines are checked with make -n: for
real they run in test_makefile.py and in CI, which runs every mode at 64 ranks.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, copy_run, run

import compare_training
import oracle_train

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
    assert sum("mine.py" in command for command in COMMANDS) == 3
    assert all(command.split()[0] in ("make", "torchrun", "python") for command in COMMANDS)


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS + INLINE if c.startswith("make")}))
def test_make_command_is_understood(command):
    words = shlex.split(command.replace("<mode>", "fsdp"))
    done = run("make", "-n", f"PYTHON={sys.executable}", *words[1:])
    assert done.status == 0, done.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with mine.py, and in it one for each script, copied as the README says that one may."""
    folder = tmp_path_factory.mktemp("readme")
    for script, needed in (
        ("distributed_train.py", ()),
        ("reference_train.py", ("distributed_train.py",)),
        ("simplefsdp_tp_train.py", ()),
    ):
        (folder / script).mkdir()
        for name in ("training_common.py", script, *needed):
            shutil.copy(ROOT / name, folder / script)
    (script,) = re.findall(r"```python\n(# mine.py\n.*?)```", README, re.DOTALL)
    (folder / "mine.py").write_text(script)
    shutil.copy(ROOT / "training_common.py", folder)
    return folder


# In the order of the README: the last one compares what the ones before wrote.
@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("make")])
def test_command_line_works_apart_from_the_rank_count(folder, request, call, monkeypatch, command):
    ranks = "4" if "simplefsdp" in command else "2"
    for option in ("--nproc-per-node=", "--world-size "):
        command = command.replace(f"{option}64", f"{option}{ranks}")
    words = shlex.split(command)
    words = [f"{word}/{word}" if (folder / word / word).is_file() else word for word in words]
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    if words[0] == "torchrun":
        # The longest of these lines runs under launch.py, which takes the same options; its twin for
        # Neuron runs under torchrun.
        launcher = [ROOT / "launch.py"] if "aot_eager" in command else ["-m", "torch.distributed.run"]
        words[:1] = [sys.executable, *map(str, launcher)]
    else:
        words[0] = sys.executable
    if not re.search("--world-size|--expected-world-size|oracle_train", command):
        words += ["--expected-world-size", ranks]
    mains = {"compare_training.py": compare_training.main, "oracle_train.py": oracle_train.main}
    if Path(words[1]).name in mains:  # one process: this one will do, which has imported torch
        monkeypatch.chdir(folder)
        done = call(mains[Path(words[1]).name], *words[2:])
    else:
        default_device = "--device" not in command and "reference_train" not in command  # which is neuron
        environment = request.getfixturevalue("standin") if default_device else {}
        done = run(*words, cwd=folder, **environment)
        assert done.status == 0, done.err
        ranks = re.search(r"--expected-world-size (\d)", " ".join(words))[1]
        own = rf"PASS rank=\d mode=\w+ world_size={ranks}|PASS rank=\d: records"
        assert len(re.findall(own, done.out)) == int(ranks)
        written = (folder / words[words.index("--output-dir") + 1]).iterdir()
        assert sorted(path.name for path in written) == [f"rank-{rank}.pt" for rank in range(int(ranks))]
        return
    if "compare_training.py" in command:
        assert done.status == 0, done.out + done.err
        what = "comparison" if "--reference-dir" in command else "invariants"
        assert done.out.endswith(f"PASS {what} ranks=2 steps=10\n")
        assert ("stand-in for Neuron computes" in done.out) == ("mine-neuron" in command)
    else:
        assert "oracle_train.py" in command and done.status == 0, done.err
        assert done.out.startswith("step=1/10 loss=0.754203")


def test_script_for_ones_own_model_is_short():
    (script,) = re.findall(r"```python\n# mine.py\n(.*?)```", README, re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) < 40


def test_described_fields_are_those_of_the_json_file(compare, runs, tmp_path):
    reference, actual = runs("ddp").directory, copy_run(runs("ddp").directory, tmp_path / "actual")
    arguments = ["--reference-dir", reference, "--actual-dir", actual, "--json", tmp_path / "x.json"]
    assert compare(*arguments, "--world-size", 4).status == 0
    text = re.search(r"### What `--json` writes\n(.*?)\n## ", README, re.DOTALL).group(1)
    for field in json.loads((tmp_path / "x.json").read_text()):
        assert f"`{field}`" in text, field


def test_every_invariant_and_default_is_described():
    for name, text in compare_training.INVARIANTS.items():
        assert re.search(rf"^\| {name} \| {re.escape(text)}", README, re.MULTILINE), name
    assert f"rtol {compare_training.ELEMENT_EPS:g} eps" in README
    assert f"<= norm_eps * eps * norm(reference)` | {compare_training.NORM_EPS:g} |" in README


def test_common_issues_show_as_the_table_says():
    rows = re.search(r"\| common issue \|.*?\n\n", README, re.DOTALL).group().split("\n")[2:-2]
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    assert len(rows) == 4  # as many as the tutorial has
    for row in rows:
        for words in re.findall(r"`([^`]+)`", row.split("|")[2]):
            if words.startswith("rank "):  # tests/test_bad_input.py sees it whole
                words = "was started with"
            assert words.startswith("make ") or words in code, words


def test_named_files_exist():
    for name in re.findall(r"^\| `([\w.]+)` \|", README, re.MULTILINE):
        if "." in name or name == "Makefile":
            assert (ROOT / name).exists(), name
