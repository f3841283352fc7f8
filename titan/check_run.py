"""Did a TorchTitan run do what the tutorial's Confirmation asks? Reads the run's log, nothing else.

    python titan/check_run.py results/titan/llama_fsdp64.log
    python titan/check_run.py LOG --steps 500
    python titan/check_run.py LOG --stopped        a run that was stopped with Ctrl-C

One line per point: ok, FAIL, or -- where the log does not say. Of a run that died, the line that says why,
and what was wrong before it. Exit status: 0 no point fails, 1 one does, 2 no log of a TorchTitan run.

Why the text log: everyone has it, of every TorchTitan version, also of a run on a rented node. TensorBoard
and structured logs are off by default. run_log.py says what is read from it. Of several ranks, the lowest
that logs a loss is read.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from run_log import Log, Step, read_log

TREND_STEPS = 10  # "the first several steps"
FASTER = 0.5  # "substantially faster": the second step takes at most this share of the first one's time
MARKS = {True: "ok", False: "FAIL", None: "--"}  # None: the log does not say


class Point(NamedTuple):
    """One point of the Confirmation list: does it hold (None: the log does not say), and what was found."""

    name: str
    holds: bool | None
    found: str


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

    By the structured log, else by time stamps, from the line that says training starts, else by the logged
    tokens per second.
    """
    first, second = log.steps[:2]
    if log.start is not None and log.start[0] != first.number:
        return None  # resumed, and the first line is the mean of several steps
    if log.start is None and first.number != 1:
        return None  # an excerpt: its first step is another one
    if first.seconds and second.seconds:
        return first.seconds, second.seconds, "s, by the structured log"
    if log.start is not None and None not in (log.start[1], first.time, second.time):
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
    if not log.steps and log.validations:
        return Point(name, None, f"no training, {len(log.validations)} evaluations")
    if not log.steps:
        return Point(name, False, "no line with step and loss: it ended before the first step")
    found = f"{len(log.steps)}, {log.steps[0].number} to {log.steps[-1].number}"
    if log.restarted:
        found += "; not in order or started again: the log of more than one run?"
    return Point(name, not log.restarted, found)


def check_losses(log: Log) -> Point:
    """All losses are finite, also those of evaluations, and all ranks log the same one."""
    name = "losses are finite"
    if log.loss_not_finite:
        return Point(name, False, log.loss_not_finite)
    for step, loss in log.validations:
        if not math.isfinite(loss):
            return Point(name, False, f"step {step}: {loss} in the evaluation")
    if log.disagreement:
        return Point(name, False, f"ranks differ on the global loss, {log.disagreement}")
    logged = sum(step.loss is not None for step in log.steps)
    if not logged and log.validations:
        return Point(name, True, f"all {len(log.validations)} evaluations, the last {log.validations[-1][1]}")
    return Point(name, True, f"all {logged}") if logged else Point(name, None, without_loss(log))


def without_loss(log: Log) -> str:
    """Return why a log has no losses."""
    if log.structured:
        return "TorchTitan's structured log has none: give the text log"
    if log.steps:
        return "only stages of a pipeline without the loss are logged: add the last one's rank to LOG_RANK"
    return "no training step"


def check_gradients(log: Log) -> Point:
    """All gradient norms are finite. One that is not spoils the weights, and the next loss."""
    name = "gradients are finite"
    if log.gradient_not_finite:
        return Point(name, False, f"grad_norm at {log.gradient_not_finite}")
    norms = [step.gradient for step in log.steps if step.gradient is not None]
    if not norms:
        return Point(name, None, "no gradient norm is logged")
    return Point(name, True, f"all {len(norms)}, norm {min(norms):.4g} to {max(norms):.4g}")


def check_trend(log: Log) -> Point:
    """The loss falls over the first several steps, and does not end above its start.

    Of a run that starts from trained weights, and of an excerpt, it need not.
    """
    name = "loss falls"
    finite = [step for step in log.steps if step.loss is not None and math.isfinite(step.loss)]
    steps = finite[:TREND_STEPS]
    if len(steps) < 2:
        return Point(name, None, f"{len(steps)} finite losses: two are needed")
    first, last, end = steps[0], steps[-1], finite[-1]
    if len(finite) > 2 and len({step.loss for step in finite}) == 1:
        return Point(name, False, f"it is constant: {told(first)}, {told(end)}")
    rise = slope(steps)
    usual_end = statistics.median(step.loss for step in finite[-5:])
    falls = rise < 0 and last.loss < first.loss
    above_start = min(end.loss, usual_end) > first.loss
    if falls and not above_start:
        return Point(name, True, f"{told(first)}, {told(last)}; trend {rise:+.3g} a step")
    turn = max(finite, key=lambda step: step.loss)
    if falls:
        turn = min(finite, key=lambda step: step.loss)
    found = ", ".join(told(step) for step in dict.fromkeys((first, turn, end)))
    if log.loaded or first.number != 1:
        return Point(name, None, f"{found}; from trained weights, or an excerpt: it need not")
    if max(end.loss, usual_end) < first.loss:
        return Point(name, True, f"after a rise: {found}")
    if falls:
        return Point(name, False, f"at first, but it ends above its start: {found}")
    if end.loss < (first.loss + turn.loss) / 2:  # more than half of the rise is undone
        return Point(name, None, f"only after a rise: {found}")
    return Point(name, False, f"{found}; trend {rise:+.3g} a step")


