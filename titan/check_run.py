"""Did a TorchTitan run do what the tutorial's Confirmation asks? Reads the run's log, nothing else.

    python titan/check_run.py results/titan/llama_fsdp64.log
    python titan/check_run.py LOG --steps 500
    python titan/check_run.py LOG --stopped        a run that was stopped with Ctrl-C

One line per point: ok, FAIL, or -- where the log does not say. Exit status: 0 no point fails, 1 one does,
2 no log of a TorchTitan run.

Why the text log: everyone has it, of every TorchTitan version, also of a run on a rented node. TensorBoard
and structured logs are off by default. The log may have colours, the prefixes that torchrun puts before a
line, and lines of several ranks mixed. Of several ranks, the lowest is read.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLOUR = re.compile(r"(?:\x1b|\^\[)?\[[0-9;?]*m|\x1b\[[0-9;?]*[A-Za-z]")  # also as pasted from a terminal
# torchrun writes "[rank3]:" or "[default3]:", older versions "rank3:". A time such as 09:59:01 is no rank.
RANK = re.compile(r"^\s*\[?(?:rank|default|trainer)?(\d{1,6})\]?:(?!\d\d:)")
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?")
NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
# Something has to follow the loss: where a line was cut, only a part of the number may be left.
STEP = re.compile(rf"(?<!validate )\bstep:\s*(\d{{1,12}})\s+loss:\s*{NUMBER}(?=\s+\S)", re.IGNORECASE)
SPEED = re.compile(rf"\b(?:tps|wps):\s*{NUMBER}")
TOTAL = re.compile(r"\btotal steps:? (\d{1,12})")
STARTS = re.compile(r"Training starts at step:? (\d{1,12})")
TITAN = re.compile(
    r"\[titan\]|- torchtitan -|Trainer (?:is )?initialized|Training starts at step|\bstep:\s*\d+\s+loss:",
    re.I,
)
# A rank that died leaves one of these, in a line that no logger wrote. A crash counts even after a stop.
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
FASTER = 0.5  # "substantially faster": the second step takes at most this share of the first one's time
MARKS = {True: "ok", False: "FAIL", None: "--"}  # None: the log does not say


class Step(NamedTuple):
    """One logged step: its loss, seconds since 1970 and tokens per second, both None if not logged."""

    number: int
    loss: float
    time: float | None
    speed: float | None


class Log(NamedTuple):
    """What a log says. steps, start and finished are those of the lowest rank that logged losses."""

    steps: list[Step]
    start: tuple[int, float] | None  # the first step and when training started, seconds since 1970
    total: int | None  # steps that the run was to do
    finished: bool
    restarted: bool  # training started again after steps were logged
    ran_out: bool  # of data
    not_finite: str | None  # the first loss of any rank that is not finite
    death: str | None  # the first line that shows a rank's death
    disagreement: str | None  # the first step for which two ranks logged different losses


class Point(NamedTuple):
    """One point of the Confirmation list: does it hold (None: the log does not say), and what was found."""

    name: str
    holds: bool | None
    found: str


def number(text: str) -> float:
    """Return the value of a logged number such as 1,234.5, nan or -inf."""
    return float(text.replace(",", ""))


def seconds(line: str) -> float | None:
    """Return the line's time stamp in seconds since 1970, or None."""
    match = TIME.search(line)
    if not match:
        return None
    try:
        return datetime.fromisoformat(match[0]).timestamp()
    except ValueError:
        return None


