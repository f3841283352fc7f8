"""titan/: what the recipes set, that activation checkpointing is applied, and the CPU adapter."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from titan import cpu_adapter

cpu_adapter.adapt()

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.experiments.graph_trainer.llama3 import model_registry  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from titan import deepseek_v3, llama3, measure_memory, predict_memory, simple_fsdp  # noqa: E402

NKI = "simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16"
RECIPES = {  # name: flavor, activation checkpointing, tensor-parallel degree
    "simple_fsdp_llama3_8b": ("8B", SelectiveAC, 1),
    "simple_fsdp_llama3_8b_fullac": ("8B", FullAC, 1),
    "simple_fsdp_llama3_70b_fullac": ("70B", FullAC, 8),
    "simple_fsdp_llama3_debugmodel": ("debugmodel", SelectiveAC, 1),
    "simple_fsdp_llama3_debugmodel_fullac": ("debugmodel", FullAC, 1),
    NKI: ("16B", SelectiveAC, 4),
    f"{NKI}_fac": ("16B", FullAC, 4),
    "simple_fsdp_deepseek_v3_debugmodel_tp2": ("debugmodel", SelectiveAC, 2),
    "simple_fsdp_deepseek_v3_debugmodel_tp2_fac": ("debugmodel", FullAC, 2),
}


@pytest.fixture(scope="module")
def mesh():
    """A process group of four ranks that only this process is in: collectives do nothing."""
    dist_utils.init_fake_mode(4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name):
    flavor, checkpointing, degree = RECIPES[name]
    module = llama3 if "llama3" in name else deepseek_v3
    config = getattr(module, name)()
    assert config.model_spec.flavor == flavor
    assert type(config.activation_checkpoint) is checkpointing.Config
    assert config.parallelism.tensor_parallel_degree == degree
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.compile.enable
    assert (config.compile.mode, config.compile.backend) == ("jit", "aot_eager")
    assert config.compile.components == ["model", "loss", "grad_clip"]
    assert type(config.loss) is CrossEntropyLoss.Config
    attention = [type(layer.attention.inner_attention) for layer in config.model_spec.model.layers]
    assert set(attention) == {ScaledDotProductAttention.Config}
    assert (config.debug.seed == 42) == (flavor == "debugmodel")
    hook = config.model_spec.post_optimizer_build_fn
    assert (hook is not None) == (module is deepseek_v3)


def test_all_recipes_are_listed():
    functions = {
        name for module in (llama3, deepseek_v3) for name in vars(module) if name.startswith("simple_fsdp_")
    }
    assert functions == set(RECIPES)


def test_prefix_cache_is_used_where_the_release_has_it():
    new, old = SimpleNamespace(use_prefix_cache_for_positions=False), SimpleNamespace()
    layers = [SimpleNamespace(attention=SimpleNamespace(rope=rope)) for rope in (new, old)]
    simple_fsdp.use_prefix_cache_for_positions(SimpleNamespace(layers=layers))
    assert new.use_prefix_cache_for_positions
    assert not vars(old)


class Graphs:
    """A compile backend that keeps the forward and backward graphs, partitioned as aot_eager does."""

    def __init__(self):
        self.forward = self.backward = None
        self.backend = aot_autograd(
            fw_compiler=lambda graph, inputs: self.keep("forward", graph, inputs),
            bw_compiler=lambda graph, inputs: self.keep("backward", graph, inputs),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )

    def keep(self, name, graph, inputs):
        setattr(self, name, graph.graph)
        return boxed_nop(graph, inputs)

    def saved_bytes(self) -> int:
        """Return the bytes of what the forward graph computes and keeps for the backward graph."""
        (output,) = self.forward.find_nodes(op="output")
        kept = [node for node in output.args[0] if node is not None and node.op != "placeholder"]
        values = [node.meta["val"] for node in kept]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def backward_count(self, name: str) -> int:
        return sum(name in str(node.target) for node in self.backward.nodes if node.op == "call_function")


def trace(checkpointing, degree: int, parallelize=None) -> Graphs:
    """Compile two layers of the Llama recipe, run one step forward and backward; return the graphs."""
    graphs = Graphs()
    config = llama3.simple_fsdp_llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.activation_checkpoint = checkpointing
    config.parallelism.tensor_parallel_degree = degree
    config.compile.backend = graphs.backend
    config.compile.components = ["model"]
    if parallelize:
        config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    model = measure_memory.build_model(config, 4)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    tokens = torch.zeros(2, config.training.seq_len, dtype=torch.long)
    output = model(tokens, positions=tokens)
    (output.to_local() if degree > 1 else output).sum().backward()
    return graphs


@pytest.mark.parametrize("degree", [1, 2])
def test_activation_checkpointing_is_applied(mesh, degree):
    none, selective, full = (
        trace(policy, degree) for policy in (None, SelectiveAC.Config(), FullAC.Config())
    )
    saved = [graphs.saved_bytes() for graphs in (none, selective, full)]
    matmuls = [graphs.backward_count("aten.mm") for graphs in (none, selective, full)]
    gathers = [graphs.backward_count("all_gather_into_tensor") for graphs in (none, selective, full)]
    print(f"TP{degree}: saved {saved} bytes, backward matmuls {matmuls}, all-gathers {gathers}")
    assert saved[0] > 1.2 * saved[1] > 1.2 * 1.2 * saved[2]
    assert matmuls[0] < matmuls[1] < matmuls[2]
    assert gathers[0] <= gathers[1] <= gathers[2]
    assert gathers[2] > 0


def test_upstream_ignores_activation_checkpointing(mesh):
    """The reason for parallelize_then_checkpoint. If this fails, the release applies it by itself."""
    upstream = model_registry("debugmodel", attn_backend="sdpa").parallelize_fn
    saved = {trace(policy, 1, upstream).saved_bytes() for policy in (None, FullAC.Config())}
    assert len(saved) == 1


def test_gradient_clipping_is_compiled(monkeypatch):
    eager = dist_utils.clip_grad_norm_
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", eager)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for _ in range(2):  # a second trainer in the process does not compile the compiled
        simple_fsdp.compile_gradient_clipping(count)
        assert dist_utils.clip_grad_norm_.uncompiled is eager
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    assert norm.item() == pytest.approx(20**0.5)
    assert parameters[0].grad[0].item() == pytest.approx(2 / 20**0.5, rel=1e-5)
    assert graphs


def test_adapter_comes_too_late(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: None)
    with pytest.raises(RuntimeError, match=r"call adapt\(\) first"):
        cpu_adapter.adapt()


def test_adapter_may_be_called_again():
    adapted = torch._utils._get_available_device_type
    cpu_adapter.adapt()
    assert torch._utils._get_available_device_type is adapted


def test_cpu_may_be_chosen_where_there_is_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setenv("TITAN_DEVICE", "cpu")
    with pytest.raises(RuntimeError, match="call adapt"):  # it would adapt: too late in this process
        cpu_adapter.adapt()


def test_defaults_of_the_memory_prediction_are_the_recipes():
    assert predict_memory.MODELS.keys() == measure_memory.RECIPES.keys()
    for model, (degree, checkpointing) in predict_memory.MODELS.items():
        config = measure_memory.RECIPES[model]()
        assert config.parallelism.tensor_parallel_degree == degree, model
        policy = {"selective": SelectiveAC.Config, "full": FullAC.Config}[checkpointing]
        assert type(config.activation_checkpoint) is policy, model


@pytest.mark.parametrize(
    ("plan", "loss", "lower", "upper"),
    [
        ("simplefsdp", "bracket", True, False),
        ("fsdp2-compiled", "bracket", True, False),
        ("fsdp2", "bracket", False, False),
        ("fsdp2", "fused", True, True),
        ("simplefsdp", "eager", False, False),
        ("simplefsdp", "chunked", False, False),
    ],
)
def test_bounds_differ_in_what_is_fused_only(plan, loss, lower, upper):
    layout = {"plan": plan, "loss": loss}
    job = SimpleNamespace(layout=layout, model=torch.nn.Linear(2, 2))
    for bound, fused in (("lower", lower), ("upper", upper)):
        measure_memory.Job.choose(job, bound)
        assert job.fused_loss == measure_memory.is_loss_fused(layout, bound) == fused
        assert job.optimizer.defaults["fused"] == (bound == "lower")


def test_adapter_leaves_accelerators_alone(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    monkeypatch.delitem(sys.modules, "torchtitan")
    module = torch._utils._get_device_module
    cpu_adapter.adapt()
    assert torch._utils._get_device_module is module
    assert torch._utils._get_available_device_type() == "cuda"


def test_device_module():
    from torchtitan.tools import utils

    assert (utils.device_type, utils.device_module.current_device()) == ("cpu", 0)
    stats = utils.device_module.memory_stats()
    total = utils.device_module.get_device_properties().total_memory
    assert 2**28 < stats["reserved_bytes.all.peak"] < total
    assert utils.device_module.is_available()
