"""titan/check_run.py: the right answer on logs of every kind, and never a traceback."""

import gzip
import json
import random
import re
import sys
import time

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import check_run  # noqa: E402

LOSSES = [8.1, 8.0, 7.8, 7.5, 7.3, 7.4, 7.1, 7.0, 6.9, 6.8]
TIME, STEP = "{time}", "{step:2}  loss: {loss:7.4f}"
OK = {
    "steps appear",
    "losses are finite",
    "gradients are finite",
    "loss falls",
    "second step is faster",
    "throughput",
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
    assert "gradients are finite   all 10, norm 1.032 to 1.032" in result.out
    assert "throughput             1,174 tokens/s, 0.01 TFLOPS, MFU 0.00 % per device, median" in result.out
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
def test_bad_runs(check, change, failed, said):
    result = check(titan_log(**change))
    assert result.status == 1
    assert result.failed == failed
    assert said in result.out
    assert result.out.splitlines()[-1].startswith("FAIL ")


def quoted(result) -> str:
    """Return what is said of a death, and that nothing else is said but what was wrong before it."""
    assert result.status == 1, result.out
    first, *_, last = result.out.splitlines()
    assert first.startswith("FAIL no rank died           ") and last.startswith("FAIL "), result.out
    assert "all steps done" not in result.out
    return first[28:]


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "  exitcode  : -9 (pid: 1234)",
        "error: rank 2 failed first: killed by SIGKILL; its log: x",
        "RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3. Stopping training.",
        "RuntimeError: Loss or gradient norm is not finite at step 6",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: The total norm is non-finite, so it cannot be clipped: set error_if_nonfinite=False",
        "torch._inductor.exc.InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: out of",
        "subprocess.CalledProcessError: Command 'neuronx-cc' returned non-zero exit status 70.",
        "ray.exceptions.RayTaskError(RuntimeError): ray::execute",
        "Fatal Python error: Segmentation fault",
        "Fatal Python error: none_dealloc: deallocating None",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  CUDA out of memory.",
        "Segmentation fault (core dumped)",
        "run.sh: line 12: 3456 Killed                  torchrun train.py",
        "run.sh: line 12: 3456 Aborted                 (core dumped) torchrun train.py",
        "double free or corruption (!prev)",
        "[node7:41] *** Process received signal ***",
        "[E1130 01:02:03.456 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout",
        "[E ProcessGroupNCCL.cpp:577] [Rank 2] To avoid data inconsistency, we are taking the entire process"
        " down.",
        "2026-Nov-30 01:02:03.456789  8:8  ERROR  TDRV:log_dev_mem     Failed to allocate 64.000MB on ND 0",
        "2026-Nov-30 01:02:03.456  8:8  ERROR   NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available",
        "RuntimeError: execution failed: status=1006 NRT_EXEC_OOB",
        "nrt_load status=4, error message=Allocation Failure",
        "2026-11-30 01:02:03.000123:  98  ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['x']",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM"
        " Killed.",
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-30T01:02:03 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-30T01:02:03 ***",
        "srun: error: n1: task 3: Exited with exit code 1",
        "srun: error: n1: tasks 0-7: Segmentation fault",
        "=>> PBS: job killed: walltime 3612 exceeded limit 3600",
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "command terminated with exit code 137",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15",
        "          : Signal 9 (SIGKILL) received by PID 12",
        "E1130 01:02:03.4 12 torch/elastic/multiprocessing/api.py:9] failed (exitcode: 1) local_rank: 0",
    ],
)
@pytest.mark.parametrize("rank", ["", "[rank3]:"])
def test_dead_rank(check, line, rank):
    result = check([*titan_log(LOSSES[:5], finished=False), rank + line])
    said = quoted(result)
    # torch's own logs have their time and file before the message, Neuron's a time
    message = line.partition("] ")[2] if re.match(r"E1|\[E", line) else line
    message = " ".join(re.sub(r"2026-Nov-30 \S+ +8:8 ", "", message).split())
    assert said.startswith("after step 5: " + ("rank 3: " if rank else "") + message[:100].rstrip()), said
    assert said.endswith("(line 8)")


def test_the_first_exception_is_shown(check):
    deaths = ["[rank3]:ValueError: the cause", "[rank0]:RuntimeError: something later"]
    assert quoted(check([*titan_log(), *deaths])) == "after step 10: rank 3: ValueError: the cause (line 14)"
    assert quoted(check(deaths + ["[titan] Trainer is initialized"])).startswith(
        "before the first step: rank 3"
    )


