"""The comparison: a clean pair passes, and every planted fault is caught with the right words.

Faults are planted in a copy of a real four-rank run: one thing is altered at a time.
"""

import pickle
import shutil
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import RANKS, ROOT, SCRIPTS, STEPS, copy_run, edit, edit_all, run
from made_runs import make_run

import compare_training
from training_comparison import Comparison
from training_tolerance import DEFAULTS, allow_rounding_of, compare_tensor


@pytest.fixture
def pair(runs, tmp_path):
    """The directory of a DDP run and a copy of it."""
    copy_run(runs("ddp").directory, tmp_path / "actual")
    return runs("ddp").directory, tmp_path / "actual"


@pytest.fixture
def compare_pair(compare):
    """Compare two directories: exit status, stdout, stderr."""

    def run_main(pair, *options, ranks=RANKS):
        done = compare("--reference-dir", pair[0], "--actual-dir", pair[1], "--world-size", ranks, *options)
        return done.status, done.out, done.err

    return run_main


@pytest.fixture
def verdict(compare_pair, pair):
    return partial(compare_pair, pair)


@pytest.mark.parametrize("mode", SCRIPTS)
def test_clean_pair_passes_in_every_mode(runs, tmp_path, compare_pair, mode):
    copy_run(runs(mode).directory, tmp_path / "actual")
    status, out, err = compare_pair((runs(mode).directory, tmp_path / "actual"))
    assert (status, err) == (0, "")
    for rank in range(RANKS):
        assert f"rank={rank} parity=passed" in out
    assert out.endswith(f"PASS comparison ranks={RANKS} steps={STEPS}\n")
    assert "No accelerator was checked" in out


def test_table_shows_losses_and_names_the_devices(pair, verdict):
    edit_all(pair[1], lambda content: content["metadata"].update(device="cuda", backend="nccl"))
    status, out, _ = verdict()
    assert status == 0
    header = next(line for line in out.splitlines() if line.startswith("step"))
    assert header.split()[1:5] == ["reference", "cpu", "actual", "cuda"]
    assert "neuron" not in out.lower()
    table = out[out.index(header) :].splitlines()[1 : STEPS + 1]
    assert [line.split()[0] for line in table] == ["1", "2", "3"]
    assert table[0].split()[1].startswith("0.75420")
    assert "No accelerator was checked" not in out


def test_float32_rounding_passes_and_is_measured(pair, verdict):
    def nudge(content):
        for record in content["records"]:
            for name, value in record["gradients"].items():
                record["gradients"][name] = value * (1 + 2**-22)

    edit_all(pair[1], nudge)
    status, out, _ = verdict()
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("gradients")).split()
    assert row[1:3] == [str(4 * RANKS * STEPS), "0"]
    assert 1.5 < float(row[3]) < 2.5  # in eps of float32, 2**-23
    assert row[5] == "--rtol" and 1e-7 < float(row[6]) < 3e-7
    assert row[7] == "--norm-eps" and 1.5 < float(row[8]) < 2.7


@pytest.mark.parametrize("kind", ["gradients", "parameters", "deltas"])
def test_one_altered_element_is_located(pair, verdict, kind):
    def change(content):
        content["records"][1][kind]["0.weight"][12, 7] += 1e-3

    edit(pair[1], 2, change)
    status, out, _ = verdict()
    assert status == 1
    assert "rank=2 parity=FAILED mismatched_tensors=1" in out
    assert out.count("parity=passed") == RANKS - 1
    first = next(line for line in out.splitlines() if line.startswith("First"))
    assert f"rank 2, step 2, {kind} 0.weight[12, 7]: reference" in first
    assert "1 of 32768 elements differ" in first
    assert "1 of 184 tensors failed, on 1 of 4 ranks" in out
    assert out.endswith(f"FAIL comparison ranks={RANKS} steps={STEPS}\n")


