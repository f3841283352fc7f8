"""titan/check_run.py: the right answer on logs of every kind, and never a traceback."""

import gzip
import json
import random
import re
import sys
import time

import pytest
from conftest import ROOT
from made_titan_logs import LOSSES, OK, quoted, stamp, titan_log

sys.path.insert(0, str(ROOT / "titan"))
import check_run  # noqa: E402

TIME, STEP = "{time}", "{step:2}  loss: {loss:7.4f}"


def test_good_run(check_log):
    result = check_log(titan_log())
    assert (result.status, result.err) == (0, "")
    assert {line[5:27].strip() for line in result.out.splitlines() if line.startswith("ok ")} == OK
    assert "second step is faster  first 30, then 1.5 s, by time stamps" in result.out
    assert "loss falls             8.10000 at step 1, 6.80000 at step 10; trend -0.148 a step" in result.out
    assert "gradients are finite   all 10, norm 1.032 to 1.032" in result.out
    assert "throughput             1,174 tokens/s, 0.01 TFLOPS, MFU 0.00 % per device, median" in result.out
    assert "--   NeuronCores in use     no report of neuron-monitor" in result.out


def test_logged_every_tenth_step(check_log):
    result = check_log(titan_log(LOSSES[:4], total=30, every=10, later=0.5))
    assert result.status == 0, result.out
    assert "then 0.5 s" in result.out


def test_the_first_gap_between_steps_may_be_shorter(check_log):
    # Steps 1, 10 and 20 are logged. Nothing is missing of 29 steps, and step 30 of 30 is.
    assert check_log(titan_log(LOSSES[:3], total=29, every=10, later=0.5)).status == 0
    assert check_log(titan_log(LOSSES[:3], total=30, every=10, later=0.5)).failed == {"all steps done"}


def test_colours_and_carriage_returns(check_log):
    red, orange = "\x1b[31m", "\x1b[38;2;180;60;0m"
    lines = [re.sub("(loss|grad_norm):", rf"{orange}\1:", line) for line in titan_log()]
    lines = [line.replace("step:", f"{red}step:") for line in lines]
    assert check_log([line + "\x1b[39m\r" for line in lines]).status == 0


@pytest.mark.parametrize("prefix", ["[rank{}]:", "[default{}]:", "[rank{}]:2026-11-29T00:00:00Z "])
def test_ranks_mixed(check_log, prefix):
    ranks = [titan_log(prefix=prefix.format(rank)) for rank in range(4)]
    lines = [line for lines in zip(*ranks, strict=True) for line in random.Random(0).sample(lines, 4)]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "steps appear           10, 1 to 10" in result.out


def test_ranks_mixed_without_prefix_and_on_one_line(check_log):
    lines = [a + b for a, b in zip(titan_log(), titan_log(), strict=True)]
    assert check_log(lines).status == 0
    assert check_log([line for line in titan_log() for _ in range(4)]).status == 0


def test_torn_line_is_not_a_lost_step(check_log):
    lines = titan_log()
    lines[5] = lines[5][:60]
    assert check_log(lines).status == 0


def test_ranks_that_disagree(check_log):
    lines = titan_log(prefix="[rank0]:") + titan_log([*LOSSES[:5], 9.0, *LOSSES[6:]], prefix="[rank1]:")
    result = check_log(lines)
    assert result.status == 1
    assert "ranks differ on the global loss, step 6: 7.4 on rank 0, 9.0 on rank 1" in result.out


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.1", f"[rank0]:[titan] {TIME} - root - INFO - step: {STEP}  memory: 1.57GiB(1.66%)  tps: 7,178"),
        ("2024", f"[rank0]:{TIME} - torchtitan - INFO - step: {STEP}  memory: 1.57GiB(1.66%)  wps: 7,178"),
        (
            "other case",
            f"rank0: [titan] {TIME} - root - INFO - Step: {{step}} Loss: {{loss:.3e}} tps: 7178.5",
        ),
    ],
)
def test_other_versions(check_log, version, line):
    lines = ["[rank0]:[titan] 2026-11-29 23:00:02,000 - root - INFO - Training starts at step 1"]
    for i, loss in enumerate(LOSSES):
        lines.append(line.format(time=stamp(40 + i), step=i + 1, loss=loss))
    lines.append("[rank0]:[titan] 2026-11-29 23:01:02,000 - root - INFO - Training completed")
    result = check_log(lines, "--steps", 10)
    assert result.status == 0, result.out


