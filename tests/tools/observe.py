"""Run a training script and write down its process id and the modules of torch that it imported itself.

launch.py ... tests/tools/observe.py SCRIPT OPTIONS..., with OBSERVED naming a folder, gives
pid-<rank> at the start and imports-<rank> at the end.
"""

import os
import re
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
    new = sorted(name for name in set(sys.modules) - before if re.match(r"torch(_neuronx)?\b", name))
    (folder / f"imports-{rank}").write_text("\n".join(new))
