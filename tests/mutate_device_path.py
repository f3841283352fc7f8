"""Take out, one at a time, each place that moves data to the device or picks a backend: is it noticed?

    python tests/mutate_device_path.py

Each mutant runs two ranks (SimpleFSDP + TP: four) for one step on the stand-in for torch_neuronx, with the
defaults of its script, as tests/test_neuron.py does. Noticed is what ends in an error, or leaves files
that do not load on a machine without the device. Takes some minutes; no result is asserted.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import ROOT, cpu_options, launch, run
from standin.build import build

MODES = ("ddp", "fsdp", "tp", "simplefsdp_tp")
MESH = "args.device, (world_size,), mesh_dim_names="
COMMON, EAGER, SIMPLE = "training_common.py", "distributed_train.py", "simplefsdp_tp_train.py"
# file, what is there, what replaces it, modes that run it
MUTANTS = [
    (COMMON, "torch.neuron.set_device(local_rank)", "pass", "ddp"),
    (COMMON, 'importlib.import_module("torch_neuronx")', "pass", "ddp"),
    (COMMON, "return torch.device(args.device)", 'return torch.device("cpu")', "ddp"),
    (COMMON, "for record in records], device=device)", "for record in records])", "ddp"),
    (COMMON, "init_process_group(args.backend, ", "init_process_group(", "ddp fsdp"),
    (COMMON, "init_process_group(args.backend, ", 'init_process_group("gloo", ', "ddp fsdp"),
    (COMMON, "tensor.detach().cpu().clone()", "tensor.detach().clone()", "ddp"),
    (COMMON, 'if not sharded or dist.get_backend() != "gloo":', "if not sharded:", "fsdp"),
    (EAGER, "args.seed).to(device)", "args.seed)", "ddp"),
    (EAGER, "args.seed).to(device)", "args.seed)", "fsdp"),
    (EAGER, "args.seed).to(device)", "args.seed)", "tp"),
    (EAGER, "batch.to(device)", "batch", "ddp"),
    (EAGER, "batch.to(device)", "batch", "fsdp"),
    (EAGER, "batch.to(device)", "batch", "tp"),
    (EAGER, "target.to(device)", "target", "ddp"),
    (EAGER, MESH + '("dp"', MESH.replace("args.device", "'cpu'") + '("dp"', "fsdp"),
    (EAGER, MESH + '("tp"', MESH.replace("args.device", "'cpu'") + '("tp"', "tp"),
    (SIMPLE, "args.seed).to(device)", "args.seed)", "simplefsdp_tp"),
    (SIMPLE, "[dp_rank].to(device)\n            target", "[dp_rank]\n            target", "simplefsdp_tp"),
    (SIMPLE, "target.chunk(dp_degree)[dp_rank].to(device)", "target.chunk(dp_degree)[dp_rank]", MODES[3]),
    (SIMPLE, "init_device_mesh(args.device", 'init_device_mesh("cpu"', "simplefsdp_tp"),
    (SIMPLE, "backend=args.compile_backend, ", "", "simplefsdp_tp"),
    (SIMPLE, "backend=args.compile_backend, ", 'backend="aot_eager", ', "simplefsdp_tp"),
    (COMMON, 'DEVICE_TYPE = "neuron"', 'DEVICE_TYPE = "cpu"', "ddp"),
    (COMMON, 'PROCESS_GROUP_BACKEND = "neuron"', 'PROCESS_GROUP_BACKEND = "gloo"', "ddp"),
    (SIMPLE, 'COMPILE_BACKEND = "neuron"', 'COMPILE_BACKEND = "aot_eager"', "simplefsdp_tp"),
]  # fmt: skip


def run_mutant(folder: Path, mode: str, path: str) -> str | None:
    """Run a mode in a folder of scripts; return what went wrong, None if nothing did."""
    ranks = 4 if mode == "simplefsdp_tp" else 2
    script = [SIMPLE] if mode == "simplefsdp_tp" else [EAGER, "--parallelism", mode]
    script = [ROOT / "tests" / "observe.py", folder / script[0], *script[1:]]
    options = cpu_options(ranks, folder / "results", steps=1)[4:]  # without device and backend
    environment = {"PYTHONPATH": path, "OBSERVED": str(folder)}
    try:
        done = launch(ranks, folder / "logs", *script, *options, timeout=60, **environment)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.status:
        return done.err.splitlines()[-1].partition("failed first: ")[2].partition("; its log")[0][:90]
    load = f"import torch; c = torch.load('{folder}/results/rank-0.pt', weights_only=True)"
    wanted = "('stand-in', 'neuron')"
    load += (
        f"; m = c['metadata']; assert (m['device'], m['backend']) == {wanted}, (m['device'], m['backend'])"
    )
    done = run(sys.executable, "-c", load)
    if done.status:
        return f"its file: {done.err.splitlines()[-1][:80]}"
    compiled = "torch_neuronx._compile" in (folder / "imports-0").read_text().split()
    return "not compiled with neuron" if mode == "simplefsdp_tp" and not compiled else None


def main() -> None:
    """Run all mutants, after one run of each mode without a change, and print the table."""
    path = str(build())
    unchanged = [(COMMON, "", "", mode) for mode in MODES]
    for file, old, new, modes in [*unchanged, *MUTANTS]:
        for mode in modes.split():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                for script in (COMMON, EAGER, SIMPLE):
                    shutil.copy(ROOT / script, folder)
                text = (folder / file).read_text()
                if text.count(old) != 1 and old:
                    raise SystemExit(f"error: {file} has {text.count(old)} times, not once: {old}")
                if old:
                    (folder / file).write_text(text.replace(old, new))
                what = (
                    f"{old.splitlines()[0]} -> {new.splitlines()[0] or '(nothing)'}"
                    if new
                    else old or "no change"
                )
                found = run_mutant(folder, mode, path)
                print(f"{mode:14}{file:24}{what[:70]:72}{found or 'NOT NOTICED'}", flush=True)


if __name__ == "__main__":
    main()
