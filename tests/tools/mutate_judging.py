"""Change one thing at a time in the code that judges: do the tests notice?

    make mutants
    python tests/tools/mutate_judging.py --count 60 --seed 0
    python tests/tools/mutate_judging.py --made FOLDER           keeps the recorded runs for the next time

Draws mutants at random: a comparison is turned, a number changed, a condition negated, an operator
swapped, a statement or an argument dropped. Each is applied to a copy of the tree, where the tests that
concern its file run until one fails. The runs that the tests look at are recorded once, by the unchanged
code. Prints one line for each mutant and the share that was noticed; exit status 1 if that is under 90 %.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.9
COMPARISON = ("test_tolerance", "test_mesh", "test_findings", "test_invariants", "test_compare")
COMPARISON += ("test_real_training",)
CAUSES = ("test_causes_forward", "test_causes_backward", "test_diagnose", "test_real_training")
CAUSES += ("silent_bugs/test_detection",)
# What is judged with, and the tests of it.
TESTS = {
    "training_records.py": COMPARISON,
    "training_tolerance.py": (*COMPARISON, "test_titan_parity"),
    "training_invariants.py": COMPARISON,
    "training_comparison.py": COMPARISON,
    "compare_training.py": (*COMPARISON, "test_causes_forward", "recording/test_recordings"),
    "training_summary.py": (*COMPARISON, "recording/test_recordings"),
    "training_evidence.py": CAUSES,
    "training_causes_general.py": CAUSES,
    "training_causes_forward.py": CAUSES,
    "training_causes_backward.py": CAUSES,
    "training_diagnosis.py": CAUSES,
    "titan/check_run.py": ("test_check_run",),
    "titan/run_log.py": ("test_check_run",),
    "titan/death_signs.py": ("test_death_signs",),
    "titan/log_lines.py": ("test_death_signs", "test_check_run"),
    "titan/parity.py": ("test_titan_parity",),
}
PAIRS = (
    *((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or)),
)
SWAPPED = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
SWAPPED |= {ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
ORDERED = {ast.Eq: ast.GtE, ast.NotEq: ast.Gt}
BY_ONE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}  # of whole numbers
# What judges nothing: docstrings, what is printed, the functions of titan/parity.py that train, and which
# equal tensor stays in memory.
SKIPPED = re.compile(
    r"f?['\"]|(print|progress|show_progress|traceback\.print_exc)\(|def (launch|train)\("
    r"|self\._seen\[place\] =|self\._known\.setdefault\("
)
DROPPED = ast.Expr, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break
# Arguments that change what is said, not what is found, or that guard against our own mistakes.
WORDS = {
    "help",
    "description",
    "metavar",
    "file",
    "flush",
    "formatter_class",
    "end",
    "indent",
    "strict",
    "allow_nan",
}


class Mutant(NamedTuple):
    """A piece of a file, by its place in the file's bytes, and what takes its place."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text)[:70] for text in (self.old, self.new))
        return f"{self.file}:{self.line}  {old}  ->  {new}"


# ---------------------------------------------------------------- what may be changed


def changes(node: ast.AST) -> Iterator[str]:
    """Yield what may take the place of an expression or a statement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        (op,), sides = map(type, node.ops), (node.left, node.comparators[0])
        whole = any(re.match(r"-?\d+$|len\(", ast.unparse(side)) for side in sides)
        texts = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
        for other in (SWAPPED[op], None if texts else ORDERED.get(op), BY_ONE.get(op) if whole else None):
            if other:
                yield f"({ast.unparse(ast.Compare(sides[0], [other()], [sides[1]]))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value * 10 or 2)
        yield repr(node.value + 1 if isinstance(node.value, int) else node.value / 10 or -1.0)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Call):
        for i in range(1, len(node.args)):
            yield ast.unparse(ast.Call(node.func, node.args[:i] + node.args[i + 1 :], node.keywords))
        for keyword in node.keywords:
            if keyword.arg not in WORDS:
                rest = [other for other in node.keywords if other is not keyword]
                yield ast.unparse(ast.Call(node.func, node.args, rest))
    elif isinstance(node, DROPPED):
        yield "pass"


def drop_last_return(node: ast.AST) -> None:
    """Remove `return None` where a function ends: it returns None all the same."""
    last = node.body[-1]
    if ast.unparse(last) in ("return", "return None"):
        node.body.pop()
    elif isinstance(last, ast.Try):
        for handler in last.handlers:
            drop_last_return(handler)


def nodes(node: ast.AST) -> Iterator[tuple[ast.AST, str | None]]:
    """Yield the nodes that may be changed, a condition with its negation: no text, no type hint."""
    if isinstance(node, ast.JoinedStr | ast.stmt) and SKIPPED.match(ast.unparse(node)):
        return
    if isinstance(node, ast.keyword) and node.arg in WORDS:
        return
    if isinstance(node, ast.Subscript) and ast.unparse(node) == "evidence.metadata[0]":
        return  # whichever rank's: what is read there is the same on all
    if isinstance(node, ast.FunctionDef):
        drop_last_return(node)
    yield node, None
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if field == "test" and not isinstance(child, ast.Compare | ast.BoolOp | ast.UnaryOp):
                    yield child, f"(not {ast.unparse(child)})"
                yield from nodes(child)


def mutants_of(file: str) -> list[Mutant]:
    """Return all mutants of a file."""
    content = (ROOT / file).read_bytes()
    places = [0]
    for line in content.splitlines(keepends=True):
        places.append(places[-1] + len(line))
    found = []
    for node, negation in nodes(ast.parse(content)):
        for new in [negation] if negation else changes(node):
            start = places[node.lineno - 1] + node.col_offset
            end = places[node.end_lineno - 1] + node.end_col_offset
            found.append(Mutant(file, node.lineno, start, end, content[start:end].decode(), new))
    return found


# ---------------------------------------------------------------- running the tests


def start_tests(tree: Path, names: tuple[str, ...], output: Path) -> int:
    """Run tests in a copy of this process, which has torch loaded; return its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()  # so that what it starts ends with it
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--basetemp", f"{tree}.tmp"]
        status = pytest.main(options + [f"tests/{name}.py" for name in names])
        sys.stdout.flush()
    finally:
        os._exit(status)  # whatever the mutant raised


