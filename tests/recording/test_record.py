"""record_training.py: what it records, that it changes nothing, how it ends. Real processes, real Gloo."""

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, fork, launch, read_logs, run

import training_recordings
from training_common import InputError
from training_recorded_runs import shard_group
from training_recordings import read_rank_file
from training_sketches import SAMPLE_WIDTH

RECORDER, SCRIPT = ROOT / "record_training.py", ROOT / "tests" / "tools" / "record_cases.py"
# Each case is run with and without the recorder: on one rank, or on so many.
ALONE = [
    "plain",
    "evaluates",
    "accumulates",
    "calls_the_head",
    "checkpoints",
    "checkpoints_reentrant",
    "wraps_checkpoints",
    "compiles",
    "compiles_in_place",
    "compiles_blocks",
    "compiles_blocks_in_place",
    "compiles_twice",
    "compiles_checkpoints",
    "breaks_graphs",
    "scales",
    "scales_fused",
    "two_optimizers",
    "contains",
    "adversaries",
    "ties",
    "begins_on_meta",
    "schedules",
    "lbfgs",
    "closure",
    "keywords",
    "steps_in_backward",
    "loads_data",
    "embeds",
    "other_defaults",
    "catches_errors",
    "transforms_functions",
    "ends_just_then",
]
TWO = [
    "ddp",
    "ddp_accumulates",
    "ddp_unused",
    "ddp_static",
    "ddp_compiled",
    "ddp_adversaries",
    "fsdp",
    "fsdp_offloads",
    "fsdp_mixed",
    "fsdp_on_meta",
    "tp",
    "pipeline",
]
FOUR = ["hsdp", "tp_fsdp", "fsdp"]
SAME = [(case, 1) for case in ALONE] + [(case, 2) for case in TWO] + [(case, 4) for case in FOUR]
REFUSED = {
    "never_steps": "the script ended after 0 of --steps 3 optimizer steps: nothing was recorded; no step",
    "ends_soon": "ended after 2 of --steps 3 optimizer steps: nothing was recorded; give fewer steps",
    "compiles_the_step": "a compiled function's cannot be",
}
# Ways to train on several ranks the model that `plain` trains on one, from the same batches.
OTHERS = re.compile("adversaries|pipeline|mixed|unused")
SAME_MODEL = [(case, ranks) for case, ranks in SAME if ranks > 1 and not OTHERS.search(case)]


class Runs:
    """All cases, run by tests/tools/fork_ranks.py."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.jobs: dict[str, tuple] = {}

    def add(self, name, ranks, *command) -> None:
        ranks = 0 if ranks == 1 else ranks  # no RANK is set then
        self.jobs[name] = ranks, *command

    def record(self, name, ranks, *command, steps=3, afterwards="continue") -> None:
        options = "--output-dir", self.folder / name, "--steps", steps, "--afterwards", afterwards
        self.add(name, ranks, RECORDER, *options, *command)

    def run(self) -> None:
        self.statuses = fork(self.folder, self.jobs, timeout=60)

    def __getitem__(self, name) -> SimpleNamespace:
        """Return the statuses, stdout and stderr of a command's ranks, and what they recorded."""
        ranks = range(len(self.statuses[name]))
        files = [self.folder / name / f"rank-{rank}.pt" for rank in ranks]
        return SimpleNamespace(
            statuses=self.statuses[name],
            out=[(self.folder / f"{name}-{rank}.out").read_text() for rank in ranks],
            err=[(self.folder / f"{name}-{rank}.err").read_text() for rank in ranks],
            directory=self.folder / name,
            contents=[read_rank_file(path) for path in files if path.exists()],
        )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All cases with and without the recorder."""
    runs = Runs(tmp_path_factory.mktemp("record"))
    for case, ranks in SAME:
        runs.add(f"{case}{ranks}-without", ranks, SCRIPT, case)
        runs.record(f"{case}{ranks}", ranks, SCRIPT, case)
    for case in [*REFUSED, "raises", "exits_with_5", "raises_after_recording"]:
        runs.record(case, 1, SCRIPT, case)
    runs.record("fsdp1", 2, SCRIPT, "fsdp1")
    for ranks in (2, 4):
        runs.record(f"cleans_up{ranks}", ranks, SCRIPT, "cleans_up", afterwards="stop")
    runs.record("pipeline-stop", 2, SCRIPT, "pipeline", afterwards="stop")
    runs.record("one-step", 1, SCRIPT, "plain", steps=1, afterwards="stop")
    runs.record("one-step-ddp", 2, SCRIPT, "ddp", steps=1, afterwards="stop")
    runs.run()
    return runs


def steps_of(run) -> list[dict]:
    return run.contents[0]["steps"]


def names(step, kind="activations") -> list[str]:
    return [entry["name"] for entry in step[kind]]


def whole(run, step, kind, name) -> torch.Tensor:
    """Put the sketches of the shards of a tensor together, as rank 0's group has them."""
    entries = [content["steps"][step][kind][name] for content in run.contents]
    return sum(entries[rank]["sketch"] for rank in shard_group(0, entries[0]))


