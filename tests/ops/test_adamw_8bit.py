"""AdamW with 8-bit moments: the reference against bitsandbytes, the kernel against it."""

from itertools import pairwise

import numpy as np
import pytest
from references import record_adamw_8bit as recorded
from support.harness import PROFILES, Bench, assert_checked, assert_close

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora.moments import MOMENT_VALUES
from qlora_wgpu.ops.moments import BlockTable, Span
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw
from qlora_wgpu.quant.quantized_weight import dynamic_quant_map
from qlora_wgpu.reference import optimizers as reference
from qlora_wgpu.selfcheck.cases.optimizers import check_update_from_halves

CONSTANTS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}
STRIDES = {"odd": 136, "even": 264, "small": 88}
TABLE_POINTS = 65_535


@pytest.fixture(scope="module")
def file():
    with np.load(recorded.FILE) as arrays:
        return dict(arrays)


def one_of_table(x, signed):
    """The code of the point, of 65,536, that bitsandbytes' CPU code rounds a number to."""
    points = np.floor((x + 1) / 2 * TABLE_POINTS + 0.5)
    return np.searchsorted(reference.middles(signed=signed), 2 * points / TABLE_POINTS - 1)


@pytest.mark.parametrize("name", ["odd", "even"])
def test_reference_is_bitsandbytes(file, name):
    """Each step from what bitsandbytes had after the one before; codes by its table."""
    start, gradients = recorded.eight_bit_case(name)
    n = start.size
    p, m, v = start.reshape(-1), reference.Quantized.zeros(n), reference.Quantized.zeros(n)
    for t, gradient in enumerate(gradients, start=1):
        state = reference.AdamW8Bit(p.astype(np.float64), m, v)
        g = gradient.reshape(-1).astype(np.float64)
        exact = reference.adamw_8bit(state, g, 1, t, lr=recorded.LR, max_norm=0, **CONSTANTS)
        p = file[f"{name}.p.{t}"]
        assert_close(p, exact.p, 1e-6, "float32 arithmetic")
        for number, (own, x) in enumerate(((state.m, exact.m), (state.v, exact.v)), start=1):
            codes, absmax = file[f"{name}.state{number}.{t}"], file[f"{name}.absmax{number}.{t}"]
            assert (np.abs(absmax - own.absmax) <= 2e-7 * own.absmax).all()
            normalized = reference.normalized(x, own.absmax)
            expected = one_of_table(normalized, signed=number == 1)
            expected[np.repeat(own.absmax, 256)[:n] == 0] = 0
            # In float32, x + 1 is off by up to 6e-8: 0.004 of the way to the next point.
            way = (normalized + 1) / 2 * TABLE_POINTS
            near = np.abs(way - np.floor(way) - 0.5) < 0.01
            assert ((codes == expected) | near).all() and (codes != expected).sum() <= 5
        m, v = (
            reference.Quantized(file[f"{name}.state{k}.{t}"], file[f"{name}.absmax{k}.{t}"])
            for k in (1, 2)
        )


def test_small_tensors_stay_in_float32(file):
    start, gradients = recorded.eight_bit_case("small")
    zeros = np.zeros(start.size)
    state = reference.AdamW(start.reshape(-1).astype(np.float64), zeros, zeros)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.reshape(-1).astype(np.float64)
        reference.adamw(state, g, 1, t, lr=recorded.LR, max_norm=0, **CONSTANTS)
        for key, value in (("p", state.p), ("state1", state.m), ("state2", state.v)):
            assert_close(file[f"small.{key}.{t}"], value, 1e-6, "float32 arithmetic")
    assert "small.absmax1.1" not in file


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_search_on_cuda(file, signed):
    x = recorded.searched(signed, dynamic_quant_map(signed=signed)).astype(np.float64)
    got = np.searchsorted(reference.middles(signed=signed), x)
    np.testing.assert_array_equal(got, file[f"cuda.{int(signed)}"])


