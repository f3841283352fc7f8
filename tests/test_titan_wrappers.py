"""titan/*.sh: the tutorial's commands word for word, their guards, and that they start what they print.

A checkout of torchtitan-neuron is played by a folder whose run_train.sh writes down what it was given and
prints a log as TorchTitan does; neuron-ls and neuron-monitor are scripts that print their JSON.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ENVIRONMENT, ROOT, run

sys.path.insert(0, str(ROOT / "titan"))
import check_run  # noqa: E402
import parity  # noqa: E402
import parity_full  # noqa: E402
import predict_memory  # noqa: E402

GRAPH_TRAINER = "torchtitan_neuron.experiments.graph_trainer"
LAYOUT = "--parallelism.tensor_parallel_degree=4 --parallelism.data_parallel_shard_degree=-1"
DEEPSEEK = "simple_fsdp_deepseek_v3_16b_nki_tp4_fsdp16"
DEEPSEEK_ASSETS = "--hf_assets_path=./assets/hf/deepseek-moe-16b-base"
DOWNLOAD = "python scripts/download_hf_assets.py --repo_id"
# The commands as the tutorial has them, line breaks aside.
TUTORIAL = {
    "llama_fsdp64": f"NGPU=64 MODULE={GRAPH_TRAINER}.llama3 CONFIG=simple_fsdp_llama3_8b_fullac "
    "./run_train.sh --training.steps 10 --dataloader.dataset c4_test "
    "--hf_assets_path=./tests/assets/tokenizer",
    "deepseek_tp4_fsdp16": f"NGPU=64 MODULE={GRAPH_TRAINER}.deepseek_v3 CONFIG={DEEPSEEK} ./run_train.sh "
    "--training.steps 10 --dataloader.dataset c4_test",
    "llama_c4_tp4_fsdp16_selective": f"NGPU=64 MODULE={GRAPH_TRAINER}.llama3 CONFIG=simple_fsdp_llama3_8b "
    f"./run_train.sh --training.global_batch_size 64 --dataloader.dataset c4 {LAYOUT}",
    "llama_c4_tp4_fsdp16_full": f"NGPU=64 MODULE={GRAPH_TRAINER}.llama3 CONFIG=simple_fsdp_llama3_8b_fullac "
    f"./run_train.sh --training.global_batch_size 64 --dataloader.dataset c4 {LAYOUT}",
    "deepseek_c4_tp4_fsdp16_selective": f"NGPU=64 MODULE={GRAPH_TRAINER}.deepseek_v3 CONFIG={DEEPSEEK} "
    f"./run_train.sh --dataloader.dataset c4 {DEEPSEEK_ASSETS}",
    "deepseek_c4_tp4_fsdp16_full": f"NGPU=64 MODULE={GRAPH_TRAINER}.deepseek_v3 CONFIG={DEEPSEEK}_fac "
    f"./run_train.sh --dataloader.dataset c4 {DEEPSEEK_ASSETS}",
    "download_tokenizers": f"{DOWNLOAD} meta-llama/Llama-3.1-8B --assets tokenizer --hf_token=$HF_TOKEN "
    f"{DOWNLOAD} deepseek-ai/deepseek-moe-16b-base --assets tokenizer",
}
README = (ROOT / "titan/README.md").read_text()
COMMANDS = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).splitlines()
LLAMA = "titan/llama_fsdp64.sh"
SELECTIVE = "titan/llama_c4_tp4_fsdp16_selective.sh"
NODE = [
    {"neuron_device": i, "nc_count": 4, "neuroncore_ids": list(range(4 * i, 4 * i + 4))} for i in range(16)
]
RUN_TRAIN = """#!/usr/bin/env bash
echo "$PWD|$NGPU|$MODULE|$CONFIG|$*" > called
stamp() { echo "[rank0]:[titan] 2026-11-29 10:00:$1,000 - root - INFO - $2"; }
stamp 00 "Trainer is initialized with local batch size 1, total steps 3 (warmup 2)"
stamp 00 "Training starts at step 1"
stamp 30 "step:  1  loss: 12.00000  grad_norm:  1.0000  memory: 11.91GiB(49.63%)  tps: 10"
stamp 32 "step:  2  loss: 11.50000  grad_norm:  1.0000  memory: 11.91GiB(49.63%)  tps: 100"
stamp 34 "step:  3  loss: 11.00000  grad_norm:  1.0000  memory: 11.91GiB(49.63%)  tps: 100"
[ -e fail ] && exit 3
stamp 36 "Training completed"
"""
DOWNLOADER = """import pathlib, sys
word = dict(zip(sys.argv[1::2], sys.argv[2::2]))["--repo_id"]
pathlib.Path("downloads").open("a").write(" ".join(sys.argv[1:]) + "\\n")
if pathlib.Path("fail").exists():
    sys.exit(pathlib.Path("fail").read_text() or "401 Client Error: Unauthorized")
