"""The page that report_training.py makes: what it says, that it needs nothing else, and its errors."""

import copy
import json
import re
import runpy
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import RANKS, ROOT, fork, refusal, run, run_here

import compare_training

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
import report_training  # noqa: E402  (it is of no use without the two)
import training_figures  # noqa: E402

TOLERANCE = {"rtol": None, "atol": None, "norm_eps": None, "element_eps": 64.0, "default_norm_eps": 16.0}
VOID = {"meta", "path", "use", "image", "rect"}


def comparison(actual="cpu", reference="cpu", ranks=4, steps=2, **changes):
    """A passed comparison, as compare_training.py describes it."""

    def described(label):
        metadata = {"mode": "ddp", "device": label, "seed": 0, "learning_rate": 0.01}
        return {"label": label, "directory": f"results/{label}", "metadata": metadata}

    errors = {"compared": 8, "mismatched": 0, "eps": 2.1, "score": 0.13, "needed_rtol": 1e-7}
    errors["needed_norm_eps"] = 2.1
    tensor = {"kind": "gradients", "name": "0.weight", **errors, "worst_rank": 3, "worst_step": 2}
    check = {"name": "finite", "text": "no value is NaN or infinite", "checked": 8, "failed": 0}
    losses = {"reference": 0.75, "actual": 0.75} if reference else {"actual": 0.75}
    made = {
        "schema": report_training.SCHEMA,
        "verdict": "PASS",
        "created": "2026-11-29T17:00:00+00:00",
        "world_size": ranks,
        "steps": steps,
        "reference": described(reference) if reference else None,
        "actual": described(actual),
        "oracle": None,
        "differences": [],
        "tolerance": TOLERANCE,
        "losses": [{"step": step, **losses} for step in range(1, steps + 1)],
        "kinds": [{"kind": "gradients", **errors}] if reference else [],
        "tensors": [tensor] if reference else [],
        "scores": [[0.0] + [0.13] * steps for _ in range(ranks)] if reference else [],
        "largest_errors": [
            {"step": step, "eps": 2.0**step, "kind": "gradients", "name": "0.weight"}
            for step in range(1, steps + 1)
        ]
        if reference
        else [],
        "invariants": [{"run": "actual", **check}],
        "findings": 0,
        "failed_ranks": [],
        "first": None,
        "cause": None,
        "oracle_errors": None,
    }
    return copy.deepcopy(made | changes)


def failed(**changes):
    """A comparison that failed in gradients from step 2 on."""
    made = comparison(actual="neuron", verdict="FAIL", findings=6, failed_ranks=[0, 1, 3])
    made["cause"] = "gradients of every rank are 4.00x the reference"
    first = {"step": 2, "rank": 0, "ranks": [0, 1, 3], "kind": "gradients", "name": "0.weight"}
    made["first"] = first | {"check": "reference", "message": "[5]: reference 0.1, actual 0.4"}
    made["differences"] = [{"key": "device", "reference": "cpu", "actual": "neuron"}]
    made["scores"][3] = [0.0, 0.5, 300.0]
    made["losses"][1]["actual"] = 0.8
    return made | changes


