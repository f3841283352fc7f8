"""Did a TorchTitan run do what the tutorial's Confirmation asks? Reads the run's log, nothing else.

    python titan/check_run.py results/titan/llama_fsdp64.log
    python titan/check_run.py LOG --steps 500
    python titan/check_run.py LOG --stopped        a run that was stopped with Ctrl-C

One line per point: ok, FAIL, or -- for what this log cannot tell. Exit status: 0 all points hold, 1 one
does not, 2 no log of a TorchTitan run.

Why the text log: everyone has it, of every TorchTitan version, also of a run on a rented node; the
TensorBoard and structured logs are off by default. Colours, the prefixes that torchrun puts before a
line, and lines of several ranks mixed are understood; of several ranks, the lowest is read.
"""

import argparse
import json
import math
import re
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLOUR = re.compile(r"(?:\x1b|\^\[)?\[[0-9;?]*m|\x1b\[[0-9;?]*[A-Za-z]")  # also as pasted from a terminal
# torchrun: "[rank3]:", "[default3]:"; older ones "rank3:". Not a clock.
RANK = re.compile(r"^\s*\[?(?:rank|default|trainer)?(\d{1,6})\]?:(?!\d\d:)")
TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(\d{3}))?")
NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
# Something has to follow: a line that is cut in the middle of a number is no number.
STEP = re.compile(rf"(?<!validate )\bstep:\s*(\d{{1,12}})\s+loss:\s*{NUMBER}(?=\s+\S)", re.IGNORECASE)
SPEED = re.compile(rf"\b(?:tps|wps):\s*{NUMBER}")
TOTAL = re.compile(r"\btotal steps:? (\d{1,12})")
STARTS = re.compile(r"Training starts at step:? (\d{1,12})")
TITAN = re.compile(
    r"\[titan\]|- torchtitan -|Trainer (?:is )?initialized|Training starts at step|\bstep:\s*\d+\s+loss:",
    re.I,
)
# What a rank leaves behind that did not end by itself, in lines that are no message of a logger.
CRASH = re.compile(
    r"\bSIG(?:SEGV|ABRT|BUS)\b|exitcode\s*:\s*-(?:6|7|11)\b|Segmentation fault|core dumped|Loss is not finite"
    r"|OutOfMemoryError|\w*(?:Error|Exception): .*out of memory|nrt_\w+ failed"
)
DEATH = re.compile(
    rf"{CRASH.pattern}|\bSIGKILL\b|exitcode\s*:\s*-?[1-9]|\d+ Killed\b"
    r"|^error: (?:rank \d+ failed|the launch failed)"
    r"|^(?!ChildFailedError|KeyboardInterrupt|SignalException)[\w.]*(?:Error|Exception)\b"
)
DEATH_OR_STOP = re.compile(
    rf"{DEATH.pattern}|^Traceback \(most recent call last\)|ChildFailedError|\bSIGTERM\b|^error: stopped by"
)
STOP = re.compile(
    r"KeyboardInterrupt|SignalException|Signals\.SIGINT|\bSIGINT\b|death signal|^error: stopped by"
)
LOGGED = re.compile(r" - (?:DEBUG|INFO|WARNING) - ")
TREND_STEPS = 10  # "the first several steps"
FASTER = 0.5  # of the first step's time: "substantially faster"


class Step(NamedTuple):
    """One logged step: its loss, seconds since 1970 and tokens per second, both None if not logged."""

    number: int
    loss: float
    time: float | None
    speed: float | None


class Log(NamedTuple):
    """What a log tells: of the lowest rank that logged losses, and where it says so, of all."""

    steps: list[Step]
    start: tuple[int, float] | None  # the first step and when training started, seconds since 1970
    total: int | None  # steps that the run was to do
    finished: bool
    restarted: bool  # training started once more after steps were logged
    ran_out: bool  # of data
    bad: str | None  # first loss of any rank that is not finite
    death: str | None  # first line that tells of a rank's end
    disagree: str | None  # first step for which two ranks logged different losses


def number(text: str) -> float:
    """Return the value of a logged number such as 1,234.5, nan or -inf."""
    return float(text.replace(",", ""))


def seconds(line: str) -> float | None:
    """Return the line's time stamp in seconds since 1970, or None."""
    match = TIME.search(line)
    if not match:
        return None
    try:
        return datetime.fromisoformat(match[1]).timestamp() + int(match[2] or 0) / 1000
    except ValueError:
        return None


