from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import vector
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.selfcheck.cases.common import KEY
from qlora_wgpu.selfcheck.cases.linear import Sizes, adapted, compare_layers


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "r", "shard", "dropout"),
    [(21, 44, 83, 3, 24, 0.0), (1, 5, 12, 1, 12, 0.0), (21, 44, 83, 3, 24, 0.3)],
)
def test_a_layer(device, profile, dtype, residual, kind, rows, inner, outer, r, shard, dropout):
    bench, sizes = Bench(device, dtype, PROFILES[profile]), Sizes(rows, inner, outer, r, shard)
    layers = adapted(bench, sizes, "up_proj", has_bias=True, dropout=dropout, use_dora=True)
    batch = bench.batch_of(1, rows, dropout_key=KEY if dropout else None)
    output, exact = "residual" if residual else "operand", [kind == "float32"]
    compare_layers(bench, layers, [batch], output, exact=exact, size=0.05)
    assert bench.excess <= 1.0, bench.worst


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_norms(device, profile, dtype, plain):
    from qlora_wgpu.ops import dora

    rng = np.random.default_rng(7)
    w = rng.standard_normal((37, 130))
    w[5] = 0
    adapter = AdapterLayout(LoraConfig(r=3, use_dora=True), [LinearSpec("layers.0.x", 37, 130)])
    adapter.parameters.whole.storage.data = np.zeros(adapter.length, np.float32)
    bench = Bench(device, dtype, PROFILES[profile])
    out = bench.graph.float_vector("norms", 37)
    lora = adapter.loras["layers.0.x"]
    for row0 in (0, 24):
        part = bench.operand(w[row0 : row0 + 24])
        dora.norm(bench.graph, part, lora, out, row0, 2.0, plain=plain)
    (got,) = bench.run(out)
    norms = np.linalg.norm(rounded(w, dtype), axis=1)
    inverse = np.divide(1.0, norms, out=np.zeros(37), where=norms > 0)
    assert_close(got[0], norms if plain else inverse, 4e-6, "float32 sums")


FIXTURE = Path(__file__).parents[1] / "fixtures/dora_dropout.npz"


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_dropout_is_peft_s(device, profile, dtype):
    """Output and gradients of PEFT 0.21 in training, its random mask replaced by ours."""
    with np.load(FIXTURE) as file:
        made = dict(file)
    spec = LinearSpec("layer", *made["w"].shape)
    config = LoraConfig(r=3, lora_alpha=6, use_dora=True, lora_dropout=0.25)
    adapter = AdapterLayout(config, [spec])
    names = list(adapter.split(adapter.initial(0)))
    values = {n: made[f"given{i}"].astype(np.float32) for i, n in enumerate(names)}
    adapter.parameters.whole.storage.data = adapter.join(values)
    adapter.gradient.whole.storage.data = np.zeros(adapter.length, np.float32)
    bench = Bench(device, dtype, PROFILES[profile])
    weight = DenseMatrix(*made["w"].shape, ((0, bench.operand(made["w"])),))
    lora = replace(adapter.loras["layer"], key=88)
    tx = bench.operand(made["x"], grad=True)
    batch = bench.batch_of(1, len(made["x"]), dropout_key=77)
    y = linear(bench.graph, tx, Linear("layer", weight, bench.given(made["bias"]), lora), batch)
    (dx,) = bench.gradients(y, bench.given(made["dy"]), tx)
    whole = vector("flat", adapter.length, "float32", adapter.gradient.whole.storage)
    got_y, got_dx, got_flat = bench.run(y, dx, whole)
    # Inputs, weights, z and dz are operands, rounded once each.
    near = 1e-5 if dtype == "float32" else 3e-2
    assert_close(got_y, made["y"], near, "sums over K")
    assert_close(got_dx, made["dx"], near, "sums over N")
    for i, gradient in enumerate(adapter.split(got_flat[0]).values()):
        assert_close(gradient, made[f"grad{i}"], near, "sums over rows")


@pytest.mark.parametrize("outer", [1, 2, 6, 83])
def test_magnitudes_of_any_number_are_summed_in_bfloat16(device, outer):
    rng = np.random.default_rng(7)
    rows, inner = 5, 16
    x, dy, w = (rng.standard_normal(s) for s in ((rows, inner), (rows, outer), (outer, inner)))
    spec = LinearSpec("model.layers.0.up_proj", outer, inner)
    config = LoraConfig(r=3, lora_alpha=6, use_dora=True)
    gradients = []
    for gradient in ("float32", "bfloat16"):
        adapter = AdapterLayout(config, [spec], forms=AdapterDtypes(gradient=gradient))
        adapter.parameters.whole.storage.data = adapter.initial(0)
        bench = Bench(device, "float32", PROFILES["gpu"])
        g = bench.graph
        layer = DenseMatrix(outer, inner, ((0, bench.operand(w)),))
        tx, batch = bench.operand(x, grad=True), bench.batch_of(1, rows)
        y = linear(g, tx, Linear("l", layer, None, adapter.loras[spec.name]), batch)
        g.add_gradient(y, bench.given(dy))
        g.backward()
        (whole,) = bench.run(vector("gradient", adapter.length, gradient,
                                    adapter.gradient.whole.storage))  # fmt: skip
        gradients.append(adapter.split(whole.ravel().astype(np.float32)))
    for name, exact in gradients[0].items():
        assert np.array_equal(gradients[1][name], rounded(exact, "bfloat16")), name
    (magnitude,) = (gradients[1][name] for name in gradients[1] if "magnitude" in name)
    assert (magnitude != 0).all()
