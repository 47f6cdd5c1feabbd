"""The page that a run leaves: whole without a network, and safe whatever its texts hold."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.report import (
    DataSample,
    Facts,
    TextSample,
    write_png,
    write_report,
    write_samples,
)
from qlora_wgpu.report.page import (
    _DOTS,
    _MAX_POINTS,
    Axis,
    Line,
    chart,
    dots,
    log_ticks,
    page,
    smoothed,
    smoothing_length,
    thinned,
    ticks,
)
from qlora_wgpu.training.integrations import TensorBoard, flat, services
from qlora_wgpu.training.observers import Events

ROWS = [
    {"step": 0, "eval_loss": 3.0},
    *(
        {"step": i, "loss": 3 - i / 10, "learning_rate": 1e-4 * i, "grad_norm": 1.0,
         "tokens_per_second": 1000.0 + i}
        for i in range(1, 11)
    ),
    {"step": 10, "eval_loss": 2.1},
]  # fmt: skip


def test_a_page(tmp_path):
    facts = Facts(
        title="<model> & data", subtitle="a device", values={"loss": "2.0"},
        samples=[TextSample("p", "e", "b", "<script>alert(1)</script>")],
        memory={"base": 3 << 20, "tables": 100, "none": 0}, config="model: {path: <x>}",
        command="qlora-wgpu train 'a b.yaml'", began="2026-01-02", warnings=["mind <this>"],
    )  # fmt: skip
    write_report(tmp_path / "r.html", facts, ROWS)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "<script>" not in text and "&lt;script&gt;" in text and "&lt;model&gt; &amp;" in text
    assert not re.search(r"(src|href)=|https?://", text)  # nothing is fetched
    assert text.count("<svg") == 4 and "3.0 MiB" in text and "0.0 MiB" not in text
    assert "step 10 \u00b7 as logged 2 \u00b7 held-out 2.1" in text  # what a pointer shows
    for part in ("2026-01-02", "qlora-wgpu train &#39;a b.yaml&#39;", "mind &lt;this&gt;"):
        assert part in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(svg)


def test_a_page_of_a_run_that_goes_on_is_read_again():
    facts = Facts("t", "s", {}, is_finished=False)
    again = page(facts, ROWS)
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in again
    assert again.count("location.reload()") == 1
    over = page(replace(facts, is_finished=True), ROWS)
    assert "refresh" not in over and "<script" not in over and "reload" not in over


SCRIPT = "<script>alert('x' + \"y\")</script>"


class Skeleton(HTMLParser):
    """The elements and the texts of a page, as a browser reads them."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def skeleton(facts):
    parser = Skeleton()
    parser.feed(page(facts, ROWS))
    return parser


def test_whatever_stands_in_a_name_is_text():
    def facts(text):
        sample = TextSample(text, text, text, text)
        told = {"command": text, "began": text, "state": text, "warnings": [text]}
        return Facts(text, text, {text: text}, [sample], {text: 1 << 20}, text, **told)

    hostile, plain = skeleton(facts(SCRIPT)), skeleton(facts("a word"))
    assert hostile.tags == plain.tags and "script" not in hostile.tags
    assert hostile.texts.count(SCRIPT) == plain.texts.count("a word") == 14
    [warning] = [text for text in hostile.texts if text.endswith(SCRIPT) and text != SCRIPT]
    assert warning.startswith("\u26a0")


def test_samples_of_data_are_text_next_to_pictures(tmp_path):
    def parsed(text):
        sample = DataSample(text, [(text, True), (text, False)], [("data:,x", text), ("", text)])
        write_samples(tmp_path / "page.html", text, [sample], text)
        parser = Skeleton()
        parser.feed((tmp_path / "page.html").read_text("utf-8"))
        return parser

    hostile, plain = parsed(SCRIPT), parsed("a word")
    assert hostile.tags == plain.tags and "script" not in hostile.tags
    assert plain.tags.count("mark") == 2 and plain.tags.count("img") == 1
    assert hostile.texts.count(SCRIPT) == plain.texts.count("a word") == 8


def test_pictures_of_prompts_stand_next_to_them():
    samples = [TextSample("p", "e", "b", pictures=["data:,1", 'data:,2"><script>']),
               TextSample("q", "e", "b")]  # fmt: skip
    made = skeleton(Facts("t", "s", {}, samples))
    assert made.tags.count("img") == 2 and "script" not in made.tags


def test_marks_of_direction_have_no_power_on_the_page():
    sample = TextSample("p", "e", "b", after="d\u2066e\nf")
    facts = Facts("a\u202eb", "c\x1b[2J", {}, [sample], {}, "g\x9b")
    text = page(facts, ROWS)
    for shown in (r"a\u202eb", r"c\x1b[2J", "d\\u2066e\nf", r"g\x9b"):
        assert shown in text
    assert not set("\u202e\u2066\x1b\x9b") & set(text)


