"""The four training modes: right losses, right files, and the launch that shares its imports."""

import pytest
import torch
from conftest import RANKS, ROOT, SCRIPTS, STEPS, launch

import simplefsdp_tp_train
import training_common
from training_common import InputError, make_batch, make_model

# Global losses of the first steps at seed 0, known from float64 computations.
ANCHORS = {"eager": (0.754203, 0.751465, 0.740902), "simplefsdp": (0.753625, 0.751425, 0.741462)}
MODEL = {mode: "simplefsdp" if mode == "simplefsdp_tp" else "eager" for mode in SCRIPTS}
MODES = list(SCRIPTS)


def load(directory, rank):
    return torch.load(directory / f"rank-{rank}.pt", weights_only=True)


def test_batch_follows_the_published_formula():
    batch, target = make_batch(3)
    assert batch.shape == target.shape == (512, 128)
    assert batch.dtype == torch.float32
    for i, j in ((0, 0), (2, 1), (511, 127)):
        value = ((i * 128 + j) % 257) / 128 - 1 + 3 / 10
        assert batch[i, j].item() == pytest.approx(value, abs=1e-6)
        assert target[i, j].item() == pytest.approx(torch.tensor(value).cos().item(), abs=1e-6)


@pytest.mark.parametrize("kind", ANCHORS)
def test_one_process_reaches_the_anchor_losses(kind):
    model = make_model(kind, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=training_common.LEARNING_RATE)
    for step, anchor in enumerate(ANCHORS[kind]):
        batch, target = make_batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(anchor, abs=1.5e-6)


def test_unknown_model_kind_is_refused():
    with pytest.raises(ValueError, match="'pp'; use 'eager' or 'simplefsdp'"):
        make_model("pp", 0)


@pytest.mark.parametrize("mode", MODES)
def test_mode_reaches_the_anchor_losses(runs, mode):
    for rank in range(RANKS):
        losses = [record["loss"] for record in load(runs(mode).directory, rank)["records"]]
        assert losses == pytest.approx(ANCHORS[MODEL[mode]], abs=1.5e-6)


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_prints_the_tutorials_lines(runs, mode):
    lines = [set(text.splitlines()) for text in runs(mode).stdout]
    assert len(lines) == RANKS
    for step in range(1, STEPS + 1):
        assert all(f"step={step}/{STEPS} training=completed" in text for text in lines)
    for rank in range(RANKS):
        assert any(f"PASS rank={rank} mode={mode} world_size={RANKS}" in text for text in lines)


@pytest.mark.parametrize("mode", MODES)
def test_record_holds_full_tensors_by_name_and_metadata(runs, mode):
    model = make_model(MODEL[mode], 0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    samples = 512 // {"ddp": 4, "fsdp": 4, "tp": 1, "simplefsdp_tp": 1}[mode]
    for rank in range(RANKS):
        content = load(runs(mode).directory, rank)
        assert len(content["records"]) == STEPS
        before = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for record in content["records"]:
            assert record["output"].shape == (samples, 128)
            for kind in ("gradients", "parameters", "deltas"):
                assert {name: value.shape for name, value in record[kind].items()} == shapes
                assert all(type(value) is torch.Tensor for value in record[kind].values())
            for name, value in record["parameters"].items():
                assert torch.equal(value - before[name], record["deltas"][name])
            before = record["parameters"]
        metadata = content["metadata"]
        assert (metadata["mode"], metadata["rank"], metadata["world_size"]) == (mode, rank, RANKS)
        assert metadata["dp_degree"] * metadata["tp_degree"] == RANKS
        assert metadata["dp_rank"] * metadata["tp_degree"] + metadata["tp_rank"] == rank


def test_global_loss_is_the_mean_of_the_ranks_losses(runs):
    contents = [load(runs("ddp").directory, rank)["records"] for rank in range(RANKS)]
    for step in range(STEPS):
        local = [records[step]["local_loss"] for records in contents]
        assert len(set(local)) == RANKS
        assert contents[0][step]["loss"] == pytest.approx(sum(local) / RANKS, rel=1e-6)


def test_eager_modes_follow_one_trajectory_to_rounding(runs):
    first = load(runs("ddp").directory, 0)["records"]
    for mode in ("fsdp", "tp"):
        for one, other in zip(first, load(runs(mode).directory, 0)["records"], strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            for name, value in one["parameters"].items():
                assert (other["parameters"][name] - value).abs().max() <= 1.2e-7 * value.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_import_nothing_that_the_fork_server_had_not(runs, mode):
    assert runs(mode).imported == set()


def test_record_collectives_give_what_full_tensor_gives(tmp_path):
    done = launch(
        4, tmp_path / "logs", ROOT / "tests" / "tools" / "check_full_cpu_list.py", PYTHONPATH=str(ROOT)
    )
    stderr = "".join(path.read_text() for path in tmp_path.rglob("stderr.log"))
    assert done.status == 0, done.err + stderr
    stdout = "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))
    assert stdout.count("records identical") == 4


def test_bench_prints_its_table(call, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "tools")
    import bench

    done = call(bench.main, "--ranks", 1, 2, "--modes", "tp")
    assert done.status == 0, done.err
    header, *rows = done.out.splitlines()[1:]
    phases = ["start", "init", "wrap", "steps", "save", "end"]
    assert header.split()[3:14] == [*phases, "total", "GiB", "MiB", "compare", "read"]
    assert [row.split()[:3] for row in rows[::2]] == [["tp", "1", "launch.py"], ["tp", "2", "launch.py"]]
    one, two = ([float(cell) for cell in row.split()[3:]] for row in rows[::2])
    assert two[0] > 0 and abs(sum(two[:6]) - two[6]) < 0.4  # rounded cells
    assert two[8] > one[8] > 0 and two[9] > 0 and two[10] > 0


def parameter_and_optimizer(grad=True):
    weight = torch.nn.Parameter(torch.ones(2))

    def train_step(step):
        if grad:
            weight.grad = torch.ones(2)
        return weight, weight.sum()

    return weight, train_step


def test_train_takes_a_list_and_neither_output_nor_loss_as_the_tutorials_does():
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(3))]

    def train_step(step):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return (None, None) if step == 0 else (weights[0], weights[0].sum())

    for parameters in (weights, iter(weights)):
        first, second = training_common.train(parameters, torch.optim.SGD(weights, lr=0.5), 2, train_step)
        for kind in ("gradients", "parameters", "deltas"):
            assert list(first[kind]) == ["0", "1"]
        assert torch.equal(first["deltas"]["1"], torch.full((3,), -0.5))
        # Recorded, and as nothing: a file without these keys would be one of another format.
        assert [first[key] for key in ("output", "loss", "local_loss")] == [None, None, None]
        assert second["output"].shape == (2,) and second["loss"] == second["local_loss"]
        assert isinstance(second["loss"], float)


