"""Run a training script and write down which torch modules it imported that were not there before.

launch.py ... tests/list_imports.py SCRIPT OPTIONS..., with IMPORTS_DIR set.
"""

import os
import runpy
import sys
from pathlib import Path

before = set(sys.modules)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    new = sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "torch")
    Path(os.environ["IMPORTS_DIR"], f"imports-{os.environ['RANK']}").write_text("\n".join(new))
