"""Whole records of what people train: Adam, schedules, unused parameters, samplers, bfloat16."""

from functools import partial
from itertools import count

import pytest
import torch
from conftest import edit
from made_runs import noise, some_outputs

from training_common import train
from training_comparison import assign

CLOCK = count(1)
WIDTH, STEPS = 32, 3


def save(directory, rank_records, **metadata):
    """Write the rank files of a data-parallel run."""
    directory.mkdir(parents=True)
    world = len(rank_records)
    for rank, records in enumerate(rank_records):
        about = {
            **{"format": "parity-record-3", "model": "m", "seed": 0, "steps": len(records)},
            **{"global_batch_size": 8, "learning_rate": 0.01, "optimizer": "SGD", "mode": "ddp"},
            **{"world_size": world, "rank": rank, "dp_degree": world, "dp_rank": rank, "tp_degree": 1},
            **{"tp_rank": 0, "device": "cpu", "backend": "gloo", "compile_backend": None},
            **{"torch_version": "2", "torch_neuronx_version": None, "saved_at": float(next(CLOCK))},
        }
        torch.save({"metadata": about | metadata, "records": records}, directory / f"rank-{rank}.pt")
    return directory


def trained(make, gradients, rates=(0.01,) * STEPS):
    """Train with the real train(): an optimizer from make(parameters), and gradients by step from 0."""
    parameters = {"net.weight": noise(WIDTH, WIDTH, seed=1), "net.bias": noise(WIDTH, seed=2)}
    parameters = {name: torch.nn.Parameter(value) for name, value in parameters.items()}
    optimizer = make(list(parameters.values()))

    def train_step(step):
        optimizer.param_groups[0]["lr"] = rates[step]
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        return some_outputs(step), torch.tensor(1.0)

    return train(parameters, optimizer, len(rates), train_step)


def some_gradients(step, **changes):
    found = {"net.weight": noise(WIDTH, WIDTH, seed=10 + step), "net.bias": noise(WIDTH, seed=20 + step)}
    for name, change in changes.items():
        found[f"net.{name}"] = change(found[f"net.{name}"])
    return found


@pytest.fixture
def judge(compare, tmp_path):
    """Compare two lists of records, each of one rank, or of a list of ranks."""

    def call(reference, actual, change=None):
        folder = tmp_path / str(next(CLOCK))
        runs = [run if isinstance(run[0], list) else [run] for run in (reference, actual)]
        directories = [save(folder / str(i), run) for i, run in enumerate(runs)]
        if change:
            edit(directories[1], 0, change)
        arguments = "--reference-dir", directories[0], "--actual-dir", directories[1]
        return compare(*arguments, "--world-size", len(runs[1]))

    return call


def cause(done) -> str:
    return next(line for line in done.out.splitlines() if line.startswith("Likely cause: "))[14:]


def put(index, value):
    """Return a change of one element."""

    def change(gradient):
        gradient[index] = value
        return gradient

    return change


# ---------------------------------------------------------------- Adam

ADAM = pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
SMALL = 3e-7  # an element of a gradient whose others are about 1: rounding alone


@ADAM
@pytest.mark.parametrize("step", [0, 1])
def test_adam_turns_rounding_next_to_zero_into_a_step(judge, make, step):
    def run(value):
        return trained(
            make, lambda now: some_gradients(now, **({"weight": put((3, 5), value)} if now == step else {}))
        )

    assert judge(run(SMALL), run(-SMALL)).status == 0
    assert judge(run(0.0), run(-SMALL)).status == 0
    done = judge(run(3e-3), run(-3e-3))
    assert done.status == 1 and f"step {step + 1}, gradients net.weight[3, 5]" in done.out


@ADAM
def test_an_element_with_an_ordinary_gradient_is_held_to_adams_step(judge, make):
    run = trained(make, some_gradients)

    def change(content):
        for kind in ("parameters", "deltas"):
            content["records"][0][kind]["net.weight"][3, 5] += 0.005

    done = judge(run, run, change)
    assert done.status == 1 and "step 1, parameters net.weight[3, 5]" in done.out


@ADAM
def test_an_element_without_a_gradient_does_not_move(judge, make):
    run = trained(make, lambda step: some_gradients(step, weight=put((3, 5), 0.0)))

    def change(content):
        for kind in ("parameters", "deltas"):
            content["records"][0][kind]["net.weight"][3, 5] += 0.005

    done = judge(run, run, change)
    assert done.status == 1 and "step 1, parameters net.weight[3, 5]" in done.out


