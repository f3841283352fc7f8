"""Every command in README and RECORDING.md runs, and what they and NUMERICS.md say is what the code does.

torchrun and python lines run for real at two or four ranks. make lines are checked with make -n: for
real they run in test_makefile.py and in CI, which runs every mode at 64 ranks.
"""

import doctest
import json
import re
import shlex
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import ROOT, copy_run, copy_scripts, edit_all, fork, run, run_alone, run_here

import compare_training
import oracle_train
import training_sketches
from training_invariants import INVARIANTS
from training_recordings import read_rank_file
from training_tolerance import ELEMENT_EPS, NEGLIGIBLE, NORM_EPS, bound_of

README = (ROOT / "README.md").read_text()
NUMERICS = (ROOT / "NUMERICS.md").read_text()
RECORDING = (ROOT / "RECORDING.md").read_text()
LIBRARIES = [path.name for path in ROOT.glob("training_*.py")]
OF_RECORDINGS = ("path", "worst_element")  # fields of the JSON file that only recordings add


def blocks(kind: str, text: str = README) -> list[str]:
    """Return the code blocks of a kind."""
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands_of(block: str) -> list[str]:
    """Return the command lines of a block of bash, those of a loop once for each of its values."""
    for loop, name, values, body in re.findall(r"(for (\w+) in (.*?); do\n(.*?)done\n)", block, re.DOTALL):
        block = block.replace(loop, "".join(body.replace(f"${name}", value) for value in values.split()))
    return [line.strip() for line in block.splitlines() if line.strip()]


# A training script as a reader has one, with nothing of this kit in it.
TRAIN = """
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 20))
if ranks > 1:
    dist.init_process_group("gloo")
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(10):
    batch = torch.randn(64, 20, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    loss = (model(batch) - batch.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
COMMANDS = [
    command
    for text in (README, RECORDING)
    for block in blocks("bash", text)
    for command in commands_of(block)
]
RUNNING = [command for command in COMMANDS if command.startswith(("torchrun", "python"))]
ENVIRONMENT = next(block for block in blocks("bash") if "export" in block)
INLINE = re.findall(r"`(make [^`]+)`", README)


# ---------------------------------------------------------------- commands


def test_there_are_commands():
    assert "make ddp" in COMMANDS and "make test" in COMMANDS
    assert sum(command.startswith("torchrun") for command in COMMANDS) == 9
    assert sum("mine.py" in command for command in COMMANDS) == 3
    others = set(COMMANDS) - set(RUNNING) - set(commands_of(ENVIRONMENT))
    assert all(command.split()[0] == "make" for command in others)


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS + INLINE if c.startswith("make")}))
def test_make_command_is_understood(command):
    words = shlex.split(command.replace("<mode>", "fsdp"))
    done = run("make", "-n", f"PYTHON={sys.executable}", *words[1:])
    assert done.status == 0, done.err


def test_each_step_is_a_device_run_and_its_comparison():
    at = {}
    for place, command in enumerate(RUNNING):
        if command.startswith("torchrun"):
            output = command.split()[-1].strip('"')
            assert ("--device cpu" in command) == output.startswith("results/cpu-"), command
            at[output] = place
    for mode in ("ddp", "fsdp", "tp", "simplefsdp-tp"):
        comparison = RUNNING[at[f"results/{mode}"] + 1]
        directories = f"--reference-dir results/cpu-{mode} --actual-dir results/{mode} "
        assert directories in comparison
        assert at[f"results/cpu-{mode}"] < at[f"results/{mode}"]


def test_environment_without_make_is_that_of_make(tmp_path):
    (tmp_path / "neuron-ls").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "neuron-ls").chmod(0o755)
    makefile = (ROOT / "Makefile").read_text()
    unset = re.search(r"^unexport (.*)$", makefile, re.MULTILINE)[1].split()
    path = f"{tmp_path}:/usr/bin:/bin"
    shown = run("bash", "-c", ENVIRONMENT, PATH=path, **dict.fromkeys(unset, "1")).out.splitlines()
    exported = re.findall(r"^export (\w+) [:?]= (\w+)$", makefile, re.MULTILINE)
    assert len(exported) == 3 and len(unset) == 3
    for name, value in exported:
        assert f"{name}={value}" in shown
    assert not [line for line in shown if line.startswith(tuple(unset))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with mine.py, and in it one for each training script: it and training_common.py alone."""
    folder = tmp_path_factory.mktemp("readme")
    for script in ("distributed_train.py", "simplefsdp_tp_train.py"):
        (folder / script).mkdir()
        for name in ("training_common.py", script):
            shutil.copy(ROOT / name, folder / script)
    (folder / "train.py").write_text(TRAIN)
    (script,) = re.findall(r"(# mine.py\n.*)", blocks("python", RECORDING)[0], re.DOTALL)
    (folder / "mine.py").write_text(script)
    shutil.copy(ROOT / "training_common.py", folder)
    return folder


