"""What shaders may not count on: WGSL lets drivers take it that no number is NaN or infinite.

Metal and Direct3D compile with fast math; lavapipe does not, so that texts are looked at.
"""

import re

import numpy as np
import pytest

from qlora_wgpu.gpu.wgsl import shader_folder

_COMMENT = re.compile(r"//(?!#).*")
_OPERAND = r"((?:vec[234]<f32>\([^()]*\))|-?[\w.\[\]$]+)"
_SELECT = re.compile(rf"\bselect\({_OPERAND}, {_OPERAND}, {_OPERAND} (?:<|>|<=|>=) {_OPERAND}\)")
_WITH_ITSELF = re.compile(r"(?<![\w.\]%] )(?<![\w.])([a-z][\w.\[\]]*) (?:==|!=) \1(?![\w.(\[])")
_LARGE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?e\+?\d+")
_NOT_A_NUMBER = re.compile(r"\bis_?(?:nan|inf)|\b(?:inf|nan|infinity)\b", re.IGNORECASE)

# exp is made of a power of two: what it is given, times log2(e), must be a number.
LARGEST = float(np.finfo(np.float32).max / np.log2(np.e))
# Compared and never computed with; of what is left out, exp is left out, too.
COMPARED = {"adamw/clip.wgsl", "sampling/choose.wgsl"}


def lines():
    folder = shader_folder()
    for path in sorted(folder.rglob("*.wgsl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield path.relative_to(folder).as_posix(), number, _COMMENT.sub("", line)


def is_least_or_largest(line):
    """Whether a choice between two numbers by comparing them is among it."""
    return any({m[1], m[2]} == {m[3], m[4]} for m in _SELECT.finditer(line))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return select(x, 0.0, x > 0.0);", True),
        ("select(a, vec4<f32>(params.limit), a > vec4<f32>(params.limit))", True),
        ("select(vec4<f32>(1.0), e, x < vec4<f32>(0.0))", False),
        ("select(own_token, 4u * quad, x > best)", False),
    ],
)
def test_a_choice_that_is_min_or_max_is_told(line, found):
    assert is_least_or_largest(line) == found


def test_nan_is_kept_by_bits_and_not_by_comparing():
    # A driver with fast math makes min or max of it, which loses NaN.
    assert [(path, n) for path, n, line in lines() if is_least_or_largest(line)] == []


@pytest.mark.slow
def test_nothing_is_told_by_comparing_a_number_with_itself():
    found = [(p, n, m[0]) for p, n, line in lines() for m in _WITH_ITSELF.finditer(line)]
    assert found == [] and _WITH_ITSELF.search("if (v.x != v.x) {")
    assert [(p, n) for p, n, line in lines() if _NOT_A_NUMBER.search(line)] == []


def test_what_stands_for_infinity_stays_a_number_in_exp():
    found = [
        (path, number, literal)
        for path, number, line in lines()
        for literal in _LARGE.findall(line)
        if float(literal) > LARGEST and path not in COMPARED
    ]
    assert found == [] and 2.3e38 < LARGEST < 2.4e38


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32)


def test_bits_tell_what_comparing_would():
    # not_above_zero (common/attention.wgsl) and is_beyond (common/clamped_glu.wgsl).
    patterns = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    ends = [0, 1, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0xFF800000, 0xFF800001]
    x = np.concatenate([patterns, np.array(ends, np.uint32), bits_of([7, -7, 7.000001])])
    numbers = x.view(np.float32)
    assert np.array_equal(x - np.uint32(1) < 0x7F800000, numbers > 0)
    for limit in (np.float32(0.0), np.float32(7.0), np.float32(3e38)):
        last = bits_of(limit)
        beyond = x - (last + np.uint32(1)) < np.uint32(0x7F800000) - last
        assert np.array_equal(beyond, numbers > limit)
        turned = x ^ np.uint32(0x80000000)
        below = turned - (last + np.uint32(1)) < np.uint32(0x7F800000) - last
        assert np.array_equal(below, numbers < -limit)
