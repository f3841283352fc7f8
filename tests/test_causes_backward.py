"""Causes of wrong gradients and updates: the whole sentence, and near misses, which have none.

Each is planted in a made-up run. The mesh is 2 x 2: ranks 0 and 1 are replica 0, ranks 2 and 3
replica 1. Arguments of the changes: g, o and p are a gradient, an output and a parameter, about is the
rank's metadata.
"""

import pytest
import torch
from made_runs import (
    DIVIDED,
    NOT_KNOWN,
    SUMMED,
    chunks,
    fault,
    follow,
    gradient,
    near,
    noise,
    other,
    put,
    some_gradients,
    without,
)

# ---------------------------------------------------------------- gradients


OF_GRADIENTS = DIVIDED.replace(
    "too often, ", "too often, or a collective in the loss that passes no gradient, such as all_reduce, ", 1
)
SCALED = "all by the same factor: scaled, or of a loss that is"


def replicas(r, about, mean=1.0):
    """Return a gradient of the replica's own; those of the two have the mean times the reference."""
    return mean * r + (1 if about["dp_rank"] else -1) * other(r, 0.5)


def terms(r, about):
    first = other(r, 1.0)
    return [first / 2, (r - first) / 2][about["dp_rank"]]


def by_shard(*factors, dim=0):
    """Return the tensor with a factor for each shard."""
    return lambda g: torch.cat(
        [s * part for s, part in zip(factors, g.chunk(len(factors), dim), strict=True)], dim
    )