class Adapter:
    """Three tensors in flat vectors, with room between them, and a state for each."""

    def __init__(self):
        offset, self.spans = 64, {}
        for name, shape in recorded.SHAPES.items():
            self.spans[name] = Span(offset, *shape, STRIDES[name])
            offset += shape[0] * STRIDES[name] + 64
        self.length = offset
        self.blocks = BlockTable(self.spans.values(), MOMENT_VALUES)
        self.words = [np.zeros(self.blocks.words, np.uint32) for _ in range(2)]
        self.p = self.flat({name: recorded.eight_bit_case(name)[0] for name in self.spans})

    def flat(self, tensors):
        flat = np.zeros(self.length, np.float32)
        for name in self.spans:
            self.view(flat, name)[:] = tensors[name]
        return flat

    def view(self, flat, name):
        span = self.spans[name]
        rows = flat[span.offset : span.offset + span.rows * span.stride].reshape(span.rows, -1)
        return rows[:, : span.columns]

    def parts(self, name, number):
        index = list(self.spans).index(name)
        return self.blocks.tensors[index].split(self.words[number - 1], number)

    def quantized(self, name, number):
        parts = self.parts(name, number)
        return reference.Quantized(
            parts[f"state{number}"], parts[f"absmax{number}"].astype(np.float64)
        )

    def step(self, device, profile, gradient, t, tokens, config):
        """One step on the device; the gradient and the statistics after it."""
        bench = Bench(device, "float32", PROFILES[profile])
        info = [recorded.LR, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 3 * recorded.LR]
        p, g, stats, step_info = map(_float32, (self.p, gradient, [9, tokens, 7, 7], info))
        m, v = map(bench.given, self.words, ("uint32", "uint32"))
        state = OptimizerState(p, g, (m, v), step_info, stats, split=self.spans["even"].offset)
        adamw(bench.graph, state, config, self.blocks)
        bits = [row[0] for row in bench.run_bits(p, g, m, v, stats)]
        self.p, self.words = bits[0].view(np.float32), [bits[2], bits[3]]
        return bits[1].view(np.float32), bits[4].view(np.float32)


def _float32(values):
    data = np.asarray(values, np.float32)
    return vector("flat", data.size, "float32", Storage("flat", "test", data.nbytes, data))


@pytest.mark.parametrize("profile", PROFILES)
def test_steps(device, profile):
    adapter, tokens, norm = Adapter(), 17, 1e3
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=norm)
    small = [np.zeros(5 * 83)] * 2
    for t in (1, 2, 3):
        tensors = {name: recorded.eight_bit_case(name)[1][t - 1] for name in adapter.spans}
        gradient = adapter.flat(tensors)
        mean = np.linalg.norm(gradient.astype(np.float64)) / tokens
        clipped = gradient.astype(np.float64) * min(1, norm / (mean + 1e-6)) / tokens
        assert mean > norm
        given = {name: (adapter.quantized(name, 1), adapter.quantized(name, 2))
                 for name in ("odd", "even")}  # fmt: skip
        before = adapter.p
        zeroed, _ = adapter.step(device, profile, gradient, t, tokens, config)
        assert not zeroed.any()
        for name in ("odd", "even"):
            start = adapter.view(before, name).astype(np.float64).reshape(-1)
            state = reference.AdamW8Bit(start, *given[name])
            rate = recorded.LR * (1 if name == "odd" else 3)
            g = adapter.view(clipped, name).reshape(-1)
            exact = reference.adamw_8bit(state, g, 1, t, lr=rate, max_norm=0, **CONSTANTS)
            assert_close(adapter.view(adapter.p, name).reshape(-1), exact.p, 2e-6, "float32")
            for number, (own, x) in enumerate(((state.m, exact.m), (state.v, exact.v)), start=1):
                _same_codes(adapter.quantized(name, number), own, x, signed=number == 1)
        start = adapter.view(before, "small").astype(np.float64).reshape(-1)
        expected = reference.AdamW(start, *small)
        g = adapter.view(clipped, "small").reshape(-1)
        reference.adamw(expected, g, 1, t, lr=3 * recorded.LR, max_norm=0, **CONSTANTS)
        small = [adapter.parts("small", k)[f"state{k}"].astype(np.float64) for k in (1, 2)]
        assert_close(small[0], expected.m, 2e-6, "float32")
        assert_close(small[1], expected.v, 2e-6, "float32")
        assert_close(adapter.view(adapter.p, "small").reshape(-1), expected.p, 2e-6, "float32")
    gaps = adapter.p.copy()
    for name in adapter.spans:
        adapter.view(gaps, name)[:] = 0
    assert not gaps.any(), "padding stays zero"


