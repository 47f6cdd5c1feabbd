"""The parts that families are put together from: names and forward agree, misfits are refused."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from references.config_trials import TEXTS
from references.sized import MORE, family_configs, nested_configs, traced_configs

from qlora_wgpu import families
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Modules, find_family, known_families
from qlora_wgpu.families.parts.config import ConfigReader, is_above_zero, padding_idx
from qlora_wgpu.families.parts.decoder import POST_NORM, DecoderFamily, Layer
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.batch import make_batch_buffers

CONFIGS = traced_configs()
NESTED = nested_configs()
CONFIGS |= NESTED
for image_type, text_type in TEXTS.items():
    if image_type in NESTED:
        continue
    text = CONFIGS.get(text_type) or CONFIGS[text_type.split("_")[0]]
    CONFIGS[image_type] = {"model_type": image_type, "text_config": text}


class Watched(dict):
    """A dictionary that notes which keys are asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        if key in self:
            self.asked.add(key)
        return super().get(key, default)


def start(family, config):
    """A graph, the architecture, its weights and a batch; no device."""
    architecture = family.read(config)
    adapter = AdapterLayout(LoraConfig(r=2), architecture.linears, architecture.experts)
    layout = WeightLayout(QuantConfig(scheme="none"), "float32", 1 << 27, textures=False)
    modules = layout.lay_out(architecture, adapter)
    return Graph("float32", CPU_PROFILE), architecture, modules, make_batch_buffers(2, 8)


def trace(family, config):
    """The weights that a forward had, by kind, with what it asked for."""
    g, architecture, modules, batch = start(family, config)
    weights = [
        Watched(kind)
        for kind in (
            modules.linears,
            modules.norms,
            modules.experts,
            modules.routers,
            modules.tables,
        )
    ]
    watched = Modules(modules.embedding, modules.head, *weights)
    family.forward(g, architecture.config, watched, batch, checkpointing=False)
    return weights


def launches(family, config, *, checkpointing):
    g, architecture, modules, batch = start(family, config)
    family.forward(g, architecture.config, modules, batch, checkpointing=checkpointing)
    return [
        (x.label, x.params, x.workgroups, {n: repr(t) for n, t in x.tensors.items()})
        for x in g.launches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*known_families(), *MORE])
def test_every_weight_that_is_named_is_traced(case):
    config = CONFIGS[case]
    architecture = find_family(config).read(config)
    beyond = {architecture.head_bias}  # which the logits have
    beyond |= {f"{router.name}.bias" for router in architecture.routers}  # a part of their layers
    for weights in trace(find_family(config), config):
        assert weights.asked == set(weights) - beyond


def test_compositions_need_no_ops():
    for config in CONFIGS.values():
        if isinstance(find_family(config), DecoderFamily):
            file = Path(families.__file__).with_name(f"{config['model_type']}.py")
            assert not re.search(r"qlora_wgpu\.(ops|graph)", file.read_text(encoding="utf-8"))


def changed(config, **changes):
    """The family of a config.json, its layers changed in some of their parts."""
    family = find_family(config)

    def compose(read: ConfigReader):
        decoder = family.compose(read)
        return replace(decoder, layers=tuple(replace(x, **changes) for x in decoder.layers))

    return DecoderFamily(compose)


def test_what_does_not_go_together_is_refused():
    for model_type, changes, message in (
        ("qwen2_moe", {"residual_scale": 0.5}, "a gated expert requires"),
        (
            "llama",
            {"norm": LayerNorm(1e-5, bias=False), "order": POST_NORM},
            "cannot be a post-norm",
        ),
    ):
        config = CONFIGS[model_type]
        with pytest.raises(GraphError, match=message):
            trace(changed(config, **changes), config)


def test_a_composition_of_ones_own():
    """Llama's parts with the norms of OLMo 2 have OLMo 2's names."""
    architecture = changed(CONFIGS["llama"], order=POST_NORM).read(CONFIGS["llama"])
    names = {n.split(".", 3)[-1] for n in architecture.norms if "layers" in n}
    assert names == {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}
    layers = architecture.config.layers
    assert all(isinstance(layer, Layer) for layer in layers) and len(layers) == 2