GRADIENTS = [
    fault(
        without("bias"),
        "every rank: no gradient of bias in 2 of 2 steps, and the values do not change: frozen "
        "(requires_grad is False), not used, or cut off from the loss",
    ),
    fault(
        without("bias", moved=True),
        "every rank: no gradient of bias in 2 of 2 steps, yet bias change: frozen (requires_grad is False), "
        "not used, or cut off from the loss",
    ),
    fault(
        without("bias"),
        "ranks 1, 3: no gradient of bias in 2 of 2 steps, and the values do not change: frozen "
        "(requires_grad is False), not used, or cut off from the loss",
        1,
        3,
    ),
    fault(
        gradient(put(torch.inf), "weight"),
        "the first value that is not finite in the actual run is in gradients weight of step 1, on "
        "every rank: 1 of 96 elements; everything before is finite",
    ),
    fault(
        gradient(put(7.0), "weight"),
        "gradients weight are wrong on rank 2 alone, in 1 of 96 elements, and right on the other 3: "
        "not the plan, but something that happened there",
        2,
    ),
    fault(
        gradient(lambda g: g + other(g, 0.1), "weight"),
        "gradients weight are wrong on ranks 2-3 alone, in 96 of 96 elements, and right on the other 2: "
        "something that happened there",
        2,
        3,
    ),
    fault(gradient(lambda g: g + other(g, 0.1), "weight"), NOT_KNOWN, 1, 2, 3),
    # The other ranks have the right one: no mean over the ranks is meant.
    fault(
        gradient(lambda g: 3 * g, "weight"),
        "gradients weight are wrong on ranks 2-3 alone, in 96 of 96 elements, and right on the other 2: "
        "something that happened there",
        2,
        3,
    ),
    fault(
        gradient(replicas),
        "each of the 2 replicas has its own gradients bias, and their mean over all ranks is the "
        "reference but for rounding: not reduced, nor is any other gradient: is the wrapper's forward "
        "bypassed, or no_sync still on?",
    ),
    fault(
        gradient(terms),
        "each of the 2 replicas has its own gradients bias, and their sum over all ranks is the "
        "reference but for rounding: not reduced, nor is any other gradient: is the wrapper's forward "
        "bypassed, or no_sync still on?",
    ),
    fault(
        gradient(lambda r, about: replicas(r, about, 0.5)),
        "each of the 2 replicas has its own gradients bias, and their mean over all ranks is 0.50x "
        f"the reference: {OF_GRADIENTS}, and at least once not reduced",
    ),
    fault(gradient(lambda r, about: replicas(r, about, 0.7)), NOT_KNOWN),
    fault(gradient(lambda r, about: replicas(r, about) + other(r, 0.01, 8)), NOT_KNOWN),
    fault(
        gradient(lambda g: g + some_gradients(1)["bias"], "bias", step=2),
        "gradients of step 2 are the reference plus those of step 1 but for rounding: they were not "
        "cleared by zero_grad",
    ),
    fault(gradient(lambda g: g + 1.1 * some_gradients(1)["bias"], "bias", step=2), NOT_KNOWN),
    fault(
        gradient(lambda g: some_gradients(1)["bias"], "bias", step=2),
        "gradients of step 2 are those of step 1 but for rounding: stale",
    ),
    fault(gradient(lambda g: 1.1 * some_gradients(1)["bias"], "bias", step=2), NOT_KNOWN),
    fault(
        gradient(lambda g: 2 * g),
        f"gradients of every rank are 2.00x the reference: {SUMMED}, or not divided by 2 microbatches, or "
        "applied or accumulated twice",
    ),
    fault(
        gradient(lambda g: 2 * g, "bias"), f"gradients bias of every rank are 2.00x the reference: {SUMMED}"
    ),
    fault(gradient(lambda g: g / 2), f"gradients of every rank are 0.50x the reference: {OF_GRADIENTS}"),
    fault(
        gradient(lambda g: g / 4),
        "gradients of every rank are 0.25x the reference: divided by the 2 data-parallel replicas "
        "twice too often, or divided by the world size 4",
    ),
    fault(
        gradient(lambda g: 4 * g, "weight"),
        "gradients weight of every rank are 4.00x the reference: multiplied by the world size 4",
    ),
    fault(gradient(lambda g: -g), "gradients of every rank are -1.00x the reference: of the wrong sign"),
    fault(gradient(lambda g: -g, "weight"), NOT_KNOWN),
    fault(
        gradient(lambda g: 96 * g),
        "gradients of every rank are 96.00x the reference: summed over the 96 elements of the output "
        "instead of averaged",
    ),
    fault(
        gradient(lambda g: 1024 * g),
        "gradients of every rank are 1024.00x the reference: a loss scale of 1024 that was not removed",
    ),
    fault(
        gradient(lambda g: 16 * g),
        "gradients of every rank are 16.00x the reference: a loss scale of 16 that was not removed",
    ),
    fault(gradient(lambda g: 8 * g), f"gradients of every rank are 8.00x the reference, {SCALED}"),
    fault(gradient(lambda g: 1000 * g), f"gradients of every rank are 1000.00x the reference, {SCALED}"),
    fault(
        gradient(lambda g: 0.3 * g),
        "gradients of every rank are 0.30x the reference, all by the same factor: clipped to a total "
        "norm of 0.3423, or scaled with the loss",
    ),
    fault(gradient(lambda g: 0.3 * g, "weight"), NOT_KNOWN),
    fault(gradient(lambda g: 1.3 * g), f"gradients of every rank are 1.30x the reference, {SCALED}"),
    fault(
        gradient(lambda g, about: (1.3 + 0.7 * about["dp_rank"]) * g),
        "gradients bias is the reference times a factor that each rank has for itself, 1.3 to 2: "
        "scaled by a norm or a count of the rank's own",
    ),
    fault(
        gradient(chunks((1, 0)), "weight"),
        "each of the 2 shards of gradients weight along dimension 0 is another's, in the order [1, "
        "0]: gathered or cut in the wrong order",
    ),
    fault(
        gradient(chunks((1, 2, 3, 0), dim=1), "weight"),
        "each of the 4 shards of gradients weight along dimension 1 is another's, in the order [1, 2, "
        "3, 0]: gathered or cut in the wrong order",
    ),
    fault(
        gradient(chunks((0, 0)), "weight"),
        "each of the 2 shards of gradients weight along dimension 0 is the reference's shard 0: every "
        "rank holds the same shard",
    ),
    fault(
        gradient(chunks((0, 0, 2, 1)), "weight"),
        "each of the 4 shards of gradients weight along dimension 0 is one of the reference's, in the "
        "order [0, 0, 2, 1]: some twice, some missing",
    ),
    fault(
        gradient(chunks((0, 0, 1, 1)), "weight"),
        "each of the 4 shards of gradients weight along dimension 0 is one of the reference's, in the "
        "order [0, 0, 1, 1]: some twice, some missing",
    ),
    fault(
        gradient(by_shard(1, 0), "weight"),
        "shard 1 of the 2 shards of gradients weight along dimension 0 is zero, the others agree: it "
        "was never filled",
    ),
    fault(
        gradient(by_shard(0, 1, 0, 0), "weight"),
        "shards 0, 2-3 of the 4 shards of gradients weight along dimension 0 are zero, the others "
        "agree: it was never filled",
    ),
    fault(
        gradient(by_shard(2, 3), "weight"),
        "each of the 2 shards of gradients weight along dimension 0 is the reference's times a factor "
        "of its own, 2 to 3: scaled by a norm of the local shard",
    ),
    fault(
        gradient(by_shard(0.5, 1, 1, 1, dim=1), "weight"),
        "each of the 4 shards of gradients weight along dimension 1 is the reference's times a factor "
        "of its own, 0.5 to 1: scaled by a norm of the local shard",
    ),
    fault(gradient(near(1e-2, by_shard(2, 3)), "weight"), NOT_KNOWN),
    fault(
        gradient(lambda g: g.bfloat16().float()),
        "gradients bias: all 24 values are exact in bfloat16, of the reference's 0.0%: computed or "
        "reduced in bfloat16",
    ),
    fault(gradient(lambda g: g.flip(0), "weight"), NOT_KNOWN),
    fault(gradient(lambda g: g + other(g, 0.1), "weight"), NOT_KNOWN),
]


