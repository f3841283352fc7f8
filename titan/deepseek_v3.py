"""DeepSeek-V3 recipes: SimpleFSDP under torch.compile, for machines without torchtitan_neuron.

    --module titan.deepseek_v3 --config simple_fsdp_deepseek_v3_debugmodel_tp2

The names and shapes of the Neuron recipes in torchtitan_neuron.experiments.graph_trainer.deepseek_v3,
and debug models of the same make. Two things are PyTorch's own here: the MoE layers run on grouped
matmuls where Neuron has NKI kernels, and batch and sequence sizes are upstream's (those of the Neuron
recipes are not published). The hook that balances the experts' load without an auxiliary loss, by the
tokens that each expert got, comes with graph_trainer's model registry.
"""

from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b, deepseek_v3_debugmodel

from titan.simple_fsdp import shrink, simple_fsdp


def pin_tensor_parallel(config: GraphTrainer.Config, degree: int) -> GraphTrainer.Config:
    """Pin the tensor-parallel degree; the ranks that it leaves shard the parameters."""
    config.parallelism.tensor_parallel_degree = degree
    config.parallelism.data_parallel_shard_degree = -1
    config.parallelism.expert_parallel_degree = 1
    return config


def simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16() -> GraphTrainer.Config:
    """Return DeepSeek-V3 16B at TP4, on 64 ranks FSDP16, selective activation checkpointing."""
    return pin_tensor_parallel(simple_fsdp(deepseek_v3_16b(), model_registry), 4)


def simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16_fac() -> GraphTrainer.Config:
    """Return DeepSeek-V3 16B at TP4, on 64 ranks FSDP16, full activation checkpointing."""
    return pin_tensor_parallel(simple_fsdp(deepseek_v3_16b(), model_registry, full_ac=True), 4)


def simple_fsdp_deepseek_v3_debugmodel_tp2() -> GraphTrainer.Config:
    """Return a dense and a MoE layer of upstream's debug model at TP2, selective checkpointing."""
    return pin_tensor_parallel(shrink(simple_fsdp(deepseek_v3_debugmodel(), model_registry), layers=2), 2)


def simple_fsdp_deepseek_v3_debugmodel_tp2_fac() -> GraphTrainer.Config:
    """Return a dense and a MoE layer of upstream's debug model at TP2, full checkpointing."""
    return pin_tensor_parallel(
        shrink(simple_fsdp(deepseek_v3_debugmodel(), model_registry, full_ac=True), layers=2), 2
    )
