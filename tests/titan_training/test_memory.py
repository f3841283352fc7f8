"""titan/predict_memory.py: against the real allocator, its structure, and its command line."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import predict_memory as memory  # noqa: E402

# In a process of its own: the job of fake and real tensors, and the peak that the allocator saw.
BOTH = """
import json, sys
sys.path.insert(0, {titan!r})
import predict_memory as memory
layout, layers = json.loads(sys.argv[1]), int(sys.argv[2])
memory.start_fake_job(layout["ranks"])
import torch
fuse, keep = memory.bounds(layout["loss"])["upper"]
predicted = max(peak["bytes"] for peak in memory.measure(layout, layers)["upper"].values())
job = memory.Job(layout, layers)
job.allocate()
with torch.no_grad():
    for parameter in job.model.parameters():
        job.local(parameter).normal_(std=0.02)
for _ in range(2):
    job.step(fuse, keep)
held = [*job.model.parameters(), *job.model.buffers()]
held += [value for state in job.optimizer.state.values() for value in state.values()]
held = [job.local(tensor).untyped_storage() for tensor in held]
held = {{storage.data_ptr(): storage.nbytes() for storage in held}}
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
    job.step(fuse, keep)
peak = live = sum(held.values())
for event in profile.profiler.kineto_results.events():
    if event.name() == "[memory]":
        live += event.nbytes()
        peak = max(peak, live)
print(json.dumps([predicted, peak, sum(held.values())]))
"""


def layout(**changes) -> dict:
    usual = {"model": "llama3_debugmodel", "ranks": 4, "tp": 1, "checkpointing": "none", "sequence": 512}
    usual |= {"batch": 2, "loss": "eager", "dtype": "float32", "layers": [2, 4]}
    return usual | changes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_prediction_is_what_the_allocator_sees(tp, checkpointing):
    command = [sys.executable, "-c", BOTH.format(titan=str(ROOT / "titan"))]
    words = [json.dumps(layout(tp=tp, checkpointing=checkpointing, loss="bracket")), "2"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    predicted, peak, static = json.loads(done.stdout.splitlines()[-1])
    print(f"TP{tp} {checkpointing}: predicted {predicted}, allocator {peak}, static {static}")
    assert peak > 1.5 * static
    assert predicted == pytest.approx(peak, rel=0.01)


@pytest.fixture(scope="module")
def predict(tmp_path_factory):
    """A function that returns the prediction of a layout at reduced size, made once."""
    results = tmp_path_factory.mktemp("memory")
    return lambda **changes: memory.predict(
        layout(dtype="bfloat16", loss="bracket", ranks=64, **changes), results
    )


def test_line_through_two_and_four_layers_meets_six(tmp_path, predict):
    exact = layout(dtype="bfloat16", loss="bracket", ranks=64, model="llama3_8b", layers=[6])
    exact = memory.run_worker(exact, tmp_path)
    line = memory.run_worker(layout(dtype="bfloat16", loss="bracket", ranks=64, model="llama3_8b"), tmp_path)
    for bound in ("lower", "upper"):
        for phase in exact[0][bound]:
            points = [(n, run[bound][phase]["bytes"]) for n, run in zip((2, 4), line, strict=True)]
            assert memory.line_through(points, 6) == pytest.approx(exact[0][bound][phase]["bytes"], rel=0.01)


def test_order_of_layouts(predict):
    peaks = {
        (tp, checkpointing): predict(model="llama3_8b", tp=tp, checkpointing=checkpointing)
        for tp, checkpointing in ((1, "none"), (1, "selective"), (1, "full"), (4, "full"))
    }
    for bound in ("lower", "upper"):
        none, selective, full, tp4 = (prediction[bound] for prediction in peaks.values())
        assert none > selective > full > tp4
    # Static memory: float32 parameters and two moments of 8.03e9 parameters, over 64 ranks.
    for prediction in peaks.values():
        assert prediction["lower"] <= prediction["upper"]
        assert prediction["static"] == pytest.approx(8.03e9 * 12 / 64 / memory.GIB, rel=0.06)


def test_recipe_moves_the_prediction(monkeypatch, tmp_path):
    before = memory.fingerprint(layout())
    assert memory.fingerprint(layout()) == before
    assert memory.fingerprint(layout(tp=2)) != before
    (tmp_path / "titan").mkdir()
    for path in (ROOT / "titan").glob("*.py"):
        (tmp_path / "titan" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(memory, "HERE", tmp_path / "titan")
    assert memory.fingerprint(layout()) == before
    with (tmp_path / "titan/llama3.py").open("a") as file:
        file.write("# changed\n")
    assert memory.fingerprint(layout()) != before
