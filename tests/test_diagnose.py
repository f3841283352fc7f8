"""The likely cause: none where nothing explains the values, and right words for edited real runs.

The bank in tests/silent_bugs holds real faulty runs; here are the faults that have no such run.
"""

import pytest
import torch
from conftest import RANKS, copy_run, edit, edit_all

from training_diagnosis import find_cause

NOISE = torch.Generator().manual_seed(0)


@pytest.fixture
def cause(runs, tmp_path, compare, oracle):
    """Edit a copy of a run, on one rank or all, and return the likely cause that is printed."""

    def call(change, rank=None, mode="ddp"):
        directory = copy_run(runs(mode).directory, tmp_path / "actual")
        edit_all(directory, change) if rank is None else edit(directory, rank, change)
        arguments = ["--reference-dir", oracle("eager"), "--actual-dir", directory]
        done = compare(*arguments, "--world-size", RANKS)
        assert done.status == 1 and "warning" not in done.err, done.err
        return next(line for line in done.out.splitlines() if line.startswith("Likely cause: "))[14:]

    return call


def tensor(kind, name, change, step=0):
    def edit(content):
        values = content["records"][step][kind][name]
        values.copy_(change(values))

    return edit


def initial(name, change):
    return lambda content: content["records"][0]["initial"].update(
        {name: change(content["records"][0]["initial"][name].clone())}
    )


RETURNED = "other outputs are returned than those that were trained on"


def spoil(values):
    values[3] = 1000.0
    return values


def noisy(values):
    return values + 0.1 * values.abs().max() * torch.randn(values.shape, generator=NOISE)


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        (
            tensor("gradients", "2.weight", lambda g: g.clone().index_fill_(0, torch.tensor([5]), 7.0)),
            2,
            "wrong on rank 2 alone, in 256 of 32768 elements, and right on the other 3",
        ),
        (tensor("gradients", "0.weight", lambda g: g[:, torch.arange(127, -1, -1)]), None, "not known"),
        (tensor("gradients", "0.weight", noisy), None, "not known"),
        (tensor("parameters", "2.weight", noisy), 2, "not known"),
        (initial("2.bias", spoil), None, "not known"),
        (lambda c: c["records"][0].update(output=c["records"][0]["output"] + 0.1), None, RETURNED),
        (lambda c: c["records"][0].update(output=c["records"][0]["output"].clamp(min=0)), None, RETURNED),
        (
            lambda c: c["records"][1].update(loss=c["records"][1]["loss"] * 1.01),
            1,
            "the mean of the 4 replicas' own losses is the reference",
        ),
        (tensor("gradients", "2.weight", lambda g: g * 0.37), None, "not known"),
    ],
)
def test_cause_is_right_or_not_named(cause, change, rank, words):
    assert words in cause(change, rank)


def test_transposed_square_matrix_is_named():
    right = torch.randn(8, 8, generator=NOISE)
    key = "gradients", "w"
    steps = [{("parameters", "w"): right}, {key: right.T.contiguous()}]
    expected = [{("parameters", "w"): right}, {key: right}]
    metadata = [{"dp_degree": 1, "tp_degree": 1, "world_size": 1, "dp_rank": 0, "optimizer": "SGD"}]
    found = find_cause((1, *key), [0], lambda _: steps, lambda _: expected, metadata, [[]])
    assert "gradients w is transposed" in found


def test_shards_of_one_number_are_no_multiples_of_the_reference():
    # A bias of as many elements as the mesh has ranks: any value is a multiple of any other.
    right = torch.randn(4, generator=NOISE)
    key = "gradients", "b"
    steps = [{("parameters", "b"): right}, {key: torch.randn(4, generator=NOISE)}]
    expected = [{("parameters", "b"): right}, {key: right}]
    job = {"dp_degree": 4, "tp_degree": 1, "world_size": 4, "optimizer": "SGD"}
    metadata = [job | {"dp_rank": rank} for rank in range(4)]
    arguments = (1, *key), [0, 1, 2, 3], lambda _: steps, lambda _: expected, metadata, [[]] * 4
    assert find_cause(*arguments) is None


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("tensors_differ", [False, True])
def test_what_was_not_recorded_is_no_reason_to_break_off(optimizer, tensors_differ):
    """Every kind of tensor is asked for, in records that lack outputs, losses or a gradient."""
    values = {name: torch.randn(8, generator=NOISE) for name in ("0.weight", "0.bias")}
    start = {("parameters", name): tensor for name, tensor in values.items()}
    kinds = ("gradients", "parameters", "deltas")
    complete = {("outputs", "output"): torch.ones(8, 8), ("losses", "global loss"): torch.tensor(1.0)}
    complete |= {(kind, name): tensor + 1 for kind in kinds for name, tensor in values.items()}
    job = {"dp_degree": 2, "tp_degree": 2, "world_size": 4, "optimizer": optimizer}
    job["learning_rate"] = 0.1 if optimizer == "SGD" else None
    metadata = [job | {"dp_rank": rank // 2} for rank in range(4)]
    for absent in complete:
        record = {key: tensor + tensors_differ for key, tensor in complete.items() if key != absent}
        losses = [[(None, 1.0), (1.0, None)]] * 4 if absent[0] == "losses" else [[(1.0, 1.0)] * 2] * 4
        steps, expected = [start, record, record], [start, complete, complete]
        for first in [(step, *key) for step in (1, 2) for key in complete]:
            for reference in (lambda _, expected=expected: expected, None):
                actual = lambda _, steps=steps: steps  # noqa: E731
                find_cause(first, [0, 1, 2, 3], actual, reference, metadata, losses)


def test_rounding_under_a_tolerance_that_is_too_tight_is_called_rounding(runs, oracle, compare):
    arguments = ["--reference-dir", oracle("eager"), "--actual-dir", runs("ddp").directory]
    done = compare(*arguments, "--world-size", RANKS, "--rtol", 1e-8, "--norm-eps", 0.3)
    assert done.status == 1
    assert "Likely cause: rounding: the runs differ by no more than two right computations do" in done.out