# ---------------------------------------------------------------- nothing is changed


@pytest.mark.parametrize(("case", "ranks"), SAME)
def test_a_recorded_script_computes_the_same_in_the_same_collectives_and_graphs(ran, case, ranks):
    recorded, without = ran[f"{case}{ranks}"], ran[f"{case}{ranks}-without"]
    assert recorded.statuses == without.statuses == [0] * ranks, recorded.err
    # Their losses with all bits, sums of parameters, counts of collectives, graphs and graph breaks.
    for rank, text in enumerate(recorded.out):
        lines = [line for line in text.splitlines() if not line.startswith("recorded ")]
        assert lines == without.out[rank].splitlines()
        assert any(line.startswith("loss ") for line in lines) or (case, rank) == ("pipeline", 0)
        assert ranks == 1 or "collectives" in text
    warnings = [re.sub(r"\d", "", text) for text in recorded.err]
    assert warnings == [re.sub(r"\d", "", text) for text in without.err]
    assert len(recorded.contents) == ranks
    assert [content["metadata"]["rank"] for content in recorded.contents] == list(range(ranks))
    assert all(len(content["steps"]) == 3 for content in recorded.contents)


@pytest.mark.parametrize(("case", "ranks"), SAME_MODEL)
def test_shards_add_up_to_what_one_rank_has(ran, case, ranks):
    one, several = ran["plain1"], ran[f"{case}{ranks}"]
    for step in range(3):
        for kind in ("gradients", "before", "parameters"):
            assert steps_of(several)[step][kind].keys() == steps_of(one)[step][kind].keys()
            for name in steps_of(one)[step][kind]:
                # AdamW divides gradients by their size: those of nearly zero differ in the parameters.
                expected, close = whole(one, step, kind, name), 1e-4 if kind == "gradients" else 1e-3
                assert torch.allclose(whole(several, step, kind, name), expected, atol=close), (kind, name)
        assert steps_of(several)[step]["buffers"].keys() == steps_of(one)[step]["buffers"].keys()


