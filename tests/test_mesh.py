"""A mesh of replicas and tensor-parallel ranks: each rank is held against its own part, in made-up runs.

Ranks 0 and 1 are replica 0, ranks 2 and 3 replica 1.
"""

import shutil
from functools import partial

import pytest
import torch
from conftest import edit_all
from made_runs import broken, make_run, mismatched, noise, output


@pytest.fixture
def check(compare_made):
    """Judge a run by itself, unless told against what."""
    return partial(compare_made, against=None)


def shift(kind, error, name="weight", step=1):
    return lambda content: content["records"][step - 1][kind][name].add_(error)


def metadata(**values):
    return lambda content: content["metadata"].update(values)


def nothing(content):
    pass


@pytest.mark.parametrize("against", [None, "run", "whole"])
def test_clean_mesh_passes(check, against):
    done = check(nothing, against=against)
    assert (done.status, done.err) == (0, "")
    assert "invariants of the actual run: 7 of 7 hold" in done.out
    assert done.out.count("parity=passed" if against else "invariants=held") == 4
    if against:
        # Two steps of an output, a loss and two tensors of each kind, and the initial parameters.
        counts = {"outputs": 8, "losses": 8, "gradients": 16, "parameters": 24, "deltas": 16}
        for kind, count in counts.items():
            assert f"\n{kind:12}{count:9}{0:12}{'0 eps':>16}" in done.out


@pytest.mark.parametrize("against", ["run", "whole"])
@pytest.mark.parametrize(
    ("ranks", "said"),
    [((0, 1), "ranks 0-1, "), ((2, 3), "ranks 2-3, "), ((3,), "rank 3, "), ((1,), "rank 1, ")],
)
def test_outputs_are_compared_with_those_of_the_own_replica(check, against, ranks, said):
    done = check(output(lambda o: 1.001 * o), *ranks, against=against)
    assert done.status == 1
    assert f"First in causal order: {said}step 1, outputs output[" in done.out
    assert mismatched(done.out) == {"outputs": len(ranks)}
    failed = {rank for rank in range(4) if f"rank={rank} parity=FAILED mismatched_tensors=1" in done.out}
    assert failed == set(ranks)


def test_outputs_of_the_reference_replica_are_compared_too(check):
    done = check(output(lambda o: 1.001 * o), 2, 3, against="run", of="reference")
    assert mismatched(done.out) == {"outputs": 2}
    assert "First in causal order: ranks 2-3, step 1, outputs output[" in done.out


@pytest.mark.parametrize("rank", range(1, 4))
@pytest.mark.parametrize("kind", ["gradients", "parameters", "deltas"])
def test_every_rank_is_compared(check, rank, kind):
    done = check(shift(kind, 1e-3, step=2), rank, against="run")
    assert mismatched(done.out) == {kind: 1}
    assert f"First in causal order: rank {rank}, step 2, {kind} weight[" in done.out
    assert check(shift(kind, 1e-3, step=2), rank).status == 1


def test_a_fault_of_all_ranks_is_told_of_all(check):
    done = check(shift("gradients", 1e-3), 0, 1, 2, 3, against="run")
    assert mismatched(done.out) == {"gradients": 4}
    assert "First in causal order: ranks 0-3, step 1, gradients weight[" in done.out


@pytest.mark.parametrize(
    ("swapped", "said"),
    [
        ({"tp_rank": 0}, "rank 1 has tp_rank 1 in the reference, 0 in the actual run"),
        ({"dp_rank": 1}, "rank 1 has dp_rank 0 in the reference, 1 in the actual run"),
    ],
)
def test_ranks_of_another_place_in_the_mesh_are_not_compared(check, swapped, said):
    done = check(metadata(**swapped), 1, against="run")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert said in done.err


@pytest.mark.parametrize("rank", range(4))
def test_own_losses_of_all_ranks_make_the_mean(check, rank):
    # The global loss is right on every rank, so what is wrong is one rank's own.
    done = check(lambda content: content["records"][0].update(local_loss=2.0), rank)
    assert done.status == 1
    assert broken(done.out) == {"loss"}
    assert "First in causal order: ranks 0-3, step 1, losses global loss: it is 1.5, the mean of" in done.out


@pytest.mark.parametrize(("error", "status"), [(15, 0), (17, 1)])
def test_the_global_loss_is_the_mean_within_16_eps_of_float32(check, error, status):
    def change(content):
        content["records"][0]["loss"] *= 1 + error * 2.0**-23

    assert check(change, 0, 1, 2, 3).status == status