class Page(HTMLParser):
    """A page's tags, attributes and text; raises ValueError if its tags are not nested as they should."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], "", []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"not closed: {self.open}")

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in VOID and self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes another tag")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words += " " + data

    def values(self, *names):
        return [value for name, value in self.attributes if name in names]

    @property
    def text(self):
        return " ".join(self.words.split())


def page(*comparisons):
    """Return the page of some comparisons, parsed; .source is its text."""
    source = report_training.make_page(list(comparisons))
    parsed = Page(source)
    parsed.source = source
    return parsed


@pytest.fixture(scope="module")
def three():
    """A page of three comparisons: one passed, one failed, one without a reference."""
    return page(comparison(), failed(), comparison(reference=None))


@pytest.fixture
def no_figures(monkeypatch):
    """Leave the figures out, which take the most time, where only the words matter."""
    for name in ("draw_losses", "draw_scores", "draw_path"):
        monkeypatch.setattr(report_training, name, lambda comparison, prefix: ("<svg></svg>", "caption"))


@pytest.fixture
def report(tmp_path, call):
    """A function that runs the command line on files with these contents: done and the page's path."""

    def run_main(*contents, output=tmp_path / "report.html"):
        paths = [tmp_path / f"compare-{index}.json" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            if content is not None:
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        return call(report_training.main, *paths, "--output", output), output

    return run_main


def test_overview(three):
    assert three.text.startswith("Training parity: 3 comparisons: 2 PASS, 1 FAIL")
    assert "ddp PASS cpu → cpu 2.1 4 2 ddp FAIL cpu → neuron 2.1 4 2 ddp PASS no reference" in three.text
    assert three.tags.count("figure") == three.tags.count("svg") == len(three.values("aria-label")) == 5


def test_pass():
    made = page(comparison())
    assert "The run agrees with its reference on 4 ranks in 2 steps." in made.text
    assert "Largest error: 2 eps in step 1, 4 eps in step 2 (gradients 0.weight)" in made.text
    assert "Of 12 cells: 4 bitwise equal, 0 above 1 (failed), 0 not finite." in made.text
    assert "gradients 0 8 2.1 0.13 1e-07 2.1 0.weight 0 8 2.1 0.13 1e-07 2.1 3 2" in made.text
    assert "Nothing that was recorded of the environment differs." in made.text
    assert "Likely cause" not in made.text and "First divergence" not in made.text


def test_fail_names_cause_and_first_divergence(three):
    text = three.text
    assert "FAIL ddp: cpu → neuron, 4 ranks Likely cause: gradients of every rank are 4.00x" in text
    assert "Where step 2, gradients 0.weight Ranks 0-1, 3 Check reference Message [5]: reference" in text
    assert "6 findings in 2 steps of 4 ranks. Failed: 3 ranks: 0-1, 3." in text
    assert "above 1: failed" in text and "1 above 1 (failed)" in text
    assert "key reference actual device cpu neuron" in text


def test_cause_unknown_before_training(no_figures):
    first = failed()["first"] | {"step": 0, "check": "ranks agree", "ranks": [2]}
    text = page(failed(first=first, cause=None)).text
    assert "Where before training, gradients 0.weight Ranks 2 Check invariant: ranks agree" in text
    assert "Likely cause: none of the known ones fits; start from the first divergence." in text


def test_no_reference(three):
    text = three.text[three.text.index("PASS ddp: no reference → cpu, 4 ranks") :]
    assert "There was no reference to compare with. Checked: a run on a CPU. No accelerator" in text
    assert "Invariants" in text and "Tensors" not in text and "environment" not in text


def test_neuron_is_named_only_if_it_was_checked(no_figures):
    runs = ("cpu", "cpu"), ("cuda", "cpu"), ("cpu", None), ("cpu", "oracle")
    made = page(*(comparison(*labels) for labels in runs))
    assert "neuron" not in made.source.lower()
    assert made.text.count("No accelerator was checked.") == 3
    checked = [
        report_training.describe_devices(comparison(*run)) for run in (("neuron", "cpu"), ("cpu", "neuron"))
    ]
    assert checked[0] == "Checked: a run on Neuron. Reference: a run on a CPU."
    assert checked[1] == "Checked: a run on a CPU. Reference: a run on Neuron. No accelerator was checked."


def test_oracle():
    made = comparison("neuron", oracle=comparison("oracle")["actual"])
    made["oracle_errors"] = [{"kind": "gradients", "reference_eps": 2.0, "actual_eps": 2.5, "ratio": 1.25}]
    for loss in made["losses"]:
        loss["oracle"] = 0.7499
    text = page(made).text
    assert "gradients 2 2.5 1.25" in text and "|reference - oracle|" in text


def test_not_finite():
    made = failed(scores=[[0.0, None, None]] * 4)
    made["losses"][1]["actual"] = None
    for row in made["kinds"] + made["tensors"]:
        row |= dict.fromkeys(("eps", "score", "needed_rtol", "needed_norm_eps"))
        row["mismatched"] = 4
    text = page(made).text
    assert "ddp FAIL cpu → neuron not finite 4 2" in text
    assert "0.weight 4 8 not finite not finite none none 3 2" in text
    assert "8 not finite." in text and "not finite: failed" in text and "a loss not finite" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "rtol 64 eps, atol rtol x the largest magnitude in the tensor; norm of"),
        ({}, "norm of a tensor's error: at most 16 eps."),
        ({"rtol": 1e-5}, "rtol 1e-05, atol rtol x the largest magnitude in the tensor; norm of"),
        ({"atol": 1e-6}, "atol 1e-06; norm of a tensor's error: not judged."),
        ({"rtol": 1e-5, "norm_eps": 8.0}, "norm of a tensor's error: at most 8 eps."),
    ],
)
def test_tolerance(given, words):
    assert words in report_training.describe_tolerance(TOLERANCE | given)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (128, 30)])
