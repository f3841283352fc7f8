"""titan/parity.py on real TorchTitan runs: clean ones pass, each planted mistake is caught and named.

Short runs on one or two ranks; `make titan-parity` is the whole comparison at four.
"""

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, run
from filelock import FileLock

sys.path.insert(0, str(ROOT / "titan"))
import parity  # noqa: E402

STEPS = 2
FAULTY = Path(__file__).parent / "faulty_train.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder that all pytest processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="module")
def assets(shared):
    with FileLock(shared / "assets.lock"):
        done = run(sys.executable, ROOT / "titan/make_assets.py", "--output", shared / "assets")
    assert done.status == 0, done.err
    return shared / "assets"


@pytest.fixture(scope="module")
def train(assets, shared):
    """A function that makes a run, with a mistake or none, once, and returns its record's path."""
    base = shared / "parity"

    def make(family: str, fault: str, plan: str, ranks: int, *options: str) -> Path:
        output = base / family / ("-".join([fault, plan, str(ranks), *options]) + ".pt")
        output.parent.mkdir(parents=True, exist_ok=True)
        seed = base / f"{family}-seed"
        if plan != "seed":
            make(family, "none", "seed", 1)
        with FileLock(f"{output}.lock"):
            if (seed if plan == "seed" else output).exists():
                return output
            words = ["--family", family, "--plan", plan, "--steps", STEPS, "--assets", assets]
            words += ["--seed-checkpoint", seed, "--output", output, *options]
            logs = base / "logs" / output.stem
            done = launch(ranks, logs, FAULTY, fault, *words, HF_DATASETS_CACHE=str(assets / "cache"))
            assert done.status == 0, done.err
        return output

    return make


def mismatches_of(reference: Path, actual: Path) -> list[str]:
    return parity.compare(parity.load(reference), parity.load(actual))[1]


@pytest.fixture(scope="module")
def llama(train):
    return train("llama3", "none", "fsdp2", 1)


@pytest.fixture(scope="module")
def deepseek(train):
    return train("deepseek_v3", "none", "fsdp2", 1)


@pytest.mark.parametrize(
    ("fault", "plan", "ranks", "options"),
    [
        ("none", "fsdp2", 2, []),
        ("none", "simple_fsdp", 2, ["--replicate", "2"]),
        ("none", "simple_fsdp", 1, ["--checkpointing", "full"]),
        ("none", "fsdp2", 1, ["--checkpointing", "full"]),
        ("chunked_loss", "fsdp2", 1, []),
    ],
)
def test_clean_runs_pass(train, llama, fault, plan, ranks, options):
    assert mismatches_of(llama, train("llama3", fault, plan, ranks, *options)) == []


@pytest.mark.parametrize(
    ("fault", "plan", "ranks", "options", "said"),
    [
        ("divide_factor_left_out", "fsdp2", 2, [], "gradient of tok_embeddings.weight is off by 0.5 "),
        ("wrong_mesh_dimension", "simple_fsdp", 2, ["--replicate", "2"], "gradient of tok_embeddings.weight"),
        ("chunked_loss_of_graph_trainer", "fsdp2", 1, [], "norm.weight has no gradient in the actual run"),
        ("recompute_in_bfloat16", "fsdp2", 1, ["--checkpointing", "full"], "gradient of layers.0."),
    ],
)
def test_mistakes_are_caught(train, llama, fault, plan, ranks, options, said):
    mismatches = mismatches_of(llama, train("llama3", fault, plan, ranks, *options))
    # The loss of the first step is right in all of them: no loss curve shows them at once.
    assert mismatches
    assert not any(line.startswith("step 1: loss") for line in mismatches)
    assert any(line.startswith(f"step 1: {said}") for line in mismatches), mismatches[:5]


def test_factor_is_named(train, llama):
    mismatches = mismatches_of(llama, train("llama3", "divide_factor_left_out", "fsdp2", 2))
    assert "0.5x the reference" in mismatches[0]
    assert "step 1: all gradients together are 0.5x the reference" in mismatches


def test_mixture_of_experts_passes(train, deepseek):
    assert mismatches_of(deepseek, train("deepseek_v3", "none", "fsdp2", 2)) == []


def test_routing_is_compared(train, deepseek):
    mismatches = mismatches_of(deepseek, train("deepseek_v3", "load_balancing_left_out", "fsdp2", 1))
    assert mismatches
    assert all(line.startswith("step 2:") for line in mismatches)
    assert any("tokens_per_expert_E counts 6144 tokens, reference 3072" in line for line in mismatches)


FULL_SIZE = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from titan import parity_train
for family in ("llama3", "deepseek_v3"):
    args = SimpleNamespace(family=family, size="full", dtype="bfloat16", vocabulary=None, steps=2, tp=2,
        replicate=1, seed=42, plan="simple_fsdp", assets=Path("a"), checkpointing=None,
        seed_checkpoint=Path("b/seed"))
    config = parity_train.make_config(args)
    model = config.model_spec.model
    (layer,) = model.layers
    print(family, model.dim, model.vocab_size, layer.moe and layer.moe.num_experts)
    print(config.training.local_batch_size, config.training.seq_len, config.training.dtype,
        config.training.mixed_precision_param, config.optimizer.param_groups[0].optimizer_name)
args.vocabulary = 1024
model = parity_train.make_config(args).model_spec.model
print(model.vocab_size, model.lm_head.out_features, model.tok_embeddings.num_embeddings)
"""


def test_at_full_size_one_layer_is_as_wide_as_the_model():
    done = run(sys.executable, "-c", FULL_SIZE, ROOT, TITAN_DEVICE="cpu", WORLD_SIZE="4")
    assert done.status == 0, done.err
    assert done.out.splitlines()[-5:] == [
        "llama3 4096 128256 None",
        "1 16 bfloat16 bfloat16 SGD",
        "deepseek_v3 2048 102400 64",
        "1 16 bfloat16 bfloat16 SGD",
        "1024 1024 1024",
    ]
