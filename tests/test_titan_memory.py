"""titan/predict_memory.py without a measurement: lines, what fits, the table, what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import predict_memory as memory  # noqa: E402

PHASES = ("static", "forward", "loss", "backward", "optimizer")


def run_of(layers, sizes, total=32) -> dict:
    """Return what one measurement finds, with sizes in GiB for lower and upper in each phase."""
    peaks = {
        bound: {
            phase: {"bytes": size * memory.GIB, "labels": {"parameters": memory.GIB}}
            for phase, size in zip(PHASES, row, strict=True)
        }
        for bound, row in zip(("lower", "upper"), sizes, strict=True)
    }
    return peaks | {"layers": total, "sequence": 8192, "batch": 1}


@pytest.fixture
def measured(monkeypatch):
    """Replace the measuring process: 0.25 GiB a layer forward, the loss 4 or 9 GiB; count its calls."""
    calls = []

    def measure(layout, results):
        calls.append(layout)
        tp = layout["tp"]
        return [
            run_of(n, [[0.1 * n, n / 4 / tp, (loss + n / 4) / tp, 1, 0.5] for loss in (4, 9)])
            for n in layout["layers"]
        ]

    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(memory, "version", lambda package: "1")
    return calls


def test_line():
    assert memory.line_through([(2, 1.0), (4, 2.0)], 32) == 16.0
    assert memory.line_through([(3, 7.0)], 3) == 7.0


@pytest.mark.parametrize(
    ("lower", "upper", "said"),
    [
        (1, 24, "fits"),
        (23, 24.1, "too close to call"),
        (24, 30, "too close to call"),
        (24.1, 30, "does not fit"),
    ],
)
def test_fit(lower, upper, said):
    assert memory.fit(SimpleNamespace(lower=lower, upper=upper), 24.0) == said


def test_bracket_phases_and_their_peak(measured, tmp_path):
    layout = {"model": "llama3_8b", "plan": "simplefsdp", "tp": 1, "replicate": 1, "layers": [2, 4]}
    prediction = memory.predict(layout, tmp_path)
    assert (prediction.lower, prediction.upper) == (12.0, 17.0)
    assert prediction.where == {"lower": "loss", "upper": "loss"}
    assert prediction.static == pytest.approx(3.2)
    assert prediction.largest == {"parameters": 1.0}


def test_table_has_the_published_figures(call, measured, tmp_path):
    result = call(memory.main, "--results", tmp_path)
    assert result.err == ""
    rows = {line[:44].strip(): line[44:].split() for line in result.out.splitlines()[1:]}
    assert len(rows) == 6
    assert rows["llama3_8b TP1 x FSDP64 selective"][2] == "OOM"
    assert rows["llama3_8b TP1 x FSDP64 full"][2] == "11.91"
    assert rows["llama3_8b TP4 x FSDP16 selective"][2] == "8.21"
    assert rows["llama3_8b TP4 x FSDP16 full"][2] == "4.71"
    assert rows["deepseek_v3_16b TP4 x FSDP16 full"][2:] == ["fits"]
    assert result.status == 0


def test_figures_are_not_shown_beside_other_jobs(call, measured, tmp_path):
    for options in (
        ["--ranks", 128],
        ["--plan", "fsdp2"],
        ["--replicate", 2],
        ["--sequence", 4096],
        ["--batch", 2],
        ["--loss", "chunked"],
        ["--dtype", "float32"],
    ):
        assert "11.91" not in call(memory.main, "--results", tmp_path, *options).out


def test_one_layout_with_knobs(call, measured, tmp_path):
    result = call(memory.main, "--model", "llama3_8b", "--memory", "8", "--results", tmp_path)
    assert result.status == 1
    assert "does not fit" in result.out
    assert "static: 3.20 (parameters, buffers, optimizer state)" in result.out
    for knob in ("with full checkpointing", "with TP2", "with chunked loss", "with sequence 4096"):
        assert knob in result.out
    (tp2,) = [line for line in result.out.splitlines() if "with TP2" in line]
    assert tp2.endswith("too close to call; saves 6.00 to 8.50")
    assert len(measured) == 5
    call(memory.main, "--model", "llama3_8b", "--no-knobs", "--results", tmp_path)
    assert len(measured) == 6


def test_a_knob_that_cannot_be_built(call, measured, monkeypatch, tmp_path):
    measure = memory.measure

    def fail_at_tp16(layout, results):
        if layout["tp"] == 16:
            raise memory.InputError("ValueError: 8 heads")
        return measure(layout, results)

    monkeypatch.setattr(memory, "measure", fail_at_tp16)
    result = call(memory.main, "--model", "llama3_70b", "--results", tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "llama3_70b TP8 x FSDP8 full" in result.out
    assert "cannot be built: ValueError: 8 heads" in result.out
    assert "with chunked loss" in result.out


def test_bounds_that_are_the_other_way_round(monkeypatch, tmp_path):
    sizes = [[1, 2, 3, 9, 1], [1, 2, 5, 3, 1]]
    monkeypatch.setattr(memory, "measure", lambda layout, results: [run_of(32, sizes)])
    prediction = memory.predict({"layers": [None]}, tmp_path)
    assert (prediction.lower, prediction.upper) == (5.0, 9.0)
    assert prediction.where == {"lower": "loss", "upper": "backward"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", 0], "--ranks is 0; give a positive number"),
        (["--memory", "nan"], "--memory is nan; give a positive number"),
        (["--model", "llama3_8b", "--tp", 3], "TP degree 3 does not divide --ranks 64"),
        (["--model", "deepseek_v3_16b", "--ranks", 6], "TP degree 4 does not divide --ranks 6"),
        (["--ranks", 6], "TP degree 4 does not divide --ranks 6"),
        (["--sequence", 1022], "TP degree 4 does not divide --sequence 1022"),
        (["--model", "llama3_8b", "--tp", 8, "--replicate", 16], "TP degree 8 x 16 replicas does not divide"),
        (["--replicate", 0], "--replicate is 0; give a positive number"),
        (["--plan", "ddp"], "argument --plan: invalid choice: 'ddp'"),
        (["--ep", 8], "--ep cannot be predicted: not modelled are expert, context and pipeline parallelism"),
        (["--float8"], "--float8 cannot be predicted: not modelled are"),
        (["--tp", 2], "are for one layout: give --model, too"),
        (["--model", "gpt2"], "invalid choice: 'gpt2'"),
    ],
)
def test_refused(call, measured, tmp_path, options, said):
    result = call(memory.main, "--results", tmp_path, *options)
    assert (result.status, measured, result.err.count("\n")) == (2, [], 1)
    assert result.err.startswith("error: ") and said in result.err


def test_without_torchtitan(call, monkeypatch):
    def missing(package):
        raise memory.PackageNotFoundError(package)

    monkeypatch.setattr(memory, "version", missing)
    result = call(memory.main)
    assert result.status == 2
    assert "torchtitan is not installed" in result.err


def test_failed_measurement_is_an_error_and_not_cached(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "version", lambda package: "1")
    layout = {"model": "llama3_8b", "plan": "simplefsdp", "ranks": 64, "tp": 1, "replicate": 1}
    layout |= {"checkpointing": "full", "layers": [2]}
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    with pytest.raises(memory.InputError, match="llama3_8b TP1 x FSDP64 full: exit status 1"):
        memory.measure(layout, tmp_path)
    assert "== llama3_8b TP1 x FSDP64 full: running 2 layers" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".err"]


def test_prediction_is_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "version", lambda package: "1")
    layout = {"model": "llama3_8b", "plan": "simplefsdp", "ranks": 64, "tp": 1, "replicate": 1}
    layout |= {"checkpointing": "full", "layers": [2]}
    (tmp_path / f"{memory.fingerprint(layout)}.json").write_text(json.dumps([{"layers": 32}]))
    assert memory.measure(layout, tmp_path) == [{"layers": 32}]
    (tmp_path / f"{memory.fingerprint(layout)}.json").write_text('[{"lay')
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    with pytest.raises(memory.InputError):  # cut: predicted again
        memory.measure(layout, tmp_path)


@pytest.mark.parametrize(
    ("lower", "upper", "said"),
    [
        (9, 15, "saves 1.00 to 5.00"),
        (11.5, 22, "takes 1.50 to 2.00 more"),
        (9, 20.5, "from 0.50 more to 1.00 less"),
        (10.5, 18, "from 0.50 more to 2.00 less"),
        (10, 20, "saves 0.00 to 0.00"),
    ],
)
def test_what_a_change_saves_or_takes(lower, upper, said):
    before, changed = SimpleNamespace(lower=10, upper=20), SimpleNamespace(lower=lower, upper=upper)
    assert memory.difference_of(before, changed) == said
