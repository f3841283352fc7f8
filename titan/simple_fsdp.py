"""From an upstream TorchTitan recipe to SimpleFSDP under torch.compile, the way the Neuron recipes do it.

    config = simple_fsdp(llama3_8b(), model_registry, full_ac=True)

Every recipe in titan/llama3.py and titan/deepseek_v3.py goes through simple_fsdp(), and so reading
this file answers "what is this run doing?". It needs torchtitan 0.3.0 and nothing of Neuron's.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

# aot_eager traces and partitions like the others and runs PyTorch's own kernels: no compiler needed.
COMPILE_BACKEND = {"neuron": "neuron", "cuda": "inductor"}.get(device_type, "aot_eager")


class SelectiveWithCpuAttention(SelectiveAC):
    """Upstream's selective policy, which lists each device's attention kernel but not the CPU's."""

    attention_ops = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    def get_save_ops(self) -> set:
        """Return the operators whose outputs are kept for the backward pass."""
        return super().get_save_ops() | self.attention_ops


def parallelize_then_checkpoint(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return upstream's parallelize function with the two things that its jit path leaves out.

    In torchtitan 0.3.0 graph_trainer's parallelize functions take ac_config and do not use it, and no
    code knows the compile component grad_clip. Here blocks are wrapped after upstream has applied TP,
    SimpleFSDP and the compiler: it traces at the first step, so the wrapped blocks are what it sees,
    and what the partitioner recomputes includes the all-gathers of the parameters.
    """

    def parallelize_with_both(
        model: nn.Module, *, ac_config, compile_config, dump_folder: str, **others
    ) -> nn.Module:
        model = parallelize(
            model, ac_config=None, compile_config=compile_config, dump_folder=dump_folder, **others
        )
        if ac_config is not None:
            policy = SelectiveWithCpuAttention if isinstance(ac_config, SelectiveAC.Config) else FullAC
            policy(ac_config, dump_folder).apply(model)
        if compile_config.enable and "grad_clip" in compile_config.components:
            compile_gradient_clipping(compile_config.backend)
        return model

    return parallelize_with_both


def compile_gradient_clipping(backend: str) -> None:
    """Compile the function by which the trainer computes the gradient norm and clips."""
    clip = getattr(dist_utils.clip_grad_norm_, "uncompiled", dist_utils.clip_grad_norm_)
    dist_utils.clip_grad_norm_ = torch.compile(clip, backend=backend)
    dist_utils.clip_grad_norm_.uncompiled = clip
    logger.info("Compiling gradient clipping with torch.compile")


def use_prefix_cache_for_positions(model_config) -> None:
    """Read the rotary cache as a prefix instead of by a gather, where the release offers it.

    Neuron does not support the gather; torchtitan 0.3.0 does not have the switch and gathers.
    """
    for layer in model_config.layers:
        if hasattr(layer.attention.rope, "use_prefix_cache_for_positions"):
            layer.attention.rope.use_prefix_cache_for_positions = True


def simple_fsdp(
    base: Trainer.Config, model_registry: Callable[..., ModelSpec], *, full_ac: bool = False
) -> GraphTrainer.Config:
    """Convert a recipe of torchtitan.models to SimpleFSDP with compile mode jit.

    Args:
        base: the upstream recipe; its batch, sequence, optimizer and parallelism are kept.
        model_registry: graph_trainer's registry of the same model family.
        full_ac: full instead of selective activation checkpointing.
    """
    base.model_spec = model_registry(base.model_spec.flavor, attn_backend="sdpa")
    use_prefix_cache_for_positions(base.model_spec.model)
    config = to_graph_trainer_config(base, model_registry)
    # Set after the conversion, which turns any policy into the selective one.
    config.activation_checkpoint = FullAC.Config() if full_ac else SelectiveAC.Config()
    config.model_spec = replace(
        config.model_spec, parallelize_fn=parallelize_then_checkpoint(config.model_spec.parallelize_fn)
    )
    # The chunked loss calls lm_head itself, chunk by chunk: outside the compiled model, in eager mode.
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = config.loss.loss_fn
    config.compile = GraphTrainerCompileConfig(
        enable=True, components=["model", "loss", "grad_clip"], backend=COMPILE_BACKEND, mode="jit"
    )
    # Graphs of CUDA alone; without them the trainer frees gradients once a step instead of zeroing them.
    config.training.disable_cuda_graphs = True
    if device_type == "cpu":
        config.training.mixed_precision_param = "float32"  # Gloo and CPU kernels: slow in bfloat16
        config.optimizer.implementation = "foreach"
    return config


def shrink(config: GraphTrainer.Config, layers: int) -> GraphTrainer.Config:
    """Cut a debug recipe to a size that two CPU cores compile in a minute and train in seconds.

    The width, heads, experts and vocabulary (2,048 tokens) stay those of upstream's debug model.
    """
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    config.training.local_batch_size = 2
    config.training.seq_len = 256
    config.training.steps = 10
    config.metrics.log_freq = 1
    config.debug.seed = 42  # upstream's default is another one in every run
    config.validator.enable = False
    return config