def test_no_time_stamps_speed_is_used(check_log):
    lines = [line.partition(" - root - INFO - ")[2] for line in titan_log()]
    lines = [line.replace("tps: 1,174", "tps: 12") if "step:  1 " in line else line for line in lines]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "first 0.0833, then 0.000852 s a token, by the logged speed" in result.out


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        (0.5, 0.2, "first 0.5, then 0.2 s, by time stamps"),
        (0.5, 0.0, "first 0.5, then 0 s, by time stamps"),
        (0.0, 0.2, "first 0.000852, then 0.000852 s a token, by the logged speed"),
    ],
)
def test_steps_of_less_than_a_second(check_log, first, later, said):
    assert said in check_log(titan_log(first=first, later=later)).out


def test_resumed_run(check_log):
    later = lambda match: f"{match[1]}{int(match[2]) + 500}"  # noqa: E731
    lines = [re.sub(r"(total steps |at step |step: +)(\d+)", later, line) for line in titan_log()]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "first 30, then 1.5 s" in result.out


@pytest.mark.parametrize(
    ("change", "failed", "said"),
    [
        ({"losses": [8.1, 8.0, float("nan"), 7.0], "total": 4}, {"losses are finite"}, "step 3: nan"),
        ({"losses": [8.1, float("inf"), 7.0, 6.0], "total": 4}, {"losses are finite"}, "step 2: inf"),
        ({"losses": [8.1, 8.2, 8.3, 8.5], "total": 4}, {"loss falls"}, "trend +0.13 a step"),
        ({"losses": [8.1, 8.1, 8.1, 8.1], "total": 4}, {"loss falls"}, "it is constant: 8.10000 at step 1"),
        ({"losses": LOSSES[:6]}, {"all steps done"}, "6 of 10"),
        ({"finished": False}, {"all steps done"}, "no line says that training completed"),
        ({"losses": LOSSES[:1], "total": 2}, {"all steps done"}, "1 of 2"),
        (
            {"losses": [], "finished": False},
            {"steps appear", "all steps done"},
            "no line with step and loss",
        ),
        ({"losses": [*LOSSES, 6.7, 6.6]}, {"all steps done"}, "12 of 10"),
    ],
)
def test_bad_runs(check_log, change, failed, said):
    result = check_log(titan_log(**change))
    assert result.status == 1
    assert result.failed == failed
    assert said in result.out
    assert result.out.splitlines()[-1].startswith("FAIL ")


def test_two_runs_in_one_log(check_log):
    result = check_log(titan_log() + titan_log())
    assert result.status == 1
    assert "the log of more than one run?" in result.out


def test_nan_on_another_rank(check_log):
    lines = titan_log(prefix="[rank0]:") + titan_log(
        [*LOSSES[:4], float("nan"), *LOSSES[5:]], prefix="[rank1]:"
    )
    result = check_log(lines)
    assert result.failed == {"losses are finite"}
    assert "step 5: nan on rank 1" in result.out


def test_ran_out_of_data(check_log):
    lines = titan_log(LOSSES[:3], total=28, every=10, later=0.5)
    assert check_log(lines).status == 0
    lines.insert(-1, f"[titan] {stamp(50)} - root - WARNING - Ran out of data; last step was canceled.")
    assert check_log(lines).failed == {"all steps done"}


def test_lost_lines_do_not_hide_missing_steps(check_log):
    lines = [line for line in titan_log(total=14) if not re.search("step:  [3-6] ", line)]
    assert check_log(lines).failed == {"all steps done"}


def test_second_run_that_died_before_its_first_step(check_log):
    assert check_log(titan_log() + titan_log()[:1]).failed == {"steps appear"}


def test_the_rank_that_is_read_has_to_finish(check_log):
    lines = titan_log(prefix="[rank0]:", finished=False) + titan_log(prefix="[rank3]:")
    assert check_log(lines).failed == {"all steps done"}