class Reader:
    """Collects, line by line, what a log says about each rank. Lines without a rank count as rank 0's."""

    def __init__(self, stopped: bool):
        self.stopped = stopped  # on purpose: then a sign of the stop is no death
        self.stop_seen = False
        self.lines = 0
        self.is_titan = False
        self.steps: dict[int, dict[int, Step]] = {}  # rank: number of the step: step
        self.starts: dict[int, tuple[int, float]] = {}  # rank: first step, and when
        self.finished: set[int] = set()  # ranks
        self.total: int | None = None
        self.restarted = False
        self.ran_out = False
        self.death: str | None = None

    def read(self, line: str) -> None:
        """Take in one line."""
        line = COLOUR.sub("", line).rstrip()
        if not line:
            return
        self.lines += 1
        self.is_titan = self.is_titan or bool(TITAN.search(line))
        prefix = RANK.match(line)
        rank = int(prefix[1]) if prefix else 0
        steps = self.steps.setdefault(rank, {})
        self.read_steps(line, steps)
        self.read_start(line, rank, steps)
        if "Training completed" in line:
            self.finished.add(rank)
        if LOGGED.search(line):
            self.ran_out = self.ran_out or "Ran out of data" in line
        else:
            self.read_death(line, line[prefix.end() :].strip() if prefix else line)

    def read_steps(self, line: str, steps: dict[int, Step]) -> None:
        """Add the line's steps to those of its rank. Two ranks may share a line."""
        for match in STEP.finditer(line):
            step, loss = int(match[1]), number(match[2])
            if step in steps and str(steps[step].loss) == str(loss):
                continue  # several ranks without a prefix log the same global loss
            if steps and step <= next(reversed(steps)):
                self.restarted = True
            speed = SPEED.search(line)
            if step not in steps:
                steps[step] = Step(step, loss, seconds(line), number(speed[1]) if speed else None)

    def read_start(self, line: str, rank: int, steps: dict[int, Step]) -> None:
        """Note where training starts and how many steps it is to do, each of which is logged once a run."""
        start, total = STARTS.search(line), TOTAL.search(line)
        if steps and (start or total):
            self.restarted = True
        if total:
            self.total = int(total[1])
        if start and rank not in self.starts and (time := seconds(line)) is not None:
            self.starts[rank] = (int(start[1]), time)

    def read_death(self, line: str, message: str) -> None:
        """Note the first line that shows a rank's death."""
        if self.death is not None:
            return
        if not self.stopped:
            sign = DEATH_OR_STOP
        else:
            self.stop_seen = self.stop_seen or bool(STOP.search(message))
            sign = CRASH if self.stop_seen else DEATH
        if sign.search(message):
            self.death = line.strip()[:150]


def read_log(path: Path, stopped: bool) -> Log:
    """Read a log; of a run that was stopped on purpose, its stop is no rank's death.

    Raises:
        ValueError: no such file, empty, or no line of a TorchTitan run. One line for people.
    """
    reader = Reader(stopped)
    try:
        with path.open(errors="replace") as file:
            for line in file:
                reader.read(line)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not reader.lines:
        raise ValueError(f"{path} is empty: give the log of a TorchTitan run")
    if not reader.is_titan:
        raise ValueError(f"{path} has no line of a TorchTitan run, in {reader.lines} lines")

    # Under pipeline parallelism, stages without the loss log -1.
    by_rank = {
        rank: steps for rank, steps in reader.steps.items() if any(step.loss != -1 for step in steps.values())
    }
    lowest = min(by_rank, default=0)
    return Log(
        steps=list(by_rank.get(lowest, {}).values()),
        start=reader.starts.get(lowest),
        total=reader.total,
        finished=lowest in reader.finished,
        restarted=reader.restarted,
        ran_out=reader.ran_out,
        not_finite=first_not_finite(by_rank),
        death=reader.death,
        disagreement=first_disagreement(by_rank),
    )


def first_not_finite(by_rank: dict[int, dict[int, Step]]) -> str | None:
    """Return the first step whose loss is not finite, of the first rank that has one."""
    for rank, steps in by_rank.items():
        for step in steps.values():
            if not math.isfinite(step.loss):
                return f"step {step.number}: {step.loss}" + (f" on rank {rank}" if rank else "")
    return None


def first_disagreement(by_rank: dict[int, dict[int, Step]]) -> str | None:
    """Return the first step for which ranks logged different losses: the logged one is global."""
    losses: dict[int, dict[float, int]] = {}
    for rank in sorted(by_rank):
        for step in by_rank[rank].values():
            losses.setdefault(step.number, {}).setdefault(step.loss, rank)
    for step in sorted(losses):
        finite = {loss: rank for loss, rank in losses[step].items() if math.isfinite(loss)}
        if len(finite) > 1:
            two = [f"{loss} on rank {rank}" for loss, rank in finite.items()][:2]
            return f"step {step}: {', '.join(two)}"
    return None


def slope(steps: list[Step]) -> float:
    """Return the slope of the least-squares line through the losses, per step; infinite if it overflows."""
    try:
        return statistics.linear_regression(
            [step.number for step in steps], [step.loss for step in steps]
        ).slope
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
        first_seconds = first.time - log.start[1]
        later_seconds = (second.time - first.time) / (second.number - first.number)
        if first_seconds > 0 and later_seconds >= 0:
            return first_seconds, later_seconds, "s, by time stamps"
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


def check_steps(log: Log) -> Point:
    """Steps appear, in order, of one run."""
    name = "steps appear"
    if not log.steps:
        return Point(name, False, "no line with step and loss: it ended before the first step")
    found = f"{len(log.steps)}, {log.steps[0].number} to {log.steps[-1].number}"
    if log.restarted:
        found += "; not in order or started again: the log of more than one run?"
    return Point(name, not log.restarted, found)


def check_losses(log: Log) -> Point:
    """All losses are finite, and all ranks log the same one."""
    name = "losses are finite"
    if log.not_finite:
        return Point(name, False, log.not_finite)
    if log.disagreement:
        return Point(name, False, f"ranks differ on the global loss, {log.disagreement}")
    return Point(name, bool(log.steps), f"all {len(log.steps)}")


