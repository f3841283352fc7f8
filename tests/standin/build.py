"""Compile the stand-in for torch_neuronx, once, and print the folder to put on PYTHONPATH.

    PYTHONPATH=$(python tests/standin/build.py) make ddp RANKS=4 DEVICE=neuron

Half a minute on two cores, into .standin/, in a folder named after torch's version and the sources.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
VERSION = "2.14.0+standin"  # a local version, which no release has: by it results are labelled


def build() -> Path:
    """Return the folder that holds the package, compiled if need be. RuntimeError says what failed."""
    import torch
    from filelock import FileLock  # torch depends on it

    sources = sorted((HERE / "csrc").iterdir()) + sorted((HERE / "torch_neuronx").glob("*.py"))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, Path(__file__)]))
    python = sysconfig.get_config_var("SOABI")
    cache = HERE.parent.parent / ".standin"
    folder = cache / f"torch-{torch.__version__}-{python}-{content.hexdigest()[:12]}"
    cache.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            building = Path(f"{folder}.building")
            shutil.rmtree(building, ignore_errors=True)
            package = building / "torch_neuronx"
            shutil.copytree(HERE / "torch_neuronx", package, ignore=shutil.ignore_patterns("__pycache__"))
            _compile([path for path in sources if path.suffix == ".cpp"], package)
            _describe(building / f"torch_neuronx-{VERSION}.dist-info")
            building.rename(folder)
    return folder


def _compile(sources: list[Path], package: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    if not shutil.which("g++"):
        raise RuntimeError("there is no g++; install it (Debian, Ubuntu: apt install g++)")
    includes = [*include_paths(), sysconfig.get_path("include")]
    options = ["-std=c++20", "-O0", "-fPIC", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=_C"]
    options += [f"-isystem{path}" for path in includes]
    objects = [package / f"{path.stem}.o" for path in sources]
    _run_together(
        ["g++", *options, "-c", path, "-o", target] for path, target in zip(sources, objects, strict=True)
    )
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    _run_together([["g++", "-shared", *objects, *libraries, "-o", package / "_C.so"]])
    for path in objects:
        path.unlink()


def _run_together(commands) -> None:
    started = [
        subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = [process.communicate()[1] for process in started]
    for process, error in zip(started, errors, strict=True):
        if process.returncode:
            lines = [line for line in error.splitlines() if "error:" in line] or error.splitlines() or ["?"]
            raise RuntimeError(f"g++ failed: {lines[0]}")


def _describe(info: Path) -> None:
    # What pip would write: the version, and where torch.compile finds the backend.
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {VERSION}\n")
    (info / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nneuron = torch_neuronx._compile:neuron\n"
    )


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        print(build())
    except RuntimeError as error:
        print(f"error: the stand-in for torch_neuronx does not build: {error}", file=sys.stderr)
        sys.exit(2)