def test_pipeline_stages_without_a_loss(check_log):
    assert check_log(titan_log([-1.0] * 10, prefix="[rank0]:") + titan_log(prefix="[rank1]:")).status == 0


def test_a_loss_below_minus_one_is_a_loss(check_log):
    assert check_log(titan_log([-1.5 - 0.1 * step for step in range(10)])).status == 0


def test_resumed_run_that_logs_every_tenth_step(check_log):
    lines = titan_log(LOSSES[1:4], total=530, every=10)
    lines = [re.sub(r"step:  1 ", "step: 510 ", line) for line in lines]
    lines = [re.sub(r"step: ([12]0) ", lambda m: f"step: {510 + int(m[1])} ", line) for line in lines]
    lines = [line.replace("starts at step 1", "starts at step 501") for line in lines]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "--   second step is faster" in result.out


def test_clock_is_no_rank(check_log):
    assert check_log([f"{9 + i // 6:02}:59:01 {line}" for i, line in enumerate(titan_log())]).status == 0


def test_colours_that_lost_their_escape(check_log):
    for escape in ("", "^["):
        assert (
            check_log([re.sub("(step|loss):", rf"{escape}[31m\1:", line) for line in titan_log()]).status == 0
        )


def test_ranks_without_prefix_that_lag(check_log):
    lines = titan_log()
    assert check_log(lines[:2] * 2 + lines[2:]).status == 0


def test_numbers_that_are_none(check_log):
    lines = titan_log()
    assert check_log([*lines, "step: 11  loss: , x", "step: 12 loss: 1 tps: ,"]).status == 1
    assert check_log([*lines[:-1], "[titan] step: 11  loss:  6."]).out.count("10, 1 to 10")
    assert check_log(titan_log([1.7e308, 1.6e308, -1.7e308], total=3)).status in (0, 1)
    assert check_log([*lines, f"step: {'9' * 400} loss: 1 x"]).status == 0


def test_a_step_in_capitals_is_enough_to_know_the_log(check_log):
    assert "steps appear           1, 1 to 1" in check_log(["Step: 1 Loss: 8.1 tps: 7"]).out


def test_long_lines_take_no_time(check_log):
    long = ["a1" * 50_000, "1" * 100_000, "[rank3]:" * 10_000, "x.Y" * 30_000, "0:" * 50_000, "E" * 99_999]
    long.append('{"a":' * 50_000 + "1" + "}" * 50_000)
    start = time.monotonic()
    assert check_log([*titan_log(), *long]).status == 0
    assert time.monotonic() - start < 30


def test_odd_options(call, check_log):
    for value in (0, -5):
        assert check_log(titan_log(), "--steps", value).status == 2
    assert call(check_run.main, ".").status == 2
    assert check_log(["pip install torchtitan", "done"]).status == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (b"hello\nworld\n", "has no line of a TorchTitan run, in 2 lines"),
        (bytes(range(256)) * 100, "has no line of a TorchTitan run"),
    ],
)
def test_no_log_of_a_run(check_log, content, said):
    result = check_log(content)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_missing_log_and_directory(call, tmp_path):
    for path in (tmp_path / "missing.log", tmp_path):
        result = call(check_run.main, path)
        assert result.status == 2
        assert "cannot be read" in result.err


@pytest.mark.parametrize("cut", range(0, 1500, 37))
def test_truncated_anywhere(check_log, cut):
    whole = "\n".join(titan_log()).encode()
    result = check_log(whole[:cut])
    assert result.status == (2 if cut < 7 else 1)


def test_neuron_monitor(check_log, tmp_path):
    def report(*used):
        cores = {str(i): {"neuroncore_utilization": value} for i, value in enumerate(used)}
        counters = {"neuroncore_counters": {"neuroncores_in_use": cores}}
        return json.dumps({"neuron_runtime_data": [{"pid": 1, "report": counters}]})

    record = tmp_path / "run.log.neuron-monitor"  # where it is looked for without the option
    record.write_text(report(90.0, 0) + "\n" + report(0, 0.5) + "\n" + report(1, 1)[:40])
    assert "2 cores, in 2 reports" in check_log(titan_log(), "--neuron-monitor", record).out
    record.write_text(report(0, 0.5))
    assert "ok   NeuronCores in use     1 cores, in 1 reports" in check_log(titan_log()).out
    record.write_text(report(0, 0) + "\n")
    result = check_log(titan_log(), "--neuron-monitor", record)
    assert (result.status, result.failed) == (1, {"NeuronCores in use"})
    for content in ("", "nonsense\n[1]\n"):  # a monitor that did not start
        record.write_text(content)
        assert "--   NeuronCores in use" in check_log(titan_log(), "--neuron-monitor", record).out
    record.unlink()
    assert check_log(titan_log(), "--neuron-monitor", record).status == 2


