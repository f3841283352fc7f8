"""The criterion, from both sides: the largest error that passes and the smallest that does not.

One tensor of a made-up run is altered on all ranks. Numbers are exact in float32, so the bounds are too.
"""

import re

import pytest
import torch
from conftest import edit_all
from made_runs import KINDS, broken, make_run, mismatched, noise

from training_tolerance import (
    DRIFT_FACTOR,
    Allowance,
    allow_share,
    drift_share,
    relative_error,
    share_of_rounding,
)

EPS = 2.0**-23
MANY = 32768


@pytest.fixture
def judge(compare_made):
    """Alter all ranks of a run and compare: how many tensors of each kind failed."""

    def run(change, **more) -> dict[str, int]:
        done = compare_made(change, 0, 1, 2, 3, **more)
        failed = mismatched(done.out)
        assert done.status == (1 if failed or broken(done.out) else 0), done.out + done.err
        return failed

    return run


def tensor_of(content, kind, name="weight", step=1):
    record = content["records"][step - 1]
    return record["output"] if kind == "outputs" else record[kind][name]


def add(kind, error, index=..., name="weight", step=1):
    """Add an error to all elements or to one."""
    return lambda content: tensor_of(content, kind, name, step)[index].add_(error)


def ones(gradient=1.0):
    """Return the arguments of a run whose one parameter and its gradient have 32,768 equal elements."""
    return {
        "parameters": {"weight": torch.ones(MANY)},
        "gradients": lambda step: {"weight": torch.full((MANY,), gradient)},
    }


# Each element may be off by 64 eps of its own and of the largest one, which is as large here.
@pytest.mark.parametrize(("error", "failed"), [(100, 0), (127, 0), (130, 4), (300, 4)])
def test_one_element_decides(judge, error, failed):
    assert judge(add("gradients", error * EPS, 0), **ones()) == ({"gradients": failed} if failed else {})


# ... a tensor by 16 eps of its norm.
@pytest.mark.parametrize(("error", "failed"), [(15, 0), (17, 4)])
def test_the_norm_decides(judge, error, failed):
    assert judge(add("gradients", error * EPS), **ones()) == ({"gradients": failed} if failed else {})


@pytest.mark.parametrize(("error", "failed"), [(63, 0), (66, 4)])
def test_an_element_near_zero_has_the_rounding_of_the_largest(judge, error, failed):
    gradient = torch.ones(MANY)
    gradient[0] = 0.0
    made = ones() | {"gradients": lambda step: {"weight": gradient}}
    assert judge(add("gradients", error * EPS, 0), **made) == ({"gradients": failed} if failed else {})


@pytest.mark.parametrize(
    ("size", "said"), [(1.0e-6, True), (1.8e-6, True), (2.0e-6, False), (1e-5, False), (1e-3, False)]
)
def test_a_gradient_is_negligible_below_16_eps_of_the_largest_one(compare, tmp_path, size, said):
    # Relative to the gradients, not to the parameters, which are a thousand times as large.
    def gradients(step):
        return {"large": torch.full((8,), 1e-3), "small": torch.full((8,), 1e-3 * size)}

    made = {"parameters": {"large": torch.ones(8), "small": torch.ones(8)}, "gradients": gradients}
    reference, actual = make_run(tmp_path / "reference", **made), make_run(tmp_path / "actual", **made)
    edit_all(actual, lambda content: tensor_of(content, "gradients", "small").zero_())
    done = compare("--reference-dir", reference, "--actual-dir", actual, "--world-size", 4)
    assert mismatched(done.out) == ({} if said else {"gradients": 4})
    assert ("gradients small: zero but for rounding, 4 times not compared" in done.out) == said


@pytest.mark.parametrize(("number", "named", "more"), [(4, 8, ""), (5, 8, "and so are 2 more tensors")])
def test_of_many_negligible_tensors_some_are_named(compare, tmp_path, number, named, more):
    names = [f"small{index}" for index in range(number)]  # of each its gradient and its parameter
    sizes = {"large": 1.0} | dict.fromkeys(names, 1e-7)
    made = {"parameters": {name: torch.ones(8) for name in sizes}}
    made["gradients"] = lambda step: {name: torch.full((8,), size) for name, size in sizes.items()}
    reference, actual = make_run(tmp_path / "reference", **made), make_run(tmp_path / "actual", **made)
    for name in names:
        edit_all(actual, lambda content, name=name: tensor_of(content, "gradients", name).mul_(1.5))
    done = compare("--reference-dir", reference, "--actual-dir", actual, "--world-size", 4)
    assert done.out.count(": zero but for rounding, ") == named
    assert ("and so are" in done.out) == bool(more) and more in done.out


