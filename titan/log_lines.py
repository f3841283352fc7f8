"""The lines of a run's log as its ranks wrote them: without colours and without what others put before them.

A log passes through many hands. torchrun puts [rank3]: before a line, and the rank itself another [rank3]:
before a line of an exception. Slurm puts 3:, MPI [1,3]<stdout>:, collectors a time, a host or a pod. A
progress bar has no end of line, so that the next message follows it.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

COLOUR = re.compile(
    r"(?:\x1b|\^\[)?\[[0-9;?]*m"  # also as pasted from a terminal
    r"|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b\([A-Z]|\x00"
)
# Of torchrun, within a line too. Its --role may be another word, which is known at the start of a line only.
RANKS = re.compile(r"(?:\[(?:rank|default|trainer)\d{1,6}\]:\s?)+")
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
# A group that catches digits catches the rank.
PREFIX = re.compile(
    r"""\s*(?:
        \[[A-Za-z_]*(?P<torchrun>\d{1,6})\]:(?!\d\d:)                   # [rank3]:, not 09:59:01
      | (?:rank|default|trainer)?(?P<slurm>\d{1,6}):(?!\d\d:)           # 3:, rank3:
      | \[\d+,(?:mpirank:)?(?P<mpi>\d+)[^\]]*\]<std(?:out|err)>:        # [1,3]<stdout>:
      | \[\d{1,6}\](?=\s)                                               # [3], of mpiexec -prepend-rank
      | \d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?=\s|\[)   # a collector's time
      | \[(?![IWEF]\d)[^\[\]]*\d\d:\d\d:\d\d[^\[\]]*\](?=\s)            # [Mon May 11 05:39:21 UTC 2026]
      | [A-Z][a-z]{2}\s+\d+\s\d\d:\d\d:\d\d\s\S+\s[\w./-]+(?:\[\d+\])?:(?=\s)         # syslog, journald
      | \d{4}-[A-Z][a-z]{2}-\d\d\s[\d:.]+\s+\d+:\d+(?=\s)               # the Neuron runtime's time
      | std(?:out|err)\s[FP](?=\s)                                      # a container runtime
      | \[pod/[^\]]*\]                                                  # kubectl logs --prefix
      | \([\w ]*pid=\d+[^)]*\)(?=\s)                                    # Ray
      | [\w.-]{1,60}\s+\|(?=\s)                                         # docker compose
      # A host, and with PBS a rank. An exception's name has a digit as well, now and then.
      | (?![\w.]*(?:Error|Exception|Warning):)[A-Za-z][\w.-]{0,60}\d[\w.-]{0,60}(?:\s(?P<pbs>\d{1,6}))?:(?=\s)
    )\s?""",
    re.VERBOSE,
)
MESSAGE_KEYS = ("log", "message", "msg", "textPayload")  # where collectors that write JSON keep the line
PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}


class Line(NamedTuple):
    """What one rank wrote on a line; rank is None where none is named.

    text ends where another rank's prefix begins, rest at the end of the line. stamp is the time in it, the
    rank's own if it wrote one. record is the object of a line of JSON, the text of which is then empty.
    """

    number: int
    rank: int | None
    text: str
    rest: str
    stamp: str | None
    record: dict[str, Any] | None


def open_text(path: Path) -> IO[str]:
    """Open a log as text: plain or gzip, UTF-8 or UTF-16.

    Raises:
        ValueError: it is packed in another way.
        OSError: it cannot be read.
    """
    opener = open
    with path.open("rb") as file:
        start = file.read(512)
    if start.startswith(b"\x1f\x8b"):
        opener = gzip.open
        with gzip.open(path) as file:
            start = file.read(512)
    for magic, name in PACKED.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is packed by {name}: unpack it first (plain text and gzip are read)")
    return opener(path, "rt", encoding=encoding_of(start), errors="replace", newline="\n")


def encoding_of(start: bytes) -> str:
    """Return the encoding of a text by its first bytes."""
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def read_lines(path: Path) -> Iterator[Line]:
    """Yield what the ranks wrote, in the order of the log. Empty lines are left out.

    Raises:
        ValueError: it cannot be unpacked. One line for people.
        OSError: it cannot be read.
    """
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                for part in COLOUR.sub("", line).split("\r"):  # of a progress bar
                    yield from split_line(number, part.rstrip())
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path} is a gzip file that is cut or damaged: copy it again") from None


def split_line(number: int, line: str) -> Iterator[Line]:
    """Yield what each rank wrote on a line."""
    rank, start = strip_prefixes(line)
    if record := parse_record(line[start:]):
        message = next((record[key] for key in MESSAGE_KEYS if isinstance(record.get(key), str)), None)
        if message is None or "log_type" in record:  # which is TorchTitan's own
            yield Line(number, rank, "", "", None, record)
        else:
            for inner in split_line(number, message.rstrip()):
                yield inner._replace(rank=rank if inner.rank is None else inner.rank)
        return
    starts = [match.start() for match in RANKS.finditer(line)]
    if not starts or line[: starts[0]].strip():
        starts.insert(0, 0)
    for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
        rank, prefixes = strip_prefixes(line[start:end])
        text = line[start + prefixes : end]
        if text.strip():
            stamp = TIME.search(text) or TIME.search(line[start:end])
            yield Line(number, rank, text, line[start + prefixes :], stamp and stamp[0], None)


def strip_prefixes(text: str) -> tuple[int | None, int]:
    """Return the last rank that a text's prefixes name, and where the prefixes end."""
    rank, end = None, 0
    while match := PREFIX.match(text, end):
        rank = next((int(digits) for digits in match.groups() if digits), rank)
        end = match.end()
    return rank, end


def parse_record(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is, or an empty one."""
    if not text.startswith("{"):
        return {}
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
