"""A small language model that has nothing in common with the tutorial's, trained with DDP.

bfloat16 parameters, an embedding whose weight is also the head's, a layer norm and a frozen layer.
MISTAKE=summed in the environment sums the gradients over the replicas instead of averaging them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training_common import add_run_arguments, average_losses, initialize, run_script, save_results, train

SAMPLES, LENGTH, WORDS, FEATURES = 16, 8, 48, 32
MISTAKE = os.environ.get("MISTAKE")


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


def main():
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    args = parser.parse_args()
    rank, world_size, device = initialize(args)
    try:
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
            (loss * world_size if MISTAKE == "summed" else loss).backward()
            return logits, loss

        records = train(parameters, optimizer, args.steps, train_step)
        average_losses(records, device)
        model = "language"
        batch = {"global_batch_size": SAMPLES, "learning_rate": 0.5}
        save_results(args, records, model=model, mode="ddp", rank=rank, world_size=world_size, **batch)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
