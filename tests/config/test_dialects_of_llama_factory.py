"""LLaMA-Factory's files, old and new, converted value by value."""

import json

import pytest
from support.dialects import converted, reasons_of
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import ChatTemplate, PreprocessConfig
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.errors import ConfigError


def test_llama_factory(place):
    config, _ = converted(place, "llama_factory.yaml")
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    first, second = config.data.sources
    assert (first.path, second.path) == (
        str(place / "data/mine.json[:1000]"),  # max_samples
        str(place / "data/identity.json"),
    )
    assert config.data.apply_chat_template
    assert (first.format, first.columns, first.rows) == ("instruction/output", columns, None)
    assert (second.columns, second.rows) == ({}, 90)
    assert (config.data.eval_split, config.data.max_seq_length) == (0.1, 512)
    assert (config.lora.lora_alpha, config.lora.target_modules) == (16, "all-linear")
    assert config.train.gradient_checkpointing
    data = converted(place, "llama_factory.yaml", {"dataset": "chats", "mask_history": True})[
        0
    ].data
    assert (data.format, data.columns, data.train_on) == ("messages", {}, "last_turn")
    data = converted(place, "llama_factory.yaml", {"dataset": ["hub"], "eval_dataset": "mine"})[
        0
    ].data
    assert (data.train, data.eval) == (
        "owner/name:main/test[:1000]",
        str(place / "data/mine.json[:1000]"),
    )
    assert data.eval_split is None
    with pytest.raises(ConfigError, match="data set 'nothing' is missing from"):
        converted(place, "llama_factory.yaml", {"dataset": "nothing"})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "default"),
        ({"pissa_init": True, "pissa_convert": True}, "pissa_niter_16"),
        ({"pissa_init": True, "pissa_iter": -1}, "pissa"),
    ],
)
def test_pissa(place, changes, kind):
    assert converted(place, "llama_factory.yaml", changes)[0].lora.init_lora_weights == kind


@pytest.mark.parametrize(
    ("changes", "weights", "strategy"),
    [
        ({"mix_strategy": "interleave_under", "interleave_probs": "0.7, 0.3"}, [0.7, 0.3], "first"),
        ({"mix_strategy": "interleave_over", "interleave_probs": [1, 3]}, [1, 3], "all"),
        ({"mix_strategy": "interleave_over"}, [1, 1], "all"),
        ({"mix_strategy": "concat"}, [None, None], "first"),
        ({"mix_strategy": "interleave_over_without_replacement"}, [None, None], "first"),
    ],
)
def test_llama_factorys_mixtures(place, changes, weights, strategy):
    data = converted(place, "llama_factory.yaml", changes)[0].data
    assert [source.weight for source in data.sources] == weights
    assert data.stopping_strategy == f"{strategy}_exhausted"
    with pytest.raises(ConfigError, match=r"interleave_probs: 0\.7 must have 2 values, got 1"):
        converted(place, "llama_factory.yaml", {**changes, "mix_strategy": "interleave_under",
                                                "interleave_probs": "0.7"})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "packing", "said"),
    [
        ({"packing": True}, True, "attend to each other"),
        ({"packing": True, "neat_packing": True}, True, ""),
        ({"neat_packing": True}, True, ""),
        ({"packing": False}, False, ""),
        ({"stage": "pt"}, True, "concatenates all text"),
        ({"stage": "pt", "packing": False}, False, ""),
    ],
)
def test_packing_of_llama_factory(place, changes, packing, said):
    changes = {"packing": None, "neat_packing": None, **changes}
    config, conversion = converted(place, "llama_factory.yaml", changes)
    assert config.data.packing == packing
    notes = [note for note in conversion.notes if "each other" in note or "as one" in note]
    assert [said in note for note in notes] == ([True] if said else [])


def test_more_of_llama_factorys_evaluation(place):
    changes = {"early_stopping_steps": 3, "eval_dataset": "mine,chats"}
    config, conversion = converted(place, "llama_factory.yaml", changes)
    assert config.eval.early_stopping_patience == 3
    assert "is a single data set" in reasons_of(conversion)["eval_dataset: chats"]