folder = pathlib.Path("assets/hf") / word.split("/")[1]
folder.mkdir(parents=True, exist_ok=True)
if not pathlib.Path("no-match").exists():
    (folder / "tokenizer.json").write_text("{}")
"""


def words(text: str) -> list[str]:
    return [word for word in shlex.split(text) if word != "\n"]


@pytest.fixture
def node(tmp_path):
    """A Neuron node as far as the wrappers see it: .checkout, .environment, .tool(name, text)."""
    checkout, tools = tmp_path / "torchtitan-neuron", tmp_path / "bin"
    for folder in (checkout / "scripts", checkout / "tests/assets/tokenizer", tools):
        folder.mkdir(parents=True)
    (checkout / "tests/assets/tokenizer/tokenizer.json").write_text("{}")
    (checkout / "scripts/download_hf_assets.py").write_text(DOWNLOADER)

    def tool(name: str, text: str) -> None:
        path = tools / name
        path.write_text(text)
        path.chmod(0o755)

    tool("neuron-ls", f"#!/bin/sh\ncat <<'END'\n{json.dumps(NODE)}\nEND\n")
    tool("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (checkout / "run_train.sh").write_text(RUN_TRAIN)
    (checkout / "run_train.sh").chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "TORCHTITAN_NEURON_DIR": str(checkout),
        "RESULTS": str(tmp_path / "results"),
        "PYTHON": sys.executable,
    }
    log = tmp_path / "results/titan/llama_fsdp64.log"
    return SimpleNamespace(checkout=checkout, environment=environment, tool=tool, log=log)


@pytest.mark.parametrize("name", TUTORIAL)
def test_dry_run_is_the_tutorials_command(name):
    result = run(ROOT / f"titan/{name}.sh", "--dry-run", DEVICE="neuron")
    assert result.status == 0, result.err
    assert words(result.out) == words(TUTORIAL[name])


def test_every_wrapper_is_in_the_list_above():
    wrappers = {path.stem for path in (ROOT / "titan").glob("*.sh")} - {"launch"}
    assert wrappers == set(TUTORIAL)


def test_dry_run_elsewhere_shows_both_commands(tmp_path):
    result = run(ROOT / LLAMA, "--dry-run", "--metrics.log_freq", "5", PATH="/usr/bin:/bin")
    here, neuron = result.out.split("# on a Neuron node, in the torchtitan-neuron directory:\n")
    assert here.startswith("# here, on the cpu, at debug size:\n")
    assert "titan/train.py --module titan.llama3 --config simple_fsdp_llama3_debugmodel_fullac" in " ".join(
        words(here)
    )
    assert words(neuron) == [*words(TUTORIAL["llama_fsdp64"]), "--metrics.log_freq", "5"]


def test_variables_and_more_options():
    variables = {"NGPU": "32", "MODULE": "my.recipes", "CONFIG": "mine", "STEPS": "7"}
    result = run(ROOT / LLAMA, "--dry-run", "--a.b=c d", DEVICE="neuron", **variables)
    assert words(result.out)[:4] == ["NGPU=32", "MODULE=my.recipes", "CONFIG=mine", "./run_train.sh"]
    assert "--training.steps 7" in result.out
    assert words(result.out)[-1] == "--a.b=c d"
    result = run(ROOT / SELECTIVE, "--dry-run", DEVICE="neuron", STEPS="500")
    assert words(result.out)[-2:] == ["--training.steps", "500"]


def test_own_data_is_not_overridden_elsewhere():
    result = run(ROOT / LLAMA, "--dry-run", "--dataloader.dataset=c4", DEVICE="cpu")
    assert ".titan/c4_test" not in result.out


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--compile.mode", "aot_fx_trace"], {}, "--compile.mode is 'aot_fx_trace': SimpleFSDP on Neuron"),
        (["--compile.mode=aot_fx_trace"], {"DEVICE": "cpu"}, "supports jit only"),
        ([], {"MODULE": "llama3"}, "MODULE is 'llama3', a short name, which resolves to upstream's recipes"),
        ([], {"CONFIG": "simple_fsdp_llama3_8b"}, "runs out of memory on 24 GiB cores: take CONFIG="),
        (
            ["--parallelism.tensor-parallel-degree", "1"],
            {"CONFIG": "simple_fsdp_llama3_8b"},
            "--parallelism.tensor_parallel_degree=4",
        ),
        ([], {"NGPU": "all"}, "NGPU is 'all': give a number of ranks, 1 or more"),
        ([], {"NGPU": "0"}, "NGPU is '0'"),
        ([], {"STEPS": "-1"}, "STEPS is '-1': give a number of steps"),
        (["--compile.mode="], {}, "--compile.mode is ''"),
        (["--compile.mode", "jit", "--compile.mode"], {}, "--compile.mode is ''"),
        (["--compile-mode", "x", "--compile.mode", "none"], {}, "--compile.mode is 'none'"),
        (["--module", "llama3"], {}, "--module is 'llama3': set it as MODULE=llama3, which is checked"),
        (["--config=simple_fsdp_llama3_8b"], {}, "set it as CONFIG=simple_fsdp_llama3_8b"),
        (["--parallelism.tensor_parallel_degree=two"], {}, "degree is 'two': give a number"),
        ([], {"NGPU": "00"}, "NGPU is '00'"),
        ([], {"STEPS": "00"}, "STEPS is '00'"),
        ([], {"DEVICE": "tpu"}, "DEVICE is 'tpu': neuron, cuda or cpu"),
    ],
)
def test_arguments_are_refused(options, environment, said):
    result = run(ROOT / LLAMA, "--dry-run", *options, **{"DEVICE": "neuron"} | environment)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert said in result.err
    assert result.err.count("\n") == 1


def test_jit_and_tensor_parallelism_are_taken():
    assert run(ROOT / LLAMA, "--dry-run", "--compile.mode", "jit", DEVICE="neuron").status == 0
    options = ["--dry-run", "--parallelism.tensor_parallel_degree", "2"]
    assert run(ROOT / LLAMA, *options, DEVICE="neuron", CONFIG="simple_fsdp_llama3_8b").status == 0


def test_other_devices_have_more_memory():
    assert run(ROOT / LLAMA, "--dry-run", DEVICE="cuda", CONFIG="simple_fsdp_llama3_8b").status == 0


def test_printed_command_can_be_pasted(tmp_path):
    python = tmp_path / "my dir" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    result = run(ROOT / LLAMA, "--dry-run", DEVICE="cpu", PYTHON=str(python), CONFIG="a b")
    assert f"'{python}' launch.py" in result.out
    assert "--config 'a b'" in result.out
    assert words(result.out)[:6] == [
        "cd",
        str(ROOT),
        str(python),
        "titan/make_assets.py",
        "--output",
        ".titan",
    ]
    assert "TITAN_DEVICE=cpu" in result.out
    assert "CONFIG='a b'" in run(ROOT / LLAMA, "--dry-run", DEVICE="neuron", CONFIG="a b").out


def test_from_another_directory_with_relative_paths(node, tmp_path):
    environment = node.environment | {"TORCHTITAN_NEURON_DIR": node.checkout.name, "CDPATH": str(tmp_path)}
    assert run(ROOT / LLAMA, cwd=tmp_path, **environment).status == 0


def test_help_is_the_wrappers_own_with_the_variables():
    result = run(ROOT / LLAMA, "--help", DEVICE="cpu")
    assert result.status == 0
    assert result.out.startswith("Step 1: Llama 3.1 8B, full activation checkpointing")
    variables = re.findall(r"^    ([A-Z_]+(?:, [A-Z]+)?)  ", result.out, re.MULTILINE)
    in_readme = re.findall(r"^\| (`[A-Z_`, ]+`) \|", README, re.MULTILINE)
    assert sorted(", ".join(variables).split(", ")) == sorted(" ".join(in_readme).replace("`", "").split())
    result = run(ROOT / "titan/download_tokenizers.sh", "--help")
    assert result.status == 0 and result.out.startswith("Step 3: download the tokenizers")
    assert "HF_TOKEN  " in result.out and "NGPU" not in result.out


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("401 Client Error: Unauthorized for url", "pass a valid HF_TOKEN, and see that your account"),
        ("Access to model meta-llama/Llama-3.1-8B is restricted", "pass a valid HF_TOKEN"),
        ("Max retries exceeded: Failed to resolve 'hub'", "the Hugging Face Hub cannot be reached"),
        ("httpx.ConnectError: [Errno 101] Network is unreachable", "the Hugging Face Hub cannot be reached"),
        ("OSError: [Errno 28] No space left on device", "its messages are above"),
    ],
)
def test_why_a_download_failed(node, message, reason):
    (node.checkout / "fail").write_text(message)
    result = run(ROOT / "titan/download_tokenizers.sh", "llama", HF_TOKEN="x", **node.environment)
    assert result.status == 1
    assert message in result.out
    assert result.err.startswith(f"error: the download of meta-llama/Llama-3.1-8B failed: {reason}")


TRAINS = "({}; echo $BASHPID > train.pid; sleep 100); [ -e fail ]"


def start(node, trap="true"):
    """Start a wrapper whose training goes on for long; return when it trains. trap: what it does first."""
    node.tool("neuron-monitor", '#!/bin/sh\necho $$ > "$RESULTS/monitor.pid"\nexec sleep 100\n')
    script = RUN_TRAIN.replace("[ -e fail ]", TRAINS.format(trap))
    (node.checkout / "run_train.sh").write_text(script)
    wrapper = subprocess.Popen(
        [ROOT / LLAMA],
        env=ENVIRONMENT | node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would all that these tests start there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while not (node.checkout / "train.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return wrapper


@pytest.mark.parametrize(("name", "stop"), [("SIGINT", os.killpg), ("SIGINT", os.kill), ("SIGTERM", os.kill)])
def test_a_stopped_wrapper_leaves_nothing_and_is_no_failure(node, name, stop):
    """Ctrl-C goes to the whole foreground group, as from a terminal; kill to the wrapper alone."""
    wrapper = start(node, "trap '' TERM" if name == "SIGTERM" else "true")  # one has to be killed
    stop(wrapper.pid, getattr(signal, name))
    out, err = wrapper.communicate(timeout=30)
    assert f"== llama_fsdp64: stopped by {name}, ending " in err
    assert "--   all steps done         stopped on request after step 3 of 3" in out
    assert "ok   no rank died" in out
    deadline = time.monotonic() + 10
    for pid_file in (node.checkout / "train.pid", node.log.parents[1] / "monitor.pid"):
        pid = int(pid_file.read_text())
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}").exists(), pid_file


def test_a_results_folder_has_one_run_at_a_time(node):
    wrapper = start(node)
    other = run(ROOT / LLAMA, **node.environment)
    assert other.status == 2
    in_use = f"error: {node.log.parents[1]} is in use: process {wrapper.pid}, llama_fsdp64, started "
    assert re.fullmatch(rf"{in_use}[-\d]+ [:\d]+; wait for it, or set another RESULTS\n", other.err)
    wrapper.kill()  # what it started goes on, and has the folder
    assert run(ROOT / LLAMA, **node.environment).status == 2
    os.kill(int((node.checkout / "train.pid").read_text()), signal.SIGKILL)
    wrapper.communicate(timeout=30)
    (node.checkout / "run_train.sh").write_text(RUN_TRAIN)
    assert run(ROOT / LLAMA, **node.environment).status == 0
    assert len(list(node.log.parent.glob("llama_fsdp64-*.log"))) == 2  # each run has a log of its own


def test_status_of_the_check(node):
    (node.checkout / "run_train.sh").write_text("#!/bin/sh\nexit 0\n")
    result = run(ROOT / LLAMA, **node.environment)
    assert result.status == 2
    assert "is empty" in result.err


def test_run_on_neuron_starts_what_the_tutorial_starts(node):
    node.tool(
        "neuron-monitor",
        """#!/bin/sh