# ---------------------------------------------------------------- one step away from what passes


@pytest.mark.parametrize(
    ("losses", "total", "every", "done"),
    [
        (LOSSES, 10, 1, True),
        (LOSSES[:9], 10, 1, False),
        (LOSSES, 11, 1, False),
        (LOSSES, 9, 1, False),
        (LOSSES[:4], 30, 10, True),
        (LOSSES[:4], 39, 10, True),
        (LOSSES[:4], 40, 10, False),
        (LOSSES[:4], 29, 10, False),
    ],
)
def test_last_step(check_log, losses, total, every, done):
    result = check_log(titan_log(losses, total=total, every=every, later=0.5))
    assert result.failed == (set() if done else {"all steps done"})


def test_second_run_without_start_lines(check_log):
    # Its steps begin anew; its losses, other than the first run's, would be dropped.
    again = [line for line in titan_log([loss + 1 for loss in LOSSES]) if "step:" in line]
    result = check_log(titan_log() + again)
    assert result.failed == {"steps appear"}
    assert "the log of more than one run?" in result.out


def test_clock_that_was_set_back_tells_no_time(check_log):
    for without_speed in ("step:", "step:  1 ", "step:  2 "):
        lines = titan_log(later=-1.5)
        lines = [line.replace("tps: 1,174  ", "") if without_speed in line else line for line in lines]
        result = check_log(lines)
        assert (result.status, result.failed) == (0, set())
        assert "--   second step is faster" in result.out


@pytest.mark.parametrize(("later", "faster"), [(14.9, True), (15.1, False)])
def test_second_step_takes_half_of_the_first_at_most(check_log, later, faster):
    lines = titan_log(LOSSES[:2], total=2, later=later)
    result = check_log(lines)
    assert f"{'ok' if faster else '--':4} second step is faster  first 30, then {later} s" in result.out
    # Only where the log says that this run compiled is it a failure.
    lines.insert(2, "Compilation Successfully Completed for model.hlo_module.pb")
    assert check_log(lines).failed == (set() if faster else {"second step is faster"})


@pytest.mark.parametrize(
    ("losses", "mark", "said"),
    [
        (LOSSES, "ok", "8.10000 at step 1, 6.80000 at step 10; trend -0.148 a step"),
        ([*LOSSES, 6.0, 5.0], "ok", "8.10000 at step 1, 6.80000 at step 10; trend -0.148 a step"),
        (
            [*LOSSES, 9.0, 10.0, 11.0],
            "FAIL",
            "at first, but it ends above its start: 8.10000 at step 1, 6.80000 at step 10, 11.00000 at",
        ),
        ([*LOSSES, 9.0, 6.7], "ok", "8.10000 at step 1, 6.80000 at step 10; trend"),
        (
            [6.0 + i / 10 for i in range(10)],
            "FAIL",
            "6.00000 at step 1, 6.90000 at step 10; trend +0.1 a step",
        ),
        (
            [*(6.0 + i / 10 for i in range(10)), 5.0, 4.0, 3.0],
            "ok",
            "after a rise: 6.00000 at step 1, 6.90000 at step 10, 3.00000 at step 13",
        ),
        (
            [10.86, 12.5, 12.0, 11.5, 11.12],
            "--",
            "only after a rise: 10.86000 at step 1, 12.50000 at step 2, 11.12000 at step 5",
        ),
        # Below its start, but with a trend of 0 and of +0.1.
        ([3.0, 1.0, 4.0, 2.0], "ok", "after a rise: 3.00000 at step 1, 4.00000 at step 3, 2.00000 at step 4"),
        ([3.0, 1.0, 5.0, 2.0], "ok", "after a rise: 3.00000 at step 1, 5.00000 at step 3, 2.00000 at step 4"),
        ([8.1] * 12, "FAIL", "it is constant: 8.10000 at step 1, 8.10000 at step 12"),
        ([8.1], "--", "1 finite losses: two are needed"),
    ],
)
def test_trend(check_log, losses, mark, said):
    result = check_log(titan_log(losses, total=len(losses), later=0.5))
    assert f"{mark:4} loss falls             {said}" in result.out, result.out
    assert result.failed == ({"loss falls"} if mark == "FAIL" else set())