def test_llama_factory_v1(place):
    config, conversion = converted(place, "llama_factory_v1.yaml")
    assert (config.quant.scheme, config.lora.r, config.lora.lora_alpha) == ("nf4", 8, 32)
    assert config.lora.target_modules == "all-linear"
    first, second = config.data.sources
    assert (first.path, first.format) == (
        str(place / "data" / "identity.json"),
        "instruction/output",
    )
    assert (second.path, second.format, second.rows) == ("o/n", None, 0.5)
    assert config.data.max_seq_length == 512
    train = config.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert (train.max_steps, train.compute_dtype) == (10, "bfloat16")
    assert (config.optim.lr_scheduler_type, config.optim.learning_rate) == ("constant", 1e-4)
    assert any("parts of messages" in note for note in conversion.notes)
    changes = {"train_dataset": "rows.jsonl", "peft_config": {"name": "freeze"},
               "quant_config": None, "batching_strategy": "padding_free"}  # fmt: skip
    config, conversion = converted(place, "llama_factory_v1.yaml", changes)
    assert (config.quant.scheme, config.data.packing) == ("none", True)
    assert any("freeze is not supported" in note for note in conversion.notes)
    (place / "sets.yaml").write_text("pairs: {path: pairs.jsonl, converter: pair}")
    with pytest.raises(ConfigError, match="contains preferences"):
        converted(place, "llama_factory_v1.yaml")


@pytest.mark.parametrize(
    ("tags", "is_dropped"),
    [
        ({"role_tag": "role", "content_tag": "content", "user_tag": "user"}, False),
        ({"user_tag": "human", "assistant_tag": "gpt"}, False),
        ({}, False),
        ({"role_tag": "speaker", "content_tag": "said"}, True),
        ({"user_tag": "U", "assistant_tag": "B"}, True),
    ],
)
def test_tags_of_llama_factory_that_rows_may_not_have(place, tags, is_dropped):
    path = place / "data" / "dataset_info.json"
    entry = {"file_name": "chats.json", "formatting": "sharegpt", "tags": tags}
    path.write_text(json.dumps({"chats": entry}))
    conversion = converted(place, "llama_factory.yaml", {"dataset": "chats"})[1]
    assert any(key.startswith("tags: ") for key in reasons_of(conversion)) == is_dropped


@pytest.mark.parametrize(
    ("changes", "plain", "special"),
    [
        ({"add_tokens": "<a>, <b>", "resize_vocab": True}, ["<a>", "<b>"], []),
        ({"add_special_tokens": ["<x>"], "add_tokens": ["<a>", "<x>"]}, ["<a>"], ["<x>"]),
        ({"new_special_tokens": "<x>,<y>,<x>"}, [], ["<x>", "<y>"]),
    ],
)
def test_new_tokens_of_llama_factory(place, changes, plain, special):
    config, conversion = converted(place, "llama_factory.yaml", changes)
    assert (config.model.add_tokens, config.model.add_special_tokens) == (plain, special)
    left = any(key.startswith("resize_vocab") for key in reasons_of(conversion))
    assert left == ("resize_vocab" in changes)


def test_the_template_that_no_tokenizer_has_is_written_out(place):
    """Checked against what LLaMA-Factory writes: ends of turns are the tokenizer's own."""
    config, _ = converted(place, "llama_factory.yaml", {"template": "default"})
    template = ChatTemplate(config.data.chat_template, {"eos_token": "</s>", "bos_token": "<s>"})
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    assert template.render(messages).text == (
        "System: s</s>\nHuman: a</s>\nAssistant:b</s>\nHuman: c</s>\nAssistant:"
    )
    how = PreprocessConfig(256, config.data.chat_template)
    [example] = encode_rows([{"messages": messages[1:3]}], tiny_tokenizer(), how)
    answer = trained_text(tiny_tokenizer(), example.input_ids, example.labels)
    assert answer.startswith("b</s>") and answer.strip() == "b</s>"
    assert (
        converted(place, "llama_factory.yaml", {"template": "qwen"})[0].data.chat_template is None
    )


def described(place, **entry):
    info = {"mine": {"file_name": "mine.json", **entry}}
    (place / "data" / "dataset_info.json").write_text(json.dumps(info))
    return converted(place, "llama_factory.yaml", {"dataset": "mine"})


def test_columns_that_dataset_info_names(place):
    chat = {"messages": "turns", "tools": "functions", "system": "first"}
    data = described(place, formatting="sharegpt", columns=chat)[0].data
    assert data.columns == {"conversations": "turns", "tools": "functions", "system": "first"}
    assert not data.apply_chat_template
    row = {"prompt": "q", "query": "i", "response": "a", "history": "h", "tools": "f"}
    data = described(place, columns=row)[0].data
    assert data.columns == {
        "instruction": "q", "input": "i", "output": "a", "history": "h", "tools": "f"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "row_format", "ours"),
    [
        ({"prompt": "q", "response": "a"}, "prompt/completion", {"prompt": "q", "completion": "a"}),
        (
            {"prompt": "instruction", "response": "output", "system": "s"},
            "prompt/completion",
            {"prompt": "instruction", "completion": "output", "system": "s"},
        ),
        ({"query": "q", "response": "completion"}, "prompt/completion", {"prompt": "q"}),
        (
            {"prompt": "q", "query": "i", "response": "a"},
            "instruction/output",
            {"instruction": "q", "input": "i", "output": "a"},
        ),
        ({"history": "h"}, "instruction/output", {"history": "h"}),
        ({}, "instruction/output", {}),
    ],
)
def test_no_other_column_is_read_where_some_are_named(place, columns, row_format, ours):
    """Where dataset_info.json names columns, LLaMA-Factory reads no ``input`` besides."""
    data = described(place, columns=columns)[0].data
    assert (data.format, data.columns) == (row_format, ours)