REPORT = [
    "W1130 01:02:03.4 12 torch/elastic/multiprocessing/api.py:9] Sending process 34 closing signal SIGTERM",
    "E1130 01:02:03.5 12 torch/elastic/multiprocessing/api.py:8] failed (exitcode: 1) local_rank: 3",
    "Traceback (most recent call last):",
    '  File "torchrun", line 8, in <module>',
    "    raise ChildFailedError(",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "  exitcode  : -15 (pid: 1234)",
    "  traceback : Signal 15 (SIGTERM) received by PID 1234",
]


def test_the_exception_is_shown_not_what_torchrun_reports(check):
    lines = titan_log(LOSSES[:5], finished=False)
    cause = [
        "[rank3]:[rank3]: Traceback (most recent call last):",
        '[rank3]:[rank3]:   File "x.py", line 7, in forward',
        "[rank3]:[rank3]:     raise RuntimeError(",
        "[rank3]:[rank3]: torch._dynamo.exc.BackendCompilerFailed: backend='neuron' raised",
        "[rank3]:[rank3]: RuntimeError: a later one",
    ]
    want = "after step 5: rank 3: torch._dynamo.exc.BackendCompilerFailed: backend='neuron' raised (line "
    assert quoted(check([*lines, *cause, *REPORT])) == want + "11)"
    assert quoted(check([*lines, *REPORT, *cause])) == want + "19)"
    # Where the rank's own lines are filtered out, torchrun's report has its exception.
    again = [
        "  traceback : Traceback (most recent call last):",
        '    File "x.py", line 7',
        "  ValueError: bad shape",
    ]
    assert quoted(check([*lines, *REPORT, *again])) == "after step 5: ValueError: bad shape (line 18)"
    # A rank that lost its peer did not die of itself.
    lost = "[rank0]:RuntimeError: [enforce fail] Connection closed by peer [10.0.0.3]:41"
    assert quoted(check([*lines, lost, *cause])).startswith("after step 5: rank 3: torch._dynamo")
    assert "failed (exitcode: 1)" in quoted(check([*lines, *REPORT]))
    assert quoted(check([*lines, REPORT[0]])).startswith("after step 5: Sending process 34 closing signal")


def test_readme_shows_what_is_printed_of_a_crash(check):
    cause = "[rank3]:[rank3]: RuntimeError: shape '[8, 64]' is invalid for input of size 256"
    source = ['[rank3]:[rank3]:   File "x.py", line 7, in f', "[rank3]:[rank3]:     return x.view(8, 64)"]
    lines = [
        *titan_log(LOSSES[:5], prefix="[rank0]:", finished=False),
        "[rank3]:[rank3]: Traceback (most recent call last):",
    ]
    result = check([*lines, *source, cause, REPORT[0]])
    printed = re.sub(r"FAIL \S+/run.log", "FAIL run.log", result.out)
    assert f"```text\n{printed}```" in (ROOT / "titan/README.md").read_text()


def test_time_limit_is_the_cause_of_the_signals(check):
    lines = [*titan_log(LOSSES[:5], finished=False), *REPORT]
    lines.append(
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-30T01:02:03 DUE TO TIME LIMIT ***"
    )
    assert "DUE TO TIME LIMIT" in quoted(check(lines))


@pytest.mark.parametrize(
    "line",
    [
        "/lib/x.py:7: UserWarning: CUDA initialization: RuntimeError: CUDA out of memory",
        "RuntimeWarning: overflow",
        "Warning: You are sending unauthenticated requests",
        "╰─────",
        "│ RuntimeError: in a box                    │",
    ],
)
def test_no_warning_and_no_box_is_quoted(check, line):
    lines = titan_log()
    assert check([*lines, line]).status == 0
    died = check([*lines, line, "ValueError: the cause"])
    assert quoted(died) == "after step 10: ValueError: the cause (line 15)"


def test_two_runs_that_died(check):
    lines = titan_log(LOSSES[:5], finished=False)
    result = check([*lines, "ValueError: the cause", *lines])
    assert result.failed == {"no rank died", "steps appear"}
    assert "after step 5: ValueError: the cause" in quoted(result)