def test_steps_that_are_missing_are_counted_from_the_last_one(check_log):
    assert "all steps done         0 of 10" in check_log(titan_log([], finished=False)).out
    assert "all steps done         6 of 10" in check_log(titan_log(LOSSES[:6])).out
    lines = [line.replace("total steps 10", "all") for line in titan_log(LOSSES[:6], finished=False)]
    result = check_log(lines)
    assert result.status == 0
    assert (
        "--   all steps done         6 of an unknown number, no line says that training completed"
        in result.out
    )
    assert check_log(lines, "--steps", 10).failed == {"all steps done"}


# ---------------------------------------------------------------- runs that are not a whole training


def test_excerpt(check_log):
    for start in (2, 5):
        result = check_log([line for line in titan_log() if "step:" in line][start:])
        assert result.status == 0, result.out
        assert "--   second step is faster  the log has no time" in result.out
        assert "--   all steps done         10 of an unknown number, no line says" in result.out
    rising = [line for line in titan_log([8.1, 6.0, 6.1, 6.2]) if "step:" in line][1:]
    assert (
        "--   loss falls             6.00000 at step 2, 6.20000 at step 4; from trained"
        in check_log(rising).out
    )
    assert check_log(rising, "--steps", 4).status == 0
    assert check_log(rising, "--steps", 5).failed == {"all steps done"}


def test_run_that_starts_from_a_checkpoint(check_log):
    lines = titan_log([6.0, 6.1, 6.2], total=3)
    assert check_log(lines).failed == {"loss falls"}
    load = "[titan] 2026-11-29 23:00:01,500 - root - INFO - Loading the checkpoint from out/step-{}."
    for step, failed in ((1000, set()), (0, {"loss falls"})):  # step 0: a seed, its weights are fresh
        assert check_log([lines[0], load.format(step), *lines[1:]]).failed == failed
    constant = titan_log([6.0, 6.0, 6.0], total=3)
    assert check_log([constant[0], load.format(1000), *constant[1:]]).failed == {"loss falls"}


def test_run_that_only_evaluates(check_log):
    line = "[titan] 2026-11-29 23:00:09,000 - root - INFO - validate step: 500  loss:  {}  memory: 1.0GiB"
    whole = titan_log([])
    lines = [*whole[:-1], line.format("3.7190"), whole[-1]]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "--   steps appear           no training, 1 evaluations" in result.out
    assert "ok   losses are finite      all 1 evaluations, the last 3.719" in result.out
    assert check_log([*whole[:-1], line.format("   nan"), whole[-1]]).failed == {"losses are finite"}
    assert check_log([*whole[:-1], line.format("1,234.5"), whole[-1]]).status == 0
    # An evaluation is no step of the training.
    assert "10, 1 to 10" in check_log([*titan_log()[:-1], line.format("9.9"), titan_log()[-1]]).out


def test_stages_without_a_loss(check_log):
    result = check_log(titan_log([-1.0] * 10))
    assert result.status == 0, result.out
    assert "--   losses are finite      only stages of a pipeline without the loss" in result.out
    # Without prefixes, and whichever stage comes first.
    for stages in ([-1.0] * 10, LOSSES), (LOSSES, [-1.0] * 10):
        mixed = [line for lines in zip(*map(titan_log, stages), strict=True) for line in lines]
        result = check_log(mixed)
        assert result.status == 0, result.out
        assert "8.10000 at step 1, 6.80000 at step 10" in result.out


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN"])
@pytest.mark.parametrize("prefix", ["", "[rank3]:"])
def test_gradient_norm_that_is_not_finite(check_log, value, prefix):
    lines = titan_log() if not prefix else titan_log(prefix="[rank0]:") + titan_log(prefix=prefix)
    lines[-4] = lines[-4].replace("grad_norm:  1.0315", f"grad_norm:  {value}")
    result = check_log(lines)
    assert result.failed == {"gradients are finite"}
    where = f"step 8: {float(value)}" + (" on rank 3" if prefix else "")
    assert f"FAIL gradients are finite   grad_norm at {where}\n" in result.out


