"""Keys of an architecture: read, required, and computed for writing."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.gguf.architecture import (
    Keys,
    Pair,
    _mrope_sections,
    _period,
    check_scales,
    require_default_scale,
    window_keys,
    window_pattern,
)


def keys_of(**values):
    named = {f"own.{key}": value for key, value in values.items()}
    return Keys({"general.architecture": "own", "other.a": 1, **named}, "F")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "own", "general.type": "adapter"}, "F is an adapter for llama"),
        ({}, "F is not a model: general.architecture is missing"),
        ({"general.architecture": 3}, "F is not a model"),
    ],
)
def test_files_without_a_model(metadata, message):
    with pytest.raises(CheckpointError, match=message):
        Keys(metadata, "F")


def ints(*values):
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (ints(4, 4), 4), (ints(4, 5), "own.a differs between layers"),
     (ints(), "own.a must be an integer"), (np.ones(2), "must be an integer"),
     (3.0, "own.a must be an integer, got 3.0"), (True, "must be an integer")],
)  # fmt: skip
def test_integers(value, expected):
    keys = keys_of(a=value)
    if isinstance(expected, int):
        made = keys.integer("a")
        assert made == expected and type(made) is int
        keys.refuse_unread()
    else:
        with pytest.raises((CheckpointError, UnsupportedModelError), match=f"^F: .*{expected}"):
            keys.integer("a")
    assert keys.integer("b", None) is None and keys.number("b", 7) == 7
    with pytest.raises(CheckpointError, match=r"the key own\.b is missing"):
        keys.integer("b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, [3, 3]), (0.1, [0.1, 0.1]), (ints(1, 2), [1, 2]),
     (np.array([0.1, 2], np.float32), [0.1, 2.0]), (ints(1, 2, 3), None),
     (np.array([True, False]), None), ("x", None), (True, None)],
)  # fmt: skip
def test_numbers_of_each_layer(value, expected):
    if expected is not None:
        made = keys_of(a=value).each("a", 2)
        assert made == expected and [type(v) for v in made] == [type(v) for v in expected]
        return
    with pytest.raises(CheckpointError, match=r"own\.a must be a number for each of the 2 layers"):
        keys_of(a=value).each("a", 2)


def test_layers_that_no_model_has_take_no_memory():
    assert len(keys_of(a=1).each("a", 1 << 40)) == 1 << 16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, 10**400, "1", True])
def test_numbers_are_finite_in_float32(value):
    with pytest.raises(CheckpointError, match=r"own\.a must be a number, got"):
        keys_of(a=value).number("a")
    assert keys_of(a=float(np.float32(1e-5))).number("a") == 1e-5


def test_flags():
    assert keys_of(a=True).flag("a", False) and not keys_of().flag("a", False)
    with pytest.raises(CheckpointError, match=r"own\.a must be true or false, got 1"):
        keys_of(a=1).flag("a", False)


@pytest.mark.parametrize(
    ("value", "works"),
    [(None, True), (0, True), (2, True), (3, False), (ints(2), False), ([2], False)],
)
def test_only_values_that_are_computed_are_allowed(value, works):
    keys = keys_of(**({} if value is None else {"a": value}))
    if works:
        keys.require("a", 0, 2)
        return
    with pytest.raises(UnsupportedModelError, match=r"own\.a = .* is not supported"):
        keys.require("a", 0, 2)


def test_keys_that_nothing_reads_are_refused():
    keys = keys_of(a=1, b=2)
    keys.ignore("a")
    with pytest.raises(UnsupportedModelError, match=r"unknown key own\.b = 2, which may change"):
        keys.refuse_unread()
    keys.raw("b")
    keys.refuse_unread()


def test_a_pair_of_keys():
    keys = keys_of(count=0, width=np.float32(0.1).item())
    assert Pair("count", "n", none=True).read(keys, {}) is None
    assert Pair("count", "n").read(keys, {}) == 0
    assert Pair("lacking", "n", lambda config: config["m"]).read(keys, {"m": 5}) == 5
    written = SimpleNamespace(values={})
    Pair("a", value=lambda keys: None).write(written)
    Pair("b", value=lambda keys: 0).write(written)
    Pair("no such key").write(written)
    assert written.values == {"b": 0}


@pytest.mark.parametrize(
    ("pairs", "given", "expected"),
    [
        (6, None, [2, 2, 2, 0]),
        (7, None, [3, 2, 2, 0]),
        (8, None, [3, 3, 2, 0]),
        (8, [2, 3, 3], [2, 3, 3, 0]),
        (8, [4, 2, 2], [3, 3, 2, 0]),
        (8, "all", [3, 3, 2, 0]),
    ],
)
def test_sections_of_a_rotation_cover_all_pairs(pairs, given, expected):
    parameters = {} if given is None else {"rope_parameters": {"mrope_section": given}}
    keys = SimpleNamespace(values={"rope.dimension_count": 2 * pairs}, config=parameters)
    assert _mrope_sections(keys).tolist() == expected


# ---- factors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "works"), [(0.0, True), (0.25, True), (0.2500001, True),
                                              (0.2501, False)])  # fmt: skip
def test_scores_have_the_default_scale(scale, works):
    keys = keys_of(**{"attention.scale": scale})
    if works:
        require_default_scale(keys, {"head_dim": 16})
        require_default_scale(keys_of(), {"head_dim": 16})
        return
    with pytest.raises(UnsupportedModelError, match=r"own\.attention\.scale = 0\.2501 is not"):
        require_default_scale(keys, {"head_dim": 16})


def scaled(**changes):
    """A decoder's keys with default factors, but for some."""
    own = {"embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None,
           "residual_scale": 1.0, "scale": None, "softcap": None} | changes  # fmt: skip
    attention = SimpleNamespace(scale=own["scale"], softcap=own["softcap"])
    decoder = SimpleNamespace(
        dimensions=SimpleNamespace(head_dim=16),
        layers=[SimpleNamespace(residual_scale=own["residual_scale"])],
        **{key: own[key] for key in ("embedding_scale", "logit_scale", "logit_softcap")},
    )
    return SimpleNamespace(
        decoder=decoder, attentions=[attention], unsupported=UnsupportedModelError
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_scale": 2.0}, "a embedding scale of 2"),
        ({"residual_scale": 0.5}, "a residual scale of 0.5"),
        ({"logit_scale": 1.0001}, "a logit scale of 1.0001"),
        ({"logit_softcap": 30.0}, "a final softcap of 30"),
        ({"scale": 0.3}, "a score scale of 0.3"),
        ({"softcap": 50.0}, "a score softcap of 50"),
    ],
)
def test_factors_that_an_architecture_has_not(changes, message):
    check_scales(scaled(scale=0.25))
    check_scales(scaled())
    with pytest.raises(UnsupportedModelError, match=message):
        check_scales(scaled(**changes))
    (value,) = changes.values()
    check_scales(scaled(**changes), **{message.split(" of ")[0][2:].replace(" ", "_"): value})