@pytest.mark.parametrize(("scale", "failed"), [(1e-6, {}), (1e-4, {"parameters": 4})])
def test_a_parameter_is_negligible_where_its_deltas_are(judge, scale, failed):
    # It starts at zero and all that is in it are updates: of rounding, or of a real gradient.
    def gradients(step):
        return {"large": torch.ones(8), "small": torch.full((8,), scale)}

    made = {"parameters": {"large": torch.ones(8), "small": torch.zeros(8)}, "gradients": gradients}
    assert judge(lambda content: tensor_of(content, "parameters", "small").mul_(1.5), **made) == failed


@pytest.mark.parametrize(("ulps", "failed"), [(1.5, {}), (3, {"deltas": 4}), (50, {"deltas": 4})])
def test_one_delta_may_be_off_by_2_eps_of_its_largest_parameter(judge, ulps, failed):
    assert judge(add("deltas", ulps * EPS, 0), **ones(1e-4)) == failed


@pytest.mark.parametrize(("ulps", "failed"), [(1.5, {}), (3, {"deltas": 4})])
def test_all_deltas_may_be_off_by_2_eps_of_their_parameters(judge, ulps, failed):
    # The elements allow this: one parameter is large.
    parameter = torch.ones(MANY)
    parameter[0] = 128.0
    made = ones(1e-4) | {"parameters": {"weight": parameter}}
    assert judge(add("deltas", ulps * EPS, slice(1, None)), **made) == failed


# Gradients of bfloat16 are good to 2^-7. A float32 parameter that they moved by 1e-3 may be off by 16
# of these times 1e-3, 1.25e-4, in norm and by four times that in one element; what did not move, not.
@pytest.mark.parametrize(
    ("moved", "error", "index", "failed"),
    [
        (1e-3, 1.1e-4, ..., {}),
        (1e-3, 1.6e-4, ..., {"parameters": 4}),
        (1e-3, 3e-4, ..., {"parameters": 4}),
        (1e-3, 4.5e-4, 0, {}),
        (1e-3, 6e-4, 0, {"parameters": 4}),
        (1e-3, 2e-3, 0, {"parameters": 4}),
        (1e-5, 1e-4, ..., {"parameters": 4}),
        (1e-5, 1e-5, ..., {"parameters": 4}),
        (1e-5, 2e-6, ..., {}),
    ],
)
def test_float32_parameters_under_bfloat16_gradients(judge, moved, error, index, failed):
    def gradients(step):
        return {"weight": torch.full((MANY,), moved / 0.01).bfloat16()}

    made = ones() | {"gradients": gradients, "steps": 1}
    assert judge(add("parameters", error, index), **made) == failed


def test_only_the_run_in_question_computes_in_bfloat16(judge):
    # Autocast of one run alone is a difference: its own types loosen nothing.
    def change(content):
        record = content["records"][0]
        record["gradients"] = {name: value.bfloat16() for name, value in record["gradients"].items()}

    assert judge(change) == {"gradients": 8}
    assert judge(change, against="whole") == {"gradients": 8}


@pytest.mark.parametrize(("error", "failed"), [(0.9e-3, {}), (1.2e-3, {"gradients": 4})])
def test_the_oracle_allows_its_slack(judge, error, failed):
    made = ones() | {"slack": {"weight": torch.full((MANY,), 1e-3)}}
    assert judge(add("gradients", error, 0), against="whole", **made) == failed
    assert judge(add("gradients", error), against="whole", **made) == failed


@pytest.mark.parametrize(("error", "failed"), [(0.9e-5, {}), (1.2e-5, {"deltas": 4}), (1e-4, {"deltas": 4})])
def test_a_delta_has_the_slack_of_its_gradient_times_the_learning_rate(judge, error, failed):
    made = ones(1e-4) | {"slack": {"weight": torch.full((MANY,), 1e-3)}}
    assert judge(add("deltas", error, 0), against="whole", **made) == failed
    assert judge(add("deltas", error), against="whole", **made) == failed


def test_slack_is_for_its_own_tensor_and_not_for_parameters(judge):
    made = {"slack": {"bias": torch.full((24,), 1e-3)}}
    assert judge(add("gradients", 0.9e-3), against="whole", **made) == {"gradients": 4}
    assert judge(add("parameters", 0.9e-3, name="bias"), against="whole", **made) == {"parameters": 4}