def test_smallest_passing_tolerance_is_exact(pair, verdict):
    edit_all(pair[1], lambda content: content["records"][0]["gradients"]["2.bias"].mul_(1 + 3e-5))
    status, out, _ = verdict()
    assert status == 1
    row = next(line for line in out.splitlines() if line.startswith("gradients")).split()
    rtol, norm_eps = float(row[6]), float(row[8])
    assert verdict("--rtol", rtol * 1.1)[0] == 0
    assert verdict("--rtol", rtol * 0.9)[0] == 1
    assert verdict("--rtol", rtol * 1.1, "--norm-eps", norm_eps * 1.1)[0] == 0
    assert verdict("--rtol", rtol * 1.1, "--norm-eps", norm_eps * 0.9)[0] == 1


def test_atol_is_absolute(pair, verdict):
    edit(pair[1], 0, lambda content: content["records"][0]["output"].add_(1e-3))
    assert verdict("--rtol", "0", "--atol", "1.1e-3")[0] == 0
    assert verdict("--rtol", "0", "--atol", "0.9e-3")[0] == 1


def test_all_mismatches_are_counted_and_the_first_in_causal_order_is_told(pair, verdict):
    edit(pair[1], 0, lambda content: content["records"][2]["output"].add_(1))
    edit(pair[1], 1, lambda content: content["records"][1]["deltas"]["2.bias"].mul_(2))
    edit(pair[1], 3, lambda content: content["records"][1]["gradients"]["2.weight"].mul_(2))
    status, out, _ = verdict()
    assert status == 1
    assert "3 of 184 tensors failed, on 3 of 4 ranks" in out
    assert "First in causal order: rank 3, step 2, gradients 2.weight" in out


def test_loss_off_by_a_thousandth(pair, verdict):
    def change(content):
        content["records"][2]["loss"] += 1e-3

    edit(pair[1], 3, change)
    status, out, _ = verdict()
    assert status == 1
    assert "rank 3, step 3, losses global loss: reference 0.7409" in out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("both", [True, False])
def test_what_is_not_finite_never_passes(runs, tmp_path, compare_pair, value, both):
    directories = tmp_path / "reference", tmp_path / "actual"

    def change(content):
        content["records"][0]["gradients"]["0.bias"][5] = value

    shutil.copytree(runs("ddp").directory, directories[0])
    copy_run(runs("ddp").directory, directories[1])
    for directory in directories if both else directories[1:]:
        edit(directory, 1, change)
    status, out, _ = compare_pair(directories)
    assert status == 1
    assert "rank 1, step 1, gradients 0.bias[5]: reference" in out
    assert f"not finite in the {'reference' if both else 'actual'} run" in out


def test_all_zeros_in_both_runs_is_no_agreement(runs, tmp_path, compare_pair):
    def change(content):
        for record in content["records"]:
            for kind in ("gradients", "parameters", "deltas"):
                for value in record[kind].values():
                    value.zero_()
            record["output"].zero_()
            record["loss"] = 0.0

    directories = tmp_path / "reference", tmp_path / "actual"
    shutil.copytree(runs("ddp").directory, directories[0])
    copy_run(runs("ddp").directory, directories[1])
    for directory in directories:
        edit_all(directory, change)
    status, out, _ = compare_pair(directories)
    assert status == 1
    assert "ranks 0-3, step 1, outputs output: all zero at every step, nothing is compared" in out
    assert "Broken invariant: nonzero (actual run)" in out


def invalid(verdict, *words, **settings):
    """Expect one line on stderr with these words, exit status 2 and nothing that looks like a result."""
    status, out, err = verdict(**settings)
    assert status == 2, out
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "PASS" not in out and "passed" not in out
    for word in words:
        assert word in err


def test_swapped_rank_files(pair, verdict):
    (pair[1] / "rank-0.pt").rename(pair[1] / "x")
    (pair[1] / "rank-1.pt").rename(pair[1] / "rank-0.pt")
    (pair[1] / "x").rename(pair[1] / "rank-1.pt")
    invalid(verdict, "rank-0.pt says rank 1, expected 0", "swapped")