@pytest.mark.parametrize(("case", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2)])
def test_samples_have_the_same_keys_and_activations_on_another_rank(ran, case, ranks):
    one, several = ran["plain1"], ran[f"{case}{ranks}"]
    place = {tuple(key.tolist()): row for row, key in enumerate(steps_of(one)[0]["calls"][0])}
    expected = {entry["name"]: entry["samples"] for entry in steps_of(one)[0]["activations"]}
    parts = {name: torch.zeros_like(samples) for name, samples in expected.items()}
    for content in several.contents:
        (keys,) = content["steps"][0]["calls"]
        rows = [place[tuple(key.tolist())] for key in keys]
        assert len(rows) == (8 if case == "tp" else 8 // ranks)
        for entry in content["steps"][0]["activations"]:
            if entry["placements"] in (("shard 1",), ("partial",)):  # column shards, and terms of a sum
                parts[entry["name"]][rows] += entry["samples"]
            else:
                parts[entry["name"]][rows] = entry["samples"]
    for name, samples in expected.items():
        assert samples.shape[1] == SAMPLE_WIDTH
        assert torch.allclose(parts[name], samples, atol=1e-5), name


# ---------------------------------------------------------------- what is recorded


MODULES = [
    "first",
    *(f"blocks.{i}{part}" for i in (0, 1) for part in (".norm", ".up", ".down", "")),
    "last",
    "(model)",
]


@pytest.mark.parametrize(
    "case",
    [
        "plain1",
        "evaluates1",
        "checkpoints1",
        "checkpoints_reentrant1",
        "wraps_checkpoints1",
        "scales1",
        "contains1",
        "lbfgs1",
        "closure1",
        "loads_data1",
        "begins_on_meta1",
        "steps_in_backward1",
        "catches_errors1",
        "ddp2",
        "ddp_static2",
        "fsdp2",
        "tp2",
        "tp_fsdp4",
    ],
)
def test_each_module_is_recorded_once_a_step(ran, case):
    for content in ran[case].contents:
        for step in content["steps"]:
            assert names(step) == MODULES
            assert {(entry["call"], entry["occurrence"]) for entry in step["activations"]} == {(0, 1)}
            assert len(step["calls"]) == 1 and len(step["losses"]) == 1
            assert len(step["gradients"]) == len(step["before"]) == len(step["parameters"]) == 16
            assert set(step["buffers"]) == {"calls", "blocks.0.scale", "blocks.1.scale"}


def test_the_printed_losses_are_recorded(ran):
    for case in ("plain1", "scales1", "scales_fused1", "lbfgs1", "closure1", "compiles1", "schedules1"):
        printed = [
            float.fromhex(line[5:]) for line in ran[case].out[0].splitlines() if line.startswith("loss")
        ]
        recorded = [step["losses"] for step in steps_of(ran[case])]
        assert str(recorded) == str([[loss] for loss in printed[:3]]), case  # nan, too


def test_microbatches_are_calls_of_one_step(ran):
    for case in ("accumulates1", "ddp_accumulates2"):
        for step in steps_of(ran[case]):
            assert len(step["calls"]) == len(step["losses"]) == 2
            assert [entry["call"] for entry in step["activations"] if entry["name"] == "first"] == [0, 1]


def test_a_head_that_the_loss_calls_belongs_to_the_model_s_call(ran):
    for step in steps_of(ran["calls_the_head1"]):
        assert len(step["calls"]) == 1
        heads = [entry for entry in step["activations"] if entry["name"] == "last"]
        assert [(entry["call"], entry["occurrence"]) for entry in heads] == [(0, 1), (0, 2)]
        assert [(clip["max_norm"], clip["after_step"]) for clip in step["clips"]] == [
            (pytest.approx(0.1), False)
        ]
        assert step["clips"][0]["norm"] > 0.1
        norms = [entry["sketch"].norm() ** 2 for entry in step["gradients"].values()]
        assert sum(norms) ** 0.5 == pytest.approx(0.1, rel=0.2)  # as estimated


def test_gradients_are_recorded_in_the_order_of_backward(ran):
    for case in ("plain1", "accumulates1", "ddp2", "fsdp2", "tp2"):
        for step in steps_of(ran[case]):
            assert sorted(step["ready"]) == sorted(step["gradients"]), case
            assert {name.split(".")[0] for name in step["ready"][:2]} == {"last"}, case
            assert {name.split(".")[0] for name in step["ready"][-2:]} == {"first"}, case


def test_gradients_that_a_backward_finds_are_counted(ran):
    steps = steps_of(ran["accumulates1"])
    assert [step["held"] for step in steps[1:]] == [[len(steps[0]["gradients"])]] * (len(steps) - 1)
    assert all(step["held"] == [] for step in steps_of(ran["plain1"]))


def test_of_a_compiled_model_the_output_is_recorded(ran):
    for case in (
        "compiles1",
        "compiles_in_place1",
        "compiles_twice1",
        "compiles_checkpoints1",
        "ddp_compiled2",
    ):
        assert [names(step) for step in steps_of(ran[case])] == [["(model)"]] * 3
        line = next(line for line in ran[case].out[0].splitlines() if line.startswith("recorded 3 steps in "))
        assert re.search(
            r"; recording took \d+\.\d s; 10 of 11 modules were not seen, inside a compiled region", line
        )
    for case in ("compiles_blocks1", "compiles_blocks_in_place1"):
        expected = ["first", "blocks.0", "blocks.1", "last", "(model)"]
        assert [names(step) for step in steps_of(ran[case])] == [expected] * 3


SKETCHES_A_COMPILED_MODEL = """
import sys
import torch
import training_recorder
describe = training_recorder.describe_samples
def described(tensor, samples):
    print("sketched", *tensor.shape)
    return describe(tensor, samples)
training_recorder.describe_samples = described
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend=sys.argv[1])
@torch.compile(backend=sys.argv[1])
def loss_of(output):
    return (output ** 2).mean()
for step in range(2):
    loss_of(compiled(torch.ones(4, 8))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_graph_that_the_compiler_calls_as_a_module_is_none(tmp_path, backend):
    """Its outputs are also what it keeps for the backward: gathered weights, which may be gigabytes."""
    (tmp_path / "train.py").write_text(SKETCHES_A_COMPILED_MODEL)
    done = record("--output-dir", tmp_path / "out", "--steps", "2", tmp_path / "train.py", backend)
    assert done.status == 0, done.err
    assert re.findall("sketched .*", done.out) == 2 * ["sketched 4 3"]
    for step in read_rank_file(tmp_path / "out/rank-0.pt")["steps"]:
        assert names(step) == ["(model)"] and len(step["calls"]) == 1


def test_a_skipped_step_is_recorded_as_one(ran):
    for case in ("scales1", "scales_fused1"):
        steps = steps_of(ran[case])
        assert [step["optimizers"][0]["skipped"] for step in steps] == [False, True, False]
        for name, entry in steps[1]["parameters"].items():
            assert torch.equal(entry["sketch"], steps[1]["before"][name]["sketch"])
        assert steps[1]["gradients"]["first.weight"]["magnitudes"][255] > 0
        # Gradients are recorded without the scale.
        for name, entry in steps[0]["gradients"].items():
            expected = steps_of(ran["plain1"])[0]["gradients"][name]["sketch"]
            assert torch.allclose(entry["sketch"], expected, atol=1e-5)


def test_several_optimizers_make_one_step(ran):
    for step in steps_of(ran["two_optimizers1"]):
        assert [optimizer["class"] for optimizer in step["optimizers"]] == ["AdamW", "SGD"]
        assert step["optimizers"][1]["groups"][0]["names"] == ["last.weight", "last.bias"]
        assert len(step["gradients"]) == len(step["parameters"]) == 16


def test_of_a_container_the_optimizers_inside_are_recorded(ran):
    for step in steps_of(ran["contains1"]):
        assert [optimizer["class"] for optimizer in step["optimizers"]] == ["AdamW"] * 16
        assert {optimizer["groups"][0]["lr"] for optimizer in step["optimizers"]} == {0.01}


def test_models_are_told_apart_alike_with_ddp_and_without(ran):
    one, two = steps_of(ran["adversaries1"]), steps_of(ran["ddp_adversaries2"])
    for step in range(3):
        for kind in ("gradients", "parameters", "buffers", "buffers_before"):
            assert one[step][kind].keys() == two[step][kind].keys()
        assert names(one[step]) == names(two[step])
    prefixes = {name.split(".")[0] for step in one for name in step["parameters"]}
    assert prefixes == {"Sequential", "Net", "Net2"}


def test_tied_weights_have_one_name_and_others(ran):
    content = ran["ties1"].contents[0]
    assert content["metadata"]["tied"] == {"0.weight": ["2.weight"]}
    assert "2.weight" not in content["steps"][0]["parameters"]


def test_the_learning_rate_of_each_step_is_recorded(ran):
    rates = [step["optimizers"][0]["groups"][0]["lr"] for step in steps_of(ran["schedules1"])]
    assert rates == [0.01, 0.005, 0.0025]


def test_the_first_evaluation_of_a_closure_is_the_steps(ran):
    # Its gradients are those at the parameters before the step, so those of `plain` in the first step.
    for case in ("lbfgs1", "closure1"):
        for name, entry in steps_of(ran["plain1"])[0]["gradients"].items():
            assert torch.equal(steps_of(ran[case])[0]["gradients"][name]["sketch"], entry["sketch"])


def test_buffers_before_training_are_recorded_under_the_names_of_those_after(ran):
    for case in ("plain1", "ddp2", "fsdp2", "compiles1", "keywords1"):
        first, second, _ = steps_of(ran[case])
        assert first["buffers_before"].keys() == first["buffers"].keys() == second["buffers_before"].keys()
        calls = next(name for name in first["buffers"] if name.endswith("calls"))
        assert first["buffers_before"][calls]["largest"] == 0 and first["buffers"][calls]["largest"] == 1


def test_samples_are_found_in_keyword_arguments_and_in_the_second_dimension(ran):
    for step in steps_of(ran["keywords1"]):
        assert step["calls"][0].shape == (8, 8)
        assert all(entry["batch_dim"] == 0 and len(entry["samples"]) == 8 for entry in step["activations"])
    by_name = {entry["name"]: entry for entry in steps_of(ran["embeds1"])[0]["activations"]}
    assert by_name["parts.0"]["samples"].shape == by_name["parts.2"]["samples"].shape == (4, SAMPLE_WIDTH)
    assert by_name["parts.1"]["batch_dim"] is None  # of positions


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_script_is_stopped_and_its_finally_blocks_run(ran, ranks):
    stopped = ran[f"cleans_up{ranks}"]
    assert stopped.statuses == [0] * ranks, stopped.err
    assert all(text.endswith("cleaned up\n") and text.count("loss") < 4 for text in stopped.out)
    assert len(stopped.contents) == ranks


SRUN = """
import os
import torch, torch.distributed as dist
rank = int(os.environ["SLURM_PROCID"])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + os.environ["PORT"], rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4) + rank).sum().backward()
    if rank or step != 1 or "SKIP" not in os.environ:
        optimizer.step()
