"""Run a training script after writing its process id to $PID_DIR/pid-<rank>."""

import os
import runpy
import sys
from pathlib import Path

Path(os.environ["PID_DIR"], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
