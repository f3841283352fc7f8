"""The layout: imports go one way, and what is copied is what the README says."""

import ast

import pytest
from conftest import ROOT

# From the ground up: each file imports files above it in this list only.
ORDER = [
    "training_common",
    "training_records",
    "training_tolerance",
    "training_invariants",
    "training_evidence",
    "training_causes_general",
    "training_causes_forward",
    "training_causes_backward",
    "training_diagnosis",
    "training_comparison",
    "training_sketches",
    "training_recordings",
    "training_recorded_runs",
    "training_names",
    "training_hooks",
    "training_recorder",
    "training_recorded_tolerance",
    "training_recorded_samples",
    "training_recorded_checks",
    "training_recorded_comparison",
    "training_recorded_witness",
    "training_recorded_causes_samples",
    "training_recorded_causes_tensors",
    "training_recorded_diagnosis",
    "training_summary",
    "training_figures",
]
TRAINING_SCRIPTS = ("distributed_train", "simplefsdp_tp_train", "oracle_train")


def imported(name: str) -> set[str]:
    """Return the files of this folder that a file of it imports."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if (ROOT / f"{name}.py").exists()}


def test_every_library_has_its_place():
    assert {path.stem for path in ROOT.glob("training_*.py")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_library_imports_those_below_it_only(name):
    assert imported(name) <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", ["compare_training", "report_training", "record_training"])
def test_a_command_imports_libraries_only(name):
    assert imported(name) and imported(name) <= set(ORDER)


def test_nothing_is_left_to_assert():  # which python -O would skip
    for path in (*ROOT.glob("*.py"), *ROOT.glob("titan/*.py")):
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


@pytest.mark.parametrize("name", TRAINING_SCRIPTS)
def test_a_training_script_needs_training_common_only(name):
    assert imported(name) == {"training_common"}
