"""Other trainers' files: known by their keys, converted value by value, nothing lost in silence."""

import re

import pytest
from support.dialects import converted

from qlora_wgpu import load_config
from qlora_wgpu.config import Config, TrainConfig
from qlora_wgpu.config.dialects.conversion import DIALECTS, convert_file, dialect_of
from qlora_wgpu.config.loading import suggest_key
from qlora_wgpu.config.names import SYNONYMS, key_for, reason_for
from qlora_wgpu.config.schema import sections
from qlora_wgpu.config.yaml import read_yaml_file
from qlora_wgpu.errors import ConfigError

NAMES = {
    "axolotl.yml": "Axolotl",
    "trl.yaml": "TRL",
    "llama_factory.yaml": "LLaMA-Factory",
    "llama_factory_v1.yaml": "LLaMA-Factory (v1)",
    "mlx_lm.yaml": "mlx-lm",
    "torchtune.yaml": "torchtune",
    "unsloth.yaml": "Unsloth Studio",
}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_known_by_their_keys(place, name):
    assert dialect_of(read_yaml_file(place / name).values).name == NAMES[name]


def test_a_file_of_ours_is_no_other_trainers():
    values = Config(model={"path": "m"}).model_dump()
    assert dialect_of(values) is None
    assert dialect_of({**values, "base_model": "m", "learning_rate": 1e-4}) is None
    assert dialect_of({}) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_taken_over_or_named(place, name):
    """Each value that is set there stands in the file, as a setting or with a reason."""
    conversion = convert_file(place / name, {}, lambda model: 2)
    result = conversion.text()
    consumed = {"load_in_8bit", "train_on_inputs", "use_peft", "stage", "finetuning_type", "data",
                "eval_strategy", "dataset_dir", "fine_tune_type", "dataset_train_split",
                "lora_parameters", "report_to", "peft_config", "quant_config",
                "batching_strategy", "max_samples", "tokenizer",
                "shuffle", "training", "logging", "loss",
                "lr_scheduler", "optimizer"}  # fmt: skip
    for key in read_yaml_file(place / name).values:
        ours = key_for(key)
        is_named = re.search(rf"\b{key}\b", result) is not None
        assert is_named or key in consumed or (ours and ".".join(ours) in conversion.settings), key
    assert not [left for left in conversion.dropped if left.reason == "not supported"]


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_command_that_converts_the_file(place, name):
    with pytest.raises(ConfigError) as caught:
        load_config(place / name)
    start = f"{place / name} is a configuration of {NAMES[name]}: convert it with `qlora-wgpu init"
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("axolotl.yml", {"process_reward_model": True}, "process_reward_model: true is not"),
        ("llama_factory.yaml", {"dataset": "pairs"}, "dataset: pairs contains preferences"),
        ("mlx_lm.yaml", {"training_mode": "orpo"}, "training_mode: orpo is not supported"),
        ("axolotl.yml", {"base_model": None}, "names no model: set it with --model"),
        ("axolotl.yml", {"datasets": None}, "names no data: set it with --data"),
        ("axolotl.yml", {"lora_r": -3}, "must be at least 1, got -3"),
        ("axolotl.yml", {"val_set_size": "many"}, "a value is invalid for Axolotl"),
    ],
)  # fmt: skip
def test_files_that_train_something_else(place, name, changes, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        converted(place, name, changes)


def test_what_is_given_wins(place):
    given = {"model.path": "other", "data.train": "x.jsonl", "data.eval": "y.jsonl"}
    config, _ = converted(place, "axolotl.yml", given=given)
    assert config.model.path == "other" and config.data.eval_split is None
    assert config.data.eval == str(place / "y.jsonl")


def test_no_text_of_theirs_writes_into_the_file(place):
    name = "a\nlora: {r: 9}\n#"
    changes = {"base_model": name, "foo\nbar": name, "wandb_name": name}
    config, _ = converted(place, "axolotl.yml", changes)
    assert config.model.path == name and config.lora.r == 32


def test_files_that_cannot_be_read(place):
    (place / "a.json").write_text("[1]")
    (place / "b.json").write_text("{")
    (place / "c.yaml").write_text("a: 1")
    reasons = {
        "a.json": "must hold a JSON object",
        "b.json": "is not valid JSON",
        "c.yaml": "not recognized as a configuration of Axolotl",
        "d.json": "cannot be read",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            convert_file(place / name, {})


def test_tables_name_keys_that_there_are():
    ours = {f"{section}.{leaf}" for section, leaves in sections().items() for leaf in leaves}
    leaves = {key.partition(".")[2] for key in ours}
    for dialect in DIALECTS:
        usual = dialect.defaults.items()
        assert {f"{section}.{key}" for section, values in usual for key in values} <= ours
        keys = dialect.keys.split()
        assert not [key for key in keys if reason_for(key) or not (key_for(key) or key in leaves)]
    assert {*SYNONYMS} <= ours


@pytest.mark.parametrize(
    ("loc", "expected"),
    [
        (("adapter",), ": not needed: every run trains an adapter"),
        (("per_device_eval_batch_size",), ": not needed: evaluations use all held-out rows"),
        (
            ("train", "per_device_eval_batch_size"),
            ": not needed: evaluations use all held-out rows",
        ),
        (("flash_attention",), ": not needed: attention"),
        (("train", "deepspeed"), ": not supported: a process uses one GPU"),
        (("lora", "additional_target"), ": not supported: norms and biases"),
        (("lora", "scale"), ": it is lora.lora_alpha / lora.r"),
        (("num_layers",), ": use lora.layers_to_transform"),
        (("micro_batch_size",), ": did you mean 'train.per_device_train_batch_size'?"),
        (("cutoff_len",), ": did you mean 'data.max_seq_length'?"),
        (("lora", "lora_rank"), ": did you mean 'lora.r'?"),
        (("optim", "adam_bta1"), ": did you mean 'optim.adam_beta1'?"),
    ],
)
def test_hints_about_unknown_keys(loc, expected):
    assert suggest_key(loc).startswith(expected)


def test_hints_in_python():
    with pytest.raises(ConfigError, match="not needed: evaluations use all held-out rows"):
        TrainConfig(per_device_eval_batch_size=8)


def test_no_hint_names_the_opposite():
    hint = suggest_key(("train", "per_device_eval_batchsize"))
    assert hint.startswith(": the keys of 'train' are")


def test_placeholders_are_reported(place):
    notes = converted(place, "axolotl.yml", {"output_dir": "${OUT}/qwen"})[1].notes
    assert "${OUT} in output.dir is not expanded: replace it" in notes


ALIASES = """\
shared: &shared
  r: 8
  lora_alpha: 16
.more: &more {learning_rate: 1e-3, num_epochs: 2}
base_model: base
datasets: [{path: &data rows.jsonl, type: alpaca}]
test_datasets: [{path: *data, type: alpaca}]
lora_model_dir: &none
sequence_len: 64
micro_batch_size: 3
learning_rate: 1e-4
<<: [*more, {seed: 7, learning_rate: 5e-5}]
"""


def test_anchors_and_merge_keys_of_theirs_are_written_out(place):
    (place / "aliases.yml").write_text(ALIASES)
    with pytest.raises(
        ConfigError, match=r"configuration of Axolotl: .* `qlora-wgpu init --from .*aliases.yml`"
    ):
        load_config(place / "aliases.yml")
    taken = convert_file(place / "aliases.yml", {}).settings
    values = {key: taken[key].value for key in taken}
    # A mapping's own keys win, then those of the mapping that is merged first.
    assert values["optim.learning_rate"] == 1e-4
    assert (values["train.num_train_epochs"], values["train.seed"]) == (2, 7)
    assert values["data.eval"] == values["data.train"]


@pytest.mark.parametrize(
    "text",
    [
        "base_model: &a {b: *a}\n",
        "base_model: &a {<<: *a}\n",
        "a0: &a0 {x: 1}\n" + "".join(
            f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
        ),
    ],
    ids=["itself", "merged into itself", "a billion merges"],
)  # fmt: skip
def test_aliases_without_end_are_refused(place, text):
    (place / "endless.yml").write_text(text)
    with pytest.raises(ConfigError, match="too large or too deep with its aliases"):
        convert_file(place / "endless.yml", {})


def test_a_file_of_ours_needs_no_conversion(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(Config(model={"path": "m"}).to_yaml())
    with pytest.raises(ConfigError, match="already a configuration of qlora-wgpu"):
        convert_file(path, {})