def test_a_gradient_that_is_rounding_moves_by_full_steps(judge):
    def run(seed):
        return trained(torch.optim.AdamW, lambda step: some_gradients(step, bias=tiny(seed + step)))

    def tiny(seed):
        return lambda gradient: 1e-8 * noise(WIDTH, seed=seed)

    done = judge(run(100), run(200))
    assert done.status == 0, done.out
    assert "gradients net.bias: zero but for rounding, 3 times not compared" in done.out


def test_an_update_below_rounding_is_none(judge):
    run = trained(torch.optim.SGD, lambda step: some_gradients(step, bias=lambda g: 1e-9 * g))
    assert not any(record["deltas"]["net.bias"].any() for record in run)
    assert judge(run, run).status == 0


def test_a_parameter_with_an_ordinary_gradient_that_does_not_change(judge):
    run = trained(torch.optim.SGD, some_gradients)
    for record in run:
        record["deltas"]["net.bias"] = torch.zeros(WIDTH)
        record["parameters"]["net.bias"] = run[0]["initial"]["net.bias"]
    done = judge(run, run)
    assert done.status == 1
    assert "deltas net.bias: all zero at every step, nothing is compared" in done.out


def test_ranks_of_one_run_may_differ_by_what_adam_makes_of_rounding(judge):
    ranks = [
        trained(torch.optim.AdamW, lambda step: some_gradients(step, weight=put((0, 0), value)))  # noqa: B023
        for value in (SMALL, -SMALL)
    ]
    for rank, records in enumerate(ranks):
        for record in records:
            record["output"] = record["output"].chunk(2)[rank]
    done = judge(ranks, ranks)
    assert "invariants of the actual run: 6 of 6 hold" in done.out and done.status == 0, done.out
    ranks[1][2]["parameters"]["net.weight"][0, 0] += 0.2
    done = judge(ranks, ranks)
    assert done.status == 1 and "ranks agree" in done.out


def test_another_optimizer_is_named(judge):
    decay = {"weight_decay": 0.1}
    done = judge(
        trained(partial(torch.optim.AdamW, **decay), some_gradients),
        trained(partial(torch.optim.Adam, **decay), some_gradients),
    )
    assert done.status == 1 and "the optimizer of net.weight is Adam, the reference's AdamW" in cause(done)


# ---------------------------------------------------------------- schedules


def test_the_rate_of_each_step_is_what_counts(judge):
    warm_up = trained(torch.optim.SGD, some_gradients, rates=(0.025, 0.05, 0.075))
    done = judge(warm_up, warm_up)
    assert done.status == 0 and "invariants of the actual run: 5 of 5 hold" in done.out, done.out


def test_a_schedule_that_is_advanced_twice(judge):
    done = judge(
        trained(torch.optim.SGD, some_gradients, rates=(0.02, 0.025, 0.03)),
        trained(torch.optim.SGD, some_gradients, rates=(0.02, 0.0375, 0.05)),
    )
    assert done.status == 1 and "step 2, parameters net.weight" in done.out
    assert "the learning rate acts as 0.0375, not 0.025" in cause(done)


def test_a_record_without_the_optimizer_is_held_to_its_metadata(judge):
    run = trained(torch.optim.SGD, some_gradients, rates=(0.02, 0.02))
    for record in run:
        del record["optimizer"]
    done = judge(run, run)
    assert done.status == 1 and "Broken invariant: sgd (actual run)" in done.out


@pytest.mark.parametrize("value", [[], {"net.weight": ("SGD", "fast")}, {"net.weight": (1, 0.1)}])
def test_an_optimizer_of_another_form_is_invalid(judge, value):
    run = trained(torch.optim.SGD, some_gradients)
    done = judge(run, run, lambda content: content["records"][1].update(optimizer=value))
    assert done.status == 2 and "step 2: optimizer must hold a class and a learning rate" in done.err


# ---------------------------------------------------------------- parameters


def without_bias(step):
    return {"net.weight": noise(WIDTH, WIDTH, seed=10 + step)}


def test_a_parameter_that_a_step_does_not_use(judge):
    run = trained(torch.optim.SGD, without_bias)
    assert "net.bias" in run[0]["parameters"] and "net.bias" not in run[0]["gradients"]
    assert judge(run, run).status == 0
    done = judge(trained(torch.optim.SGD, some_gradients), run)
    assert done.status == 1
    assert "gradients net.bias: there is none in the actual run" in done.out


