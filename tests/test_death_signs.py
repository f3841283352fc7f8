"""titan/death_signs.py: which line of a log says why a rank died, whoever put what before it."""

import json
import re

import pytest
from conftest import ROOT
from made_titan_logs import LOSSES, quoted, titan_log


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
def test_dead_rank(check_log, line, rank):
    result = check_log([*titan_log(LOSSES[:5], finished=False), rank + line])
    said = quoted(result)
    # torch's own logs have their time and file before the message, Neuron's a time
    message = line.partition("] ")[2] if re.match(r"E1|\[E", line) else line
    message = " ".join(re.sub(r"2026-Nov-30 \S+ +8:8 ", "", message).split())
    assert said.startswith("after step 5: " + ("rank 3: " if rank else "") + message[:100].rstrip()), said
    assert said.endswith("(line 8)")


def test_the_first_exception_is_shown(check_log):
    deaths = ["[rank3]:ValueError: the cause", "[rank0]:RuntimeError: something later"]
    assert (
        quoted(check_log([*titan_log(), *deaths])) == "after step 10: rank 3: ValueError: the cause (line 14)"
    )
    assert quoted(check_log(deaths + ["[titan] Trainer is initialized"])).startswith(
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


def test_the_exception_is_shown_not_what_torchrun_reports(check_log):
    lines = titan_log(LOSSES[:5], finished=False)
    cause = [
        "[rank3]:[rank3]: Traceback (most recent call last):",
        '[rank3]:[rank3]:   File "x.py", line 7, in forward',
        "[rank3]:[rank3]:     raise RuntimeError(",
        "[rank3]:[rank3]: torch._dynamo.exc.BackendCompilerFailed: backend='neuron' raised",
        "[rank3]:[rank3]: RuntimeError: a later one",
    ]
    want = "after step 5: rank 3: torch._dynamo.exc.BackendCompilerFailed: backend='neuron' raised (line "
    assert quoted(check_log([*lines, *cause, *REPORT])) == want + "11)"
    assert quoted(check_log([*lines, *REPORT, *cause])) == want + "19)"
    # Where the rank's own lines are filtered out, torchrun's report has its exception.
    again = [
        "  traceback : Traceback (most recent call last):",
        '    File "x.py", line 7',
        "  ValueError: bad shape",
    ]
    assert quoted(check_log([*lines, *REPORT, *again])) == "after step 5: ValueError: bad shape (line 18)"
    # A rank that lost its peer did not die of itself.
    lost = "[rank0]:RuntimeError: [enforce fail] Connection closed by peer [10.0.0.3]:41"
    assert quoted(check_log([*lines, lost, *cause])).startswith("after step 5: rank 3: torch._dynamo")
    assert "failed (exitcode: 1)" in quoted(check_log([*lines, *REPORT]))
    assert quoted(check_log([*lines, REPORT[0]])).startswith(
        "after step 5: Sending process 34 closing signal"
    )


def test_readme_shows_what_is_printed_of_a_crash(check_log):
    cause = "[rank3]:[rank3]: RuntimeError: shape '[8, 64]' is invalid for input of size 256"
    source = ['[rank3]:[rank3]:   File "x.py", line 7, in f', "[rank3]:[rank3]:     return x.view(8, 64)"]
    lines = [
        *titan_log(LOSSES[:5], prefix="[rank0]:", finished=False),
        "[rank3]:[rank3]: Traceback (most recent call last):",
    ]
    result = check_log([*lines, *source, cause, REPORT[0]])
    printed = re.sub(r"FAIL \S+/run.log", "FAIL run.log", result.out)
    assert f"```text\n{printed}```" in (ROOT / "titan/README.md").read_text()


def test_time_limit_is_the_cause_of_the_signals(check_log):
    lines = [*titan_log(LOSSES[:5], finished=False), *REPORT]
    lines.append(
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-30T01:02:03 DUE TO TIME LIMIT ***"
    )
    assert "DUE TO TIME LIMIT" in quoted(check_log(lines))


@pytest.mark.parametrize(
    "line",
    [
        "/lib/x.py:7: UserWarning: CUDA initialization: RuntimeError: CUDA out of memory",
        "RuntimeWarning: overflow",
        "warning: RuntimeError: out of memory, using the slow path",
        "Warning: You are sending unauthenticated requests",
        "╰─────",
        "│ RuntimeError: in a box                    │",
    ],
)
def test_no_warning_and_no_box_is_quoted(check_log, line):
    lines = titan_log()
    assert check_log([*lines, line]).status == 0
    died = check_log([*lines, line, "ValueError: the cause"])
    assert quoted(died) == "after step 10: ValueError: the cause (line 15)"


def test_two_runs_that_died(check_log):
    lines = titan_log(LOSSES[:5], finished=False)
    result = check_log([*lines, "ValueError: the cause", *lines])
    assert result.failed == {"no rank died", "steps appear"}
    assert "after step 5: ValueError: the cause" in quoted(result)


def test_bad_figures_before_a_crash_are_shown(check_log):
    lines = titan_log([8.1, float("nan")], finished=False)
    result = check_log([*lines, "RuntimeError: Loss is not finite (global_avg_loss=nan) at step 2."])
    assert result.failed == {"no rank died", "losses are finite"}
    lines = titan_log([8.1, 8.0], finished=False)
    lines[3] = lines[3].replace("grad_norm:  1.0315", "grad_norm:     nan")
    assert check_log([*lines, "ValueError: x"]).failed == {"no rank died", "gradients are finite"}


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "error: rank 3 failed first: exit status 1; its log: x",
        "[rank3]:Traceback (most recent call last):",
    ],
)
def test_death_after_the_last_step(check_log, line):
    result = check_log([*titan_log(), line])
    assert (result.status, result.failed) == (1, {"no rank died"})
    assert line.removeprefix("[rank3]:") in result.out


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
def test_prefixes(check_log, prefix):
    assert check_log(titan_log(prefix=prefix)).status == 0
    lines = titan_log(LOSSES[:5], prefix=prefix, finished=False)
    crash = [f"{prefix}Traceback (most recent call last):", f'{prefix}  File "x.py", line 7, in f']
    died = check_log([*lines, *crash, f"{prefix}ValueError: the cause", *REPORT])
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
def test_garbage_before_the_prefix(check_log, garbage):
    lines = titan_log(LOSSES[:5], prefix="[rank3]:", finished=False)
    died = check_log([*lines, f"{garbage}[rank3]:[rank3]: ValueError: the cause"])
    assert quoted(died) == "after step 5: rank 3: ValueError: the cause (line 8)"
    # Without a prefix, the traceback begins on that line.
    crash = ['  File "x.py", line 7, in f', "torch._dynamo.exc.Unsupported: the cause"]
    if "INFO" not in garbage:
        died = check_log([*lines, f"{garbage}Traceback (most recent call last):", *crash])
        assert quoted(died) == "after step 5: torch._dynamo.exc.Unsupported: the cause (line 10)"
    whole = titan_log(prefix="[rank3]:")
    whole[4] = garbage + whole[4]
    assert check_log(whole).status == 0


