"""Tokens that a run adds: ChatML on a base that lacks its tokens, with and without new rows."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.observing import observed

from e2e.tiny import CHARACTERS, SPECIAL, VOCAB, write_chats, write_model
from qlora_wgpu import (
    Config,
    QLoRAModel,
    QuantConfig,
    estimate,
    evaluate,
    open_adapter,
    train,
)
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.tokenizer import extended_tokenizer
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.runs import prepare
from qlora_wgpu.training import Observer

CHATML = ["<|im_start|>", "<|im_end|>"]
KNOWN = len(SPECIAL) + len(CHARACTERS)
PLAIN = QuantConfig(scheme="none")
PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens.token_adapter.trainable_tokens_delta"
HEAD = "lm_head.token_adapter.trainable_tokens_delta"
# As many rows as tokens, or more; one matrix or two.
BASES = {
    "tied": {"vocab_size": KNOWN},
    "untied": {"vocab_size": KNOWN, "tie_word_embeddings": False},
    "padded": {"vocab_size": VOCAB},
}


def settings(place, name, **more):
    return Config.model_validate({
        "model": {"path": str(place / name / "model"), "add_special_tokens": CHATML,
                  "add_tokens": ["spring"]},
        "data": {"train": str(place / "chats.jsonl"), "eval": str(place / "chats.jsonl"),
                 "max_seq_length": 96, "chat_template": "chatml"},
        "quant": {"scheme": "none"},
        "lora": {"r": 3, "trainable_token_indices": [0]},
        "train": {"max_steps": 2, "gradient_accumulation_steps": 2, "compute_dtype": "float32"},
        "optim": {"learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        "output": {"dir": str(place / name / "run"), "save_steps": 1}, **more,
    })  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def trained(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("new")
    write_chats(place / "chats.jsonl", rows=8)
    (place / request.param).mkdir()
    write_model(place / request.param / "model", **BASES[request.param])
    config, plans = settings(place, request.param), Plans()
    return place / request.param, config, train(config, callbacks=observed(plans)), plans


class Plans(Observer):
    """Keeps what was planned."""

    def __init__(self):
        self.nbytes = []

    def planned(self, memory):
        self.nbytes.append(sum(memory.values()))


def test_the_tokens_are_learnt_and_saved(trained, tmp_path):
    place, config, *_ = trained
    new = [KNOWN, KNOWN + 1, KNOWN + 2]
    saved = load_file(place / "run/adapter/adapter_model.safetensors")
    told = json.loads((place / "run/adapter/adapter_config.json").read_text())
    rows = saved[PREFIX + EMBEDDING]
    if place.name == "untied":
        lists = told["trainable_token_indices"]
        assert lists == {"embed_tokens": [0, *new], "lm_head": new}
        assert saved[PREFIX + HEAD].shape == (3, 36)
    else:
        assert told["trainable_token_indices"] == [0, *new]
        assert PREFIX + HEAD not in saved
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"]
    start = base[new] if place.name == "padded" else np.tile(base.mean(axis=0), (3, 1))
    moved = np.abs(rows[1:] - start).max(axis=1)
    assert (moved[1:] > 1e-4).all() and (moved <= 0.021).all()  # two steps of at most 0.01

    tokenizer = Tokenizer.from_folder(place / "run/adapter")
    assert [tokenizer.token_id(t) for t in ("spring", *CHATML)] == new
    assert tokenizer.encode("<|im_start|>a spring", add_special_tokens=False)[0] == KNOWN + 1
    assert tokenizer.decode([KNOWN + 1, KNOWN]) == "spring"
    data = prepare(config)
    ids = {int(i) for row in data.dataset for i in row.input_ids}
    assert {KNOWN + 1, KNOWN + 2} <= ids


def test_it_resumes_to_the_same_bits(trained):
    place, config, *_ = trained
    other = config.model_copy(
        update={"output": config.output.model_copy(update={"dir": str(place / "again")})}
    )
    train(other.model_copy(update={"train": other.train.model_copy(update={"max_steps": 1})}))
    train(other, resume=True)
    files = (place / run / "adapter/adapter_model.safetensors" for run in ("run", "again"))
    one, again = (path.read_bytes() for path in files)
    assert one == again


def test_it_is_opened_measured_and_merged(trained, tmp_path):
    place, config, result, _ = trained
    ids = np.array([[KNOWN + 1, 5, KNOWN, 9, KNOWN + 2, 0]])
    with open_adapter(place / "run") as model:
        expected, text = model.logits(ids), model.generate("hello", max_new_tokens=5)
    measured = evaluate(config, adapter=str(place / "run/adapter"))
    assert measured.adapter.loss == pytest.approx(result.eval_loss, rel=1e-6)
    merge(place / "model", place / "run/adapter", tmp_path / "merged")
    rows = max(KNOWN + 3, BASES[place.name]["vocab_size"])
    assert json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"] == rows
    with QLoRAModel.from_pretrained(tmp_path / "merged", None, PLAIN, "float32") as model:
        got = model.logits(ids)
        assert model.generate("hello", max_new_tokens=5) == text
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    with QLoRAModel.from_pretrained(
        place / "model", None, PLAIN, "float32", adapter=place / "run/adapter"
    ) as model:
        assert np.array_equal(model.logits(ids), expected)


def test_the_plan_counts_the_new_rows(trained):
    _, config, result, plans = trained
    # Texts are planned to grow, and one that ends at once takes less.
    assert -100 <= plans.nbytes[0] - result.peak_bytes < 0.02 * result.peak_bytes
    # Rows, their gradient and moments; and without files it is known, too.
    changes = {"add_tokens": [], "add_special_tokens": []}
    without = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    assert estimate(config).total > estimate(without).total


def test_what_peft_writes_of_a_resized_embedding_is_opened(trained, tmp_path):
    place, *_ = trained
    if place.name == "padded":
        return
    folder = place / "run/adapter"
    saved = load_file(folder / "adapter_model.safetensors")
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"]
    whole = np.concatenate([base, np.zeros((3, base.shape[1]), np.float32)])
    name = f"{PREFIX}model.embed_tokens.token_adapter.base_layer.weight"
    copies = {name: whole, name.replace("model.embed_tokens", "lm_head"): whole}
    if place.name == "tied":
        copies[PREFIX + HEAD] = saved[PREFIX + EMBEDDING]
    config = (folder / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    save_file({**saved, **copies}, tmp_path / "adapter_model.safetensors")
    ids = np.array([[KNOWN + 1, 5]])
    seen = []
    for adapter in (folder, tmp_path):
        given = QLoRAModel.from_pretrained(place / "model", None, PLAIN, "float32", adapter=adapter)
        with given as model:
            seen.append(model.logits(ids))
    assert np.array_equal(*seen)
    if place.name == "tied":
        copies[PREFIX + HEAD] = saved[PREFIX + EMBEDDING] + 1
        save_file({**saved, **copies}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match="are tied, but differ"):
            QLoRAModel.from_pretrained(place / "model", None, PLAIN, adapter=tmp_path)


@pytest.mark.quick
def test_tokens_that_are_there_stay_and_double_ones_are_a_sentence(tmp_path):
    write_model(tmp_path / "model")
    made = extended_tokenizer(tmp_path / "model", ["ab", "</s>"], ["<|user|>", "<|im_end|>"])
    assert made.new_tokens == (KNOWN, KNOWN + 1) and made.count == KNOWN + 2
    with pytest.raises(ConfigError, match="have 'x' twice"):
        extended_tokenizer(tmp_path / "model", ["x"], ["x"])


def test_an_adapter_of_other_tokens_is_a_sentence(trained, tmp_path):
    place, *_ = trained
    if place.name != "tied":
        return
    write_model(tmp_path / "small", vocab_size=KNOWN - 2)
    with pytest.raises(CheckpointError, match="the adapter lacks some in between"):
        QLoRAModel.from_pretrained(tmp_path / "small", None, PLAIN, adapter=place / "run/adapter")
