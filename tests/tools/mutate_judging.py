"""Change one thing at a time in the code that judges: do the tests notice?

    make mutants
    python tests/tools/mutate_judging.py --count 60 --seed 0
    python tests/tools/mutate_judging.py --made /tmp/made        keeps the recorded runs for the next time

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
CAUSES = ("test_causes_forward", "test_causes_backward", "test_diagnose", "silent_bugs/test_detection")
# What is judged with, and the tests of it.
TESTS = {
    "training_records.py": COMPARISON,
    "training_tolerance.py": (*COMPARISON, "test_titan_parity"),
    "training_invariants.py": COMPARISON,
    "training_comparison.py": COMPARISON,
    "compare_training.py": (*COMPARISON, "test_causes_forward"),
    "training_evidence.py": CAUSES,
    "training_causes_general.py": CAUSES,
    "training_causes_forward.py": CAUSES,
    "training_causes_backward.py": CAUSES,
    "training_diagnosis.py": CAUSES,
    "titan/check_run.py": ("test_check_run",),
    "titan/parity.py": ("test_titan_parity",),
}
TURNED = {
    ast.Lt: [ast.GtE], ast.LtE: [ast.Gt], ast.Gt: [ast.LtE], ast.GtE: [ast.Lt], ast.Eq: [ast.NotEq, ast.GtE],
    ast.NotEq: [ast.Eq, ast.Gt], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
}  # fmt: skip
BY_ONE = {ast.Lt: [ast.LtE], ast.LtE: [ast.Lt], ast.Gt: [ast.GtE], ast.GtE: [ast.Gt]}  # of whole numbers
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break
# Arguments that change what is said, not what is found, or that guard against our own mistakes.
WORDS = {"help", "description", "metavar", "file", "flush", "formatter_class", "end", "indent", "strict"}


class Mutant(NamedTuple):
    """A piece of a file, by its place in the file's bytes, and what takes its place."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text) for text in (self.old, self.new))
        return f"{self.file}:{self.line}  {old[:70]}  ->  {new[:70]}"


# ---------------------------------------------------------------- what may be changed


def changes(node: ast.AST) -> Iterator[str]:
    """Yield what may take the place of an expression or a statement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        (op,), sides = map(type, node.ops), (node.left, node.comparators[0])
        whole = any(re.match(r"-?\d+$|len\(", ast.unparse(side)) for side in sides)
        for other in TURNED[op] + (BY_ONE.get(op, []) if whole else []):
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
    elif isinstance(node, DROPPED) and not (isinstance(node, ast.Assign) and is_name(node.targets[0])):
        yield "pass"


def is_name(target: ast.AST) -> bool:
    """Say whether a target is a variable: without its value, the first test would stop on a NameError."""
    return isinstance(target, ast.Name | ast.Tuple)


def nodes(node: ast.AST) -> Iterator[tuple[ast.AST, str | None]]:
    """Yield the nodes that may be changed, a condition with its negation: no text, no type hint."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and is_text(node.value)):
        return
    yield node, None
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if field == "test" and not isinstance(child, ast.Compare | ast.BoolOp | ast.UnaryOp):
                    yield child, f"(not {ast.unparse(child)})"
                yield from nodes(child)


def is_text(node: ast.AST) -> bool:
    """Say whether an expression statement is a docstring or prints something."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("print", "progress", "show_progress", "traceback.print_exc")
    return isinstance(node, ast.Constant)


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
    os.setsid()  # so that what it starts ends with it
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--basetemp", f"{tree}.tmp"]
    status = pytest.main(options + [f"tests/{name}.py" for name in names])
    sys.stdout.flush()
    os._exit(status)


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


def first_failure(output: Path, status: int | None) -> str:
    """Return what noticed a mutant, in words."""
    if status is None:
        return "a test that did not end"
    lines = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", output.read_text(), re.MULTILINE)
    return lines[0][:90] if lines else f"pytest, exit status {status}"


def copy_tree(folder: Path) -> Path:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns(".*", "results", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=ignore))


def record(tree: Path, names: list[str], folder: Path) -> dict[str, float]:
    """Run each test file once on the unchanged code, which records the runs; return seconds by file."""
    seconds = {}
    for name in names:
        start = time.monotonic()
        process = start_tests(tree, (name,), folder / "unchanged.txt")
        _, status = wait({process: start + 3600})
        if status:
            raise SystemExit(f"error: the unchanged code fails:\n{(folder / 'unchanged.txt').read_text()}")
        seconds[name] = time.monotonic() - start
        print(f"tests/{name}.py passes in {seconds[name]:.0f} s", flush=True)
    return seconds


def main() -> int:
    """Draw the mutants, run their tests, print who noticed; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="mutants to draw (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--files", nargs="+", default=list(TESTS), help="default: all that judge")
    parser.add_argument("--made", type=Path, help="where the recorded runs are kept (default: nowhere)")
    args = parser.parse_args()
    files = [file for file in args.files if (ROOT / file).exists()]
    everything = [mutant for file in files for mutant in mutants_of(file)]
    drawn = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    print(f"{len(drawn)} of {len(everything)} mutants of {len(files)} files, seed {args.seed}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = (args.made or folder / "made").resolve()
        made.mkdir(parents=True, exist_ok=True)
        os.environ |= {"RUNS": str(made), "BANK": str(made / "bank"), "OMP_NUM_THREADS": "1"}
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant may have the time and size of another
        sys.dont_write_bytecode = True
        import numpy  # noqa: F401  loaded here, once for all copies of this process
        import torch.distributed.tensor  # noqa: F401

        trees = [copy_tree(folder / f"tree-{i}") for i in range(args.jobs)]
        seconds = record(trees[0], list(dict.fromkeys(n for file in files for n in TESTS[file])), folder)
        running: dict[int, tuple[Mutant, Path]] = {}
        deadlines: dict[int, float] = {}
        waiting, noticed = drawn[::-1], 0
        while waiting or running:
            while waiting and trees:
                mutant, tree = waiting.pop(), trees.pop()
                content = (ROOT / mutant.file).read_bytes()
                changed = content[: mutant.start] + mutant.new.encode() + content[mutant.end :]
                (tree / mutant.file).write_bytes(changed)
                process = start_tests(tree, TESTS[mutant.file], Path(f"{tree}.txt"))
                running[process] = mutant, tree
                limit = 60 + 5 * args.jobs * sum(seconds[name] for name in TESTS[mutant.file])
                deadlines[process] = time.monotonic() + limit
            process, status = wait(deadlines)
            mutant, tree = running.pop(process)
            del deadlines[process]
            noticed += status != 0
            found = "SURVIVED" if status == 0 else f"noticed by {first_failure(Path(f'{tree}.txt'), status)}"
            print(f"{mutant}  {found}", flush=True)
            shutil.copy(ROOT / mutant.file, tree / mutant.file)
            trees.append(tree)
    share = noticed / len(drawn)
    print(f"{noticed} of {len(drawn)} noticed ({share:.0%})")
    return share < GOAL


if __name__ == "__main__":
    sys.exit(main())
