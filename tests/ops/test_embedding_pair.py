"""LoRA on the embedding; its check compares with NumPy on every variant."""

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_close, tolerance

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.modules import DenseMatrix, HostEmbedding
from qlora_wgpu.reference import loss as reference

VOCAB, COLUMNS, R, SEQ = 83, 20, 3, 61
WEIGHT = np.random.default_rng(1).standard_normal((VOCAB, COLUMNS))


def adapter_of(r=R):
    config = LoraConfig(r=r, lora_alpha=2 * r, target_modules=["embed"])
    ends = Vocabulary("embed", "head", VOCAB, COLUMNS, tied=True)
    adapter = AdapterLayout(config, [], vocabulary=ends)
    rng = np.random.default_rng(2)
    parts = {n: rng.standard_normal(s).astype(np.float32) for n, s in adapter.shapes.items()}
    adapter.parameters.whole.storage.data = adapter.join(parts)
    threes = {name: np.full_like(array, 3.0) for name, array in parts.items()}
    adapter.gradient.whole.storage.data = adapter.join(threes)
    return adapter, [array.astype(np.float64) for array in parts.values()]


def computed(bench, adapter, ids, dy, dtype="float32", padding=None):
    """What is looked up, and the gradients of A and B, which were 3."""
    pieces = tuple((i, bench.operand(WEIGHT[i : i + 24])) for i in range(0, VOCAB, 24))
    batch, matrix = bench.batch_of(1, SEQ, ids=ids), DenseMatrix(VOCAB, COLUMNS, pieces)
    pair = adapter.embedding_lora
    y = embedding(bench.graph, matrix, batch, 0.5, lora=pair, padding=padding)
    bench.gradients(y, bench.given(dy, dtype))
    return bench.run(y, pair.grad_a, pair.grad_b)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_a_row_does_not_depend_on_others(device, profile):
    """A text's tokens alone, and among others: the same bits."""
    rng, adapter = np.random.default_rng(12), adapter_of(40)[0]
    one, dy = rng.integers(0, VOCAB, SEQ), np.zeros((SEQ, COLUMNS))
    other = np.where(np.arange(SEQ) == 17, one, rng.integers(0, VOCAB, SEQ))
    rows = [
        computed(Bench(device, "float32", PROFILES[profile]), adapter, ids, dy)[0][17]
        for ids in (one, other)
    ]
    assert np.array_equal(*rows)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pair_of_zeros_changes_no_bit(device, profile):
    ids, dy = np.arange(SEQ) % VOCAB, np.zeros((SEQ, COLUMNS))
    adapter, _ = adapter_of()
    flat = adapter.initial(0)  # A is zero
    adapter.parameters.whole.storage.data = flat
    assert np.abs(flat).max() > 1
    got, *_ = computed(Bench(device, "float32", PROFILES[profile]), adapter, ids, dy)
    assert np.array_equal(got, 0.5 * WEIGHT.astype(np.float32)[ids])


def test_a_matrix_in_host_memory(device):
    """What the host looks up has the same term."""
    ids = np.random.default_rng(13).integers(0, VOCAB, SEQ)
    adapter, (a, b) = adapter_of()
    bench = Bench(device, "float32", PROFILES[next(iter(PROFILES))])
    batch, host = bench.batch_of(1, SEQ, ids=ids), HostEmbedding(VOCAB, COLUMNS, "float32")
    table = batch.rows_of(host).table
    held = np.zeros((SEQ, table.stride), np.float32)
    held[:, :COLUMNS] = WEIGHT[ids]
    table.storage.data = held
    (got,) = bench.run(embedding(bench.graph, host, batch, 0.5, lora=adapter.embedding_lora))
    exact = reference.lookup_with_pair(WEIGHT, ids, a, b, 2.0, 0.5)
    assert_close(got, exact, tolerance("float32"), "sums of three terms in float32")
