"""Scripts of other people, as they are, recorded and compared: Hugging Face's Trainer."""

import sys

import pytest
from conftest import ROOT, launch, read_logs, run

from training_comparison import ranks_of
from training_recorded_comparison import compare_recordings
from training_recorded_diagnosis import cause_of_recordings
from training_recorded_runs import Recording
from training_recorded_tolerance import Drift
from training_tolerance import DEFAULTS, DRIFT_EPS, DRIFT_FACTOR

RECORDER, TRAINER = ROOT / "record_training.py", ROOT / "tests" / "tools" / "hf_trainer.py"
RUNS = {  # ranks and arguments
    "one": (1,),
    "accumulated": (1, "--batch", 4, "--accumulate", 2),
    "ddp": (2, "--batch", 4),
    "local": (2, "--batch", 4, "--local-mean"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What Trainer computes on one rank and two, by the name of the run."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    for name, (ranks, *arguments) in RUNS.items():
        command = [RECORDER, "--output-dir", folder / name, "--steps", 3]
        command += [TRAINER, "--output-dir", folder / "trainer", *arguments]
        logs = folder / f"{name}-logs"
        done = launch(ranks, logs, *command) if ranks > 1 else run(sys.executable, *command)
        assert done.status == 0, done.err + read_logs(logs)
    return {name: Recording(folder / name) for name in RUNS}


def compare(recorded, name):
    return compare_recordings(recorded["one"], recorded[name], DEFAULTS)


@pytest.mark.parametrize("name", ["accumulated", "ddp"])
def test_the_same_samples_agree_on_two_ranks_and_in_two_microbatches(recorded, name):
    outcome = compare(recorded, name)
    assert not outcome.findings
    kinds = outcome.comparison.by_kind()
    ranks = recorded[name].world_size
    assert len(kinds["inputs"]) == 3 * ranks  # every step's samples were found again
    assert len(kinds["activations"]) == 3 * 32 * ranks  # of every module, the rotary embedding's among them
    assert len(kinds["gradients"]) == 3 * 21 * ranks
    # Trainer divides the loss of a microbatch by the labels of all of them.
    losses = "losses of the actual run: sum over the microbatches, mean over the replicas"
    assert outcome.comparison.notes == ([losses] if name == "accumulated" else [])


def test_a_mean_over_each_ranks_own_tokens_is_found_in_the_loss(recorded):
    outcome = compare(recorded, "local")
    first = outcome.findings[0]
    assert (first.step, first.kind) == (1, "losses")
    assert ranks_of(first, outcome.findings) == [0, 1]
    cause = cause_of_recordings(first, [0, 1], recorded["one"], recorded["local"])
    assert "a mean of means: ranks or microbatches have 35, 30 of 65 valid labels" in cause
    of_step_1 = [finding for finding in outcome.findings if finding.step == 1]
    assert {finding.kind for finding in of_step_1} == {"losses", "gradients", "parameters"}


def test_what_one_weight_differs_by_is_allowed_everywhere_up_to_a_bound():
    # nanoGPT: one element of a weight that Adam moved otherwise changes gradients of other layers.
    drift, eps = Drift(), 2.0**-23
    assert drift.of_all(3.0, eps) == 0
    drift.measured = {"a.weight": (4 * eps, 1.0, 2), "a.bias": (0.0, 0.0, 1), "b.weight": (3 * eps, 1.0, 2)}
    drift.measured["key.bias"] = 1.0, 1.0, 1  # without a gradient it is anything
    drift.silent = {"key.bias"}
    assert drift.of_all(3.0, eps) == pytest.approx(3.0 * DRIFT_FACTOR * 5 * eps)
    drift.silent = set()
    assert drift.of_all(3.0, eps) == 3.0 * DRIFT_EPS * eps