def test_bad_figures_before_a_crash_are_shown(check):
    lines = titan_log([8.1, float("nan")], finished=False)
    result = check([*lines, "RuntimeError: Loss is not finite (global_avg_loss=nan) at step 2."])
    assert result.failed == {"no rank died", "losses are finite"}
    lines = titan_log([8.1, 8.0], finished=False)
    lines[3] = lines[3].replace("grad_norm:  1.0315", "grad_norm:     nan")
    assert check([*lines, "ValueError: x"]).failed == {"no rank died", "gradients are finite"}


# ---------------------------------------------------------------- what others put before a line

PREFIXES = [
    "[rank3]:[rank3]: ",
    "[rank3]:",
    "[default3]:",
    "[worker3]:",
    "3: ",
    " 3: ",
    "0: [rank3]:",
    "0: [rank3]:[rank3]: ",
    "[1,3]<stdout>:",
    "[1,mpirank:3,algo-1]<stderr>:",
    "x1001c0s1b0n0.hsn.cluster 3: ",
    "2026-11-30T01:02:03.456Z [rank3]:",
    "2026-11-30T01:02:03.456789012Z stdout F [rank3]:",
    "[pod/llama-worker-0/pytorch] [rank3]:",
    "[pod/llama-worker-0/pytorch] 2026-11-30T01:02:03.456Z [rank3]: ",
    "llama-worker-0  | [rank3]:",
    "Nov 30 01:02:03 node1 train.sh[77]: [rank3]:",
    "[Mon Nov 30 01:02:03 AM UTC 2026] [rank3]:",
    "(RayTrainWorker pid=77, ip=10.0.0.7) [rank3]:",
    "node12: [rank3]:",
    "\x1b[36m3: \x1b[0m",
    "\x1b[32m[rank3]:\x1b[0m\x1b[31m",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(check, prefix):
    assert check(titan_log(prefix=prefix)).status == 0
    lines = titan_log(LOSSES[:5], prefix=prefix, finished=False)
    crash = [f"{prefix}Traceback (most recent call last):", f'{prefix}  File "x.py", line 7, in f']
    died = check([*lines, *crash, f"{prefix}ValueError: the cause", *REPORT])
    assert quoted(died) == "after step 5: rank 3: ValueError: the cause (line 10)"


@pytest.mark.parametrize(
    "garbage",
    [
        "  1%|▏         | 24/1752 [01:08<1:22:56,  2.88s/it]",
        "Weights:   0%|          | 0/408 [00:00<?, ?it/s]\rWeights: 100%|██████████| 408/408 ",
        "half a line of another rank, cu",
        "[rank1]:[titan] 2026-11-29 23:00:09,000 - root - INFO - step: 11  lo",
    ],
)
def test_garbage_before_the_prefix(check, garbage):
    lines = titan_log(LOSSES[:5], prefix="[rank3]:", finished=False)
    died = check([*lines, f"{garbage}[rank3]:[rank3]: ValueError: the cause"])
    assert quoted(died) == "after step 5: rank 3: ValueError: the cause (line 8)"
    whole = titan_log(prefix="[rank3]:")
    whole[4] = garbage + whole[4]
    assert check(whole).status == 0


def test_lines_in_json_of_a_collector(check):
    lines = [json.dumps({"log": line + "\n", "stream": "stdout"}) for line in titan_log(prefix="[rank0]:")]
    assert check(lines).status == 0
    died = check([*lines, json.dumps({"message": "[rank3]:[rank3]: ValueError: the cause"})])
    assert quoted(died) == "after step 10: rank 3: ValueError: the cause (line 14)"


def test_ranks_of_two_nodes_under_one_label(check):
    # Slurm's label names the node, torchrun's the rank in it. The last stage is on the other node.
    nodes = [titan_log([-1.0] * 10, prefix="0: [rank0]:"), titan_log(prefix="1: [rank0]:")]
    assert check([line for lines in zip(*nodes, strict=True) for line in lines]).status == 0


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
    assert check(lines).failed == {"no rank died"}
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


def test_stopped_by_slurm(check):
    lines = titan_log(LOSSES[:5], total=1000, finished=False)
    cancelled = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-30T01:02:03{} ***"
    after = ["srun: error: n1: tasks 0-7: Terminated", "[rank3]:RuntimeError: Connection closed by peer"]
    assert check([*lines, cancelled.format(""), *after], "--stopped").status == 0
    assert check([*lines, *after[:1], cancelled.format("")], "--stopped").status == 0
    limit = cancelled.format(" DUE TO TIME LIMIT")
    assert check([*lines, limit, *after], "--stopped").failed == {"no rank died"}


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


def test_long_lines_take_no_time(check):
    long = ["a1" * 50_000, "1" * 100_000, "[rank3]:" * 10_000, "x.Y" * 30_000, "0:" * 50_000, "E" * 99_999]
    long.append('{"a":' * 50_000 + "1" + "}" * 50_000)
    start = time.monotonic()
    assert check([*titan_log(), *long]).status == 0
    assert time.monotonic() - start < 30


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
    assert line.removeprefix("[rank3]:") in result.out


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
    lines = titan_log(LOSSES[:2], total=2, later=later)
    result = check(lines)
    assert f"{'ok' if faster else '--':4} second step is faster  first 30, then {later} s" in result.out
    # Only where the log says that this run compiled is it a failure.
    lines.insert(2, "Compilation Successfully Completed for model.hlo_module.pb")
    assert check(lines).failed == (set() if faster else {"second step is faster"})


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
        ([8.1] * 12, "FAIL", "it is constant: 8.10000 at step 1, 8.10000 at step 12"),
        ([8.1], "--", "1 finite losses: two are needed"),
    ],
)
def test_trend(check, losses, mark, said):
    result = check(titan_log(losses, total=len(losses), later=0.5))
    assert f"{mark:4} loss falls             {said}" in result.out, result.out
    assert result.failed == ({"loss falls"} if mark == "FAIL" else set())


