"""Recordings of a small transformer in many plans: clean ones agree with one rank's, mistakes are named."""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT, launch, read_logs, run_alone

from compare_training import main
from training_comparison import ranks_of
from training_recorded_comparison import compare_recordings
from training_recorded_diagnosis import cause_of_recordings
from training_recorded_runs import Recording
from training_recordings import read_rank_file, write_rank_file
from training_tolerance import DEFAULTS

PLANS = ROOT / "tests" / "tools" / "plans.py"
CLEAN = [
    *("ddp-adamw", "fsdp-adamw", "hsdp-adamw", "tp-adamw", "tpfsdp-adamw", "accumulate-adamw"),
    "simplefsdp-adamw",
    *("robin-adamw", "compiled-adamw", "ddp-sgd", "tpfsdp-sgd", "fsdp-momentum"),
]
# The step and kind of the first difference, the tensor's name, and words of the cause.
MISTAKES = {
    "ddp-sgd-summed": (1, "gradients", "norm.weight", "summed over the 4 data-parallel replicas"),
    "ddp-adamw-summed": (1, "gradients", "norm.weight", "summed over the 4 data-parallel replicas"),
    "ddp-sgd-same_batch": (1, "inputs", "samples", "the same batch on every rank"),
    "accumulate-sgd-undivided": (1, "gradients", "norm.weight", "not divided by the 2 microbatches"),
    "ddp-adamw-rate": (1, "parameters", "", "the learning rate of .* is 0.00105 in step 1"),
    "fsdp-sgd-warm": (2, "parameters", "", "the reference's of step 3, the scheduler is advanced more than"),
    "ddp-sgd-decay": (1, "parameters", "", "weight decay of .* is 0.01 in step 1, the reference's 0"),
    "ddp-sgd-buffer": (0, "buffers", "scale", "wrong on rank 1 alone|rank 1 .* 1.01"),
    "ddp-adamw-gelu": (1, "activations", "blocks.1.down", None),
    "ddp-sgd-untied": (0, "parameters", "words.weight", "tied in the reference, separate here"),
    "tpfsdp-sgd-element": (1, "gradients", "blocks.0.down.weight", None),
    "ddp-sgd-target": (1, "losses", "global loss", "the target or the loss function is another"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder with the recordings of all plans and mistakes."""
    folder = tmp_path_factory.mktemp("recorded")
    path = {"PYTHONPATH": str(ROOT)}
    runs = "one:adamw", "one:sgd", "one:momentum"
    done = run_alone(PLANS, "--output-dir", folder, "--runs", *runs, **path)
    assert done.status == 0, done.err
    done = launch(4, folder / "logs", PLANS, "--output-dir", folder, **path)
    assert done.status == 0, done.err + read_logs(folder / "logs")
    return folder


def reference_of(folder, name):
    return folder / f"one-{name.split('-')[1]}"


def examine(folder, name):
    """Return the outcome of comparing a run with one rank's, and the cause of the first finding."""
    actual, reference = Recording(folder / name), Recording(reference_of(folder, name))
    outcome = compare_recordings(reference, actual, DEFAULTS)
    if not outcome.findings:
        return outcome, None
    first = outcome.findings[0]
    return outcome, cause_of_recordings(first, ranks_of(first, outcome.findings), reference, actual)


@pytest.mark.parametrize("name", CLEAN)
def test_a_right_plan_agrees_with_one_rank(recorded, name):
    outcome, _ = examine(recorded, name)
    assert outcome.findings == []
    # Everything is compared, and nothing but what an allowance explains is far off.
    errors = {kind: max(r.eps for r in results) for kind, results in outcome.comparison.by_kind().items()}
    assert 0 < errors["gradients"] < 16 and errors["inputs"] == 0
    if not name.startswith("compiled"):
        assert len(outcome.comparison.by_kind()["activations"]) >= 3 * 4 * 20


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_is_and_named(recorded, name):
    outcome, cause = examine(recorded, name)
    step, kind, tensor, words = MISTAKES[name]
    first = outcome.findings[0]
    assert (first.step, first.kind) == (step, kind) and first.name.startswith(tensor)
    assert (cause is None) if words is None else re.search(words, cause or ""), cause


def test_samples_dealt_in_another_order_are_said(recorded):
    assert any("round robin" in note for note in examine(recorded, "robin-adamw")[0].comparison.notes)
    assert not any("round robin" in note for note in examine(recorded, "ddp-adamw")[0].comparison.notes)


def test_parameters_that_adam_drives_apart_are_explained(recorded):
    outcome, _ = examine(recorded, "tp-adamw")
    assert any(note.startswith("AdamW turns gradients that are zero") for note in outcome.comparison.notes)
    assert max(result.eps for result in outcome.comparison.by_kind()["parameters"]) > 100


def test_sgd_makes_no_full_steps_of_rounding_whatever_is_allowed(recorded):
    runs = (Recording(recorded / name) for name in ("one-sgd", "accumulate-sgd-undivided"))
    outcome = compare_recordings(*runs, DEFAULTS._replace(norm_eps=1e9))
    assert outcome.findings == []
    assert not any("full steps" in note for note in outcome.comparison.notes)


def test_how_losses_are_put_together_is_said(recorded):
    assert any(
        "sum over the microbatches" in n for n in examine(recorded, "accumulate-adamw")[0].comparison.notes
    )


def test_the_command(recorded, call, tmp_path):
    arguments = ["--reference-dir", recorded / "one-sgd", "--actual-dir", recorded / "ddp-sgd"]
    done = call(main, *arguments)
    assert done.status == 0 and done.out.endswith("PASS comparison ranks=4 steps=3\n"), done.out + done.err
    summary = tmp_path / "summary.json"
    arguments[-1] = recorded / "ddp-sgd-summed"
    done = call(main, *arguments, "--json", summary)
    assert done.status == 1 and "Everything before it agrees." in done.out
    assert "rank=3 parity=FAILED" in done.out and "--rtol" not in done.out
    content = json.loads(summary.read_text())
    names = [row["name"] for row in content["path"] if row["kind"] == "activations"]
    assert names.index("blocks.0.q") < names.index("blocks.1.q") < names.index("head")
    assert content["first"]["kind"] == "gradients" and content["verdict"] == "FAIL"
    assert all(len(row["eps"]) == 3 for row in content["path"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tpfsdp-sgd-element",
            r"It differs most in element \[35, 133\]: reference (\S+), actual (\S+)\.",
        ),
        ("ddp-adamw-summed", r"For its elements record both runs again with: --full norm\.weight"),
    ],
)
def test_the_worst_element_is_named(recorded, call, tmp_path, name, words):
    page = tmp_path / "found.json"
    done = call(
        main, "--reference-dir", reference_of(recorded, name), "--actual-dir", recorded / name, "--json", page
    )
    assert done.status == 1
    found = re.search(words, done.out)
    assert found, done.out
    element = json.loads(page.read_text())["worst_element"]
    if "element" in name:
        assert element["index"] == [35, 133]
        assert element["actual"] - element["reference"] == pytest.approx(1, abs=1e-5)
        assert float(found[2]) - float(found[1]) == pytest.approx(1, abs=1e-5)
    else:
        assert element is None


def test_one_recording_is_checked_by_itself(recorded, call):
    done = call(main, "--actual-dir", recorded / "ddp-sgd")
    assert done.status == 0 and "invariants of the actual run: 4 of 4 hold" in done.out, done.out + done.err


def copy_of(recorded, tmp_path, name, change):
    """Return a copy of a recording with change(content) applied to rank 1's file."""
    target = tmp_path / "changed"
    shutil.copytree(recorded / name, target)
    content = read_rank_file(target / "rank-1.pt")
    change(content)
    write_rank_file(target / "rank-1.pt", **content)
    return target


@pytest.mark.parametrize(
    ("change", "step", "check", "words"),
    [
        (
            lambda e: e["magnitudes"].__setitem__(255, 3),
            2,
            "reference",
            "3 elements; everything before is finite",
        ),
        (
            lambda e: e["sketch"].mul_(1.001),
            2,
            "reference",
            "wrong on rank 1 alone, and right on the other 3",
        ),
    ],
)
def test_one_rank_alone(recorded, tmp_path, change, step, check, words):
    changed = copy_of(
        recorded, tmp_path, "ddp-sgd", lambda content: change(content["steps"][1]["gradients"]["norm.bias"])
    )
    actual, reference = Recording(changed), Recording(recorded / "one-sgd")
    outcome = compare_recordings(reference, actual, DEFAULTS)
    first = outcome.findings[0]
    ranks = ranks_of(first, outcome.findings)
    assert (first.step, first.name, first.check, ranks) == (step, "norm.bias", check, [1])
    assert words in cause_of_recordings(first, ranks, reference, actual)
    # Without a reference the ranks disagree.
    alone = compare_recordings(None, actual, DEFAULTS)
    assert {finding.rank for finding in alone.findings} == {1}


def test_rows_in_another_order_are_said(recorded, tmp_path):
    def change(content):
        entry = next(e for e in content["steps"][1]["activations"] if e["name"] == "blocks.0.q")
        entry["samples"] = entry["samples"].flip(0)

    actual = Recording(copy_of(recorded, tmp_path, "ddp-sgd", change))
    outcome = compare_recordings(Recording(recorded / "one-sgd"), actual, DEFAULTS)
    assert outcome.findings == []
    words = "not compared in step 2: 1, with rows in another order, or not used"
    assert any(words in note and "blocks.0.q" in note for note in outcome.comparison.notes)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("dtype", "bfloat16", "its type is bfloat16, expected float32"),
        ("not_finite", 3, "3 values are not finite in the actual run"),
    ],
)
def test_no_order_of_the_samples_explains_a_type_or_nan(recorded, tmp_path, key, value, words):
    # The loss and all gradients agree: that excuses rows in another order, and nothing else.
    def change(content):
        entry = next(e for e in content["steps"][1]["activations"] if e["name"] == "blocks.0.q")
        entry[key] = value

    actual = Recording(copy_of(recorded, tmp_path, "ddp-sgd", change))
    findings = compare_recordings(Recording(recorded / "one-sgd"), actual, DEFAULTS).findings
    assert [(f.step, f.rank, f.kind, f.name) for f in findings] == [(2, 1, "activations", "blocks.0.q")]
    assert words in findings[0].message


