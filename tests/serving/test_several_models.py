"""Several adapters of one base by their names, over real HTTP."""

import json
import threading
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from e2e.tiny import write_model
from support.openai_http import TALK, ask, events, post, serving

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.cli.serve import _named
from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.chat_template import find_chat_template
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.model.budget import fit_inference_to_budget, reading_memory
from qlora_wgpu.runs.workload import GenerationWorkload
from qlora_wgpu.serving.writer import ServedModel

PLAIN = QuantConfig(scheme="none")
RANKS = {"second": 2, "third": 5}
TARGETS = {"second": ["q_proj", "lm_head"], "third": ["v_proj", "embed_tokens"]}


@pytest.fixture(scope="module")
def place(device, tmp_path_factory):
    """A base and two adapters of unlike shapes."""
    folder = tmp_path_factory.mktemp("several")
    write_model(folder / "model")
    for name, rank in RANKS.items():
        lora = LoraConfig(r=rank, target_modules=TARGETS[name])
        with QLoRAModel.from_pretrained(folder / "model", lora, PLAIN, device=device) as model:
            rng = np.random.default_rng(rank)
            flat = 0.3 * rng.standard_normal(model.adapter.length).astype(np.float32)
            model.load_adapter(model.adapter.split(flat))
            model.save_adapter(folder / name / "adapter")
    return folder


@pytest.fixture(scope="module")
def model(place, device):
    model = QLoRAModel.from_pretrained(place / "model", None, PLAIN, device=device)
    for name in RANKS:
        model.load_adapter(place / name / "adapter", name)
    return model


@pytest.fixture(scope="module")
def url(model):
    tokenizer = Tokenizer.from_folder(model.folder.path)
    chat = PromptFormat("chat", tokenizer, find_chat_template("chatml", tokenizer))
    models = {"base": ServedModel("default", chat)}
    models |= {name: ServedModel(name, chat) for name in RANKS}
    with serving(model, models) as address:
        yield address


def said(url, name, **more):
    answer = ask(url, model=name, temperature=0, max_tokens=8, **more)
    assert answer["model"] == name
    return answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_each_answers_as_if_it_were_alone(url, place, device):
    found = {name: said(url, name) for name in ("second", "base", "third", "second")}
    for name in RANKS:
        adapter = place / name / "adapter"
        with QLoRAModel.from_pretrained(
            place / "model", None, PLAIN, device=device, adapter=adapter
        ) as alone:
            expected = alone.generate(TALK, max_new_tokens=8, chat_template="chatml")
        assert found[name] == expected
    assert len(set(found.values())) == 3


@pytest.mark.slow
def test_requests_for_unlike_models_at_a_time_wait_for_one_another(url):
    """All are answered, whatever is asked for in between."""
    names = ["second", "third", "base", "third", "second", "base"]
    expected, found = {name: said(url, name) for name in set(names)}, {}

    def client(number):
        found[number] = said(url, names[number])

    threads = [threading.Thread(target=client, args=(n,)) for n in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(names))] == [expected[name] for name in names]


def test_a_stream_says_which_model_it_is_of(url):
    pieces = events(url, model="third", temperature=0, max_tokens=8)
    assert {piece["model"] for piece in pieces} == {"third"}
    text = "".join(c["delta"].get("content", "") for p in pieces for c in p["choices"])
    assert text == said(url, "third")


def test_all_are_listed(url):
    with urllib.request.urlopen(f"{url}/models") as answer:
        assert [card["id"] for card in json.load(answer)["data"]] == ["base", "second", "third"]
    with urllib.request.urlopen(f"{url}/models/third") as answer:
        assert json.load(answer)["id"] == "third"
    status, text = post(url, {"model": "tiny", "messages": TALK})
    assert status == 404 and "available: 'base', 'second', 'third'" in text


def test_names_on_the_command_line(place, monkeypatch):
    second, third = str(place / "second" / "adapter"), str(place / "third" / "adapter")
    assert _named((second, f"other={third}"), "first") == {"second": second, "other": third}
    for others, message in [
        ((second,), "would have the same name as another, 'second'"),
        ((third, f"third={third}"), "such as second="),
        ((str(place / "model"),), "is a model: only runs and adapters"),
        ((f"x={place / 'nothing'}",), "there is no run, adapter or model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            _named(others, "second")


def test_adapters_beside_the_first_are_planned(model):
    """What the plan has more is what they have taken, and what their programs are told."""
    model.set_adapter("default")
    texts, configs = (
        GenerationWorkload(100, 128, 2),
        [each.config for each in model.adapters.values()],
    )
    own, third = model.layout.adapter.config, configs[-1]
    assert own != third
    alone = reading_memory(texts.plans(model.layout))
    both = reading_memory(replace(texts, others=(third, third, own)).plans(model.layout))
    more = both - alone
    taken = model.adapters["third"].device_bytes
    assert taken <= more["adapter"] <= 2 * taken  # of its shape once
    assert 0 < more["uniforms"] <= alone["uniforms"]
    assert not both["weights"] - alone["weights"]


def test_a_budget_that_does_not_hold_them_is_refused(place):
    layout = QLoRAModel.from_pretrained(place / "model", None, PLAIN).layout
    texts = GenerationWorkload(100, 128)
    budget = sum(reading_memory(texts.plans(layout)).values())
    assert fit_inference_to_budget(layout, texts.plans, budget) is layout
    large = replace(texts, others=(LoraConfig(r=4096, target_modules=["q_proj"]),))
    with pytest.raises(OutOfMemoryError, match="of device memory"):
        fit_inference_to_budget(layout, large.plans, budget)
