"""Which line of a log shows that a rank died, and which of several such lines says why.

A sign is a cause, a report or a hint. A rank's exception is a cause; torchrun's list of exit codes is a
report; "Sending process 12 closing signal SIGTERM" is a hint. The first cause is quoted, else the first
report, else the first hint. What only looks like a death is no sign: warnings, an exception that Python
says it ignored, a kernel that a compiler tried and rejected. And whatever the words are, no rank died where
training went on for two more steps.
"""

import re
from typing import NamedTuple

from log_lines import Line

CAUSE, REPORT, HINT = range(3)
LENGTH = 150  # characters of a line that are quoted

LOGGED = re.compile(r"(?:^|\s)- (?:DEBUG|INFO|WARNING) - ")
# Of torch's own loggers: W0511 06:33:15.2 18 a/b.py:908] and, in C++, [E1119 13:21:13.9 A.cpp:6]; of old
# versions torch.distributed.run: [WARNING]
TORCH_LOG = re.compile(
    r"\[?(?P<level>[IWEF])(?:\d{3,4}|\d{4}-\d\d-\d\dT\S+)? (?:[\d:.]+ )?(?:\d+ )?[\w./-]+:\d+\]\s?"
    r"|torch[\w.]+: \[(?P<word>[A-Z])[A-Z]+\]\s"
)
WARNING = re.compile(r"\S*:\d+: \w*Warning:|\w*Warnings?:|\[?WARN(?:ING)?\b|.*\|\s*WARNING\s*\|", re.I)
# Inductor tries kernels, and says afterwards that it does without the one whose exception is above.
REJECTED = re.compile(r"Ignoring this choice|error during autotuning")
# What follows did not end the process.
IGNORED = re.compile(r"Exception ignored (?:in|on|while)\b|Exception in thread ")
# A command that the shell shows, a line of a traceback above its last one, a line of a printed configuration.
NO_MESSAGE = re.compile(r"\++ |\s+(?:raise|File) |\s*[\"'][\w.-]+[\"']\s*:")
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# The last line of a traceback. A source line, "    raise ValueError(", does not start with a class.
EXCEPTION = re.compile(r"\s*[A-Za-z_][\w.]*(?:Error|Exception)(?:\(\w+\))?(?::\s|:?$)")
ANY_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?::\s|:?$)")  # right after a traceback's lines
# Says only that a rank is gone, because another one is, or because it was told to end.
FOLLOWS = re.compile(
    r"ChildFailedError|KeyboardInterrupt|SignalException|DistNetworkError|BrokenPipeError|ncclRemoteError"
    r"|[Cc]onnection (?:closed|reset) by|remote process exited"
)

# Grave: counts after a stop on purpose too.
GRAVE_CAUSE = re.compile(
    r"OutOfMemoryError: \w+ out of memory|(?:Error|Exception): .*out of memory|what\(\): .*out of memory"
    r"|Fatal Python error:|terminate called (?:after|without)|Caught signal \d+|Process received signal"
    r"|^(?:double free or corruption|free\(\): |malloc\(\): |corrupted (?:size|double))"
    r"|Loss (?:or gradient norm )?is not finite"
    r"|\b(?:ERROR|FATAL)\s+(?:TDRV|NRT|NMGR|ENC):\w+\s.*(?:[Ff]ail|not avail|[Tt]imed? ?out|[Uu]ncorrect)"
    r"|NeuronCore\(s\) not available|\bNRT_(?!SUCCESS)[A-Z]{3,}\w*|\bnrt_\w+ (?:failed|status=[1-9])"
    r"|[Dd]etected \d+ oom[-_ ]?kill event|\bOOMKilled\b|: Out Of Memory$|exceeded (?:step )?memory limit"
)
OTHER_CAUSE = re.compile(
    r"Watchdog caught collective operation timeout|watchdog thread terminated with exception"
    r"|Heartbeat monitor timed out|taking the entire process down"
    r"|NEURON_CC_WRAPPER\W+Failed compilation"
    r"|CANCELLED AT .* DUE TO|PBS: job killed: |\bTERM_(?:RUNLIMIT|MEMLIMIT|CPULIMIT)\b"
)
GRAVE_REPORT = re.compile(
    r"\bSIG(?:SEGV|ABRT|BUS|FPE|ILL)\b|exitcode\s*:\s*-(?:4|6|7|8|11)\b|Segmentation fault|core dumped"
    r"|^(?:Aborted|Bus error|Illegal instruction)$"
)
OTHER_REPORT = re.compile(
    r"exitcode\s*:\s*-?[1-9]|\(SIG\w+\) received|(?:Signals\.|by )SIGKILL\b|(?:^|\d )Killed\b"
    r"|^error: (?:rank \d+ failed|the launch failed)|^srun: error: .*task"
    r"|(?:Exited|terminated) with exit code [1-9]"
)
# What a stop on purpose leaves; and a death of ranks if nobody stopped them.
STOPPING = re.compile(
    r"KeyboardInterrupt|SignalException|ChildFailedError|closing signal SIG|death signal"
    r"|(?:Signals\.|\(|by )SIG(?:INT|TERM)\b|exitcode\s*:\s*-(?:2|15)\b"
    r"|^error: stopped by|CANCELLED AT (?!.* DUE TO)|^srun: error: .*Terminated"
)
# That the stop has happened. What ranks say after it comes from it.
STOP = re.compile(
    r"KeyboardInterrupt|SignalException|(?:Signals\.|by )SIGINT\b|death signal|^error: stopped by"
    r"|CANCELLED AT (?!.* DUE TO)"
)


