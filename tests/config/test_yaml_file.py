"""Configuration files: strict YAML, line numbers and suggestions."""

from __future__ import annotations

import pytest
import yaml
from support.yaml_texts import MODEL, failure

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.errors import ConfigError


def test_minimal_file(load) -> None:
    assert load(MODEL) == Config(model={"path": "base"})


def test_path_may_be_text(load, tmp_path) -> None:
    load(MODEL)
    assert load_config(str(tmp_path / "conf" / "run.yaml")).model.path == "base"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("1.e3", 1e3),
        ("1.5e+2", 150.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+0.25", 0.25),
        ("1_000.5", 1000.5),
        ("3", 3.0),
        ("1_000", 1000.0),
    ],
)
def test_numbers(load, text, value) -> None:
    assert load(MODEL + f"optim: {{learning_rate: {text}}}\n").optim.learning_rate == value
    assert load(MODEL, [f"optim.learning_rate={text}"]).optim.learning_rate == value


@pytest.mark.parametrize(
    "text",
    [
        "010",
        "0x10",
        "0o10",
        "1:30",
        "1e400",
        ".inf",
        "-.inf",
        ".nan",
        "NaN",
        "e5",
        "1e",
        "2024-01-01",
    ],
)
def test_not_numbers(load, text) -> None:
    assert "optim.learning_rate in run.yaml (line 2) must be a" in failure(
        load, MODEL + f"optim: {{learning_rate: {text}}}\n"
    )


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("ON", True)])
def test_truth_values(load, text, value) -> None:
    assert load(MODEL + f"quant: {{double_quant: {text}}}\n").quant.double_quant is value


def test_none_is_a_scheme_and_not_null(load) -> None:
    assert load(MODEL + "quant: {scheme: none}\n").quant.scheme == "none"


@pytest.mark.parametrize("text", ["eval: null", "eval: ~", "eval:"])
def test_null_for_an_optional_key(load, text) -> None:
    assert load(MODEL + f"data:\n  {text}\n").data.eval is None


def test_a_section_with_every_key_commented_out(load) -> None:
    assert load(MODEL + "lora:\n  # r: 8\n").lora.r == 16


def test_wrong_types_name_key_file_and_line(load) -> None:
    text = failure(load, MODEL + "train:\n  max_steps: ten\n")
    assert text == "train.max_steps in run.yaml (line 3) must be an integer, got 'ten'"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("train: {seed: true}", "must be an integer, got true"),
        ("train: {max_steps: 1e3}", "must be an integer, got 1000.0 (write 1000)"),
        ("lora: {r: 8.0}", "must be an integer, got 8.0 (write 8)"),
        ("lora: {r: null}", "must be an integer, got null"),
        ("lora: {r: [8]}", "must be an integer, got [8]"),
        ("lora: {r: {a: 8}}", "must be an integer, got {a: 8}"),
        (
            "optim: {learning_rate: '1e-4'}",
            "must be a number, got '1e-4' (write it as a plain number, without quotes)",
        ),
        (
            "optim:\n  learning_rate: 0,0002",
            "got '0,0002' (use a decimal point, and no thousands separators)",
        ),
        (
            "data:\n  max_seq_length: 1,000",
            "got '1,000' (use a decimal point, and no thousands separators)",
        ),
        ("output: {dir: 2024}", "must be text, got 2024 (put it in quotes)"),
        ("data: {train: [a.jsonl, b.csv]}", "must be one path (for several, set data.sources"),
        ("quant: {scheme: int8}", "must be one of 'nf4', 'none', got 'int8'"),
        ("lora: {lora_dropout: 1.0}", "must be less than 1, got 1.0"),
        ("lora: {target_modules: [q_proj, 3]}", "must be a list of module names as text"),
    ],
)
def test_wrong_values(load, section, expected) -> None:
    assert expected in failure(load, MODEL + section + "\n")


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("lora", "rank", "lora.r"),
        ("lora", "alpha", "lora.lora_alpha"),
        ("lora", "dropout", "lora.lora_dropout"),
        ("lora", "lora-alpha", "lora.lora_alpha"),
        ("lora", "target_module", "lora.target_modules"),
        ("optim", "lr", "optim.learning_rate"),
        ("train", "lr", "optim.learning_rate"),
        ("train", "batch_size", "train.per_device_train_batch_size"),
        ("train", "epochs", "train.num_train_epochs"),
        ("train", "grad_accum", "train.gradient_accumulation_steps"),
        ("data", "max_length", "data.max_seq_length"),
        ("data", "sequence_len", "data.max_seq_length"),
        ("optim", "scheduler", "optim.lr_scheduler_type"),
        ("optim", "optimizer", "optim.name"),
        ("optim", "learning_rat", "optim.learning_rate"),
        ("quant", "block_size", "quant.blocksize"),
        ("model", "name", "model.path"),
    ],
)
def test_unknown_keys_get_a_suggestion(load, section, key, meant) -> None:
    base = {"model": {"path": "base"}}
    base.setdefault(section, {})[key] = 1
    text = failure(load, yaml.safe_dump(base, sort_keys=False))
    assert text.startswith(f"unknown key '{section}.{key}' in run.yaml (line ")
    assert text.endswith(f"): did you mean '{meant}'?")


