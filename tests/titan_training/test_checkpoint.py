"""A Hugging Face checkpoint through TorchTitan's converter, and a resume from step 5, both recorded."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch, read_logs, run

from training_recorded_runs import Recording

pytestmark = pytest.mark.xdist_group("checkpoint")  # one process has the fixtures' runs
RECIPE = ["--module", "titan.llama3", "--config", "simple_fsdp_llama3_debugmodel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all runs, with the assets."""
    folder = tmp_path_factory.mktemp("checkpoint")
    done = run(sys.executable, ROOT / "titan/make_assets.py", "--output", folder / "assets")
    assert done.status == 0, done.err
    return folder


def train(folder: Path, name: str, ranks: int, recorder: list, *options) -> None:
    """Record TorchTitan's training; its checkpoints are in folder/name/checkpoint, its log is name.log."""
    assets = ["--hf_assets_path", folder / "assets/tokenizer", "--dataloader.dataset", "c4_test"]
    assets += ["--dataloader.dataset_path", folder / "assets/c4_test", "--dump_folder", folder / name]
    recorder = [ROOT / "record_training.py", "--output-dir", folder / f"{name}-recorded", *recorder]
    logs = folder / f"{name}-logs"
    started = [*recorder, ROOT / "titan/train.py", *RECIPE, *assets, "--checkpoint.enable", *options]
    done = launch(ranks, logs, *started, HF_DATASETS_CACHE=str(folder / "assets/cache"), TITAN_DEVICE="cpu")
    assert done.status == 0, done.err + read_logs(logs)
    (log,) = logs.rglob("0/stdout.log")
    (folder / f"{name}.log").write_text(log.read_text())


@pytest.fixture(scope="module")
def whole(folder):
    """Eight steps on two ranks, from a Hugging Face checkpoint of the model after one step on one rank."""
    as_hf = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    train(folder, "made", 1, ["--steps", 1, "--afterwards", "continue"], "--training.steps", 1, *as_hf)
    assert list((folder / "made/checkpoint/step-1").glob("*.safetensors"))
    train(folder, "whole", 2, ["--skip", 5, "--afterwards", "continue"], *from_hf(folder))
    return folder


def from_hf(folder: Path) -> list:
    loaded = ["--checkpoint.initial_load_path", folder / "made/checkpoint/step-1"]
    loaded += ["--checkpoint.initial_load_in_hf", "--checkpoint.interval", 5, "--training.steps", 8]
    return [*loaded, "--checkpoint.keep_latest_k", 0]


def resume(folder: Path, name: str, *options) -> None:
    shutil.copytree(folder / "whole/checkpoint/step-5", folder / name / "checkpoint/step-5")
    train(folder, name, 2, ["--afterwards", "continue"], *from_hf(folder), *options)


def check_run(folder: Path, name: str) -> tuple[int, str]:
    done = run(sys.executable, ROOT / "titan/check_run.py", folder / f"{name}.log")
    return done.status, done.out


def compare(folder: Path, name: str) -> tuple[int, str]:
    runs = ["--reference-dir", folder / "whole-recorded", "--actual-dir", folder / f"{name}-recorded"]
    done = run(sys.executable, ROOT / "compare_training.py", *runs)
    return done.status, done.out


def test_a_hugging_face_checkpoint_is_loaded_on_another_mesh(whole):
    train(whole, "loaded", 2, ["--steps", 1], *from_hf(whole))
    saved = Recording(whole / "made-recorded").tensors(1, "parameters")
    loaded = Recording(whole / "loaded-recorded").tensors(1, "before")
    assert len(saved) > 20 and set(saved) == set(loaded)
    for name, (expected,) in saved.items():
        for actual in loaded[name]:
            assert torch.allclose(actual.sketch, expected.sketch, rtol=1e-12, atol=1e-12)


def test_a_run_resumed_at_step_5_equals_the_uninterrupted_one(whole):
    resume(whole, "resumed")
    for name, steps in (("whole", 8), ("resumed", 3)):
        status, said = check_run(whole, name)
        assert status == 0 and f"steps={steps}, last loss " in said
    assert said.split("last loss")[1] == check_run(whole, "whole")[1].split("last loss")[1]
    status, said = compare(whole, "resumed")
    assert status == 0, said
    assert said.splitlines()[-1] == "PASS comparison ranks=2 steps=3"
    (gradients,) = (line.split() for line in said.splitlines() if line.startswith("gradients"))
    assert gradients[1:] == ["144", "0", "0", "eps", "--norm-eps", "0"]


def test_a_resume_that_forgets_where_the_data_was_is_found(whole):
    resume(whole, "forgetful", "--checkpoint.exclude_from_loading", "dataloader")
    assert check_run(whole, "forgetful")[0] == 0  # no log shows it
    status, said = compare(whole, "forgetful")
    assert status == 1
    assert "First in causal order: ranks 0-1, step 1, inputs samples" in said