def test_steps_that_are_missing_are_counted_from_the_last_one(check):
    assert "all steps done         0 of 10" in check(titan_log([], finished=False)).out
    assert "all steps done         6 of 10" in check(titan_log(LOSSES[:6])).out
    lines = [line.replace("total steps 10", "all") for line in titan_log(LOSSES[:6], finished=False)]
    result = check(lines)
    assert result.status == 0
    assert (
        "--   all steps done         6 of an unknown number, no line says that training completed"
        in result.out
    )
    assert check(lines, "--steps", 10).failed == {"all steps done"}


# ---------------------------------------------------------------- what looks like a death


DEALLOCATOR = [
    "Exception ignored while calling deallocator <function CheckpointManager.__del__ at 0x7f>:",
    "Traceback (most recent call last):",
    '  File "checkpoint.py", line 9, in __del__',
    "PythonFinalizationError: cannot join thread at interpreter shutdown",
]
THREAD = [
    "Exception in thread Thread-4 (_pin_memory_loop):",
    "Traceback (most recent call last):",
    '  File "pin_memory.py", line 9, in do_one_step',
    "EOFError",
]
WARNINGS = [
    "2026-Nov-30 01:02:03.456  8:8  WARN  NRT:nrt_init      Failed to read the topology, falling back",
    "2026-Nov-30 01:02:03.456  8:8  INFO  TDRV:reset        no device failed to reset",
    "[W1130 01:02:03.4 TCPStore.cpp:125] recvValue failed: RuntimeError: Connection reset by peer",
    "[W1130 01:02:03.4 ProcessGroupNCCL.cpp:9] Warning: destroy_process_group() was not called before exit",
    "n1:29:29 [0] misc/ibvwrap.cc:185 NCCL WARN lib wrapper not initialized.",
    "E0000 00:00:1732.4 123 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register",
    "wandb: ERROR Error while calling W&B API: timeout",
    "Error while fetching HF_TOKEN",
    "slurmstepd: error: Unable to create TMPDIR [/scratch/12]: Permission denied",
    "ERROR: ld.so: object 'x' from LD_PRELOAD cannot be preloaded: ignored.",
    "[2026-11-30 01:02:03,456] torch.distributed.run: [WARNING] an Error: out of memory in a warning",
    "W1130 01:02:03.4 9 torch/_dynamo/x.py:7] RuntimeError: out of memory, falling back",
]
AUTOTUNING = [
    "Traceback (most recent call last):",
    '  File "triton_heuristics.py", line 9, in _make_launchers',
    '    raise RuntimeError(f"No valid triton configs. {type(exc).__name__}: {exc}")',
    "RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 360448",
    "Runtime error during autotuning: ",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 360448 .",
    "Ignoring this choice.",
    "E1130 01:02:03.4 9 torch/_inductor/select_algorithm.py:7] [1/0] No valid triton configs.",
]
CONFIG = [
    "{",
    '  "on_error": "raise RuntimeError: out of memory",',
    '  "error_if_nonfinite": true,',
    '  "exception": "ValueError"',
    "}",
    "+ trap 'kill 0' SIGTERM",
    "        grads, norm_type, error_if_nonfinite, foreach",
]