def test_unknown_key_names_its_line(load) -> None:
    text = failure(load, MODEL + "\n# comment\nlora:\n  r: 8\n  rank: 8\n")
    assert text == "unknown key 'lora.rank' in run.yaml (line 6): did you mean 'lora.r'?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "train: {learning_rate: 1e-4}",
            "'train.learning_rate' in run.yaml (line 2): it belongs in section 'optim'",
        ),
        ("learning_rate: 1", "'learning_rate' in run.yaml (line 2): it belongs in section 'optim'"),
        ("optimm: {}", "'optimm' in run.yaml (line 2): did you mean the section 'optim'?"),
        ("lr: 1", "'lr' in run.yaml (line 2): did you mean 'optim.learning_rate'?"),
        ("lora.r: 8", "'lora.r' in run.yaml (line 2): write 'r' under the section 'lora'"),
        ("zzz: 8", "'zzz' in run.yaml (line 2): the sections are model, quant, "),
        ("log: {zzz: 8}", "'log.zzz' in run.yaml (line 2): the keys of 'log' are logging_steps"),
        ("<<: {a: 1}", "unknown key '<<' in run.yaml (line 2)"),
    ],
)
def test_unknown_keys_elsewhere(load, text, expected) -> None:
    assert expected in failure(load, MODEL + text + "\n")


def test_all_problems_are_reported_at_once(load) -> None:
    lines = failure(
        load, "lora: {rank: 8, r: x}\nfoo: 1\noptim: 3\n", ["train.seed=x", "bad"]
    ).splitlines()
    assert lines[0].endswith("run.yaml with its overrides has 7 problems:")
    for part in ("lora.rank", "lora.r ", "'foo'", "optim in", "train.seed", "'bad'", "model.path"):
        assert sum(part in line for line in lines[1:]) == 1, part
    assert len(lines) == 8


def test_a_section_that_is_none_is_one_problem(load) -> None:
    assert "model in run.yaml (line 1) must be a section" in failure(load, "model: base\n")
    assert "problems" not in failure(load, "model: base\n")


