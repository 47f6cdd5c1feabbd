"""Language models that read images' features against recorded PyTorch: none, one and three."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.image_cases import (
    ALPHA,
    CASES,
    GRIDS,
    IMAGE,
    NEW_TOKENS,
    SEQ,
    R,
    batch,
    features,
    packed,
)
from references.projections import distance, projections
from references.seeded import adapter, weights
from safetensors.numpy import save_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.model.image_inputs import ImageFeatures

RECORDED = np.load(Path(__file__).parents[1] / "references/image_language.npz")


def recorded(case):
    """What was recorded of a case, by name."""
    return {n.split("/")[1]: RECORDED[n] for n in RECORDED.files if n.startswith(f"{case}/")}


def images_of(known):
    made = features(int(known["deepstack"]))
    return [
        [ImageFeatures(rows, grid) for rows, grid in zip(own, grids, strict=True)]
        for own, grids in zip(made, GRIDS, strict=True)
    ]


def opened(case, known, folder, device):
    """The base with the adapter that everything was computed with."""
    (folder / "config.json").write_text(str(known["config"]))
    tensors = weights(json.loads(str(known["shapes"])), float(known["norm_offset"]))
    save_file(tensors, folder / "model.safetensors")
    lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=CASES[case][2])
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(scheme="none"), "float32", device)
    model.load_adapter(adapter(json.loads(str(known["adapter"]))))
    return model


def check_gradients(known, loss, gradients):
    assert abs(loss - known["loss"]) <= 1e-5 * known["loss"]
    names = [str(name) for name in known["names"]]
    assert sorted(gradients) == names
    for name, norm, expected in zip(names, known["norms"], known["gradients"], strict=True):
        off = distance(projections(name, gradients[name]), expected)
        assert off <= 2e-5 * norm, (name, off / norm)  # float32 sums in another order


@pytest.mark.quick(case=["qwen3_vl", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_against_pytorch(device, tmp_path, case):
    """Logits and gradients of a batch with padding and without images in one row."""
    known = recorded(case)
    model, images = opened(case, known, tmp_path, device), images_of(known)
    ids, mask, labels = batch()
    logits = model.logits(ids, mask, images=images)[mask == 1]
    assert distance(projections("logits", logits), known["logits"]) <= 1e-5 * known["logits_norm"]
    loss, gradients = model.loss_and_grads(ids, labels, mask, images=images)
    check_gradients(known, loss, gradients)


@pytest.mark.parametrize("case", ["qwen2_vl", "gemma3", "lfm2_vl"])
def test_samples_with_images_in_one_row(device, tmp_path, case):
    """Two samples in one row have the gradient that they have in two."""
    known = recorded(case)
    model, images = opened(case, known, tmp_path, device), images_of(known)
    ids, mask, labels = (array[1:] for array in batch())
    loss, gradients = model.loss_and_grads(ids, labels, mask, images=images[1:])
    ids, mask, labels = packed()
    same, others = model.loss_and_grads(ids, labels, mask, images=[images[1] + images[2]])
    assert abs(same - loss) <= 1e-6 * loss
    for name, gradient in gradients.items():
        # Measured 7e-7: sums in another order.
        assert np.linalg.norm(others[name] - gradient) <= 5e-6 * np.linalg.norm(gradient), name


def prompts():
    ids, mask, _ = batch()
    return [row[seen == 1].tolist() for row, seen in zip(ids, mask, strict=True)]


@pytest.mark.quick(case=["qwen2_vl"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_against_pytorch(device, tmp_path, case):
    """All rows in one batch of decoding, with M-RoPE at positions of their own.

    The first prefill is of one prompt alone, the next could be of one with and one without images.
    """
    known = recorded(case)
    engine, images = Engine(opened(case, known, tmp_path, device), 3, 64), images_of(known)
    made = {
        row: engine.add(prompts()[row], max_new_tokens=NEW_TOKENS, images=images[row])
        for row in (1, 0, 2)
    }
    assert [list(made[row]) for row in range(3)] == known["tokens"].tolist()


def test_a_sequence_does_not_depend_on_others_images(device, tmp_path):
    """Log probabilities are the same to the bit, alone or next to sequences with images."""
    known = recorded("qwen2_vl")
    model, images = opened("qwen2_vl", known, tmp_path, device), images_of(known)
    how = {"max_new_tokens": NEW_TOKENS, "logprobs": 1}
    engine = Engine(model, len(GRIDS), SEQ + NEW_TOKENS)
    both = [
        engine.add(prompt, images=own, **how) for prompt, own in zip(prompts(), images, strict=True)
    ]
    for text in both:
        list(text)
    for prompt, own, text in zip(prompts(), images, both, strict=True):
        alone = Engine(model, 1, SEQ + NEW_TOKENS).add(prompt, images=own, **how)
        list(alone)
        assert alone.token_logprobs == text.token_logprobs


def test_equal_prompts_with_other_images_are_other_prompts(device, tmp_path):
    known = recorded("idefics3")
    model, ((own,),) = opened("idefics3", known, tmp_path, device), images_of(known)[1:2]
    others = [own, ImageFeatures(-own.rows, own.grid), own]
    how = {"max_new_tokens": 2, "logprobs": 1}
    engine = Engine(model, len(others), 64)
    texts = [engine.add(prompts()[1], images=[image], **how) for image in others]
    first, negated, again = ([list(text), text.token_logprobs][1] for text in texts)
    assert first == again != negated
    alone = Engine(model, 1, 64).add(prompts()[1], images=others[1:2], **how)
    assert list(alone) and alone.token_logprobs == negated


@pytest.mark.quick
def test_a_generated_placeholder_is_an_ordinary_token(device, tmp_path):
    """Also when all tokens are computed again, since the adapter has changed."""
    known = recorded("qwen2_vl")
    model, images = opened("qwen2_vl", known, tmp_path, device), images_of(known)
    sampling = Sampling(logit_bias={IMAGE: 100.0})
    engine = Engine(model, 1, SEQ + NEW_TOKENS)
    how = {"max_new_tokens": 3, "images": images[1]}
    text = iter(engine.add(prompts()[1], sampling, **how))
    assert next(text) == IMAGE
    model.load_adapter(adapter(json.loads(str(known["adapter"]))))
    assert list(text) == [IMAGE, IMAGE]


@pytest.mark.parametrize("trained", [{"trainable_token_indices": [7, IMAGE]},
                                     {"modules_to_save": ["embed_tokens"]}])  # fmt: skip
def test_placeholders_give_their_embedding_no_gradient(device, tmp_path, trained):
    known = recorded("llava-embedding")
    (tmp_path / "config.json").write_text(str(known["config"]))
    tensors = weights(json.loads(str(known["shapes"])), float(known["norm_offset"]))
    save_file(tensors, tmp_path / "model.safetensors")
    lora = LoraConfig(r=R, target_modules=["q_proj"], **trained)
    scheme = QuantConfig(scheme="none")
    model = QLoRAModel.from_pretrained(tmp_path, lora, scheme, "float32", device)
    ids, mask, labels = batch()
    ids[0, :4] = 7
    _, gradients = model.loss_and_grads(ids, labels, mask, images=images_of(known))
    (rows,) = (array for name, array in gradients.items() if "embed" in name)
    used, placeholder = rows[0] if len(rows) == 2 else rows[7], rows[-1]
    if len(rows) > 2:
        placeholder = rows[IMAGE]
    assert np.abs(used).max() > 0
    assert not placeholder.any()


def test_images_of_another_model_are_refused(device, tmp_path):
    known = recorded("qwen2_vl")
    model, images = opened("qwen2_vl", known, tmp_path, device), images_of(known)
    wide = [
        [ImageFeatures(np.pad(i.rows, ((0, 0), (0, 1))), i.grid) for i in own] for own in images
    ]
    with pytest.raises(ShapeError, match="must have shape"):
        model.logits(batch()[0], images=wide)
