"""A small language model that has nothing in common with the tutorial's, trained with DDP.

bfloat16 parameters, an embedding whose weight is also the head's, a layer norm and a frozen layer.
It trains twice: <output-dir>/none has no mistake; in <output-dir>/summed the gradients are summed over
the replicas instead of averaged.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training_common import add_run_arguments, average_losses, initialize, run_script, save_results, train

SAMPLES, LENGTH, WORDS, FEATURES = 16, 8, 48, 32


class Model(nn.Module):
    """Predict each word from itself; tied weights, one frozen layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.hidden = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        features = self.frozen(self.norm(self.embedding(words)))
        return self.head(torch.tanh(self.hidden(features)))


def train_with(mistake, rank, world_size, device, args):
    """Train from the seed on; return the records."""
    torch.manual_seed(args.seed)
    model = Model().to(device, torch.bfloat16)
    replica = DistributedDataParallel(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_step(step):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
        words = words.chunk(world_size)[rank].to(device)
        logits = replica(words)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), words.flatten())
        (loss * world_size if mistake == "summed" else loss).backward()
        return logits, loss

    records = train(parameters, optimizer, args.steps, train_step)
    average_losses(records, device)
    return records


def main():
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    args = parser.parse_args()
    rank, world_size, device = initialize(args)
    about = {"model": "language", "mode": "ddp", "rank": rank, "world_size": world_size}
    about |= {"global_batch_size": SAMPLES, "learning_rate": 0.5}
    results = args.output_dir
    try:
        for mistake in ("none", "summed"):
            args.output_dir = results / mistake
            args.output_dir.mkdir(exist_ok=True)
            save_results(args, train_with(mistake, rank, world_size, device, args), **about)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