@pytest.mark.parametrize(("name", "alarm"), [("blocks.0.k.bias", False), ("blocks.0.v.bias", True)])
def test_a_rank_whose_adam_steps_the_other_way(recorded, tmp_path, name, alarm):
    # Rounding turns the gradient of a key's bias around, on one rank alone. Of a value's bias it does not.
    def change(content):
        step = content["steps"][2]
        step["gradients"][name]["sketch"].mul_(1 + 2**-21)
        step["parameters"][name]["sketch"] += (
            0.001 * torch.randn(256, generator=torch.manual_seed(0)).sign() / 4
        )

    actual = Recording(copy_of(recorded, tmp_path, "ddp-adamw", change))
    findings = compare_recordings(None, actual, DEFAULTS).findings
    assert {(finding.step, finding.name, finding.rank) for finding in findings} == (
        {(3, name, 1)} if alarm else set()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["metadata"].update(rank=2), "renamed or swapped"),
        (lambda c: c["metadata"].update(torch_version="1"), "mixes runs: torch_version"),
        (lambda c: c["metadata"].update(format="other"), "its format is 'other'"),
        (lambda c: c["steps"].pop(), "it has not the 3 steps"),
        (lambda c: c["steps"][0].pop("losses"), "step 1 lacks one of"),
    ],
)
def test_wrong_recordings_are_invalid_input(recorded, call, tmp_path, change, message):
    changed = copy_of(recorded, tmp_path, "ddp-sgd", change)
    done = call(main, "--reference-dir", recorded / "one-sgd", "--actual-dir", changed)
    assert done.status == 2 and done.err.startswith("error: ") and message in done.err, done.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("steps"), "does not hold metadata and steps"),
        (lambda c: c.update(steps=[]), "its steps are no text"),
        (lambda c: c.update(steps=c["steps"][:-9]), "is damaged: "),
        (lambda c: c.update(small={}), "is damaged: "),
        (lambda c: c["small"].update(float64=c["small"]["float64"][:-1]), "is damaged: "),
    ],
)
def test_damaged_files_are_invalid_input(recorded, call, tmp_path, change, message):
    changed = tmp_path / "changed"
    shutil.copytree(recorded / "ddp-sgd", changed)
    content = torch.load(changed / "rank-1.pt", weights_only=True)
    change(content)
    torch.save(content, changed / "rank-1.pt")
    done = call(main, "--reference-dir", recorded / "one-sgd", "--actual-dir", changed)
    assert done.status == 2 and done.err.startswith("error: ") and message in done.err, done.err


