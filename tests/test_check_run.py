"""titan/check_run.py: the right answer on logs of every kind, and never a traceback."""

import json
import random
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import check_run  # noqa: E402

LOSSES = [8.1, 8.0, 7.8, 7.5, 7.3, 7.4, 7.1, 7.0, 6.9, 6.8]
TIME, STEP = "{time}", "{step:2}  loss: {loss:7.4f}"
OK = {
    "steps appear",
    "losses are finite",
    "loss falls",
    "second step is faster",
    "all steps done",
    "no rank died",
}


def stamp(second: float) -> str:
    return f"2026-11-29 23:{59 if second < 0 else int(second // 60):02}:{second % 60:06.3f}".replace(".", ",")


def titan_log(losses=LOSSES, total=10, first=30.0, later=1.5, prefix="", every=1, finished=True) -> list[str]:
    """Return the lines of torchtitan 0.3.0 for a run that logs every few steps."""
    line = f"{prefix}[titan] {{}} - root - INFO - {{}}"
    lines = [
        line.format(
            stamp(1), f"Trainer is initialized with local batch size 2, total steps {total} (warmup 2)"
        ),
        line.format(stamp(2), "Training starts at step 1"),
    ]
    for i, loss in enumerate(losses):
        number = 1 if i == 0 else i * every + (0 if every > 1 else 1)
        text = (
            f"step: {number:2}  loss: {loss:8.5f}  grad_norm:  1.0315  memory:  0.79GiB(3.34%)  tps: 1,174  "
        )
        lines.append(line.format(stamp(2 + first + later * (number - 1)), text + "tflops: 0.01  mfu: 0.00%"))
    if finished:
        lines.append(line.format(stamp(59), "Training completed"))
    return lines


@pytest.fixture
def check(call, tmp_path):
    """Check a log of these lines: .status, .failed (the points), .out, .err."""

    def check_lines(lines, *options):
        path = tmp_path / "run.log"
        path.write_bytes(lines if isinstance(lines, bytes) else ("\n".join(lines) + "\n").encode())
        result = call(check_run.main, path, *options)
        result.failed = {line[5:27].strip() for line in result.out.splitlines() if line.startswith("FAIL ")}
        result.failed = {name for name in result.failed if name in OK | {"NeuronCores in use"}}
        return result

    return check_lines


def test_good_run(check):
    result = check(titan_log())
    assert (result.status, result.err) == (0, "")
    assert {line[5:27].strip() for line in result.out.splitlines() if line.startswith("ok ")} == OK
    assert "second step is faster  first 30, then 1.5 s, by time stamps" in result.out
    assert "loss falls             8.10000 at step 1, 6.80000 at step 10; trend -0.148 a step" in result.out
    assert "--   NeuronCores in use     no report of neuron-monitor" in result.out


def test_logged_every_tenth_step(check):
    result = check(titan_log(LOSSES[:4], total=30, every=10, later=0.5))
    assert result.status == 0, result.out
    assert "then 0.5 s" in result.out


def test_the_first_gap_between_steps_may_be_shorter(check):
    # Steps 1, 10 and 20 are logged. Nothing is missing of 29 steps, and step 30 of 30 is.
    assert check(titan_log(LOSSES[:3], total=29, every=10, later=0.5)).status == 0
    assert check(titan_log(LOSSES[:3], total=30, every=10, later=0.5)).failed == {"all steps done"}


def test_colours_and_carriage_returns(check):
    red, orange = "\x1b[31m", "\x1b[38;2;180;60;0m"
    lines = [re.sub("(loss|grad_norm):", rf"{orange}\1:", line) for line in titan_log()]
    lines = [line.replace("step:", f"{red}step:") for line in lines]
    assert check([line + "\x1b[39m\r" for line in lines]).status == 0


@pytest.mark.parametrize("prefix", ["[rank{}]:", "[default{}]:", "[rank{}]:2026-11-29T00:00:00Z "])
def test_ranks_mixed(check, prefix):
    ranks = [titan_log(prefix=prefix.format(rank)) for rank in range(4)]
    lines = [line for lines in zip(*ranks, strict=True) for line in random.Random(0).sample(lines, 4)]
    result = check(lines)
    assert result.status == 0, result.out
    assert "steps appear           10, 1 to 10" in result.out


def test_ranks_mixed_without_prefix_and_on_one_line(check):
    lines = [a + b for a, b in zip(titan_log(), titan_log(), strict=True)]
    assert check(lines).status == 0
    assert check([line for line in titan_log() for _ in range(4)]).status == 0


def test_torn_line_is_not_a_lost_step(check):
    lines = titan_log()
    lines[5] = lines[5][:60]
    assert check(lines).status == 0


