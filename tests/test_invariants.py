"""What must hold in any run, checked without a reference: clean runs pass, each broken rule is told."""

import json
import shutil

import pytest
import torch
from conftest import RANKS, SCRIPTS, STEPS, copy_run, edit, edit_all

from training_invariants import INVARIANTS


@pytest.fixture
def check(compare):
    """Check one directory: exit status, stdout, stderr."""

    def run_main(directory, *options):
        done = compare("--actual-dir", directory, "--world-size", RANKS, *options)
        return done.status, done.out, done.err

    return run_main


@pytest.fixture
def copy(runs, tmp_path):
    """A function that returns a copy of a mode's run."""
    return lambda mode: shutil.copytree(runs(mode).directory, tmp_path / mode)


@pytest.mark.parametrize("mode", SCRIPTS)
def test_clean_run_passes_in_every_mode(runs, check, mode):
    status, out, err = check(runs(mode).directory)
    assert (status, err) == (0, "")
    assert all(f"rank={rank} invariants=held" in out for rank in range(RANKS))
    assert "invariants of the actual run: 7 of 7 hold" in out
    assert out.endswith(f"PASS invariants ranks={RANKS} steps={STEPS}\n")


def gradient(step, name, change):
    def edit(content):
        tensor = content["records"][step]["gradients"][name]
        tensor.copy_(change(tensor))

    return edit


def record(step, **values):
    return lambda content: content["records"][step].update(values)


def double_rate(content):
    content["metadata"]["learning_rate"] = 0.02
    for step in content["records"]:
        step["optimizer"] = {name: (kind, 2 * rate) for name, (kind, rate) in step["optimizer"].items()}


def zero(kind, name):
    def edit(content):
        for item in content["records"]:
            item[kind][name].zero_()

    return edit


def shift(content):
    content["records"][1]["parameters"]["0.weight"] += 1e-3


@pytest.mark.parametrize(
    ("mode", "rank", "change", "broken", "words"),
    [
        (
            "ddp",
            2,
            gradient(1, "2.bias", lambda g: g + torch.nan),
            "finite",
            "rank 2, step 2, gradients 2.bias[0]",
        ),
        ("ddp", None, zero("gradients", "2.bias"), "nonzero", "gradients 2.bias: all zero at every step"),
        (
            "fsdp",
            1,
            gradient(0, "0.weight", lambda g: 1.001 * g),
            "ranks agree",
            "rank 1, step 1, gradients 0.weight",
        ),
        ("ddp", None, record(0, output=torch.ones(128, 128)), "outputs", "ranks 1-3, step 1, outputs output"),
        ("tp", 3, record(2, output=torch.ones(512, 128)), "outputs", "rank 3, step 3, outputs output["),
        (
            "ddp",
            1,
            record(1, loss=0.75),
            "loss",
            "rank 1, step 2, losses global loss: it is 0.75, the mean of",
        ),
        ("tp", None, shift, "update", "ranks 0-3, step 2, deltas 0.weight"),
        ("simplefsdp_tp", None, double_rate, "sgd", "ranks 0-3, step 1, deltas 0.weight"),
    ],
)
def test_broken_invariant_is_told(copy, check, mode, rank, change, broken, words):
    directory = copy(mode)
    if rank is None:
        edit_all(directory, change)
    else:
        edit(directory, rank, change)
    status, out, _ = check(directory)
    assert status == 1
    assert f"Broken invariant: {broken} (actual run)" in out
    assert words in out
    assert f": {broken}: {INVARIANTS[broken]}" in out
    assert out.endswith(f"FAIL invariants ranks={RANKS} steps={STEPS}\n")


def test_other_optimizer_is_not_held_to_sgd(copy, check):
    directory = copy("ddp")
    edit_all(directory, lambda content: content["metadata"].update(learning_rate=0.02, optimizer="AdamW"))
    assert check(directory)[0] == 0


