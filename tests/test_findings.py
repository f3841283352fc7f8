"""What a comparison says and writes, word for word, of made-up runs; and runs beside an oracle."""

import json
from datetime import datetime

import pytest
import torch
from conftest import Printed, edit, edit_all
from made_runs import (
    broken,
    gradient,
    loss,
    make_run,
    mismatched,
    output,
    put,
    some_parameters,
    without,
)

from training_summary import describe_growth


@pytest.fixture
def three(tmp_path):
    """A reference, a run and their oracle: three directories."""
    reference = make_run(tmp_path / "reference")
    return reference, make_run(tmp_path / "actual"), make_run(tmp_path / "oracle", dp=1, tp=1)


@pytest.fixture
def compare_three(compare, three):
    def run(*options):
        reference, actual, oracle = three
        directories = "--reference-dir", reference, "--actual-dir", actual, "--oracle-dir", oracle
        return compare(*directories, "--world-size", 4, *options)

    return run


def spoil(three):
    """Plant three faults in the actual run, an error of 2 eps in it and of 4 eps in the reference."""
    reference, actual, _ = three
    edit_all(reference, output(lambda o: o * (1 + 2**-21)))
    edit_all(actual, output(lambda o: o * (1 + 2**-22)))
    for rank in (2, 3):
        edit(actual, rank, gradient(lambda g: 3 * g, "bias", step=2))
    edit(actual, 1, gradient(put(torch.inf), "weight", step=2))
    edit_all(actual, lambda content: content["metadata"].update(device="cuda", backend="nccl"))


CAUSE = (
    "gradients bias are wrong on ranks 2-3 alone, in 24 of 24 elements, and right on the other 2: something "
    "that happened there"
)
MESSAGE = (
    "[6]: reference 0.204214215, actual 0.612642646, difference 0.408, allowed 3.12e-06; 24 of 24 elements "
    "differ, the norm by 1.68e+07 eps"
)
PRINTED = f"""
rank=0 parity=passed
rank=1 parity=FAILED mismatched_tensors=1 broken_invariants=1
rank=2 parity=FAILED mismatched_tensors=1 broken_invariants=2
rank=3 parity=FAILED mismatched_tensors=1 broken_invariants=2

step              oracle       reference cpu         actual cuda  difference   (global loss)
   1         1.500000000         1.500000000         1.500000000     0.0e+00
   2         1.562500000         1.562500000         1.562500000     0.0e+00

tensors      compared  mismatched   largest error   would pass with
outputs             8           0        1.96 eps   --rtol 1.3e-07 --norm-eps 2.1
losses              8           0           0 eps   --rtol 0.0e+00 --norm-eps 0
gradients          16           3         inf eps   --rtol inf --norm-eps inf
parameters         24           0           0 eps   --rtol 0.0e+00 --norm-eps 0
deltas             16           0           0 eps   --rtol 0.0e+00 --norm-eps 0
all                                                 --rtol inf --norm-eps inf

against the oracle     cpu (reference)     cuda (actual)   ratio
outputs                       3.96 eps          2.08 eps   0.524
losses                           0 eps             0 eps       -
gradients                        0 eps           inf eps       -
parameters                       0 eps             0 eps       -
deltas                           0 eps             0 eps       -

invariants of the actual run: 4 of 7 hold
  broken 1 times: finite: no value is NaN or infinite
  broken 2 times: ranks agree: full gradients, parameters and deltas are the same on every rank
  broken 2 times: sgd: a delta is -learning rate x gradient
invariants of the reference run: 7 of 7 hold

Likely cause: {CAUSE}
First in causal order: ranks 2-3, step 2, gradients bias{MESSAGE}
Largest error before step 2: 1.96 eps.
3 of 72 tensors failed, on 3 of 4 ranks.
FAIL comparison ranks=4 steps=2
"""


