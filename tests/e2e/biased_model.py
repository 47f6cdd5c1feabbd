"""A tiny Llama with biases, its B not zero, and batches for it."""

import numpy as np

from e2e.tiny import VOCAB, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig

LORA = LoraConfig(r=5, lora_alpha=10)
EXACT = {"quant": QuantConfig(scheme="none"), "compute_dtype": "float32"}


def opened(folder, device, lora=LORA, **options):
    """A model whose B is not zero, so that every path shows."""
    model = QLoRAModel.from_pretrained(folder, lora, device=device, **{**EXACT, **options})
    rng = np.random.default_rng(3)
    state = model.adapter_state_dict()
    model.load_adapter(
        {n: (0.1 * rng.standard_normal(a.shape)).astype(np.float32) for n, a in state.items()}
    )
    return model


def sample(batch=3, seq=19, seed=1):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (batch, seq))
    labels = np.where(rng.random((batch, seq)) < 0.6, ids, -100)
    return ids, labels


def biased_folder(path):
    return write_model(path / "biased", attention_bias=True, mlp_bias=True)


def close(a, b, tolerance=2e-5):
    assert set(a) == set(b)
    for name in a:
        error = np.linalg.norm(a[name] - b[name])
        assert error <= tolerance * (np.linalg.norm(b[name]) + 1e-6), name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