def wait(running: dict[int, float]) -> tuple[int, int | None]:
    """Wait until one of the processes ends or passes its deadline: its id and status, None if stopped."""
    while True:
        for process, deadline in running.items():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return process, os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return process, None
        time.sleep(0.05)


def noticed_by(output: Path, status: int | None) -> str:
    """Return what noticed a mutant, in words."""
    if not status:
        return "noticed: a test did not end" if status is None else "SURVIVED"
    lines = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", output.read_text(), re.MULTILINE)
    return f"noticed by {lines[0][:90] if lines else 'pytest itself'}"


def record(tree: Path, names: list[str]) -> dict[str, float]:
    """Run each test file once on the unchanged code, which records the runs; return seconds by file."""
    seconds, output = {}, Path(f"{tree}.txt")
    for name in names:
        start = time.monotonic()
        process = start_tests(tree, (name,), output)
        if wait({process: start + 3600})[1] != 0:
            raise SystemExit(f"error: the unchanged code fails:\n{output.read_text()}")
        seconds[name] = time.monotonic() - start
        print(f"tests/{name}.py passes in {seconds[name]:.0f} s", flush=True)
    return seconds


def judge(mutants: list[Mutant], trees: list[Path], seconds: dict[str, float]) -> int:
    """Run the tests on each mutant, one at a time in each tree; return how many were noticed."""
    waiting, noticed = mutants[::-1], 0
    running: dict[int, tuple[Mutant, Path, bytes]] = {}
    deadlines: dict[int, float] = {}
    try:
        while waiting or running:
            while waiting and trees:
                mutant, tree = waiting.pop(), trees.pop()
                content = (tree / mutant.file).read_bytes()
                changed = content[: mutant.start] + mutant.new.encode() + content[mutant.end :]
                (tree / mutant.file).write_bytes(changed)
                process = start_tests(tree, TESTS[mutant.file], Path(f"{tree}.txt"))
                running[process] = mutant, tree, content
                limit = 60 + 10 * sum(seconds[name] for name in TESTS[mutant.file])
                deadlines[process] = time.monotonic() + limit
            process, status = wait(deadlines)
            mutant, tree, content = running.pop(process)
            del deadlines[process]
            (tree / mutant.file).write_bytes(content)
            trees.append(tree)
            noticed += status != 0
            print(f"{mutant}  {noticed_by(Path(f'{tree}.txt'), status)}", flush=True)
    finally:
        for process in running:
            os.killpg(process, signal.SIGKILL)
    return noticed


def main() -> int:
    """Draw the mutants, run their tests, print who noticed; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--count", type=int, default=60, help="mutants to draw (default: 60)")
    option("--seed", type=int, default=0, help="of the draw (default: 0)")
    option("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    option("--files", nargs="+", default=list(TESTS), help="files to change (default: all that judge)")
    option("--made", type=Path, help="where the recorded runs are kept (default: nowhere)")
    args = parser.parse_args()
    files = [file for file in args.files if (ROOT / file).exists()]
    everything = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    print(f"{len(drawn)} of {len(everything)} mutants of {len(files)} files, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / f"tree-{i}" for i in range(args.jobs)]
        for tree in trees:
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
        made = (args.made or Path(folder) / "made").resolve()
        made.mkdir(parents=True, exist_ok=True)
        os.environ |= {"RUNS": str(made), "BANK": str(made / "bank"), "OMP_NUM_THREADS": "1"}
        # Compiled code is told from another's by time and size, which two mutants may share.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        import numpy  # noqa: F401  loaded here, once for all copies of this process
        import torch.distributed.tensor  # noqa: F401

        seconds = record(trees[0], list(dict.fromkeys(name for file in files for name in TESTS[file])))
        noticed = judge(drawn, trees, seconds)
    print(f"{noticed} of {len(drawn)} noticed ({noticed / len(drawn):.0%})")
    return noticed < GOAL * len(drawn)


if __name__ == "__main__":
    sys.exit(main())