@pytest.mark.parametrize("harmless", [DEALLOCATOR, THREAD, WARNINGS, AUTOTUNING, CONFIG])
@pytest.mark.parametrize("rank", ["", "[rank3]:", "[rank3]:[rank3]: "])
@pytest.mark.parametrize("where", [2, 5, 13])
def test_what_looks_like_a_death(check, harmless, rank, where):
    lines = titan_log()
    lines[where:where] = [rank + line for line in harmless]
    result = check(lines)
    assert result.status == 0, result.out
    assert "no rank died           no sign of it" in result.out
    assert quoted(check([*lines, f"{rank}ValueError: the cause"])).split(": ")[-1].startswith("the cause")


def test_ranks_that_ignore_exceptions_at_once(check):
    mixed = [line for line in DEALLOCATOR for _ in range(4)]
    assert check([*titan_log(), *mixed]).status == 0
    assert quoted(check([*titan_log(), *mixed, "PythonFinalizationError: one more"])).startswith(
        "after step 10"
    )


def test_training_that_went_on(check):
    # Not a death, whatever the words: two more steps were done. One may have been on its way.
    lines = titan_log()
    for where, died in ((4, False), (9, False), (11, True), (12, True)):
        result = check([*lines[:where], "[rank3]:ConnectionError: retrying", *lines[where:]])
        assert (result.failed == {"no rank died"}) is died, where
        if not died:
            assert (
                f"training went on after: rank 3: ConnectionError: retrying (line {where + 1})" in result.out
            )
    # Two files put together: all that is known is that it did not come to an end.
    lines = titan_log(finished=False)
    result = check([lines[0], "[rank3]:ConnectionError: retrying", *lines[1:]])
    assert result.failed == {"all steps done"}
    assert "--   no rank died           training went on after: rank 3" in result.out


# ---------------------------------------------------------------- runs that are not a whole training


def test_excerpt(check):
    for start in (2, 5):
        result = check([line for line in titan_log() if "step:" in line][start:])
        assert result.status == 0, result.out
        assert "--   second step is faster  the log has no time" in result.out
        assert "--   all steps done         10 of an unknown number, no line says" in result.out
    rising = [line for line in titan_log([8.1, 6.0, 6.1, 6.2]) if "step:" in line][1:]
    assert (
        "--   loss falls             6.00000 at step 2, 6.20000 at step 4; from trained" in check(rising).out
    )
    assert check(rising, "--steps", 4).status == 0
    assert check(rising, "--steps", 5).failed == {"all steps done"}


def test_run_that_starts_from_a_checkpoint(check):
    lines = titan_log([6.0, 6.1, 6.2], total=3)
    assert check(lines).failed == {"loss falls"}
    load = "[titan] 2026-11-29 23:00:01,500 - root - INFO - Loading the checkpoint from out/step-{}."
    for step, failed in ((1000, set()), (0, {"loss falls"})):  # step 0: a seed, its weights are fresh
        assert check([lines[0], load.format(step), *lines[1:]]).failed == failed
    constant = titan_log([6.0, 6.0, 6.0], total=3)
    assert check([constant[0], load.format(1000), *constant[1:]]).failed == {"loss falls"}


def test_run_that_only_evaluates(check):
    line = "[titan] 2026-11-29 23:00:09,000 - root - INFO - validate step: 500  loss:  {}  memory: 1.0GiB"
    whole = titan_log([])
    lines = [*whole[:-1], line.format("3.7190"), whole[-1]]
    result = check(lines)
    assert result.status == 0, result.out
    assert "--   steps appear           no training, 1 evaluations" in result.out
    assert "ok   losses are finite      all 1 evaluations, the last 3.719" in result.out
    assert check([*whole[:-1], line.format("   nan"), whole[-1]]).failed == {"losses are finite"}
    # An evaluation is no step of the training.
    assert "10, 1 to 10" in check([*titan_log()[:-1], line.format("9.9"), titan_log()[-1]]).out


