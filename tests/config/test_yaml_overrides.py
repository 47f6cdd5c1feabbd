"""Values of the command line over those of a configuration file."""

from __future__ import annotations

import pytest
from support.yaml_texts import MODEL, failure

from qlora_wgpu.errors import ConfigError


def test_overrides_win_and_the_last_one_most(load) -> None:
    config = load(
        MODEL + "lora: {r: 8}\n",
        [
            "lora.r=4",
            "lora.r=2",
            "optim.learning_rate=1e-4",
            "lora.target_modules=[q_proj, v_proj]",
        ],
    )
    assert config.lora.r == 2
    assert config.optim.learning_rate == 1e-4
    assert config.lora.target_modules == ["q_proj", "v_proj"]


def test_an_override_replaces_a_wrong_value(load) -> None:
    assert load("model: {path: base}\nlora: {r: wrong}\n", ["lora.r=4"]).lora.r == 4
    assert load("lora: {r: 4}\n", ["model.path=m"]).model.path == "m"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora.r=x", "lora.r in the override 'lora.r=x' must be an integer, got 'x'"),
        ("lora.r=8.0", "must be an integer, got 8.0 (write 8)"),
        ("lora.r=", "must be an integer, got null"),
        ("lora.r=true", "must be an integer, got true"),
        (
            "lora.rank=8",
            "unknown key 'lora.rank' in the override 'lora.rank=8': did you mean 'lora.r'?",
        ),
        ("train.learning_rate=1", "it belongs in section 'optim'"),
        ("learning_rate=1", "it belongs in section 'optim'"),
        ("loraa.r=1", "unknown key 'loraa.r'"),
        ("lora.r.x=1", "unknown key 'lora.r.x'"),
        ("lora={r: 8}", "names a section: set its keys, such as lora.r=..."),
        ("lora.r", "the override 'lora.r' must have the form section.key=value"),
        ("--lora.r=8", "must have the form section.key=value"),
        ("=8", "unknown key ''"),
        ("lora.target_modules=[q_proj", "the override 'lora.target_modules=[q_proj' (line 1"),
        ("train.seed=*x", "anchor or alias"),
        ("train.seed=!!int 3", "uses the tag"),
        ("lora.target_modules=q_proj", "must be 'all-linear', a list"),
    ],
)
def test_wrong_overrides(load, text, expected) -> None:
    assert expected in failure(load, MODEL, [text])


@pytest.mark.parametrize(
    "text", ["2024", "a: b", "no", "1e-4", "[x", "*x", "x #y", "{{ messages }}"]
)
def test_text_keys_take_an_override_as_it_is_typed(load, text) -> None:
    assert load(MODEL, [f"output.dir={text}"]).output.dir == text


def test_a_list_of_paths_is_none(load, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = failure(load, MODEL, ["data.train=[a.jsonl, b.csv]"])
    assert "in the override 'data.train=[a.jsonl, b.csv]' must be one path" in message
    assert "for several, set data.sources" in message
    for key in ("data.eval", "model.path", "output.dir", "lora.init_from"):
        assert "must be text, got ['a', 'b']" in failure(load, MODEL, [f"{key}=[a, b]"])
    (tmp_path / "[a, b]").mkdir()
    for text in ("[a, b]", "'[a, b]'"):
        assert load(MODEL, [f"data.train={text}"]).data.train == str(tmp_path / "[a, b]")
    template = "[{{ messages }}]"
    assert load(MODEL, [f"data.chat_template={template}"]).data.chat_template == template


def test_quotes_and_null_in_overrides_of_text_keys(load) -> None:
    assert load(MODEL, ["output.dir='no'"]).output.dir == "no"
    assert load(MODEL + "data: {eval: e.jsonl}\n", ["data.eval=null"]).data.eval is None
    assert load(MODEL, ["device.gpu=1"]).device.gpu == "1"


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.columns={prompt: q, completion: a}"],
        ["data.columns={prompt:q,completion:a}"],
        ['data.columns={"prompt":"q","completion":"a"}'],
        ["data.columns.prompt=q", "data.columns.completion=a"],
        ["data.columns={prompt: x}", "data.columns.prompt=q", "data.columns.completion=a"],
    ],
)
def test_mappings_in_overrides(load, overrides) -> None:
    assert load("model: {path: base}", overrides).data.columns == {"prompt": "q", "completion": "a"}


def test_entries_of_mappings_in_overrides(load) -> None:
    text = "model: {path: base}\ndata: {columns: {prompt: q}}"
    assert load(text, ["data.columns.completion=2024"]).data.columns["completion"] == "2024"
    pattern = load(text, ["lora.rank_pattern.layers.0.q_proj=3"]).lora.rank_pattern
    assert pattern == {"layers.0.q_proj": 3}
    with pytest.raises(ConfigError, match=r"unknown key 'data\.train\.x' in the override"):
        load(text, ["data.train.x=1"])
    with pytest.raises(ConfigError, match=r"in the override 'lora\.rank_pattern\.a=x' must be an"):
        load(text, ["lora.rank_pattern.a=x"])


@pytest.mark.parametrize(
    ("name", "row_format"),
    [
        ("sharegpt", "conversations"),
        ("alpaca", "instruction/output"),
        ("openai", "messages"),
        ("text", "text"),
    ],
)
def test_formats_by_other_names(load, name, row_format) -> None:
    config = load(f"model: {{path: base}}\ndata: {{format: {name}}}")
    assert config.data.format == row_format


def test_one_text_in_place_of_a_list_of_overrides(load) -> None:
    assert "must be a list" in failure(load, MODEL, "lora.r=8")


def test_a_list_of_texts_is_yaml(load) -> None:
    config = load(MODEL, ['eval.sample_prompts=["Who is it?", a b]'])
    assert config.eval.sample_prompts == ["Who is it?", "a b"]
