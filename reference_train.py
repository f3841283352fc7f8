"""Make the CPU reference: distributed_train.py, which has to lie beside it, with CPU/Gloo defaults.

torchrun --standalone --nproc-per-node=64 reference_train.py --parallelism ddp --output-dir results/cpu-ddp
"""

from distributed_train import main
from training_common import run_script

if __name__ == "__main__":
    run_script(lambda: main(default_device="cpu", default_backend="gloo"))
