"""What the log of a TorchTitan run says: its steps with loss, gradient norm and speed, its start and end.

Read are the text log, of every TorchTitan version, and lines of JSON: the metrics that TorchTitan gives its
loggers, one object a step, and the structured log of 0.3.0, which has steps and errors but no losses.
"""

import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from death_signs import DeathSigns, Sign
from log_lines import Line, read_lines

NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)\b)"
# Something has to follow the loss: where a line was cut, only a part of the number may be left.
STEP = re.compile(rf"(?<!validate )\bstep:\s*(\d{{1,12}})\s+loss:\s*{NUMBER}(?=\s+\S)", re.IGNORECASE)
VALIDATION = re.compile(rf"\bvalidate step:\s*(\d{{1,12}})\s+loss:\s*{NUMBER}", re.IGNORECASE)
GRADIENT = re.compile(rf"\bgrad_norm:\s*{NUMBER}", re.IGNORECASE)
SPEED = re.compile(rf"\b(?:tps|wps):\s*{NUMBER}")
TFLOPS = re.compile(rf"\btflops:\s*{NUMBER}")
MFU = re.compile(rf"\bmfu:\s*{NUMBER}")
TOTAL = re.compile(r"\btotal steps:? (\d{1,12})")
STARTS = re.compile(r"Training starts at step:? (\d{1,12})")
# A seed checkpoint, step-0, holds fresh weights.
LOADS = re.compile(r"Loading the checkpoint (?:from|at step)\b(?!.*\bstep-0\b)", re.IGNORECASE)
COMPILED_HERE = re.compile(r"neuronx-cc compile|Compiler status PASS|Compilation Successfully Completed")
TITAN = re.compile(
    r"\[titan\]|- torchtitan -|Trainer (?:is )?initialized|Training starts at step|\bstep:\s*\d+\s+loss:",
    re.I,
)
NO_LOSS = -1  # is logged by a pipeline's stages without the loss
LOSS_KEYS = ("loss_metrics/global_avg_loss", "loss")  # in lines of JSON


class Step(NamedTuple):
    """One logged step. What was not logged is None.

    Units: time in seconds since 1970, speed in tokens per second and device, tflops in 1e12 operations per
    second and device, mfu in percent; seconds is how long the step itself took.
    """

    number: int
    loss: float | None
    gradient: float | None = None
    time: float | None = None
    speed: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    seconds: float | None = None


class Log(NamedTuple):
    """What a log says. steps, start and finished are those of the lowest rank that logged losses."""

    steps: list[Step]
    validations: list[tuple[int, float]]  # step and loss
    start: tuple[int, float | None] | None  # first step, and when training started, seconds since 1970
    total: int | None  # steps that the run was to do
    loaded: bool  # a checkpoint
    compiled_here: bool  # by this run, not by an earlier one
    finished: bool
    restarted: bool  # training started again after steps were logged
    ran_out: bool  # of data
    structured: bool  # TorchTitan's structured log, which has no losses
    loss_not_finite: str | None  # the first one of any rank
    gradient_not_finite: str | None
    disagreement: str | None  # the first step for which two ranks logged different losses
    death: Sign | None  # the line that shows a rank's death
    overcome: Sign | None  # a line like that after which training went on


def number(text: str | None) -> float | None:
    """Return the value of a logged number such as 1,234.5, nan or -inf."""
    return None if text is None else float(text.replace(",", ""))