def test_names_in_charts_are_text():
    svg = chart(SCRIPT, [Line(SCRIPT, "dots", [(1, 2.0)])], lambda value: SCRIPT)
    assert "<script>" not in svg and "&lt;script&gt;" in svg
    ElementTree.fromstring(svg)


def test_a_run_without_figures(tmp_path):
    write_report(tmp_path / "r.html", Facts("t", "s", {}), [{"step": 1, "loss": None}])
    assert "<svg" not in (tmp_path / "r.html").read_text("utf-8")
    assert chart("x", [Line("", "main", [(1, 2.0)])]).count('class="dot main"') == 1


def test_axes():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(2.9, 3.1) == pytest.approx([2.9, 2.95, 3.0, 3.05, 3.1])
    assert len(ticks(0, 60)) <= 7 and len(ticks(1e-9, 3e-9)) >= 2


def test_of_many_points_each_stretch_keeps_its_ends():
    """Of neighbouring stretches each has its own points alone; few points all stay."""
    points, size = [(step, float(step)) for step in range(4000)], 10
    ends = [points[at] for first in range(0, 4000, size) for at in (first, first + size - 1)]
    assert thinned(points) == ends and len(ends) == _MAX_POINTS
    assert thinned(points[:_MAX_POINTS]) == points[:_MAX_POINTS]
    assert len(thinned(points[: _MAX_POINTS + 1])) <= _MAX_POINTS


@pytest.mark.parametrize("last", [1, 2, 3, 30])
def test_steps_are_whole_numbers(last):
    drawn = chart("x", [Line("", "main", [(1, 2.0), (last, 2.0)])])
    marks = re.findall(r'<i class="x[^>]*>([^<]*)</i>', drawn)
    assert marks and all(mark.isdigit() for mark in marks)


@pytest.mark.parametrize(("rate", "mark"), [(0.0, "0"), (3e-4, "3.0e-04")])
def test_a_rate_that_never_changes_is_marked_once(rate, mark):
    rows = [{"step": step, "learning_rate": rate} for step in (1, 2)]
    marks = re.findall(r'<i class="y"[^>]*>([^<]*)</i>', page(Facts("t", "s", {}), rows))
    assert marks == [mark]


def test_texts_stand_without_the_blanks_around_them():
    facts = Facts("t", "s", {}, samples=[TextSample(" p", " e\n", "", " a")])
    text = page(facts, ROWS)
    for part in ("<dd>p</dd>", "<dd>e</dd>", "<dd>(empty)</dd>", "<dd>a</dd>"):
        assert part in text


def test_a_logarithmic_axis_where_values_span_several_sizes():
    falling = [(i, 8.0 * 0.9**i) for i in range(40)]
    assert "loss (logarithmic)" in chart("loss", [Line("", "main", falling)], may_be_log=True)
    assert "(logarithmic)" not in chart("loss", [Line("", "main", falling)])
    for points in ([(0, 3.0), (1, 2.0)], [(0, 3.0), (1, 0.0)], [(0, -1.0), (1, 100.0)]):
        assert "(logarithmic)" not in chart("x", [Line("", "main", points)], may_be_log=True)
    axis = Axis.of_values([0.1, 10.0], may_be_log=True)
    assert axis.share(1.0) == pytest.approx(0.5)
    for low, high in ((1e-9, 1e9), (0.9, 5.1), (3.1, 3.4 * 5), (2e-5, 1.1e-4)):
        marks = log_ticks(low, high)
        assert 2 <= len(marks) <= 8 and all(low <= mark <= high for mark in marks), marks