@pytest.mark.parametrize(("change", "sentence", "ranks"), GRADIENTS)
def test_cause_of_gradients(made_cause, change, sentence, ranks):
    assert made_cause(change, ranks) == sentence


def test_an_element_is_wrong_by_the_tolerance_of_elements(made_cause):
    def change(g):
        eps = 2.0**-23 * g.abs().max()
        g.view(-1)[:3] += torch.tensor([0.1, 60 * eps, 68 * eps])
        return g

    cause = made_cause(gradient(change, "weight"), (2,))
    assert cause.startswith("gradients weight are wrong on rank 2 alone, in 2 of 96 elements, and right on")


@pytest.mark.parametrize("left", [0.0, 0.01])
def test_terms_of_the_tensor_parallel_ranks(made_cause, left):
    def change(r, about):
        first = other(r, 1.0)
        return [first, r - first][about["tp_rank"]] + other(r, left, 8)

    sentence = (
        "gradients weight differ within the tensor-parallel groups {0-1} {2-3}, and their sum over such "
        "a group is the reference but for rounding: not reduced over the tensor-parallel ranks"
    )
    assert made_cause(gradient(change, "weight")) == (NOT_KNOWN if left else sentence)


def test_a_matrix_of_another_width_is_not_transposed(made_cause):
    gradients = lambda step: {"weight": 0.1 * noise(4, 24, seed=step), "bias": some_gradients(step)["bias"]}  # noqa: E731
    parameters = {"weight": noise(4, 24, seed=1), "bias": noise(24, seed=2)}
    change = gradient(lambda g: g + other(g, 0.1), "weight")
    assert made_cause(change, parameters=parameters, gradients=gradients) == NOT_KNOWN


def test_a_factor_of_the_tensor_parallel_ranks(made_cause):
    cause = made_cause(gradient(lambda g: g / 4, "weight"), dp=1, tp=4)
    assert cause == (
        "gradients weight of every rank are 0.25x the reference: divided by the 4 tensor-parallel ranks, "
        "over which it must not be averaged"
    )


