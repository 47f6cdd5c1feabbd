"""A head that comes in blocks of the vocabulary has the bits of one that is on the device."""

import dataclasses

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.offload import WeightStream
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import pad_rows, stored_bits
from qlora_wgpu.model.weight_placement import fill, streamed_matrix
from qlora_wgpu.ops.logits import head_groups, logits_of_rows
from qlora_wgpu.ops.loss import PLAIN, Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head, HostEmbedding
from qlora_wgpu.ops.trained import TrainableTokens, overwrite
from qlora_wgpu.selfcheck.cases.common import filled_adapter, whole_gradient

ROWS, CHUNK, VOCAB, BLOCK = 150, 64, 700, 256
MOST = 1 << 27


def traced(device, profile, dtype, streamed, columns, head_options, objective, tokens=(), rank=0):
    """A bench with the loss, its gradient and some logits, and what is to be read of it."""
    rng = np.random.default_rng(10)
    hidden, head = rng.standard_normal((ROWS, columns)), rng.standard_normal((VOCAB, columns))
    targets = np.where(rng.random(ROWS) < 0.8, rng.integers(0, VOCAB, ROWS), -100)
    targets[5], targets[6], targets[7] = 0, BLOCK, VOCAB - 1
    few_rows = {"logits_bytes": CHUNK * 4 * VOCAB, "head_block": BLOCK}
    bench = Bench(device, dtype, dataclasses.replace(profile, **few_rows))
    if streamed:
        held = bench.graph.weight_dtype
        trained = rows_of(bench, tokens, columns)
        host = HostEmbedding(VOCAB, columns, held, trained=trained)
        matrix = streamed_matrix("head", host, WeightStream(), MOST, BLOCK)
        fill(matrix, stored_bits(pad_rows(head.astype(np.float32)), held))
    else:
        trained = rows_of(bench, tokens, columns)
        matrix = DenseMatrix(VOCAB, columns, ((0, bench.weight(head)),), trained)
        if trained is not None:
            overwrite(bench.graph, trained, matrix.resident)
    if head_options.get("bias"):
        head_options = {**head_options, "bias": bench.given(rng.standard_normal((1, VOCAB)))}
    adapter = None
    if rank:
        config = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.2)
        adapter, _ = filled_adapter(config, [LinearSpec("lm_head", VOCAB, columns)])
        head_options = {**head_options, "lora": adapter.loras["lm_head"]}
    stats = bench.given(np.array([[2.0, 3.0, 0, 0, 4.0]]))
    th = bench.operand(hidden, grad=True)
    batch = bench.batch_of(1, ROWS, targets=targets, dropout_key=9)
    module = Head(matrix, **head_options)
    cross_entropy(bench.graph, th, module, batch, stats, gradient=True, objective=objective)
    logits = logits_of_rows(bench.graph, th, module, batch, 0, 16)
    of_rows = () if trained is None else (bench.graph.gradient_of(trained.rows),)
    of_pair = () if adapter is None else (whole_gradient(adapter),)
    return bench, (stats, bench.graph.gradient_of(th), logits, *of_rows, *of_pair)


def rows_of(bench, tokens, columns):
    """Trained rows of these tokens, if there are any."""
    if not tokens:
        return None
    rows = np.random.default_rng(11).standard_normal((len(tokens), columns))
    gradient = bench.given(np.zeros((len(tokens), columns)))
    return TrainableTokens("head", tokens, bench.given(rows), gradient, VOCAB)


def computed(device, profile, dtype, streamed, *options):
    """Sums, d hidden and logits, as bits."""
    bench, results = traced(device, profile, dtype, streamed, *options)
    return bench.run_bits(*results)


