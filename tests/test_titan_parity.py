"""titan/parity.py on records made here: what is compared, what is refused, and by which tolerance."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "titan"))
import parity  # noqa: E402
import parity_full  # noqa: E402


def record(steps=2, experts=False, **options) -> dict:
    """Return a record as parity_train.py writes it, of three parameters."""
    generator = torch.Generator().manual_seed(0)
    records = []
    for _ in range(steps):
        gradients = {name: torch.randn(8, 4, generator=generator) for name in ("w1", "w2", "norm")}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        counts = {"layers.1.moe.tokens_per_expert_E": torch.tensor([400.0, 300.0, 324.0])} if experts else {}
        records.append({"loss": 8.0, "grad_norm": norm, "gradients": gradients, "tokens_per_expert": counts})
    job = {"family": "llama3", "seed": 42, "steps": steps, "world_size": 1, "tp": 1, "replicate": 1}
    return job | {"tokens": 1024, "records": records} | options


@pytest.fixture
def compare(call, tmp_path):
    """Compare a reference with what change makes of a copy of it."""

    def run_compare(change, reference=None):
        reference = reference or record()
        actual = copy.deepcopy(reference)
        change(actual)
        for name, content in (("reference", reference), ("actual", actual)):
            torch.save(content, tmp_path / f"{name}.pt")
        return call(parity.main, "--compare", tmp_path / "reference.pt", tmp_path / "actual.pt")

    return run_compare


def report_norm(step):
    gradients = [gradient.flatten() for gradient in step["gradients"].values()]
    step["grad_norm"] = torch.cat(gradients).norm().item()


def scale(factor, step=1, name="w1"):
    def change(run):
        run["records"][step]["gradients"][name] *= factor
        report_norm(run["records"][step])

    return change


def put(value, step=1, name="w1"):
    def change(run):
        run["records"][step]["gradients"][name][0, 0] = value

    return change


@pytest.mark.parametrize("steps", [1, 2])
def test_equal_runs_pass(compare, steps):
    result = compare(lambda run: None, record(steps))
    assert (result.status, result.err) == (0, "")
    assert result.out.endswith(f"steps={steps}, gradients bitwise equal\n")


def test_table_has_every_parameter_and_step(compare):
    result = compare(scale(1 + 8 * parity.EPS))
    assert result.status == 0
    for line in ("  w1", "  w2", "  norm"):
        (row,) = [row for row in result.out.splitlines() if row.startswith(line)]
        assert row.split()[1:] == (["0.0", "8.0"] if line == "  w1" else ["0.0", "0.0"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scale(1 + 20 * parity.EPS), "step 2: gradient of w1 is off by 2.4e-06 (20 eps)"),
        (scale(0.5), "step 2: gradient of w1 is off by 0.5 (4194304 eps): 0.5x the reference"),
        (scale(0.0), "step 2: gradient of w1 is off by 1 (8388608 eps)"),
        (put(float("nan")), "step 2: gradient of w1 is not finite in the actual run"),
        (put(1.5), "step 2: gradient of w1 is off by"),
        (lambda run: run["records"][0].update(loss=8.001), "step 1: loss 8.001000, reference 8.000000"),
        (lambda run: run["records"][0].update(loss=float("nan")), "step 1: loss nan, reference 8.000000"),
        (
            lambda run: run["records"][1].update(grad_norm=run["records"][1]["grad_norm"] / 2),
            "step 2: the actual run reports gradient norm",
        ),
        (
            lambda run: run["records"][1]["gradients"].update(norm=None),
            "step 2: norm has no gradient in the actual run",
        ),
        (
            lambda run: run["records"][1]["gradients"].update(w1=torch.ones(4, 8)),
            "step 2: gradient of w1 is off by inf",
        ),
    ],
)
def test_mismatches(compare, change, said):
    result = compare(change)
    assert (result.status, result.err) == (1, "")
    assert said in result.out
    assert result.out.splitlines()[-1].startswith("FAIL ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(float("nan")), "is not finite in the actual run"),
        (scale(0.0), "gradient of w1 is zero in the reference: nothing to compare"),
        (lambda run: run["records"][1]["gradients"].update(w1=None), "in the reference and the actual run"),
        (lambda run: run["records"][1].update(loss=0.0), "step 2: loss 0.000000"),
        (lambda run: run["records"][1].update(loss=float("nan")), "step 2: loss nan"),
    ],
)
def test_the_same_fault_in_both_runs_is_no_pass(compare, change, said):
    reference = record()
    change(reference)
    result = compare(lambda run: None, reference)
    assert result.status == 1
    assert said in result.out


@pytest.mark.parametrize("shape", [(4, 8), (16, 2)])
def test_of_another_shape_no_factor_is_named(compare, shape):
    result = compare(lambda run: run["records"][1]["gradients"].update(w1=torch.ones(shape)))
    assert "step 2: gradient of w1 is off by inf" in result.out
    assert "x the reference" not in result.out


def move(tokens):
    def change(run):
        counts = run["records"][1]["tokens_per_expert"]["layers.1.moe.tokens_per_expert_E"]
        counts += torch.tensor([-float(tokens), float(tokens), 0.0])

    return change


def perturb(size, step=1, name="w1"):
    """Add an error of a size, relative, in a direction of its own."""

    def change(run):
        gradient = run["records"][step]["gradients"][name]
        noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
        noise -= gradient * (noise * gradient).sum() / gradient.square().sum()
        gradient += noise * size * gradient.norm() / noise.norm()
        report_norm(run["records"][step])

    return change


def other_mesh(*changes):
    def change(run):
        run.update(world_size=4, tp=2)
        for one in changes:
            one(run)

    return change


def test_routing(compare):
    experts = record(experts=True)
    assert compare(lambda run: None, experts).status == 0
    result = compare(move(1), experts)
    assert result.status == 1
    assert "step 2: layers.1.moe.tokens_per_expert_E: 1 of 1024 tokens go to other experts" in result.out
    # Across meshes a close choice may turn: a few tokens, and then that much of the gradient.
    assert compare(other_mesh(move(2), perturb(0.05)), experts).status == 0
    assert compare(other_mesh(move(2), perturb(0.05, step=0)), experts).status == 1
    assert compare(other_mesh(perturb(0.05)), experts).status == 1
    assert compare(other_mesh(perturb(0.005)), experts).status == 0
    assert compare(perturb(0.005), experts).status == 1
    everything = [scale(0.97, name=name) for name in ("w1", "w2", "norm")]
    result = compare(other_mesh(move(2), *everything), experts)
    assert result.status == 1
    assert "step 2: all gradients together are 0.97x the reference" in result.out
    assert "6 of 1024 tokens go to other experts" in compare(other_mesh(move(6)), experts).out

    def count_twice(run):
        run["records"][1]["tokens_per_expert"]["layers.1.moe.tokens_per_expert_E"] *= 2

    assert "counts 2048 tokens, reference 1024" in compare(other_mesh(count_twice), experts).out


def test_another_mesh_gets_no_more_tolerance_without_experts(compare):
    assert compare(other_mesh(scale(1.005))).status == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 7}, "seed is 42 in the reference and 7 in the actual run"),
        ({"family": "deepseek_v3"}, "family is llama3 in the reference and deepseek_v3 in the actual run"),
        ({"steps": 3}, "steps is 2 in the reference and 3 in the actual run"),
        ({"tokens": 4096}, "tokens is 1024 in the reference and 4096 in the actual run"),
        ({"replicate": 9}, "1 ranks, tp 1, replicate 9"),
        ({"tp": 2}, "1 ranks, tp 2, replicate 1"),
        ({"replicate": 0}, "1 ranks, tp 1, replicate 0"),
        ({"tp": 0}, "1 ranks, tp 0, replicate 1"),
        ({"tokens": 0}, "1 ranks, tp 1, replicate 1"),
        ({"records": []}, "has no step: nothing to compare"),
        ({"records": [1, 2]}, "lacks a field or has another"),
        ({"records": "abc"}, "lacks a field or has another"),
        ({"seed": None}, "lacks a field or has another"),
        ({"records": record(1)["records"]}, "the actual run recorded 1 of 2 steps"),
    ],
)
def test_other_jobs_are_refused(compare, change, said):
    result = compare(lambda run: run.update(change))
    assert (result.status, result.out) == (2, "")
    assert said in result.err


@pytest.mark.parametrize("step", [0, 1])
def test_other_parameters_and_experts_are_refused(compare, step):
    result = compare(lambda run: run["records"][step]["gradients"].pop("w2"))
    assert (result.status, result.err) == (2, "error: the runs have different parameters: w2\n")
    result = compare(lambda run: run["records"][step]["gradients"].update(w2=[1.0]))
    assert "a gradient is no tensor" in result.err
    experts, layer = record(experts=True), "layers.1.moe.tokens_per_expert_E"
    result = compare(lambda run: run["records"][step]["tokens_per_expert"].pop(layer), experts)
    assert f"the runs have different layers of experts: {layer}" in result.err
    more = torch.ones(4)
    result = compare(lambda run: run["records"][step]["tokens_per_expert"].update({layer: more}), experts)
    assert "the runs have different numbers of experts" in result.err


def test_nothing_to_compare(compare):
    reference = record()
    for step in reference["records"]:
        step["gradients"] = {}
    assert "no parameter: nothing to compare" in compare(lambda run: None, reference).err
    result = compare(lambda run: None, record(family="deepseek_v3"))
    assert "the routing would not be compared" in result.err
    experts = record(experts=True)
    for step in experts["records"]:
        step["tokens_per_expert"] = {name: count * 0 for name, count in step["tokens_per_expert"].items()}
    for change in (lambda run: None, other_mesh()):
        assert "counts 0 tokens, reference 0" in compare(change, experts).out


def test_foreign_folder_is_not_cleared(call, tmp_path):
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3/model.bin").touch()
    result = call(parity.main, "--family", "llama3", "--results", tmp_path)
    assert result.status == 2
    assert "holds other files: name another --results" in result.err
    assert (tmp_path / "llama3/model.bin").exists()


def test_files_that_are_no_records(call, tmp_path):
    good, empty, other = (tmp_path / name for name in ("good.pt", "empty.pt", "other.pt"))
    torch.save(record(), good)
    empty.touch()
    torch.save({"something": 1}, other)
    for path in (empty, other, tmp_path / "missing.pt", tmp_path):
        result = call(parity.main, "--compare", good, path)
        assert result.status == 2
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_are_checked_before_training(call, monkeypatch, steps):
    monkeypatch.setattr(parity, "train", lambda *_: pytest.fail("it trains"))
    result = call(parity.main, "--steps", steps)
    assert (result.status, result.err) == (2, f"error: --steps is {steps}; train at least one step\n")


def test_wrong_options_are_refused_in_one_line(call):
    result = call(parity.main, "--family", "gpt2")
    assert result.status == 2
    assert result.err.startswith("error: argument --family: invalid choice: 'gpt2'")
    assert result.err.count("\n") == 1


# ---------------------------------------------------------------- the tolerances, from both sides


@pytest.mark.parametrize(("rest", "named"), [(0.012, True), (0.013, False)])
def test_a_factor_is_named_if_it_is_four_times_what_it_leaves(compare, rest, named):
    def change(run):
        scale(1.05)(run)
        perturb(rest)(run)

    assert (": 1.05x the reference, but for 0.01" in compare(change).out) == named


@pytest.mark.parametrize(("eps", "status"), [(15, 0), (17, 1)])
def test_gradients_and_loss_are_good_to_16_eps(compare, eps, status):
    assert compare(scale(1 + eps * 2.0**-23)).status == status
    assert compare(perturb(eps * 2.0**-23)).status == status
    assert compare(lambda run: run["records"][1].update(loss=8 * (1 + eps * 2.0**-23))).status == status
    assert (
        compare(other_mesh(lambda run: run["records"][1].update(loss=8 * (1 - eps * 2.0**-23)))).status
        == status
    )


@pytest.mark.parametrize(("eps", "status"), [(21, 0), (-21, 0), (24, 1), (-24, 1)])
def test_the_reported_norm_is_good_to_4_eps_times_the_root_of_the_elements(compare, eps, status):
    # 32 elements: 22.6 eps.
    def change(run):
        norm = (
            torch.cat([g.double().flatten() for g in run["records"][1]["gradients"].values()]).norm().item()
        )
        run["records"][1]["grad_norm"] = norm * (1 + eps * 2.0**-23)

    result = compare(change)
    assert result.status == status
    assert ("step 2: the actual run reports gradient norm" in result.out) == bool(status)
    reference = record()
    change(reference)
    result = compare(lambda run: None, reference)
    assert ("step 2: the reference reports gradient norm" in result.out) == bool(status)


@pytest.mark.parametrize(
    ("moved", "error", "status"),
    # One bfloat16 eps, 0.0078, and 2 sqrt(2 m / n) where m of n = 1024 slots moved: 0.125 for two.
    [(0, 0.0077, 0), (0, 0.0080, 1), (2, 0.131, 0), (2, 0.135, 1), (5, 0.203, 0), (5, 0.208, 1)],
)
def test_gradients_of_experts_on_another_mesh(compare, moved, error, status):
    changes = [perturb(error, name=name) for name in ("w1", "w2", "norm")]
    result = compare(other_mesh(move(moved), *changes), record(experts=True))
    assert result.status == status, result.out


@pytest.mark.parametrize(("error", "status"), [(2.4e-4, 0), (2.5e-4, 1)])
def test_loss_of_experts_on_another_mesh(compare, error, status):
    # One bfloat16 eps over the root of 1024 tokens, and 16 eps: 2.46e-4.
    def change(run):
        run["records"][0]["loss"] = 8 * (1 + error)

    assert compare(other_mesh(change), record(experts=True)).status == status
    assert compare(change, record(experts=True)).status == 1


@pytest.mark.parametrize(("factor", "status"), [(1 + 14 * 2.0**-23, 0), (1.0001, 1), (1.005, 1), (0.995, 1)])
def test_a_common_factor_is_no_error_of_routing(compare, factor, status):
    changes = [scale(factor, name=name) for name in ("w1", "w2", "norm")]
    result = compare(other_mesh(*changes), record(experts=True))
    assert result.status == status
    assert ("step 2: all gradients together are" in result.out) == bool(status)


@pytest.mark.parametrize(("share", "status"), [(0.2, 0), (0.3, 1)])
def test_the_common_factor_is_a_quarter_of_the_error_at_most(compare, share, status):
    names = ("w1", "w2", "norm")
    changes = [perturb(0.006, name=name) for name in names]
    changes += [scale(1 + 0.006 * share, name=name) for name in names]
    assert compare(other_mesh(*changes), record(experts=True)).status == status


@pytest.mark.parametrize(
    "degrees", [{"world_size": 2}, {"world_size": 2, "tp": 2}, {"world_size": 2, "replicate": 2}]
)
def test_any_other_degree_is_another_mesh(compare, degrees):
    changed = lambda run: (run.update(degrees), perturb(0.005)(run))  # noqa: E731
    assert compare(changed, record(experts=True)).status == 0
    reference = record(experts=True, **degrees)
    assert compare(perturb(0.005), reference).status == 1


def test_the_table_has_losses_norms_errors_and_tokens(compare):
    done = compare(other_mesh(move(2), scale(0.5, step=0)), record(experts=True))
    assert [line.split() for line in done.out.splitlines()[1:-1]] == [
        line.split()
        for line in (
            "step 1 step 2",
            "loss, reference 8.000000 8.000000",
            "loss 8.000000 8.000000",
            "gradient norm, reference 10.218157 8.629499",
            "gradient norm 8.950520 8.629499",
            "gradients, error in eps:",
            "w1 4194304.0 0.0",
            "w2 0.0 0.0",
            "norm 0.0 0.0",
            "tolerance 65552.0 1114128.0",
            "layers.1.moe.tokens_per_expert_E, step 1:",
            "reference 400 300 324",
            "actual 400 300 324",
            "layers.1.moe.tokens_per_expert_E, step 2:",
            "reference 400 300 324",
            "actual 398 302 324",
            "step 1: gradient of w1 is off by 0.5 (4194304 eps): 0.5x the reference, but for 0",
            "step 1: all gradients together are 0.8449x the reference",
        )
    ]


def test_the_longest_name_sets_the_width_of_the_table(compare):
    reference = record()
    for step in reference["records"]:
        step["gradients"]["layers.0.attention.wq.weight"] = step["gradients"].pop("w1")
    rows = compare(lambda run: None, reference).out.splitlines()[1:-1]
    assert len({len(row) for row in rows if not row.endswith(":")}) == 1


@pytest.mark.parametrize("wrong", [10, 11, 14])
def test_at_most_ten_mismatches_are_printed(compare, wrong):
    def change(run):
        for step in run["records"][:wrong]:
            step["loss"] = 9.0

    *lines, last = compare(change, record(steps=14)).out.splitlines()
    assert len([line for line in lines if line.startswith("  step")]) == 10
    assert [line for line in lines if line.startswith("  and")] == [f"  and {wrong - 10} more"] * (wrong > 10)
    assert last.endswith(f": {wrong} mismatches")


def test_without_records_each_family_is_trained_and_compared(call, tmp_path, monkeypatch):
    trained = []

    def train(family, args):
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        for name in parity.RUNS:
            run = record(family=family, experts=family == "deepseek_v3")
            if (family, name) in broken:
                run["records"][0]["loss"] = 9.0
            torch.save(run, folder / f"{name}.pt")
        trained.append((family, args.steps, args.seed))
        return folder

    monkeypatch.setattr(parity, "train", train)
    broken = []
    result = call(parity.main)
    assert (result.status, result.err) == (0, "")
    assert trained == [("llama3", 3, 42), ("deepseek_v3", 3, 42)]
    passed = [line for line in result.out.splitlines() if line.startswith("PASS ")]
    assert [line.partition(":")[0] for line in passed] == [
        f"PASS {family} {actual} against {reference}"
        for family in ("llama3", "deepseek_v3")
        for reference, actual in parity.COMPARISONS
    ]
    # One comparison that fails is enough, whichever it is.
    for run in (("llama3", "simplefsdp-tp2"), ("deepseek_v3", "one-rank")):
        broken[:] = [run]
        assert call(parity.main).status == 1
    broken[:], trained[:] = [], []
    assert call(parity.main, "--family", "llama3", "--steps", 1, "--seed", 7).status == 0
    assert trained == [("llama3", 1, 7)]


def test_the_four_runs_that_are_made(call, tmp_path, monkeypatch):
    launched = {}

    def launch(ranks, command, log):
        assert command[0] == ROOT / "titan/parity_train.py"
        option = dict(zip(command[1::2], command[2::2], strict=True))
        assert (option["--family"], option["--seed"], option["--steps"]) == ("llama3", 42, 3)
        assert option["--assets"] == Path(".titan")
        launched[log.name] = (ranks, option["--plan"], option.get("--tp"))
        if option["--plan"] != "seed":
            torch.save(record(), option["--output"])

    monkeypatch.setattr(parity, "launch", launch)
    for _ in range(2):  # the second time, its own folder is cleared
        assert call(parity.main, "--family", "llama3", "--results", tmp_path).status == 0
    assert launched == {
        "seed": (1, "seed", None),
        "one-rank": (1, "fsdp2", 1),
        "fsdp2-tp2": (4, "fsdp2", 2),
        "simplefsdp-tp2": (4, "simple_fsdp", 2),
        "simplefsdp-fsdp4": (4, "simple_fsdp", 1),
    }


def test_a_warning_after_the_launchers_error_is_not_quoted(monkeypatch, tmp_path):
    said = "error: rank 0 failed first: no space\n  warnings.warn('resource_tracker: There appear to be 3')\n"
    failed = SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(parity.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(parity.InputError, match="^rank 0 failed first: no space$"):
        parity.launch(1, [], tmp_path / "log")


@pytest.fixture
def full(call, tmp_path, monkeypatch):
    """Run parity_full.py without training; statuses: its comparisons'; fails: which run does."""

    def run_full(*options, statuses=(), fails=None):
        launched, compared, statuses = [], [], list(statuses)

        def launch(ranks, command, log, device="cpu"):
            command = [str(word) for word in command]
            option = dict(zip(command[1::2], command[2::2], strict=False))
            seed = Path(command[command.index("--seed-checkpoint") + 1])
            assert seed.is_dir() == (command[-1] != "seed")
            seed.mkdir(parents=True, exist_ok=True)
            launched.append((log.parent.parent.name, log.name, ranks, device, option.get("--steps")))
            if log.name == fails:
                raise parity.InputError("rank 0 failed first: no memory")

        def compare(reference, actual, options):
            compared.append((reference.name, actual.name, options))
            return statuses.pop(0) if statuses else 0

        monkeypatch.setattr(parity_full, "launch", launch)
        monkeypatch.setattr(parity_full, "compare", compare)
        result = call(parity_full.main, "--results", tmp_path, *options)
        assert not list(tmp_path.glob("*/seed"))  # gigabytes
        return result, launched, compared

    return run_full