def test_both_runs_with_an_optimizer_that_they_do_not_name(copy, compare):
    def adam(content):
        parameters = content["records"][0]["initial"]
        for item in content["records"]:
            before = parameters
            parameters = {n: value - 0.01 * item["gradients"][n].sign() for n, value in before.items()}
            item["parameters"] = parameters
            item["deltas"] = {n: value - before[n] for n, value in parameters.items()}

    one = copy("ddp")
    two = copy_run(one, one.parent / "again")
    for directory in (one, two):
        edit_all(directory, adam)
    done = compare("--reference-dir", one, "--actual-dir", two, "--world-size", RANKS)
    assert done.status == 1
    assert "an optimizer such as Adam, not plain SGD" in done.out
    assert "Broken invariant: sgd (actual run); another optimizer than plain SGD? Name it: " in done.out
    assert "rounding" not in done.out.partition("Likely cause")[2]


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (1, "rank 1, step 1, gradients 0.bias: rank 0 has it, this rank has not"),
        (0, "broken 18 times: ranks agree"),  # gradients and deltas of the three others in three steps
    ],
)
def test_gradient_that_one_rank_lacks(copy, check, rank, said):
    directory = copy("ddp")

    def drop(content):
        for item in content["records"]:
            del item["gradients"]["0.bias"], item["deltas"]["0.bias"]

    edit(directory, rank, drop)
    status, out, _ = check(directory)
    assert status == 1
    assert said in out


def test_both_runs_are_checked_beside_the_comparison(runs, copy, check):
    # The fault is in both: a comparison of the two finds no difference.
    one, two = copy("ddp"), None
    edit_all(one, zero("gradients", "2.bias"))
    two = shutil.copytree(one, one.parent / "again")
    edit(two, 0, lambda content: content["metadata"].update(saved_at=1.0))
    status, out, _ = check(two, "--reference-dir", one)
    assert status == 1
    assert "0 of 184 tensors failed" in out
    assert "invariants of the reference run: 5 of 7 hold" in out
    assert "Broken invariant: nonzero (actual run)" in out


def own_loss(value):
    def edit(content):
        for item in content["records"]:
            item["local_loss"] = value

    return edit


def silent_replica(content):
    for item in content["records"]:
        item["output"].zero_()


def restless(content):
    for step, item in enumerate(content["records"]):
        for kind in ("gradients", "deltas"):
            del item[kind]["0.bias"]
        item["parameters"]["0.bias"] = item["parameters"]["0.bias"] + step


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (2, own_loss(float("inf")), "rank 2, step 1, losses global loss: the rank's own loss is inf"),
        (1, silent_replica, "rank 1, step 1, outputs output: all zero at every step"),
        (3, lambda c: c["records"][0].update(output=torch.ones(100, 128)), "its shape is [100, 128]"),
        (
            None,
            gradient(0, "2.bias", lambda g: g + torch.inf),
            "ranks 0-3, step 1, gradients 2.bias[0]: it is inf",
        ),
        (None, restless, "ranks 0-3, step 1, parameters 0.bias: it changes, though it has no gradient"),
    ],
)
def test_what_hides_from_simpler_checks(copy, check, rank, change, words):
    directory = copy("ddp")
    edit_all(directory, change) if rank is None else edit(directory, rank, change)
    status, out, _ = check(directory)
    assert status == 1
    assert words in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["metadata"].update(dp_rank=7), "dp_rank is 7 of dp_degree 4"),
        (lambda c: c["metadata"].update(dp_rank=-1), "dp_rank is -1 of dp_degree 4"),
        (lambda c: c["metadata"].update(dp_degree=True), "dp_degree is missing or no whole number"),
        (lambda c: c["metadata"].update(dp_rank=0), "name 1 data-parallel replicas, dp_degree is 4"),
        (lambda c: c["metadata"].update(learning_rate=None), "learning_rate is None, expected a number"),
        (
            lambda c: c["records"][0]["parameters"].update({"2.bias": None}),
            "another shape than the parameter",
        ),
        (lambda c: c["records"][0].update(slack=[1]), "slack is no dictionary"),
    ],
)
def test_impossible_metadata_and_records_are_invalid_input(copy, check, change, words):
    directory = copy("ddp")
    edit_all(directory, change)
    status, _, err = check(directory)
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_json_holds_what_was_found(runs, copy, check, tmp_path):
    directory = copy("ddp")
    edit(directory, 2, gradient(1, "2.bias", lambda g: g + torch.nan))
    status, _, _ = check(directory, "--reference-dir", runs("ddp").directory, "--json", tmp_path / "c.json")
    assert status == 2  # the same saved_at: a copy of the reference
    assert not (tmp_path / "c.json").exists()
    edit(directory, 0, lambda content: content["metadata"].update(saved_at=1.0))
    status, _, _ = check(directory, "--reference-dir", runs("ddp").directory, "--json", tmp_path / "c.json")
    assert status == 1
    found = json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)
    assert found["schema"] == "parity-comparison-1" and found["verdict"] == "FAIL"
    assert (found["world_size"], found["steps"], found["failed_ranks"]) == (RANKS, STEPS, [2])
    assert found["first"]["kind"] == "gradients" and found["first"]["name"] == "2.bias"
    assert (found["first"]["step"], found["first"]["ranks"]) == (2, [2])
    assert "not finite" in found["cause"]
    assert len(found["scores"]) == RANKS and all(len(row) == STEPS + 1 for row in found["scores"])
    assert found["scores"][2][2] is None and found["scores"][1] == [0.0] * (STEPS + 1)
    row = next(row for row in found["tensors"] if (row["kind"], row["name"]) == ("gradients", "2.bias"))
    assert (row["compared"], row["mismatched"], row["worst_rank"], row["worst_step"]) == (12, 1, 2, 2)