def translate(folder: Path, command: str) -> list[str]:
    """Return a command line of the README with fewer ranks and the paths of the scripts."""
    ranks = "4" if "simplefsdp" in command else "2"
    for option in ("--nproc-per-node=", "--world-size "):
        command = command.replace(f"{option}64", f"{option}{ranks}")
    words = shlex.split(command)
    words = [f"{word}/{word}" if (folder / word / word).is_file() else word for word in words]
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    if words[0] == "torchrun":
        # launch.py takes the same options and is faster. Two of these lines run under torchrun itself.
        launcher = ["-m", "torch.distributed.run"] if "ddp" in words else [ROOT / "launch.py"]
        words[:1] = [sys.executable, *map(str, launcher)]
    else:
        words[0] = sys.executable
    if not re.search("--world-size|--expected-world-size|oracle_train|results/one", command):
        if "record_training.py" in command:
            return words
        words += ["--expected-world-size", ranks]
    return words


# In the order of the README: a comparison needs what the lines before it wrote.
@pytest.mark.parametrize("command", RUNNING)
def test_command_line_works_apart_from_the_rank_count(folder, request, call, monkeypatch, command):
    words = translate(folder, command)
    written = re.search(r"--(?:output|actual)-dir (\S+)", command)[1].strip('"')
    of_device = "/cpu-" not in written and not re.search(r"oracle|mine-\d|results/(one|four)", written)
    environment = request.getfixturevalue("standin") if of_device else {}
    mains = {"compare_training.py": compare_training.main, "oracle_train.py": oracle_train.main}
    if Path(words[1]).name in mains:  # one process: this one will do, which has imported torch
        monkeypatch.chdir(folder)
        done = call(mains[Path(words[1]).name], *words[2:])
        assert done.status == 0, done.out + done.err
    if "compare_training.py" in command:
        what = "comparison" if "--reference-dir" in command else "invariants"
        steps = 3 if "results/one" in command else 10
        ranks = 4 if "results/one" in command else words[words.index("--world-size") + 1]
        assert done.out.endswith(f"PASS {what} ranks={ranks} steps={steps}\n")
        assert ("stand-in for Neuron computes" in done.out) == of_device
    elif "oracle_train.py" in command:
        assert done.out.startswith("step=1/10 loss=0.754203")
    elif "record_training.py" in command:
        done = run(*words, cwd=folder)
        assert done.status == 0, done.err
        assert done.out.count(f"recorded 3 steps in {folder / written}; ") == 1
        assert len(list((folder / written).iterdir())) == (4 if "four" in command else 1)
    else:
        done = run(*words, cwd=folder, **environment)
        assert done.status == 0, done.err
        ranks = int(words[words.index("--expected-world-size") + 1])
        own = (
            r"step=10/10 training=completed"
            if "mine" in command
            else rf"PASS rank=\d mode=\w+ world_size={ranks}"
        )
        assert len(re.findall(own, done.out)) == ranks
        files = sorted(path.name for path in (folder / written).iterdir())
        assert files == [f"rank-{rank}.pt" for rank in range(ranks)]


