"""Measure training_sketches.py: what a sketch costs, and how well it estimates the norm of a difference.

OMP_NUM_THREADS=1 python tests/tools/bench_sketches.py
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from training_sketches import SAMPLE_WIDTH, count, describe, describe_samples, sketch, sketch_matrices  # noqa: E402

TIMES = 5  # the fastest counts: others share the cache. The time is that of this process on a core
MATRICES = 400  # of each kind of error
ROWS, COLUMNS = 384, 512


def nanoseconds(function, elements: int) -> float:
    """Return how long a call takes, for each element, at best."""
    function()
    times = []
    for _ in range(TIMES):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times) / elements * 1e9


def print_costs() -> None:
    """Print what sketches of several shapes cost."""
    whole = torch.randn(4096, 4096)
    for text, tensor, shape, offset in (
        ("matrix 4096 x 4096", whole, None, None),
        ("the same, bfloat16", whole.bfloat16(), None, None),
        ("column shard 4096 x 512 of it", whole[:, 512:1024].contiguous(), (4096, 4096), (0, 512)),
        ("column shard 4096 x 64 of it", whole[:, 64:128].contiguous(), (4096, 4096), (0, 64)),
        ("row shard 64 x 4096 of it", whole[64:128], (4096, 4096), (64, 0)),
        ("row shard 63 x 4096 of it", whole[63:126], (4096, 4096), (63, 0)),
        ("embedding 50000 x 256", torch.randn(50000, 256), None, None),
        ("convolution 512 x 512 x 3 x 3", torch.randn(512, 512, 3, 3), None, None),
        ("vector of 4 million", torch.randn(4_000_000), None, None),
        ("vector of 4096", torch.randn(4096), None, None),
        ("experts 8 x 1024 x 1024", torch.randn(8, 1024, 1024), None, None),
        ("their shard 8 x 1024 x 128", torch.randn(8, 1024, 128), (8, 1024, 1024), (0, 0, 256)),
    ):
        cost = nanoseconds(lambda t=tensor, s=shape, o=offset: sketch(t, s, o), tensor.numel())
        print(f"sketch of a {text:32} {cost:7.2f} ns an element")
    print(f"count of a {'matrix 4096 x 4096':33} {nanoseconds(lambda: count(whole), whole.numel()):7.2f}")
    cost = nanoseconds(lambda: describe(whole), whole.numel())
    print(f"describe a {'matrix 4096 x 4096':33} {cost:7.2f}")
    for shape in ((8, 512, 1024), (512, 128), (8, 16, 256)):
        tensor = torch.randn(shape)
        cost = nanoseconds(lambda t=tensor: describe_samples(t, len(t)), tensor.numel())
        print(f"describe samples {' x '.join(map(str, shape)):27} {cost:7.2f}")


def kinds():
    """Yield kinds of errors: a name, and a function that makes an error from a number."""

    def random(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def few(seed):
        error = torch.zeros(ROWS * COLUMNS)
        places = torch.randperm(len(error), generator=torch.Generator().manual_seed(seed))[:9]
        error[places] = random(9, seed=seed)
        return error.reshape(ROWS, COLUMNS)

    yield "full rank", lambda seed: random(ROWS, COLUMNS, seed=seed)
    yield "rank one", lambda seed: random(ROWS, 1, seed=seed) * random(1, COLUMNS, seed=seed + MATRICES)
    yield "rank one, constant", lambda seed: torch.ones(ROWS - seed % 200, COLUMNS - seed % 300)
    yield (
        "rank four",
        lambda seed: random(ROWS, 4, seed=seed) @ random(4, COLUMNS, seed=seed + MATRICES),
    )
    yield (
        "one row",
        lambda seed: pad(random(1, COLUMNS, seed=seed), (0, 0, seed % ROWS, ROWS - 1 - seed % ROWS)),
    )
    yield "one column", lambda seed: pad(random(ROWS, 1, seed=seed), (seed, COLUMNS - 1 - seed))
    yield "nine elements", few
    yield (
        "a quarter",
        lambda seed: pad(random(ROWS // 2, COLUMNS // 2, seed=seed), (COLUMNS // 2, 0, ROWS // 2, 0)),
    )
    yield "vector of 5000", lambda seed: random(5000, seed=seed)


def sigma(ratios: list[float]) -> str:
    """Return one sigma of ratios that should be 1, and their mean."""
    values = torch.tensor(ratios)
    return f"{float((values - 1).square().mean().sqrt()):6.1%}, mean {float(values.mean()):.3f}"


def print_sigmas() -> None:
    """Print the error of the norm that sketches estimate, by kind of what they sketch."""
    for name, make in kinds():
        errors = [make(seed) for seed in range(MATRICES)]
        print(f"norm of {name:20} {sigma([float(sketch(e).norm() / e.double().norm()) for e in errors])}")
        if errors[0].dim() == 2:
            whole = [sketch_matrices(error[None], 0, 0, SAMPLE_WIDTH)[0] for error in errors]
            ratios = [float(w.norm() / e.double().norm()) for w, e in zip(whole, errors, strict=True)]
            print(f"   as one sample of {SAMPLE_WIDTH:2}    {sigma(ratios)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_costs()
    print_sigmas()