# ---- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slides", "period"),
    [("sss", 0), ("sff", None), ("fff", 1), ("sfs", 2), ("sfsf", 2), ("ssfssf", 3), ("ssfsf", None),
     ("fss", None), ("sf", 2)],
)  # fmt: skip
def test_periods_of_windows(slides, period):
    assert _period([letter == "s" for letter in slides]) == period


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [SLIDING, SLIDING, SLIDING, FULL]),
        (2, [SLIDING, FULL] * 2),
        (0, [SLIDING] * 4),
        (1, [FULL] * 4),
        (np.array([True, False, False, True]), [SLIDING, FULL, FULL, SLIDING]),
        (np.array([True, False]), "has 2 values for 4 layers"),
        (-1, "must be 0 or more, got -1"),
    ],
)
def test_layers_that_slide(pattern, expected):
    values = {} if pattern is None else {"attention.sliding_window_pattern": pattern}
    if isinstance(expected, list):
        made = window_pattern(keys_of(**values), {"num_hidden_layers": 4}, 4)
        assert made == {"layer_types": expected}
        return
    with pytest.raises(CheckpointError, match=expected):
        window_pattern(keys_of(**values), {"num_hidden_layers": 4}, 4)


W, P = "attention.sliding_window", "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("kind", "name", "windows", "expected"),
    [
        ("none", "own", [None] * 4, {}),
        ("none", "own", [64] * 4, {}),
        ("none", "llama", [64] * 4, {W: 64}),
        ("none", "phi3", [64] * 4, {W: 64}),
        ("none", "own", [64, 32], "windows of 2 widths"),
        ("listed", "own", [64, None, None], {W: 64, P: [True, False, False]}),
        ("periodic", "own", [64, 64, None], {W: 64, P: 3}),
        ("periodic", "own", [64, 64], {W: 64, P: 0}),
        ("periodic", "own", [None, 64, 64], "this order of layers"),
        ("every other", "own", [64, None, 64, None], {W: 64}),
        ("every other", "own", [64, 64, None], "this order of layers"),
        ("every other", "own", [None, None], "this order of layers"),
        ("of 64 layers", "own", [64, None] * 32, {W: 64, P: 2}),
        ("of 64 layers", "own", [64, None] * 31, {}),
    ],
)
def test_windows_are_written_as_an_architecture_has_them(kind, name, windows, expected):
    keys = SimpleNamespace(
        attentions=[SimpleNamespace(window=window) for window in windows],
        architecture=SimpleNamespace(windows=kind, name=name), model_type="own",
        values={}, notes=[], unsupported=UnsupportedModelError,
    )  # fmt: skip
    if isinstance(expected, str):
        with pytest.raises(UnsupportedModelError, match=expected):
            window_keys(keys)
        return
    window_keys(keys)
    values = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in keys.values.items()}
    assert values == expected
    told = kind in ("none", "of 64 layers") and P not in values and any(windows)
    assert len(keys.notes) == told
    assert all("of more than 64 tokens" in note for note in keys.notes)