def test_everything_that_is_printed(three, compare_three):
    spoil(three)
    done = compare_three()
    assert (done.status, done.err) == (1, "")
    directories = "".join(
        f"{directory.name}: {directory} {about} torch_version=2\n"
        for directory, about in zip(
            three,
            (
                "mode=mesh device=cpu backend=gloo",
                "mode=mesh device=cuda backend=nccl",
                "mode=oracle device=cpu backend=gloo",
            ),
            strict=True,
        )
    )
    assert done.out == directories + PRINTED.removeprefix("\n")


def test_everything_that_is_written(three, compare_three, tmp_path):
    spoil(three)
    assert compare_three("--json", tmp_path / "x.json").status == 1
    found = json.loads((tmp_path / "x.json").read_text())
    for directory in three:
        metadata = torch.load(directory / "rank-0.pt", weights_only=True)["metadata"]
        label = {"reference": "cpu", "actual": "cuda", "oracle": "oracle"}[directory.name]
        about = {"label": label, "directory": str(directory), "metadata": metadata}
        assert found.pop(directory.name) == about
    created = datetime.fromisoformat(found.pop("created"))
    assert created.tzinfo and not created.microsecond
    figures = "compared", "mismatched", "negligible", "eps", "score", "needed_rtol", "needed_norm_eps"
    kinds = {row["kind"]: [row[name] for name in figures] for row in found.pop("kinds")}
    nothing = [0, 0, 0.0, 0.0, 0.0, 0.0]
    # What is not finite is null. The outputs are off by 1.96 eps of 16.
    rounding = [8, 0, 0, 1.9595, 1.9595 / 16, 1.2114e-7, 1.9595]
    assert kinds.pop("outputs") == pytest.approx(rounding, rel=1e-3)
    assert kinds == {
        "losses": [8, *nothing],
        "gradients": [16, 3, 0, None, None, None, None],
        "parameters": [24, *nothing],
        "deltas": [16, *nothing],
    }
    tensors = {
        (row["kind"], row["name"]): [row[name] for name in (*figures, "worst_rank", "worst_step")]
        for row in found.pop("tensors")
    }
    assert tensors.pop(("outputs", "output")) == pytest.approx([*rounding, 0, 1], rel=1e-3)
    tripled = [8, 2, 0, 2 * 2**23, 2**20, 1.0, 2 * 2**23, 2, 2]
    assert tensors.pop(("gradients", "bias")) == pytest.approx(tripled, rel=1e-6)
    assert tensors == {
        ("parameters", "weight"): [12, *nothing, 0, 0],
        ("parameters", "bias"): [12, *nothing, 0, 0],
        ("losses", "global loss"): [8, *nothing, 0, 1],
        ("gradients", "weight"): [8, 1, 0, None, None, None, None, 1, 2],
        ("deltas", "weight"): [8, *nothing, 0, 1],
        ("deltas", "bias"): [8, *nothing, 0, 1],
    }
    one, other = 1.9595 / 16, 1.9059 / 16  # the two replicas have outputs of their own
    scores = found.pop("scores")
    assert scores[1].pop() is None
    for row, expected in zip(scores, ([0, one, 0], [0, one], *[[0, other, 2**20]] * 2), strict=True):
        assert row == pytest.approx(expected, rel=1e-3)
    assert all(row["checked"] and row["text"] for row in found["invariants"])
    assert [row["checked"] for row in found["invariants"] if row["name"] == "nonzero"] == [9, 9]
    assert [(row["run"], row["name"], row["failed"]) for row in found.pop("invariants")] == [
        *(("actual", "finite", 1), ("actual", "nonzero", 0), ("actual", "ranks agree", 2)),
        *(("actual", "outputs", 0), ("actual", "loss", 0), ("actual", "update", 0), ("actual", "sgd", 2)),
        *(("reference", "finite", 0), ("reference", "nonzero", 0), ("reference", "ranks agree", 0)),
        *(("reference", "outputs", 0), ("reference", "loss", 0), ("reference", "update", 0)),
        ("reference", "sgd", 0),
    ]
    errors = {row.pop("kind"): list(row.values()) for row in found.pop("oracle_errors")}
    assert errors.pop("outputs") == pytest.approx([3.9573, 2.0754, 0.52446], rel=1e-4)
    assert errors == {
        **dict.fromkeys(("losses", "parameters", "deltas"), [0.0, 0.0, None]),
        "gradients": [0.0, None, None],
    }
    first_step, second_step = found.pop("largest_errors")
    assert first_step.pop("eps") == pytest.approx(1.9595, rel=1e-4)
    assert first_step == {"step": 1, "kind": "outputs", "name": "output"}
    assert second_step == {"step": 2, "eps": None, "kind": "gradients", "name": "weight"}
    assert found == {
        "schema": "parity-comparison-1",
        "verdict": "FAIL",
        "world_size": 4,
        "steps": 2,
        "differences": [
            {"key": "device", "reference": "cpu", "actual": "cuda"},
            {"key": "backend", "reference": "gloo", "actual": "nccl"},
        ],
        "tolerance": {
            "rtol": None,
            "atol": None,
            "norm_eps": None,
            "element_eps": 64.0,
            "default_norm_eps": 16.0,
        },
        "losses": [
            {"step": 1, "reference": 1.5, "actual": 1.5, "oracle": 1.5},
            {"step": 2, "reference": 1.5625, "actual": 1.5625, "oracle": 1.5625},
        ],
        "notes": [],
        "findings": 8,
        "failed_ranks": [1, 2, 3],
        "first": {
            **{"step": 2, "rank": 2, "kind": "gradients", "name": "bias", "check": "reference"},
            **{"message": MESSAGE, "ranks": [2, 3]},
        },
        "cause": CAUSE,
    }


