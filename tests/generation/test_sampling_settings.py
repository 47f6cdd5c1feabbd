"""What sampling parameters, scores and requests are, without a model."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.generation import prefill
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.generation.model import QLoRAModel, _is_prompt
from qlora_wgpu.generation.sampling import Sampling, check_count, check_stop_ids
from qlora_wgpu.generation.scores import Classification
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.limits import LOGIT_BIASES
from qlora_wgpu.ops.score import Scoring

module = import_module("qlora_wgpu.generation.generate")  # the package names a function so


@pytest.mark.parametrize("values", [
    {"temperature": 0}, {"temperature": 1_000_000}, {"top_p": 1}, {"top_p": 1e-9}, {"min_p": 0},
    {"min_p": 1}, {"repetition_penalty": 1e-6}, {"repetition_penalty": 1_000_000}, {"seed": None},
    {"seed": 0}, {"top_k": np.int64(0)}, {"logit_bias": {0: -100, 1: 100}},
    {"logit_bias": dict.fromkeys(range(LOGIT_BIASES), 0.5)},
])  # fmt: skip
def test_sampling_at_its_limits(values):
    Sampling(**values)


@pytest.mark.parametrize(("values", "says"), [
    ({"temperature": -1e-9}, "temperature must be a number from 0 to 1,000,000"),
    ({"temperature": 1_000_001}, "temperature must be"), ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"), ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p must be a number above 0 and at most 1"), ({"top_p": 1.001}, "top_p"),
    ({"top_p": None}, "top_p"), ({"min_p": -0.001}, "min_p must be a number from 0 to 1"),
    ({"min_p": 1.001}, "min_p"), ({"min_p": "0"}, "min_p"),
    ({"repetition_penalty": 0.9e-6}, "repetition_penalty must be a number from 0.000001 to"),
    ({"repetition_penalty": 1_000_001}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"seed": -1}, "seed must be a non-negative integer"), ({"seed": True}, "seed"),
    ({"top_k": -1}, "top_k must be a non-negative integer"), ({"top_k": 1.0}, "top_k"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping from token ids to numbers"),
    ({"logit_bias": dict.fromkeys(range(LOGIT_BIASES + 1), 0)}, "logit_bias may have at most"),
    ({"logit_bias": {-1: 0}}, "each token of logit_bias must be"),
    ({"logit_bias": {3: 100.5}}, "logit_bias of token 3 must be a number from -100 to 100"),
    ({"logit_bias": {3: -100.5}}, "logit_bias of token 3"),
    ({"logit_bias": {3: "1"}}, "logit_bias of token 3"),
])  # fmt: skip
def test_sampling_beyond_its_limits_is_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        Sampling(**values)


def test_a_bias_is_of_a_token_that_the_model_has():
    sampling = Sampling(logit_bias={0: 1, 9: 1})
    sampling.check_tokens(10)
    with pytest.raises(ConfigError, match="contains token 9, but the model's last token is 8"):
        sampling.check_tokens(9)


def test_counts_and_what_stops_a_text():
    assert check_count("n", 0) == 0 and type(check_count("n", np.int32(3))) is int
    for value in (True, -1, 1.0, "1", None):
        with pytest.raises(ConfigError, match="n must be a non-negative integer"):
            check_count("n", value)
    for ids in (None, [], [0, 1], {2}, frozenset((np.int64(3),))):
        check_stop_ids(ids)
    for ids in ("1", b"1", {1: 2}, 1):
        with pytest.raises(ConfigError, match="stop_ids must be a list of token ids"):
            check_stop_ids(ids)
    with pytest.raises(ConfigError, match="each token of stop_ids"):
        check_stop_ids([0, -1])


# ---- scores --------------------------------------------------------------------------------------


def of(row, *given, **how):
    return Classification.of(np.array(row, np.float32), Scoring(*given, **how))


def test_the_meaning_of_scores():
    assert of([0.5], "reward").to_json() == {"score": 0.5}
    value = of([0.5], "classification", 1, "regression", labels=("a",))
    assert value.to_json() == {"score": 0.5} and value.label is value.probabilities is None
    two = of([0.5, 2.0], "classification", 2, "regression", labels=("a", "b"))
    assert two.to_json() == {"scores": {"a": 0.5, "b": 2.0}}
    several = of([0.0, 0.1, -800.0], "classification", 3, "multi_label_classification")
    assert several.label == ["LABEL_1"]  # the first is at a half
    shares = [1 / (1 + np.exp(-z)) for z in (0.0, np.float32(0.1), -700.0)]
    assert list(several.probabilities.values()) == pytest.approx(shares)
    one = of([1000.0, 1001.0], "classification", 2, labels=("a", "b"))
    assert one.label == "b"
    assert one.probabilities == pytest.approx({"a": 1 / (1 + np.e), "b": np.e / (1 + np.e)})
    assert one.to_json().keys() == {"label", "probabilities", "scores"}


@pytest.mark.parametrize(("part", "is_one"), [
    ("text", True), ([1, 2], True), ({"role": "user"}, False), (b"text", False), (1, False),
])  # fmt: skip
def test_what_is_a_prompt_of_a_list(part, is_one):
    assert _is_prompt(part) == is_one


@pytest.mark.parametrize(("inputs", "several"), [
    ("text", False), (["a", "b"], True), ([1, 2], False), ([{"role": "user"}], False),
    (["a", 1], False), ([[1], [2]], True),
])  # fmt: skip
@pytest.mark.parametrize(("asked", "own", "limit"), [
    (None, None, None), (7, None, 7), (None, 9, 9), (7, 9, 7), (9, 7, 7),
])  # fmt: skip
def test_one_input_is_told_from_several(monkeypatch, inputs, several, asked, own, limit):
    given = []
    where = "qlora_wgpu.generation.model."
    monkeypatch.setattr(f"{where}scoring_of_model", lambda model: Scoring("classification", 3))
    monkeypatch.setattr(f"{where}encoded_inputs", lambda *all: given.append(all) or [[1], [2]])
    monkeypatch.setattr(f"{where}scores_of", lambda *all: [([1], [[1, 2, 3]]), ([0], [[4, 5, 6]])])
    model = SimpleNamespace(prompts="prompts", max_length=own)
    assert QLoRAModel._scored(model, inputs, 1, asked)[0] == several
    ((each, _, _, most),) = given
    assert each == (inputs if several else [inputs]) and most == limit
    rows = QLoRAModel._scored(model, inputs, 1, asked)[1]
    assert rows.tolist() == [[4, 5, 6], [1, 2, 3]] and rows.dtype == np.float32


@pytest.mark.parametrize(("given", "says"), [
    ((["a"], 0, None), "batch_size must be at least 1"),
    ((["a"], 1, 0), "max_length must be at least 1"), ((b"a", 1, None), "got bytes"),
    (({"a": 1}, 1, None), "got dict"), ((5, 1, None), "got int"),
])  # fmt: skip
def test_what_has_no_scores(monkeypatch, given, says):
    monkeypatch.setattr("qlora_wgpu.generation.model.scoring_of_model", lambda model: None)
    with pytest.raises(ConfigError, match=says):
        QLoRAModel._scored(SimpleNamespace(prompts=None, max_length=None), *given)


# ---- requests ------------------------------------------------------------------------------------


def request(prompt=(1, 2), most=3, stop=(), logprobs=None, step=None, images=()):
    return Request(step, list(prompt), Sampling(), most, stop, logprobs, images)


def test_a_request_ends_at_its_last_token_or_at_what_stops_it():
    text = request(stop=(9,))
    assert text.finish_reason is None and text.length == 2
    text.take(5)
    text.take(6)
    assert text.finish_reason is None and text.all_ids == [1, 2, 5, 6] and text.length == 4
    text.take(9)
    assert (text.finish_reason, text.stop_token, text.ids) == ("stop", 9, [5, 6])
    text.cancel()
    assert text.finish_reason == "stop"
    full = request(most=1)
    full.take(5)
    assert full.finish_reason == "length" and full.stop_token is None
    assert request(most=0).finish_reason == "length"
    other = request()
    other.cancel()
    assert other.finish_reason == "cancelled"


def test_iterating_runs_steps_until_the_end():
    steps = []

    def step():
        steps.append(len(text.ids))
        text.take(7)

    text = request(step=step)
    assert list(text) == [7, 7, 7] and steps == [0, 1, 2]
    assert list(text) == [7, 7, 7] and len(steps) == 3


@pytest.mark.parametrize(("capacity", "tokens", "new", "fits"), [
    (4, 3, 1, True), (4, 4, 1, False), (4, 5, 1, False), (4, 4, 0, True), (4, 4, None, False),
])  # fmt: skip
def test_room_for_a_prompt_and_a_token(capacity, tokens, new, fits):
    engine = SimpleNamespace(capacity=capacity)
    if fits:
        Engine.check_room(engine, tokens, new)
        return
    with pytest.raises(DataError, match=f"has {tokens} tokens, the maximum with its answer is 4"):
        Engine.check_room(engine, tokens, new)


class Steps:
    """An engine whose requests get the same token at each step; how many it had at a time."""

    def __init__(self, model, texts, capacity):
        self.model, self.texts, self.capacity = model, texts, capacity
        self.all, self.most = [], 0
        model.engines.append(self)

    def checked(self, ids, max_new_tokens):
        if not ids:
            raise DataError("the prompt is empty")

    def add(self, ids, sampling, *, max_new_tokens, stop_ids, images):
        count = min(max_new_tokens, self.capacity - len(ids))
        self.all.append(Request(None, list(ids), sampling, count, stop_ids, None))
        return self.all[-1]

    def step(self):
        active = [text for text in self.all if text.finish_reason is None]
        self.most = max(self.most, len(active))
        for text in active[: self.texts]:
            text.take(65)
        return active[: self.texts]


@pytest.mark.parametrize(("max_length", "capacity"), [(None, 8), (7, 7), (99, 8)])
def test_prompts_are_completed_in_order_and_a_few_at_a_time(monkeypatch, max_length, capacity):
    monkeypatch.setattr(module, "Engine", Steps)
    monkeypatch.setattr(module, "_QUEUED", 2)
    tokenizer = SimpleNamespace()

    class Stream:
        def __init__(self, *given):
            self.count, self.text, self.stopped = 0, "", False

        def push(self, token):
            self.count, self.text = self.count + 1, self.text + chr(token)
            self.stopped = self.text == "AAA"

    monkeypatch.setattr(module, "TextStream", Stream)
    model = SimpleNamespace(engines=[])
    prompts = [Prompt((1,) * length) for length in (1, 3, 2, 1, 1, 1, 1)]
    made = list(complete(
        model, tokenizer, prompts, max_new_tokens=5, batch=2, sampling=Sampling(seed=10),
        max_length=max_length,
    ))  # fmt: skip
    (engine,) = model.engines
    assert (engine.texts, engine.capacity) == (2, capacity) and engine.most == 4
    assert [each.text for each in made] == ["AAA"] * 7
    assert {each.finish_reason for each in made} == {"stop"}
    assert [text.sampling.seed for text in engine.all] == list(range(10, 17))
    assert list(complete(model, tokenizer, [], max_new_tokens=5)) == []
    made = complete(model, tokenizer, prompts, max_new_tokens=5, sampling=Sampling(seed=None))
    assert next(made).text == "AAA" and model.engines[-1].texts == 1
    assert model.engines[-1].all[0].sampling.seed is None
    with pytest.raises(DataError, match="prompt 2: the prompt is empty"):
        next(complete(model, tokenizer, [Prompt((1,)), Prompt(())], max_new_tokens=5))


# ---- batches of prompts --------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "texts", "size"), [
    (64, 8, 8), (64, 99, 8), (64, 7, 4), (64, 1, 1), (128, 8, 4), (171, 8, 2), (257, 8, 1),
    (512, 8, 1), (4096, 8, 1), (32, 3, 2),
])  # fmt: skip
def test_how_many_prompts_are_a_batch(length, texts, size):
    assert prefill.batch_size(length, texts) == size


@pytest.mark.parametrize(("rows", "length", "texts", "count"), [
    (1, 1, 9, 1), (1, 4, 9, 4), (2, 4, 9, 8), (2, 9, 3, 3), (4, 9, 3, 4), (3, 99, 99, 8),
])  # fmt: skip
def test_how_many_tokens_are_sampled_at_once(rows, length, texts, count):
    assert prefill.sample_count(rows, length, texts) == count


def test_only_prompts_of_about_one_length_are_a_batch():
    long, short = request(range(60)), request(range(3))
    alike, pictured = request(range(50)), request(range(60), images=("an image",))
    noted, half = request(range(60), logprobs=0), request(range(30))
    everyone = [long, short, alike, pictured, noted, half]
    assert prefill.prompt_length(1, 1) == 2 and prefill.prompt_length(1, 64) == 32
    assert prefill.prefill_batch(everyone, 64) == [long, alike]
    assert prefill.prefill_batch([noted, long, alike], 64) == [noted]
    assert prefill.prefill_batch([pictured, long], 64) == [pictured]
    assert prefill.prefill_batch([long, alike, request(range(61))], 64) == [long, alike]


def test_requests_share_a_prompt_only_if_all_of_it_is_the_same():
    first, same, other = request([1, 2]), request([1, 2]), request([1, 3])
    noted, pictured = request([1, 2], logprobs=0), request([1, 2], images=("a",))
    again, another = request([1, 2], images=("a",)), request([1, 2], images=("b",))
    longer = request([1], images=("a",))
    longer.take(2)
    groups = prefill.by_prompt([first, other, same, noted, pictured, again, another, longer])
    assert list(groups.values()) == [
        [first, same], [other], [noted], [pictured, again], [another], [longer]
    ]  # fmt: skip
    assert all(key is group[0] for key, group in groups.items())


def test_all_sizes_of_prefills_are_named():
    sizes = prefill.prompt_batches([1, 2, 60], 64, 4)
    assert sizes == [(4, 64), (4, 32), (2, 64), (2, 32), (1, 64), (1, 32)]
    assert prefill.largest_batch(60, 64, 4) == (4, 64)


class Program:
    """What a prefill asks of its program."""

    def __init__(self, samples, kept):
        self.samples, self.kept, self.asked = samples, kept, []
        self.batch = SimpleNamespace(image_rows=None)
        self.hidden = SimpleNamespace(
            run=lambda: self.asked.append("run"), run_preemptible=lambda: iter(range(3))
        )

    def write_prefill_inputs(self, prompts, places, images):
        self.written = prompts, places, images

    def end_prompts(self, prompts, rows, slots, choices):
        self.asked.append((prompts, rows, slots))
        return [10 * row + slot for row, slot in zip(rows, slots, strict=True)]

    def logits(self):
        return np.arange(2 * self.samples).reshape(self.samples, 2)


@pytest.mark.parametrize("kept", [None, "logits"])
def test_a_prefill_samples_and_copies_what_its_requests_share(kept):
    texts = [request([1, 2]), request([1, 2]), request([3])]
    for slot, text in enumerate(texts):
        text.slot = slot + 4
    program = Program(2, kept)
    made = prefill.Prefill(program, [texts[:2], texts[2:]], None)
    assert program.written == ([[1, 2], [3]], [4, 6], None) and made.texts == texts
    assert [text.rotated_length for text in texts] == [2, 2, 1]
    assert made.advance(float("inf")) and program.asked == ["run"]
    assert list(made.copies(texts)) == [(4, 2, [5])] and not list(made.copies(texts[:1]))
    tokens, logits = made.sample(texts)
    assert tokens == [4, 5, 16]
    assert program.asked[1:] == [([[1, 2], [1, 2]], [0, 0], [4, 5]), ([[3]], [1], [6])]
    assert logits is None if kept is None else logits.tolist() == [[0, 1], [2, 3], [0, 1]]


def test_a_prefill_is_interrupted_when_its_time_is_over():
    made = prefill.Prefill(Program(1, None), [[request()]], None)
    assert [made.advance(0.0) for _ in range(4)] == [False, False, False, True]
    other = prefill.Prefill(Program(1, None), [[request()]], None)
    assert other.advance(100.0)