def test_ranks_that_disagree(check):
    lines = titan_log(prefix="[rank0]:") + titan_log([*LOSSES[:5], 9.0, *LOSSES[6:]], prefix="[rank1]:")
    result = check(lines)
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
def test_other_versions(check, version, line):
    lines = ["[rank0]:[titan] 2026-11-29 23:00:02,000 - root - INFO - Training starts at step 1"]
    for i, loss in enumerate(LOSSES):
        lines.append(line.format(time=stamp(40 + i), step=i + 1, loss=loss))
    lines.append("[rank0]:[titan] 2026-11-29 23:01:02,000 - root - INFO - Training completed")
    result = check(lines, "--steps", 10)
    assert result.status == 0, result.out


def test_no_time_stamps_speed_is_used(check):
    lines = [line.partition(" - root - INFO - ")[2] for line in titan_log()]
    lines = [line.replace("tps: 1,174", "tps: 12") if "step:  1 " in line else line for line in lines]
    result = check(lines)
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
def test_steps_of_less_than_a_second(check, first, later, said):
    assert said in check(titan_log(first=first, later=later)).out


def test_resumed_run(check):
    later = lambda match: f"{match[1]}{int(match[2]) + 500}"  # noqa: E731
    lines = [re.sub(r"(total steps |at step |step: +)(\d+)", later, line) for line in titan_log()]
    result = check(lines)
    assert result.status == 0, result.out
    assert "first 30, then 1.5 s" in result.out


@pytest.mark.parametrize(
    ("change", "failed", "said"),
    [
        ({"losses": [8.1, 8.0, float("nan"), 7.0], "total": 4}, {"losses are finite"}, "step 3: nan"),
        ({"losses": [8.1, float("inf"), 7.0, 6.0], "total": 4}, {"losses are finite"}, "step 2: inf"),
        ({"losses": [8.1, 8.2, 8.3, 8.5], "total": 4}, {"loss falls"}, "trend +0.13 a step"),
        ({"losses": [8.1, 8.1, 8.1, 8.1], "total": 4}, {"loss falls"}, "trend +0 a step"),
        (
            {"later": 20.0, "losses": LOSSES[:3], "total": 3},
            {"second step is faster"},
            "first 30, then 20 s",
        ),
        ({"losses": LOSSES[:6]}, {"all steps done"}, "6 of 10"),
        ({"finished": False}, {"all steps done"}, "no line says that training completed"),
        ({"losses": LOSSES[:1], "total": 1}, {"loss falls", "second step is faster"}, "two are needed"),
        (
            {"losses": LOSSES[:1], "total": 2},
            {"loss falls", "second step is faster", "all steps done"},
            "1 of 2",
        ),
        ({"losses": [], "finished": False}, OK - {"no rank died"}, "no line with step and loss"),
        ({"losses": [*LOSSES, 6.7, 6.6]}, {"all steps done"}, "12 of 10"),
    ],
)
def test_bad_runs(check, change, failed, said):
    result = check(titan_log(**change))
    assert result.status == 1
    assert result.failed == failed
    assert said in result.out
    assert result.out.splitlines()[-1].startswith("FAIL ")


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "  exitcode  : -9 (pid: 1234)",
        "error: rank 2 failed first: killed by SIGKILL; its log: x",
        "RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3. Stopping training.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_dead_rank(check, line):
    result = check([*titan_log(LOSSES[:5], finished=False), line])
    assert result.status == 1
    assert result.failed == {"all steps done", "no rank died"}
    assert line.strip() in result.out


def test_the_first_sign_of_a_death_is_shown(check):
    deaths = ["[rank3]:ValueError: the cause", "[rank0]:RuntimeError: connection closed"]
    assert "no rank died           [rank3]:ValueError: the cause\n" in check([*titan_log(), *deaths]).out


def test_two_runs_in_one_log(check):
    result = check(titan_log() + titan_log())
    assert result.status == 1
    assert "the log of more than one run?" in result.out


KILLED = "Unable to shutdown process 123 via Signals.SIGINT, forcefully exiting via Signals.SIGKILL"
STOP = [
    "Traceback (most recent call last):",
    "KeyboardInterrupt",
    "SignalException: Process got signal: 2",
    KILLED,
]


def test_stopped_run(check):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *STOP]
    assert check(lines).failed == {"all steps done", "no rank died"}
    result = check(lines, "--stopped")
    assert result.status == 0, result.out
    assert "--   all steps done         stopped on request after step 5 of 1000" in result.out
    assert check([*lines[:-4], "error: stopped by SIGINT; no rank is left running"], "--stopped").status == 0