"""


def test_the_rank_is_the_process_groups(tmp_path):
    (tmp_path / "train.py").write_text(SRUN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, RECORDER, "--output-dir", "out", "train.py"]
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**known, "SLURM_PROCID": str(rank), "PORT": port})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rank-0.pt", "rank-1.pt"}


def test_a_rank_that_waits_for_others_says_so(monkeypatch, capsys):
    monkeypatch.setattr(training_recordings, "PATIENCE", timedelta(milliseconds=200))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    with pytest.raises(InputError, match="another rank did not reach this step"):
        training_recordings.wait_for_all(2, "x")
    said = capsys.readouterr().err
    assert 3 <= said.count("rank 1 has recorded its steps and waits: 1 of 2 ranks have; the others") <= 6


LATE = """
import os, time
import torch.distributed as dist
from training_recordings import wait_for_all

class Late:
    def __getattr__(self, name):
        return getattr(store, name)

    def wait(self, keys, *timeout):
        time.sleep(1)
        store.wait(keys, *timeout)

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank():
    dist.distributed_c10d._get_default_store = Late
wait_for_all(2, "late")
os._exit(0)
"""


def test_the_rank_with_the_store_ends_last(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r}){LATE}")
    runs = Runs(tmp_path)
    runs.add("late", 2, script)
    runs.run()
    assert runs.statuses["late"] == [0, 0], (tmp_path / "late-1.err").read_text()


def test_a_rank_that_waits_for_another_ones_next_step_is_stopped(ran):
    assert ran["pipeline-stop"].statuses == [0, 0] and len(ran["pipeline-stop"].contents) == 2
    assert [len(run.contents) for run in (ran["one-step"], ran["one-step-ddp"])] == [1, 2]
    assert ran["one-step-ddp"].statuses == [0, 0]


@pytest.mark.parametrize("case", REFUSED)
def test_too_few_steps_are_an_error(ran, case):
    done = ran[case]
    assert done.statuses == [2] and REFUSED[case] in done.err[0]
    assert [line for line in done.err[0].splitlines() if "error" in line] == [done.err[0].splitlines()[-1]]
    assert done.err[0].splitlines()[-1].startswith("error: ")
    assert list(done.directory.iterdir()) == []


def test_fsdp1_is_refused(ran):
    done = ran["fsdp1"]
    assert done.statuses == [2, 2] and list(done.directory.iterdir()) == []
    assert all(re.fullmatch(r"error: .* \(FSDP1\).*; use fully_shard \(FSDP2\)\n", text) for text in done.err)


def test_what_a_script_raises_is_shown_from_its_own_frames_on(ran):
    for case in ("raises", "raises_after_recording"):
        lines = ran[case].err[0].splitlines()
        assert ran[case].statuses == [1]
        assert lines[0] == "Traceback (most recent call last):" and str(SCRIPT) in lines[1]
        assert lines[-1] == "ValueError: the script's own"
    assert list(ran["raises"].directory.iterdir()) == []
    assert len(ran["raises_after_recording"].contents) == 1
    assert ran["exits_with_5"].statuses == [5] and ran["exits_with_5"].err == [""]


# ---------------------------------------------------------------- the command and launchers


def record(*command, **options):
    return run(sys.executable, RECORDER, *command, **options)


def test_bad_commands_are_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    code = """
import os, sys
sys.path[0] = {root!r}
import record_training
for command in {commands!r}:
    sys.argv[1:] = command
    try:
        record_training.main()
    except SystemExit as stop:
        print(stop.code)