def test_many_points_keep_what_stands_out():
    points = [(i, 1.0 + (i == 7777) * 9 - (i == 1234) * 0.5) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 1000 and {(7777, 10.0), (1234, 0.5)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    svg = chart("x", [Line("", "main", points)])
    assert len(svg) < 60_000 and 50 < svg.count("<b>step") <= 160


def test_grid_lines_are_where_their_labels_are():
    text = chart("x", [Line("", "main", [(1, 1.0), (9, 4.0)])])
    labels = [float(percent) for percent in re.findall(r'class="y" style="bottom:([\d.]+)%', text)]
    lines = [float(y) for y in re.findall(r'class="grid" .*?y1="([\d.]+)"', text)]
    assert len(lines) > 1 and lines == pytest.approx([10 * (100 - p) for p in labels], abs=0.2)


def test_values_under_the_pointer_are_the_latest_up_to_it():
    lines = [Line("a", "main", [(1, 1.0), (4, 4.0)]), Line("b", "dots", [(2, 7.0)])]
    text = chart("x", lines)
    for shown in ("step 1 \u00b7 a 1<", "step 2 \u00b7 a 1 (step 1) \u00b7 b 7<",
                  "step 4 \u00b7 a 4 \u00b7 b 7 (step 2)<"):  # fmt: skip
        assert shown in text


def test_smoothing_has_no_bias():
    for logs in (False, True):
        level = smoothed([(i, 3.0) for i in range(50)], in_logarithms=logs)
        assert [y for _, y in level] == pytest.approx([3.0] * 50)
    halving = [(i, 2.0**-i) for i in range(30)]
    ratios = [
        m / y for (_, y), (_, m) in zip(halving, smoothed(halving, in_logarithms=True), strict=True)
    ]
    assert "EMA of logarithms over about 3 points" in page(
        Facts("t", "s", {}), [{"step": i, "loss": y} for i, y in halving]
    )
    assert max(ratios) < 2**3  # about three points late, anywhere
    assert smoothed([(1, 5.0)]) == [(1, 5.0)]


@pytest.mark.slow
def test_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")  # an extra
    assert write_png(tmp_path / "loss.png", ROWS)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not write_png(tmp_path / "other.png", ROWS)


def test_services_that_are_not_installed(tmp_path, monkeypatch):
    for name, module in (("tensorboard", "tensorboard.compat.proto.event_pb2"), ("wandb", "wandb"),
                         ("trackio", "trackio")):  # fmt: skip
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=f'pip install "{name}>='):
            services([name], tmp_path, {})
    assert services([], tmp_path, {}) == []


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")  # an extra
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    for row in ROWS:
        (board.evaluation if "eval_loss" in row else board.step)(row)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 11))
    assert [round(e.value, 3) for e in events.Scalars("eval/eval_loss")] == [3.0, 2.1]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in, which keeps what it is told: the service needs an account."""
    told = []

    class Run:
        def __init__(self, id):
            self.id = id

        def log(self, values, step):
            told.append((step, values))

        def finish(self):
            told.append("finished")

    class Module:
        @staticmethod
        def init(**options):
            told.append(options)
            return Run(options.get("id", f"new-{len(told)}"))

    monkeypatch.setitem(sys.modules, "wandb", Module)
    return told


def test_a_row_with_workers_is_passed_on_value_by_value():
    workers = {"0": {"share": 0.75, "tokens_per_second": 9.0}, "1": {"share": 0.25, "x": None}}
    assert flat({"step": 3, "loss": 1.5, "workers": workers}) == {
        "loss": 1.5,
        "workers/0/share": 0.75,
        "workers/0/tokens_per_second": 9.0,
        "workers/1/share": 0.25,
    }


def test_weights_and_biases(tmp_path, wandb):
    [service] = services(["wandb"], tmp_path / "run", {"lora": {"r": 4}})
    service.step({"step": 3, "loss": 2.0, "grad_norm": None})
    service.evaluation({"step": 3, "eval_loss": 1.5})
    assert wandb[0]["config"] == {"lora": {"r": 4}} and wandb[0]["name"] == "run"
    assert wandb[1:] == [(3, {"train/loss": 2.0}), (3, {"eval/eval_loss": 1.5})]


def test_a_run_that_goes_on_goes_on_there_too(tmp_path, wandb):
    for resume in (False, True, True, False):
        [service] = services(["wandb"], tmp_path, {}, resume=resume)
        events = Events()
        events.subscribe(service, on_error="drop")
        events.step({"step": 1, "loss": 2.0})
        events.close()
    begun = [options.get("id") for options in wandb if isinstance(options, dict)]
    assert begun == [None, "new-1", "new-1", None] and wandb.count("finished") == 4
    assert wandb[3]["resume"] == "allow" and "resume" not in wandb[0]


@pytest.mark.parametrize("text", ["", "../x", "a b", "x" * 2000])
def test_an_id_that_is_none_begins_anew(tmp_path, wandb, text):
    (tmp_path / "wandb-id.txt").write_text(text)
    services(["wandb"], tmp_path, {}, resume=True)
    assert "id" not in wandb[0]


def test_a_run_that_has_not_begun_leaves_the_id_of_another(tmp_path, wandb):
    (tmp_path / "wandb-id.txt").write_text("kept")
    services(["wandb"], tmp_path, {})
    assert (tmp_path / "wandb-id.txt").read_text() == "kept"


@pytest.fixture
def trackio(monkeypatch):
    """A stand-in that notes what it is told; the real one is run by hand."""
    told = []

    class Run:
        def log(self, values, step):
            told.append((step, values))

    class Module:
        @staticmethod
        def init(**options):
            if options["project"] == "broken":
                raise OSError("no room")
            print("what it prints")
            told.append(options)
            return Run()

        @staticmethod
        def finish():
            told.append("finished")

    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "trackio", Module)
    return told


def test_trackio(tmp_path, trackio, monkeypatch, capsys):
    for resume in (False, True):
        [service] = services(["trackio"], tmp_path / "run", {"r": 4}, resume=resume)
        events = Events()
        events.subscribe(service, on_error="drop")
        events.step({"step": 3, "loss": 2.0, "grad_norm": None})
        events.evaluation({"step": 3, "eval_loss": 1.5})
        events.close()
    same = {"project": "qlora-wgpu", "name": "run", "config": {"r": 4}, "embed": False}
    rows = [(3, {"train/loss": 2.0}), (3, {"eval/eval_loss": 1.5}), "finished"]
    assert trackio == [same | {"resume": "never"}, *rows, same | {"resume": "allow"}, *rows]
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("TRACKIO_PROJECT", "broken")
    with pytest.raises(ConfigError, match="trackio cannot start a run: no room"):
        services(["trackio"], tmp_path, {})


@pytest.mark.parametrize(("name", "label"), [
    ("loss", ["training, smoothed"]), ("eval_loss", ["held-out"]), ("learning_rate", []),
])  # fmt: skip
def test_a_picture_names_what_it_shows(tmp_path, monkeypatch, name, label):
    drawn, legends, lines = [], [], []
    axes = SimpleNamespace(
        plot=lambda *given, label=None, **how: lines.append(given[:2]) or (
            drawn.append(label) if label else None
        ),
        set_xlabel=print, set_ylabel=print, grid=lambda **how: None,
        legend=lambda: legends.append(list(drawn)),
    )  # fmt: skip
    figure = SimpleNamespace(
        add_axes=lambda where: axes, savefig=lambda file, format: file.write(b"P")
    )
    module = SimpleNamespace(Figure=lambda **how: figure)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    assert write_png(tmp_path / "loss.png", [{"step": n, name: 2.0} for n in (1, 2)])
    assert drawn == label and legends == ([label] if label else [])
    # A loss is drawn as it is, and smoothed.
    assert len(lines) == {"loss": 2, "eval_loss": 1, "learning_rate": 0}[name]
    assert all(line == ((1, 2), (2.0, 2.0)) for line in lines)
    assert (tmp_path / "loss.png").read_bytes() == b"P"


def test_points_are_dots_where_there_is_no_line():
    two = [(1, 2.0), (2, 3.0)]
    assert chart("x", [Line("", "main", two)]).count('class="dot') == 0
    for points in (two, two[:1]):
        drawn = chart("x", [Line("", "dots", points)])
        assert drawn.count('class="dot dots"') == len(points)
        assert drawn.count('<polyline class="dots"') == 1


@pytest.mark.parametrize(
    ("values", "is_log"), [((1.0, 5.0), True), ((1.0, 4.99), False), ((0.0, 5.0), False)]
)
def test_an_axis_is_logarithmic_from_a_ratio_of_five(values, is_log):
    axis = Axis.of_values(values, may_be_log=True)
    assert axis.is_log == is_log and not Axis.of_values(values).is_log
    assert 0 < axis.share(values[0]) < 0.05 < 0.95 < axis.share(values[1]) < 1


@pytest.mark.parametrize(
    ("count", "over"), [(1, 1), (10, 1), (16, 2), (100, 10), (199, 20), (204, 20), (999, 20)]
)
def test_a_tenth_of_the_points_is_smoothed_over_up_to_twenty(count, over):
    assert smoothing_length(count) == over


def test_each_dot_of_a_cell_has_its_place():
    """As Unicode numbers the dots of Braille: by column, from the top."""
    numbered = ((1, 2, 3, 7), (4, 5, 6, 8))
    assert tuple(tuple(1 << (n - 1) for n in column) for column in numbered) == _DOTS
    level, _ = dots([(0, 1.0), (3, 1.0)], [], 2, 1)
    assert level == [chr(0x2800 + 0x04 + 0x20) * 2]
    falling, axis = dots([(0, 100.0), (1, 1.0)], [], 1, 1)
    assert axis.is_log and falling == ["\u28a3"]
    high, _ = dots([(0, 0.0), (0, 9.0)], [], 1, 5, may_be_log=False)
    assert high == [chr(0x2800 + bits) for bits in (0x46, 0x47, 0x47, 0x47, 0x07)]


def test_a_page_ends_with_its_line():
    assert page(Facts("t", "s", {}), ROWS).endswith("\n")


def test_marks_may_be_the_ends_of_an_axis():
    assert log_ticks(1.0, 10.0) == [1.0, 2.0, 3.0, 5.0, 10.0]
    assert log_ticks(2.0, 50.0) == [2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0]
    assert log_ticks(1e-6, 1e6) == [1e-6, 1e-3, 1.0, 1e3, 1e6]
    assert ticks(0.0, 5.0) == [0, 1, 2, 3, 4, 5] and ticks(0.0, 5.1) == [0, 2, 4]