echo '{"neuron_runtime_data": [{"report": {"neuroncore_counters": {"neuroncores_in_use":
{"0": {"neuroncore_utilization": 93.5}, "1": {"neuroncore_utilization": 0}}}}}]}' | tr -d '\\n'
echo
exec sleep 100
""",
    )
    result = run(ROOT / LLAMA, "--metrics.log_freq", "1", **node.environment)
    assert result.status == 0, result.out + result.err
    called = (node.checkout / "called").read_text().strip().split("|")
    tutorial = words(TUTORIAL["llama_fsdp64"])
    assert called[0] == str(node.checkout)
    assert called[1:4] == [word.partition("=")[2] for word in tutorial[:3]]
    assert words(called[4]) == [*tutorial[4:], "--metrics.log_freq", "1"]
    assert node.log.read_text() in result.out
    assert "ok   NeuronCores in use     1 cores, in 1 reports of neuron-monitor" in result.out
    assert f"PASS {node.log.resolve()}: steps=3, last loss 11.00000" in result.out
    for said in ("does not mask document boundaries", "jit is deprecated", "first step traces", "NEFF_CACHE"):
        assert said in result.err


TORCHRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > torchrun-got
mkdir -p "$RECORD" && touch "$RECORD/rank-0.pt"
"""
STARTS_TORCHRUN = 'torchrun --nproc_per_node=$NGPU --tee 3 -m vendor.train --module $MODULE "$@"\n[ -e fail ]'