@pytest.mark.parametrize(
    "crash",
    [
        ["[rank3]:Traceback (most recent call last):", "[rank3]:RuntimeError: shape mismatch"],
        ["  exitcode  : 1 (pid: 1234)"],
        ["error: rank 2 failed first: killed by SIGSEGV; its log: x"],
    ],
)
def test_stopping_hides_no_crash(check, crash):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *crash]
    assert check(lines, "--stopped").failed == {"no rank died"}
    assert check([*lines, *STOP], "--stopped").failed == {"no rank died"}


def test_crash_after_the_stop(check):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *STOP, "  exitcode  : -11 (pid: 3)"]
    assert check(lines, "--stopped").failed == {"no rank died"}


@pytest.mark.parametrize(
    "line",
    [
        "[titan] 2026-11-29 23:00:09,000 - root - INFO - expandable_segments avoids out of memory errors",
        "[titan] 2026-11-29 23:00:09,000 - root - INFO - on SIGTERM a checkpoint is written",
        "[titan] 2026-11-29 23:00:09,000 - root - WARNING - retry: Traceback (most recent call last):",
        "ERROR: ld.so: object 'x' from LD_PRELOAD cannot be preloaded: ignored.",
        "error: neuron cache lock busy, retrying",
    ],
)
def test_harmless_words(check, line):
    lines = titan_log()
    assert check([*lines[:3], line, *lines[3:]]).status == 0


def test_nan_on_another_rank(check):
    lines = titan_log(prefix="[rank0]:") + titan_log(
        [*LOSSES[:4], float("nan"), *LOSSES[5:]], prefix="[rank1]:"
    )
    result = check(lines)
    assert result.failed == {"losses are finite"}
    assert "step 5: nan on rank 1" in result.out


def test_ran_out_of_data(check):
    lines = titan_log(LOSSES[:3], total=28, every=10, later=0.5)
    assert check(lines).status == 0
    lines.insert(-1, f"[titan] {stamp(50)} - root - WARNING - Ran out of data; last step was canceled.")
    assert check(lines).failed == {"all steps done"}


def test_lost_lines_do_not_hide_missing_steps(check):
    lines = [line for line in titan_log(total=14) if not re.search("step:  [3-6] ", line)]
    assert check(lines).failed == {"all steps done"}


def test_second_run_that_died_before_its_first_step(check):
    assert check(titan_log() + titan_log()[:1]).failed == {"steps appear"}


def test_the_rank_that_is_read_has_to_finish(check):
    lines = titan_log(prefix="[rank0]:", finished=False) + titan_log(prefix="[rank3]:")
    assert check(lines).failed == {"all steps done"}


def test_pipeline_stages_without_a_loss(check):
    assert check(titan_log([-1.0] * 10, prefix="[rank0]:") + titan_log(prefix="[rank1]:")).status == 0


def test_a_loss_below_minus_one_is_a_loss(check):
    assert check(titan_log([-1.5 - 0.1 * step for step in range(10)])).status == 0


def test_resumed_run_that_logs_every_tenth_step(check):
    lines = titan_log(LOSSES[1:4], total=530, every=10)
    lines = [re.sub(r"step:  1 ", "step: 510 ", line) for line in lines]
    lines = [re.sub(r"step: ([12]0) ", lambda m: f"step: {510 + int(m[1])} ", line) for line in lines]
    lines = [line.replace("starts at step 1", "starts at step 501") for line in lines]
    result = check(lines)
    assert result.status == 0, result.out
    assert "--   second step is faster" in result.out


def test_clock_is_no_rank(check):
    assert check([f"{9 + i // 6:02}:59:01 {line}" for i, line in enumerate(titan_log())]).status == 0


def test_colours_that_lost_their_escape(check):
    for escape in ("", "^["):
        assert check([re.sub("(step|loss):", rf"{escape}[31m\1:", line) for line in titan_log()]).status == 0


def test_ranks_without_prefix_that_lag(check):
    lines = titan_log()
    assert check(lines[:2] * 2 + lines[2:]).status == 0


def test_numbers_that_are_none(check):
    lines = titan_log()
    assert check([*lines, "step: 11  loss: , x", "step: 12 loss: 1 tps: ,"]).status == 1
    assert check([*lines[:-1], "[titan] step: 11  loss:  6."]).out.count("10, 1 to 10")
    assert check(titan_log([1.7e308, 1.6e308, -1.7e308], total=3)).status in (0, 1)
    assert check([*lines, f"step: {'9' * 400} loss: 1 x"]).status == 0


def test_a_step_in_capitals_is_enough_to_know_the_log(check):
    assert "steps appear           1, 1 to 1" in check(["Step: 1 Loss: 8.1 tps: 7"]).out


