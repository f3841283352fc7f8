"""torchtitan.train on any device.

    python launch.py --standalone --nproc-per-node=4 titan/train.py \\
        --module titan.llama3 --config simple_fsdp_llama3_debugmodel_fullac ...

All options are torchtitan.train's own. What is added: a CPU where there is no accelerator, and this
repository on the module path, so that --module finds titan.llama3 and titan.deepseek_v3.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from titan import cpu_adapter  # noqa: E402

cpu_adapter.adapt()

from torchtitan.train import main  # noqa: E402

if __name__ == "__main__":
    main()