def test_a_comparison_that_passes_is_written_too(compare, three, tmp_path):
    options = ["--actual-dir", three[1], "--world-size", 4, "--json", tmp_path / "x.json"]
    assert compare(*options, "--reference-dir", three[0], "--rtol", 1e-5, "--norm-eps", 3).status == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["verdict"], found["findings"], found["failed_ranks"]) == ("PASS", 0, [])
    assert (found["first"], found["cause"], found["oracle"], found["oracle_errors"]) == (None,) * 4
    assert [found["tolerance"][name] for name in ("rtol", "atol", "norm_eps")] == [1e-5, None, 3.0]
    assert compare(*options).status == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["verdict"], found["reference"]) == ("PASS", None)
    lists = ("kinds", "tensors", "scores", "largest_errors", "differences")
    assert [found[name] for name in lists] == [[]] * 5
    assert [(row["run"], row["failed"]) for row in found["invariants"]] == [("actual", 0)] * 7


def test_a_passing_run_says_which_device_was_checked(three, compare_three):
    assert "No accelerator was checked: this was computed on a CPU." in compare_three().out
    edit_all(three[1], lambda content: content["metadata"].update(device="stand-in"))
    assert "No accelerator was checked: the stand-in for Neuron" in compare_three().out
    edit_all(three[1], lambda content: content["metadata"].update(device="neuron"))
    assert "No accelerator was checked" not in compare_three().out


def test_errors_against_the_oracle_are_those_of_each_run(three, compare_three):
    edit_all(three[0], output(lambda o: o * (1 + 2**-21)))
    edit(three[1], 3, output(lambda o: o * (1 + 2**-22), step=2))
    done = compare_three()
    assert done.status == 0
    rows = [line.split() for line in done.out.partition("\nagainst the oracle")[2].splitlines()[1:6]]
    assert rows == [
        ["outputs", "3.96", "eps", "1.96", "eps", "0.495"],
        *([kind, "0", "eps", "0", "eps", "-"] for kind in ("losses", "gradients", "parameters", "deltas")),
    ]


@pytest.mark.parametrize(("error", "failed"), [(0.9e-3, {}), (1.2e-3, {"gradients": 8})])
def test_the_oracle_beside_a_reference_allows_its_slack(compare, tmp_path, error, failed):
    slack = {name: torch.full_like(value, 1e-3) for name, value in some_parameters().items()}
    reference, actual = make_run(tmp_path / "reference"), make_run(tmp_path / "actual")
    oracle = make_run(tmp_path / "oracle", dp=1, tp=1, slack=slack)
    edit_all(actual, gradient(lambda g: g + error))
    options = ["--reference-dir", reference, "--actual-dir", actual, "--world-size", 4]
    assert mismatched(compare(*options, "--oracle-dir", oracle).out) == failed
    assert mismatched(compare(*options).out) == {"gradients": 8}