def test_a_gradient_of_zeros_is_right_if_both_runs_have_it(judge):
    run = trained(torch.optim.SGD, lambda step: some_gradients(step, bias=torch.zeros_like))
    done = judge(run, run)
    assert done.status == 0, done.out
    assert "gradients net.bias: zero but for rounding, 3 times not compared" in done.out
    done = judge(trained(torch.optim.SGD, some_gradients), run)
    assert done.status == 1


def test_names_of_wrappers_do_not_matter(judge):
    run = trained(torch.optim.SGD, some_gradients)

    def wrap(content):
        for record in content["records"]:
            for kind in {"initial", "gradients", "parameters", "deltas", "optimizer"} & record.keys():
                record[kind] = {f"_orig_mod.{name}": value for name, value in record[kind].items()}

    assert judge(run, run, wrap).status == 0


def test_a_parameter_that_the_reference_has_tied(judge):
    run = trained(torch.optim.SGD, some_gradients)

    def separate(content):
        for record in content["records"]:
            for kind in {"initial", "gradients", "parameters", "deltas"} & record.keys():
                record[kind]["head.weight"] = record[kind]["net.weight"] * 0.5

    done = judge(run, run, separate)
    assert done.status == 1 and "step 0 (before training), parameters head.weight: there is none" in done.out
    assert cause(done) == (
        "head.weight is a parameter of its own in the actual run only: in the reference run it may be tied "
        "to net.weight, of the same shape"
    )

    def other(content):
        separate(content)
        for record in content["records"]:
            for kind in {"initial", "gradients", "parameters", "deltas"} & record.keys():
                record[kind]["head.weight"] = record[kind]["head.weight"][:2]

    assert judge(run, run, other).status == 2


# ---------------------------------------------------------------- samples


def dealt(rows_by_replica, dim=0, change=None, weights=None, mean=None):
    """Return a whole run, and one whose replicas have these samples of its batch."""
    whole = trained(torch.optim.SGD, some_gradients)
    ranks = []
    losses = 1 + torch.arange(8) / 8
    for record in whole:
        record["loss"] = record["local_loss"] = losses.mean().item()
        record["output"] = noise(*((8, 5) if dim == 0 else (5, 8)), seed=int(record["output"].sum() * 1e3))
    for rank, rows in enumerate(rows_by_replica):
        records = [dict(record) for record in whole]
        for step, record in enumerate(records):
            record["output"] = record["output"].index_select(dim, torch.tensor(rows))
            record["local_loss"] = losses[rows].mean().item()
            record["loss"] = losses.mean().item() if mean is None else mean
            record["weight"] = float(len(rows)) if weights else 1.0
            if change:
                change(rank, step, record)
        ranks.append(records)
    return whole, ranks


@pytest.mark.parametrize(
    ("rows", "dim", "note"),
    [
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 0, "in another order: replica 0 has 0, 2, 4, 6 in step 1"),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], 0, "in another order: replica 0 has 0, 1, 4, 5 in step 1"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 1, "the replicas have 4, 4 of the reference's samples in step 1"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 0, None),
    ],
)
def test_samples_in_any_dealing(judge, rows, dim, note):
    done = judge(*dealt(rows, dim))
    assert done.status == 0, done.out
    assert (note in done.out) if note else ("note:" not in done.out)


def test_rows_of_a_replica_follow_one_another_from_the_start_of_a_slice_if_they_may():
    fitting = [[1, 4], [5], [6], [7], [0], [1, 4], [2], [3]]
    assert assign(fitting, [4, 4]) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    fitting = [[4], [1, 5], [6], [7], [0], [1, 5], [2], [3]]
    assert assign(fitting, [4, 4]) == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_replicas_with_other_numbers_of_samples(judge):
    rows = [[0, 1, 2, 3, 4], [5, 6, 7]]
    done = judge(*dealt(rows, weights=True))
    assert done.status == 0, done.out
    assert "note: the replicas have 5, 3 of the reference's samples in step 1, in its order" in done.out
    done = judge(*dealt(rows, mean=(1.25 + 1.75) / 2))
    assert done.status == 1 and "the replicas have 3 to 5 samples (replica 0 has 5)" in cause(done)


def test_a_mean_of_the_replicas_means(judge):
    done = judge(*dealt([[0, 1, 2], [3, 4, 5], [6, 7]], mean=(1.125 + 1.5 + 1.8125) / 3))
    assert done.status == 1 and "step 1, losses global loss" in done.out
    assert cause(done) == (
        "mean of the replicas' means: they have 3, 3, 2 samples, and weighted by these their losses give the "
        "reference, 1.4375; all gradients agree, so it is only the loss that is reported"
    )