def test_sizes(ranks, steps):
    scores = [[0.0, *(10.0 ** (rank % 7 - 4 + step % 3) for step in range(steps))] for rank in range(ranks)]
    svg, caption = training_figures.draw_scores(comparison(ranks=ranks, steps=steps, scores=scores), "c1")
    assert f"Of {ranks * (steps + 1)} cells: {ranks} bitwise equal" in caption
    assert len(svg) < 300_000


def test_text_is_escaped(report, no_figures):
    evil = '<script>alert("1")</script> & </svg> {{ c }} \ud800'
    made = failed(cause=evil, created=evil)
    made["tensors"][0]["name"] = made["first"]["name"] = made["first"]["message"] = evil
    made["differences"][0]["actual"] = made["actual"]["directory"] = made["actual"]["metadata"]["mode"] = evil
    done, output = report(made)
    assert (done.status, done.err) == (0, "")
    parsed = Page(output.read_text(encoding="utf-8"))
    assert "script" not in parsed.tags and parsed.text.count(evil.replace("\ud800", r"\ud800")) >= 7


def test_page_needs_nothing_else(three):
    assert not re.search("https?:|@import", three.source)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", three.source))
    targets = three.values("src", "href", "xlink:href")
    assert targets and all(target.startswith(("#", "data:image/png;base64,")) for target in targets)
    assert not {"script", "link", "iframe", "object"} & set(three.tags)
    assert ("name", "viewport") in three.attributes and ("lang", "en") in three.attributes


def test_ids_are_unique_and_point_somewhere(three):
    ids = three.values("id")
    assert len(ids) == len(set(ids))
    used = re.findall(r"url\(#([^)]*)\)", three.source) + three.values("aria-labelledby")
    used += [value[1:] for value in three.values("href", "xlink:href") if value.startswith("#")]
    assert {"c1", "c2", "c3"} <= set(used) <= set(ids)


def test_command_line_writes_the_same_page_each_time(tmp_path):
    path, output = tmp_path / "compare.json", tmp_path / "report.html"
    path.write_text(json.dumps(failed()))
    done = run(sys.executable, ROOT / "report_training.py", path, "--output", output)
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{output} written, 1 comparison: 0 PASS, 1 FAIL\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["compare.json", "report.html"]
    assert page(failed()).source == output.read_text(encoding="utf-8")


def test_real_comparison(runs, compare, report, no_figures, tmp_path):
    written = tmp_path / "ddp.json"
    done = compare("--actual-dir", runs("ddp").directory, "--world-size", RANKS, "--json", written)
    assert done.status == 0, done.err
    done, output = report(written.read_text())
    assert (done.status, done.err) == (0, "")
    assert "Every invariant holds on 4 ranks in 3 steps." in Page(output.read_text(encoding="utf-8")).text


# ---------------------------------------------------------------- recordings

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
if ranks > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    (loss * ranks if "summed" in sys.argv else loss).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Comparisons of recordings on two ranks with one on one rank, by what the script was told."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "job.py").write_text(SCRIPT)
    recorder = [ROOT / "record_training.py", "--output-dir"]
    jobs = {"one": (0, *recorder, folder / "one", folder / "job.py")}
    for told in ("averaged", "summed"):
        jobs[told] = 2, *recorder, folder / told, folder / "job.py", told
    statuses = fork(folder, jobs)
    assert not any(map(any, statuses.values())), statuses
    found = {}
    for told in ("averaged", "summed"):
        runs = ["--reference-dir", folder / "one", "--actual-dir", folder / told]
        run_here(compare_training.main, *runs, "--json", folder / f"{told}.json")
        found[told] = report_training.load_comparison(folder / f"{told}.json")
    return found


def test_recordings_that_agree(recorded):
    made = page(recorded["averaged"])
    assert made.tags.count("figure") == 3 and "Error of every activation and gradient" in made.text
    assert "Of 8 tensors 0 failed." in made.text
    assert "run verdict reference → actual" in made.text
    assert "job.py averaged PASS cpu → cpu" in made.text and "PASS job.py averaged: cpu → cpu, 2" in made.text
    assert "norm of a tensor's error at most 16 eps, as sketches" in made.text and "rtol" not in made.text
    assert "world_size 1 2 backend none gloo" in made.text
    assert "/one : job.py, 1 rank, torch" in made.text
    assert "/averaged : job.py averaged, 2 ranks with gloo, torch" in made.text
    assert "None" not in made.text and "job:" not in made.text and "Notes" not in made.text