def read_log(path: Path, stopped: bool) -> Log:
    """Read a log; of a run that was stopped on purpose, its stop is no rank's death.

    Raises:
        ValueError: no such file, empty, or no line of a TorchTitan run. One line for people.
    """
    by_rank: dict[int, dict[int, Step]] = {}
    start_of: dict[int, tuple[int, float]] = {}
    finished: set[int] = set()
    total, restarted, ran_out, out_of_order, death = None, False, False, False, None
    count, titan, stop_seen = 0, False, False
    try:
        with path.open(errors="replace") as file:
            for raw in file:
                line = COLOUR.sub("", raw).rstrip() if "[" in raw else raw.rstrip()
                if not line:
                    continue
                count += 1
                titan = titan or bool(TITAN.search(line))
                match = RANK.match(line)
                rank, text = (int(match[1]), line[match.end() :].strip()) if match else (0, line)
                steps = by_rank.setdefault(rank, {})
                for found in STEP.finditer(line):  # two ranks may share a line
                    speed = SPEED.search(line)
                    loss, at = number(found[2]), int(found[1])
                    if at in steps and str(steps[at].loss) == str(loss):
                        continue  # several ranks without a prefix log the same global loss
                    out_of_order = out_of_order or (bool(steps) and at <= next(reversed(steps)))
                    steps.setdefault(at, Step(at, loss, seconds(line), number(speed[1]) if speed else None))
                if "step" in line:
                    if match := STARTS.search(line):
                        restarted = restarted or bool(steps)
                        if (time := seconds(line)) is not None:
                            start_of.setdefault(rank, (int(match[1]), time))
                    if match := TOTAL.search(line):
                        total = int(match[1])
                        restarted = restarted or bool(steps)
                if "Training completed" in line:
                    finished.add(rank)
                if LOGGED.search(line):
                    ran_out = ran_out or "Ran out of data" in line
                    continue
                if death is None:
                    if not stopped:
                        died = DEATH_OR_STOP
                    else:
                        stop_seen = stop_seen or bool(STOP.search(text))
                        died = CRASH if stop_seen else DEATH
                    if died.search(text):
                        death = line.strip()[:150]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not count:
        raise ValueError(f"{path} is empty: give the log of a TorchTitan run")
    if not titan:
        raise ValueError(f"{path} has no line of a TorchTitan run, in {count} lines")

    # Under pipeline parallelism, stages without the loss log -1.
    by_rank = {rank: steps for rank, steps in by_rank.items() if any(s.loss != -1 for s in steps.values())}
    lowest = min(by_rank, default=0)
    bad = [
        f"step {step.number}: {step.loss}" + (f" on rank {rank}" if rank else "")
        for rank, steps in by_rank.items()
        for step in steps.values()
        if not math.isfinite(step.loss)
    ]
    return Log(
        steps=list(by_rank.get(lowest, {}).values()),
        start=start_of.get(lowest),
        total=total,
        finished=lowest in finished,
        restarted=restarted or out_of_order,
        ran_out=ran_out,
        bad=bad[0] if bad else None,
        death=death,
        disagree=first_disagreement(by_rank),
    )


def first_disagreement(by_rank: dict[int, dict[int, Step]]) -> str | None:
    """Return the first step for which ranks logged different losses: the logged one is global."""
    losses: dict[int, dict[float, int]] = {}
    for rank in sorted(by_rank):
        for step in by_rank[rank].values():
            losses.setdefault(step.number, {}).setdefault(step.loss, rank)
    for step in sorted(losses):
        finite = {loss: rank for loss, rank in losses[step].items() if math.isfinite(loss)}
        if len(finite) > 1:
            told = ", ".join(f"{loss} on rank {rank}" for loss, rank in list(finite.items())[:2])
            return f"step {step}: {told}"
    return None


def slope(values: list[tuple[int, float]]) -> float:
    """Return the slope of the least-squares line through (step, loss); infinite if it overflows."""
    try:
        return statistics.linear_regression(*zip(*values, strict=True)).slope
    except OverflowError:
        return math.inf


def durations(log: Log) -> tuple[float, float, str] | None:
    """Return the time of the first step, of a later one, and how they were measured; None if unknown.

    By time stamps, from the line that says training starts; else by the logged tokens per second.
    """
    first, second = log.steps[:2]
    if log.start is not None and log.start[0] != first.number:
        return None  # resumed, and the first line is the mean of several steps
    if log.start is not None and first.time is not None and second.time is not None:
        one = first.time - log.start[1]
        two = (second.time - first.time) / (second.number - first.number)
        if one > 0 and two >= 0:
            return one, two, "s, by time stamps"
    if first.speed and second.speed:
        return 1 / first.speed, 1 / second.speed, "s a token, by the logged speed"
    return None


def neuron_cores(path: Path) -> tuple[int, int]:
    """Return how many NeuronCores a neuron-monitor record shows at work, and its number of reports."""
    used, reports = set(), 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            for runtime in json.loads(line)["neuron_runtime_data"]:
                cores = runtime["report"]["neuroncore_counters"]["neuroncores_in_use"]
                used |= {core for core, counters in cores.items() if counters["neuroncore_utilization"] > 0}
            reports += 1
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the last line of a stopped monitor is cut
    return len(used), reports