def test_a_second_rank_file_is_no_whole_run(tmp_path, compare):
    whole, actual = make_run(tmp_path / "whole", dp=1, tp=1), make_run(tmp_path / "actual")
    shutil.copy(whole / "rank-0.pt", whole / "rank-1.pt")
    done = compare("--reference-dir", whole, "--actual-dir", actual, "--world-size", 4)
    assert (done.status, done.out) == (2, "")
    assert "whole has 2 of 4 rank files, rank-2.pt is missing" in done.err


def test_missing_rank_file(pair, verdict):
    (pair[1] / "rank-2.pt").unlink()
    invalid(verdict, "has 3 of 4 rank files, rank-2.pt is missing")


def test_extra_rank_file(pair, verdict):
    shutil.copy(pair[1] / "rank-3.pt", pair[1] / "rank-4.pt")
    invalid(verdict, "rank-4.pt, too many for --world-size 4")


def test_wrong_world_size(pair, verdict):
    invalid(verdict, "rank-2.pt, too many for --world-size 2", ranks=2)
    invalid(verdict, "has 4 of 8 rank files, rank-4.pt is missing", ranks=8)
    invalid(verdict, "--world-size is 0; nothing to compare", ranks=0)


def test_truncated_rank_file(pair, verdict):
    path = pair[1] / "rank-1.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    invalid(verdict, "rank-1.pt cannot be read, it is truncated or no result file")


def test_empty_and_absent_directories(pair, verdict):
    for path in pair[1].iterdir():
        path.unlink()
    invalid(verdict, "has 0 of 4 rank files")
    pair[1].rmdir()
    invalid(verdict, "is not a directory")


