"""One short training run of a recipe, for two commands that compare such runs on several meshes.

parity.py takes debug recipes and the records that --output writes. parity_full.py takes one layer at the
full width, --size full, under record_training.py.

    python launch.py --standalone --nproc-per-node=4 titan/parity_train.py \\
        --family llama3 --plan simple_fsdp --tp 2 --seed-checkpoint DIR --output FILE

    --plan simple_fsdp  the recipe as it is: SimpleFSDP, compiled in mode jit, selective checkpointing
    --plan fsdp2        the same model, data and optimizer by upstream's fully_shard, eager, all kept
    --plan seed         no training: write the initial parameters as a checkpoint that all others load

Two things differ from a plain TorchTitan run, so that runs on different meshes can be compared. One seed
gives other parameters on another mesh: here all runs load one seed checkpoint. And TorchTitan's loader
deals documents out by data-parallel rank, so another mesh trains on other sequences: here each rank takes
its rows of one global batch. At full size its tokens are drawn from the whole vocabulary, of which the
debug tokenizer knows 2,048.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from titan import cpu_adapter  # noqa: E402

cpu_adapter.adapt()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig  # noqa: E402
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer  # noqa: E402
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from titan import deepseek_v3, llama3  # noqa: E402
from training_common import full_cpu, make_parser, write_then_rename  # noqa: E402

# The recipe, and its layers that are trained. DeepSeek's first layer has no experts.
RECIPES = {
    ("llama3", "debug"): (llama3.simple_fsdp_llama3_debugmodel, slice(2)),
    ("llama3", "full"): (llama3.simple_fsdp_llama3_8b, slice(1)),
    ("deepseek_v3", "debug"): (deepseek_v3.simple_fsdp_deepseek_v3_debugmodel_tp2, slice(2)),
    ("deepseek_v3", "full"): (deepseek_v3.simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16, slice(1, 2)),
}
FSDP2 = {"llama3": parallelize_llama, "deepseek_v3": parallelize_deepseekv3}
CHECKPOINTING = {"selective": SelectiveAC.Config(), "full": FullAC.Config(), "none": None}
GLOBAL_BATCH = 4  # sequences per step at debug size: every data-parallel degree up to 4 divides it
FULL_BATCH, FULL_SEQUENCE = 2, 16  # the least that TP2 x FSDP2 can share out, but for the sequence


def sum_instead_of_premul_sum(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a parallelize function whose reductions Gloo can do.

    TorchTitan divides the loss by the number of tokens and sets FSDP2's own divide factor to 1. With
    any factor set, FSDP2 asks for the reduction PREMUL_SUM, which only NCCL has.
    """

    def parallelize_for_gloo(model: nn.Module, **kwargs) -> nn.Module:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_for_gloo


def take_sgd(config: GraphTrainer.Config) -> None:
    """Replace AdamW by SGD, which TorchTitan does not know: AdamW's state is twice the parameters."""
    OptimizersContainer._resolve_optimizer_factory = staticmethod(lambda name: torch.optim.SGD)
    config.optimizer.implementation = "for-loop"  # foreach would copy all parameters
    config.optimizer.param_groups = [
        ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": 0.1})
    ]


def make_config(args: argparse.Namespace) -> GraphTrainer.Config:
    """Return the configuration of the run: recipe, plan, mesh, data and seed checkpoint."""
    recipe, layers = RECIPES[args.family, args.size]
    config = recipe()
    config.model_spec.model.layers = config.model_spec.model.layers[layers]
    batch = GLOBAL_BATCH
    if args.size == "full":
        batch, config.training.seq_len = FULL_BATCH, FULL_SEQUENCE
        config.training.dtype = config.training.mixed_precision_param = args.dtype
        if args.vocabulary:
            model = config.model_spec.model
            model.vocab_size = model.tok_embeddings.num_embeddings = args.vocabulary
            model.lm_head.out_features = args.vocabulary
        take_sgd(config)
        config.training.max_norm = math.inf  # on one rank the norm is 0.2 % too small, see titan/README.md
        config.metrics.log_freq = 1
        config.validator.enable = False
    config.training.steps = args.steps
    config.training.local_batch_size = batch * args.tp // int(os.environ["WORLD_SIZE"])
    config.parallelism.tensor_parallel_degree = args.tp
    config.parallelism.data_parallel_replicate_degree = args.replicate
    config.hf_assets_path = str(args.assets / "tokenizer")
    config.dataloader.dataset = "c4_test"
    config.dataloader.dataset_path = str(args.assets / "c4_test")
    config.dump_folder = str(args.seed_checkpoint.parent / "outputs")
    config.debug.seed = args.seed
    if args.plan == "fsdp2":
        config.model_spec = replace(
            config.model_spec, parallelize_fn=sum_instead_of_premul_sum(FSDP2[args.family])
        )
        config.compile = GraphTrainerCompileConfig(enable=False, mode=None)
        config.activation_checkpoint = None
    if args.checkpointing:
        config.activation_checkpoint = CHECKPOINTING[args.checkpointing]
    config.checkpoint.enable = True
    if args.plan == "seed":
        config.checkpoint.folder = str(args.seed_checkpoint.resolve())
        config.checkpoint.create_seed_checkpoint = True
    else:
        config.checkpoint.load_only = True
        config.checkpoint.initial_load_path = str(args.seed_checkpoint.resolve() / "step-0")
    return config


