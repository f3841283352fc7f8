"""Causes of a wrong start, of wrong outputs and losses: the whole sentence, and near misses, which have none.

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
    gradient,
    loss,
    near,
    noise,
    other,
    output,
    put,
    some_outputs,
    some_parameters,
    start,
)

from training_causes_forward import fits

BIAS = some_parameters()["bias"]
# These runs change the outputs alone, so where nothing else explains them this is right.
RETURNED = (
    "the outputs differ, but all gradients of step 1 agree: other outputs are returned than those that were "
    "trained on, such as one microbatch's of several, or they were changed later"
)


# ---------------------------------------------------------------- before training

START = [
    fault(
        start(lambda p, about: noise(24, 4, seed=50)),
        "every rank starts from other values of weight (correlation 0.25 with the expected, the same "
        "spread): another seed, or a broadcast from a rank that has one",
    ),
    fault(
        start(lambda p, about: noise(24, 4, seed=50 + about["rank"])),
        "rank 1 starts from other values of weight (correlation -0.01 with the expected, the same "
        "spread): a seed of its own, and no broadcast",
        1,
    ),
    fault(
        start(lambda p, about: noise(24, 4, seed=50 + about["rank"])),
        "ranks 1, 3 start from other values of weight (correlation 0.09 with the expected, the same "
        "spread): seeds of their own, and no broadcast",
        1,
        3,
    ),
    fault(start(lambda p, about: 2 * noise(24, 4, seed=50)), NOT_KNOWN),
    fault(start(lambda p, about: 0.7 * noise(24, 4, seed=50)), NOT_KNOWN),
    fault(start(lambda p, about: p + 0.1 * noise(24, 4, seed=50)), NOT_KNOWN),
    fault(start(lambda p, about: torch.cat([p[:4], noise(20, 4, seed=50)])), NOT_KNOWN),
    fault(start(lambda p, about: noise(24, seed=50), "bias"), NOT_KNOWN),
    fault(
        start(lambda p, about: 0.5 * p), f"parameters weight of every rank are 0.50x the reference: {DIVIDED}"
    ),
    fault(
        start(lambda p, about: 0.3 * p),
        "parameters weight of every rank are 0.30x the reference, a factor that is no degree of the mesh",
    ),
    fault(
        start(lambda p, about: chunks((1, 0))(p)),
        "each of the 2 shards of parameters weight along dimension 0 is another's, in the order [1, "
        "0]: gathered or cut in the wrong order",
    ),
    fault(
        start(lambda p, about: put(torch.nan)(p)),
        "the first value that is not finite in the actual run is in parameters weight of step 0, on "
        "every rank: 1 of 96 elements; everything before is finite",
    ),
]


@pytest.mark.parametrize(("change", "sentence", "ranks"), START)
def test_cause_before_training(made_cause, change, sentence, ranks):
    assert made_cause(change, ranks) == sentence


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            (1,),
            "shard 1 of the 4 shards of parameters weight along dimension 0 starts from other values "
            "(correlation -0.01 with the reference), the others agree: another seed on the ranks that "
            "made it",
        ),
        (
            (1, 2),
            "shards 1-2 of the 4 shards of parameters weight along dimension 0 start from other values "
            "(correlation 0.00 with the reference), the others agree: another seed on the ranks that made "
            "it",
        ),
    ],
)
def test_shards_from_another_seed(made_cause, wrong, sentence):
    def change(p, about):
        parts = list(p.chunk(4))
        for i in wrong:
            parts[i] = noise(*parts[i].shape, seed=60 + i)
        return torch.cat(parts)

    parameters = {"weight": noise(256, 4, seed=9)}
    gradients = lambda step: {"weight": noise(256, 4, seed=step)}  # noqa: E731
    assert made_cause(start(change), parameters=parameters, gradients=gradients) == sentence


@pytest.mark.parametrize(("columns", "named"), [(15, False), (16, True)])
def test_fewer_than_64_values_are_too_few_to_be_of_another_seed(made_cause, columns, named):
    parameters = {"weight": noise(4, columns, seed=9), "bias": BIAS}
    gradients = lambda step: {"weight": noise(4, columns, seed=step), "bias": BIAS}  # noqa: E731
    change = start(lambda p, about: noise(4, columns, seed=50))
    cause = made_cause(change, parameters=parameters, gradients=gradients)
    assert ("another seed" in cause) == named


def test_ranks_that_start_from_other_values_without_a_reference(made_cause):
    change = start(lambda p, about: noise(24, 4, seed=50 + about["rank"]))
    assert made_cause(change, (2,), against=None) == (
        "rank 2 starts from other values of weight (correlation 0.15 with the expected, the same spread): "
        "a seed of its own, and no broadcast"
    )


# ---------------------------------------------------------------- outputs


def uneven(o, about):
    whole = some_outputs(1)
    return whole[5:] if about["dp_rank"] else whole[:5]


def slices(*first, step=1):
    """Give replica k the rows from first[k]."""
    return lambda o, about: some_outputs(step)[first[about["dp_rank"]] :][:4]


def dropped(scale):
    def change(o):
        o[:, ::2] = 0
        return scale * o

    return change


def parts(o, about, added=0.0):
    """Return one of two terms of the output, the bias or another vector in each of them."""
    first = noise(*o.shape, seed=7 + about["dp_rank"])
    return (first if about["tp_rank"] == 0 else o - added - first) + added


def of_float32(change):
    return lambda tensor: change(tensor).float()


OUTPUTS = [
    fault(  # equal on both tensor-parallel ranks: no sum of terms
        output(lambda o, about: 0.5 * o),
        "outputs of every rank are 0.50x the reference: divided by the 2 data-parallel replicas once too "
        "often, or divided by the 2 tensor-parallel ranks, over which it must not be averaged",
    ),
    fault(
        output(put(torch.nan), step=2),
        "the first value that is not finite in the actual run is in outputs output of step 2, on rank "
        "3: 1 of 96 elements; everything before is finite",
        3,
    ),
    fault(
        output(uneven),
        "the replicas have 3 to 5 samples (replica 0 has 5): the slices are uneven, and a mean over "
        "replicas weighs them equally",
    ),
    fault(
        output(slices(4, 0)),
        "the outputs of the replicas are those of slices [1, 0]: slices are given to the wrong ranks",
    ),
    fault(
        output(slices(4, 4)),
        "every replica's outputs are those of slice 1 of the batch: all got the same slice",
        0,
        1,
    ),
    fault(
        output(slices(0, 3)),
        "the outputs of replica 1 are those of rows 3 to 6 of the batch, expected 4 to 7: its slice "
        "is shifted by -1, slices overlap",
        2,
        3,
    ),
    fault(
        output(slices(1, 4)),
        "the outputs of replica 0 are those of rows 1 to 4 of the batch, expected 0 to 3: its slice "
        "is shifted by 1, slices overlap",
        0,
        1,
    ),
    fault(
        output(lambda o, about: some_outputs(1).chunk(2)[about["dp_rank"]], step=2),
        "the outputs of step 2 are those of step 1's batch (they leave 0.0% of the difference): an "
        "earlier batch is used again, such as a constant captured in a compiled graph",
    ),
    fault(
        output(lambda o, about: some_outputs(2).chunk(2)[about["dp_rank"]]),
        "the outputs of step 1 are those of step 2's batch (they leave 0.0% of the difference): "
        "batches are read ahead by one step too many",
    ),
    fault(
        output(lambda o, about: some_outputs(1).chunk(2)[about["dp_rank"]] + other(o, 0.05), step=2),
        "the outputs of step 2 are those of step 1's batch (they leave 4.7% of the difference): an "
        "earlier batch is used again, such as a constant captured in a compiled graph",
    ),
    fault(
        output(lambda o, about: some_outputs(1).chunk(2)[about["dp_rank"]] + other(o, 0.3), step=2),
        RETURNED.replace("step 1", "step 2"),
    ),
    fault(output(lambda o: 2 * o), f"outputs of every rank are 2.00x the reference: {SUMMED}"),
    fault(output(lambda o: o / 2), f"outputs of every rank are 0.50x the reference: {DIVIDED}"),
    fault(
        output(lambda o: o / 4),
        "outputs of every rank are 0.25x the reference: divided by the 2 data-parallel replicas twice "
        "too often, or divided by the world size 4",
    ),
    fault(
        output(lambda o: 4 * o),
        "outputs of every rank are 4.00x the reference: multiplied by the world size 4, or summed "
        "over the samples instead of averaged",
    ),
    fault(
        output(lambda o: 96 * o),
        "outputs of every rank are 96.00x the reference: summed over the 96 elements of the output "
        "instead of averaged",
    ),
    fault(
        output(lambda o: 3 * o),
        "outputs of ranks 0-1 are 3.00x the reference, a factor that is no degree of the mesh",
        0,
        1,
    ),
    fault(
        output(lambda o: 1.2345 * o),
        "outputs of every rank are 1.235x the reference, a factor that is no degree of the mesh",
    ),
    fault(
        output(lambda o: 3 * o),
        "outputs of rank 3 are 3.00x the reference, a factor that is no degree of the mesh",
        3,
    ),
    fault(output(lambda o: 1.0005 * o), RETURNED),
    fault(
        output(lambda o, about: (2 + about["rank"]) * o),
        "outputs output is the reference times a factor that each rank has for itself, 2 to 5: scaled "
        "by a norm or a count of the rank's own",
    ),
    fault(output(near(0.3e-3, lambda o: 2 * o)), f"outputs of every rank are 2.00x the reference: {SUMMED}"),
    fault(output(near(1e-3, lambda o: 2 * o)), RETURNED),
    # Rounding is 4 eps. A hundred times as much is 1 % of this difference, and is none.
    fault(output(near(3e-5, lambda o: 0.995 * o)), RETURNED),
    fault(
        output(near(3e-7, lambda o: (1 - 2e-4 * 10) * o)),
        "outputs of every rank are 0.998x the reference, a factor that is no degree of the mesh",
    ),
    fault(
        output(parts),
        "each tensor-parallel rank has its own outputs, and their sum over the 2 ranks is the "
        "reference: the output was not reduced",
    ),
    fault(
        output(lambda o, about: parts(o, about, BIAS)),
        "each tensor-parallel rank has its own outputs, and their sum over the 2 ranks (with bias in "
        "each of them) is the reference: the output was not reduced",
    ),
    fault(output(lambda o, about: parts(o, about, 0.5 * BIAS)), RETURNED),
    fault(output(lambda o, about: parts(o, about) + other(o, 5e-3)), RETURNED),
    fault(
        output(lambda o: o + BIAS),
        "the outputs differ from the reference by 1.00 times bias, in every row: it is added 2 times",
    ),
    fault(
        output(lambda o: o + 2 * BIAS),
        "the outputs differ from the reference by 2.00 times bias, in every row: it is added 3 times",
    ),
    fault(
        output(lambda o: o - BIAS),
        "the outputs differ from the reference by -1.00 times bias, in every row: it is added 0 times",
    ),
    fault(
        output(lambda o: o + 0.5 * BIAS),
        "the outputs differ from the reference by 0.50 times bias, in every row: it is scaled",
    ),
    fault(
        output(lambda o: o + 1.02 * BIAS),
        "the outputs differ from the reference by 1.02 times bias, in every row: it is scaled",
    ),
    fault(
        output(lambda o: o - 2 * BIAS),
        "the outputs differ from the reference by -2.00 times bias, in every row: it is scaled",
    ),
    fault(output(lambda o: o + BIAS + other(o, 5e-3)), RETURNED),
    fault(
        output(lambda o: BIAS + 2 * (o - BIAS)),
        f"apart from bias, the outputs are 2.00x the reference: {SUMMED}",
    ),
    fault(
        output(lambda o: BIAS + 3 * (o - BIAS)),
        "apart from bias, the outputs are 3.00x the reference: reduced or scaled wrongly before the "
        "bias is added",
    ),
    fault(
        output(dropped(2.0)), "50.0% of the outputs are zero and the rest 2.000x the reference: dropout is on"
    ),
    fault(
        output(dropped(2.08)),
        "50.0% of the outputs are zero and the rest 2.080x the reference: dropout is on",
    ),
    fault(output(dropped(2.2)), RETURNED),
    fault(output(dropped(1.0)), RETURNED),
    fault(
        output(lambda o: o.bfloat16().float()),
        "outputs output: all 96 values are exact in bfloat16, of the reference's 0.0%: computed or "
        "reduced in bfloat16",
    ),
    fault(
        output(lambda o: o.half().float()),
        "outputs output: all 96 values are exact in float16, of the reference's 0.0%: computed or "
        "reduced in float16",
    ),
    fault(
        output(lambda o: o.bfloat16()),
        "outputs output: all 96 values are of type bfloat16, the parameters of type float32: computed "
        "in bfloat16, such as under autocast",
    ),
    fault(output(lambda o: put(0.1)(o.bfloat16().float())), RETURNED),
    fault(output(lambda o: o + 0.1), RETURNED),
    fault(output(lambda o: o[:3]), NOT_KNOWN),
    fault(output(lambda o: o[:, :23]), NOT_KNOWN),
    fault(output(lambda o: o.sum()), NOT_KNOWN),
    fault(output(lambda o: o.clamp(min=0)), RETURNED),
]


@pytest.mark.parametrize(("change", "sentence", "ranks"), OUTPUTS)
def test_cause_of_outputs(made_cause, change, sentence, ranks):
    assert made_cause(change, ranks) == sentence


def test_the_step_is_named_whose_batch_leaves_least(made_cause):
    change = output(lambda o, about: some_outputs(2).chunk(2)[about["dp_rank"]], step=3)
    assert made_cause(change, steps=3).startswith("the outputs of step 3 are those of step 2's batch")


def test_equal_outputs_are_no_terms_of_a_sum(made_cause):
    # Each rank has half of the reference and of the bias: so would two terms that happen to be equal.
    cause = made_cause(output(lambda o: (o + BIAS) / 2))
    assert "not reduced" not in cause


def test_a_part_of_an_output_is_no_term_of_a_sum(made_cause):
    def change(o, about):
        return o[:, :12] if about["tp_rank"] else o + other(o, 0.1)

    assert made_cause(output(change))


def test_a_rank_without_an_output_is_no_term_of_a_sum(made_cause):
    def change(content):
        if content["metadata"]["tp_rank"]:
            content["records"][0]["output"] = None
        else:
            output(lambda o: o + other(o, 0.1))(content)

    assert "broke off" not in str(made_cause(change))


@pytest.mark.parametrize(
    ("dp", "tp", "factor", "sentence"),
    [
        (4, 1, 4, "summed over the 4 data-parallel replicas instead of averaged"),
        (4, 1, 1 / 4, "divided by the 4 data-parallel replicas once too often"),
        (4, 1, 1 / 16, "divided by the 4 data-parallel replicas twice too often"),
        (1, 4, 4, "summed over the 4 tensor-parallel ranks once too often"),
        (1, 4, 1 / 4, "divided by the 4 tensor-parallel ranks, over which it must not be averaged"),
        (1, 4, 8, "summed over the samples instead of averaged"),
    ],
)
def test_what_a_factor_means_on_another_mesh(made_cause, dp, tp, factor, sentence):
    found = made_cause(output(lambda o: factor * o), dp=dp, tp=tp)
    assert found.endswith(f"x the reference: {sentence}")


def test_zeros_are_no_values_that_are_exact_in_bfloat16(made_cause):
    outputs = lambda step: some_outputs(step).clamp(min=0)  # noqa: E731
    count = int((outputs(1)[:4] > 0).sum())
    assert made_cause(output(lambda o: o.bfloat16().float()), outputs=outputs) == (
        f"outputs output: all {count} values are exact in bfloat16, of the reference's 0.0%: computed or "
        "reduced in bfloat16"
    )


@pytest.mark.parametrize(("columns", "named"), [(3, False), (4, True)])
def test_fewer_than_16_values_are_too_few_to_be_exact_by_design(made_cause, columns, named):
    def outputs(step):
        return torch.cat([some_outputs(step)[:, :columns], torch.zeros(8, 24 - columns)], 1)

    cause = made_cause(output(lambda o: o.bfloat16().float()), outputs=outputs)
    assert cause.startswith("outputs output: all 16 values are exact in bfloat16") == named
    assert (cause == RETURNED) != named


@pytest.mark.parametrize(("columns", "named"), [(11, True), (12, False)])
def test_values_are_as_exact_as_the_reference_if_half_of_its_are(made_cause, columns, named):
    def outputs(step):
        exact, rest = some_outputs(step).split([columns, 24 - columns], 1)
        return torch.cat([exact.bfloat16().float(), rest], 1)

    cause = made_cause(output(lambda o: o.bfloat16().float()), outputs=outputs)
    assert ("of the reference's 45.8%: computed or reduced in bfloat16" in cause) == named
    assert (cause == RETURNED) != named


def test_negative_values_count_too(made_cause):
    assert made_cause(output(lambda o: torch.where(o > 0, o.bfloat16().float(), o))) == RETURNED


@pytest.mark.parametrize(("factor", "known"), [(2.01, True), (2.06, False)])
def test_a_factor_of_a_bfloat16_model_is_as_exact_as_its_type(made_cause, factor, known):
    made = {
        "parameters": {"weight": noise(24, 4, seed=1).bfloat16()},
        "gradients": lambda step: {"weight": noise(24, 4, seed=step).bfloat16()},
        "outputs": lambda step: some_outputs(step).bfloat16(),
    }
    found = made_cause(output(lambda o: (factor * o.double()).bfloat16()), **made)
    assert (SUMMED in found) == known
    assert ("a factor that is no degree of the mesh" in found) != known


def test_the_reference_may_be_what_is_not_finite(made_cause):
    assert made_cause(output(put(torch.nan)), (1,), of="reference") == (
        "the first value that is not finite in the reference is in outputs output of step 1, on rank 1: "
        "1 of 96 elements; everything before is finite"
    )


@pytest.mark.parametrize(
    "change", [lambda o: o + BIAS, lambda o: 2 * o, dropped(2.0), lambda o: o.half().float()]
)
def test_outputs_alone_tell_little(made_cause, change):
    assert made_cause(output(change), (1,), against=None) == NOT_KNOWN


@pytest.mark.parametrize(("size", "cause"), [(1e-4, RETURNED), (1e-2, NOT_KNOWN)])
def test_outputs_were_trained_on_if_the_gradients_differ_like_them(made_cause, size, cause):
    spoil_outputs, spoil_gradients = output(lambda o: o + 0.1), gradient(lambda g: g + other(g, size), "bias")

    def change(content):
        spoil_outputs(content)
        spoil_gradients(content)

    assert made_cause(change) == cause


@pytest.mark.parametrize("against", [None, "run", "whole"])
def test_replicas_with_one_slice(made_cause, against):
    alone = "the outputs of replica 0 are also those of replica 1: they got the same samples"
    compared = "every replica's outputs are those of slice 0 of the batch: all got the same slice"
    assert made_cause(output(slices(0, 0)), (2, 3), against) == (compared if against else alone)


# ---------------------------------------------------------------- losses


LOSSES = [
    fault(
        loss(lambda mean, own: (own, own)),
        "the losses are each replica's own, 1.25 to 1.75: they were not averaged over the 2 replicas "
        "(their mean is 1.5, which is the reference)",
    ),
    fault(  # recorded twice, a loss may differ by one part in a million
        loss(lambda mean, own: (own + 1e-6, own)),
        "the losses are each replica's own, 1.25 to 1.75: they were not averaged over the 2 replicas "
        "(their mean is 1.5, which is the reference)",
    ),
    fault(loss(lambda mean, own: (2 * mean, own)), f"losses of every rank are 2.00x the reference: {SUMMED}"),
    fault(
        loss(lambda mean, own: (3 * mean, own)),
        "the mean of the 2 replicas' own losses is the reference, 1.5, but on every rank the global "
        "loss is 4.5: averaged over other ranks, or changed later",
    ),
    fault(
        loss(lambda mean, own: (1.01 * mean, own), step=2),
        "the mean of the 2 replicas' own losses is the reference, 1.5625, but on rank 1 the global "
        "loss is 1.57812: averaged over other ranks, or changed later",
        1,
    ),
    fault(
        loss(lambda mean, own: (1.02 * mean, 1.02 * own)),
        "the loss is off by 2.00%, but the outputs and all gradients agree: another loss is reported than "
        "the one of backward, such as a mean that weighs the ranks' tokens otherwise",
    ),
    fault(
        loss(lambda mean, own: (torch.inf, own)),
        "the first value that is not finite in the actual run is in losses global loss of step 1, on "
        "every rank: 1 of 1 elements; everything before is finite",
    ),
]


@pytest.mark.parametrize(("change", "sentence", "ranks"), LOSSES)
def test_cause_of_losses(made_cause, change, sentence, ranks):
    assert made_cause(change, ranks) == sentence


def test_own_losses_without_a_reference(made_cause):
    assert made_cause(loss(lambda mean, own: (own, own)), against=None) == (
        "the losses are each replica's own, 1.25 to 1.75: they were not averaged over the 2 replicas (their "
        "mean is 1.5)"
    )


def test_a_loss_alone_tells_little(made_cause):
    assert made_cause(loss(lambda mean, own: (1.01 * mean, own)), against=None) == NOT_KNOWN


@pytest.mark.parametrize(
    ("off", "sentence"),
    [
        (
            0.0001,
            "the outputs agree to 1.0e-04, but the loss is off by 2.00%: the target, or the loss "
            "function, is another",
        ),
        (0.0005, NOT_KNOWN),
        (0.005, NOT_KNOWN),
    ],
)
def test_outputs_that_are_wrong_too_do_not_put_it_on_the_loss(made_cause, off, sentence):
    def change(content):
        output(lambda o: (1 + off) * o)(content)
        loss(lambda mean, own: (1.02 * mean, 1.02 * own))(content)
        gradient(lambda g: 1.02 * g)(content)

    assert made_cause(change, options=("--rtol", 1e-2)) == sentence


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize(("eps", "rounding"), [(1, True), (3.9, True), (4.5, False), (100, False)])
@pytest.mark.parametrize("change", [output, gradient])
def test_rounding_under_a_tolerance_that_is_too_tight(made_cause, change, eps, rounding):
    found = made_cause(change(near(eps * 2.0**-23)), options=("--rtol", 1e-9))
    assert found.startswith("rounding: the runs differ by no more than two right") == rounding


@pytest.mark.parametrize(
    ("start", "fit"), [(-3, False), (-2, True), (0, True), (6, True), (7, False), (8, False)]
)
def test_half_of_a_replicas_rows_must_lie_within_the_batch(start, fit):
    assert fits(torch.ones(4, 8, dtype=torch.bool), start) is fit


def test_one_row_that_differs_does_not_fit():
    same = torch.ones(4, 8, dtype=torch.bool)
    same[3, 1] = False
    assert (fits(same, -2), fits(same, -1)) == (False, True)
