"""Values, types and lines of configurations, each by itself."""

from types import NoneType, SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from support.dialects import converted, reasons_of

from qlora_wgpu.config import Config, loading
from qlora_wgpu.config.dialects import policies, preferences
from qlora_wgpu.config.dialects.draft import Source
from qlora_wgpu.config.section import summary, type_name
from qlora_wgpu.config.sections.data import DataConfig
from qlora_wgpu.config.sections.train import TrainConfig
from qlora_wgpu.config.yaml import (
    Setting,
    _misplaced,
    _yaml_value,
    commented_yaml,
    dump_yaml,
    parse_yaml_mapping,
    read_yaml_file,
)
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import YAML_DEPTH, YAML_NODES


@pytest.mark.parametrize(("value", "text"), [
    ("llama", "llama"), ("a/b_c.d-e", "a/b_c.d-e"), ("a b", '"a b"'), ("-a", '"-a"'),
    (".a", '".a"'), ("", '""'), ("a:", '"a:"'), ("é1", "é1"), (True, "true"), (False, "false"),
    (3, "3"), (-3, "-3"), (0.5, "0.5"), (0.0, "0"), (0.01, "0.01"), (0.001, "1e-3"),
    (0.00025, "2.5e-4"), (100.0, "100"), (999.5, "999.5"), (1000.0, "1e3"), (-0.0001, "-1e-4"),
    ({"a": "1", "b": "c d"}, '{a: "1", b: "c d"}'),
    ([{"path": "a.jsonl", "name": "b c"}, {"path": "d"}],
     '[{path: a.jsonl, name: "b c"}, {path: d}]'),
])  # fmt: skip
def test_values_on_one_line(value, text):
    assert _yaml_value(value) == text
    read = parse_yaml_mapping(f"a: {text}", "f.yaml").values["a"]
    assert read == value or isinstance(value, str)


def test_lines_with_comments():
    made = commented_yaml("a\nb", [
        Setting("model.path", "base", "why"), Setting("model.x", 1),
        Setting("lora.r", 8, "off\n", False), Setting("lora." + "x" * 40, 8, "far"),
    ])  # fmt: skip
    title, model, path, x, empty, lora, r, far = made.splitlines()
    assert (title, model, empty, lora) == (r"# a\nb", "model:", "", "lora:") and made[-1] == "\n"
    assert path == "  path: base".ljust(38) + "# why" and x == "  x: 1"
    assert r == "  # r: 8".ljust(38) + r"# off\n" and far == f"  {'x' * 40}: 8  # far"


def test_text_of_any_script_is_dumped_as_it_is():
    text = dump_yaml({"model": {"path": "モデル/é", "long": "a " * 200}, "list": [1, "a"]})
    assert "モデル/é" in text and len(text.splitlines()) == 4 and "[1, a]" in text
    assert parse_yaml_mapping(text, "f").values["model"]["long"] == "a " * 200


@pytest.mark.parametrize(("token", "says"), [
    ("'<block mapping start>'", "its indentation does not match"),
    ("'-'", "unexpected list entry among keys"), ("'<scalar>'", "text after a closing quote"),
    ("'?'", "expected a key, got '?'"),
])  # fmt: skip
def test_what_stands_where_a_key_is_expected(token, says):
    assert says in _misplaced(token)


@pytest.mark.parametrize(("raw", "line"), [
    (b"\xff", 1), (b"a: 1\n\xff", 2), (b"a: 1\n\nb: \xff\nc: \xff\n", 3), (b"a: \xff\n", 1),
    (b"\xc3\n", 1), (b"\n\xc3\n", 2),
])  # fmt: skip
def test_the_line_that_is_no_utf_8(tmp_path, raw, line):
    (tmp_path / "f.yaml").write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"line {line}\) is not UTF-8"):
        read_yaml_file(tmp_path / "f.yaml")