def test_losses_are_averaged_by_weight_and_none_stays_none(monkeypatch):
    def add_another_rank(total, group):
        total += torch.tensor([[0.0, 3 * 8.0], [1.0, 3.0]])  # its weighted losses, and its weights

    monkeypatch.setattr(training_common.dist, "all_reduce", add_another_rank)
    records = [{"loss": loss, "local_loss": loss} for loss in (None, 4.0)]
    training_common.average_losses(records, torch.device("cpu"))
    assert records == [{"loss": None, "local_loss": None}, {"loss": 7.0, "local_loss": 4.0}]


def test_gradients_are_those_before_the_optimizers_step():
    weight, train_step = parameter_and_optimizer()

    class ClippingSGD(torch.optim.SGD):
        def step(self):
            weight.grad.mul_(0.5)
            super().step()

    (record,) = training_common.train({"w": weight}, ClippingSGD([weight], lr=0.1), 1, train_step)
    assert record["gradients"]["w"].tolist() == [1.0, 1.0]


def test_weights_know_the_whole_mesh_as_the_tutorials_do():
    class Mesh(dict):
        def size(self):
            return 2

    mesh = Mesh(dp=Mesh(), tp=Mesh())
    weight = simplefsdp_tp_train.SimpleFSDPWeight(mesh, (8, 4), dp_dim=1, tp_dim=0)
    assert weight.mesh is mesh and weight.tp_shape == (4, 4)


def test_train_refuses_fewer_than_one_step():
    with pytest.raises(ValueError, match="steps is 0; use at least one"):
        training_common.train({}, None, 0, None)


def test_train_fails_without_any_gradient():
    weight, train_step = parameter_and_optimizer(grad=False)
    with pytest.raises(RuntimeError, match="step 1: no gradient reached any parameter"):
        training_common.train({"w": weight}, torch.optim.SGD([weight], lr=0.1), 1, train_step)


def test_train_fails_when_nothing_is_updated():
    weight, train_step = parameter_and_optimizer()
    with pytest.raises(RuntimeError, match="step 1: the optimizer changed no parameter"):
        training_common.train({"w": weight}, torch.optim.SGD([weight], lr=0.0), 1, train_step)


def test_file_gets_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "rank-0.pt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), training_common.write_then_rename(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.pt"] and path.read_text() == "old"
    with training_common.write_then_rename(path) as temporary:
        temporary.write_text("new")
        assert temporary.name == "rank-0.pt.tmp" and path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.pt"] and path.read_text() == "new"


@pytest.mark.parametrize(
    ("version", "stand_in"), [(None, False), ("2.14.3.0", False), ("2.14.0+standin", True)]
)
def test_stand_in_is_told_by_its_version(version, stand_in):
    assert training_common.is_stand_in(version) == stand_in


def test_parser_keeps_the_description_and_reports_in_one_line(capsys):
    parser = training_common.make_parser("First line.\n\n    python x.py\n")
    assert "First line.\n\n    python x.py\n" in parser.format_help()
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--unknown"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --unknown; --help lists the options\n"


def test_sizes_that_do_not_divide_are_named():
    training_common.check_divides("HIDDEN_FEATURES", 256, 4, "tp ranks")
    with pytest.raises(InputError, match="HIDDEN_FEATURES = 256 does not divide evenly over 3 tp ranks"):
        training_common.check_divides("HIDDEN_FEATURES", 256, 3, "tp ranks")


def test_wrong_local_shape_is_named():
    with pytest.raises(RuntimeError, match="0.weight is a Tensor, expected a DTensor: not sharded"):
        training_common.check_local_shape("0.weight", torch.ones(2), (2,))