def test_an_oracle_is_of_one_rank_of_the_same_job_and_beside_a_reference(
    three, compare, compare_three, tmp_path
):
    def invalid(done, words):
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert words in done.err

    reference, actual, oracle = three
    options = ["--actual-dir", actual, "--world-size", 4]
    invalid(compare(*options, "--oracle-dir", oracle), "--oracle-dir is shown beside a reference")
    options += ["--reference-dir", reference]
    again = make_run(tmp_path / "again")
    invalid(compare(*options, "--oracle-dir", again), "holds a run of several ranks; give one of one rank")
    invalid(compare(*options, "--oracle-dir", actual), "actual would be compared with itself; give two runs")
    edit(oracle, 0, lambda content: content["metadata"].update(seed=1))
    invalid(compare_three(), "the runs differ in seed: reference 1, actual 0; run both with")
    edit(oracle, 0, lambda content: content["metadata"].update(seed=0))
    edit(oracle, 0, output(lambda o: o[:7], step=2))
    invalid(
        compare_three(),
        "output of the whole batch, (7, 24), does not divide over 2 data-parallel",
    )
    edit(oracle, 0, output(lambda o: o[0, 0], step=2))
    invalid(compare_three(), "output of the whole batch, (), does not divide over 2 data-parallel")


def test_a_whole_run_may_differ_in_layout_and_in_nothing_else(three, compare):
    options = ["--reference-dir", three[2], "--actual-dir", three[1], "--world-size", 4]
    assert compare(*options).status == 0
    for key, value in (
        ("optimizer", "AdamW"),
        ("global_batch_size", 4),
        ("learning_rate", 0.1),
        ("steps", 3),
    ):
        kept = torch.load(three[1] / "rank-0.pt", weights_only=True)
        edit_all(three[1], lambda content, k=key, v=value: content["metadata"].update({k: v}))
        if key == "steps":
            edit_all(three[1], lambda content: content["records"].append(content["records"][-1]))
        done = compare(*options)
        assert done.status == 2 and f"the runs differ in {key}: reference" in done.err
        edit_all(three[1], lambda content, k=key, v=kept: content["metadata"].update({k: v["metadata"][k]}))


def test_a_whole_run_is_checked_once(three, compare):
    edit(three[2], 0, loss(lambda mean, own: (mean, 2 * own)))
    done = compare("--reference-dir", three[2], "--actual-dir", three[1], "--world-size", 4)
    assert done.status == 1
    assert broken(done.out) == {"loss"}
    assert "First in causal order: rank 0, step 1, losses global loss: it is 1.5, the mean of" in done.out
    assert "Broken invariant: loss (reference run)" in done.out


def test_causal_order_within_a_step(three, compare):
    """Each fault is found before those that follow from it: gradients from the last layer on."""
    changes = [
        ("outputs output", output(lambda o: 1.5 * o)),
        ("losses global loss", loss(lambda mean, own: (1.5 * mean, 1.5 * own))),
        ("gradients bias", gradient(lambda g: 1.5 * g, "bias")),
        ("gradients weight", gradient(lambda g: 1.5 * g, "weight")),
        ("parameters weight", lambda content: content["records"][0]["parameters"]["weight"].mul_(1.5)),
        ("parameters bias", lambda content: content["records"][0]["parameters"]["bias"].mul_(1.5)),
        ("deltas weight", lambda content: content["records"][0]["deltas"]["weight"].add_(0.5)),
        ("deltas bias", lambda content: content["records"][0]["deltas"]["bias"].add_(0.5)),
    ]
    for name, change in reversed(changes):
        edit_all(three[1], change)
        done = compare("--reference-dir", three[0], "--actual-dir", three[1], "--world-size", 4)
        assert f"First in causal order: ranks 0-3, step 1, {name}" in done.out


