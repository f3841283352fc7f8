"""titan/parity_train.py with one real mistake in it.

    python launch.py --nproc-per-node=1 tests/titan_training/faulty_train.py FAULT options of parity_train

Each function plants its mistake where a person would make it: in TorchTitan's own code or in the
recipe, before the trainer is built.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from titan import parity_train  # noqa: E402, adapts to the CPU


def none() -> None:
    """Plant nothing."""


def divide_factor_left_out() -> None:
    """Let FSDP2 average gradients although the loss is already divided by the global number of tokens."""
    from torchtitan.distributed import fsdp

    fsdp.disable_fsdp_gradient_division = lambda model: None


def wrong_mesh_dimension() -> None:
    """Give SimpleFSDP the mesh dimension fsdp alone: nothing is reduced over the replicas."""
    from torchtitan.experiments.graph_trainer.llama3 import parallelize

    apply = parallelize.apply_simple_fsdp

    class WithoutReplicas:
        def __init__(self, dims):
            self.dims = dims

        def __getattr__(self, name):
            return False if name == "dp_replicate_enabled" else getattr(self.dims, name)

    def apply_to_fsdp_only(model, *, parallel_dims, training):
        return apply(model, parallel_dims=WithoutReplicas(parallel_dims), training=training)

    parallelize.apply_simple_fsdp = apply_to_fsdp_only


def change_config(change) -> None:
    make_config = parity_train.make_config

    def make_other_config(args):
        config = make_config(args)
        change(config)
        return config

    parity_train.make_config = make_other_config


def chunked_loss() -> None:
    """Take upstream's chunked loss: other code, the same numbers."""
    from torchtitan.components.loss import ChunkedLossWrapper

    def chunk(config) -> None:
        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)

    change_config(chunk)


def chunked_loss_of_graph_trainer() -> None:
    """Keep graph_trainer's chunked loss under eager FSDP2.

    It switches lm_head's gradient synchronisation off until backward has ended. FSDP2 has the final norm
    in lm_head's group: the norm's gradient is never reduced, and its weight never trained.
    """
    from torchtitan.experiments.graph_trainer.chunked_loss import ChunkedLossWrapperWithParamGrads

    def chunk(config) -> None:
        config.loss = ChunkedLossWrapperWithParamGrads.Config(loss_fn=config.loss)

    change_config(chunk)


def recompute_in_bfloat16() -> None:
    """Recompute checkpointed blocks from inputs in bfloat16, as a forgotten autocast does."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    wrap = FullAC._wrap_block

    def wrap_block(self, block, *, base_fqn=None):
        forward, calls = block.forward, [0]

        def alternate(x, *args, **kwargs):
            calls[0] += 1
            return forward(x if calls[0] % 2 else x.bfloat16().float(), *args, **kwargs)

        block.forward = alternate
        return wrap(self, block, base_fqn=base_fqn)

    FullAC._wrap_block = wrap_block


def load_balancing_left_out() -> None:
    """Build the optimizer without the hook that balances the experts' load."""
    from dataclasses import replace

    def without_hook(config) -> None:
        config.model_spec = replace(config.model_spec, post_optimizer_build_fn=None)

    change_config(without_hook)


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    globals()[fault]()
    parity_train.main()
