"""titan/predict_memory.py: against the real allocator, its structure, and its command line."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import predict_memory as memory  # noqa: E402

# In a process of its own: for each checkpointing the predicted peak, the peak that the allocator saw for
# the same step on real tensors, and the bytes of parameters, buffers and optimizer state.
BOTH = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "titan")!r})
import predict_memory as memory
layout = json.loads(sys.argv[1])
memory.start_fake_job(layout["ranks"])
import torch

figures = {{}}
for layout["checkpointing"] in ("none", "selective", "full"):
    predicted = memory.measure(layout, 2)
    for bound, how in memory.bounds(layout["loss"]).items():
        job = memory.Job(layout, 2)
        job.allocate()
        job.make_optimizer(how["fused_optimizer"])
        with torch.no_grad():
            for parameter in job.model.parameters():
                job.local(parameter).normal_(std=0.02)
        for _ in range(2):
            job.step(how["fused_loss"])
        held = [*job.model.parameters(), *job.model.buffers(), *job.gradients()]
        held += [value for state in job.optimizer.state.values() for value in state.values()]
        held = [job.local(tensor).untyped_storage() for tensor in held]
        peak = live = static = sum({{storage.data_ptr(): storage.nbytes() for storage in held}}.values())
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            job.step(how["fused_loss"])
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        expected = max(phase["bytes"] for phase in predicted[bound].values())
        figures[layout["checkpointing"] + " " + bound] = [expected, peak, static]
print(json.dumps(figures))
"""


def layout(**changes) -> dict:
    usual = {"model": "llama3_debugmodel", "ranks": 4, "tp": 1, "checkpointing": "none", "sequence": 512}
    usual |= {"batch": 2, "loss": "eager", "dtype": "float32", "layers": [2, 4]}
    return usual | changes


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "bfloat16"), (2, "float32")])
def test_prediction_is_what_the_allocator_sees(tp, dtype):
    done = subprocess.run(
        [sys.executable, "-c", BOTH, json.dumps(layout(tp=tp, dtype=dtype, loss="bracket"))],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"TP{tp} {dtype}: predicted, allocator's peak, static: {figures}")
    for predicted, peak, static in figures.values():
        assert peak > 1.2 * static
        assert predicted == pytest.approx(peak, rel=0.01)
    for bound in ("lower", "upper"):
        none, selective, full = (figures[f"{policy} {bound}"][1] for policy in ("none", "selective", "full"))
        assert none > selective > full


def test_line_through_two_and_four_layers_meets_six(tmp_path):
    exact = layout(dtype="bfloat16", loss="bracket", ranks=64, model="llama3_8b", layers=[6])
    exact = memory.run_worker(exact, tmp_path)
    line = memory.run_worker(layout(dtype="bfloat16", loss="bracket", ranks=64, model="llama3_8b"), tmp_path)
    for bound in ("lower", "upper"):
        for phase in exact[0][bound]:
            points = [(n, run[bound][phase]["bytes"]) for n, run in zip((2, 4), line, strict=True)]
            assert memory.line_through(points, 6) == pytest.approx(exact[0][bound][phase]["bytes"], rel=0.01)


def test_published_figures_lie_in_the_bracket():
    """The tutorial's four, and no checkpointing besides; from the cache of make titan-memory if it can be."""
    rows = [row for row in memory.TABLE if row[0] == "llama3_8b"] + [("llama3_8b", 1, "none")]
    of_table = {"sequence": None, "batch": None, "loss": "bracket", "dtype": "bfloat16", "ranks": 64}
    layouts = [layout(model=row[0], tp=row[1], checkpointing=row[2], **of_table) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        predictions = list(pool.map(lambda one: memory.predict(one, ROOT / "results/titan-memory"), layouts))
    of = {row[1:]: prediction for row, prediction in zip(rows, predictions, strict=True)}
    for (_, tp, checkpointing), measured in memory.TABLE.items():
        if isinstance(measured, float):
            prediction = of[tp, checkpointing]
            assert prediction["lower"] < measured < prediction["upper"], (tp, checkpointing)
            assert memory.verdict(prediction, 24.0) == "fits"
    assert memory.verdict(of[1, "selective"], 24.0) == "too close to call"
    for bound in ("lower", "upper"):
        saved = of[4, "selective"][bound] - of[4, "full"][bound]
        assert saved == pytest.approx(8.21 - 4.71, abs=0.1)
        none, selective, full = (of[1, policy][bound] for policy in ("none", "selective", "full"))
        assert none > selective > full > of[4, "full"][bound]
    # Float32 values and two moments of 8.03e9 parameters over 64 ranks; 32 rotary caches on every rank.
    static = (8.03e9 * 12 / 64 + 32 * 8192 * 64 * 8) / memory.GIB
    for prediction in predictions:
        assert prediction["static"] == pytest.approx(static, rel=0.01)


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