def test_merged_keys_give_way_to_own_and_to_earlier_ones():
    text = """
a: &a {x: 1, y: 1}
b: &b {y: 2, z: 2}
c: &c {z: 3, w: 3, <<: *a}
both: {<<: [*a, *b, *c], x: 0}
last: {<<: *c, <<: *b}
"""
    values = parse_yaml_mapping(text, "f.yaml", aliases=True).values
    assert values["both"] == {"x": 0, "y": 1, "z": 2, "w": 3}
    assert values["c"] == {"z": 3, "w": 3, "x": 1, "y": 1}


@pytest.mark.parametrize(("depth", "fails"), [(YAML_DEPTH - 1, False), (YAML_DEPTH, True)])
def test_how_deep_a_file_may_be(depth, fails):
    text = "a: " + "[" * depth + "]" * depth
    if not fails:
        parse_yaml_mapping(text, "f.yaml")
        return
    with pytest.raises(ConfigError, match=r"f.yaml \(line 1\) is nested too deeply"):
        parse_yaml_mapping(text, "f.yaml")


def test_lists_side_by_side_are_not_deep():
    text = "a: [" + ", ".join(["[1]"] * (YAML_DEPTH + 5)) + "]"
    assert len(parse_yaml_mapping(text, "f.yaml").values["a"]) == YAML_DEPTH + 5


@pytest.mark.parametrize(("numbers", "fails"), [(7, False), (8, True)])
def test_how_many_values_a_file_may_have(monkeypatch, numbers, fails):
    assert YAML_NODES > 1000
    monkeypatch.setattr("qlora_wgpu.config.yaml.YAML_NODES", 10)
    text = "a: [" + ", ".join(["1"] * numbers) + "]"  # and the mapping, a key and the list
    if not fails:
        parse_yaml_mapping(text, "f.yaml")
        return
    with pytest.raises(ConfigError, match="has more than 10 keys and values"):
        parse_yaml_mapping(text, "f.yaml")


# ---- types and sections --------------------------------------------------------------------------


class Described:
    """A line
    and another.

    More.
    """


@pytest.mark.parametrize(("kind", "name"), [
    (int, "int"), (NoneType, "None"), (int | None, "int | None"), (Literal["a", 2], "'a' | 2"),
    (Annotated[float, "more"], "float"), (list[int], "list[int]"),
    (dict[str, list[float] | None], "dict[str, list[float] | None]"), (Any, "Any"),
])  # fmt: skip
def test_types_as_they_are_written(kind, name):
    assert type_name(kind) == name


def test_what_help_says_of_a_section():
    assert summary(Described) == "A line\nand another." and summary(SimpleNamespace()) != ""
    text = TrainConfig.__doc__
    assert "    max_steps (int" in text and "default 'sft'): Training objective" in text
    assert "path (str, required)" in Config.model_fields["model"].annotation.__doc__
    assert ", optional): " in Config.__doc__


@pytest.mark.parametrize(("given", "says"), [
    ({"class_weights": [1.0, 0.0]}, ""), ({"class_weights": None}, ""),
    ({"class_weights": [0.0, 0.0]}, "must not be negative, and one must be above 0"),
    ({"class_weights": [1.0, -0.1]}, "must not be negative"),
    ({"class_weights": [-0.1, -0.1]}, "must not be negative"),
    ({"class_weights": [1.0] * 3}, "must have 2 weights, one per label, got 3"),
    ({"class_weights": [1.0] * 3, "labels": None}, ""),
    ({"class_weights": [1.0, 1.0], "problem_type": "regression"}, "requires train.problem_type"),
])  # fmt: skip
def test_weights_of_classes(given, says):
    values = {"objective": "classification", "labels": ["a", "b"],
              "problem_type": "single_label_classification", **given}  # fmt: skip
    if not says:
        assert TrainConfig(**values).class_weights == given["class_weights"]
        return
    with pytest.raises(ConfigError, match=says):
        TrainConfig(**values)


