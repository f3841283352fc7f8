"""Any model's records: a bfloat16 language model with tied, frozen and normalised layers."""

import re
from functools import partial

import pytest
import torch
from conftest import ROOT, cpu_options, launch, read_logs, run_alone


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that returns the run of tests/tools/other_model.py on some ranks, right or wrong."""
    made = {}

    def train(ranks, mistake="none"):
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp("other")
            options = cpu_options(ranks, made[ranks] / "results")
            start = run_alone if ranks == 1 else partial(launch, ranks, made[ranks])
            done = start(ROOT / "tests" / "tools" / "other_model.py", *options, PYTHONPATH=str(ROOT))
            assert done.status == 0, done.err + read_logs(made[ranks])
        return made[ranks] / "results" / mistake

    return train


def test_two_ranks_agree_with_one(trained, compare):
    done = compare("--reference-dir", trained(1), "--actual-dir", trained(2), "--world-size", 2)
    assert done.status == 0, done.out + done.err
    assert "invariants of the actual run: 7 of 7 hold" in done.out
    rows = dict(re.findall(r"^(\w+) +\d+ +0 +([\d.]+) eps", done.out, re.MULTILINE))
    assert 0.01 < float(rows["gradients"]) < 8  # in eps of bfloat16
    assert done.out.endswith("PASS comparison ranks=2 steps=3\n")


def test_frozen_parameters_are_recorded_without_gradients(trained):
    content = torch.load(trained(2) / "rank-0.pt", weights_only=True)
    record = content["records"][2]
    assert {"frozen.weight", "embedding.weight", "norm.bias"} <= record["parameters"].keys()
    assert "head.weight" not in record["parameters"]  # it is the embedding's
    assert not any(name.startswith("frozen") for name in record["gradients"])
    assert record["gradients"].keys() == record["deltas"].keys()
    assert torch.equal(
        record["parameters"]["frozen.weight"], content["records"][0]["initial"]["frozen.weight"]
    )
    assert record["parameters"]["norm.weight"].dtype == torch.bfloat16


def test_summed_gradients_are_named(trained, compare):
    actual = trained(2, "summed")
    done = compare("--reference-dir", trained(1), "--actual-dir", actual, "--world-size", 2)
    assert done.status == 1
    assert "gradients of every rank are 2.00x the reference: summed over the 2 data-parallel" in done.out
    assert re.search(r"First in causal order: ranks 0-1, step 1, gradients hidden\.bias", done.out)
