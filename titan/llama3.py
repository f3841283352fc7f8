"""Llama 3 recipes: SimpleFSDP under torch.compile, for machines without torchtitan_neuron.

    --module titan.llama3 --config simple_fsdp_llama3_debugmodel_fullac

The names and shapes of the Neuron recipes in torchtitan_neuron.experiments.graph_trainer.llama3, and
debug models of the same make. No recipe pins a parallelism degree, except the 70B: SimpleFSDP shards
across every rank that tensor parallelism leaves.
"""

from torchtitan.experiments.graph_trainer.llama3 import model_registry
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_70b, llama3_debugmodel

from titan.simple_fsdp import shrink, simple_fsdp


def simple_fsdp_llama3_8b() -> GraphTrainer.Config:
    """Return Llama 3.1 8B with selective activation checkpointing. At TP1 it needs more than 24 GiB."""
    return simple_fsdp(llama3_8b(), model_registry)


def simple_fsdp_llama3_8b_fullac() -> GraphTrainer.Config:
    """Return Llama 3.1 8B with full activation checkpointing."""
    return simple_fsdp(llama3_8b(), model_registry, full_ac=True)


def simple_fsdp_llama3_70b_fullac() -> GraphTrainer.Config:
    """Return Llama 3.1 70B, which upstream pins to TP8. Listed for completeness, never run here."""
    return simple_fsdp(llama3_70b(), model_registry, full_ac=True)


def simple_fsdp_llama3_debugmodel() -> GraphTrainer.Config:
    """Return three layers of upstream's debug model, selective activation checkpointing."""
    return shrink(simple_fsdp(llama3_debugmodel(), model_registry), layers=3)


def simple_fsdp_llama3_debugmodel_fullac() -> GraphTrainer.Config:
    """Return three layers of upstream's debug model, full activation checkpointing."""
    return shrink(simple_fsdp(llama3_debugmodel(), model_registry, full_ac=True), layers=3)
