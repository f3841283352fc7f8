"""training_sketches.py: sketches add up, estimate a norm, and are the same wherever they are made."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from training_sketches import (
    COLUMN_SHIFTS,
    COLUMN_SIGNS,
    ROW_SHIFTS,
    ROWS,
    SAMPLE_WIDTH,
    WIDTH,
    count,
    describe,
    describe_samples,
    fold,
    hashed,
    sample_keys,
    sample_width,
    sketch,
    sketch_matrices,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(block, row, column, width):
    """Compute a sketch as the docstring of training_sketches.py defines it."""
    wide = max(width, SAMPLE_WIDTH)
    total = torch.zeros(len(block), width, dtype=torch.float64)
    i = torch.arange(row, row + block.shape[1])[:, None].expand(block.shape[1:])
    j = torch.arange(column, column + block.shape[2])[None].expand(block.shape[1:])
    sign = [((hashed(x, which) >> 40) & 1) * 2 - 1 for x, which in ((i, ROWS), (j, COLUMN_SIGNS))]
    shift = [(hashed(x // wide, w) >> 20) & 0xFFFF for x, w in ((i, ROW_SHIFTS), (j, COLUMN_SHIFTS))]
    bucket = (i + shift[0] + j + shift[1]) % width
    signed = (block.double() * sign[0] * sign[1]).flatten(1)
    return total.index_add_(1, bucket.flatten(), signed)


@pytest.mark.parametrize("width", [256, 32, 8, 1])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (1, 3000), (70, 40), (300, 1500), (515, 1025), (2048, 9)]
)
def test_the_fast_way_is_the_formula(rows, columns, width):
    for row, column in ((0, 0), (5, 700), (257, 4100)):
        block = random(2, rows, columns)
        expected = formula(block, row, column, width)
        assert torch.allclose(sketch_matrices(block, row, column, width), expected, atol=1e-9)


SHAPES = [
    (1,),
    (7,),
    (5000,),
    (9001,),
    (300, 301),
    (3, 4000),
    (1, 700),
    (6, 50, 40),
    (8, 3, 5, 6),
    (2, 3, 4, 5, 6),
]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_along_any_dimension_add_up(shape, parts):
    whole = random(*shape)
    expected = sketch(whole)
    for dim in range(len(shape)):
        total, start = torch.zeros(WIDTH, dtype=torch.float64), 0
        for part in whole.tensor_split(parts, dim):  # uneven, and empty for more parts than there are
            offset = [0] * len(shape)
            offset[dim] = start
            total += sketch(part, shape, tuple(offset))
            start += part.shape[dim]
        assert torch.allclose(total, expected, atol=1e-9), dim


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
def test_shards_along_all_dimensions_add_up(shape):
    whole = random(*shape)
    total = torch.zeros(WIDTH, dtype=torch.float64)
    halves = [((0, size // 2), (size // 2, size)) for size in shape]
    for ranges in product(*halves):
        part = whole[tuple(slice(*bounds) for bounds in ranges)]
        total += sketch(part, shape, tuple(first for first, _ in ranges))
    assert torch.allclose(total, sketch(whole), atol=1e-9)


def test_a_sketch_is_linear_and_takes_any_type():
    one, two = random(300, 200), random(300, 200, seed=1)
    assert torch.allclose(sketch(one) - 3 * sketch(two), sketch(one.double() - 3 * two.double()), atol=1e-9)
    assert torch.equal(sketch(one.bfloat16()), sketch(one.bfloat16().double()))
    assert torch.equal(sketch(one.T), sketch(one.T.contiguous()))
    assert sketch(torch.tensor(-2.5)).abs().sum() == 2.5
    assert sketch(torch.zeros(0, 5)).abs().sum() == 0


# ---------------------------------------------------------------- the norm of a difference

KINDS = {
    "full rank": lambda seed: random(300, 400, seed=seed),
    "rank one": lambda seed: random(300, 1, seed=seed) * random(1, 400, seed=seed + 5000),
    "one row": lambda seed: nn.functional.pad(
        random(1, 400, seed=seed), (0, 0, seed % 300, 299 - seed % 300)
    ),
    "one column": lambda seed: nn.functional.pad(random(300, 1, seed=seed), (seed, 399 - seed)),
    "few elements": lambda seed: (
        torch.zeros(300, 400)
        .flatten()
        .index_fill(0, torch.arange(9) * 13007 + 11 * seed, 1.0)
        .reshape(300, 400)
    ),
    "a block": lambda seed: nn.functional.pad(random(150, 200, seed=seed), (200, 0, 150, 0)),
    "a vector": lambda seed: random(5000, seed=seed),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_estimated_within_10_percent(kind):
    matrices = [KINDS[kind](seed) for seed in range(100)]
    ratios = torch.tensor([float(sketch(matrix).norm() / matrix.double().norm()) for matrix in matrices])
    assert (ratios - 1).square().mean().sqrt() < 0.10


# ---------------------------------------------------------------- what is recorded


def test_counts():
    values = torch.tensor([[0.0, 1.0, -1.5, 3.0], [2.0**-130, float("nan"), float("inf"), 1 + 2**-20]])
    counted = count(values)
    assert (counted["elements"], counted["zeros"]) == (8, 1)
    by_exponent = {e: int(n) for e, n in enumerate(counted["magnitudes"]) if n}
    assert by_exponent == {0: 1, 127: 3, 128: 1, 255: 2}
    assert counted["bfloat16_exact"] == 7
    assert count(torch.tensor([-3.0, 2.0]))["largest"] == 3
    empty = count(torch.zeros(0, 3))
    assert (empty["elements"], empty["largest"], int(empty["magnitudes"].sum())) == (0, 0, 0)


def test_values_that_are_not_finite_are_counted_and_left_out():
    matrix = random(30, 40)
    spoiled = matrix.clone()
    spoiled[3, 4], matrix[3, 4] = float("nan"), 0
    assert torch.equal(describe(spoiled)["sketch"], describe(matrix)["sketch"])
    assert describe(spoiled)["magnitudes"][255] == 1
    assert describe_samples(spoiled, 30)["not_finite"] == 1


def test_any_kind_of_tensor_is_described():
    matrix = random(6, 5)
    assert torch.equal(describe(matrix.to_sparse())["sketch"], describe(matrix)["sketch"])
    pairs = torch.view_as_complex(matrix[:, :4].reshape(6, 2, 2).contiguous())
    assert describe(pairs)["shape"] == describe(pairs.conj())["shape"] == (6, 2, 2)
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float16, torch.float8_e4m3fn, torch.float64):
        for tensor in (matrix.to(dtype), matrix[0].to(dtype), matrix[0, 0].to(dtype)):
            described = describe(tensor)
            assert torch.allclose(described["sketch"], sketch(tensor.double()), atol=1e-12)
            assert described["dtype"] == str(dtype)[6:] and described["shape"] == tuple(tensor.shape)
    scaled = describe(matrix * 8, scale=torch.tensor(8.0))
    assert (
        torch.equal(scaled["sketch"], describe(matrix)["sketch"]) and scaled["largest"] == matrix.abs().max()
    )


def test_samples_are_the_same_in_any_batch():
    batch = random(512, 9, 70)
    whole = describe_samples(batch, 512)["samples"]
    assert whole.shape == (512, 4)
    for size in (1, 8, 64, 128, 200):
        part = batch.roll(-100, 0)[:size]
        samples = describe_samples(part, size)["samples"]
        assert samples.shape == (size, sample_width(size))
        expected = whole.roll(-100, 0)[:size]
        assert torch.allclose(fold(samples, 4), expected, atol=1e-9)
        # However the dimensions of a sample are laid out: flattened into the first, or samples second.
        assert torch.equal(describe_samples(part.flatten(0, 1), size)["samples"], samples)
        if 9 % size:
            assert torch.equal(describe_samples(part.transpose(0, 1), size)["samples"], samples)


def test_an_activation_without_samples_is_one():
    described = describe_samples(random(32, 6), 5)
    assert described["batch_dim"] is None and described["samples"].shape == (1, SAMPLE_WIDTH)
    assert torch.equal(described["sketch"], sketch(random(32, 6)))
    assert describe_samples(random(12), 12)["samples"].shape == (12, SAMPLE_WIDTH)
    assert describe_samples(random(9, 4), 4)["samples"].shape == (4, SAMPLE_WIDTH)
    assert describe_samples(random(4, 0), 4)["samples"].abs().sum() == 0
    assert describe_samples(random(0, 4), 0)["samples"].numel() == 0
    assert describe_samples(torch.empty(4, 4, device="meta"), 4) is None


def test_samples_have_keys_of_their_own():
    tokens, weights = torch.arange(60).reshape(10, 6), random(10)
    keys = sample_keys([tokens, weights])
    assert keys.shape == (10, 8) and len(set(map(tuple, keys.tolist()))) == 10
    assert torch.equal(sample_keys([tokens[3:5], weights[3:5]]), keys[3:5])
    assert sample_keys([]) is None and sample_keys([torch.zeros(0, 3)]) is None


# ---------------------------------------------------------------- shards of DTensors


def on_each_rank(ranks, function):
    """Return what function() returns as each of some ranks, whose group does not communicate."""
    results = []
    for rank in range(ranks):
        _clear_sharding_prop_cache()  # it holds meshes, in which this process has the place of another rank
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            results.append(function())
        finally:
            dist.destroy_process_group()
    return results


@pytest.mark.parametrize("shape", [(14, 9), (3, 5), (6, 7, 5), (33,)])
def test_shards_of_a_dtensor_add_up(shape):
    whole = random(*shape)
    dims = range(len(shape))
    for placements in [*product([Shard(dim) for dim in dims], repeat=2), (Replicate(), Shard(0))]:

        def described(placements=placements):
            mesh = init_device_mesh("cpu", (2, 2))
            return describe(distribute_tensor(whole, mesh, placements, src_data_rank=None))

        entries = on_each_rank(4, described)
        copies = 2 if placements[0].is_replicate() else 1
        assert torch.allclose(sum(entry["sketch"] for entry in entries) / copies, sketch(whole), atol=1e-9)
        assert {entry["shape"] for entry in entries} == {shape}
        assert {entry["ranks"] for entry in entries} == {(0, 1, 2, 3)}
        names = tuple(f"shard {p.dim}" if p.is_shard() else "replicate" for p in placements)
        assert {entry["placements"] for entry in entries} == {names}


@pytest.mark.parametrize("hidden", [16, 14, 5, 3])
def test_strided_shards_of_tensor_parallelism_and_fsdp_add_up(hidden):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, hidden), nn.Linear(hidden, 6))

    def described():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        sharded = parallelize_module(model(), mesh["tp"], plan, src_data_rank=None)
        fully_shard(sharded, mesh=mesh["dp"])
        return {name: describe(parameter) for name, parameter in sharded.named_parameters()}

    entries = on_each_rank(4, described)
    for name, parameter in model().named_parameters():
        # A bias of the rowwise layer is on all ranks of a row.
        copies = 2 if entries[0][name]["placements"][1] == "replicate" else 1
        total = sum(entry[name]["sketch"] for entry in entries) / copies
        assert torch.allclose(total, sketch(parameter.detach()), atol=1e-9), name
        assert sum(entry[name]["elements"] for entry in entries) == copies * parameter.numel()


@pytest.mark.parametrize("shape", [(6, 10), (6, 4, 10), (6, 4, 3), (6, 3, 2, 5)])
def test_activations_that_are_cut_add_up(shape):
    whole = random(*shape)
    expected = describe_samples(whole, 6)["samples"]
    for dim in {1, len(shape) - 1}:

        def described(dim=dim):
            mesh = init_device_mesh("cpu", (4,))
            return describe_samples(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None), 6)

        entries = on_each_rank(4, described)
        assert torch.allclose(sum(entry["samples"] for entry in entries), expected, atol=1e-9), dim


def test_activations_cut_by_sample_or_inside_a_sample():
    def described():
        mesh = init_device_mesh("cpu", (2,))
        samples = distribute_tensor(random(6, 4, 10), mesh, [Shard(0)], src_data_rank=None)
        inside = distribute_tensor(random(6, 4, 2, 10), mesh, [Shard(2)], src_data_rank=None)
        return describe_samples(samples, 3), describe_samples(inside, 6)

    results = on_each_rank(2, described)
    assert torch.equal(
        torch.cat([r[0]["samples"] for r in results]), describe_samples(random(6, 4, 10), 6)["samples"]
    )
    assert [r[1] for r in results] == [None, None]