@pytest.mark.parametrize(("off", "named"), [(0.5e-5, True), (5e-5, False)])
def test_a_mean_of_means_gives_the_reference_but_for_rounding(judge, off, named):
    whole, ranks = dealt([[0, 1, 2], [3, 4, 5], [6, 7]], mean=(1.125 + 1.5 + 1.8125) / 3)
    for record in whole:
        record["loss"] = record["local_loss"] = 1.4375 * (1 + off)
    assert ("mean of the replicas' means" in cause(judge(whole, ranks))) == named


def test_numbers_of_tokens_may_change_from_step_to_step(judge):
    def change(rank, step, record):
        weights = [[1.0, 3.0], [2.0, 2.0], [5.0, 3.0]][step]
        own = [1.0, 2.0]
        record["weight"], record["local_loss"] = weights[rank], own[rank]
        record["loss"] = sum(w * o for w, o in zip(weights, own, strict=True)) / sum(weights)

    whole, ranks = dealt([[0, 1, 2, 3], [4, 5, 6, 7]], change=change)
    for step, record in enumerate(whole):
        record["loss"] = record["local_loss"] = ranks[0][step]["loss"]
    done = judge(whole, ranks)
    assert done.status == 0, done.out


def test_outputs_that_are_cut_in_two_dimensions_are_not_dealt(judge):
    def change(rank, step, record):
        record["output"] = record["output"][:, :2]

    done = judge(*dealt([[0, 2, 4, 6], [1, 3, 5, 7]], change=change))
    assert done.status == 1 and "its shape is [4, 2]" in done.out


def test_a_parameter_that_is_unused_in_one_run_only(judge):
    whole, ranks = dealt([[0, 1, 2, 3], [4, 5, 6, 7]])
    zero = torch.zeros(WIDTH)
    for records in ranks:
        for record in records:
            for kind in ("gradients", "deltas"):
                record[kind] = record[kind] | {"net.bias": zero}
    done = judge(whole, ranks)
    assert "broken 2 times: nonzero: no tensor is zero throughout" in done.out


def test_gradients_that_weigh_replicas_equally(judge):
    def change(rank, step, record):
        record["gradients"] = {name: 1.1 * value + 0.1 for name, value in record["gradients"].items()}

    done = judge(*dealt([[0, 1, 2, 3, 4], [5, 6, 7]], change=change, weights=True))
    assert done.status == 1 and "step 1, gradients net.bias" in done.out
    assert "the replicas have 5, 3 samples: is each loss scaled by its share of these?" in cause(done)
    done = judge(*dealt([[0, 1, 2, 3], [4, 5, 6, 7]], change=change))
    assert cause(done).startswith("not known")


def test_slices_of_other_replicas_are_no_way_to_deal(judge):
    done = judge(*dealt([[4, 5, 6, 7], [0, 1, 2, 3]]))
    assert done.status == 1 and "slices are given to the wrong ranks" in cause(done)


@pytest.mark.parametrize(
    "rows", [[[0, 2, 4, 6], [1, 3, 5, 5]], [[0, 1, 2, 3], [0, 1, 2, 3]], [[4, 5, 6, 7], [4, 5, 6, 7]]]
)
def test_samples_that_are_repeated_and_missing(judge, rows):
    done = judge(*dealt(rows))
    assert done.status == 1 and "step 1, outputs output" in done.out


def test_a_wrong_sample_is_not_dealt(judge):
    def change(rank, step, record):
        if (rank, step) == (1, 1):
            record["output"][2] *= 1.01

    done = judge(*dealt([[0, 2, 4, 6], [1, 3, 5, 7]], change=change))
    assert done.status == 1 and "step 2, outputs output" in done.out


def test_replicas_that_do_not_have_the_batch_cannot_be_compared(judge):
    done = judge(*dealt([[0, 1, 2], [3, 4, 5], [6, 7]], change=lambda rank, step, r: r["output"].add_(1)))
    assert done.status == 2 and "does not divide over 3 data-parallel replicas" in done.err


# ---------------------------------------------------------------- bfloat16


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.01, 0), (1.03, 1), (0.95, 1)])
def test_matrices_in_bfloat16_agree_to_2_eps(judge, factor, status):
    def run(factor):
        records = trained(torch.optim.SGD, lambda step: some_gradients(step, weight=lambda g: factor * g))
        for record in records:
            record["output"] = record["output"].bfloat16()
        return records

    done = judge(run(1.0), run(factor))
    assert done.status == status, done.out
    assert ("step 1, gradients net.weight" in done.out) == bool(status)
