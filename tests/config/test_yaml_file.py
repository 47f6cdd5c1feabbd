"""Configuration files: strict YAML, line numbers, suggestions, overrides, paths and the dump."""

from __future__ import annotations

import time

import pytest
import yaml

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.renamed import RenamedKeyWarning
from qlora_wgpu.errors import ConfigError

MODEL = "model: {path: base}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    folder = tmp_path / "conf"
    folder.mkdir()

    def run(text, overrides=(), name="run.yaml"):
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, overrides)

    return run


def failure(load, text, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    return str(caught.value)


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
        ("lora: {r: {a: 8}}", "must be an integer, got a mapping"),
        (
            "optim: {learning_rate: '1e-4'}",
            "must be a number, got '1e-4' (write it as a plain number, without quotes)",
        ),
        ("output: {dir: 2024}", "must be text, got 2024 (put it in quotes)"),
        ("quant: {scheme: int8}", "must be one of 'nf4', 'none', got 'int8'"),
        ("lora: {lora_dropout: 1.0}", "must be less than 1, got 1.0"),
        ("lora: {target_modules: [q_proj, 3]}", "must list module names as text"),
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


def test_missing_model(load) -> None:
    for text in ("lora: {r: 8}\n", "model:\n", "model: {}\n"):
        assert failure(load, text) == "model.path is required but is not set in run.yaml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml is empty"),
        ("# only a comment\n", "run.yaml is empty"),
        ("---\n", "must hold sections"),
        ("- a\n- b\n", "must hold sections"),
        ("just text\n", "must hold sections"),
        (MODEL + "---\n" + MODEL, "(line 2) starts a second document"),
        ("model:\n\tpath: x\n", "(line 2, column 1) is not valid YAML: a tab stands"),
        ("model: {path: x\n", "is not valid YAML"),
        ("model: path: x\n", "(line 1, column 12) is not valid YAML: a ': ' stands"),
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
        ((MODEL + "lora: {r: 8}\n").encode("utf-16"), "is not UTF-8"),
        ((MODEL).encode("utf-16-le"), "U+0000"),
        (b"model: {path: 'a\x07b'}\n", "(line 1) holds the control character U+0007"),
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
    start = time.monotonic()
    assert "anchor or alias" in failure(load, bomb)
    assert time.monotonic() - start < 5.0


def test_a_byte_order_mark_and_windows_lines_are_read(load) -> None:
    raw = b"\xef\xbb\xbf" + (MODEL + "lora:\n  r: 8\n").replace("\n", "\r\n").encode()
    assert load(raw).lora.r == 8


def test_missing_file_and_folder(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml does not exist"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("chats.jsonl", "is data, not .*: `qlora-wgpu init --model MODEL --data .*chats.jsonl`"),
        ("list.json", "is data, not"),
        ("chats", "is a folder of data, not .* --data .*chats`"),
        ("base", "is a model's folder, not .* --model .*base --data DATA`"),
        ("base/model.safetensors", "is a file of weights, not .* --model .*base --data DATA`"),
        ("run", "is a run's folder: name the YAML file in it, such as .*run/config.yaml"),
        ("run/adapter", "is an adapter's folder"),
        ("empty", "is a folder with no YAML file in it: `qlora-wgpu init` writes one"),
        ("run.yaml", "does not exist: did you mean .*run/config.yaml"),
        ("rnu", "does not exist: did you mean .*/run\\?"),
        ("mien.yaml", "does not exist: did you mean .*mine.yml"),
    ],
)
def test_what_is_no_configuration_is_told_as_what_it_is(tmp_path, path, expected) -> None:
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


# --- overrides


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
        ("lora={r: 8}", "names a whole section: set its keys one by one, such as lora.r=..."),
        ("lora.r", "the override 'lora.r' must look like section.key=value"),
        ("--lora.r=8", "must look like section.key=value"),
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


# --- paths


def test_data_is_found_beside_the_file_first(load, tmp_path) -> None:
    for folder in ("conf", "here"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "both.jsonl").touch()
    (tmp_path / "here" / "only_here.jsonl").touch()
    config = load(MODEL + "data: {train: both.jsonl, eval: only_here.jsonl}\n")
    assert config.data.train == str(tmp_path / "conf" / "both.jsonl")
    assert config.data.eval == str(tmp_path / "here" / "only_here.jsonl")


