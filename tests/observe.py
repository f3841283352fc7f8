"""Run a training script and write down its process id and the torch modules that it imported itself.

launch.py ... tests/observe.py SCRIPT OPTIONS..., with OBSERVED naming a folder, gives
pid-<rank> at the start and imports-<rank> at the end.
"""

import os
import runpy
import sys
from pathlib import Path

folder, rank = Path(os.environ["OBSERVED"]), os.environ["RANK"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
before = set(sys.modules)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    new = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "torch")
    (folder / f"imports-{rank}").write_text("\n".join(new))