def check_trend(log: Log) -> Point:
    """The loss falls over the first several steps."""
    name = "loss falls"
    steps = [step for step in log.steps[:TREND_STEPS] if math.isfinite(step.loss)]
    if len(steps) < 2:
        return Point(name, False, f"{len(steps)} finite losses: two are needed")
    first, last, rise = steps[0], steps[-1], slope(steps)
    found = f"{first.loss:.5f} at step {first.number}, {last.loss:.5f} at step {last.number}"
    return Point(name, rise < 0, f"{found}; trend {rise:+.3g} a step")


def check_speed(log: Log) -> Point:
    """The second step is substantially faster than the first, which compiles."""
    name = "second step is faster"
    if len(log.steps) < 2:
        return Point(name, False, f"{len(log.steps)} steps: two are needed")
    times = durations(log)
    if times is None:
        return Point(name, None, "the log has no time of the first step and of a later one")
    first, later, unit = times
    found = f"first {first:.3g}, then {later:.3g} {unit}"
    if later > FASTER * first:
        return Point(name, False, f"{found}; was all compiled by an earlier run?")
    return Point(name, True, found)


def check_end(log: Log, steps: int | None, stopped: bool) -> Point:
    """The run did all its steps: as many as asked for, else as many as its log announces."""
    name = "all steps done"
    last = log.steps[-1].number if log.steps else 0
    expected = log.total if steps is None else steps
    if log.ran_out:
        return Point(name, False, f"{last} of {expected or '?'}: it ran out of data")
    if stopped:
        return Point(name, None, f"stopped on request after step {last} of {expected or '?'}")
    if expected is None:
        return Point(name, log.finished, f"{last} of an unknown number: give --steps")
    found = f"{last} of {expected}"
    if not log.finished:
        found += "; no line says that training completed"
    done = log.finished and last <= expected and reaches(log.steps, expected)
    return Point(name, done, found)


def reaches(steps: list[Step], expected: int) -> bool:
    """Return whether the logged steps reach the expected one; not every step need be logged."""
    if not steps:
        return False
    numbers = [step.number for step in steps]
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    # Step 1 is always logged, so the first gap may be a shorter one. Lines may be lost: the usual gap counts.
    usual = statistics.mode(gaps[1:] or gaps or [1])
    return expected - numbers[-1] < usual


def check_ranks(log: Log) -> Point:
    """No rank died."""
    return Point("no rank died", log.death is None, log.death or "no sign of it")


def check_cores(monitor: Path) -> Point:
    """NeuronCores were at work, by neuron-monitor's record if there is one."""
    name = "NeuronCores in use"
    cores, reports = neuron_cores(monitor) if monitor.is_file() else (0, 0)
    if not reports:
        return Point(name, None, "no report of neuron-monitor")
    return Point(name, cores > 0, f"{cores} cores, in {reports} reports of neuron-monitor")


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Check a TorchTitan run by its log.")
    parser.add_argument("log", type=Path, help="text log of the run")
    parser.add_argument("--steps", type=int, help="steps that it should have done (default: the log's own)")
    parser.add_argument("--stopped", action="store_true", help="it was stopped on purpose before the end")
    parser.add_argument(
        "--neuron-monitor", type=Path, help="neuron-monitor's output of the run (default: LOG.neuron-monitor)"
    )
    return parser.parse_args()


def check(args: argparse.Namespace) -> tuple[Log, list[Point]]:
    """Return the log that the options name, and the points of the Confirmation list.

    Raises:
        ValueError: a wrong option, or no log of a TorchTitan run. One line for people.
    """
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}; give 1 or more")
    if args.neuron_monitor and not args.neuron_monitor.is_file():
        raise ValueError(f"there is no {args.neuron_monitor}")
    log = read_log(args.log, args.stopped)
    return log, [
        check_steps(log),
        check_losses(log),
        check_trend(log),
        check_speed(log),
        check_end(log, args.steps, args.stopped),
        check_ranks(log),
        check_cores(args.neuron_monitor or args.log.with_name(f"{args.log.name}.neuron-monitor")),
    ]


def main() -> int:
    """Check the log named on the command line; return the exit status."""
    args = parse_args()
    try:
        log, points = check(args)
    except (ValueError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    for point in points:
        print(f"{MARKS[point.holds]:4} {point.name:22} {point.found}")
    failed = [point.name for point in points if point.holds is False]
    if failed:
        print(f"FAIL {args.log}: {', '.join(failed)}")
        return 1
    print(f"PASS {args.log}: steps={len(log.steps)}, last loss {log.steps[-1].loss:.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