class Written:
    """Llama with a forward of its own."""

    def read(self, config):
        return find_family(config).read(config)

    def forward(self, g, config, modules, batch, *, checkpointing):
        ops, norm = LayerOps(g, modules, batch), config.norm
        head_dim, rope = config.dimensions.head_dim, config.layers[0].attention.rope

        def layer(state, i):
            h, at = state["h"], f"model.layers.{i}."
            x = ops.rms_norm(h, at + "input_layernorm", norm.eps)
            made = [ops.linear(x, f"{at}self_attn.{name}_proj") for name in "qk"]
            q, k = (ops.rope(y, rope, head_dim) for y in made)
            v = ops.linear(x, at + "self_attn.v_proj")
            o = ops.attention(q, k, v, head_dim, head_dim**-0.5)
            h = ops.linear(o, at + "self_attn.o_proj", h)
            x = ops.rms_norm(h, at + "post_attention_layernorm", norm.eps)
            gate, up = (ops.linear(x, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
            return {"h": ops.linear(ops.glu(gate, up, "silu"), at + "mlp.down_proj", h)}

        layers = [partial(layer, i=i) for i in range(2)]
        state = ops.layers({"h": ops.embedding()}, layers, checkpointing=checkpointing)
        return ops.rms_norm(state["h"], "model.norm", norm.eps)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forward_of_ones_own_traces_the_same(checkpointing):
    config = CONFIGS["llama"]
    written, composed = (
        launches(family, config, checkpointing=checkpointing)
        for family in (Written(), find_family(config))
    )
    assert written == composed and len(written) > 20


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(known_families()) - set(NESTED)))
def test_noise_is_added_where_hugging_face_does(case):
    """NEFTune's hook adds it to what the embedding's module returns: some multiply later."""
    config = CONFIGS[case]
    family = find_family(config)
    g, architecture, modules, batch = start(family, config)
    batch = replace(batch, noise=5.0)
    family.forward(g, architecture.config, modules, batch, checkpointing=False)
    values = g.launches[0].values
    # Measured with transformers 5.23: 2.9998 for Granite's 3.0, 0.9995 to 1.0000 for the others;
    # Falcon-H1 and Trinity multiply the module's output as Granite does.
    multiplied = {"afmoe": np.sqrt(architecture.hidden_size), "falcon_h1": 2.5}
    factor = 3.0 if "granite" in case else multiplied.get(case, 1.0)
    most = factor * 5 / np.sqrt(batch.seq * architecture.hidden_size)
    assert values["noise"] == pytest.approx(most, rel=1e-12)
    assert "granite" not in case or values["scale"] == 3.0


def test_noise_before_a_norm_of_the_embedding_is_refused():
    """Muse Glimmer's embedding module normalizes its rows, and NEFTune's noise would come after."""
    family = find_family(NESTED["muse_glimmer"])
    g, architecture, modules, batch = start(family, NESTED["muse_glimmer"])
    family.forward(g, architecture.config, modules, batch, checkpointing=False)
    with pytest.raises(UnsupportedModelError, match="neftune_noise_alpha, and training the embed"):
        noisy = replace(batch, noise=5.0)
        family.forward(g, architecture.config, modules, noisy, checkpointing=False)


# What transformers 5.23 takes for pad_token_id where config.json does not have it.
PADDED = {
    "apertus": 3, "cohere": 0, "cohere2": 0, "ernie4_5": 0, "ernie4_5_moe": 0, "exaone_moe": 0,
    "gemma": 0, "gemma2": 0, "gemma3_text": 0, "gemma3n_text": 0, "gemma4_text": 0,
    "gemma4_unified_text": 0,
    "bamba": 0, "falcon_h1": 0, "flex_olmo": 100_277, "glm4": 151_329, "hunyuan_v1_dense": 0,
    "hunyuan_v1_moe": 0, "lfm2": 0, "lfm2_moe": 0,
    "ministral3": 11, "nanochat": 1, "olmo_hybrid": 100_277, "olmo": 1, "olmo2": 1, "olmo3": 1,
    "olmoe": 1, "phi3": 32_000, "seed_oss": 1,
    "smollm3": 128_004, "zamba2": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", family_configs())
def test_the_row_of_padding_by_default(model_type):
    config = family_configs()[model_type]
    config |= dict.fromkeys({"vocab_size", "vocab_size_per_layer_input"} & {*config}, 200_000)
    del config["pad_token_id"]
    assert find_family(config).read(config).padding_idx == PADDED.get(model_type)


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ({}, 2),
        ({"pad_token_id": 3}, 3),
        ({"pad_token_id": -1}, 99),
        ({"pad_token_id": 100}, None),
        ({"pad_token_id": None}, None),
        ({"pad_token_id": 4, "text_config": {"pad_token_id": 7}}, 7),
        ({"pad_token_id": 4, "text_config": {}}, 2),
    ],
)
def test_the_row_of_padding(config, row):
    assert padding_idx(config, 100, 2) == row


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1e-30, True), (1e15, True), (10**15, True), (9e-31, False), (1.1e15, False), (0, False),
     (True, False), ("1", False), (float("nan"), False)],
)  # fmt: skip
def test_numbers_well_within_float32(value, is_one):
    assert is_above_zero(value) == is_one
