"""Scripts after public reports, tests/field_cases: right ones pass, of wrong ones the right thing is said."""

import json
import re
import shutil
from typing import NamedTuple

import pytest
from conftest import ROOT, fork

import training_recorded_comparison
from compare_training import main
from training_recorded_causes_samples import weighted_equally
from training_recorded_runs import Recording
from training_recordings import read_rank_file, write_rank_file
from training_records import Finding

SCRIPTS, TOOLS = ROOT / "tests" / "field_cases", ROOT / "tests" / "tools"
STEPS = 4
PASS = "PASS"


class Row(NamedTuple):
    """A variant of a script, what it is compared with, and what must be said.

    expected: PASS, or the step, kind and name of the first difference; a name of None is any.
    words: of the cause, or of a note where it passes; None if nothing need be said.
    never: what the cause may not say.
    """

    script: str
    variant: str
    expected: str | tuple[int, str, str | None] = PASS
    words: str | None = None
    never: str | None = None
    ranks: int = 2
    reference: str = "right"
    of: int = 1

    def __str__(self) -> str:
        return f"{self.script}-{self.variant}-{self.ranks}-against-{self.reference}-{self.of}"


ROUNDING = "zero but for rounding into full steps"
LOSS = (1, "losses", "global loss")
OWN_MEANS = r"a mean of means: .* 28, 4 of 32 valid labels"
ROWS = [
    # 01: the ranks have 28 and 4 of 32 labels; their own means are worth 0.571 and 4 times as much.
    Row("token_mean", "right"),
    Row("token_mean", "right_c"),
    Row("token_mean", "right_d"),
    Row("token_mean", "wrong", LOSS, OWN_MEANS),
    Row("token_mean", "wrong_d", LOSS, OWN_MEANS),
    # 02: the rates are 0.1, 0.1, 0.05, 0.05, and with the warm-up 0.0125, 0.025, 0.0375, 0.05.
    Row("scheduler", "right"),
    Row("scheduler", "right_warmup", reference="right_warmup"),
    Row("scheduler", "wrong", (2, "parameters", None), r"0\.05 .*0\.1\b.*the reference's of step 3"),
    Row(
        "scheduler",
        "wrong_warmup",
        (2, "parameters", None),
        r"0\.0375 .*0\.025\b.*the reference's of step 3",
        reference="right_warmup",
    ),
    # 03: every parameter is concerned.
    Row("module_bypass", "right"),
    Row("module_bypass", "wrong", (1, "gradients", "head.bias"), "is the wrapper's forward bypassed"),
    # 04: all are right; those off by one rounding are compared with as many ranks.
    Row("adam", "right", PASS, ROUNDING),
    Row("adam", "right_sgd", reference="right_sgd"),
    Row("adam", "right_ulp", PASS, ROUNDING, of=2),
    Row("adam", "sep", PASS, ROUNDING, reference="sep"),
    Row("adam", "sep_sgd", reference="sep_sgd"),
    Row("adam", "sep_ulp", PASS, ROUNDING, reference="sep", of=2),
    Row("adam", "llama", reference="llama"),
    Row("adam", "llama_sgd", reference="llama_sgd"),
    Row("adam", "llama_ulp", reference="llama", of=2),
    # 05: two batches an epoch.
    Row("set_epoch", "right", PASS, "round robin"),
    Row("set_epoch", "right_slow", PASS, "round robin", reference="right_slow"),
    Row("set_epoch", "wrong", (3, "inputs", "samples"), "those of steps 1 and 2, again: the epoch before"),
    Row(
        "set_epoch",
        "wrong_slow",
        (3, "inputs", "samples"),
        "those of steps 1 and 2, again: the epoch before",
        reference="right_slow",
    ),
    # 06 and 07
    Row("untied", "right"),
    Row("untied", "wrong", (0, "parameters", None), "tied in the reference, separate here"),
    Row("rope", "right"),
    Row("rope", "wrong", (0, "buffers", "inv_freq"), "rank 1"),
    # 08: the sum over TP is the reference.
    Row("tp_router", "right", ranks=4),
    Row(
        "tp_router",
        "wrong",
        (1, "gradients", "gate.weight"),
        "(?i)sum.*(tensor-parallel|tp)",
        "once too often",
        ranks=4,
    ),
    # 11: the loss is right, and the gradients are half as large.
    Row("gathered_loss", "right"),
    Row("gathered_loss", "wrong", (1, "gradients", "2.bias"), r"0\.5.*(?i:collective|gather)"),
    Row("gathered_loss", "right_clip", reference="right_clip"),
    Row(
        "gathered_loss",
        "wrong_clip",
        (1, "gradients", "2.bias"),
        r"0\.5.*(?i:collective|gather)",
        reference="right_clip",
    ),
    # 13: as many replicas as microbatches, so that a factor has two readings.
    Row("last_microbatch", "right"),
    Row("last_microbatch", "right_4", ranks=4, reference="right_4"),
    Row("last_microbatch", "wrong", (1, "gradients", "2.bias"), "the last microbatch"),
    Row(
        "last_microbatch",
        "wrong_undivided",
        (1, "gradients", "2.bias"),
        r"2(\.00)?x.*(microbatches.*replicas|replicas.*microbatches)",
    ),
    Row(
        "last_microbatch",
        "wrong_undivided_4",
        (1, "gradients", "2.bias"),
        r"4(\.00)?x.*(microbatches.*replicas|replicas.*microbatches)",
        ranks=4,
        reference="right_4",
    ),
    # 14: the head is the first in backward.
    Row("tp_cross_entropy", "right"),
    Row("tp_cross_entropy", "wrong", LOSS),
    Row("tp_cross_entropy", "wrong_backward", (1, "gradients", "head")),
    # A: one rank is no reference, unless it takes the slices in turn.
    Row(
        "batchnorm",
        "right",
        (1, "activations", "1"),
        "is a batch norm, which normalizes by the samples of one call: 16 here, 32 in the",
    ),
    Row("batchnorm", "ghost", reference="ghost"),
    Row("batchnorm", "wrong", (2, "buffers", "1.running_mean"), never="own samples", of=2),
    Row("batchnorm", "ckpt", (1, "buffers", "1.running_mean"), never="own samples", of=2),
    Row("batchnorm", "eval", (1, "activations", "1"), never="own samples", of=2),
    Row("batchnorm", "sgd_ulp", of=2),
    Row("batchnorm", "adam_ulp", reference="adam", of=2),
    # B
    Row("no_sync", "right"),
    Row("no_sync", "right_microfirst"),
    Row("no_sync", "wrong", (1, "gradients", "2.bias"), "not reduced"),
    # C: by the norm of which shard a gradient was scaled, only a reference with the same shards tells.
    Row("adamw_clip", "right"),
    Row("adamw_clip", "right_wide", reference="right_wide"),
    Row("adamw_clip", "wrong", (1, "gradients", "3.bias"), "clips by the norm of its own shards"),
    Row("adamw_clip", "wrong", (1, "gradients", "3.bias"), "norm of the local shard", of=2),
    Row("adamw_clip", "wrong_clip_after", (1, "gradients", "3.bias"), "called after the optimizer's step"),
    Row("adamw_clip", "wrong_decay", (1, "parameters", None), r"weight decay of .* 0\.1 .*reference's 0\b"),
    Row("adamw_clip", "wrong_l2", (1, "parameters", None), "is Adam, the reference's AdamW"),
    # D: computing each sample twice changes nothing.
    Row("hsdp", "right", ranks=4),
    Row("hsdp", "wrong_data", ranks=4),
    Row("hsdp", "wrong_shardonly", (1, "gradients", "3.bias"), "not reduced|reduced over", ranks=4),
    # E
    Row("mixed", "right"),
    Row("mixed", "right_fp32", reference="right_fp32"),
    Row("mixed", "right_outfp32", reference="right_outfp32"),
    Row("mixed", "right_autocast", reference="right_autocast"),
    *(
        row._replace(of=ranks)
        for ranks in (1, 2)
        for row in (
            Row("mixed", "wrong", LOSS, r"the loss is 1\.1 times the reference's"),
            Row("mixed", "wrong_lr", (1, "parameters", None), r"learning rate of .* 0\.105 .*0\.1\b"),
            Row("mixed", "wrong_sum", (1, "gradients", "3.bias"), "summed over the 2 data-parallel replicas"),
            Row("mixed", "wrong_reduce", (1, "gradients", None), "reduced in bfloat16"),
        )
    ),
    # F and S: ranks have other numbers of samples.
    Row("uneven", "right", ranks=4),
    Row("uneven", "wrong", (3, "losses", "global loss"), "a mean of means: .* 3, 3, 2, 2 of 10 ", ranks=4),
    Row("varlen", "right"),
    Row("varlen", "wrong", LOSS, "a mean of means: .* 28, 4 of 32 "),
    Row("varlen", "right_autocast", reference="right_autocast"),
    Row("varlen", "wrong_autocast", LOSS, "a mean of means: .* 28, 4 of 32 ", reference="right_autocast"),
    # G and T: wrappers change the names of parameters.
    Row("checkpoint", "right"),
    Row("checkpoint", "plain"),
    Row("checkpoint", "right", reference="plain", of=2),
    Row("checkpoint", "wrong", (1, "gradients", "blocks.1.down.weight")),
    Row("compiled", "compiled"),
    Row("compiled", "compiled", of=2),
    # H: in step 1 both ranks have as many tokens.
    Row("tied_padded", "right", PASS, ROUNDING),
    Row("tied_padded", "right_sgd", reference="right_sgd"),
    Row("tied_padded", "wrong", (2, "losses", "global loss"), "a mean of means"),
    Row(
        "tied_padded",
        "wrong_sgd",
        (2, "losses", "global loss"),
        "a mean of means",
        reference="right_sgd",
    ),
    # J, P and Q
    Row("moe", "right"),
    Row("wide", "right"),
    Row("wide", "right_sgd", reference="right_sgd"),
    Row("wide", "right_wide", reference="right_wide"),
    Row("wide", "ulp_wide", reference="right_wide", of=2),
    Row("sequence_first", "right"),
    # Optimizers that take turns: each makes a step.
    Row("adversarial", "right"),
    Row("adversarial", "wrong", (2, "gradients", None), None),
    Row("microbatch_means", "right"),
    Row("microbatch_means", "wrong", LOSS, "a mean of means: .* of 54 valid labels"),
    Row(
        "cut_off", "wrong", (1, "gradients", None), "requires_grad is True, so they are not used, or cut off"
    ),
    Row("cut_off", "frozen", (1, "gradients", None), r"frozen \(requires_grad is False\)$"),
    # Pieces of samples, and what an earlier stage has computed, cannot be matched.
    Row("context_parallel", "right", PASS, "ranks have a part of each, 1 of 2"),
    Row(
        "context_parallel", "wrong_shift", LOSS, "^the loss is .* the target or the loss", "every activation"
    ),
    Row("context_parallel", "wrong_scale", (1, "gradients", "head.weight"), "2 data-parallel replicas once"),
    Row("pipeline", "right", PASS, "as the stages of a pipeline do"),
    Row("pipeline", "wrong", (1, "gradients", None), None, "seed|other data|not finite"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder with the recordings of all variants, on as many ranks as the rows need."""
    folder = tmp_path_factory.mktemp("field")
    needed = {(row.script, row.variant, row.ranks) for row in ROWS}
    needed |= {(row.script, row.reference, row.of) for row in ROWS}
    jobs = {}
    for script, variant, ranks in sorted(needed):
        name = f"{script}-{variant}-{ranks}"
        command = [ROOT / "record_training.py", "--output-dir", folder / name, "--steps", STEPS]
        jobs[name] = ranks, *command, SCRIPTS / f"{script}.py", variant
    fork(folder, jobs)
    return folder


def find(folder, script, variant, ranks):
    """Return the folder of a recording, if all ranks have written it."""
    name = f"{script}-{variant}-{ranks}"
    statuses = json.loads((folder / "statuses.json").read_text())[name]
    assert not any(statuses), "".join((folder / f"{name}-{rank}.err").read_text() for rank in range(ranks))
    return folder / name


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_script_after_a_report(recorded, call, tmp_path, row):
    reference = find(recorded, row.script, row.reference, row.of)
    actual = find(recorded, row.script, row.variant, row.ranks)
    arguments = ["--reference-dir", reference, "--actual-dir", actual, "--json", tmp_path / "found.json"]
    done = call(main, *arguments)
    assert done.status in (0, 1), done.err
    found = json.loads((tmp_path / "found.json").read_text())
    first, cause, notes = found["first"], found["cause"] or "not known", "\n".join(found["notes"])
    if row.expected == PASS:
        assert first is None, f"{first} {cause}"
        assert re.search(row.words or "", notes), notes
        return
    assert first is not None, notes
    step, kind, name = row.expected
    place = (first["step"], first["kind"], name and first["name"])
    assert place == (step, kind, name), f"{first} {cause}"
    assert re.search(row.words or "", cause), cause
    assert not row.never or not re.search(row.never, cause), cause


def test_every_variant_is_compared():
    compared = {(row.script, row.variant) for row in ROWS}
    compared |= {(row.script, row.reference) for row in ROWS}
    for script in SCRIPTS.glob("*.py"):
        wrong = re.findall(r'"(wrong\w*)"', script.read_text())
        assert {(script.stem, variant) for variant in ("right", *wrong)} <= compared, script


@pytest.mark.parametrize(("share", "step", "gate"), [(0.2, 3, 1), (0.2, 3, 1.1), (0.05, 3, 1), (0.2, 1, 1)])
def test_rounding_may_send_rows_to_another_expert(recorded, call, tmp_path, monkeypatch, share, step, gate):
    monkeypatch.setattr(training_recorded_comparison, "REROUTED", share)
    actual = tmp_path / "actual"
    shutil.copytree(find(recorded, "moe", "right", 2), actual)
    content = read_rank_file(actual / "rank-0.pt")
    record = content["steps"][step - 1]
    entries = {entry["name"]: entry for entry in record["activations"]}
    for name, more in zip(
        [name for name in entries if name.startswith("experts.")][:2], (1, -1), strict=True
    ):
        rows, *width = entries[name]["shape"]
        entries[name]["shape"] = (rows + more, *width)
    entries["gate"]["samples"] *= gate
    record["losses"] = [1.1 * loss for loss in record["losses"]]  # as the other expert makes it
    write_rank_file(actual / "rank-0.pt", **content)
    done = call(main, "--reference-dir", find(recorded, "moe", "right", 1), "--actual-dir", actual)
    if (share, step, gate) == (0.2, 3, 1):
        words = r"note: step 3: 12\.5% of the rows went to other experts .*, first experts\.\d; everything"
        assert done.status == 0 and re.search(words, done.out), done.out
        assert re.search(r"^   4 +\d", done.out, re.MULTILINE)  # losses are shown all the same
    else:
        where = "activations gate" if gate != 1 else "losses global loss"
        assert done.status == 1 and f"step {step}, {where}" in done.out, done.out


def test_a_mean_of_means_that_gradients_show_first(recorded):
    # In bfloat16 a loss may differ by less than is allowed, and gradients by more.
    first = Finding(1, 0, "gradients", "module.3.weight", "reference", "")
    reference, right, wrong = (
        Recording(find(recorded, "varlen", f"{variant}_autocast", ranks))
        for variant, ranks in (("right", 1), ("right", 2), ("wrong", 2))
    )
    assert re.match("a mean of means: .* 28, 4 of 32 ", weighted_equally(first, [0, 1], reference, wrong))
    assert weighted_equally(first, [0, 1], reference, reference) is None
    assert weighted_equally(first, [0, 1], right, right) is None


@pytest.mark.parametrize("names", [None, ("0.weight",)])
def test_a_witness_in_float32_shows_what_bfloat16_hides(recorded, call, tmp_path, names):
    reference = find(recorded, "mixed", "right", 1)
    arguments = ["--reference-dir", reference, "--witness", find(recorded, "mixed", "right_fp32", 1)]
    done = call(main, *arguments, "--actual-dir", find(recorded, "mixed", "right", 2))
    assert done.status == 0, done.out
    assert re.search(
        r"^note: against the witness: errors are up to [01][.\d]* times the", done.out, re.MULTILINE
    )

    actual = tmp_path / "actual"
    shutil.copytree(find(recorded, "mixed", "right", 2), actual)
    for rank in range(2):
        content = read_rank_file(actual / f"rank-{rank}.pt")
        for name, gradient in content["steps"][0]["gradients"].items():
            if names is None or name in names:
                gradient["sketch"] *= 1.01
        write_rank_file(actual / f"rank-{rank}.pt", **content)
    assert call(main, "--reference-dir", reference, "--actual-dir", actual).status == 0
    done = call(main, *arguments, "--actual-dir", actual)
    assert done.status == 1, done.out
    assert re.search(
        r"step 1, gradients [03]\.weight: its error against the witness is .* times the", done.out
    )
    assert re.search(r"Likely cause: (not known|gradients .* are 1\.01x the reference)", done.out), done.out


def test_a_witness_needs_two_recordings(recorded, call):
    one = find(recorded, "mixed", "right", 1)
    done = call(main, "--actual-dir", find(recorded, "mixed", "right", 2), "--witness", one)
    assert done.status == 2 and "--witness judges two recordings" in done.err
    arguments = ["--reference-dir", one, "--actual-dir", find(recorded, "mixed", "right", 2)]
    done = call(main, *arguments, "--witness", find(recorded, "moe", "right", 1))
    assert done.status == 2 and "is in the" in done.err


@pytest.mark.parametrize(("change", "failed"), [({"dtype": "bfloat16"}, [2]), ({}, [])])
def test_a_buffer_of_other_samples_has_the_references_type(recorded, call, tmp_path, change, failed):
    actual = tmp_path / "actual"
    shutil.copytree(find(recorded, "batchnorm", "right", 2), actual)
    for rank in range(2):
        content = read_rank_file(actual / f"rank-{rank}.pt")
        content["steps"][2]["buffers"]["1.running_mean"].update(change)
        write_rank_file(actual / f"rank-{rank}.pt", **content)
    arguments = ["--reference-dir", find(recorded, "batchnorm", "right", 1), "--actual-dir", actual]
    call(main, *arguments, "--json", tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["tensors"]
    found = [row["mismatched"] for row in rows if row["name"] == "1.running_mean" and row["mismatched"]]
    assert found == failed