def test_lines_in_json_of_a_collector(check_log):
    lines = [json.dumps({"log": line + "\n", "stream": "stdout"}) for line in titan_log(prefix="[rank0]:")]
    assert check_log(lines).status == 0
    died = check_log([*lines, json.dumps({"message": "[rank3]:[rank3]: ValueError: the cause"})])
    assert quoted(died) == "after step 10: rank 3: ValueError: the cause (line 14)"


def test_ranks_of_two_nodes_under_one_label(check_log):
    # Slurm's label names the node, torchrun's the rank in it. The last stage is on the other node.
    nodes = [titan_log([-1.0] * 10, prefix="0: [rank0]:"), titan_log(prefix="1: [rank0]:")]
    assert check_log([line for lines in zip(*nodes, strict=True) for line in lines]).status == 0


# ---------------------------------------------------------------- stopped on purpose


KILLED = "Unable to shutdown process 123 via Signals.SIGINT, forcefully exiting via Signals.SIGKILL"
STOP = [
    "Traceback (most recent call last):",
    "KeyboardInterrupt",
    "SignalException: Process got signal: 2",
    KILLED,
]


def test_stopped_run(check_log):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *STOP]
    assert check_log(lines).failed == {"no rank died"}
    result = check_log(lines, "--stopped")
    assert result.status == 0, result.out
    assert "--   all steps done         stopped on request after step 5 of 1000" in result.out
    assert (
        check_log([*lines[:-4], "error: stopped by SIGINT; no rank is left running"], "--stopped").status == 0
    )