# ---------------------------------------------------------------- what may be copied


def copy_alone(script: str, *needed: str, to: Path) -> Path:
    """Copy a script and what it needs into a new folder; return the script there."""
    to.mkdir()
    for name in (script, *needed):
        shutil.copy(ROOT / name, to)
    return to / script


def test_script_and_libraries_are_enough(tmp_path, runs, faulty):
    script = copy_alone("compare_training.py", *LIBRARIES, to=tmp_path / "compare")
    arguments = ["--world-size", 4, "--reference-dir", runs("ddp").directory, "--actual-dir"]
    done = run(sys.executable, script, *arguments, faulty, "--json", tmp_path / "x.json", cwd=tmp_path)
    assert done.status == 1 and not done.err
    assert "summed over the 4 data-parallel replicas instead of averaged, or not divided by 4" in done.out

    script = copy_alone("report_training.py", "report_training.html", *LIBRARIES, to=tmp_path / "report")
    done = run(sys.executable, script, tmp_path / "x.json", "--output", tmp_path / "x.html", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "summed over the 4 data-parallel replicas" in (tmp_path / "x.html").read_text()

    script = copy_alone("record_training.py", *LIBRARIES, to=tmp_path / "record")
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(sys.executable, script, "--output-dir", tmp_path / "recorded", "train.py", cwd=tmp_path)
    assert done.status == 0 and (tmp_path / "recorded/rank-0.pt").exists(), done.err

    script = copy_alone("oracle_train.py", *LIBRARIES, to=tmp_path / "oracle")
    options = ["--model", "simplefsdp", "--steps", 1, "--output-dir", tmp_path / "x"]
    done = run(sys.executable, script, *options, cwd=tmp_path)
    assert done.status == 0, done.err


def test_reference_train_needs_distributed_train(tmp_path):
    script = copy_alone("reference_train.py", "distributed_train.py", "training_common.py", to=tmp_path / "x")
    options = ["--parallelism", "tp", "--expected-world-size", 1, "--steps", 1, "--output-dir", "results"]
    done = run_alone(script, *options, cwd=tmp_path)
    assert done.status == 0, done.err
    assert (tmp_path / "results" / "rank-0.pt").exists()


def test_script_for_ones_own_model_is_short():
    (script,) = blocks("python", RECORDING)
    assert len([line for line in script.splitlines()[1:] if line.strip()]) < 36


# ---------------------------------------------------------------- what is printed


@pytest.fixture(scope="module")
def faulty(runs, tmp_path_factory):
    """A copy of the DDP run with gradients four times theirs, and another device in the metadata."""

    def change(content):
        content["metadata"]["device"] = "cuda"
        for record in content["records"]:
            record["gradients"] = {name: 4 * value for name, value in record["gradients"].items()}

    directory = copy_run(runs("ddp").directory, tmp_path_factory.mktemp("faulty") / "run")
    edit_all(directory, change)
    return directory


def without_numbers(text: str) -> str:
    """Return a text with # for each number, and single spaces."""
    return re.sub(r" +", " ", re.sub(r"[-+]?\d[\d.]*(e[-+]\d+)?", "#", text))


def test_shown_output_is_what_is_printed(runs, oracle, faulty, compare, tmp_path):
    _, passed, failed = (block.splitlines() for block in blocks("text")[:3])
    copy_scripts(tmp_path)
    made = run("make", "-n", "ddp", "DEVICE=cpu", f"PYTHON={sys.executable}", cwd=tmp_path).out
    against_oracle = ["--reference-dir", oracle("eager"), "--world-size", 4, "--actual-dir"]
    done = compare(*against_oracle, runs("ddp").directory)
    printed = without_numbers(done.out + "".join(runs("ddp").stdout)).splitlines()
    for line in passed:
        if line.startswith("== "):
            assert line.partition(" in 25 s")[0] in made, line
        elif line.strip() != "...":
            assert without_numbers(line.removeprefix("   PASS")).strip() in "\n".join(printed), line
    done = compare(*against_oracle, faulty)
    for line in failed:
        assert without_numbers(line.removesuffix("...")) in without_numbers(done.out), line


@pytest.fixture(scope="module")
def recorded(folder):
    """A recording of train.py on one rank, and of it with the mistake that the README shows, on four."""
    (folder / "faulty.py").write_text(TRAIN.replace("    loss.backward()", "    (4 * loss).backward()"))
    recorder = [ROOT / "record_training.py", "--full", "2.bias", "--output-dir"]
    jobs = {
        "right": (0, *recorder, folder / "right", folder / "train.py"),
        "faulty": (4, *recorder, folder / "faulty", folder / "faulty.py"),
    }
    statuses = fork(folder, jobs)
    assert not any(map(any, statuses.values())), statuses
    runs = ["--reference-dir", folder / "right", "--actual-dir", folder / "faulty"]
    return folder, run_here(compare_training.main, *runs, "--json", folder / "recorded.json")


def test_output_shown_of_a_recording_is_what_is_printed(recorded):
    _, done = recorded
    assert done.status == 1
    for line in blocks("text")[0].splitlines():
        if line.startswith("For its elements"):  # these runs were recorded with --full
            assert line.split(":")[0] in RECORDING
        else:
            assert without_numbers(line) in without_numbers(done.out), line
    assert "gradients of every rank are 4.00x the reference: summed over the 4 data-parallel" in done.out


def test_a_parameter_is_recorded_whole(recorded):
    content = read_rank_file(recorded[0] / "faulty/rank-1.pt")
    step = content["steps"][0]
    for kind in ("gradients", "before", "parameters"):
        assert step[kind]["2.bias"]["full"].shape == (5,)  # of 20, on four ranks
        assert "full" not in step[kind]["2.weight"]
    hint, element = blocks("text", RECORDING)[1:3]
    assert without_numbers(element.strip()) in without_numbers(recorded[1].out)
    assert without_numbers(hint.splitlines()[0]) in without_numbers(recorded[1].out)


# ---------------------------------------------------------------- what is said


def test_common_issues_show_as_the_list_says():
    rows = re.search(r"common issues.*?\n\n(.*?)\n\n", README, re.DOTALL)[1].splitlines()
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    assert len(rows) == 4  # as many as the tutorial has
    for row in rows:
        shown = re.findall(r"`([^`]+)`", row)
        assert shown, row
        for words in shown:
            if words.startswith("rank "):  # tests/test_bad_input.py sees it whole
                words = "was started with"
            assert words.startswith("make ") or words in code, words


def test_files_are_listed():
    (block,) = [block for block in blocks("text") if block.startswith("Makefile")]
    listed = [line.split()[0] for line in block.splitlines()]
    for name in listed:
        assert list(ROOT.glob(name.rstrip("/"))), name
    for path in ROOT.glob("*.py"):
        assert any(fnmatch(path.name, name) for name in listed), path.name


def test_options_are_the_makefiles():
    (block,) = [block for block in blocks("text") if block.startswith("RANKS")]
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"\b[A-Z_]{4,}\b", block):
        assert re.search(rf"^{name} [:?]?= ", makefile, re.MULTILINE), name