def test_what_cannot_be_compared_is_invalid_input(recorded, call, tmp_path):
    one, four = recorded / "one-sgd", recorded / "ddp-sgd"
    for arguments, message in (
        (["--reference-dir", one, "--actual-dir", four, "--rtol", "1"], "--rtol needs whole tensors"),
        (["--reference-dir", one, "--actual-dir", four, "--world-size", "2"], "leave it out"),
        (["--reference-dir", tmp_path, "--actual-dir", four], "is not a file"),
        (["--reference-dir", four, "--actual-dir", four], "compared with itself"),
    ):
        done = call(main, *arguments)
        assert done.status == 2 and message in done.err, done.err
    missing = tmp_path / "missing"
    shutil.copytree(four, missing)
    (missing / "rank-3.pt").unlink()
    done = call(main, "--reference-dir", one, "--actual-dir", missing)
    assert done.status == 2 and "rank-3.pt is missing" in done.err
    sharded = copy_of(recorded, tmp_path, "ddp-sgd", lambda content: None)
    for rank in range(4):
        content = read_rank_file(sharded / f"rank-{rank}.pt")
        content["steps"][0]["before"]["norm.bias"]["shape"] = (16,)
        write_rank_file(sharded / f"rank-{rank}.pt", **content)
    done = call(main, "--reference-dir", one, "--actual-dir", sharded)
    assert done.status == 2 and "norm.bias is (64,) in the reference, (16,)" in done.err