def test_recordings_that_differ(recorded):
    made = page(recorded["summed"], comparison())
    failed = failed_places(recorded["summed"])
    assert len(failed) >= 5 and f"Of 8 tensors {len(failed)} failed." in made.text
    assert "FAIL job.py summed: cpu → cpu, 2 ranks Likely cause: " in made.text
    assert "PASS ddp: cpu → cpu, 4 ranks" in made.text and "passes at rtol" in made.text
    assert "None" not in made.text.replace("None of", "")
    ids = made.values("id")
    assert len(ids) == len(set(ids))


def failed_places(recorded):
    """Return the places on the path of tensors that failed: all gradients, activations of later steps."""
    bad = {(row["kind"], row["name"]) for row in recorded["tensors"] if row["mismatched"]}
    return {place for place, row in enumerate(recorded["path"]) if (row["kind"], row["name"]) in bad}


def drawn(recorded, monkeypatch, **changes):
    """Return the axes of the picture of a path, its legend and its caption."""
    figures = []
    to_svg = training_figures.to_svg
    monkeypatch.setattr(training_figures, "to_svg", lambda *given: figures.append(given[0]) or to_svg(*given))
    svg, caption = training_figures.draw_path({**recorded, **changes}, "c1")
    (figure,) = figures
    (axes,) = figure.axes
    return axes, [text.get_text() for text in figure.legends[0].get_texts()], caption


def test_path_is_in_the_order_of_execution(recorded, monkeypatch):
    axes, legend, caption = drawn(recorded["averaged"], monkeypatch)
    names = ["0", "1", "2", "(model)", "2.bias", "2.weight", "0.bias", "0.weight"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert legend == ["step 1", "step 2", "step 3"]
    assert {"16 eps", "activations, forward", "gradients, backward"} == {t.get_text() for t in axes.texts}
    assert axes.get_xticklabels()[0].get_text() == "0" and axes.get_xticks()[0] == axes.get_xlim()[0] == 0
    first = [line for line in axes.lines if line.get_label() == "step 1"][0]
    assert list(first.get_ydata()) == [0, 1, 2, 3] and not list(first.get_xdata())[0]
    assert [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]] == [16.0]
    assert "names" not in caption and not axes.collections


def test_path_marks_what_failed(recorded, monkeypatch):
    axes, legend, _ = drawn(recorded["summed"], monkeypatch)
    assert legend[-1] == "failed"
    (marks,) = axes.collections
    steps = [(round(row), error) for error, row in marks.get_offsets()]
    assert len([row for row, _ in steps if row >= 4]) == 12  # each gradient in three steps
    assert {row for row, _ in steps} == failed_places(recorded["summed"])
    assert all(error > 16 for _, error in steps)


def test_path_without_numbers_and_with_many_names(recorded, monkeypatch):
    names = [f"model.layers.{index}.attention.projection" for index in range(300)]
    path = [{"kind": "activations", "name": name, "eps": [0.0, 2.0]} for name in names]
    path += [{"kind": "gradients", "name": f"{name}.weight", "eps": [1.0, 3.0]} for name in names[::-1]]
    for place in path:
        place["failed"] = [False, False]
    path[151] |= {"eps": [1.0, None], "failed": [False, True]}
    axes, legend, caption = drawn(recorded["summed"], monkeypatch, path=path)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert 40 < len(labels) <= 62 and "…151.attention.projection" in labels
    assert max(map(len, labels)) <= training_figures.NAME and len(set(labels)) == len(labels)
    assert axes.get_xticklabels()[-1].get_text() == "n/a" and "n/a: the error is no number" in caption
    (mark,) = axes.collections
    assert mark.get_offsets().tolist() == [[axes.get_xlim()[1], 151]]
    assert "Of 600 tensors 1 failed. n/a" in caption and f"{len(labels)} of the names are shown" in caption
    assert legend == ["step 1", "step 2", "failed"]
    assert axes.figure.get_figheight() < 10


def test_many_steps_share_a_legend(recorded, monkeypatch):
    even = {"eps": [0.0] * 50, "failed": [False] * 50}
    path = [{**place, **even} for place in recorded["averaged"]["path"]]
    axes, legend, _ = drawn(recorded["averaged"], monkeypatch, path=path)
    assert legend == ["step 1", "step 11", "step 21", "step 30", "step 40", "step 50"]
    assert len(axes.lines) == 2 * 50 + 2


def test_notes_are_listed(recorded, no_figures):
    made = page(comparison(notes=["one < two", "three"]), comparison(notes=[], path=[]), comparison())
    assert "Notes one < two three" in made.text and made.text.count("Notes") == 1
    assert page(comparison(notes=[], path=[])).source == page(comparison()).source