def test_odd_options(call, check):
    for value in (0, -5):
        assert check(titan_log(), "--steps", value).status == 2
    assert call(check_run.main, ".").status == 2
    assert check(["pip install torchtitan", "done"]).status == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (b"hello\nworld\n", "has no line of a TorchTitan run, in 2 lines"),
        (bytes(range(256)) * 100, "has no line of a TorchTitan run"),
    ],
)
def test_no_log_of_a_run(check, content, said):
    result = check(content)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_missing_log_and_directory(call, tmp_path):
    for path in (tmp_path / "missing.log", tmp_path):
        result = call(check_run.main, path)
        assert result.status == 2
        assert "cannot be read" in result.err


@pytest.mark.parametrize("cut", range(0, 1500, 37))
def test_truncated_anywhere(check, cut):
    whole = "\n".join(titan_log()).encode()
    result = check(whole[:cut])
    assert result.status == (2 if cut < 7 else 1)


def test_neuron_monitor(check, tmp_path):
    def report(*used):
        cores = {str(i): {"neuroncore_utilization": value} for i, value in enumerate(used)}
        counters = {"neuroncore_counters": {"neuroncores_in_use": cores}}
        return json.dumps({"neuron_runtime_data": [{"pid": 1, "report": counters}]})

    record = tmp_path / "run.log.neuron-monitor"  # where it is looked for without the option
    record.write_text(report(90.0, 0) + "\n" + report(0, 0.5) + "\n" + report(1, 1)[:40])
    assert "2 cores, in 2 reports" in check(titan_log(), "--neuron-monitor", record).out
    record.write_text(report(0, 0.5))
    assert "ok   NeuronCores in use     1 cores, in 1 reports" in check(titan_log()).out
    record.write_text(report(0, 0) + "\n")
    result = check(titan_log(), "--neuron-monitor", record)
    assert (result.status, result.failed) == (1, {"NeuronCores in use"})
    for content in ("", "nonsense\n[1]\n"):  # a monitor that did not start
        record.write_text(content)
        assert "--   NeuronCores in use" in check(titan_log(), "--neuron-monitor", record).out
    record.unlink()
    assert check(titan_log(), "--neuron-monitor", record).status == 2


# ---------------------------------------------------------------- one step away from what passes


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "error: rank 3 failed first: exit status 1; its log: x",
        "[rank3]:Traceback (most recent call last):",
    ],
)
def test_death_after_the_last_step(check, line):
    result = check([*titan_log(), line])
    assert (result.status, result.failed) == (1, {"no rank died"})
    assert line.strip() in result.out


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
def test_last_step(check, losses, total, every, done):
    result = check(titan_log(losses, total=total, every=every, later=0.5))
    assert result.failed == (set() if done else {"all steps done"})


def test_second_run_without_start_lines(check):
    # Its steps begin anew; its losses, other than the first run's, would be dropped.
    again = [line for line in titan_log([loss + 1 for loss in LOSSES]) if "step:" in line]
    result = check(titan_log() + again)
    assert result.failed == {"steps appear"}
    assert "the log of more than one run?" in result.out


def test_clock_that_was_set_back_tells_no_time(check):
    for without_speed in ("step:", "step:  1 ", "step:  2 "):
        lines = titan_log(later=-1.5)
        lines = [line.replace("tps: 1,174  ", "") if without_speed in line else line for line in lines]
        result = check(lines)
        assert (result.status, result.failed) == (0, set())
        assert "--   second step is faster" in result.out


@pytest.mark.parametrize(("later", "faster"), [(14.9, True), (15.1, False)])
def test_second_step_takes_half_of_the_first_at_most(check, later, faster):
    result = check(titan_log(LOSSES[:2], total=2, later=later))
    assert result.failed == (set() if faster else {"second step is faster"})


def test_trend_is_that_of_the_first_ten_steps(check):
    result = check(titan_log([*LOSSES, *(9.0 + i for i in range(5))], total=15, later=0.5))
    assert result.status == 0
    assert "6.80000 at step 10; trend -0.148 a step" in result.out
    rising = [6.0 + 0.1 * i for i in range(10)]
    result = check(titan_log([*rising, *(5.0 - i for i in range(5))], total=15, later=0.5))
    assert result.failed == {"loss falls"}


def test_steps_that_are_missing_are_counted_from_the_last_one(check):
    assert "all steps done         0 of 10" in check(titan_log([], finished=False)).out
    assert "all steps done         6 of 10" in check(titan_log(LOSSES[:6])).out
    lines = [line.replace("total steps 10", "all") for line in titan_log(LOSSES[:6], finished=False)]
    result = check(lines)
    assert result.failed == {"all steps done"}
    assert "6 of an unknown number: give --steps" in result.out