def test_links_lead_somewhere():
    for text in (README, NUMERICS, RECORDING):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            assert not name or (ROOT / name).exists(), target
            if anchor:
                there = (ROOT / name).read_text() if name else text
                headings = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
                assert anchor in [
                    re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
                ]
    for label in re.findall(r"\]\[([^]]+)\]", README):
        assert f"\n[{label}]: https://" in README


# ---------------------------------------------------------------- RECORDING.md


def test_recording_is_described():
    source = (ROOT / "record_training.py").read_text()
    options = re.findall(r"option\(\s*\"(--[a-z-]+)\"", source)
    assert len(options) == 6
    for option in options:
        assert f"| `{option}" in RECORDING, option
    assert (
        f"{training_sketches.WIDTH} numbers" in RECORDING and f"i // {training_sketches.WIDTH}" in RECORDING
    )
    assert f"rows of {training_sketches.LINE:,}" in RECORDING
    assert "<= 16 eps * norm(reference)" in RECORDING and NORM_EPS == 16
    assert NEGLIGIBLE == 16 * 2**-23 and "below 2e-6 (16 x 2^-23) of" in RECORDING
    code = training_sketches.__doc__
    assert "bucket = (i + shift(i // WIDTH) + j + shift'(j // WIDTH)) mod WIDTH" in code
    said = " ".join(RECORDING.split())
    rates = re.search(
        r"within (\d+) % for one of full rank and (\d+) % for one of rank one", " ".join(code.split())
    )
    words = "within {} % for a difference of full rank and {} % for one of rank one"
    assert words.format(*rates.groups()) in said
    assert "within 12 and 22 %" in said and "within 12 and 22 %" in " ".join(code.split())