@pytest.mark.parametrize(
    ("device", "options", "steps"),
    [("cpu", [], "3"), ("cpu", ["--training.steps=2"], "2"), ("cuda", [], "3")],
)
def test_dry_run_of_a_recorded_run(tmp_path, device, options, steps):
    result = run(ROOT / LLAMA, "--dry-run", *options, cwd=tmp_path, DEVICE=device, RECORD="a dir")
    assert result.status == 0, result.err
    recorder = f"record_training.py --output-dir '{tmp_path}/a dir' --steps {steps} --afterwards continue"
    start = words(result.out).index(str(ROOT / "record_training.py"))
    assert words(result.out)[start + 1 : start + 8] == [*words(recorder)[1:], "titan/train.py"]
    plain = run(ROOT / LLAMA, "--dry-run", *options, DEVICE=device)
    assert words(plain.out) == words(result.out)[:start] + words(result.out)[start + 7 :]


def test_dry_run_of_a_recorded_run_on_neuron():
    result = run(ROOT / LLAMA, "--dry-run", DEVICE="neuron", STEPS="1", RECORD="/x")
    recorder = ["RECORD=/x", "RECORD_STEPS=1", str(ROOT / "titan/record/run")]
    tutorial = words(TUTORIAL["llama_fsdp64"].replace("steps 10", "steps 1"))
    assert words(result.out) == [*tutorial[:3], *recorder, *tutorial[3:]]