def test_missing_data_is_named_beside_the_file(load, tmp_path) -> None:
    config = load(MODEL + "data: {train: none.jsonl}\n")
    assert config.data.train == str(tmp_path / "conf" / "none.jsonl")


def test_data_in_an_override_is_found_here_first(load, tmp_path) -> None:
    for folder in ("conf", "here"):
        (tmp_path / folder / "both.jsonl").touch()
    (tmp_path / "conf" / "only_conf.jsonl").touch()
    config = load(MODEL, ["data.train=both.jsonl", "data.eval=only_conf.jsonl"])
    assert config.data.train == str(tmp_path / "here" / "both.jsonl")
    assert config.data.eval == str(tmp_path / "conf" / "only_conf.jsonl")


def test_model_path_is_a_folder_or_a_name_on_the_hub(load, tmp_path) -> None:
    (tmp_path / "conf" / "models" / "tiny").mkdir(parents=True)
    folder = str(tmp_path / "conf" / "models" / "tiny")
    assert load("model: {path: models/tiny}\n").model.path == folder
    assert load("model: {path: models/../models/tiny}\n").model.path == folder
    assert load("model: {path: org/name}\n").model.path == "org/name"
    assert load("model: {path: ./gone}\n").model.path == str(tmp_path / "conf" / "gone")
    assert load(f"model: {{path: {folder}}}\n").model.path == folder


def test_home_folder(load, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(MODEL + "data: {train: ~/a.jsonl}\n").data.train == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/x", "runs/x"),
        ("./runs/x", "{root}/conf/runs/x"),
        ("../runs/x", "{root}/runs/x"),
        ("{root}/abs", "{root}/abs"),
    ],
)
def test_output_folder(load, tmp_path, text, expected) -> None:
    text, expected = (part.replace("{root}", str(tmp_path)) for part in (text, expected))
    assert load(MODEL + f"output: {{dir: '{text}'}}\n").output.dir == expected


def test_output_folder_of_an_override_is_relative_to_here(load, tmp_path) -> None:
    assert load(MODEL, ["output.dir=./x"]).output.dir == str(tmp_path / "here" / "x")


def test_chat_template_as_name_text_or_file(load, tmp_path) -> None:
    (tmp_path / "conf" / "t.jinja").touch()
    (tmp_path / "conf" / "chatml").touch()

    def template(text):
        return load(MODEL + f"data: {{chat_template: {text}}}\n").data.chat_template

    assert template("chatml") == "chatml"
    assert template("t.jinja") == str(tmp_path / "conf" / "t.jinja")
    assert template("'{{ messages }}'") == "{{ messages }}"
    assert template("'{% for m in messages %}'") == "{% for m in messages %}"


def test_a_path_no_file_system_takes(load) -> None:
    long = "x" * 5000
    assert load(MODEL + f"data: {{train: {long}}}\n").data.train.endswith(long)


# --- the dump


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": {"learning_rate": 1e-4, "adam_epsilon": 1e-12}, "eval": {"eval_steps": 0.1}},
        {"lora": {"target_modules": ["q_proj", "no", "1e-4", "null", "a, b", "x: y"]}},
        {"output": {"dir": "1e-4", "save_total_limit": None}},
        {"output": {"dir": "no"}},
        {"output": {"dir": "010"}},
        {"output": {"dir": "2024-01-01"}},
        {"output": {"dir": "  spaces # and: more "}},
        {"output": {"dir": "ünï/漢字/🙂"}},
        {"output": {"dir": "'\"\\ [x] {y} &z *w !v %u @t `s"}},
        {"data": {"chat_template": "{% for m in messages %}\r\n\t{{ m }}\n\n  {% endfor %}\n"}},
        {"data": {"chat_template": "{{ x }}\x85\u2028\u2029\ufeff\x00\x1b"}},
        {"data": {"chat_template": "{{ 'a' }} " * 100}},
        {"device": {"gpu": "NVIDIA: GeForce #1"}},
        {"train": {"num_train_epochs": 1e22}},
    ],
    ids=repr,
)
def test_the_dump_reads_back_equal(load, changes) -> None:
    config = Config(model={"path": "org/name"}, **changes)
    text = config.to_yaml()
    assert load(text) == config
    assert load(load(text).to_yaml()) == config


