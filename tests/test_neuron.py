"""The Neuron path, with the defaults of all scripts, on the stand-in for torch_neuronx.

What the stand-in computes says nothing about Neuron. It is a device as far as PyTorch is concerned, so
what these tests see is that everything is moved there, collected from there, and called by its name.
"""

import re
import shutil
import sys

import pytest
import torch
from conftest import RANKS, ROOT, STEPS, copy_run, copy_scripts, edit_all, launch, run

CHAIN = ("tp", "simplefsdp_tp")


@pytest.fixture
def device_run(standin, tmp_path):
    """Run a mode as the tutorial does, but for ranks and steps: no device, backend or compiler is named."""

    def start(mode, **environment):
        script = ["simplefsdp_tp_train.py"]
        if mode != "simplefsdp_tp":
            script = ["distributed_train.py", "--parallelism", mode]
        script[:1] = [ROOT / "tests" / "tools" / "observe.py", ROOT / script[0]]
        environment["OBSERVED"] = str(tmp_path)
        options = f"--seed 0 --steps {STEPS} --output-dir {tmp_path / mode} --expected-world-size {RANKS}"
        done = launch(RANKS, tmp_path / "logs", *script, *options.split(), **standin, **environment)
        stderr = "".join(path.read_text() for path in (tmp_path / "logs").rglob("stderr.log"))
        assert done.status == 0, done.err + stderr
        return tmp_path / mode

    return start


def test_stand_in_is_a_device_that_takes_no_mixture(standin):
    done = run(sys.executable, ROOT / "tests" / "tools" / "check_device.py", **standin)
    assert done.status == 0, done.out + done.err
    assert done.out == "39 checks passed\n"


@pytest.fixture(scope="module")
def chain(runs, standin, tmp_path_factory):
    """make tp simplefsdp-tp report on the stand-in, the CPU runs being there: folder, and make's output.

    Two modes, one for each oracle, and the others below; CI runs make all-parity on the stand-in, too.
    """
    folder = tmp_path_factory.mktemp("chain")
    copy_scripts(folder)
    settings = [f"RANKS={RANKS}", f"STEPS={STEPS}", f"PYTHON={sys.executable}", "DEVICE=neuron"]
    names = [mode.replace("_", "-") for mode in CHAIN]
    made = run("make", *settings, *(f"results/.settings-{name}" for name in names), cwd=folder, **standin)
    assert made.status == 0, made.err
    for mode, name in zip(CHAIN, names, strict=True):  # newer than the settings: make takes them for its own
        shutil.copytree(runs(mode).directory, folder / f"results/cpu-{name}", copy_function=shutil.copyfile)
    return folder, run("make", *settings, *names, "report", cwd=folder, timeout=400, **standin)


def test_chain_passes_all_links(chain):
    _, done = chain
    assert done.status == 0, done.out + done.err
    links = re.findall(r"^== (compare\S*): |^(PASS comparison) ranks=4 steps=3", done.out, re.MULTILINE)
    names = [mode.replace("_", "-") for mode in CHAIN]
    expected = [link for name in names for link in (f"compare-cpu-{name}", "PASS", f"compare-{name}", "PASS")]
    assert [name or "PASS" for name, _ in links] == expected
    assert done.out.count("== preflight for 4 ranks on the stand-in for Neuron: ") == 1
    assert "== cpu-tp: 4 ranks, 3 steps" not in done.out
    assert done.out.count("3 steps on the stand-in for Neuron with neuron") == 2


def test_chain_calls_the_stand_in_by_its_name(chain):
    folder, done = chain
    assert "the tests' stand-in, which computes on the CPU and proves nothing about Neuron" in done.out
    assert done.out.count("No accelerator was checked: the stand-in for Neuron computes on the CPU.") == 2
    assert re.search(r"step +oracle +reference cpu +actual stand-in", done.out)
    assert "device=neuron" not in done.out and "actual neuron" not in done.out
    assert re.search(r"against the oracle +cpu \(reference\) +stand-in \(actual\) +ratio\n", done.out)
    assert re.search(r"gradients +[\d.]+ eps +[\d.]+ eps +1\n", done.out)
    page = (folder / "results" / "report.html").read_text()
    assert "results/cpu-tp" in page and "results/oracle-eager" in page
    assert "stand-in for Neuron" in page and "a run on Neuron" not in page
    for name in ("tp", "simplefsdp-tp"):
        metadata = torch.load(folder / f"results/{name}/rank-3.pt", weights_only=True)["metadata"]
        labels = metadata["device"], metadata["backend"], metadata["torch_neuronx_version"]
        assert labels == ("stand-in", "neuron", "2.14.0+standin")
    assert metadata["compile_backend"] == "neuron"


def test_make_never_picks_the_stand_in_by_itself(standin):
    done = run("make", "help", f"PYTHON={sys.executable}", **standin)
    assert "DEVICE=cpu BACKEND=gloo COMPILE_BACKEND=aot_eager" in done.out


@pytest.mark.parametrize(("mode", "units"), [("fsdp", 1), ("simplefsdp_tp", 8)])
def test_rounding_of_another_device_passes(device_run, runs, compare, mode, units):
    actual = device_run(mode, STANDIN_NOISE=str(units))
    done = compare("--reference-dir", runs(mode).directory, "--actual-dir", actual, "--world-size", RANKS)
    assert done.status == 0, done.out
    # Dynamo imports the compile backend when it is asked to compile with it.
    imported = (actual.parent / "imports-3").read_text().split()
    assert ("torch_neuronx._compile" in imported) == (mode == "simplefsdp_tp")
    for kind in ("outputs", "gradients"):
        error = float(re.search(rf"^{kind} +\d+ +0 +([\d.]+) eps", done.out, re.MULTILINE)[1])
        assert 0.2 * units < error < 16


def test_error_of_one_core_in_one_step_is_located(device_run, runs, compare, oracle):
    # In step 2, rank 1's first product: the pre-activations of its part of the hidden features.
    actual = device_run("tp", STANDIN_NOISE="2", STANDIN_ERROR="2:1:0.1:aten::addmm")
    arguments = ["--actual-dir", actual, "--world-size", RANKS]
    for reference in (runs("tp").directory, oracle("eager")):
        done = compare("--reference-dir", reference, *arguments)
        assert done.status == 1
        assert "First in causal order: ranks 0-3, step 2, outputs output" in done.out


def test_error_of_one_core_in_an_update_is_located(device_run, runs, compare):
    # After the reduction, and so in one replica only.
    actual = device_run("ddp", STANDIN_ERROR="3:2:0.01:aten::add")
    done = compare("--reference-dir", runs("ddp").directory, "--actual-dir", actual, "--world-size", RANKS)
    assert done.status == 1
    assert re.search(r"First in causal order: rank 2, step 3, (parameters|deltas) ", done.out)


def test_result_of_the_stand_in_is_not_taken_for_neurons(runs, compare, tmp_path):
    actual = copy_run(runs("ddp").directory, tmp_path / "actual")
    labels = {"device": "stand-in", "torch_neuronx_version": "2.14.0+standin"}
    edit_all(actual, lambda content: content["metadata"].update(labels))
    arguments = "--reference-dir", runs("ddp").directory, "--actual-dir", actual
    done = compare(*arguments, "--world-size", RANKS)
    assert done.status == 0
    assert "No accelerator was checked: the stand-in" in done.out
