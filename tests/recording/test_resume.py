"""record_training.py --skip: a run that was resumed from a checkpoint, against the uninterrupted one."""

import pytest
from conftest import ROOT, fork

from training_recordings import read_rank_file

TRAINS = """
import os, sys
from functools import partial
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

folder, first, steps, *others = sys.argv[1:]
first, steps = int(first), int(steps)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
bare = model
if ranks > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
sgd = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01)
optimizer = (sgd if "sgd" in others else torch.optim.AdamW)(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
inputs, targets = (torch.randn(10, 8, size, generator=generator) for size in (16, 4))
if first:
    get_optimizer_state_dict(bare, optimizer)  # makes its state, by a step at rate zero
    assert optimizer.state
    state = torch.load(f"{folder}/{optimizer.__class__.__name__}.pt")
    bare.load_state_dict(state["model"])
    if "forgets-optimizer" in others:
        optimizer.state.clear()
    else:
        optimizer.load_state_dict(state["optimizer"])
for step in range(0 if "forgets-data" in others else first, steps):
    x, y = (tensor[step].chunk(ranks)[rank] for tensor in (inputs, targets))
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4 and "saves" in others:
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{folder}/{optimizer.__class__.__name__}.pt")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of an uninterrupted run from its sixth step on, of resumed ones, and their statuses."""
    folder = tmp_path_factory.mktemp("resume")
    script = folder / "train.py"
    script.write_text(TRAINS)

    def record(name: str, ranks: int, *arguments, skip: int = 0) -> tuple:
        options = ["--output-dir", folder / name, "--skip", skip]
        return ranks, ROOT / "record_training.py", *options, script, folder, *arguments

    whole = {"whole": record("whole", 1, 0, 8, "saves", skip=5)}
    whole["whole-sgd"] = record("whole-sgd", 1, 0, 8, "saves", "sgd", skip=5)
    statuses = fork(folder, whole)
    jobs = {
        "resumed": record("resumed", 1, 5, 8),
        "two": record("two", 2, 5, 8),
        "optimizer": record("optimizer", 1, 5, 8, "forgets-optimizer"),
        "resumed-sgd": record("resumed-sgd", 1, 5, 8, "sgd"),
        "optimizer-sgd": record("optimizer-sgd", 1, 5, 8, "forgets-optimizer", "sgd"),
        "data": record("data", 1, 5, 8, "forgets-data"),
        "soon": record("soon", 1, 0, 7, skip=5),
        "sooner": record("sooner", 1, 0, 4, skip=5),
    }
    return folder, statuses | fork(folder, jobs)


@pytest.mark.parametrize(
    ("whole", "actual"), [("whole", "resumed"), ("whole", "two"), ("whole-sgd", "resumed-sgd")]
)
def test_a_resumed_run_equals_the_uninterrupted_one(recorded, compare, whole, actual):
    folder, statuses = recorded
    assert statuses[whole] == [0] and statuses[actual] == [0] * len(statuses[actual])
    done = compare("--reference-dir", folder / whole, "--actual-dir", folder / actual)
    assert (done.status, done.err) == (0, "")
    assert "steps=3" in done.out
    step = read_rank_file(folder / "whole/rank-0.pt")["steps"][0]
    assert set(step["before"]) == set(step["parameters"]) and len(step["activations"]) == 4


@pytest.mark.parametrize(
    ("whole", "forgotten", "first", "cause"),
    [
        ("whole", "optimizer", "parameters 0.weight", "the optimizer begins without momentum or moments"),
        ("whole-sgd", "optimizer-sgd", "parameters 0.weight", "the optimizer begins without momentum or"),
        ("whole", "data", "inputs samples", "none of the reference's 8 samples is there"),
    ],
)
def test_what_a_resume_forgets_is_found_in_its_first_step(recorded, compare, whole, forgotten, first, cause):
    done = compare("--reference-dir", recorded[0] / whole, "--actual-dir", recorded[0] / forgotten)
    assert done.status == 1
    assert f"First in causal order: rank 0, step 1, {first}" in done.out
    assert f"Likely cause: {cause}" in done.out


@pytest.mark.parametrize("kind", ["", "-sgd"])
def test_a_reference_without_a_state_names_no_cause(recorded, compare, kind):
    """Any wrong update differs from that of a first step."""
    done = compare(
        "--reference-dir", recorded[0] / f"optimizer{kind}", "--actual-dir", recorded[0] / f"whole{kind}"
    )
    assert done.status == 1 and "Likely cause: not known" in done.out


def test_a_script_that_ends_too_soon_is_told_what_was_wanted(recorded):
    folder, statuses = recorded
    for name, seen in (("soon", 7), ("sooner", 4)):
        assert statuses[name] == [2]
        said = f"error: the script ended after {seen} of --skip 5 and --steps 3 optimizer steps: "
        said += "nothing was recorded; give fewer steps\n"
        assert (folder / f"{name}-0.err").read_text() == said