def tokens(step):
    return torch.arange(8 * 24).reshape(8, 24) + 100_000


@pytest.mark.parametrize(("error", "failed"), [(0, {}), (1, {"outputs": 4})])
def test_whole_numbers_must_be_equal(judge, error, failed):
    assert judge(add("outputs", error, (0, 0)), outputs=tokens) == failed


def test_a_difference_that_overflows_is_no_small_one(judge):
    def outputs(step):
        whole = 1 + torch.rand(8, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        whole[:, 0] = 1.7e308
        return whole

    def change(content):
        content["records"][0]["output"][0, 0] = -1.7e308

    assert judge(change, outputs=outputs) == {"outputs": 4}


def test_one_value_of_float64_that_overflows(judge):
    # Two elements, so that nothing but the first decides.
    def outputs(step):
        return torch.tensor([[1.7e308, 1.0 + i] for i in range(2)], dtype=torch.float64)

    def change(content):
        content["records"][0]["output"][0, 0] = -1.7e308

    assert judge(change, outputs=outputs, dp=2) == {"outputs": 4}


# Losses are averaged in float32, whatever the type of the model.
@pytest.mark.parametrize(("error", "failed"), [(15, 0), (17, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_has_the_rounding_of_float32(judge, dtype, error, failed):
    made = {
        "parameters": {"weight": torch.ones(4, dtype=dtype)},
        "gradients": lambda step: {"weight": torch.ones(4, dtype=dtype)},
        "outputs": lambda step: noise(8, 24, seed=step).to(dtype),
    }

    def change(content):
        record = content["records"][0]
        record["loss"] *= 1 + error * EPS

    assert judge(change, **made) == ({"losses": failed} if failed else {})


# Of a delta, part of a small error is the rounding of its parameter, which is not counted.
@pytest.mark.parametrize(("kind", "size"), [*((kind, 1e-3) for kind in KINDS), ("deltas", 1e-6)])
def test_the_printed_tolerance_passes_and_a_smaller_one_does_not(compare, tmp_path, kind, size):
    reference, actual = make_run(tmp_path / "reference"), make_run(tmp_path / "actual")

    def change(content):
        if kind == "losses":
            content["records"][1]["loss"] *= 1.001
        else:
            add(kind, size, step=2)(content)
            add(kind, size, (0, 0), step=2)(content)

    edit_all(actual, change)

    def run(*options):
        done = compare("--reference-dir", reference, "--actual-dir", actual, "--world-size", 4, *options)
        return mismatched(done.out), done.out

    failed, out = run()
    assert failed == {kind: 4}
    rtol, norm_eps = map(
        float, re.search(r"^all +--rtol (\S+) --norm-eps (\S+)$", out, re.MULTILINE).groups()
    )
    assert run("--rtol", rtol, "--norm-eps", norm_eps)[0] == {}
    assert set(run("--rtol", 0.9 * rtol, "--norm-eps", norm_eps)[0]) == {kind}
    assert set(run("--rtol", rtol, "--norm-eps", 0.9 * norm_eps)[0]) == {kind}
    assert run("--rtol", rtol)[0] == {}


@pytest.mark.parametrize(
    ("actual", "reference"),
    [([1.0, torch.nan], [1.0, 2.0]), ([1.0, 2.0], [torch.inf, 2.0]), ([1.0], [1.0, 2.0]), ([0.0], [0.0])],
)
def test_the_relative_error_of_what_cannot_be_compared_is_infinite(actual, reference):
    assert relative_error(torch.tensor(actual), torch.tensor(reference)) == torch.inf


def test_what_parameters_that_differ_allow():
    # Of the parameters of a module the share of all together; the shares of modules add up as squares.
    measured = {"a.weight": (3e-6, 6.0), "a.bias": (4e-6, 8.0), "b.weight": (1e-6, 1.0)}
    share = ((5e-6 / 10) ** 2 + 1e-6**2) ** 0.5
    assert drift_share(measured, EPS) == pytest.approx(DRIFT_FACTOR * share)
    assert drift_share({}, EPS) == 0.0
    more = allow_share(Allowance(1.0, 2.0), torch.tensor([3.0, -4.0]), 0.1)
    assert (float(more.element), more.norm) == (pytest.approx(1 + 4 * 0.1 * 4), pytest.approx(2 + 0.1 * 5))


def test_share_of_the_largest_gradient_that_may_be_rounding():
    assert share_of_rounding(2.0**-23) == 16 * 2.0**-23
    assert share_of_rounding(2.0**-7) == 2.0**-11
