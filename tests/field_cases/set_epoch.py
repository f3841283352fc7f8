"""pytorch#31771: DistributedSampler without set_epoch: every epoch has the same order.

right: set_epoch is called
wrong: it is not
right_slow, wrong_slow: the same at a tenth of the learning rate
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, BATCHES_PER_EPOCH = 16, 2

parser = argparse.ArgumentParser()
parser.add_argument(
    "variant", nargs="?", default="right", choices=["right", "wrong", "right_slow", "wrong_slow"]
)
variant = parser.parse_args().variant

dist.init_process_group("gloo")
world_size = dist.get_world_size()
generator = torch.Generator().manual_seed(7)
samples = GLOBAL_BATCH * BATCHES_PER_EPOCH
x, y = torch.randn(samples, 10, generator=generator), torch.randint(4, (samples,), generator=generator)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world_size, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if variant.endswith("slow") else 0.1)

for epoch in range(2):
    if variant.startswith("right"):
        sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