@pytest.mark.parametrize(("overrides", "changes"), [
    ((), {}), (("lora.r=8",), {}), ((" train.max_steps = 3",), {"train": {"max_steps": 7}}),
    (("quant.scheme=none", "train.max_steps=3", "quant.blocksize=128"),
     {"quant": {"scheme": "nf4", "blocksize": 64}, "train": {"max_steps": 7}}),
])  # fmt: skip
def test_what_overrides_have_set_of_a_model(overrides, changes):
    settings = Config(model={"path": "a"}, train={"max_steps": 7})
    assert loading.explicit_in(settings, overrides) == changes
    assert loading.without_none({"a": {"b": None, "c": 0}, "d": {}}) == {"a": {"c": 0}, "d": {}}


# ---- other trainers' files -----------------------------------------------------------------------


class Draft:
    """A file in which a few keys are left, and what became of them."""

    def __init__(self, **remaining):
        self.remaining, self.made, self.dropped = remaining, {}, {}

    def take(self, key, default=None):
        value = self.remaining.pop(key, None)
        return default if value is None else value

    def set(self, key, value, origin):
        self.made[key] = value

    def drop(self, key, value, reason):
        self.dropped[key] = value


@pytest.mark.parametrize(("size", "rows", "made"), [
    (32, 8, 4), (32, None, 4), (8, 8, 1), (7, 8, None), (12, 8, None), (16, 1, 16),
])  # fmt: skip
def test_completions_of_a_generation_become_micro_batches(size, rows, made):
    draft = Draft(generation_batch_size=size, per_device_train_batch_size=rows)
    policies._convert_sizes(draft)
    assert draft.made == ({} if made is None else {"grpo.steps_per_generation": made})
    assert draft.dropped == ({"generation_batch_size": size} if made is None else {})
    nothing = Draft()
    policies._convert_sizes(nothing)
    assert not nothing.made and not nothing.dropped


def test_a_policy_without_settings():
    draft = Draft()
    assert preferences._plain_policy(draft, "grpo") == "grpo"
    assert draft.made == {"train.objective": "grpo"}


@pytest.mark.parametrize(("path", "portion", "limited"), [
    ("a", {}, ("a[:5]", {})), ("a", {"rows": 9}, ("a", {"rows": 5})),
    ("a", {"rows": 3}, ("a", {"rows": 3})), ("a", {"rows": 1}, ("a", {"rows": 1})),
    ("a", {"rows": 0.5}, ("a[:5]", {"rows": 0.5})), ("a[3:]", {}, ("a[3:]", {})),
])  # fmt: skip
def test_rows_are_limited(path, portion, limited):
    from qlora_wgpu.config.dialects.draft import Draft as Real

    draft = Draft()
    (made,) = Real.limit_rows(draft, [Source(path, portion=portion)], 5, "max_samples")
    assert (made.path, made.portion) == limited
    assert draft.dropped == ({"max_samples": 5} if path.endswith("]") else {})


@pytest.mark.parametrize(("changes", "train_on", "noted"), [
    ({"completion_only_loss": False}, "all", False),
    ({"completion_only_loss": True}, None, False),
    ({"assistant_only_loss": True, "completion_only_loss": False}, "assistant", False),
    ({}, None, True),
])  # fmt: skip
def test_what_trl_trains_on(place, changes, train_on, noted):
    cleared = {"assistant_only_loss": "LEAVE OUT", "completion_only_loss": "LEAVE OUT"}
    config, conversion = converted(place, "trl.yaml", {**cleared, **changes})
    default = Config(model={"path": "a"}).data.train_on
    assert config.data.train_on == (train_on or default)
    assert any("TRL takes the loss on all tokens" in note for note in conversion.notes) == noted
    assert not any("only_loss" in key for key in reasons_of(conversion))


@pytest.mark.parametrize(("make", "says"), [
    (lambda: DataConfig(sources=[{"path": "a", "pathh": "b"}]), "pathh"),
    (lambda: TrainConfig(max_step=3), "did you mean 'max_steps'"),
    (lambda: TrainConfig(zzzz=3), "zzzz"),
])  # fmt: skip
def test_unknown_keys_of_a_section(make, says):
    with pytest.raises(ConfigError, match=says) as told:
        make()
    assert "None" not in str(told.value)