def check(device, profile, dtype, columns=20, objective=PLAIN, tokens=(), rank=0, **head_options):
    """Compares the two."""
    given = (columns, head_options, objective, tokens, rank)
    resident, streamed = (computed(device, profile, dtype, way, *given) for way in (False, True))
    for one, other in zip(resident, streamed, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_same_bits(device, profile, dtype):
    check(device, PROFILES[profile], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("profile", list(PROFILES))
def test_of_a_bias(device, profile):
    """Of each block its own part."""
    check(device, PROFILES[profile], "bfloat16", scale=0.4, bias=True)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_of_trained_rows(device, profile, dtype):
    """At both ends of blocks; the block in the middle has none."""
    check(device, PROFILES[profile], dtype, tokens=(VOCAB - 1, 0, BLOCK - 1, 2 * BLOCK), scale=0.4)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("objective", [PLAIN, Objective(confidence=True)])
def test_of_a_pair(device, profile, dtype, objective):
    """A, B and the hidden states, whose factors are known before their gradients or after."""
    check(device, PROFILES[profile], dtype, 20, objective, rank=5, scale=0.4, softcap=3.0)


@pytest.mark.slow
@pytest.mark.cover(group=[3])
@pytest.mark.parametrize("group", [1, 3])
def test_of_a_pair_with_blocks_in_groups(device, group):
    profile = dataclasses.replace(PROFILES["gpu"], head_group=group, least_workgroups=48)
    check(device, profile, "bfloat16", 1040, rank=12)


@pytest.mark.slow
@pytest.mark.parametrize("profile", list(PROFILES))
def test_of_bent_logits_and_labels(device, profile):
    objective = Objective(0.1, 0.02)
    check(device, PROFILES[profile], "bfloat16", 20, objective, scale=0.4, softcap=3.0)


@pytest.mark.parametrize("profile", list(PROFILES))
def test_of_rows_with_weights(device, profile):
    check(device, PROFILES[profile], "bfloat16", 20, Objective(confidence=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["register", "tiled"])
@pytest.mark.parametrize("least", [16, 48, 1024])
def test_where_a_reduction_is_cut_for_want_of_workgroups(device, kind, least):
    """Blocks, of fewer workgroups, are cut as the whole is."""
    profile = dataclasses.replace(PROFILES["gpu"], gemm_kind=kind, least_workgroups=least)
    check(device, profile, "float32", 1040)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3])
def test_of_blocks_in_groups(device, group):
    """However many blocks of a resident head are one product."""
    profile = dataclasses.replace(PROFILES["gpu"], head_group=group)
    check(device, profile, "bfloat16", 1040)


def test_the_loss_of_a_chunk_takes_few_launches(device):
    """As many for all blocks of a resident head as for one."""
    bench, _ = traced(device, PROFILES["gpu"], "bfloat16", False, 20, {}, PLAIN)
    labels = [launch.label for launch in bench.graph.launches]
    chunks = -(-ROWS // CHUNK)
    for label in ("cross_entropy/sums", "cross_entropy/gradient", "lm_head/backward"):
        assert labels.count(label) == chunks, label


@pytest.mark.parametrize(
    ("profile", "rows", "blocks"),
    [("cpu", 16, 8), ("cpu", 64, 2), ("cpu", 65, 1), ("cpu", 1000, 1), ("texture", 16, 1),
     ("gpu", 16, 8), ("gpu", 1000, 8)],
)  # fmt: skip
def test_few_rows_take_more_blocks_at_once(device, profile, rows, blocks):
    bench = Bench(device, "float32", PROFILES[profile])
    matrix = DenseMatrix(24_000, 8, ((0, bench.weight(np.zeros((24_000, 8)))),))
    groups = head_groups(bench.graph, matrix, rows)
    assert groups[0][1].rows == min(blocks * bench.graph.profile.head_block, 24_000)
    assert sum(group.rows for _, group in groups) == 24_000


def test_one_block_is_in_a_texture_at_a_time(device):
    bench, results = traced(device, PROFILES["texture"], "bfloat16", True, 1040, {}, PLAIN)
    plan = compile_plan(bench.graph, results[1:])
    slots = zip(plan.slots, plan.textures, strict=True)
    assert sum(size >= 2 * BLOCK * 1040 for size, texture in slots if texture) == 1
