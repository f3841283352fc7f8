"""titan/predict_memory.py: against the real allocator, its structure, and its command line."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "titan"))
import measure_memory  # noqa: E402
import predict_memory as memory  # noqa: E402

REAL_PEAK = ROOT / "tests/titan_training/real_peak.py"


def layout(**changes) -> dict:
    usual = {"model": "llama3_debugmodel", "plan": "simplefsdp", "ranks": 4, "tp": 1, "replicate": 1}
    usual |= {"checkpointing": "none", "sequence": 512, "batch": 2, "loss": "eager", "dtype": "float32"}
    usual |= {"layers": [3, 5]}
    return usual | changes


@pytest.mark.parametrize(
    ("plan", "tp", "dtype"),
    [
        ("simplefsdp", 1, "float32"),
        ("simplefsdp", 2, "bfloat16"),
        ("simplefsdp", 2, "float32"),
        ("fsdp2", 2, "bfloat16"),
        ("fsdp2-compiled", 1, "bfloat16"),
    ],
)
def test_prediction_is_what_the_allocator_sees(plan, tp, dtype):
    job = layout(plan=plan, tp=tp, dtype=dtype, loss="bracket")
    done = run(sys.executable, REAL_PEAK, json.dumps(job), timeout=3600, TITAN_DEVICE="cpu")
    assert done.status == 0, done.err[-2000:]
    figures = json.loads(done.out.splitlines()[-1])
    print(f"{plan} TP{tp} {dtype}: predicted, allocator's peak, static: {figures}")
    for predicted, peak, static in figures.values():
        assert peak > 1.2 * static
        assert predicted == pytest.approx(peak, rel=0.01)
    for bound in ("lower", "upper"):
        none, selective, full = (figures[f"{policy} {bound}"][1] for policy in ("none", "selective", "full"))
        assert none > selective > full


@pytest.mark.parametrize("plan", ["simplefsdp", "fsdp2"])
@pytest.mark.parametrize(
    "changes",
    [
        {"model": "llama3_8b", "ranks": 64, "layers": [3, 5, 7]},
        # One dense layer, five with experts.
        {
            "model": "deepseek_v3_debugmodel",
            "ranks": 8,
            "tp": 2,
            "checkpointing": "full",
            "layers": [4, 5, 6],
        },
    ],
    ids=lambda changes: changes["model"],
)
def test_line_through_a_few_layers_meets_more(tmp_path, plan, changes):
    job = layout(plan=plan, dtype="bfloat16", loss="bracket", **changes)
    *counts, more = job["layers"]
    runs, (exact,) = (memory.measure(job | {"layers": some}, tmp_path) for some in (counts, [more]))
    for bound in ("lower", "upper"):
        lines = {
            phase: memory.line_through(
                [(n, run[bound][phase]["bytes"]) for n, run in zip(counts, runs, strict=True)], more
            )
            for phase in runs[0][bound]
        }
        for phase in ("static", "forward", "loss", "optimizer"):
            assert lines[phase] == pytest.approx(exact[bound][phase]["bytes"], rel=0.01)
        assert max(lines.values()) == pytest.approx(max(p["bytes"] for p in exact[bound].values()), rel=0.01)


def backward_of(kinds: str) -> measure_memory.LiveBytes:
    """Return a step of layers: m keeps 3 bytes of activations, d 1; both get 4 of gradients.

    The backward of an m takes 9 more for a moment; the loss takes 20.
    """
    live = measure_memory.LiveBytes()

    def note(phase: str, allocation: measure_memory.Allocation, sign: int) -> None:
        live.events.append(measure_memory.Event(phase, allocation, sign))

    def for_a_moment(size: int, label: str) -> None:
        temporary = measure_memory.Allocation(size, label)
        note("backward", temporary, 1)
        note("backward", temporary, -1)

    activations = [measure_memory.Allocation({"m": 3, "d": 1}[kind], f"activation {kind}") for kind in kinds]
    for activation in activations:
        note("forward", activation, 1)
    for_a_moment(20, "gradient of logits")
    for kind, activation in reversed(list(zip(kinds, activations, strict=True))):
        note("backward", measure_memory.Allocation(4, f"gradient {kind}"), 1)
        if kind == "m":
            for_a_moment(9, "of m")
        note("backward", activation, -1)
    note("optimizer", measure_memory.Allocation(0, "step"), 1)
    return live


@pytest.mark.parametrize("first_layer", ["m", "d"])
def test_the_peak_moves_to_the_end_of_backward_as_layers_are_added(first_layer):
    few, more, whole = (backward_of(first_layer + "m" * (layers - 1)) for layers in (3, 5, 80))
    ends = measure_memory.shared_ends([few, more])
    few, more = (run.peaks(*ends) for run in (few, more))
    of_whole = whole.peaks(*measure_memory.shared_ends([whole]))
    assert max(more, key=lambda phase: more[phase]["bytes"]) == "start of backward"
    line = {
        phase: memory.line_through([(3, few[phase]["bytes"]), (5, more[phase]["bytes"])], 80) for phase in few
    }
    assert max(line, key=line.get) == "end of backward"
    assert max(line.values()) == max(phase["bytes"] for phase in of_whole.values())
    assert list(few) == ["forward", "start of backward", "end of backward", "optimizer"]


def test_layers_of_another_kind_in_the_middle_give_no_line():
    with pytest.raises(ValueError, match="no line can be drawn; --exact runs all layers"):
        measure_memory.shared_ends([backward_of("mddm"), backward_of("mdmdmm")])


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
            assert prediction.lower < measured < prediction.upper, (tp, checkpointing)
            assert memory.fit(prediction, 24.0) == "fits"
    assert memory.fit(of[1, "selective"], 24.0) == "too close to call"
    for bound in ("lower", "upper"):
        saved = getattr(of[4, "selective"], bound) - getattr(of[4, "full"], bound)
        assert saved == pytest.approx(8.21 - 4.71, abs=0.1)
        none, selective, full = (getattr(of[1, policy], bound) for policy in ("none", "selective", "full"))
        assert none > selective > full > getattr(of[4, "full"], bound)
    # Float32 values and two moments of 8.03e9 parameters over 64 ranks; 32 rotary caches on every rank.
    static = (8.03e9 * 12 / 64 + 32 * 8192 * 64 * 8) / memory.GIB
    for prediction in predictions:
        assert prediction.static == pytest.approx(static, rel=0.01)


def test_a_replica_has_its_own_shards(tmp_path):
    one, two = (memory.measure(layout(layers=[2], replicate=n), tmp_path)[0]["lower"] for n in (1, 2))
    # Half of the ranks share a replica; the rotary caches are whole on each.
    sharded, whole = (side["static"]["labels"]["parameters"] for side in (one, two))
    assert whole == pytest.approx(2 * sharded, rel=0.01)


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