def test_stages_without_a_loss(check):
    result = check(titan_log([-1.0] * 10))
    assert result.status == 0, result.out
    assert "--   losses are finite      only stages of a pipeline without the loss" in result.out
    # Without prefixes, and whichever stage comes first.
    for stages in ([-1.0] * 10, LOSSES), (LOSSES, [-1.0] * 10):
        mixed = [line for lines in zip(*map(titan_log, stages), strict=True) for line in lines]
        result = check(mixed)
        assert result.status == 0, result.out
        assert "8.10000 at step 1, 6.80000 at step 10" in result.out


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN"])
@pytest.mark.parametrize("prefix", ["", "[rank3]:"])
def test_gradient_norm_that_is_not_finite(check, value, prefix):
    lines = titan_log() if not prefix else titan_log(prefix="[rank0]:") + titan_log(prefix=prefix)
    lines[-4] = lines[-4].replace("grad_norm:  1.0315", f"grad_norm:  {value}")
    result = check(lines)
    assert result.failed == {"gradients are finite"}
    where = f"step 8: {float(value)}" + (" on rank 3" if prefix else "")
    assert f"FAIL gradients are finite   grad_norm at {where}\n" in result.out


def test_speed_is_that_after_the_first_step(check):
    lines = [line.replace("tps: 1,174", "tps: 12") if "step:  1 " in line else line for line in titan_log()]
    assert "throughput             1,174 tokens/s" in check(lines).out
    quantized = check([line.replace("mfu: 0.00%", "mfu: N/A") for line in lines])
    assert "1,174 tokens/s, 0.01 TFLOPS per device" in quantized.out
    assert (
        "--   throughput             not logged"
        in check([re.sub(" tps.*", " x", line) for line in lines]).out
    )


# ---------------------------------------------------------------- other forms of a log


def test_packed_and_other_encodings(check):
    text = "\n".join(titan_log()) + "\n"
    whole = check(text.encode()).out
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"):
        assert check(text.encode(encoding)).out == whole, encoding
        assert check(gzip.compress(text.encode(encoding))).out == whole, encoding
    for cut in (12, 200):
        result = check(gzip.compress(text.encode())[:cut])
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert "is a gzip file that is cut or damaged: copy it again" in result.err
    for start in (b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\0"):
        assert "unpack it first" in check(start + bytes(50)).err


def test_a_log_that_was_emptied_while_it_was_written(check):
    assert check(bytes(4096) + "\n".join(titan_log()).encode()).status == 0


def event(name: str, step: int, **more) -> str:
    """Return a line of torchtitan 0.3.0's structured log."""
    record = {"rank": 2, "source": "training", "step": step, "time_ms": 1796075236040, "log_type": "event"}
    return json.dumps(
        record | {"log_type_name": name, "event_name": None, "message": f"[step {step}]"} | more
    )


def test_structured_log(check):
    lines = [event("training_start", 0)]
    for step in range(1, 6):
        lines += [event("step_start", step), event("step_end", step, value=2000.0 if step == 1 else 10.0)]
    result = check(lines)
    assert result.status == 0, result.out
    assert "steps appear           5, 1 to 5" in result.out
    assert "--   losses are finite      TorchTitan's structured log has none: give the text log" in result.out
    assert "ok   second step is faster  first 2, then 0.01 s, by the structured log" in result.out
    assert check(lines, "--steps", 5).status == 0
    assert check(lines, "--steps", 6).failed == {"all steps done"}
    died = event("step_error", 6, message="[step 6] step_error: RuntimeError: shape mismatch")
    assert quoted(check([*lines, died])) == "after step 5: rank 2: RuntimeError: shape mismatch (line 12)"
    ended = event(
        "fetching_batch_error", 6, message="[step 6] fetching_batch_error: DataloaderExhaustedError: "
    )
    assert check([*lines, ended]).failed == {"all steps done"}


def test_metrics_in_json(check):
    def line(step, loss, norm=1.5):
        metrics = {"loss_metrics/global_avg_loss": loss, "grad_norm": norm, "throughput(tps)": 1234.0}
        return json.dumps({"step": step, **metrics, "tflops": 2.5, "mfu(%)": 30.0})

    lines = [line(i + 1, loss) for i, loss in enumerate(LOSSES)]
    result = check(lines)
    assert result.status == 0, result.out
    assert "8.10000 at step 1, 6.80000 at step 10" in result.out
    assert "1,234 tokens/s, 2.50 TFLOPS, MFU 30.00 % per device" in result.out
    assert check([*lines, line(11, float("nan"))]).failed == {"losses are finite"}
    assert check([*lines, line(11, 6.7, float("inf"))]).failed == {"gradients are finite"}