class Evil:
    """Pickles to a call that creates the file at path."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_malicious_pickle_is_refused_and_not_run(pair, verdict, tmp_path, container):
    trap = tmp_path / "executed"
    content = torch.load(pair[1] / "rank-0.pt", weights_only=True)
    content["metadata"]["extra"] = Evil(trap)
    if container == "torch":
        torch.save(content, pair[1] / "rank-0.pt")
    else:
        (pair[1] / "rank-0.pt").write_bytes(pickle.dumps(content["metadata"]))
    assert not trap.exists()
    invalid(verdict, "rank-0.pt cannot be read")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("global_batch_size", 256), ("learning_rate", 0.1), ("mode", "fsdp"), ("model", "other")],
)
def test_another_job_is_invalid_input_not_a_mismatch(pair, verdict, key, value):
    edit_all(pair[1], lambda content: content["metadata"].update({key: value}))
    invalid(verdict, f"the runs differ in {key}", repr(value))


def test_another_step_count(pair, verdict):
    def shorten(content):
        content["records"].pop()
        content["metadata"]["steps"] -= 1

    edit(pair[1], 1, lambda content: content["records"].pop())
    invalid(verdict, "rank-1.pt has 2 step records, expected 3")
    edit(pair[1], 1, lambda content: content["records"].append(content["records"][0]))
    edit_all(pair[1], shorten)
    invalid(verdict, "the runs differ in steps: reference 3, actual 2")


def test_files_of_two_runs_in_one_directory(pair, verdict):
    edit(pair[1], 2, lambda content: content["metadata"].update(run_id="another"))
    invalid(verdict, "mixes runs: run_id is", "rank-2.pt")


def test_other_names_shapes_and_types(pair, verdict):
    def rename(content):
        for record in content["records"]:
            for kind in ("initial", "gradients", "parameters", "deltas"):
                if kind in record:
                    record[kind]["3.bias"] = record[kind].pop("2.bias")

    def reshape(content):
        record = content["records"][1]
        for kind in ("gradients", "parameters", "deltas"):
            record[kind]["0.weight"] = record[kind]["0.weight"].reshape(-1)

    for change, words in (
        (reshape, ("0.weight is (256, 128) in rank 0 of the actual run, (32768,) in rank 1",)),
        (rename, ("parameter 2.bias is in only one of rank 0 of the actual run and rank 1",)),
    ):
        edit(pair[1], 1, change)
        invalid(verdict, *words)
        shutil.copy(pair[0] / "rank-1.pt", pair[1])
    edit_all(pair[1], rename)
    invalid(verdict, "parameter 2.bias is in only one of the reference and rank 0 of the actual run")


def test_output_of_another_type_is_a_mismatch(pair, verdict):
    def convert(content):
        content["records"][1]["output"] = content["records"][1]["output"].bfloat16()

    edit_all(pair[1], convert)
    status, out, _ = verdict()
    assert status == 1
    assert "ranks 0-3, step 2, outputs output: its type is bfloat16, expected float32" in out


def test_output_of_another_shape_is_a_mismatch(pair, verdict):
    def shorten(content):
        content["records"][1]["output"] = content["records"][1]["output"][1:].clone()

    edit(pair[1], 2, shorten)
    status, out, _ = verdict()
    assert status == 1
    assert "rank 2, step 2, outputs output: its shape is [127, 128], expected [128, 128]" in out


def without(key):
    return lambda content: content["records"][1].pop(key)


def first(**values):
    return lambda content: content["records"][0].update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("records"), "does not hold metadata and records"),
        (lambda content: content.update(records=3), "records is no list"),
        (lambda content: content["metadata"].pop("seed"), "metadata seed is missing"),
        (lambda content: content["metadata"].update(rank=torch.ones(2)), "metadata rank is missing or no"),
        (lambda content: content["metadata"].update(format="x"), "its format is 'x'"),
        (without("output"), "step 2 lacks one of output, loss"),
        (first(loss="0.7"), "step 1: loss is a str, expected a float"),
        (first(output=0.5), "outputs output is float"),
        (first(output=torch.empty(0)), "output holds no values"),
        (first(output=torch.eye(2).to_sparse()), "expected a plain dense"),
        (first(deltas=[]), "must be dictionaries by name"),
        (first(gradients={}, parameters={}, deltas={}), "must have the same names, all among"),
        (
            lambda content: content["records"][0]["gradients"].pop("2.bias"),
            "must have the same names, all among",
        ),
        (
            lambda content: content["records"][0]["initial"].pop("2.bias"),
            "the parameters must have the names of step 1's initial parameters",
        ),
    ],
)
def test_file_of_another_structure(pair, verdict, change, words):
    edit(pair[1], 3, change)
    invalid(verdict, "rank-3.pt is no result file of format parity-record-3", words)


def test_file_that_holds_something_else(pair, verdict):
    torch.save([1], pair[1] / "rank-0.pt")
    invalid(verdict, "does not hold metadata and records")
    (pair[1] / "rank-0.pt").unlink()
    (pair[1] / "rank-0.pt").mkdir()
    invalid(verdict, "rank-0.pt is not a file")


def test_absurd_world_size_ends_at_once(verdict):
    invalid(verdict, "has 4 of 100000000000000000000 rank files, rank-4.pt is missing", ranks=10**20)


@pytest.mark.parametrize(
    ("actual", "reference", "dtype", "passed"),
    [
        ([1 + 9j, 2 - 7j], [1 + 1j, 2 + 2j], torch.complex64, False),
        ([1 + 1j, 2 + 2j], [1 + 1j, 2 + 2j], torch.complex64, True),
        ([5, 6], [5, 7], torch.int64, False),
        ([5, 6], [5, 6], torch.int64, True),
        ([True, False], [True, True], torch.bool, False),
        ([1.0, 2.0], [1.0, 2.5], torch.bfloat16, False),
        ([-1.7e308, 5e300], [1.7e308, 1.0], torch.float64, False),
        ([1.0, 2.0], [1.0, 2.0], torch.float8_e4m3fn, True),
        (3.0, 3.0001, torch.float32, False),
    ],
)
def test_other_types(actual, reference, dtype, passed):
    pair = torch.tensor(actual, dtype=dtype), torch.tensor(reference, dtype=dtype)
    result = compare_tensor(*pair)
    assert result.passed == passed
    assert bool(result.message) != passed


def test_the_unit_is_the_coarser_type_of_the_two():
    fine, coarse = torch.tensor([[1.0, 1 + 2**-8]]), torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    assert compare_tensor(fine, coarse).passed and compare_tensor(coarse, fine).passed
    assert not compare_tensor(fine, coarse.float()).passed


def test_delta_may_differ_by_the_rounding_of_its_parameter_and_no_more():
    parameter = torch.tensor([1.0, 0.5])
    reference = torch.tensor([1e-4, 2e-4])
    for ulps, passed in ((1.5, True), (3.0, False)):
        actual = reference + ulps * 2**-23
        result = compare_tensor(actual, reference, on_top=allow_rounding_of(parameter, 2**-23))
        assert result.passed == passed
    integers = torch.tensor([0, 0]), torch.tensor([5, 6])
    assert not compare_tensor(*integers, on_top=allow_rounding_of(torch.tensor([5, 6]), 0.0)).passed


def test_a_run_is_not_compared_with_itself(runs, compare_pair):
    directory = runs("ddp").directory
    status, _, err = compare_pair((directory, directory / ".." / directory.name))
    assert status == 2
    assert "would be compared with itself" in err


def test_a_run_is_not_compared_with_its_copy(runs, tmp_path, compare_pair):
    shutil.copytree(runs("ddp").directory, tmp_path / "copy")
    status, _, err = compare_pair((runs("ddp").directory, tmp_path / "copy"))
    assert status == 2
    assert "hold the same run, one is a copy" in err


def test_usage_errors_are_one_line(verdict):
    for options in (("--rtol", "nan"), ("--rtol", "-1"), ("--atol", "x"), ("--what",)):
        status, _, err = verdict(*options)
        assert status == 2
        assert err.startswith("error: ") and err.count("\n") == 1


def test_a_comparison_that_breaks_off_is_no_mismatch(verdict, monkeypatch):
    monkeypatch.setattr(compare_training, "compare_runs", Mock(side_effect=RuntimeError("a bug")))
    status, out, err = verdict()
    assert (status, out) == (2, "")
    assert err.startswith("Traceback ")
    assert err.endswith("bug\nerror: the comparison broke off, nothing is known of the runs\n")


@pytest.mark.parametrize(("noise", "failed"), [(1e-10, 0), (1e-5, 1)])
def test_gradient_that_is_zero_but_for_rounding(noise, failed):
    # As that of a bias before a batch norm: its rounding has nothing to do with its size.
    generator = torch.Generator().manual_seed(0)

    def steps(bias):
        parameters = {("parameters", "weight"): torch.ones(64), ("parameters", "bias"): torch.ones(64)}
        gradients = {("gradients", "bias"): bias, ("gradients", "weight"): torch.full((64,), 1e-2)}
        return [parameters, {("outputs", "output"): torch.ones(4)} | gradients | parameters]

    left, right = (steps(noise * torch.randn(64, generator=generator)) for _ in range(2))
    comparison = Comparison(DEFAULTS, any_type=False)
    comparison.add({"rank": 0, "dp_rank": 0}, left, right, [{}, {}])
    assert len(comparison.findings) == failed


def test_zero_at_one_step_is_no_finding(runs, tmp_path, compare_pair):
    # LoRA's second factor, or a last layer that starts at zero: other gradients are zero at step 1.
    directories = tmp_path / "reference", tmp_path / "actual"

    def still(content):
        record = content["records"][0]
        record["gradients"]["0.weight"].zero_()
        record["deltas"]["0.weight"].zero_()
        record["parameters"]["0.weight"].copy_(content["records"][0]["initial"]["0.weight"])
        following = content["records"][1]
        change = following["parameters"]["0.weight"] - record["parameters"]["0.weight"]
        following["deltas"]["0.weight"].copy_(change)
        following["gradients"]["0.weight"].copy_(change / -0.01)

    shutil.copytree(runs("ddp").directory, directories[0])
    copy_run(runs("ddp").directory, directories[1])
    for directory in directories:
        edit_all(directory, still)
    assert compare_pair(directories)[0] == 0


@pytest.mark.parametrize("change", [-1.0, 0.0, 2.0])
def test_small_bfloat16_gradient_beside_a_large_one_is_compared(change):
    generator = torch.Generator().manual_seed(0)
    small = (0.05 * torch.randn(64, generator=generator)).bfloat16()

    def steps(gradient):
        parameters = {
            ("parameters", "a"): torch.ones(64).bfloat16(),
            ("parameters", "b"): torch.ones(64).bfloat16(),
        }
        frozen = {("parameters", "c"): torch.ones(64)}
        gradients = {("gradients", "b"): gradient, ("gradients", "a"): torch.ones(64).bfloat16()}
        return [parameters | frozen, {("outputs", "output"): torch.ones(4)} | gradients | parameters | frozen]

    comparison = Comparison(DEFAULTS, any_type=False)
    left, right = steps(small), steps(small * change)
    comparison.add({"rank": 0, "dp_rank": 0}, left, right, [{}, {}])
    assert len(comparison.findings) == 1


def test_frozen_parameter_in_a_coarser_type_loosens_nothing():
    def steps(factor):
        parameters = {("parameters", "a"): torch.ones(64), ("parameters", "q"): torch.ones(64).bfloat16()}
        gradients = {("gradients", "a"): torch.linspace(0.1, 1, 64) * factor}
        computed = {("outputs", "output"): torch.ones(4) * factor}
        return [parameters, computed | gradients | parameters]

    comparison = Comparison(DEFAULTS, any_type=False)
    left, right = steps(1.0), steps(1.001)
    comparison.add({"rank": 0, "dp_rank": 0}, left, right, [{}, {}])
    assert len(comparison.findings) == 2


@pytest.mark.parametrize("field", ["output", "loss", "local_loss", "gradients", "parameters", "deltas"])
def test_every_field_of_a_step_is_needed(pair, verdict, field):
    edit(pair[1], 2, lambda content: content["records"][1].pop(field))
    invalid(
        verdict, "rank-2.pt", "step 2 lacks one of output, loss, local_loss, gradients, parameters, deltas"
    )


def test_initial_parameters_have_the_names_of_all_parameters(pair, verdict):
    for change in (
        lambda content: content["records"][0]["initial"].pop("2.bias"),
        lambda content: content["records"][0].pop("initial"),
    ):
        edit(pair[1], 2, change)
        invalid(
            verdict, "rank-2.pt", "step 1: the parameters must have the names of step 1's initial parameters"
        )
        shutil.copy(pair[0] / "rank-2.pt", pair[1])


def test_options_that_have_no_default(compare, pair):
    for option in ("--actual-dir", "--world-size"):
        arguments = {"--actual-dir": pair[1], "--world-size": RANKS, "--reference-dir": pair[0]}
        del arguments[option]
        done = compare(*(word for pair in arguments.items() for word in pair))
        assert (done.status, done.err.count("\n")) == (2, 1)
        required = {"--actual-dir": "the following arguments are required: --actual-dir"}
        assert required.get(option, "holds no recording; give --world-size") in done.err


def test_the_command_ends_with_the_status_of_the_comparison():
    done = run(sys.executable, ROOT / "compare_training.py", "--actual-dir", "nowhere", "--world-size", 1)
    assert done.status == 2 and done.err.startswith("error: nowhere is not a directory")