def test_a_gradient_that_the_reference_lacks_is_no_multiple_of_it(made_cause):
    def change(content):
        gradient(lambda g: g / 2, "bias")(content)
        without("weight")(content)

    sentence = f"gradients bias of every rank are 2.00x the reference: {SUMMED}"
    assert made_cause(change, of="reference") == sentence


def test_a_wrong_gradient_comes_before_a_later_one_that_is_missing(made_cause):
    def change(content):
        gradient(lambda g: 2 * g, "bias")(content)
        without("weight")(content)

    sentence = (
        f"gradients of every rank are 2.00x the reference: {SUMMED}, or not divided by 2 microbatches, or "
        "applied or accumulated twice"
    )
    assert made_cause(change) == sentence


@pytest.mark.parametrize(
    ("change", "sentence", "ranks"),
    [
        fault(
            gradient(lambda g: 1.5 * g, "weight"),
            "gradients weight of rank 2 differ from those of all other ranks, which agree",
            2,
        ),
        fault(
            gradient(lambda g: 1.5 * g, "weight"),
            "each of the 2 replicas has its own gradients weight: not reduced over all replicas",
            2,
            3,
        ),
        fault(
            gradient(lambda g, about: (1 + about["rank"]) * g, "weight"),
            "gradients weight agree only within the groups of ranks {0} {1} {2} {3}: not reduced over all "
            "replicas",
        ),
        fault(
            gradient(lambda g, about: (1 + about["rank"]) * g, "weight"),
            "gradients weight agree only within the groups of ranks {0, 3} {1} {2}: not reduced over all "
            "replicas",
            1,
            2,
        ),
    ],
)
def test_gradients_that_differ_without_a_reference(made_cause, change, sentence, ranks):
    assert made_cause(change, ranks, against=None) == sentence


@pytest.mark.parametrize(
    ("against", "sentence"),
    [
        (
            None,
            "gradients bias agree only within the groups of ranks {0, 2} {1, 3}: not reduced over all "
            "replicas",
        ),
        (
            "run",
            "gradients bias agree only within the groups of ranks {0, 2} {1, 3}, and their mean over all "
            "ranks is the reference but for rounding: reduced over the wrong group",
        ),
    ],
)
def test_gradients_reduced_over_the_wrong_group(made_cause, against, sentence):
    change = gradient(lambda r, about: r + (1 if about["dp_rank"] % 2 else -1) * other(r, 0.5))
    assert made_cause(change, against=against, dp=4, tp=1) == sentence


@pytest.mark.parametrize(("rest", "named"), [(1e-3, True), (1.9e-3, False)])
def test_shards_are_equal_but_for_a_thousandth_of_the_difference(made_cause, rest, named):
    # Two shards exchanged are off by sqrt(2) times the tensor: 1.4e-3 of it may be left.
    cause = made_cause(gradient(near(rest, chunks((1, 0))), "weight"))
    assert ("is another's, in the order [1, 0]" in cause) == named
    assert (cause == NOT_KNOWN) != named


@pytest.mark.parametrize(("rest", "named"), [(3, True), (6, False)])
def test_shards_are_equal_but_for_rounding(made_cause, rest, named):
    # Shards that differ little: a thousandth of that is less than rounding, which is 4 eps.
    def alike(step):
        half = noise(12, 4, seed=step)
        return {"weight": torch.cat([half, half + 1e-4 * noise(12, 4, seed=40)])}

    change = gradient(near(rest * 2.0**-23, chunks((1, 0))), "weight")
    cause = made_cause(change, parameters={"weight": noise(24, 4, seed=9)}, gradients=alike)
    assert ("is another's, in the order [1, 0]" in cause) == named
    assert (cause == NOT_KNOWN) != named


def square(step):
    return {"weight": noise(8, 8, seed=step)}


@pytest.mark.parametrize(("rest", "said"), [(0, "0e+00"), (9e-4, "9e-04"), (1.1e-3, None)])
def test_transposed_gradient(made_cause, rest, said):
    made = {"parameters": {"weight": noise(8, 8, seed=9)}, "gradients": square}
    wanted = f"gradients weight is transposed (that leaves {said} of the difference)" if said else NOT_KNOWN
    assert made_cause(gradient(near(rest, lambda g: g.T.contiguous())), **made) == wanted