def check(log: Log, steps: int | None, stopped: bool, monitor: Path | None) -> list[tuple[str, str, str]]:
    """Return a line for each point: "ok", "FAIL" or "--", the point, and what was found."""
    lines = []

    def point(name: str, good: bool | None, found: str) -> None:
        lines.append(({True: "ok", False: "FAIL", None: "--"}[good], name, found))

    numbers = [step.number for step in log.steps]
    if numbers:
        found = f"{len(numbers)}, {numbers[0]} to {numbers[-1]}"
        if log.restarted:
            found += "; not in order or started again: the log of more than one run?"
        point("steps appear", not log.restarted, found)
    else:
        point("steps appear", False, "no line with step and loss: it ended before the first step")

    if log.bad:
        point("losses are finite", False, log.bad)
    elif log.disagree:
        point("losses are finite", False, f"ranks differ on the global loss, {log.disagree}")
    else:
        point("losses are finite", bool(numbers), f"all {len(numbers)}")

    first = [(step.number, step.loss) for step in log.steps[:TREND_STEPS] if math.isfinite(step.loss)]
    if len(first) < 2:
        point("loss falls", False, f"{len(first)} finite losses: two are needed")
    else:
        rise = slope(first)
        found = f"{first[0][1]:.5f} at step {first[0][0]}, {first[-1][1]:.5f} at step {first[-1][0]}; "
        point("loss falls", rise < 0, found + f"trend {rise:+.3g} a step")

    if len(numbers) < 2:
        point("second step is faster", False, f"{len(numbers)} steps: two are needed")
    elif (times := durations(log)) is None:
        point("second step is faster", None, "the log has no time of the first step and of a later one")
    else:
        one, two, how = times
        found = f"first {one:.3g}, then {two:.3g} {how}"
        good = two <= FASTER * one
        point(
            "second step is faster", good, found if good else f"{found}; was all compiled by an earlier run?"
        )

    last, expected = (numbers[-1] if numbers else 0), log.total if steps is None else steps
    if log.ran_out:
        point("all steps done", False, f"{last} of {expected or '?'}: it ran out of data")
    elif stopped:
        point("all steps done", None, f"stopped on request after step {last} of {expected or '?'}")
    elif expected is None:
        point("all steps done", log.finished, f"{last} of an unknown number: give --steps")
    else:
        found = f"{last} of {expected}" + ("" if log.finished else "; no line says that training completed")
        point("all steps done", last <= expected and log.finished and covers(numbers, expected), found)

    point("no rank died", log.death is None, log.death or "no sign of it")

    cores, reports = neuron_cores(monitor) if monitor else (0, 0)
    if reports:
        point("NeuronCores in use", cores > 0, f"{cores} cores, in {reports} reports of neuron-monitor")
    else:
        point("NeuronCores in use", None, "no report of neuron-monitor")
    return lines


def covers(numbers: list[int], expected: int) -> bool:
    """Return whether the logged steps reach the expected one, up to how often they were logged."""
    gaps = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
    every = statistics.mode(gaps[1:] or gaps or [1])  # step 1 is logged besides, lines may be lost
    return bool(numbers) and expected - numbers[-1] < every


def main() -> int:
    """Check the log named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Check a TorchTitan run by its log.")
    parser.add_argument("log", type=Path, help="text log of the run")
    parser.add_argument("--steps", type=int, help="steps that it should have done (default: the log's own)")
    parser.add_argument("--stopped", action="store_true", help="it was stopped on purpose before the end")
    parser.add_argument(
        "--neuron-monitor", type=Path, help="neuron-monitor's output of the run (default: LOG.neuron-monitor)"
    )
    args = parser.parse_args()
    try:
        if args.steps is not None and args.steps < 1:
            raise ValueError(f"--steps is {args.steps}; give 1 or more")
        if args.neuron_monitor and not args.neuron_monitor.is_file():
            raise ValueError(f"there is no {args.neuron_monitor}")
        log = read_log(args.log, args.stopped)
        monitor = args.neuron_monitor or args.log.with_name(f"{args.log.name}.neuron-monitor")
        lines = check(log, args.steps, args.stopped, monitor if monitor.is_file() else None)
        for verdict, name, found in lines:
            print(f"{verdict:4} {name:22} {found}")
    except (ValueError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    failed = [name for verdict, name, _ in lines if verdict == "FAIL"]
    if failed:
        print(f"FAIL {args.log}: {', '.join(failed)}")
        return 1
    print(f"PASS {args.log}: steps={len(log.steps)}, last loss {log.steps[-1].loss:.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