def test_missing_model(load) -> None:
    for text in ("lora: {r: 8}\n", "model:\n", "model: {}\n"):
        assert failure(load, text) == "model.path is required but is not set in run.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml is empty"),
        ("# only a comment\n", "run.yaml is empty"),
        ("---\n", "must contain sections"),
        ("- a\n- b\n", "must contain sections"),
        ("just text\n", "must contain sections"),
        (MODEL + "---\n" + MODEL, "(line 2) starts a second document"),
        ("model:\n\tpath: x\n", "(line 2, column 1) is not valid YAML: a tab is used"),
        ("model:\n  path: x\n lora:\n  r: 8\n", "(line 3, column 2) is not valid YAML: its indent"),
        ("model: {path: x\n", "(line 1, column 8) is not valid YAML: the { is not closed"),
        ("lora: {r: 8 alpha: 16}\n", "(line 1, column 7) is not valid YAML: the { is not closed"),
        ("a: [b, c\nd: e\n", "(line 1, column 4) is not valid YAML: the [ is not closed"),
        ("model: {path: x}}\n", "(line 1, column 17) is not valid YAML: expected a key, got '}'"),
        ("model: {path: 'x}\n", "(line 1, column 15) is not valid YAML: the quote is not closed"),
        ("a: 'don't'\n", "(line 1, column 9) is not valid YAML: unexpected text after a closing"),
        (
            "a:\n  b: c\n  d\ne: f\n",
            "(line 3, column 3) is not valid YAML: a key is not followed by",
        ),
        ("a: @b\n", "(line 1, column 4) is not valid YAML: a value that begins with '@' needs quo"),
        ("a: *.b\n", "(line 1, column 5) is not valid YAML: a value that begins with * or & needs"),
        ("a:\n  b: c\n  - d\n", "(line 3, column 3) is not valid YAML: unexpected list entry"),
        ("model: path: x\n", "(line 1, column 12) is not valid YAML: unexpected ': '"),
        ("a: &x [1]\nb: *x\n", "(line 1) uses an anchor or alias"),
        ("a: *x\n", "(line 1) uses an anchor or alias"),
        ("model: !!python/object/apply:os.getcwd []\n", "(line 1) uses the tag"),
        ("model: {path: !!str 3}\n", "(line 1) uses the tag"),
        (MODEL + "? [a]\n: 3\n", "(line 2) has a key that is not plain text"),
        (
            MODEL + "lora:\n  r: 8\n  r: 9\n",
            "(line 4) sets 'lora.r' again: it is already set in line 3",
        ),
        (MODEL + "lora: {r: 8}\nlora: {r: 8}\n", "(line 3) sets 'lora' again"),
        (b"model: {path: \xff}\n", "(line 1) is not UTF-8"),
        ((MODEL + "lora: {r: 8}\n").encode("utf-16"), "run.yaml is UTF-16 text: save it as UTF-8"),
        (b"\xfe\xff" + MODEL.encode("utf-16-be"), "run.yaml is UTF-16 text: save it as UTF-8"),
        ((MODEL).encode("utf-16-le"), "U+0000"),
        (b"model: {path: 'a\x07b'}\n", "(line 1) contains the control character U+0007"),
        (
            r'model: {path: "C:\models"}',
            "a backslash starts an escape: use single quotes",
        ),
        (
            r'model: {path: "C:\Users"}',
            "(line 1, column 20) is not valid YAML: in double quotes, a",
        ),
        ("a: " + "[" * 100_000, "nested too deeply"),
        (MODEL + "lora: {r: " + "[" * 50 + "]" * 50 + "}\n", "(line 2) is nested too deeply"),
        ("# " + "x" * (1 << 20), "is too large"),
        (MODEL + "train: {seed: 1" + "0" * 5000 + "}\n", "too many digits"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_files_that_are_not_plain_yaml(load, text, expected) -> None:
    assert expected in failure(load, text)


def test_a_billion_laughs_ends_at_once(load) -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    assert "anchor or alias" in failure(load, bomb)  # which has no end where it is unfolded first


def test_a_byte_order_mark_and_windows_lines_are_read(load) -> None:
    raw = b"\xef\xbb\xbf" + (MODEL + "lora:\n  r: 8\n").replace("\n", "\r\n").encode()
    assert load(raw).lora.r == 8


def test_missing_file_and_folder(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml does not exist"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config("a\0b")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "chats.jsonl",
            "is a data file, not .*`qlora-wgpu init --model MODEL --data .*chats.jsonl'?`",
        ),
        ("list.json", "is a data file, not"),
        ("chats", "is a folder of data, not .* --data .*chats'?`"),
        ("base", "is a model's folder, not .* --model .*base'? --data DATA`"),
        ("base/model.safetensors", "is a weight file, not .* --model .*base'? --data DATA`"),
        ("run", "is a run's folder: use the YAML file in it, such as .*run.config.yaml"),
        ("run/adapter", "is an adapter's folder"),
        ("empty", "is a folder without a YAML file: create one with `qlora-wgpu init`"),
        ("run.yaml", "does not exist: did you mean .*run.config.yaml"),
        ("rnu", "does not exist: did you mean .*.run\\?"),
        ("mien.yaml", "does not exist: did you mean .*mine.yml"),
    ],
)
def test_other_files_are_named_as_what_they_are(tmp_path, path, expected) -> None:
    files = {
        "chats.jsonl": "{}", "list.json": '\n [{"text": "a"}]', "chats/a.csv": "text\na",
        "mine.yml": "", "base/config.json": "{}", "base/model.safetensors": "", "empty/a.md": "",
        "run/config.yaml": "", "run/metrics.jsonl": "", "run/adapter/adapter_config.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / path)