class Rows:
    """This data-parallel rank's rows of global batches that do not depend on the mesh."""

    def __init__(self, trainer: GraphTrainer, random: bool):
        """random: tokens are drawn from the whole vocabulary, not read."""
        config, dims = trainer.config, trainer.parallel_dims
        rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        local = config.training.local_batch_size
        self.rows = slice(rank * local, (rank + 1) * local)
        self.vocabulary = config.model_spec.model.vocab_size if random else None
        self.loader = config.dataloader.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=trainer.tokenizer,
            seq_len=config.training.seq_len,
            local_batch_size=GLOBAL_BATCH,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for inputs, labels in self.loader:
            if self.vocabulary:
                inputs["input"] = torch.randint(self.vocabulary, labels.shape, generator=generator)
                labels = inputs["input"].roll(-1, dims=1)
            yield {name: value[self.rows] for name, value in inputs.items()}, labels[self.rows]


def plain(name: str) -> str:
    """Return a parameter's or buffer's name without what activation checkpointing puts into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def tokens_per_expert(trainer: GraphTrainer) -> dict[str, torch.Tensor]:
    """Return for each MoE layer how many tokens of the global batch each expert got, shape [experts]."""
    counts = {}
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    for name, buffer in trainer.model_parts[0].named_buffers():
        if name.endswith("tokens_per_expert_E"):
            count = full_cpu(buffer)
            if mesh is not None:
                dist.all_reduce(count, group=mesh.get_group())
            counts[plain(name)] = count
    return counts


def record_steps(trainer: GraphTrainer) -> list[dict]:
    """Return a list that fills as the trainer trains.

    Per step: loss, grad_norm (floats, as the trainer logs them), gradients (name to full tensor, before
    clipping; None for a parameter without one) and tokens_per_expert.
    """
    steps: list[dict] = []
    clip = dist_utils.clip_grad_norm_
    log = trainer.metrics_processor.log

    def record_and_clip(parameters, *args, **kwargs):
        gradients = {}
        for name, parameter in trainer.model_parts[0].named_parameters():
            gradients[plain(name)] = None if parameter.grad is None else full_cpu(parameter.grad)
        steps.append({"gradients": gradients, "tokens_per_expert": tokens_per_expert(trainer)})
        return clip(parameters, *args, **kwargs)

    def record_and_log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        steps[-1] |= {"loss": global_avg_loss, "grad_norm": grad_norm}
        log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    dist_utils.clip_grad_norm_ = record_and_clip
    trainer.metrics_processor.log = record_and_log
    return steps


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", choices=list(FSDP2), required=True, help="of the model")
    parser.add_argument(
        "--size",
        choices=["debug", "full"],
        default="debug",
        help="two layers of the debug recipe, or one at the full width (default: debug)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the parameters at full size (default: float32)",
    )
    parser.add_argument("--vocabulary", type=int, help="words at full size (default: all)")
    parser.add_argument("--plan", choices=["simple_fsdp", "fsdp2", "seed"], required=True, help="see above")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree (default: 1)")
    parser.add_argument(
        "--replicate", type=int, default=1, help="replicas of the sharded model, as in HSDP (default: 1)"
    )
    parser.add_argument(
        "--checkpointing", choices=list(CHECKPOINTING), help="activation checkpointing (default: the plan's)"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the initial parameters (default: 42)")
    parser.add_argument("--assets", type=Path, default=Path(".titan"), help="from make_assets.py")
    parser.add_argument("--seed-checkpoint", type=Path, required=True, help="folder of the seed checkpoint")
    parser.add_argument("--output", type=Path, help="file of the record (default: none is written)")
    return parser.parse_args()


def save(args: argparse.Namespace, trainer: GraphTrainer, steps: list[dict]) -> None:
    """Write the record that parity.py reads."""
    record = {
        "family": args.family,
        "plan": args.plan,
        "checkpointing": args.checkpointing,
        "seed": args.seed,
        "steps": args.steps,
        "world_size": dist.get_world_size(),
        "tp": args.tp,
        "replicate": args.replicate,
        "tokens": GLOBAL_BATCH * trainer.config.training.seq_len,
        "records": steps,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with write_then_rename(args.output) as new:
        torch.save(record, new)


def main() -> None:
    """Train and record, or write the seed checkpoint."""
    args = parse_args()
    init_logger()
    trainer = make_config(args).build()
    if args.plan == "seed":
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.dataloader = Rows(trainer, random=args.size == "full")
        steps = record_steps(trainer) if args.output else []
        trainer.train()
        if args.output and dist.get_rank() == 0:
            save(args, trainer, steps)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