@pytest.mark.parametrize("of", ["actual", "reference"])
def test_a_gradient_that_one_run_lacks(three, compare, of):
    edit_all(three[of == "actual"], without("bias"))
    done = compare("--reference-dir", three[0], "--actual-dir", three[1], "--world-size", 4)
    assert done.status == 1
    if of == "actual":  # otherwise something else comes first in causal order
        said = "there is none in the actual run: the parameter is frozen there, or left out"
        assert f"ranks 0-3, step 1, gradients bias: {said}" in done.out
    failed = {"gradients": 8, "deltas": 8, "parameters": 8}
    assert mismatched(done.out) == failed
    for kind in ("gradients", "deltas"):
        row = next(line for line in done.out.splitlines() if line.startswith(kind))
        assert row.split() == [kind, "16", "8", "inf", "eps", "--rtol", "inf", "--norm-eps", "inf"]
    assert done.out.count("mismatched_tensors=6") == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (output(lambda o: o.double()), "outputs output: its type is float64, expected float32"),
        (output(lambda o: o[:3]), "outputs output: its shape is [3, 24], expected [4, 24]"),
        (
            output(put(torch.nan)),
            "actual nan: not finite in the actual run",
        ),
    ],
)
def test_what_cannot_be_compared_passes_under_no_tolerance(three, compare, change, said):
    edit_all(three[1], change)
    options = ["--reference-dir", three[0], "--actual-dir", three[1], "--world-size", 4]
    for more in ((), ("--rtol", 1e9, "--atol", 1e9, "--norm-eps", 1e9)):
        done = compare(*options, *more)
        assert mismatched(done.out) == {"outputs": 4}
        assert said in done.out
        row = next(line for line in done.out.splitlines() if line.startswith("outputs"))
        assert row.split()[1:] == ["8", "4", "inf", "eps", "--rtol", "inf", "--norm-eps", "inf"]


def test_progress_is_shown_on_a_terminal_only(three, compare_three, monkeypatch):
    assert compare_three().err == ""
    monkeypatch.setattr(Printed, "isatty", lambda stream: True)
    shown = compare_three().err.split("\r")
    assert [text.strip() for text in shown if text.strip()] == [f"comparing rank {i} of 4" for i in range(4)]
    assert shown[-2].isspace()


def test_the_oracle_beside_a_reference_may_be_of_another_type(three, compare_three):
    def widen(content):
        for record in content["records"]:
            record["output"] = record["output"].double()
            for kind in ("gradients", "parameters", "deltas", "initial"):
                record[kind] = {name: value.double() for name, value in record.get(kind, {}).items()}

    edit(three[2], 0, widen)
    done = compare_three()
    assert done.status == 0
    rows = [line.split() for line in done.out.partition("\nagainst the oracle")[2].splitlines()[1:6]]
    assert [row[1:5] for row in rows] == [["0", "eps", "0", "eps"]] * 5


def test_growth_over_the_steps_is_said(compare_three, three):
    edit_all(three[1], output(lambda o: o * (1 + 2**-22), step=1))
    edit_all(three[1], output(lambda o: o * (1 + 2**-20), step=2))
    done = compare_three()
    assert done.status == 0
    said = next(line for line in done.out.splitlines() if line.startswith("Largest error"))
    assert said == (
        "Largest error: 2.08 eps in step 1, 8.05 eps in step 2 (outputs output); it grows 3.9 times a step."
    )


def test_growth_needs_an_error_to_start_from():
    errors = [{"step": step, "eps": eps, "kind": "gradients", "name": "w"} for step, eps in ((1, 8), (3, 2))]
    assert describe_growth(errors) == (
        "Largest error: 8 eps in step 1, 2 eps in step 3 (gradients w); it does not grow."
    )
    assert describe_growth(errors[:1]) is None
    assert describe_growth([errors[0] | {"eps": 0.0}, errors[1]]) is None
    assert describe_growth([errors[0], errors[1] | {"eps": None}]) is None  # as JSON has what is not finite
    assert describe_growth(errors, before=3) == "Largest error before step 3: 8 eps."
    assert describe_growth(errors, before=1) is None
