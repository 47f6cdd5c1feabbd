"""How bases and adapters are opened, and what is told of it, without a device."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.config import Config, TrainConfig
from qlora_wgpu.errors import ConfigError, DeviceError
from qlora_wgpu.runs import opening
from qlora_wgpu.runs.opening import OpenedModel


class Told:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.all = []

    def __getattr__(self, kind):
        return lambda *what: self.all.append((kind, *what))


def settings(**sections):
    return Config.model_validate({"model": {"path": "m"}, **sections})


class Base:
    """A base with or without a head, which tells what is made of it."""

    def __init__(self, classes=0, name="base", notes=("of the files",)):
        self.architecture = SimpleNamespace(classes=classes, notes=("of the model",), stacking=7)
        self.name_or_path, self.notes = name, notes

    def scored(self, classes):
        return ("scored", classes)

    def for_adapter(self, stored, tensors):
        return ("adapted", stored, tensors)


def test_a_base_is_opened_for_its_objective_and_adapter(monkeypatch, tmp_path):
    opened = OpenedModel(Base(), tmp_path)
    assert opened.notes == ("of the model", "of the files")
    assert opened.for_objective(TrainConfig()) is opened and opened.for_adapter(None) is opened
    reward = opened.for_objective(TrainConfig(objective="reward"))
    assert (reward.pretrained, reward.path) == (("scored", 1), tmp_path)
    asked = []
    monkeypatch.setattr(
        opening, "load_adapter", lambda *what, **how: asked.append((what, how)) or ("t", "s")
    )
    assert opened.for_adapter("folder").pretrained == ("adapted", "s", "t")
    assert asked == [(("folder",), {"biases": True, "stacking": 7})]
    scored = OpenedModel(Base(classes=3), tmp_path)
    with pytest.raises(ConfigError, match="base is a reward model or classifier"):
        scored.for_objective(TrainConfig())
    assert scored.for_objective(TrainConfig(objective="reward")).pretrained == ("scored", 1)


@pytest.mark.parametrize(
    ("adds", "has_folder"), [((), True), (("add_tokens",), True), (("add_special_tokens",), True)]
)
def test_tokens_that_a_run_adds_are_added(monkeypatch, tmp_path, adds, has_folder):
    base = SimpleNamespace(
        folder=SimpleNamespace(text_folder=tmp_path), resized=lambda *what: ("resized", *what)
    )
    made = SimpleNamespace(count=9, new_tokens=(8,), folder="new")
    monkeypatch.setattr(opening, "Pretrained", SimpleNamespace(open=lambda path: base))
    monkeypatch.setattr(opening, "extended_tokenizer", lambda *what: made)
    assert OpenedModel.open("base") == OpenedModel(base, tmp_path)
    model = settings(model={"path": "m", **{key: ["<a>"] for key in adds}}).model
    expected = OpenedModel(("resized", 9, (8,)), "new") if adds else OpenedModel(base, tmp_path)
    assert OpenedModel.open("base", model) == expected


@pytest.mark.parametrize(("folder", "images"), [(None, 1), ("folder", None), ("folder", 1)])
@pytest.mark.cover("all")
def test_images_are_read_by_models_that_read_some(monkeypatch, tmp_path, folder, images):
    base = Base()
    base.architecture.images = images
    base.folder = folder and SimpleNamespace(path="path", config="config")
    monkeypatch.setattr(opening, "image_files", lambda path, config, token: (path, config))
    found = OpenedModel(base, tmp_path).images
    assert found == (("path", "config") if folder and images else None)


# ---- the device ----------------------------------------------------------------------------------


def test_a_device_is_opened_with_its_notes(monkeypatch):
    device = SimpleNamespace(notes=("one", ""))
    monkeypatch.setattr(opening, "device_of", lambda settings: device)
    for hint, notes in (("faster", ["one", "faster"]), ("", ["one"])):
        told = Told()
        monkeypatch.setattr(opening, "faster_through_dawn", lambda device, backend, h=hint: h)
        assert opening.open_device(settings().device, told) is device
        assert told.all == [("activity", "opening the device"), ("activity", ""),
                            *(("note", text) for text in notes)]  # fmt: skip


def test_kernels_are_checked_without_the_runs_budget(monkeypatch):
    monkeypatch.setattr(opening, "device_of", lambda settings: settings)
    asked = settings(device={"memory": "4GiB", "gpu": 1}).device
    assert (opening.checking_device(asked).memory, opening.checking_device(asked).gpu) == (
        "auto",
        "1",
    )


class Layout:
    def __init__(self, profile="first"):
        self.profile = profile

    def new_graph(self):
        return f"graph of {self.profile}"

    def changed(self, *, profile):
        return Layout(profile)


@pytest.mark.parametrize(
    ("problems", "profiles", "ends"),
    [([""], [], "first"), (["wrong", ""], ["tiled"], "tiled"),
     (["wrong", "wrong", ""], ["matrix", "register"], "register"), (["wrong"], [None], None)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_kernels_that_are_wrong_give_way_until_all_are_right(monkeypatch, problems, profiles, ends):
    monkeypatch.setenv(opening.VERIFY_VARIABLE, "1")
    said, told = iter(problems), Told()
    given = iter(p and SimpleNamespace(gemm_kind=p) for p in profiles)
    monkeypatch.setattr(opening, "problem_of", lambda *what: next(said))
    monkeypatch.setattr(opening, "give_way", lambda device: next(given))
    run = (None, None, lambda layout: layout.profile, Layout(), told)
    if ends is None:
        with pytest.raises(DeviceError, match="wrong"):
            opening.verified_layout(*run)
        return
    found = opening.verified_layout(*run).profile
    assert getattr(found, "gemm_kind", found) == ends
    words = {"tiled": "matrix products use", "matrix": "attention uses",
             "register": "kernels without"}  # fmt: skip
    notes = [what[1] for what in told.all if what[0] == "note"]
    expected = [f"wrong; {words[p]}" for p in profiles if p]
    assert [note.startswith(own) for note, own in zip(notes, expected, strict=True)] == (
        [True] * len(expected)
    )
    assert ("activity", "") in told.all
    monkeypatch.setenv(opening.VERIFY_VARIABLE, "0")
    assert opening.verified_layout(*run) is run[3]


@pytest.mark.parametrize(
    ("tune", "known", "tokens", "is_cpu", "times"),
    [
        ("never", True, 10**9, False, False),
        ("auto", True, None, False, True),
        ("auto", False, None, False, False),
        ("always", False, None, False, False),
        ("always", False, 1, False, True),
        ("auto", False, 2 * 10**13, False, False),
        ("auto", False, 3 * 10**13, False, True),
        ("auto", False, 2 * 10**11, True, False),
        ("auto", False, 3 * 10**11, True, True),
    ],
)
@pytest.mark.cover("all")
def test_kernels_are_timed_for_runs_that_are_long(monkeypatch, tune, known, tokens, is_cpu, times):
    spec = SimpleNamespace(out_features=2, in_features=5)
    architecture = SimpleNamespace(every_linear=[spec], vocab_size=4, hidden_size=3)
    monkeypatch.setattr(opening, "key_of", lambda device, task: "key")
    monkeypatch.setattr(opening, "known_keys", lambda: {"key"} if known else set())
    choice = SimpleNamespace(notes=("a note",))
    monkeypatch.setattr(opening, "tuned", lambda *what: choice)
    told, device = Told(), SimpleNamespace(is_cpu=is_cpu)
    asked = SimpleNamespace(tune=tune)
    opening.tune_device(asked, device, None, architecture, tokens, told)
    expected = [("activity", "timing kernels"), ("activity", ""), ("tuned", ("a note",))]
    assert told.all == (expected if times else [])
    assert opening._work(architecture, 3) == 4 * 3 * (10 + 12)


# ---- adapters ------------------------------------------------------------------------------------


def test_settings_that_an_adapter_changes_are_told():
    before = settings(quant={"scheme": "none"}, device={"gpu": 1})
    told = Told()
    opening.note_differences(before, before, "adapter", told)
    assert told.all == []
    after = settings(train={"compute_dtype": "float32"}, device={"gpu": 1})
    opening.note_differences(before, after, "adapter", told)
    ((kind, text),) = told.all
    assert kind == "note" and "quant.scheme = nf4" in text
    assert "train.compute_dtype = float32" in text and "device" not in text


@pytest.mark.parametrize(("run", "is_folder", "notes"), [(None, True, 1), (None, False, 0),
                                                         ("run", True, 0)])  # fmt: skip
@pytest.mark.cover("all")
def test_an_adapter_of_no_run_is_told_how_it_is_opened(
    monkeypatch, tmp_path, run, is_folder, notes
):
    trained, told = settings(), Told()
    monkeypatch.setattr(opening, "as_trained", lambda *what: trained)
    monkeypatch.setattr(opening, "find_run", lambda adapter: run)
    adapter = str(tmp_path if is_folder else tmp_path / "none")
    assert opening.opened_as_trained(settings(), adapter, told) is trained
    assert [what[0] for what in told.all] == ["note"] * notes
    assert all("belongs to no run" in what[1] for what in told.all)
    changed = opening.opened_as_trained(settings(), None, told, {"quant": {"scheme": "none"}})
    assert changed.quant.scheme == "none" and len(told.all) == notes


def test_a_model_is_loaded_with_its_progress_and_notes(monkeypatch):
    def made(layout, device, *, seed, options, progress):
        progress("one")
        progress("two")
        return (seed, options)

    monkeypatch.setattr(opening, "QLoRAModel", made)
    for problem, began in (("", ""), ("no disk", "from pissa")):
        layout = SimpleNamespace(
            weights=SimpleNamespace(table=[1, 2]), began=began,
            placement=SimpleNamespace(problem=problem),
        )  # fmt: skip
        told = Told()
        assert opening.load_model(layout, None, told, seed=3, options="o") == (3, "o")
        loading = [("loading", "one", 0, 2), ("loading", "two", 1, 2), ("loading", "", 2, 2)]
        more = [("warning", problem), ("note", began)] if problem else []
        assert told.all == [*loading, *more]
