"""Text by a cache of keys and values is the text that the whole context gives."""

import json
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from references.seeded import VOCAB, adapter, weights
from safetensors.numpy import save_file
from support.grown_texts import grown, log_probabilities, written
from support.processes import PATIENCE

from e2e.test_family_references import FORWARDS, lora
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError, DataError, DeviceError, ShapeError
from qlora_wgpu.generation import Engine, generate
from qlora_wgpu.gpu.device import Device

FOLDER = Path(__file__).parents[1] / "references"
# Of these the rotation depends on how long the text is: each step is read anew.
WRONG = (
    {"max_new_tokens": -1},
    {"max_new_tokens": 1.5},
    {"temperature": "hot"},
    {"top_k": -1},
    {"top_p": 0},
    {"top_p": 1.5},
    {"seed": -1},
    {"seed": "a"},
    {"repetition_penalty": 1e300},
    {"repetition_penalty": 1e-300},
)
BY_LENGTH = {"llama-dynamic", "phi3-longrope", "phi3-shortrope"}
# The plain case of a family, or the first of its others.
OF_EACH_FAMILY = {case.partition("-")[0]: case for case in sorted(FORWARDS, reverse=True)}


def opened(case, path, device, dtype="float32", scheme="none"):
    recorded = np.load(FOLDER / f"{case}.npz")
    (path / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), path / "model.safetensors")
    model = QLoRAModel.from_pretrained(
        path, lora(recorded), QuantConfig(scheme=scheme), dtype, device
    )
    model.load_adapter(adapter({n: a.shape for n, a in model.adapter_state_dict().items()}))
    return model


@pytest.mark.cover(case=[*OF_EACH_FAMILY.values(), *sorted(BY_LENGTH)])
@pytest.mark.parametrize("case", [*FORWARDS, "llama-yarn", *sorted(BY_LENGTH)])
def test_every_family(device, tmp_path, case):
    model = opened(case, tmp_path, device)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 9).tolist()
    engine = Engine(model, 1, 40)
    ids, steps = written(engine, model, prompt, 13)
    whole = np.array(prompt + ids[:-1])
    expected = model.logits(whole[None])[0, 8:]
    if case in BY_LENGTH:
        rows, mask = np.tile(whole, (13, 1)), np.tri(13, 21, 8, dtype=np.int64)
        expected = model.logits(rows, mask)[np.arange(13), np.arange(8, 21)]
    apart = np.abs(steps - log_probabilities(expected)).max()
    assert apart <= 1e-5 * np.abs(expected).max()
    again = written(engine, model, prompt, 13)
    assert again[0] == ids and np.array_equal(again[1], steps)


def test_shared_keys_and_values_are_kept_once(device, tmp_path):
    """Of five layers of Gemma 4 the last three attend to what the first two have stored."""
    engine = Engine(opened("gemma4", tmp_path, device), 1, 16)
    assert len(list(engine.add([5, 6, 7], max_new_tokens=2))) == 2
    assert [keys.columns for keys, _ in engine._cache.layers] == [2 * 20, 2 * 28]


@pytest.mark.parametrize("scheme", ["none", "nf4"])
def test_bfloat16(device, tmp_path, scheme):
    model = opened("llama", tmp_path, device, "bfloat16", scheme)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 1).tolist()
    ids, steps = grown(model, prompt, 21)
    expected = model.logits([prompt + ids])[0, :-1]
    apart = np.abs(steps - log_probabilities(expected)).max() / np.abs(expected).max()
    assert apart <= 0.05  # roundings of another order


@pytest.mark.quick
def test_texts(device, tmp_path):
    model = opened("qwen3", tmp_path, device)
    prompt = [5, 6, 7]

    def text(**options):
        return list(generate(model, prompt, max_new_tokens=8, **options))

    greedy, ids = text(), list(prompt)
    for token in greedy:
        assert int(model.logits([ids])[0, -1].argmax()) == token
        ids.append(token)
    assert text(temperature=1e-6) == greedy and text(temperature=5, top_k=1) == greedy
    assert text(temperature=5, top_p=1e-9) == greedy
    one, two = text(temperature=2.0, seed=1), text(temperature=2.0, seed=2)
    assert one == text(temperature=2.0, seed=1) != two
    assert text(stop_ids=[greedy[3]]) == greedy[: greedy.index(greedy[3])]
    assert text(max_length=5) == greedy[:2]
    with model.adapter_off():
        plain = text()
    assert plain != greedy and text() == greedy


@pytest.mark.quick
def test_what_cannot_be_generated(device, tmp_path):
    model = opened("llama", tmp_path, device)
    for arguments, error in (
        ({"prompt_ids": []}, DataError),
        ({"prompt_ids": [1], "temperature": float("nan")}, ConfigError),
        ({"prompt_ids": [1, 2], "max_length": 2}, DataError),
        ({"prompt_ids": [VOCAB]}, ShapeError),
        ({"prompt_ids": "text"}, ConfigError),
        *(({"prompt_ids": [1], **setting}, ConfigError) for setting in WRONG),
    ):
        with pytest.raises(error):
            list(generate(model, **arguments))
    flat = model.read_flat(model.adapter.parameters).copy()
    model.write_parameters(np.full_like(flat, np.nan))
    with pytest.raises(CheckpointError, match="not finite"):
        list(generate(model, [1]))


def test_threads_take_turns(device, tmp_path):
    model = opened("llama", tmp_path, device)

    def text(first):
        return list(generate(model, [first, 5, 6], max_new_tokens=24))

    alone = [text(first) for first in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(text, range(4))) == alone


def test_a_forked_process_is_told_to_open_its_own(device, tmp_path):
    model = opened("llama", tmp_path, device)
    fork = multiprocessing.get_context("fork")
    answer, question = fork.Pipe(duplex=False)
    child = fork.Process(target=_say_what_fails, args=(model, question), daemon=True)
    child.start()
    for _ in range(2):
        assert answer.poll(PATIENCE) and "forked after" in answer.recv()
    child.join(PATIENCE)


def _say_what_fails(model, question):
    for use in (lambda: model.logits([[1, 2]]), Device):
        try:
            use()
        except DeviceError as err:
            question.send(str(err))


def test_numbers_of_numpy_count_as_pythons(device, tmp_path):
    model = opened("llama", tmp_path, device)
    texts = [list(generate(model, [1, 2, 3], max_new_tokens=n)) for n in (3, np.int64(3))]
    assert texts[0] == texts[1] and len(texts[0]) == 3


@pytest.mark.quick
def test_a_model_is_not_pickled(device, tmp_path):
    with pytest.raises(TypeError, match="open that with open_adapter"):
        pickle.dumps(opened("llama", tmp_path, device))


def test_rows_of_several_lengths_are_told(device, tmp_path):
    with pytest.raises(ShapeError, match="rows of equal length"):
        opened("llama", tmp_path, device).logits([[1, 2], [3]])