def test_a_tensor_that_the_mesh_does_not_divide_has_no_shards(made_cause):
    made = {
        "parameters": {"weight": noise(6, 5, seed=9)},
        "gradients": lambda step: {"weight": noise(6, 5, seed=step)},
    }
    assert made_cause(gradient(lambda g: g + other(g, 0.1)), **made) == NOT_KNOWN


# ---------------------------------------------------------------- updates


def momentum(size):
    return lambda g, p, last, stale: -0.01 * g + (0 if last is None else size * last)


UPDATES = [
    (
        follow(lambda g, p, last, stale: 0 * g),
        "weight, bias of every rank do not change in any of 3 steps, though the gradient is not zero: "
        "not updated by the optimizer",
    ),
    (
        follow(lambda g, p, last, stale: -0.01 * g * (last is None)),
        "weight, bias of every rank do not change in step 2, though the gradient is not zero: the "
        "update was skipped",
    ),
    (
        follow(lambda g, p, last, stale: (p - 0.01 * g).bfloat16().float() - p),
        "parameters weight: all 96 values are exact in bfloat16, of the reference's 0.0%: computed or "
        "reduced in bfloat16",
    ),
    (
        follow(lambda g, p, last, stale: -0.03 * g),
        "the update of weight on every rank is 3x -learning rate x gradient: the learning rate acts "
        "as 0.03, not 0.01",
    ),
    (
        follow(lambda g, p, last, stale: -0.02 * g),
        "the update of weight on every rank is 2x -learning rate x gradient: the learning rate acts "
        f"as 0.02, not 0.01, {SUMMED}, or applied or accumulated twice",
    ),
    (
        follow(lambda g, p, last, stale: -0.04 * g),
        "the update of weight on every rank is 4x -learning rate x gradient: the learning rate acts "
        "as 0.04, not 0.01, scaled by the world size 4",
    ),
    (
        follow(lambda g, p, last, stale: 0.01 * g),
        "the update of weight on every rank is -1x -learning rate x gradient: the learning rate acts "
        "as -0.01, not 0.01",
    ),
    (
        follow(lambda g, p, last, stale: -0.01 * (g if stale is None else stale)),
        "the update of step 2 is -learning rate x the gradient of step 1: the step is taken before "
        "the gradient has arrived",
    ),
    (
        follow(momentum(0.9)),
        "the update is -learning rate x gradient plus 0.900 times the last update: momentum 0.90 is on",
    ),
    (
        follow(momentum(1.0)),
        "the update is -learning rate x gradient plus 1.000 times the last update: momentum 1.00 is on",
    ),
    (follow(momentum(1.5)), NOT_KNOWN),
    (follow(momentum(-0.5)), NOT_KNOWN),
    (
        follow(lambda g, p, last, stale: -0.01 * (g + 0.1 * p)),
        "the update is -learning rate x gradient minus 0.1 x learning rate x parameter: weight decay "
        "0.1 is on",
    ),
    (follow(lambda g, p, last, stale: -0.01 * (g - 0.1 * p)), NOT_KNOWN),
    (
        follow(lambda g, p, last, stale: -0.01 * g.sign()),
        "every element of weight moves by about 0.01, whatever its gradient: an optimizer such as "
        "Adam, not plain SGD",
    ),
    (follow(lambda g, p, last, stale: -0.01 * (g + other(g, 0.1))), NOT_KNOWN),
]