"""
    commands = {
        "there is no script missing.py": ["missing.py"],
        "there is no module missing": ["-m", "missing"],
        "there is no module missing.part": ["-m", "missing.part"],
        "there is no module package.__main__": ["-m", "package"],
        "--steps is 0": ["--steps", "0", str(SCRIPT)],
        "--skip is -1": ["--skip", "-1", str(SCRIPT)],
        "the following arguments are required": [],
        "--output-dir file/x cannot be written: Not a directory": [
            "--output-dir",
            "file/x",
            str(SCRIPT),
            "plain",
        ],
        "--output-dir file cannot be written: File exists": ["--output-dir", "file", str(SCRIPT), "plain"],
    }
    commands = {text: ["--output-dir", "out", *command] for text, command in commands.items()}
    code = code.format(root=str(ROOT), commands=list(commands.values()))
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.out.split() == ["2"] * len(commands), done.err
    for line, text in zip(done.err.splitlines(), commands, strict=True):
        assert line.startswith("error: ") and text in line
    assert not (tmp_path / "out").exists()


def test_a_module_is_run_as_python_runs_it_and_old_files_go(tmp_path):
    package, out = tmp_path / "package", tmp_path / "out"
    package.mkdir()
    out.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys\nfrom pathlib import Path\nprint(sys.argv, Path(__file__).name, __name__, __package__)\n"
        + f"sys.path.insert(0, {str(SCRIPT.parent)!r})\nimport record_cases\nrecord_cases.plain()\n"
    )
    for name in ("rank-0.pt", "rank-0.pt.tmp", "rank-7.pt", "rank-x.pt", "notes.txt"):
        (out / name).write_text("old")
    options = ["--output-dir", "out", "--steps", "2", "--activations", "blocks.0.*", "--full", "*.bias"]
    done = record(*options, "-m", "package.train", "--steps", "9", cwd=tmp_path)
    assert done.status == 0, done.err
    path = str(package / "train.py")
    assert done.out.startswith(f"{[path, '--steps', '9']} train.py __main__ package\n")
    assert {path.name for path in out.iterdir()} == {"rank-0.pt", "rank-x.pt", "notes.txt"}
    content = read_rank_file(out / "rank-0.pt")
    assert content["metadata"]["command"] == ["package.train", "--steps", "9"]
    assert content["metadata"]["steps"] == 2
    for step in content["steps"]:
        assert names(step) == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]
        assert {name for name, entry in step["parameters"].items() if "full" in entry} == {
            name for name in step["parameters"] if name.endswith("bias")
        }
        assert step["parameters"]["last.bias"]["full"].shape == (3,)


@pytest.mark.parametrize("launcher", ["launch.py", "torchrun"])
def test_it_runs_under_launchers(tmp_path, launcher):
    command = RECORDER, "--output-dir", tmp_path / "out", SCRIPT, "cleans_up"
    if launcher == "launch.py":
        done = launch(2, tmp_path / "logs", *command)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = run(*torchrun, "--log-dir", tmp_path / "logs", "--redirects", "3", *command)
    assert done.status == 0, done.err + read_logs(tmp_path / "logs")
    assert read_logs(tmp_path / "logs", "stdout").count("cleaned up") == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rank-0.pt", "rank-1.pt"}


def test_the_kits_simple_fsdp_is_recorded_under_launch(tmp_path):
    options = [
        "--device",
        "cpu",
        "--backend",
        "gloo",
        "--expected-world-size",
        "4",
        "--steps",
        "4",
        "--compile-backend",
        "aot_eager",
    ]
    command = RECORDER, "--output-dir", tmp_path / "out", ROOT / "simplefsdp_tp_train.py", *options
    done = launch(4, tmp_path / "logs", *command, "--output-dir", tmp_path / "results")
    assert done.status == 0, done.err + read_logs(tmp_path / "logs")
    contents = [read_rank_file(tmp_path / "out" / f"rank-{rank}.pt") for rank in range(4)]
    entry = contents[3]["steps"][2]["gradients"]["first"]
    assert entry["shape"] == (256, 128) and entry["placements"] == ("shard 1", "shard 0")
    assert names(contents[0]["steps"][0]) == ["(model)"]