@pytest.mark.parametrize(
    "crash",
    [
        ["[rank3]:Traceback (most recent call last):", "[rank3]:RuntimeError: shape mismatch"],
        ["  exitcode  : 1 (pid: 1234)"],
        ["error: rank 2 failed first: killed by SIGSEGV; its log: x"],
    ],
)
def test_stopping_hides_no_crash(check_log, crash):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *crash]
    assert check_log(lines, "--stopped").failed == {"no rank died"}
    assert check_log([*lines, *STOP], "--stopped").failed == {"no rank died"}


def test_stopped_by_slurm(check_log):
    lines = titan_log(LOSSES[:5], total=1000, finished=False)
    cancelled = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-30T01:02:03{} ***"
    after = ["srun: error: n1: tasks 0-7: Terminated", "[rank3]:RuntimeError: Connection closed by peer"]
    assert check_log([*lines, cancelled.format(""), *after], "--stopped").status == 0
    assert check_log([*lines, *after[:1], cancelled.format("")], "--stopped").status == 0
    limit = cancelled.format(" DUE TO TIME LIMIT")
    assert check_log([*lines, limit, *after], "--stopped").failed == {"no rank died"}


def test_crash_after_the_stop(check_log):
    lines = [*titan_log(LOSSES[:5], total=1000, finished=False), *STOP, "  exitcode  : -11 (pid: 3)"]
    assert check_log(lines, "--stopped").failed == {"no rank died"}


# ---------------------------------------------------------------- what looks like a death


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
def test_harmless_words(check_log, line):
    lines = titan_log()
    assert check_log([*lines[:3], line, *lines[3:]]).status == 0


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
def test_what_looks_like_a_death(check_log, harmless, rank, where):
    lines = titan_log()
    lines[where:where] = [rank + line for line in harmless]
    result = check_log(lines)
    assert result.status == 0, result.out
    assert "no rank died           no sign of it" in result.out
    assert quoted(check_log([*lines, f"{rank}ValueError: the cause"])).split(": ")[-1].startswith("the cause")


def test_ranks_that_ignore_exceptions_at_once(check_log):
    mixed = [line for line in DEALLOCATOR for _ in range(4)]
    assert check_log([*titan_log(), *mixed]).status == 0
    assert quoted(check_log([*titan_log(), *mixed, "PythonFinalizationError: one more"])).startswith(
        "after step 10"
    )


def test_training_that_went_on(check_log):
    # Not a death, whatever the words: two more steps were done. One may have been on its way.
    lines = titan_log()
    for where, died in ((4, False), (9, False), (11, True), (12, True)):
        result = check_log([*lines[:where], "[rank3]:ConnectionError: retrying", *lines[where:]])
        assert (result.failed == {"no rank died"}) is died, where
        if not died:
            assert (
                f"training went on after: rank 3: ConnectionError: retrying (line {where + 1})" in result.out
            )
    # Two files put together: all that is known is that it did not come to an end.
    lines = titan_log(finished=False)
    result = check_log([lines[0], "[rank3]:ConnectionError: retrying", *lines[1:]])
    assert result.failed == {"all steps done"}
    assert "--   no rank died           training went on after: rank 3" in result.out
