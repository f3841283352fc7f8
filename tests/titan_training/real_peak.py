"""The predicted peak of a training step beside the one that PyTorch's CPU allocator sees, on real tensors.

    python tests/titan_training/real_peak.py LAYOUT        as for titan/measure_memory.py

Prints a JSON object: for each checkpointing and bound the predicted peak, the allocator's, and the bytes of
parameters, buffers, gradients and optimizer state.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch  # noqa: E402

from titan import measure_memory  # noqa: E402, adapts to the CPU


def resident_bytes(job: measure_memory.Job) -> int:
    """Return the bytes of all that stays from step to step."""
    tensors = [*job.model.parameters(), *job.model.buffers(), *job.gradients()]
    for state in job.optimizer.state.values():
        tensors += state.values()
    storages = [measure_memory.local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def real_peak(layout: dict, bound: str) -> tuple[int, int]:
    """Return the most bytes that the allocator holds in a step, and what stays from step to step."""
    job = measure_memory.Job(layout, 2)
    job.allocate()
    job.choose(bound)
    with torch.no_grad():
        for parameter in job.model.parameters():
            measure_memory.local(parameter).normal_(std=0.02)
    for _ in range(2):
        job.step()
    peak = live = static = resident_bytes(job)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        job.step()
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, static


def main() -> None:
    """Measure both peaks, for each checkpointing."""
    layout = json.loads(sys.argv[1])
    measure_memory.dist_utils.init_fake_mode(layout["ranks"])
    figures = {}
    for checkpointing in ("none", "selective", "full"):
        layout["checkpointing"] = checkpointing
        (measured,) = measure_memory.measure(layout | {"layers": [2]})
        for bound in measure_memory.BOUNDS:
            predicted = max(phase["bytes"] for phase in measured[bound].values())
            figures[f"{checkpointing} {bound}"] = [predicted, *real_peak(layout, bound)]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