def test_recording_whose_loss_was_not_seen(recorded, no_figures):
    losses = [{"step": step, "reference": None, "actual": None} for step in (1, 2)]
    assert page(recorded["averaged"] | {"losses": losses, "path": []}).tags.count("svg") == 1


def test_recording_of_another_device(recorded, no_figures):
    run = recorded["averaged"]["actual"] | {"label": "mps"}
    words = "Checked: a run on mps. Reference: a run on a CPU. No accelerator was checked."
    assert report_training.describe_devices(recorded["averaged"] | {"actual": run}) == words


def test_long_names_are_cut_where_they_tell_least():
    assert training_figures.shorten("model.layers.31.attention.k.weight") == "…31.attention.k.weight"
    assert training_figures.shorten("h.7.attention.projection.weight") == "…7.attention.…jection.weight"
    assert training_figures.shorten("a" * 20 + "b" * 20) == "a" * 13 + "…" + "b" * 14
    assert training_figures.shorten("layers.0.weight") == "layers.0.weight"


def test_missing_package(call, monkeypatch, tmp_path):
    path, output = tmp_path / "compare.json", tmp_path / "report.html"
    path.write_text(json.dumps(comparison()))
    monkeypatch.setitem(sys.modules, "jinja2", None)  # as if it were not installed
    script = partial(runpy.run_path, str(ROOT / "report_training.py"), run_name="__main__")
    wanted = "error: jinja2 is missing, the page needs it; pip install -r requirements-report.txt\n"
    assert refusal(call(script, path, "--output", output)) == wanted and not output.exists()


def test_missing_template(report, monkeypatch, tmp_path):
    monkeypatch.setattr(report_training, "TEMPLATE", tmp_path / "report_training.html")
    line = refusal(report(comparison())[0])
    assert line.endswith("report_training.html is missing; copy it with report_training.py\n")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        ("", "empty, cut off or no JSON"),
        (json.dumps(comparison())[:-9], "empty, cut off or no JSON"),
        ("[]", "of another schema, None"),
        (comparison(schema="parity-comparison-9"), "of another schema, 'parity-comparison-9'"),
    ],
)
def test_input_of_another_kind(report, tmp_path, content, problem):
    done, output = report(content)
    line = refusal(done)
    assert line.startswith(f"error: {tmp_path / 'compare-0.json'} ") and problem in line
    assert "expected parity-comparison-1" in line and "compare_training.py --json" in line
    assert done.out == "" and not output.exists()


@pytest.mark.parametrize("key", sorted(set(comparison()) - {"schema"}))
def test_comparison_that_lacks_something(report, no_figures, tmp_path, key):
    damaged = failed()
    del damaged[key]
    done, output = report(damaged)
    line = refusal(done)
    assert line.startswith(f"error: {tmp_path / 'compare-0.json'} is damaged: ") and key in line
    assert line.endswith("; compare the runs again\n") and not output.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"kinds": None},
        {"kinds": [{"kind": "gradients"}]},
        {"first": {"step": 1}},
        {"tolerance": {}},
        {"actual": {"label": "$", "directory": "results", "metadata": {"mode": "ddp"}}},
    ],
)
def test_damaged_comparison_among_others(report, no_figures, change):
    done, output = report(failed(**change), comparison())
    assert "error: one of " in refusal(done) and "compare-1.json is damaged: " in done.err
    assert not output.exists()


@pytest.mark.parametrize("change", [{"losses": [{"step": 1}]}, {"scores": [[0.0], [0.0, 1.0]]}])
def test_damaged_figures(report, change):
    done, output = report(comparison(**change))
    assert "compare-0.json is damaged: " in refusal(done) and not output.exists()


def test_command_line_is_refused_in_one_line(call):
    done = call(report_training.main)
    assert "--help lists the options" in refusal(done) and "--output" in done.err


def test_output_that_cannot_be_written(report, tmp_path, no_figures):
    path = tmp_path / "compare-0.json"
    assert "also an input" in refusal(report(comparison(), output=path)[0])
    assert "cannot be written" in refusal(report(comparison(), output=tmp_path / "no" / "r.html")[0])
    assert "cannot be written" in refusal(report(comparison(), output=path / "r.html")[0])


def test_earlier_page_stays_whole_if_writing_fails(report, tmp_path, monkeypatch, no_figures):
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full(self, target):
        assert self.name != "report.html" and self.read_text(encoding="utf-8").endswith("</html>")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left" in refusal(report(comparison())[0])
    assert path.read_text() == "earlier"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["compare-0.json", "report.html"]
