"""Adapters that begin as parts of their base (PiSSA, OLoRA), against what PEFT recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, separated_weight, weights
from safetensors.numpy import load_file, save_file

from e2e.tiny import write_model
from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer, open_adapter
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting import merge, quantize_folder
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.init import pair_of
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, parse_name, tensor_name

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[1]
TARGETS = ["q_proj", "down_proj"]
FLOATS = QuantConfig(scheme="none")
IDS = np.arange(4, 28).reshape(2, -1)
KINDS = ("pissa", "pissa_niter_8", "olora")


@pytest.fixture(scope="module")
def recorded():
    with np.load(TESTS / "fixtures/starts.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    case = np.load(TESTS / "references/llama.npz")
    (folder / "config.json").write_text(str(case["config"]))
    save_file(weights(json.loads(str(case["shapes"])), 0.0), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "m", num_hidden_layers=1)


def part(recorded, kind, what):
    begin = f"{kind}:{what}:"
    return {n.removeprefix(begin): a for n, a in recorded.items() if n.startswith(begin)}


def signs(ours, theirs):
    """Which of the r directions point the other way: singular vectors have no sign."""
    modules = {parse_name(name)[0] for name in theirs}
    return {
        m: np.sign(np.sum(ours[tensor_name(m, LORA_A)] * theirs[tensor_name(m, LORA_A)], axis=1))
        for m in modules
    }


def turned(tensors, flips):
    made = {}
    for name, array in tensors.items():
        module, leaf = parse_name(name)
        sign = np.resize(flips[module], array.shape[0 if leaf == LORA_A else 1])
        made[name] = array * (sign[:, None] if leaf == LORA_A else sign)
    return {name: array.astype(np.float32) for name, array in made.items()}


def off(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(np.linalg.norm(ours[n] - a) / np.linalg.norm(a) for n, a in theirs.items())


def products(bs, as_):
    """B·A of each layer, float64: the same however singular vectors of one value are turned."""
    modules = {parse_name(name)[0] for name in as_}
    return {
        m: bs[tensor_name(m, LORA_B)].astype(float) @ as_[tensor_name(m, LORA_A)] for m in modules
    }


def singular_gaps(folder, r=5):
    """Of each layer, the least distance of two of the singular values, by the largest."""
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if any(target in name for target in TARGETS):
            values = np.linalg.svd(weight.astype(float), compute_uv=False)
            found[name.removesuffix(".weight")] = -np.diff(values[: r + 1]).max() / values[0]
    return found


def exact_pair(weight, kind, r, scaling):
    """A and B by decompositions in float64."""
    wide = weight.astype(float)
    if kind == "olora":
        q = np.linalg.qr(wide[:, :r])[0]
        return q.T @ wide, q
    u, s, vt = np.linalg.svd(wide, full_matrices=False)
    root = np.sqrt(s[:r] / scaling)
    return root[:, None] * vt[:r], u[:, :r] * root


def apart(ours, theirs, axis):
    flips = np.sign((ours * theirs).sum(axis, keepdims=True))
    return np.linalg.norm(ours * flips - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_pairs_far_apart_are_pefts(recorded, kind):
    """Where singular values differ, both programs' pairs are equal to float32's precision."""
    ours = pair_of("layer", separated_weight(), kind, 5, 3.0, 0)
    for array, leaf, axis in zip(ours, "AB", (1, 0), strict=True):
        assert apart(array, recorded[f"{kind}:separated:{leaf}"], axis) <= 2e-6


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_pairs_are_exact_and_pefts_are_as_far_off_as_gaps_let_them(recorded, llama, kind):
    """Ours are float64's, rounded; PyTorch's of near singular values are turned in their plane."""
    theirs, gaps = part(recorded, kind, "pair"), singular_gaps(llama)
    assert min(gaps.values()) < 3e-3  # some are near
    turned_most = 0.0
    for name, weight in load_file(llama / "model.safetensors").items():
        if (module := name.removesuffix(".weight")) not in gaps:
            continue
        exact = exact_pair(weight, kind, 5, 3.0)
        peft = [theirs[tensor_name(module, leaf)] for leaf in (LORA_A, LORA_B)]
        for ours, other, true, axis in zip(
            pair_of(module, weight, kind, 5, 3.0, 0), peft, exact, (1, 0), strict=True
        ):
            assert apart(ours, true, axis) <= 1e-6
            allowed = 4 * 2.0**-24 / gaps[module] if kind == "pissa" else 1e-6
            assert apart(other, true, axis) <= allowed
            turned_most = max(turned_most, apart(other, true, axis))
        product, true_product = peft[1].astype(float) @ peft[0], exact[1] @ exact[0]
        assert np.linalg.norm(product - true_product) <= 1e-5 * np.linalg.norm(true_product)
    assert (turned_most > 2e-5) == (kind == "pissa")  # which no tolerance of 2e-5 lets pass


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_as_peft_has_it(recorded, llama, device, tmp_path, kind):
    """Pairs, logits, gradients of the first step, and the files of one that has moved."""
    lora = LoraConfig(r=5, lora_alpha=15, target_modules=TARGETS, init_lora_weights=kind)
    model = QLoRAModel.from_pretrained(llama, lora, FLOATS, "float32", device)
    ids, mask, labels = batch()
    seen = mask == 1

    def same_logits(name):
        theirs = recorded[f"{kind}:{name}"]
        return np.abs(model.logits(ids, mask)[..., :40] - theirs)[seen].max() / np.abs(theirs).max()

    began, theirs = model.adapter_state_dict(), part(recorded, kind, "pair")
    flips = signs(began, theirs)
    assert kind == "pissa" or all((flip == 1).all() for flip in flips.values())
    # PyTorch's singular vectors are float32's, which near singular values let turn (see below): by
    # how much, their gaps say. What does not turn with them is equal to some digits of float32.
    gaps = {} if kind == "olora" else singular_gaps(llama)
    turn = {module: 4 * 2.0**-24 / gaps[module] if gaps else 1e-6 for module in flips}
    most = max(turn.values())
    ours = turned(began, flips)
    for name, array in theirs.items():
        assert off({name: ours[name]}, {name: array}) <= turn[parse_name(name)[0]]
    assert off(products(began, began), products(theirs, theirs)) <= 1e-5
    assert same_logits("logits") <= 2e-5
    _, gradients = model.loss_and_grads(ids, labels, mask)
    slopes = part(recorded, kind, "grad")
    assert off(turned(gradients, flips), slopes) <= 3 * most  # each is a product with the other
    for pair in ((began, gradients), (gradients, began)):
        recorded_pair = (theirs, slopes) if pair[0] is began else (slopes, theirs)
        assert off(products(*pair), products(*recorded_pair)) <= 1e-5

    noise = turned(adapter({name: a.shape for name, a in began.items()}), flips)
    model.load_adapter({name: a + noise[name] for name, a in began.items()})
    assert same_logits("moved") <= 2 * most + 2e-5  # as it began a little otherwise
    model.save_adapter(tmp_path / "saved")
    saved, _ = load_adapter(tmp_path / "saved")
    # The halves are turned alike, so that their products are PEFT's.
    assert off(turned(saved, flips), part(recorded, kind, "saved")) <= most
    ours = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    written = json.loads(str(recorded[f"{kind}:config"]))
    keys = ("r", "lora_alpha", "init_lora_weights", "use_rslora", "rank_pattern", "alpha_pattern")
    assert {k: ours[k] for k in keys} == {k: written[k] for k in keys}


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_what_peft_saved(recorded, llama, device, tmp_path, kind):
    """Its plain LoRA, on the base as it was, has the logits of what it was converted from."""
    save_file(part(recorded, kind, "saved"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(str(recorded[f"{kind}:config"]))
    model = QLoRAModel.from_pretrained(llama, None, FLOATS, "float32", device, adapter=tmp_path)
    (ids, mask, _), theirs = batch(), recorded[f"{kind}:moved"]
    off = np.abs(model.logits(ids, mask)[..., :40] - theirs)[mask == 1].max()
    assert off <= 2e-5 * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scheme", "dtype"), [("nf4", "bfloat16"), ("none", "float32")])
def test_it_is_opened_as_it_was_trained(tiny, device, tmp_path, kind, scheme, dtype):
    quant = QuantConfig(scheme=scheme)
    lora = LoraConfig(
        r=4, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 3}, init_lora_weights=kind
    )
    plain = QLoRAModel.from_pretrained(tiny, None, quant, dtype, device)
    base = plain.logits(IDS)
    model = QLoRAModel.from_pretrained(tiny, lora, quant, dtype, device)
    assert f"({kind}), found in" in model.layout.began
    began = model.logits(IDS)
    if scheme == "none":  # it is the base in other words
        assert np.abs(began - base).max() <= 1e-5 * np.abs(base).max()
    model.load_adapter({n: np.float32(1.2) * a for n, a in model.adapter_state_dict().items()})
    logits = model.logits(IDS)
    with model.disable_adapter():
        assert np.array_equal(model.logits(IDS), began)
    model.save_adapter(tmp_path / "a")
    again = QLoRAModel.from_pretrained(tiny, None, quant, dtype, device, adapter=tmp_path / "a")
    assert np.array_equal(again.logits(IDS), logits) and not again.layout.began
    again.save_adapter(tmp_path / "b")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ConfigError, match="no other adapter can be added"):
        again.load_adapter(tmp_path / "b", "other")
    with pytest.raises(CheckpointError, match="opens this one as it was trained"):
        QLoRAModel.from_pretrained(
            tiny, lora.model_copy(update={"r": 5}), quant, dtype, device
        ).load_adapter(tmp_path / "a")
    # Beside others it is plain LoRA of twice the rank.
    if scheme == "nf4":
        with pytest.warns(UserWarning, match="nearly the same results"):
            plain.load_adapter(tmp_path / "a", "plain")
    else:
        plain.load_adapter(tmp_path / "a", "plain")
        plain.set_adapter("plain")
        assert np.abs(plain.logits(IDS) - logits).max() <= 1e-5 * np.abs(logits).max()


def settings(base, out, kind, **train):
    return Config(
        model={"path": str(base)}, data={"max_seq_length": 32},
        lora={"r": 4, "lora_alpha": 4, "init_lora_weights": kind},
        train={"gradient_accumulation_steps": 1, "max_steps": 4, **train},
        output={"dir": str(out), "save_steps": 2}, optim={"lr_scheduler_type": "constant"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(tiny, device, tmp_path):
    rows = [{"input_ids": list(range(4 + i, 20 + i))} for i in range(6)]
    lora = settings(tiny, tmp_path, "pissa_niter_2").lora

    def trained(out, *, resume=False, seed=0):
        config = settings(tiny, tmp_path / out, "pissa_niter_2")
        model = QLoRAModel.from_pretrained(tiny, lora, config.quant, device=device, seed=seed)
        Trainer(model, config, resume=resume).train(rows)
        return (tmp_path / out / "adapter/adapter_model.safetensors").read_bytes()

    whole = trained("whole")
    trained("cut")
    newest = tmp_path / "cut/checkpoints"
    for name in ("adapter", "result.json"):
        path = tmp_path / "cut" / name
        if path.is_dir():
            for each in sorted(path.rglob("*"), reverse=True):
                each.unlink() if each.is_file() else each.rmdir()
            path.rmdir()
    last = max(newest.iterdir())
    for each in last.iterdir():
        each.unlink()
    last.rmdir()
    assert trained("cut", resume=True) == whole
    with open_adapter(tmp_path / "whole") as opened:
        assert opened.adapter.config.init_lora_weights == "pissa_niter_2"
        tensors, _ = load_adapter(tmp_path / "whole/adapter")
        state = opened.adapter_state_dict()
        assert all(np.array_equal(a, tensors[n][: len(a)]) for n, a in state.items() if LORA_A in n)
        assert all(a.shape[1] == 4 for n, a in state.items() if LORA_B in n)
        opened.logits(IDS)


def test_merging(tiny, device, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=4, init_lora_weights="pissa")
    model = QLoRAModel.from_pretrained(tiny, lora, FLOATS, "float32", device)
    model.load_adapter({n: np.float32(1.2) * a for n, a in model.adapter_state_dict().items()})
    model.save_adapter(tmp_path / "a")
    merge(tiny, tmp_path / "a", tmp_path / "merged")
    merged = QLoRAModel.from_pretrained(tmp_path / "merged", None, FLOATS, "float32", device)
    logits = model.logits(IDS)
    # It has 16 bits.
    assert np.abs(merged.logits(IDS) - logits).max() <= 2e-2 * np.abs(logits).max()
    with pytest.raises(UnsupportedModelError, match="--base original"):
        merge(tiny, tmp_path / "a", tmp_path / "no", base="dequantized")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_dora": True}, "are mutually exclusive"),
        ({"r": 37}, "needs rank 37 of"),
    ],
)
def test_what_cannot_begin_so(tiny, device, changes, text):
    lora = LoraConfig(**{"init_lora_weights": "olora", **changes})
    with pytest.raises(ConfigError, match=text):
        QLoRAModel.from_pretrained(tiny, lora, device=device)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("loftq", "must be default, gaussian, pissa"),
        ("eva", "must be default"),
        ("pissa_niter_", "must be default"),
        (7, "must be default"),
    ],
)
def test_other_starts(value, text):
    with pytest.raises(ConfigError, match=text):
        LoraConfig(init_lora_weights=value)
    with pytest.raises(ConfigError, match="mutually exclusive: remove one of them"):
        LoraConfig(init_lora_weights="pissa", init_from="runs/first")
    assert LoraConfig(init_lora_weights=True).init_lora_weights == "default"


def test_a_base_in_few_bits(tiny, device, tmp_path):
    quantize_folder(tiny, tmp_path / "nf4")
    lora = LoraConfig(r=1, lora_alpha=1, init_lora_weights="pissa")
    with pytest.raises(UnsupportedModelError, match=r"requires floating-point weights"):
        QLoRAModel.from_pretrained(tmp_path / "nf4", lora, device=device)