class Sign(NamedTuple):
    """A line that shows a death: how good a reason it is, the last step before it, and how it is quoted."""

    level: int
    step: int
    quote: str


class DeathSigns:
    """Collects the signs of a log, line by line. first is the one to quote, or None."""

    def __init__(self, stopped: bool):
        self.stopped = stopped  # on purpose: then a sign of the stop is no death
        self.stop_seen = False
        self.first: Sign | None = None
        self.overcome: Sign | None = None  # the first sign after which training went on
        self.last_step = 0
        self.steps_since = 0
        self.in_traceback: set[int | None] = set()  # ranks
        self.ignored: dict[int | None, int] = {}  # rank: exceptions that Python will name and has ignored

    def read(self, line: Line) -> None:
        """Take in a line."""
        if LOGGED.search(line.text):
            return
        if self.first is not None and REJECTED.search(line.text) and "triton" in self.first.quote:
            self.first = None
        level = self.level(line)
        if level is None or (self.first is not None and self.first.level <= level):
            return
        rank = "" if line.rank is None else f"rank {line.rank}: "
        message = " ".join(TORCH_LOG.sub("", line.rest.strip(), count=1).split())
        quote = message if len(message) <= LENGTH else f"{message[:LENGTH]}..."
        self.first = Sign(level, self.last_step, f"{rank}{quote} (line {line.number})")
        self.steps_since = 0

    def step_done(self, step: int, restarted: bool) -> None:
        """Note a step that no rank had logged. One more may be on its way when a rank dies, two not."""
        self.last_step = step
        self.ignored.clear()
        self.steps_since += 1
        if self.first is not None and self.steps_since >= 2 and not restarted:
            self.overcome = self.overcome or self.first
            self.first = None

    def level(self, line: Line) -> int | None:
        """Return how good a reason for a death a line is, None if it is no sign of one."""
        log = TORCH_LOG.match(line.text)
        text = line.text[log.end() :] if log else line.text
        self.stop_seen = self.stop_seen or (self.stopped and bool(STOP.search(text)))
        if "closing signal SIG" in text:
            return None if self.stopped else HINT
        if log and (log["level"] or log["word"]) in "DIW":
            return None
        if self.is_ignored(line.rank, text) or WARNING.match(text) or NO_MESSAGE.match(text):
            return None
        exception = self.is_exception(line.rank, text)
        by_the_stop = self.stopped and (self.stop_seen or bool(STOPPING.search(text)))
        if GRAVE_CAUSE.search(text):
            return CAUSE
        if GRAVE_REPORT.search(text):
            return REPORT
        if by_the_stop:
            return None
        if OTHER_CAUSE.search(text) or (exception and not FOLLOWS.search(text)):
            return CAUSE
        if exception or OTHER_REPORT.search(text) or STOPPING.search(text):
            return REPORT
        return HINT if TRACEBACK.search(text) and not self.stopped else None

    def is_ignored(self, rank: int | None, text: str) -> bool:
        """Return whether a line belongs to an exception that Python says it ignored."""
        if IGNORED.search(text):
            self.ignored[rank] = self.ignored.get(rank, 0) + 1
            return True
        if not self.ignored.get(rank):
            return False
        if EXCEPTION.match(text):
            self.ignored[rank] -= 1
            return True
        return bool(TRACEBACK.search(text))

    def is_exception(self, rank: int | None, text: str) -> bool:
        """Return whether a line ends a traceback."""
        if TRACEBACK.search(text):
            self.in_traceback.add(rank)
            return False
        if EXCEPTION.match(text) or (rank in self.in_traceback and ANY_EXCEPTION.match(text)):
            self.in_traceback.discard(rank)
            return True
        return False