@pytest.mark.parametrize("against", [None, "run"])
@pytest.mark.parametrize(("change", "sentence"), UPDATES)
def test_cause_of_an_update(made_cause, change, sentence, against):
    assert made_cause(change, against=against, steps=3) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            follow(lambda g, p, last, stale: -0.03 * g),
            "the update of weight on every rank is 3x the reference's: the learning rate acts as 0.03, "
            "not 0.01",
        ),
        (
            follow(momentum(0.9)),
            "the update is the reference's plus 0.900 times the last update: momentum 0.90 is on",
        ),
        (follow(lambda g, p, last, stale: -0.01 * (g if stale is None else stale)), NOT_KNOWN),
        (
            follow(lambda g, p, last, stale: -0.01 * (g + 0.1 * p)),
            "the update is the reference's minus 0.1 x learning rate x parameter: weight decay 0.1 is on",
        ),
    ],
)
def test_cause_of_an_update_of_another_optimizer(made_cause, change, sentence):
    assert made_cause(change, steps=3, optimizer="AdamW") == sentence


def test_an_update_is_wrong_from_ten_times_its_rounding_on(made_cause):
    # A parameter is a thousand times its update: this factor is 30 times the parameter's rounding.
    cause = made_cause(follow(lambda g, p, last, stale: -0.010036 * g))
    assert cause.endswith("-learning rate x gradient: the learning rate acts as 0.01004, not 0.01")


@pytest.mark.parametrize(("against", "named"), [("run", True), (None, False)])
def test_parameters_that_were_exact_in_bfloat16_before(made_cause, against, named):
    # Alone, the run is no evidence of rounding: its parameters are as exact as they were.
    change = follow(lambda g, p, last, stale: (p - 0.01 * g).bfloat16().float() - p)
    made = {"parameters": {"weight": noise(24, 4, seed=1).bfloat16().float()}}
    made["gradients"] = lambda step: {"weight": noise(24, 4, seed=step)}
    cause = made_cause(change, against=against, **made)
    assert cause.startswith("parameters weight: all 96 values are exact in bfloat16") == named
    assert (cause == NOT_KNOWN) != named


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            1,
            "1 of 4096 elements of weight on rank 1 do not follow -learning rate x gradient: [0, 7] went "
            "from -2.44947 to -1.94829, not by the optimizer: memory was changed",
        ),
        (
            2,
            "2 of 4096 elements of weight on rank 1 do not follow -learning rate x gradient: [0, 7] went "
            "from -2.44947 to -1.94829, not by the optimizer: memory was changed",
        ),
        (5, NOT_KNOWN),
    ],
)
def test_memory_that_was_changed(made_cause, changed, sentence):
    made = big_run(64, 64)
    assert made_cause(add_from_step_2(changed), (1,), **made) == sentence
    # Without a reference, what is alike on every rank shows in the delta, not in the parameter.
    alone = made_cause(add_from_step_2(changed), against=None, **made)
    assert alone == sentence.replace("on rank 1", "on every rank")


@pytest.mark.parametrize(("elements", "named"), [(4004, True), (4000, False)])
def test_memory_was_changed_in_less_than_a_thousandth(made_cause, elements, named):
    cause = made_cause(add_from_step_2(4), (1,), **big_run(elements))
    assert cause.startswith(f"4 of {elements} elements of weight") == named
    assert (cause == NOT_KNOWN) != named


def big_run(*shape):
    """Return what made_cause takes for three steps of one parameter of a shape."""
    gradients = lambda step: {"weight": noise(*shape, seed=step)}  # noqa: E731
    return {"parameters": {"weight": noise(*shape, seed=9)}, "gradients": gradients, "steps": 3}


def add_from_step_2(count):
    """Add 0.5 to so many elements of the parameter, which it then keeps."""

    def change(content):
        for record in content["records"][1:]:
            record["parameters"]["weight"].view(-1)[7 : 7 + count] += 0.5
        content["records"][1]["deltas"]["weight"].view(-1)[7 : 7 + count] += 0.5

    return change


def test_groups_across_replicas_are_no_replicas(made_cause):
    # As many groups as replicas, and as large: only who is in them tells.
    cause = made_cause(gradient(lambda r, about: r + (1 if about["tp_rank"] else -1) * other(r, 0.5)))
    assert "agree only within the groups of ranks {0, 2} {1, 3}" in cause
    assert cause.endswith(": reduced over the wrong group")