def _same_codes(got, expected, x, *, signed):
    """Magnitudes to float32's precision; codes all but where that decides between neighbours."""
    assert (np.abs(got.absmax - expected.absmax) <= 1e-6 * expected.absmax).all()
    differ = got.codes != expected.codes
    middles = reference.middles(signed=signed)
    at = reference.normalized(x, expected.absmax)[differ]
    away = np.abs(at[:, None] - middles).min(axis=1)
    assert (away <= 1e-6 * np.abs(at)).all() and differ.sum() <= 3


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("wrong", ["no tokens", "not finite"])
def test_nothing_changes_but_the_gradient(device, profile, wrong):
    adapter = Adapter()
    tensors = {name: recorded.eight_bit_case(name)[1][0] for name in adapter.spans}
    adapter.step(device, profile, adapter.flat(tensors), 1, 5, OptimizerConfig())
    p, words = adapter.p.copy(), [each.copy() for each in adapter.words]
    if wrong == "not finite":
        tensors["odd"][3, 3] = np.nan
    tokens = 0 if wrong == "no tokens" else 5
    zeroed, stats = adapter.step(
        device, profile, adapter.flat(tensors), 2, tokens, OptimizerConfig()
    )
    assert np.array_equal(adapter.p, p) and not zeroed.any() and stats[3] == 0
    assert all(map(np.array_equal, adapter.words, words)) and words[0].any()


def test_a_checkpoint_holds_every_bit():
    adapter, rng = Adapter(), np.random.default_rng(3)
    for tensor in adapter.blocks.tensors:
        for number in (1, 2):
            n = tensor.span.elements
            parts = {f"state{number}": rng.integers(0, 256, n, np.uint8)}
            if tensor.in_codes:
                parts[f"absmax{number}"] = rng.random(tensor.blocks).astype(np.float32)
            else:
                parts = {f"state{number}": rng.random(n).astype(np.float32)}
            tensor.join(adapter.words[number - 1], number, parts)
            for name, array in tensor.split(adapter.words[number - 1], number).items():
                np.testing.assert_array_equal(array, parts[name])
            with pytest.raises(
                CheckpointError, match=f"state{number} is missing or does not have {n}"
            ):
                tensor.join(adapter.words[0], number, {f"state{number}": np.zeros(n + 1)})


@pytest.mark.parametrize("most", [256, 700, 1300, 10**6])
def test_parts_end_between_blocks(most):
    blocks = Adapter().blocks
    (whole,) = blocks.shards
    cuts = blocks.cuts(whole, most)
    assert cuts[0] == (0, 0) and cuts[-1] == (blocks.blocks, blocks.words)
    for (block, word), (next_block, next_word) in pairwise(cuts):
        assert block < next_block and word < next_word <= word + most
        tensor = [t for t in blocks.tensors if t.first_block <= block][-1]
        assert word == tensor.first_word + (block - tensor.first_block) * tensor.block_words


def test_blocks_of_pieces():
    spans = list(Adapter().spans.values())
    whole = BlockTable(spans, MOMENT_VALUES)
    cut = BlockTable(spans, MOMENT_VALUES, [spans[1].offset, spans[2].offset])
    assert cut.words == whole.words and cut.blocks == whole.blocks
    assert [piece.columns for piece in cut.new_moment("m").shards] == [
        tensor.blocks * tensor.block_words for tensor in whole.tensors
    ]
    cuts = [cut.cuts(shard, 700) for shard in cut.shards]
    assert [each[0][0] for each in cuts] == [tensor.first_block for tensor in whole.tensors]
    assert [each[-1] for each in cuts[:2]] == [each[0] for each in cuts[1:]]
    assert cuts[-1][-1] == (whole.blocks, whole.words)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_gradient_in_halves_makes_the_same_update(device, profile):
    assert_checked(device, profile, "bfloat16", check_update_from_halves, True)