def test_speed_is_that_after_the_first_step(check_log):
    lines = [line.replace("tps: 1,174", "tps: 12") if "step:  1 " in line else line for line in titan_log()]
    assert "throughput             1,174 tokens/s" in check_log(lines).out
    quantized = check_log([line.replace("mfu: 0.00%", "mfu: N/A") for line in lines])
    assert "1,174 tokens/s, 0.01 TFLOPS per device" in quantized.out
    assert (
        "--   throughput             not logged"
        in check_log([re.sub(" tps.*", " x", line) for line in lines]).out
    )


@pytest.mark.parametrize(
    ("options", "said"), [([], "arguments are required: log"), (["x", "--step"], "--step")]
)
def test_a_wrong_command_line_is_one_line(call, options, said):
    done = call(check_run.main, *options)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: ") and said in done.err


# ---------------------------------------------------------------- other forms of a log


def test_packed_and_other_encodings(check_log):
    text = "\n".join(titan_log()) + "\n"
    whole = check_log(text.encode()).out
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"):
        assert check_log(text.encode(encoding)).out == whole, encoding
        assert check_log(gzip.compress(text.encode(encoding))).out == whole, encoding
    for cut in (12, 200):
        result = check_log(gzip.compress(text.encode())[:cut])
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert "is a gzip file that is cut or damaged: copy it again" in result.err
    for start in (b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\0"):
        assert "unpack it first" in check_log(start + bytes(50)).err


def test_a_log_that_was_emptied_while_it_was_written(check_log):
    assert check_log(bytes(4096) + "\n".join(titan_log()).encode()).status == 0


def event(name: str, step: int, **more) -> str:
    """Return a line of torchtitan 0.3.0's structured log."""
    record = {"rank": 2, "source": "training", "step": step, "time_ms": 1796075236040, "log_type": "event"}
    return json.dumps(
        record | {"log_type_name": name, "event_name": None, "message": f"[step {step}]"} | more
    )


def test_structured_log(check_log):
    lines = [event("training_start", 0)]
    for step in range(1, 6):
        lines += [event("step_start", step), event("step_end", step, value=2000.0 if step == 1 else 10.0)]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "steps appear           5, 1 to 5" in result.out
    assert "--   losses are finite      TorchTitan's structured log has none: give the text log" in result.out
    assert "ok   second step is faster  first 2, then 0.01 s, by the structured log" in result.out
    assert check_log(lines, "--steps", 5).status == 0
    assert check_log(lines, "--steps", 6).failed == {"all steps done"}
    died = event("step_error", 6, message="[step 6] step_error: RuntimeError: shape mismatch")
    assert quoted(check_log([*lines, died])) == "after step 5: rank 2: RuntimeError: shape mismatch (line 12)"
    ended = event(
        "fetching_batch_error", 6, message="[step 6] fetching_batch_error: DataloaderExhaustedError: "
    )
    assert check_log([*lines, ended]).failed == {"all steps done"}


def test_metrics_in_json(check_log):
    def line(step, loss, norm=1.5):
        metrics = {"loss_metrics/global_avg_loss": loss, "grad_norm": norm, "throughput(tps)": 1234.0}
        return json.dumps({"step": step, **metrics, "tflops": 2.5, "mfu(%)": 30.0})

    lines = [line(i + 1, loss) for i, loss in enumerate(LOSSES)]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "8.10000 at step 1, 6.80000 at step 10" in result.out
    assert "1,234 tokens/s, 2.50 TFLOPS, MFU 30.00 % per device" in result.out
    assert check_log([*lines, json.dumps({"step": 11, "validator": 3.1})]).out == result.out
    assert check_log([*lines, line(11, float("nan"))]).failed == {"losses are finite"}
    assert check_log([*lines, line(11, 6.7, float("inf"))]).failed == {"gradients are finite"}