def test_recorded_run_on_neuron_records_what_the_vendors_script_starts(node, tmp_path):
    node.tool("torchrun", TORCHRUN)
    (node.checkout / "run_train.sh").write_text(RUN_TRAIN.replace("[ -e fail ]", STARTS_TORCHRUN))
    environment = node.environment | {"RECORD": str(tmp_path / "recorded")}
    result = run(ROOT / LLAMA, **environment)
    assert result.status == 0, result.out + result.err
    got = (node.checkout / "torchrun-got").read_text().splitlines()
    assert got[:3] == ["--nproc_per_node=64", "--tee", "3"]
    recorder = Path(got[3])
    assert recorder.resolve() == ROOT / "record_training.py"
    options = ["--output-dir", environment["RECORD"], "--steps", "3", "--afterwards", "continue"]
    module = ["-m", "vendor.train", "--module", f"{GRAPH_TRAINER}.llama3"]
    assert got[4:] == [*options, *module, *words(TUTORIAL["llama_fsdp64"])[4:]]


def test_recorded_run_on_neuron_that_recorded_nothing(node, tmp_path):
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded/rank-0.pt").touch()  # of an earlier run
    result = run(ROOT / LLAMA, **node.environment, RECORD=str(tmp_path / "recorded"))
    assert result.status == 2
    assert f"error: nothing was recorded in {tmp_path / 'recorded'}: run_train.sh has not" in result.err


