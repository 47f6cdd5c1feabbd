"""Models of every family, and unusual settings, trained in a browser as in Python."""

import base64

import numpy as np
import pytest
from browser.conftest import DEMO
from browser.python_steps import as_json, examples, in_python, likeliest, random_model
from references.sized import traced_configs

from qlora_wgpu.config import load_config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

STEPS = 3
LONGEST = 32
PROMPT, TOKENS = 7, 4  # of a text that it writes then
REFUSED = {"gemma4_text"}  # its embeddings of each layer wait in host memory
PLAIN = ("train.compute_dtype=float32", "lora.r=4", f"data.max_seq_length={LONGEST}")
SETTINGS = {
    "rslora": ["lora.use_rslora=true", "lora.rank_pattern={q_proj: 6, down_proj: 9}"],
    "loraplus": ["optim.loraplus_lr_ratio=4", "lora.alpha_pattern={q_proj: 3}"],
    "smoothed": ["train.label_smoothing_factor=0.1", "train.z_loss_weight=0.01"],
    "noise": ["train.neftune_noise_alpha=5", "train.gradient_checkpointing=true"],
    "dft": ["train.loss_type=dft"],
    "layers": ["lora.layers_to_transform=[1]", "lora.target_modules=[q_proj, up_proj]"],
    "unquantized": ["quant.scheme=none"],
    "double": ["quant.double_quant=true", "quant.blocksize=128"],
    "bfloat16": ["train.compute_dtype=bfloat16"],
    "head": ["lora.target_modules=[q_proj, lm_head]"],
    "dora": ["lora.use_dora=true", "lora.lora_dropout=0.1"],
    "bits": ["optim.name=adamw_8bit", "lora.r=64"],
    "gradients": ["train.gradient_dtype=bfloat16", "train.gradient_accumulation_steps=2"],
}  # fmt: skip


def settings(model, overrides=()):
    given = [f"model.path={model}", *PLAIN, "train.per_device_train_batch_size=2", *overrides]
    return load_config(DEMO / "demo.yaml", given)


def compare(browser, ask, tmp_path, runs):
    """Trains some runs in a browser, one after the other, and in Python."""
    rows = examples(256, 24, LONGEST)
    folder = tmp_path / "served"
    for name, run in runs.items():
        write_page(run, folder / "sites" / name, SiteOptions(kernels="cpu", buckets=(LONGEST,)))
    first = next(iter(runs))
    task = {
        "steps": STEPS,
        "prompt": PROMPT,
        "tokens": TOKENS,
        "sites": dict.fromkeys(runs, as_json(rows)),
    }
    page = folder / "sites" / first  # whose modules are all sites'
    for path in page.rglob("*.mjs"):
        target = folder / path.relative_to(page)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    found = ask(browser, "families.html", task, folder=folder, seconds=1200.0)[0]["found"]
    device = Device()
    wrong = {}
    for name, run in runs.items():
        if "told" in found[name]:
            wrong[name] = found[name]["told"]
            continue
        losses, parameters, model = in_python(run, rows, STEPS, device)
        tokens = likeliest(model, rows[0].input_ids[:PROMPT], TOKENS)
        got = np.frombuffer(base64.b64decode(found[name]["parameters"]), np.float32)
        if browser == "firefox":
            same = np.array_equal(got, parameters) and found[name]["losses"] == losses
        else:
            off = np.linalg.norm(got - parameters) / np.linalg.norm(parameters)
            same = off < TOLERANCES.get(name, 2e-6)
        if not same or found[name]["tokens"] != tokens:
            off = np.linalg.norm(got - parameters) / np.linalg.norm(parameters)
            wrong[name] = off, found[name]["losses"], losses, found[name]["tokens"], tokens
    assert wrong == {}


# bfloat16's roundings flip.
TOLERANCES = {"bfloat16": 1e-3}


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_families(browser, ask, tmp_path):
    runs = {}
    for name, config in traced_configs().items():
        run = settings(random_model(config, tmp_path / "models" / name))
        if name in REFUSED:
            with pytest.raises(ConfigError, match="not looked up in a browser"):
                write_page(run, tmp_path / "refused")
        else:
            runs[name] = run
    compare(browser, ask, tmp_path, runs)


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_settings(browser, ask, tmp_path):
    model = random_model(traced_configs()["llama"], tmp_path / "model")
    runs = {name: settings(model, more) for name, more in SETTINGS.items()}
    compare(browser, ask, tmp_path, runs)