@pytest.mark.parametrize("tiny", [(0, 1, 2, 3), (1,)])
def test_copies_of_a_gradient_that_is_rounding_may_differ(recorded, call, tmp_path, tiny):
    target = tmp_path / "changed"
    shutil.copytree(recorded / "ddp-adamw", target)
    for rank in tiny:
        content = read_rank_file(target / f"rank-{rank}.pt")
        for step in content["steps"]:
            entry = step["gradients"]["norm.bias"]
            entry["sketch"] = 1e-12 * torch.randn_like(entry["sketch"])
            entry["largest"] = 1e-12
        write_rank_file(target / f"rank-{rank}.pt", **content)
    done = call(main, "--actual-dir", target)
    if len(tiny) == 4:
        assert done.status == 0, done.out
    else:
        assert done.status == 1 and "gradients norm.bias" in done.out and "ranks agree" in done.out


DROPOUT = """
import sys
import torch
share, seed = float(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(share), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)
torch.manual_seed(seed)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_dropout_is_named(call, tmp_path):
    (tmp_path / "train.py").write_text(DROPOUT)
    for name, *arguments in (("one", 0.1, 1), ("same", 0.1, 1), ("other", 0.1, 2), ("less", 0.05, 1)):
        command = ["--output-dir", tmp_path / name, tmp_path / "train.py", *arguments]
        assert run_alone(ROOT / "record_training.py", *command).status == 0

    def said(name):
        done = call(main, "--reference-dir", tmp_path / "one", "--actual-dir", tmp_path / name)
        cause = [line for line in done.out.splitlines() if line.startswith("Likely cause")]
        return done.status, *cause

    assert said("same") == (0,)
    status, cause = said("other")
    assert status == 1 and "dropout: 1 drops 0.1 of its values at random" in cause
    status, cause = said("less")
    assert status == 1 and cause == "Likely cause: dropout: 1 drops 0.05 of its values, the reference's 0.1"
