"""The oracle: right by autograd, right by the anchors, and a reference for any number of ranks."""

import numpy as np
import pytest
import torch
from conftest import RANKS, SCRIPTS, STEPS
from test_training import ANCHORS, MODEL

import oracle_train
from training_common import make_batch, make_model, run_script


@pytest.mark.parametrize("model", ANCHORS)
def test_losses_are_the_anchors(oracle, model):
    content = torch.load(oracle(model) / "rank-0.pt", weights_only=True)
    assert [record["loss"] for record in content["records"]] == pytest.approx(ANCHORS[model], abs=1e-6)
    assert content["records"][0]["output"].dtype == torch.float64
    assert [path.name for path in oracle(model).iterdir()] == ["rank-0.pt"]


@pytest.mark.parametrize("kind", ANCHORS)
def test_derivatives_are_those_of_autograd(kind):
    model = make_model(kind, 3).double()
    records = oracle_train.train_oracle(kind, 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, record in enumerate(records):
        batch = make_batch(step)[0].double()
        optimizer.zero_grad()
        output = model(batch)
        loss = torch.nn.functional.mse_loss(output, batch.cos())
        loss.backward()
        optimizer.step()
        assert torch.allclose(record["output"], output, rtol=0, atol=1e-13)
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-13)
        for name, parameter in model.named_parameters():
            assert torch.allclose(record["gradients"][name], parameter.grad, rtol=1e-11, atol=1e-17)
            assert torch.allclose(record["parameters"][name], parameter, rtol=0, atol=1e-14)


def test_batch_is_that_of_the_job():
    for step in range(3):
        batch, target = oracle_train.make_batch_numpy(step)
        assert np.array_equal(batch, make_batch(step)[0].double().numpy())
        assert np.allclose(target, make_batch(step)[1].numpy(), rtol=0, atol=1e-7)


def test_slack_is_what_a_flipped_relu_changes():
    # At seed 1, step 1, pre-activations lie so near to zero that float32 may take either side.
    model = make_model("eager", 1)
    parameters = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    _, _, gradients, slack = oracle_train.train_step(parameters, 0)
    rows = np.flatnonzero(slack["0.bias"])
    assert 0 < len(rows) < 5
    x, target = oracle_train.make_batch_numpy(0)
    z = x @ parameters["0.weight"].T + parameters["0.bias"]
    doubtful = np.abs(z) <= oracle_train.KINK * np.abs(z).max()
    y = np.maximum(z, 0) @ parameters["2.weight"].T + parameters["2.bias"]
    dh = 2 * (y - target) / y.size @ parameters["2.weight"]
    flipped = np.where((z > 0) ^ doubtful, dh, 0.0).T @ x
    difference = np.abs(flipped - gradients["0.weight"])
    assert difference.max() > 0 and (difference <= slack["0.weight"] * (1 + 1e-9) + 1e-18).all()
    assert set(np.flatnonzero(difference.max(axis=1) > 1e-15)) <= set(rows)


@pytest.mark.parametrize("mode", SCRIPTS)
def test_every_mode_agrees_with_the_oracle(runs, oracle, compare, mode):
    arguments = ["--reference-dir", oracle(MODEL[mode]), "--actual-dir", runs(mode).directory]
    done = compare(*arguments, "--world-size", RANKS)
    assert done.status == 0, done.out + done.err
    assert done.out.endswith(f"PASS comparison ranks={RANKS} steps={STEPS}\n")
    head = next(line for line in done.out.splitlines() if line.startswith("step"))
    assert head.split()[1:5] == ["reference", "oracle", "actual", "cpu"]
    assert "No accelerator was checked" in done.out
    for kind in ("outputs", "gradients", "parameters"):
        row = next(line for line in done.out.splitlines() if line.startswith(kind)).split()
        assert 0.1 < float(row[3]) < 5  # eps: rounding, neither none nor more


def test_oracle_of_another_job_is_invalid_input(runs, oracle, compare):
    arguments = ["--reference-dir", oracle("simplefsdp"), "--actual-dir", runs("ddp").directory]
    done = compare(*arguments, "--world-size", RANKS)
    assert done.status == 2
    assert "the runs differ in model: reference 'simplefsdp', actual 'eager'" in done.err


def test_oracle_refuses_bad_input(tmp_path, call):
    (tmp_path / "notes.txt").write_text("mine")
    for options, words in (
        (["--model", "eager", "--steps", "0"], "must be at least 1"),
        (["--steps", "1"], "--model"),
        (["--model", "eager", "--output-dir", tmp_path], "holds notes.txt"),
    ):
        done = call(lambda: run_script(oracle_train.main), *options)
        assert done.status == 2
        assert done.err.startswith("error: ") and done.err.count("\n") == 1 and words in done.err