@pytest.mark.parametrize(
    ("given", "started"), [("--module a.b --x y", "-m a.b --x y"), ("train.py -m 1", "train.py -m 1")]
)
def test_other_ways_to_name_what_torchrun_starts(tmp_path, given, started):
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    command = [ROOT / "titan/record/run", "torchrun", "--tee", "3", *given.split()]
    result = run(*command, PATH=path, RECORD="x", RECORD_STEPS="2")
    recorder = f"{ROOT}/titan/record/../../record_training.py"
    assert result.out == f"--tee 3 {recorder} --output-dir x --steps 2 --afterwards continue {started}\n"


def test_failed_run_on_neuron_fails(node):
    (node.checkout / "fail").touch()
    result = run(ROOT / LLAMA, **node.environment)
    assert result.status == 3
    assert "FAIL all steps done" in result.out


def test_full_run_says_what_it_costs(node):
    assets = node.checkout / "assets/hf/Llama-3.1-8B"
    assets.mkdir(parents=True)
    (assets / "tokenizer.json").write_text("{}")
    result = run(ROOT / SELECTIVE, **node.environment)
    assert "the instance bills: stop it with Ctrl-C" in result.err


@pytest.mark.parametrize(
    ("wrapper", "environment", "change", "said"),
    [
        (LLAMA, {"TORCHTITAN_NEURON_DIR": ""}, None, "TORCHTITAN_NEURON_DIR is not set"),
        (LLAMA, {"TORCHTITAN_NEURON_DIR": "/nowhere"}, None, "no run_train.sh in TORCHTITAN_NEURON_DIR"),
        (
            LLAMA,
            {},
            ("../torchtitan-neuron/tests/assets/tokenizer/tokenizer.json", ""),
            "no tokenizer in ./tests/assets",
        ),
        (LLAMA, {"NGPU": "32"}, None, "NGPU is 32, neuron-ls lists 64 cores: a run of another number hangs"),
        (
            LLAMA,
            {},
            ("neuron-ls", "#!/bin/sh\necho no driver\n"),
            "error: NGPU=64 cannot be checked: neuron-ls: printed no list of devices but: no driver",
        ),
        (SELECTIVE, {}, None, "no tokenizer in ./assets/hf/Llama-3.1-8B"),
        ("titan/deepseek_c4_tp4_fsdp16_full.sh", {}, None, "run titan/download_tokenizers.sh"),
    ],
)
def test_neuron_machine_is_checked(node, wrapper, environment, change, said):
    if change:
        node.tool(*change)
    result = run(ROOT / wrapper, **node.environment | environment)
    assert result.status == 2
    assert said in result.err
    assert not (node.checkout / "called").exists()


def test_elsewhere_torchtitan_is_needed(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    result = run(ROOT / LLAMA, DEVICE="cpu", PYTHON=str(python))
    assert result.status == 2
    assert "has no torchtitan: " in result.err


def test_download(node):
    result = run(ROOT / "titan/download_tokenizers.sh", HF_TOKEN="hf_secret", **node.environment)
    assert result.status == 0, result.err
    llama, deepseek = (node.checkout / "downloads").read_text().splitlines()
    assert llama == "--repo_id meta-llama/Llama-3.1-8B --assets tokenizer --hf_token=hf_secret"
    assert deepseek == "--repo_id deepseek-ai/deepseek-moe-16b-base --assets tokenizer"


def test_dry_run_does_not_print_the_token():
    result = run(ROOT / "titan/download_tokenizers.sh", "--dry-run", HF_TOKEN="hf_secret")
    assert "hf_secret" not in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "environment", "marker", "status", "said"),
    [
        ([], {}, None, 2, "HF_TOKEN is not set, and meta-llama/Llama-3.1-8B is gated"),
        (["deepseek"], {}, None, 0, ""),
        (["deepseek"], {}, "no-match", 1, "matched no tokenizer file"),
        (["llama"], {"HF_TOKEN": "x"}, "fail", 1, "your account has been granted access"),
        (["mistral"], {}, None, 2, "'mistral' is unknown: --dry-run, llama or deepseek"),
        (["deepseek"], {"TORCHTITAN_NEURON_DIR": ""}, None, 2, "TORCHTITAN_NEURON_DIR is not set"),
        (["deepseek"], {"TORCHTITAN_NEURON_DIR": "/nowhere"}, None, 2, "no scripts/download_hf_assets.py in"),
    ],
)
def test_download_guards(node, arguments, environment, marker, status, said):
    if marker:
        (node.checkout / marker).touch()
    shutil.rmtree(node.checkout / "assets", ignore_errors=True)
    environment = {"HF_TOKEN": ""} | node.environment | environment
    result = run(ROOT / "titan/download_tokenizers.sh", *arguments, **environment)
    assert result.status == status, result.err
    assert said in result.err