# ---------------------------------------------------------------- NUMERICS.md


def test_worked_examples_are_right():
    result = doctest.testfile(str(ROOT / "NUMERICS.md"), module_relative=False)
    assert result.attempted > 20 and result.failed == 0


def test_every_invariant_and_default_is_described():
    for name, text in INVARIANTS.items():
        assert re.search(rf"^\| {name} \| {re.escape(text)} \|", NUMERICS, re.MULTILINE), name
    assert f"| rtol {ELEMENT_EPS:g} eps, atol rtol times" in NUMERICS
    assert f"<= norm_eps * eps * norm(reference)` | norm_eps {NORM_EPS:g} |" in NUMERICS
    for eps, dimensions in ((2**-23, 1), (2**-23, 2), (2**-7, 1), (2**-7, 2)):
        norm = bound_of(eps, dimensions, None)
        element = ELEMENT_EPS / NORM_EPS * norm
        row = f"| {eps:.2g} | {element:g} eps: {element * eps:.2g} | {norm:g} eps: {norm * eps:.2g} |"
        assert row.replace("e-0", "e-") in NUMERICS
    assert NEGLIGIBLE == 16 * 2**-23 and "below 2e-6 (16 x 2^-23) of" in NUMERICS
    assert oracle_train.KINK == 4 * 2**-23 and "k is 4 eps times the largest z" in NUMERICS


def test_annotated_json_has_the_fields_of_a_real_file(compare, runs, oracle, faulty, tmp_path):
    directories = ["--reference-dir", runs("ddp").directory, "--oracle-dir", oracle("eager")]
    compare(*directories, "--actual-dir", faulty, "--world-size", 4, "--json", tmp_path / "x.json")
    real = json.loads((tmp_path / "x.json").read_text())
    shown = shown_json()
    for name in OF_RECORDINGS:
        assert shown.pop(name) and name not in real
    assert shown.pop("notes") and real.pop("notes") == []
    check_fields(shown, real, "")


def test_annotated_json_has_the_fields_that_recordings_add(recorded):
    real = json.loads((recorded[0] / "recorded.json").read_text())
    for name in OF_RECORDINGS:
        check_fields(shown_json()[name], real[name], name)


def shown_json() -> dict:
    """Return the JSON file that NUMERICS.md shows."""
    (block,) = blocks("jsonc", NUMERICS)
    return json.loads(re.sub(r"//.*", "", block))


def check_fields(shown: object, real: object, where: str) -> None:
    """See that what is shown has the fields of the real file, of a list those of its first entry."""
    if where == "metadata":  # training_records.py shows all of it
        assert shown.keys() <= real.keys()
    elif isinstance(real, dict):
        # Of the three runs, the first shows what is in each.
        assert shown.keys() == real.keys(), where
        for key in real:
            check_fields(shown[key], real[key], key)
    elif isinstance(real, list):
        assert shown and real, where
        check_fields(shown[0], real[0], where)