def test_names_for_output_files_are_checked_before_anything_is_removed(runs, check, tmp_path):
    victim = shutil.copy(runs("ddp").directory / "rank-0.pt", tmp_path)
    for option, path, words in (
        ("--json", victim, "a name ending in .json"),
        ("--json", tmp_path / "none" / "x.json", "in an existing directory"),
    ):
        status, _, err = check(runs("ddp").directory, option, path)
        assert status == 2
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err
    assert (tmp_path / "rank-0.pt").exists()


def nothing_returned(content):
    for item in content["records"]:
        item.update(output=None, loss=None, local_loss=None)


def test_runs_without_outputs_and_losses_are_compared_by_the_rest(copy, check):
    one = copy("ddp")
    edit_all(one, nothing_returned)
    two = copy_run(one, one.parent / "again")
    status, out, err = check(two, "--reference-dir", one, "--json", one.parent / "c.json")
    assert (status, err) == (0, "")
    assert out.count("none") == 2 * STEPS  # in the table of losses
    assert "invariants of the actual run: 5 of 5 hold; nothing to check for outputs, loss" in out
    found = json.loads((one.parent / "c.json").read_text())
    assert [row["kind"] for row in found["kinds"]] == ["gradients", "parameters", "deltas"]
    assert found["losses"][0] == {"step": 1, "actual": None, "reference": None}
    edit(two, 2, gradient(1, "2.bias", lambda g: g + 1))
    status, out, _ = check(two, "--reference-dir", one)
    assert status == 1 and "rank 2, step 2, gradients 2.bias" in out


def test_a_loss_of_its_own_without_a_global_one(copy, check):
    directory = copy("ddp")
    edit(directory, 1, lambda content: [item.update(loss=None) for item in content["records"]])
    status, out, err = check(directory)
    assert (status, err) == (0, ""), out


def test_outputs_and_losses_of_one_run_only_are_a_mismatch(runs, copy, check):
    directory = copy("ddp")
    edit_all(directory, nothing_returned)
    edit(directory, 0, lambda content: content["metadata"].update(saved_at=1.0))
    status, out, _ = check(directory, "--reference-dir", runs("ddp").directory)
    assert status == 1
    assert "outputs output: there is none in the actual run: the script returned none" in out


def test_a_rank_may_return_nothing(copy, check):
    # As the stages of a pipeline that do not compute the loss. Then its mean is not known here.
    directory = copy("ddp")
    edit(directory, 1, nothing_returned)
    status, out, _ = check(directory)
    assert status == 0, out
    assert "6 of 6 hold; nothing to check for loss" in out
    edit(directory, 2, own_loss(float("nan")))
    status, out, _ = check(directory)
    assert status == 1
    assert "rank 2, step 1, losses global loss: the rank's own loss is nan" in out