def test_an_input_that_is_not_named_stands_in_no_prompt(place):
    rows = [{"instruction": "ask", "input": "not read", "output": "say"}]
    data = described(place, columns={"prompt": "instruction", "response": "output"})[0].data
    how = PreprocessConfig(256, "chatml", data.format, columns=data.columns, as_chats=True)
    [example] = encode_rows(rows, tiny_tokenizer(), how)
    assert "not read" not in tiny_tokenizer().decode(example.input_ids.tolist())


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_prompts_of_preferences_have_no_other_column(place, stage):
    answers = {"chosen": "good", "rejected": "bad"} if stage == "dpo" else {"kto_tag": "label"}
    columns = {"prompt": "q", "response": "a", **answers}
    info = {"mine": {"file_name": "mine.json", "columns": columns, "ranking": stage == "dpo"}}
    (place / "data" / "dataset_info.json").write_text(json.dumps(info))
    changes = {"dataset": "mine", "stage": stage}
    columns = converted(place, "llama_factory.yaml", changes)[0].data.columns
    assert columns["prompt"] == "q" and not {"instruction", "input"} & columns.keys()


@pytest.mark.parametrize(
    ("columns", "named"),
    [({}, ["history"]), ({"history": "past"}, ["input"]), ({"prompt": "q", "response": "a"}, [])],
)
def test_columns_of_instructions_that_are_read_here_alone_are_named(place, columns, named):
    (place / "data" / "mine.json").write_text('[{"instruction": "", "input": "", "history": []}]')
    notes = described(place, columns=columns)[1].notes
    assert [n.partition("column ")[2].partition(" ")[0] for n in notes if "column" in n] == named


def test_parts_of_the_hub_that_dataset_info_names(place):
    info = {"mine": {"hf_hub_url": "o/n", "folder": "fr", "revision": "v2"}}
    (place / "data" / "dataset_info.json").write_text(json.dumps(info))
    changes = {"dataset": "mine", "max_samples": None}
    config, conversion = converted(place, "llama_factory.yaml", changes)
    assert config.data.train == "o/n:fr/train"
    assert reasons_of(conversion)["revision: v2"] == "the latest of o/n is used"


def test_the_loss_that_llama_factory_weights_by_probability(place):
    train = converted(place, "llama_factory.yaml", {"use_dft_loss": True})[0].train
    assert train.loss_type == "dft"


def test_what_is_read_here_alone_or_there_alone_is_named(place):
    (place / "data" / "mine.json").write_text('[{"conversations": [], "tools": "[]"}]')
    _, conversion = described(place, formatting="sharegpt", columns={"images": "pictures"})
    assert "mine: images: pictures" in reasons_of(conversion)
    assert any("ignores the column tools of mine" in note for note in conversion.notes)
    _, conversion = described(place, formatting="sharegpt", columns={"tools": "tools"})
    assert not any("column tools" in note for note in conversion.notes)
    _, conversion = described(place, formatting="openai")
    assert any("detailed thinking off" in note for note in conversion.notes)


def test_a_number_of_rows_is_of_the_first_ones(place):
    assert described(place)[0].data.train == str(place / "data/mine.json[:1000]")
    data = described(place, num_samples=2000)[0].data
    assert [(s.path, s.rows) for s in data.sources] == [(str(place / "data/mine.json"), 1000)]
    changes, given = {"dataset": "mine"}, {"data.train": "x.jsonl"}
    _, conversion = converted(place, "llama_factory.yaml", changes, given)
    assert "max_samples: 1000" in reasons_of(conversion)


def test_data_that_nothing_describes_is_read_by_its_keys(place):
    (place / "data" / "dataset_info.json").unlink()
    data = converted(place, "llama_factory.yaml", {"dataset": "mine"})[0].data
    assert (data.format, data.columns) == ("auto", {}) and data.apply_chat_template
