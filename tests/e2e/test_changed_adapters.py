"""New tokens are of the adapter as it is, also where something of it is kept for a whole text."""

import pytest
from support.recorded_models import recorded_base, start

from e2e.test_generation import opened
from e2e.test_trained_heads import FOLDER, PLAIN, lora
from qlora_wgpu import QLoRAModel
from qlora_wgpu.generation import Engine

PROMPT = [5, 6, 7]


def with_whole_head(device, path):
    folder, recorded = recorded_base(FOLDER / "whole-untied.npz", path)
    model = QLoRAModel.from_pretrained(folder, lora("whole-untied"), PLAIN, "float32", device)
    model.load_adapter(start(recorded))
    return model


@pytest.fixture(params=["llama-dora", "whole-untied"])
def model(request, device, tmp_path):
    if request.param == "whole-untied":
        return with_whole_head(device, tmp_path)
    return opened(request.param, tmp_path, device, scheme="nf4")


def likeliest(model, ids):
    return int(model.logits([ids])[0, -1].argmax())


def change(model):
    """Turns the adapter's signs, all but DoRA's lengths', and makes it larger."""
    model.load_adapter(
        {
            name: array if "magnitude" in name else -3 * array
            for name, array in model.adapter_state_dict().items()
        }
    )


def test_a_text_goes_on_with_the_adapter_that_there_is(model):
    engine = Engine(model, 2, 40)
    texts = [engine.add(ids, max_new_tokens=12) for ids in (PROMPT, [8, 1])]
    for _ in range(5):
        engine.step()
    change(model)
    before = [list(text.ids) for text in texts]
    assert all(len(ids) == 5 for ids in before)
    while not engine.is_idle:
        engine.step()
    for text, ids in zip(texts, before, strict=True):
        assert text.ids[:5] == ids
        for count in range(5, 12):
            assert text.ids[count] == likeliest(model, text.prompt_ids + text.ids[:count])


def test_what_does_not_change_is_not_made_anew(model):
    engine = Engine(model, 1, 40)
    text = engine.add(PROMPT, max_new_tokens=8)
    ids = list(text)
    assert ids[-1] == likeliest(model, PROMPT + ids[:-1])
    (made,) = engine._programs.values()
    token = next(programs for key, programs in made.items() if key[:2] == (1, 1))
    paths = [launch.path for part in (token.hidden, token.head) for launch in part.plan.launches]
    assert not {"dora/norm.wgsl", "trained_rows/write_whole.wgsl"} & set(paths)
    assert not any(path.startswith(("dequantize/", "tensor/copy")) for path in paths)
