"""The page that report_training.py makes: what it says, that it needs nothing else, and its errors."""

import copy
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, run

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
import report_training  # noqa: E402  (it is of no use without the two)

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
        "tolerance": {"rtol": None, "atol": None, "norm_eps": 16.0, "element_eps": 64.0},
        "losses": [{"step": step, **losses} for step in range(1, steps + 1)],
        "kinds": [{"kind": "gradients", **errors}] if reference else [],
        "tensors": [tensor] if reference else [],
        "scores": [[0.0] + [0.13] * steps for _ in range(ranks)] if reference else [],
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


def page(directory, *comparisons):
    """Write the page of some comparisons, alone in a directory, and parse it; .source is its text."""
    path = directory / "report.html"
    report_training.write_report(list(comparisons), path)
    assert [entry.name for entry in directory.iterdir()] == ["report.html"]
    source = path.read_text(encoding="utf-8")
    parsed = Page(source)
    parsed.source = source
    return parsed


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A page of three comparisons: one passed, one failed, one without a reference."""
    comparisons = comparison(), failed(), comparison(reference=None)
    return page(tmp_path_factory.mktemp("three"), *comparisons)


@pytest.fixture
def no_figures(monkeypatch):
    """Leave the figures out, which take the most time, where only the words matter."""
    for name in ("draw_losses", "draw_scores"):
        monkeypatch.setattr(report_training, name, lambda comparison, prefix: ("<svg></svg>", "caption"))


def report(tmp_path, content, **environment):
    """Run the command line on a file with this content."""
    path, output = tmp_path / "compare.json", tmp_path / "report.html"
    path.write_text(content)
    command = (sys.executable, ROOT / "report_training.py", path, "--output", output)
    return run(*command, **environment), output


def refused(monkeypatch, capsys, *arguments):
    """Run main, which has to refuse; return its one line on stderr."""
    monkeypatch.setattr(sys, "argv", ["report_training.py", *map(str, arguments)])
    assert report_training.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_overview(three):
    assert three.text.startswith("Training parity: 3 comparisons: 2 PASS, 1 FAIL")
    assert "ddp PASS cpu → cpu 2.1 4 2 ddp FAIL cpu → neuron 2.1 4 2 ddp PASS no reference" in three.text
    assert three.tags.count("figure") == three.tags.count("svg") == len(three.values("aria-label")) == 5


def test_pass(tmp_path):
    made = page(tmp_path, comparison())
    assert "The run agrees with its reference on 4 ranks in 2 steps." in made.text
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


def test_cause_unknown_before_training(tmp_path, no_figures):
    first = failed()["first"] | {"step": 0, "check": "ranks agree", "ranks": [2]}
    text = page(tmp_path, failed(first=first, cause=None)).text
    assert "Where before training, gradients 0.weight Ranks 2 Check invariant: ranks agree" in text
    assert "Likely cause: none of the known ones fits; start from the first divergence." in text


def test_no_reference(three):
    text = three.text[three.text.index("PASS ddp: no reference → cpu, 4 ranks") :]
    assert "There was no reference to compare with. Checked: a run on a CPU. No accelerator" in text
    assert "Invariants" in text and "Tensors" not in text and "environment" not in text


def test_neuron_is_named_only_if_it_was_checked(tmp_path, no_figures):
    runs = ("cpu", "cpu"), ("cuda", "cpu"), ("cpu", None), ("cpu", "oracle")
    made = page(tmp_path, *(comparison(*labels) for labels in runs))
    assert "neuron" not in made.source.lower()
    assert made.text.count("No accelerator was checked.") == 3
    checked = [report_training.checked(comparison(*run)) for run in (("neuron", "cpu"), ("cpu", "neuron"))]
    assert checked[0] == "Checked: a run on Neuron. Reference: a run on a CPU."
    assert checked[1] == "Checked: a run on a CPU. Reference: a run on Neuron. No accelerator was checked."


def test_oracle(tmp_path):
    made = comparison("neuron", oracle=comparison("oracle")["actual"])
    made["oracle_errors"] = [{"kind": "gradients", "reference_eps": 2.0, "actual_eps": 2.5, "ratio": 1.25}]
    for loss in made["losses"]:
        loss["oracle"] = 0.7499
    text = page(tmp_path, made).text
    assert "gradients 2 2.5 1.25" in text and "|reference - oracle|" in text


def test_not_finite(tmp_path):
    made = failed(scores=[[0.0, None, None]] * 4)
    made["losses"][1]["actual"] = None
    for row in made["kinds"] + made["tensors"]:
        row |= dict.fromkeys(("eps", "score", "needed_rtol", "needed_norm_eps"))
        row["mismatched"] = 4
    text = page(tmp_path, made).text
    assert "ddp FAIL cpu → neuron not finite 4 2" in text
    assert "0.weight 4 8 not finite not finite none none 3 2" in text
    assert "8 not finite." in text and "not finite: failed" in text and "a loss not finite" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {},
            "rtol 64 eps, atol rtol x the largest magnitude in the tensor; norm of a tensor's error: at most",
        ),
        ({"rtol": 1e-5, "norm_eps": None}, "rtol 1e-05, atol rtol x"),
        (
            {"atol": 1e-6, "norm_eps": None, "default_norm_eps": 16.0},
            "atol 1e-06; norm of a tensor's error: not",
        ),
        ({"norm_eps": None, "default_norm_eps": 16.0}, "norm of a tensor's error: at most 16 eps."),
    ],
)
def test_tolerance(given, words):
    assert words in report_training.allowed(comparison()["tolerance"] | given)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (128, 30)])
def test_sizes(ranks, steps):
    scores = [[0.0, *(10.0 ** (rank % 7 - 4 + step % 3) for step in range(steps))] for rank in range(ranks)]
    svg, caption = report_training.draw_scores(comparison(ranks=ranks, steps=steps, scores=scores), "c1")
    assert f"Of {ranks * (steps + 1)} cells: {ranks} bitwise equal" in caption
    assert len(svg) < 300_000


def test_text_is_escaped(tmp_path, no_figures):
    evil = '<script>alert("1")</script> & </svg> {{ c }} \ud800'
    made = failed(cause=evil, created=evil)
    made["tensors"][0]["name"] = made["first"]["name"] = made["first"]["message"] = evil
    made["differences"][0]["actual"] = made["actual"]["directory"] = made["actual"]["metadata"]["mode"] = evil
    parsed = page(tmp_path, made)
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


def test_command_line_writes_the_same_page(tmp_path):
    # As another tool might write it: NaN is no JSON, but Python's own reader and writer know it.
    done, output = report(tmp_path, json.dumps(failed()).replace("300.0", "NaN"))
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{output} written, 1 comparison: 0 PASS, 1 FAIL\n"
    assert not list(tmp_path.glob(".*"))
    here = tmp_path / "here"
    here.mkdir()
    scores = failed()["scores"][:3] + [[0.0, 0.5, None]]
    assert page(here, failed(scores=scores)).source == output.read_text(encoding="utf-8")


def test_missing_package(tmp_path):
    missing = tmp_path / "shadow"
    missing.mkdir()
    (missing / "jinja2.py").write_text('raise ModuleNotFoundError("no jinja2", name="jinja2")')
    done, output = report(tmp_path, json.dumps(comparison()), PYTHONPATH=str(missing))
    assert (done.status, done.out, output.exists()) == (2, "", False)
    assert done.err == "error: jinja2 is missing, the page needs it; pip install -r requirements-report.txt\n"


def without(key):
    return {name: value for name, value in comparison().items() if name != key}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        ("", "empty, cut off or no JSON"),
        (json.dumps(comparison())[:-9], "empty, cut off or no JSON"),
        ("[]", "another schema, 'list'"),
        (comparison(schema="parity-comparison-9"), "another schema, 'parity-comparison-9'"),
        (without("tensors"), "comparison lacks tensors"),
        (comparison(verdict="MAYBE"), "verdict is 'MAYBE'"),
        (comparison(actual="$\\frac$"), "label is none of oracle, cpu, neuron, cuda"),
        (comparison(scores=[[0.0]]), "scores is not 3 numbers for each of 4 ranks"),
        (comparison(losses=[{"step": 1}]), "losses[0] lacks reference, actual"),
        (comparison(findings="many"), 'findings is "many"'),
        (comparison(kinds={}), "kinds is no list"),
        (comparison(first=[]), "first is no object"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, content, problem):
    path, output = tmp_path / "compare.json", tmp_path / "report.html"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    line = refused(monkeypatch, capsys, path, "--output", output)
    assert line.startswith(f"error: {path} ") and problem in line
    assert "compare_training.py --json" in line and not output.exists()


def test_output_that_cannot_be_written(tmp_path, monkeypatch, capsys, no_figures):
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(comparison()))
    assert "also an input" in refused(monkeypatch, capsys, path, "--output", path)
    assert "cannot be written" in refused(monkeypatch, capsys, path, "--output", tmp_path / "no" / "r.html")
    assert "cannot be written" in refused(monkeypatch, capsys, path, "--output", path / "r.html")


def test_earlier_page_stays_whole_if_writing_fails(tmp_path, monkeypatch, no_figures):
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full(self, target):
        assert self.name != "report.html" and self.read_text(encoding="utf-8").endswith("</html>")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(report_training.InputError, match="No space left"):
        report_training.write_report([comparison()], path)
    assert path.read_text() == "earlier" and [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
