"""What Python's functions make of their arguments; nothing is computed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import qlora_wgpu
from qlora_wgpu import api
from qlora_wgpu.errors import ConfigError


class Noted:
    """In place of functions of the API's module, which note what they are given."""

    def __init__(self, monkeypatch, **returned):
        self.calls = {}
        for name, value in returned.items():
            monkeypatch.setattr(api, name, self._noting(name, value))

    def _noting(self, name, value):
        def call(*given, **named):
            self.calls[name] = given, named
            return value

        return call


@pytest.mark.parametrize(("data", "paths"), [
    (None, []), ("a.jsonl", ["a.jsonl"]), (Path("a.jsonl"), ["a.jsonl"]),
    (["a", Path("b")], ["a", "b"]), ((), []),
])  # fmt: skip
def test_files_of_a_new_run(monkeypatch, data, paths):
    noted = Noted(monkeypatch, write_run_file="written")
    assert qlora_wgpu.init(data=data, out=Path("run.yaml")) == "written"
    expected = {"model": None, "data": paths, "held_out": None, "columns": {}, "other": None,
                "overwrite": False}  # fmt: skip
    assert noted.calls["write_run_file"] == (("run.yaml",), expected)


def test_arguments_of_a_new_run(monkeypatch):
    noted = Noted(monkeypatch, write_run_file=None)
    qlora_wgpu.init(Path("m"), eval=Path("e"), columns={"a": "b"}, from_=Path("f"), overwrite=True)
    _, given = noted.calls["write_run_file"]
    assert given == {"model": "m", "data": [], "held_out": "e", "columns": {"a": "b"},
                     "other": "f", "overwrite": True}  # fmt: skip
    for columns in ([], "ab"):
        with pytest.raises(ConfigError, match="columns must be a mapping such as"):
            qlora_wgpu.init("m", columns=columns)


@pytest.fixture
def opened(monkeypatch):
    settings = SimpleNamespace(quant="quant")
    opening = SimpleNamespace(model="model", adapter="adapter", settings=lambda observer: settings)
    asked = []
    monkeypatch.setattr(
        api, "ModelOptions",
        SimpleNamespace(of=lambda *given, **named: asked.append((given, named)) or opening),
    )  # fmt: skip
    return SimpleNamespace(settings=settings, asked=asked)


@pytest.mark.parametrize("out", [None, "there"])
@pytest.mark.parametrize("check", [False, True])
def test_a_merge(monkeypatch, opened, out, check):
    noted = Noted(monkeypatch, merge_adapter=None, merge_drift="drift", path_in_run="runs/a/merged")
    monkeypatch.setattr(api, "OpenedModel", SimpleNamespace(open=lambda model: f"source {model}"))
    made = qlora_wgpu.merge(Path("runs/a"), out=out, base="dequantized", check=check, memory="8GiB")
    target = Path(out or "runs/a/merged")
    assert made == api.MergeResult(target, "drift" if check else None)
    assert noted.calls["merge_adapter"] == (
        ("model", "adapter", target), {"base": "dequantized", "quant": "quant"},
    )  # fmt: skip
    assert ("path_in_run" in noted.calls) == (out is None)
    if check:
        given = noted.calls["merge_drift"][0]
        assert given[:4] == ("source model", "adapter", target, opened.settings)
    ((given, named),) = opened.asked
    assert given == ("runs/a", None, None, None) and named["needs_adapter"] is True
    assert named["memory"] == "8GiB" and named["scheme"] is None


@pytest.mark.parametrize("gguf", [None, "x.gguf"])
@pytest.mark.parametrize("check", [False, True])
def test_an_export(monkeypatch, opened, gguf, check):
    noted = Noted(monkeypatch, export_model="model", path_in_run="in/run")
    assert qlora_wgpu.export("runs/a", type="q8_0", gguf=gguf, check=check) == "model"
    if gguf is None:
        assert noted.calls["path_in_run"] == (("adapter", "model.gguf", "gguf"), {})
    given, named = noted.calls["export_model"]
    assert given == ("model", "adapter", Path(gguf or "in/run")) and named["type_name"] == "q8_0"
    assert named["settings"] == (opened.settings if check else None)
    assert (named["base"], named["quant"]) == ("original", "quant")


@pytest.mark.parametrize("named", [False, True])
def test_an_adapter_alone(monkeypatch, opened, tmp_path, named):
    file = tmp_path / "adapter.gguf"
    file.write_bytes(b"123")
    noted = Noted(monkeypatch, export_adapter=None, path_in_run=str(file))
    how = {"gguf": file} if named else {}
    made = qlora_wgpu.export("runs/a", adapter_only=True, **how)
    assert made == api.ExportResult(file, 3, "f32", None, ())
    assert noted.calls["export_adapter"] == (("model", "adapter", file), {})
    assert noted.calls.get("path_in_run", ()) == (
        () if named else (("adapter", "adapter.gguf", "gguf"), {})
    )
    with pytest.raises(ConfigError, match="type and adapter_only are mutually exclusive"):
        qlora_wgpu.export("runs/a", adapter_only=True, type="f16", **how)


def test_a_quantized_folder(monkeypatch):
    noted = Noted(monkeypatch, quantize_folder=None)
    assert qlora_wgpu.quantize("m", "out", blocksize=128, double_quant=False) == Path("out")
    given, named = noted.calls["quantize_folder"]
    assert given[:2] == ("m", "out") and named == {"experts": False}
    assert (given[2].blocksize, given[2].double_quant) == (128, False)
    qlora_wgpu.quantize("m", "out", experts=True)
    assert noted.calls["quantize_folder"][1] == {"experts": True}
    default = noted.calls["quantize_folder"][0][2]
    assert (default.blocksize, default.double_quant) == (64, True)


@pytest.mark.parametrize(("given", "passed"), [
    ({}, {"merged": None, "gguf": None, "private": True, "base": None}),
    ({"merged": Path("m"), "private": False},
     {"merged": "m", "gguf": None, "private": False, "base": None}),
    ({"gguf": Path("g"), "base": "o/b"},
     {"merged": None, "gguf": "g", "private": True, "base": "o/b"}),
])  # fmt: skip
def test_an_upload(monkeypatch, given, passed):
    noted = Noted(monkeypatch, located=SimpleNamespace(adapter="adapter"), push_to_hub="a page")
    assert qlora_wgpu.push(Path("runs/a"), "o/n", **given) == "a page"
    assert noted.calls["located"] == (("runs/a", None, None), {"needs_adapter": True})
    assert noted.calls["push_to_hub"] == (("adapter", "o/n"), passed)