def told(step: Step) -> str:
    """Return a step's loss in words."""
    return f"{step.loss:.5f} at step {step.number}"


def check_speed(log: Log) -> Point:
    """The second step is substantially faster than the first, if that compiled."""
    name = "second step is faster"
    if len(log.steps) < 2:
        return Point(name, None, f"{len(log.steps)} steps: two are needed")
    times = durations(log)
    if times is None:
        return Point(name, None, "the log has no time of the first step and of a later one")
    first, later, unit = times
    found = f"first {first:.3g}, then {later:.3g} {unit}"
    if later <= FASTER * first:
        return Point(name, True, found)
    if log.compiled_here:
        return Point(name, False, f"{found}; the log says that this run compiled the model")
    return Point(name, None, f"{found}; the log does not say whether this run compiled the model")


def check_throughput(log: Log) -> Point:
    """Tokens per second of a device, TFLOPS and MFU, without the first step, which compiles: the medians."""
    name = "throughput"
    steps = log.steps[1:] or log.steps
    shown = []
    for values, text in (
        ([step.speed for step in steps], "{:,.0f} tokens/s"),
        ([step.tflops for step in steps], "{:,.2f} TFLOPS"),
        ([step.mfu for step in steps], "MFU {:.2f} %"),
    ):
        logged = [value for value in values if value is not None]
        shown += [text.format(statistics.median(logged))] if logged else []
    if not shown:
        return Point(name, None, "not logged")
    return Point(name, True, f"{', '.join(shown)} per device, median after the first step")


def check_end(log: Log, steps: int | None, stopped: bool) -> Point:
    """The run did all its steps: as many as asked for, else as many as its log announces."""
    name = "all steps done"
    last = log.steps[-1].number if log.steps else 0
    expected = log.total if steps is None else steps
    if log.ran_out:
        return Point(name, False, f"{last} of {expected or '?'}: it ran out of data")
    if stopped:
        return Point(name, None, f"stopped on request after step {last} of {expected or '?'}")
    if not log.steps and log.validations:
        return Point(name, log.finished or None, "no training step")
    if expected is None:
        ended = "it says that training completed" if log.finished else "no line says that training completed"
        return Point(name, log.finished or None, f"{last} of an unknown number, {ended}: give --steps")
    found = f"{last} of {expected}"
    done = last <= expected and reaches(log.steps, expected)
    excerpt = log.start is None and log.total is None
    if not log.finished and not log.structured and not (excerpt and done):
        return Point(name, False, f"{found}; no line says that training completed")
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
    name = "no rank died"
    if log.death:
        when = f"after step {log.death.step}" if log.death.step else "before the first step"
        return Point(name, False, f"{when}: {log.death.quote}")
    if log.overcome:  # in a log whose parts were put together, order says less
        return Point(name, log.finished or None, f"training went on after: {log.overcome.quote}")
    return Point(name, True, "no sign of it")


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
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the options\n")
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
    steps, losses, gradients, ranks = (
        check_steps(log),
        check_losses(log),
        check_gradients(log),
        check_ranks(log),
    )
    if log.death:  # the rest says only that it did not come to an end
        ran = [steps, losses, gradients] if log.steps else []
        return log, [ranks, *(point for point in ran if point.holds is False)]
    if not log.steps and not log.validations:
        return log, [steps, check_end(log, args.steps, args.stopped), ranks]
    return log, [
        steps,
        losses,
        gradients,
        check_trend(log),
        check_speed(log),
        check_throughput(log),
        check_end(log, args.steps, args.stopped),
        ranks,
        check_cores(args.neuron_monitor or Path(f"{args.log.resolve()}.neuron-monitor")),
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
    losses = [step.loss for step in log.steps if step.loss is not None]
    last = f", last loss {losses[-1]:.5f}" if losses else ""
    print(f"PASS {args.log}: steps={len(log.steps)}{last}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