def test_a_broken_invariant_of_the_reference_alone_counts(check):
    done = check(
        lambda content: content["records"][0].update(local_loss=2.0), 1, against="run", of="reference"
    )
    assert done.status == 1
    assert "invariants of the actual run: 7 of 7 hold" in done.out
    assert "invariants of the reference run: 6 of 7 hold" in done.out
    assert "Broken invariant: loss (reference run)" in done.out
    assert mismatched(done.out) == {}


def test_a_step_without_any_gradient(check):
    def still(step):
        return {"weight": (0.0 if step == 2 else 1.0) * noise(6, 4, seed=step)}

    parameters = {"weight": noise(6, 4, seed=9)}
    done = check(nothing, parameters=parameters, gradients=still, steps=3)
    assert done.status == 1
    assert broken(done.out) == {"nonzero"}
    assert "step 2, gradients weight: all gradients of this step are zero" in done.out
    assert check(nothing, parameters=parameters, gradients=lambda step: still(1)).status == 0


def test_one_of_two_gradients_may_be_zero_in_a_step(check):
    def gradients(step):
        return {"weight": noise(24, 4, seed=step), "bias": (0.0 if step == 1 else 1.0) * noise(24, seed=step)}

    assert check(nothing, gradients=gradients).status == 0


@pytest.mark.parametrize("kind", ["gradients", "parameters", "deltas", "output"])
def test_a_rank_with_another_type_differs_though_its_values_are_equal(check, kind):
    exact = {
        "parameters": {"weight": torch.arange(1.0, 9)},
        "gradients": lambda step: {"weight": torch.full((8,), 2.0)},
        "outputs": lambda step: torch.arange(1.0, 33).reshape(8, 4),
        "rate": 0.5,
    }

    def change(content):
        record = content["records"][0]
        if kind == "output":
            record["output"] = record["output"].double()
        else:
            record[kind]["weight"] = record[kind]["weight"].double()

    done = check(change, 3, **exact)
    assert done.status == 1
    assert broken(done.out) == {"outputs" if kind == "output" else "ranks agree"}
    assert "rank 3, step 1" in done.out and "its type is float64, expected float32" in done.out
    done = check(change, 3, against="run", **exact)
    assert mismatched(done.out) == {"outputs" if kind == "output" else kind: 1}


def test_a_rank_file_under_another_name_is_refused(runs, compare, tmp_path):
    # All ranks of a tensor-parallel run hold the same tensors: only the metadata tells.
    directory = shutil.copytree(runs("tp").directory, tmp_path / "tp")
    shutil.copy(directory / "rank-0.pt", directory / "rank-3.pt")
    done = compare("--actual-dir", directory, "--world-size", 4)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "rank-3.pt says rank 0, expected 3" in done.err
    shutil.copy(runs("tp").directory / "rank-3.pt", directory / "rank-0.pt")
    assert "rank-0.pt says rank 3, expected 0" in compare("--actual-dir", directory, "--world-size", 4).err


@pytest.mark.parametrize(("error", "status"), [(0.0, 1), (1e-6, 1), (1e-5, 0)])
def test_replicas_with_the_same_outputs_got_the_same_samples(check, error, status):
    def outputs(step):
        half = noise(4, 24, seed=step)
        return torch.cat([half, half + error * half.abs().max()])

    done = check(nothing, outputs=outputs)
    assert done.status == status
    said = "ranks 2-3, step 1, outputs output: the same as those of replica 0: both got the same samples"
    assert broken(done.out) == ({"outputs"} if status else set())
    assert (said.replace("ranks 2-3", "rank 2") in done.out) == bool(status)


def test_replicas_may_agree_in_their_first_outputs(check):
    # As where each batch starts with the same prompt: the first elements alone settle nothing.
    def outputs(step):
        whole = noise(8, 24, seed=step)
        whole[4] = whole[0]
        return whole

    assert check(nothing, outputs=outputs).status == 0


def test_an_old_result_does_not_outlive_a_comparison_that_broke_off(compare, tmp_path):
    reference, actual = make_run(tmp_path / "reference"), make_run(tmp_path / "actual")
    path = tmp_path / "result.json"
    options = ["--reference-dir", reference, "--actual-dir", actual, "--world-size", 4, "--json", path]
    assert compare(*options).status == 0 and path.exists()
    edit_all(actual, metadata(seed=1))
    assert compare(*options).status == 2
    assert not path.exists()
    assert compare(*options[2:]).status == 0 and path.exists()
    (actual / "rank-2.pt").write_bytes(b"")
    assert compare(*options[2:]).status == 2
    assert not path.exists()


def test_the_rank_with_nan_is_named_and_not_the_others_of_its_replica(check):
    done = check(output(lambda values: values * torch.nan), 2)
    assert done.status == 1
    assert "First in causal order: rank 2, step 1, outputs output[0, 0]: it is nan" in done.out