def test_readme_lists_every_file_and_wrapper():
    named = set(re.findall(r"`(\w+\.(?:py|sh))`", re.search(r"\| file \|.*?\n\n", README, re.DOTALL)[0]))
    assert named == {path.name for path in (ROOT / "titan").iterdir() if path.suffix in (".py", ".sh")}
    started = {command for command in COMMANDS if command.startswith("titan/")}
    assert started == {f"titan/{name}.sh" for name in TUTORIAL}
    words = {command.split()[0] for command in COMMANDS if not command.startswith("RECORD=")}
    assert words == {"make", "python", "export"} | started
    assert "`record/run` `record/torchrun`" in README


@pytest.mark.parametrize("command", re.findall(r"`(make [^`]+|[A-Z]+=\w+ titan/[^`]+)`", README) + COMMANDS)
def test_readme_command(command, call, monkeypatch, tmp_path):
    """make and wrappers as dry runs, scripts with the files they would find; CI runs make's for real."""
    words = shlex.split(command)
    if words[0] == "make":
        assert run("make", "-n", f"PYTHON={sys.executable}", *words[1:]).status == 0
    elif "compare_training.py" in words:
        recorded = {word for other in COMMANDS for word in other.split() if word.startswith("RECORD=")}
        assert recorded == {f"RECORD={words[3]}", f"RECORD={words[5]}"}
    elif "titan/check_run.py" in words:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "results/titan").mkdir(parents=True)
        log = (
            line.partition('"')[2].rstrip('"')
            for line in RUN_TRAIN.splitlines()
            if line.startswith("stamp 3")
        )
        (tmp_path / words[2]).write_text("\n".join(log).replace("tps: 100", "tps: 1000"))
        assert call(check_run.main, *words[2:], *([] if "--stopped" in words else ["--steps", 3])).status == 0
    elif "titan/parity.py" in words:
        called = []
        monkeypatch.setattr(parity, "report", lambda *paths, **title: called.append(paths) or 0)
        monkeypatch.setattr(parity, "train", lambda family, args: tmp_path)
        assert call(parity.main, *words[2:]).status == 0
        assert len(called) == (1 if "--compare" in words else 3)
    elif "titan/parity_full.py" in words:
        called = []
        monkeypatch.setattr(parity_full, "check", lambda *options: called.append(options[:2]) or 0)
        assert call(parity_full.main, *words[2:]).status == 0
        assert called == [("llama3", "float32")]
    elif "preflight.py" in words:
        result = run(sys.executable, ROOT / words[1], *words[2:], cwd=tmp_path)
        assert result.status in (0, 1) and "neuron" in result.out  # 1 where there are no NeuronCores
    elif "titan/predict_memory.py" in words:
        prediction = predict_memory.Prediction(
            lower=1.0,
            upper=2.0,
            static=0.5,
            phases={"lower": {}, "upper": {}},
            where={"lower": "loss", "upper": "loss"},
            largest={},
            measured_layers=4,
            layers=32,
            sequence=8192,
            batch=1,
        )
        (tmp_path / "results").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(predict_memory, "version", lambda package: "1")
        monkeypatch.setattr(predict_memory, "predict", lambda layout, results: prediction)
        assert call(predict_memory.main, *words[2:]).status == 0
    elif "titan/train.py" in words:  # the wrapper's own, but for its logs
        here = words_of_dry_run(DEVICE="cpu")
        assert words[words.index("--module") :][:-1] == here[here.index("--module") :][:-1]
    elif words[0] != "export":
        result = run(
            "bash", "-c", command if "--dry-run" in command else f"{command} --dry-run", DEVICE="cpu"
        )
        assert result.status == 0, result.err


def words_of_dry_run(**environment) -> list[str]:
    return words(run(ROOT / LLAMA, "--dry-run", **environment).out)