def test_the_dump_is_plain(load) -> None:
    text = Config(model={"path": "org/name"}, lora={"target_modules": ["q_proj"]}).to_yaml()
    assert "  learning_rate: 0.0002\n" in text
    assert "  target_modules: [q_proj]\n" in text
    assert "  path: org/name\n" in text
    assert yaml.safe_load(text)["optim"]["adam_epsilon"] == 1e-8  # any YAML reader takes it


def test_the_dump_holds_resolved_paths(load, tmp_path, monkeypatch) -> None:
    (tmp_path / "conf" / "t.jsonl").touch()
    config = load(MODEL + "data: {train: t.jsonl}\n")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    (other / "config.yaml").write_text(config.to_yaml())
    assert load_config(other / "config.yaml") == config


OLD_NAME = r"device\.adapter is now called device\.gpu"


@pytest.mark.parametrize(
    ("text", "overrides", "gpu"),
    [
        (MODEL + "device: {adapter: 1}\n", [], "1"),
        (MODEL, ["device.adapter=radeon"], "radeon"),
        (MODEL + "device: {adapter: 1}\n", ["device.gpu=2"], "2"),
        (MODEL + "device: {gpu: 1}\n", ["device.adapter=2"], "2"),
    ],
)
def test_a_key_is_read_under_its_old_name(load, text, overrides, gpu):
    with pytest.warns(RenamedKeyWarning, match=OLD_NAME) as notes:
        config = load(text, overrides)
    assert config.device.gpu == gpu and len(notes) == 1
    with pytest.deprecated_call():
        assert config.device.adapter == gpu


def test_an_old_name_beside_the_new_one_is_an_error(load):
    with pytest.raises(ConfigError, match=r"unknown key 'device\.adapter'"):
        load(MODEL + "device: {adapter: 1, gpu: 2}\n")


def test_an_old_name_s_value_is_checked_and_its_line_named(load):
    with pytest.warns(RenamedKeyWarning), pytest.raises(ConfigError, match=r"device\.gpu.*line 3"):
        load(MODEL + "device:\n  adapter: [1]\n")


N = 1 << 17  # bytes; all of these took over ten seconds at a MiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"lora: {{layers_to_transform: [{'-1,' * (N // 4)}]}}", "10,000 keys and values"),
        (f"a: [{'[],' * (N // 4)}]", "10,000 keys and values"),
        (f"a: [{'a: 1,' * (N // 6)}]", "10,000 keys and values"),
        ("".join(f"key{i}:\n" for i in range(4000)), "and 3980 more"),
        (f"log: {{report_to: [{'a,' * 4000}]}}", "and 3980 more"),
        (f"? {'k' * (N // 2)}\n: 1", "has a key that is longer than 500 characters"),
        ('"a\\nb": 1', "or holds a control character"),
        (f"lora: {{target_modules: '{'(' * 1500 + ')' * 1500}'}}", "no regular expression"),
        (f"lora: {{target_modules: 'a{{{2**80}}}'}}", "no regular expression"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_far_too_much_ends_soon_with_few_lines(load, text, expected) -> None:
    start = time.monotonic()
    message = failure(load, MODEL + text + "\n")
    assert expected in message and len(message) < 6000
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("train: {max_steps: 1000000000000}", "must be from 1 to 1,000,000,000, or -1"),
        ("lora: {r: 1000000}", "must be at most 4,096, got 1000000"),
        ("lora: {rank_pattern: {q_proj: 1000000}}", "must be at most 4,096"),
        ("train: {per_device_train_batch_size: 10000000000}", "must be at most 2,147,483,647"),
        ("data: {max_seq_length: 9223372036854775808}", "must be at most 16,777,216"),
        ("output: {save_steps: 9223372036854775808}", "must be at most 2,147,483,647"),
        ("optim: {learning_rate: 1e-300}", "must be at least 1e-12, got 1e-300"),
        ("optim: {learning_rate: 1e7}", "must be at most 1000000, got"),
        ("optim: {max_grad_norm: 1e-300}", "must be 0 or from 1e-30 to 1e+15, got 1e-300"),
        ("optim: {adam_epsilon: 1e-300}", "must be 0 or from 1e-30 to 1e+15"),
        ("optim: {adam_beta2: 0.9999999999999999}", "must be at most 0.999999"),
        ("eval: {early_stopping_threshold: 1e300}", "must be 0 or from 1e-30 to 1e+15"),
    ],
)
def test_numbers_out_of_all_proportion(load, section, expected) -> None:
    assert expected in failure(load, MODEL + section + "\n")