def field(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the number that a pattern finds in a text, or None."""
    match = pattern.search(text)
    return number(match[1]) if match else None


def seconds(stamp: str | None) -> float | None:
    """Return a time stamp in seconds since 1970, or None."""
    try:
        return datetime.fromisoformat(stamp.replace(",", ".")).timestamp() if stamp else None
    except ValueError:
        return None


class Reader:
    """Collects, line by line, what a log says about each rank. Lines without a rank count as rank 0's."""

    def __init__(self, stopped: bool):
        self.deaths = DeathSigns(stopped)
        self.lines = 0
        self.is_titan = False
        self.steps: dict[int, dict[int, Step]] = {}  # rank: number of the step: step
        self.last = 0  # step of any rank
        self.starts: dict[int, tuple[int, float | None]] = {}  # rank: first step, and when
        self.validations: list[tuple[int, float]] = []
        self.total: int | None = None
        self.finished: set[int] = set()  # ranks
        self.loaded = self.compiled_here = self.restarted = self.ran_out = self.structured = False

    def read(self, line: Line) -> None:
        """Take in one line."""
        rank = line.rank or 0
        self.steps.setdefault(rank, {})
        if line.record is not None:
            self.read_record(line, line.record)
            return
        text = line.text
        self.is_titan = self.is_titan or bool(TITAN.search(text))
        for match in STEP.finditer(text):
            self.add(rank, self.parse_step(match, line))
        self.validations += [(int(match[1]), number(match[2])) for match in VALIDATION.finditer(text)]
        self.read_start(line, rank)
        self.loaded = self.loaded or bool(LOADS.search(text))
        self.compiled_here = self.compiled_here or bool(COMPILED_HERE.search(text))
        self.ran_out = self.ran_out or "Ran out of data" in text
        if "Training completed" in text:
            self.finished.add(rank)
        self.deaths.read(line)

    def parse_step(self, match: re.Match[str], line: Line) -> Step:
        """Return the step that a line logs. Two ranks may share the line: theirs ends at the next step."""
        text = line.text[match.end() :]
        text = text[: following.start()] if (following := STEP.search(text)) else text
        loss = number(match[2])
        return Step(
            number=int(match[1]),
            loss=None if loss == NO_LOSS else loss,
            gradient=field(GRADIENT, text),
            time=seconds(line.stamp),
            speed=field(SPEED, text),
            tflops=field(TFLOPS, text),
            mfu=field(MFU, text),
        )

    def add(self, rank: int, step: Step) -> None:
        """Add a step to those of its rank, unless it has it: ranks without a prefix log the same loss."""
        steps = self.steps[rank]
        known = steps.get(step.number)
        if known is not None and (step.loss is None or str(known.loss) == str(step.loss)):
            return
        if known is not None and known.loss is None:  # a stage without the loss came first
            steps[step.number] = step
            return
        if steps and step.number <= next(reversed(steps)):
            self.restarted = True
        steps.setdefault(step.number, step)
        if step.number > self.last:
            self.last = step.number
            self.deaths.step_done(step.number, self.restarted)

    def read_start(self, line: Line, rank: int) -> None:
        """Note where training starts and how many steps it is to do, each of which is logged once a run."""
        start, total = STARTS.search(line.text), TOTAL.search(line.text)
        if self.steps[rank] and (start or total):
            self.restarted = True
        if total:
            self.total = int(total[1])
        if start and rank not in self.starts:
            self.starts[rank] = (int(start[1]), seconds(line.stamp))

    def read_record(self, line: Line, record: dict[str, Any]) -> None:
        """Take in a line of JSON: a step's metrics, or an event of the structured log."""
        rank, event = line.rank or 0, str(record.get("log_type_name", ""))
        if isinstance(record.get("rank"), int):
            rank = record["rank"]
        self.steps.setdefault(rank, {})
        step = record.get("step")
        if event:
            self.is_titan = self.structured = True
            if event.endswith("_error"):
                error = str(record.get("message", "")).partition(f"{event}: ")[2]
                self.ran_out = self.ran_out or error.startswith("DataloaderExhaustedError")
                if not self.ran_out:
                    self.deaths.read(Line(line.number, rank, error, error, None, None))
            if event == "step_end" and isinstance(step, int) and isinstance(record.get("value"), float | int):
                self.add(rank, Step(step, None, seconds=record["value"] / 1000))
            return
        loss = next((record[key] for key in LOSS_KEYS if isinstance(record.get(key), float | int)), None)
        if loss is None or not isinstance(step, int):
            return
        self.is_titan = True
        values = [record.get(key) for key in ("grad_norm", "throughput(tps)", "tflops", "mfu(%)")]
        gradient, speed, tflops, mfu = (
            float(value) if isinstance(value, float | int) else None for value in values
        )
        self.add(rank, Step(step, float(loss), gradient, None, speed, tflops, mfu))


def read_log(path: Path, stopped: bool) -> Log:
    """Read a log; of a run that was stopped on purpose, its stop is no rank's death.

    Raises:
        ValueError: it cannot be read, is empty, or has no line of a TorchTitan run. One line for people.
    """
    reader = Reader(stopped)
    try:
        for line in read_lines(path):
            reader.lines = line.number
            reader.read(line)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not reader.lines:
        raise ValueError(f"{path} is empty: give the log of a TorchTitan run")
    if not reader.is_titan:
        raise ValueError(f"{path} has no line of a TorchTitan run, in {reader.lines} lines")
    return summary(reader)


def summary(reader: Reader) -> Log:
    """Return what a reader has found, of the rank that tells most about the run."""
    logged = {rank: steps for rank, steps in reader.steps.items() if steps}
    with_loss = {
        rank: steps for rank, steps in logged.items() if any(step.loss is not None for step in steps.values())
    }
    lowest = min(with_loss or logged or reader.finished or reader.starts or [0])
    return Log(
        steps=list(logged.get(lowest, {}).values()),
        validations=reader.validations,
        start=reader.starts.get(lowest),
        total=reader.total,
        loaded=reader.loaded,
        compiled_here=reader.compiled_here,
        finished=lowest in reader.finished,
        restarted=reader.restarted,
        ran_out=reader.ran_out,
        structured=reader.structured,
        loss_not_finite=first_not_finite(logged, "loss"),
        gradient_not_finite=first_not_finite(logged, "gradient"),
        disagreement=first_disagreement(with_loss),
        death=reader.deaths.first,
        overcome=reader.deaths.overcome,
    )


def first_not_finite(by_rank: dict[int, dict[int, Step]], name: str) -> str | None:
    """Return the first step whose loss or gradient norm is not finite, of the first rank that has one."""
    for rank, steps in by_rank.items():
        for step in steps.values():
            value = getattr(step, name)
            if value is not None and not math.isfinite(value):
                return f"step {step.number}: {value}" + (f" on rank {rank}" if rank else "")
    return None


def first_disagreement(by_rank: dict[int, dict[int, Step]]) -> str | None:
    """Return the first step for which ranks logged different losses: the logged one is global."""
    losses: dict[int, dict[float, int]] = {}
    for rank in sorted(by_rank):
        for step in by_rank[rank].values():
            if step.loss is not None and math.isfinite(step.loss):
                losses.setdefault(step.number, {}).setdefault(step.loss, rank)
    for step in sorted(losses):
        if len(losses[step]) > 1:
            two = [f"{loss} on rank {rank}" for loss, rank in losses[step].items()][:2]
            return f"step {step}: {', '.join(two)}"
    return None