def test_at_full_width_four_ranks_are_compared_with_one(full):
    result, launched, compared = full("--family", "llama3", "--dtype", "float32")
    assert (result.status, result.err) == (0, "")
    assert [run[:4] for run in launched] == [
        ("llama3-float32", "seed", 1, "cpu"),
        ("llama3-float32", "one-rank", 1, "cpu"),
        ("llama3-float32", "cpu", 4, "cpu"),
    ]
    assert compared == [("one-rank", "cpu", [])]
    _, launched, compared = full()
    assert [run[0] for run in launched[::3]] == [
        "llama3-float32",
        "llama3-bfloat16",
        "deepseek_v3-float32",
        "deepseek_v3-bfloat16",
    ]
    assert [options for *_, options in compared] == [[], [], ["--norm-eps", 65_536], []]


def test_at_full_width_a_device_is_compared_with_the_cpu(full):
    _, launched, compared = full("--family", "llama3", "--dtype", "bfloat16", "--device", "cuda")
    assert launched[-1][1:4] == ("cuda", 4, "cuda")
    assert compared == [("one-rank", "cpu", []), ("cpu", "cuda", [])]


def test_at_full_width_the_worst_status_counts(full):
    assert full("--dtype", "float32", statuses=[1, 0])[0].status == 1
    assert full("--dtype", "float32", "--device", "cuda", statuses=[0, 0, 0, 2])[0].status == 2
    result, launched, compared = full(fails="one-rank")
    assert (result.status, result.err) == (2, "error: rank 0 failed first: no memory\n")
    assert len(launched) == 2 and compared == []
