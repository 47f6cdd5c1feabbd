"""PEFT adapters on disk: written as PEFT reads them, read as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from qlora_wgpu.checkpoint import write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.lora import AdapterConfig, load_adapter, peft_files, save_adapter
from qlora_wgpu.lora.peft_names import TOKENS, WHOLE, tensor_name

PREFIX = "base_model.model.model.layers."
A = f"{PREFIX}0.self_attn.q_proj.lora_A.weight"
B = f"{PREFIX}0.self_attn.q_proj.lora_B.weight"
R = 4


def tensors(*layers: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    result = {}
    for layer in layers or ("0.self_attn.q_proj", "1.mlp.down_proj"):
        result[f"{PREFIX}{layer}.lora_A.weight"] = rng.standard_normal((R, 6)).astype(np.float32)
        result[f"{PREFIX}{layer}.lora_B.weight"] = rng.standard_normal((5, R)).astype(np.float32)
    return result


def save(folder: Path, arrays: dict[str, np.ndarray] | None = None, **changes: Any) -> None:
    options: dict[str, Any] = {
        "r": R,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "down_proj"],
        "use_rslora": False,
        "base_model_name_or_path": "some/base",
    }
    config = AdapterConfig(**(options | changes))
    save_adapter(folder, tensors() if arrays is None else arrays, config)


def change_config(folder: Path, **changes: Any) -> None:
    """Fields given as ... are taken out."""
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def refused(folder: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load_adapter(folder)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    save(path)
    return path


def test_a_round_trip(folder: Path) -> None:
    loaded, config = load_adapter(folder)
    assert config == AdapterConfig(
        r=R,
        lora_alpha=8,
        lora_dropout=0.05,
        target_modules=["down_proj", "q_proj"],
        use_rslora=False,
        base_model_name_or_path="some/base",
    )
    expected = tensors()
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded[name].dtype == np.float32
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    load_adapter(str(folder))


def test_what_is_written_is_what_peft_needs(folder: Path) -> None:
    """Recorded from PEFT 0.21.2, whose own defaults fill in the fields it has added since."""
    assert json.loads((folder / "adapter_config.json").read_text()) == {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "some/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": R,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["down_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    weights = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    assert weights.keys() == tensors().keys()
    with safetensors.safe_open(folder / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_revision_of_the_base_is_written_as_peft_has_it(tmp_path: Path) -> None:
    """Apart from the name; a folder that is called so is a folder."""
    for base, name, revision in (
        ("some/base@v1", "some/base", "v1"),
        ("/models/base@v1", "/models/base@v1", None),
        ("some/base", "some/base", None),
    ):
        save(folder := tmp_path / base.replace("/", "-"), base_model_name_or_path=base)
        written = json.loads((folder / "adapter_config.json").read_text())
        assert (written["base_model_name_or_path"], written["revision"]) == (name, revision)
        assert load_adapter(folder)[1].base_model_name_or_path == base
    written |= {"revision": "main"}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    assert load_adapter(folder)[1].base_model_name_or_path == "some/base"


def test_two_writes_have_the_same_bytes(tmp_path: Path) -> None:
    save(tmp_path / "one")
    save(
        tmp_path / "two", dict(reversed(tensors().items())), target_modules=["down_proj", "q_proj"]
    )
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_rslora_and_a_nameless_base(tmp_path: Path) -> None:
    save(tmp_path / "a", use_rslora=True, base_model_name_or_path=None)
    _, config = load_adapter(tmp_path / "a")
    assert config.use_rslora
    assert config.base_model_name_or_path is None


def test_an_existing_folder_keeps_its_other_files(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    changed = {name: array * 2 for name, array in tensors().items()}
    save(folder, changed, lora_alpha=32)
    loaded, config = load_adapter(folder)
    assert loaded[A].tobytes() == changed[A].tobytes()
    assert config.lora_alpha == 32
    assert (folder / "README.md").read_text() == "mine"
    assert len(list(folder.iterdir())) == 3


def test_folders_are_made(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "first" / "adapter")
    load_adapter(tmp_path / "runs" / "first" / "adapter")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.clear(), "at least one pair"),
        (lambda t: t.pop(A), f"contains '{B}', but not '{A}'"),
        (lambda t: t.pop(B), f"contains '{A}', but not '{B}'"),
        (lambda t: t.update({A: t[A].T}), "has shape (6, 4), expected (4, in_features)"),
        (lambda t: t.update({B: t[B].T}), "has shape (4, 5), expected (out_features, 4)"),
        (lambda t: t.update({A: t[A][0]}), "has shape (6,)"),
        (lambda t: t.update({A: t[A][:, :0]}), "has shape (4, 0)"),
        (lambda t: t.update({B: t[B] * np.float32(np.nan)}), "contains NaN or infinity"),
        (lambda t: t.update({B: t[B] * np.float32(np.inf)}), "contains NaN or infinity"),
        (lambda t: t.update({"lm_head.weight": t[A]}), "'lm_head.weight' is not a LoRA matrix"),
        (lambda t: t.update({A.replace("lora_A", "lora_C"): t[A]}), "is not a LoRA matrix"),
        (lambda t: t.update({A.replace(".weight", ".bias"): t[A]}), "is not a LoRA matrix"),
        (lambda t: t.update({A.removeprefix("base_model."): t[A]}), "is not a LoRA matrix"),
        (lambda t: t.update({A.replace(".weight", ".default.weight"): t[A]}), "more than once"),
    ],
)
def test_tensors_that_are_no_adapter(tmp_path: Path, change: Any, expected: str) -> None:
    """Refused on the way out, before anything is written, and on the way in."""
    arrays = tensors()
    change(arrays)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "out", arrays)
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()

    save(tmp_path / "in")
    write_safetensors(tmp_path / "in" / "adapter_model.safetensors", arrays)
    if arrays:
        with pytest.raises(CheckpointError) as caught:
            load_adapter(tmp_path / "in")
        assert expected in str(caught.value)
    else:
        assert "contains no tensors" in refused(tmp_path / "in")


def test_the_adapters_own_name_inside_names_is_left_out(folder: Path) -> None:
    named = {name.replace(".weight", ".default.weight"): a for name, a in tensors().items()}
    write_safetensors(folder / "adapter_model.safetensors", named)
    loaded, _ = load_adapter(folder)
    assert loaded.keys() == tensors().keys()


def test_text_parts_have_the_names_that_transformers_gives_them_now(tmp_path: Path) -> None:
    """As PEFT maps what was written with transformers before 4.52."""
    head = {"base_model.model.lm_head.weight": np.ones((3, 2), np.float32)}
    save(tmp_path, tensors() | head, modules_to_save=["lm_head"])
    before = {
        name.replace("base_model.model.", "base_model.model.language_model."): array
        for name, array in (tensors() | head).items()
    }
    write_safetensors(tmp_path / "adapter_model.safetensors", before)
    loaded, _ = load_adapter(tmp_path)
    assert loaded.keys() == {
        *(n.replace("model.layers", "model.language_model.layers") for n in tensors()),
        "base_model.model.lm_head.weight",
    }


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(folder: Path, dtype: type[np.floating[Any]]) -> None:
    arrays = {name: array.astype(dtype) for name, array in tensors().items()}
    write_safetensors(folder / "adapter_model.safetensors", arrays)
    loaded, _ = load_adapter(folder)
    for name, array in arrays.items():
        assert loaded[name].tobytes() == array.astype(np.float32).tobytes()


def test_magnitudes_of_dora(tmp_path: Path) -> None:
    arrays = tensors()
    stems = {n.removesuffix(".lora_A.weight") for n in arrays if n.endswith(".lora_A.weight")}
    outputs = {s: arrays[f"{s}.lora_B.weight"].shape[0] for s in stems}
    added = {f"{s}.lora_magnitude_vector": np.ones(n, np.float32) for s, n in outputs.items()}
    save(tmp_path / "dora", {**arrays, **added}, use_dora=True)
    loaded, config = load_adapter(tmp_path / "dora")
    assert config.use_dora and set(loaded) == {*arrays, *added}
    halves = {n: a for n, a in arrays.items() if n.endswith(".lora_A.weight")}
    for changes, given, message in (
        ({"use_dora": True}, arrays, "use_dora is true, but it lacks"),
        ({"use_dora": False}, {**arrays, **added}, "use_dora is false, but it holds"),
        ({"use_dora": True}, {**arrays, **{n: a[:1] for n, a in added.items()}}, "has shape (1,)"),
        ({"use_dora": True}, {**halves, **added}, "lora_A.weight', but not"),
    ):
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "wrong", given, **changes)
        assert message in str(caught.value)


def test_magnitudes_of_an_embedding(tmp_path: Path) -> None:
    at = "base_model.model.model.embed_tokens.lora_"
    pair = {f"{at}embedding_A": np.ones((R, 7)), f"{at}embedding_B": np.ones((6, R))}
    pair[f"{at}magnitude_vector"] = np.ones(6)
    arrays = {name: array.astype(np.float32) for name, array in pair.items()}
    with pytest.raises(UnsupportedModelError, match=r"for model.embed_tokens, an embedding"):
        save(tmp_path / "dora", arrays, use_dora=True, target_modules=["embed_tokens"])


def test_a_rank_that_is_not_that_of_the_tensors(folder: Path) -> None:
    change_config(folder, r=8)
    assert "has shape (4, 6), expected (8, in_features)" in refused(folder)


def test_what_peft_writes_today(folder: Path) -> None:
    """The fields that PEFT 0.21.2 adds, with the values it writes for a plain LoRA."""
    change_config(
        folder,
        **dict.fromkeys(
            [
                *("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config"),
                *("exclude_modules", "kasa_config", "lora_ga_config", "monteclora_config"),
                *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
            ]
        ),
        ensure_weight_tying=False,
        lora_bias=False,
        peft_version="0.21.2",
        qalora_group_size=16,
        use_qalora=False,
    )
    _, config = load_adapter(folder)
    assert config.target_modules == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_future": False, "future_config": None, "future_group_size": 16, "future": "none"},
        {"eva_config": {"rho": 2.0}, "megatron_config": {"x": 1}, "loftq_config": {"bits": 4}},
        {"runtime_config": {"ephemeral_gpu_offload": False}, "enable_lora": None},
        {"fan_in_fan_out": True},  # which PEFT takes for false where layers are torch's
        {"use_rslora": None, "use_dora": None, "ensure_weight_tying": None},
    ],
)
def test_fields_that_say_nothing_of_what_is_computed(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    assert load_adapter(folder)[1].target_modules == ["down_proj", "q_proj"]


def test_what_peft_wrote_long_ago(folder: Path) -> None:
    fields = {
        "base_model_name_or_path": "some/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": R,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    _, config = load_adapter(folder)
    assert not config.use_rslora


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ".*proj"},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": 0},
        {"exclude_modules": ["k_proj"]},
    ],
)
def test_targets_that_are_no_plain_list_become_the_layers(
    folder: Path, changes: dict[str, Any]
) -> None:
    change_config(folder, **changes)
    _, config = load_adapter(folder)
    assert config.target_modules == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_what_is_trained_whole_has_no_pair(tmp_path: Path) -> None:
    """PEFT puts none there, though target_modules may name it, too."""
    whole = {"base_model.model.lm_head.weight": np.ones((7, 6), np.float32)}
    save(tmp_path, tensors() | whole, modules_to_save=["lm_head"])
    change_config(tmp_path, target_modules=["q_proj", "down_proj", "lm_head"])
    _, config = load_adapter(tmp_path)
    assert "lm_head" not in config.target_modules


@pytest.mark.parametrize("name", ["norm", "input_layernorm"])
def test_norms_that_were_trained_are_a_sentence(folder: Path, name: str) -> None:
    norm = {f"{PREFIX}0.input_layernorm.weight": np.ones(6, np.float32)}
    write_safetensors(folder / "adapter_model.safetensors", tensors() | norm)
    change_config(folder, modules_to_save=[name])
    message = refused(folder, UnsupportedModelError)
    assert "modules_to_save = model.layers.0.input_layernorm is not supported" in message


def test_folders_that_are_no_adapters(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path / "nothing").endswith("does not exist")
    assert refused(folder / "adapter_config.json").endswith("does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    expected = f"{empty} has no adapter_config.json and no adapter_model.safetensors"
    assert refused(empty) == expected
    (empty / "config.json").write_text("{}")
    assert refused(empty) == f"{expected}: it contains a model, not an adapter"
    assert refused(tmp_path).endswith(f": did you mean {folder}?")


def test_an_adapter_of_mlx_lm_is_named(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapters.safetensors")
    assert refused(folder).endswith("which is not supported; merge it with mlx_lm.fuse")


def test_half_an_adapter(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    assert refused(folder) == f"{folder} has no adapter_model.safetensors"
    (folder / "adapter_model.bin").write_bytes(b"x")
    assert "only in adapter_model.bin, a pickle" in refused(folder)
    weights.write_bytes(content[:-1])
    assert f"{weights} is truncated" in refused(folder)
    weights.write_bytes(content)
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not valid JSON (line 1" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert refused(folder) == f"{folder} has no adapter_config.json"


# ---- rows and whole matrices ---------------------------------------------------------------------

WHERE, EMBEDDING, HEAD = Path("a.safetensors"), "model.embed_tokens", "lm_head"


def config_of(**changes: Any) -> AdapterConfig:
    return AdapterConfig(**{"r": R, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False,
                            "target_modules": ["q_proj"], "base_model_name_or_path": None,
                            **changes})  # fmt: skip


def rows_of(**rows: Any) -> dict[str, np.ndarray]:
    names = {"embedding": EMBEDDING, "head": HEAD, "again": "other.lm_head"}
    return {
        tensor_name(names[name], TOKENS): np.array(array, np.float32)
        for name, array in rows.items()
    }


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "indices", "expected"),
    [
        ([[1, 2], [3, 4]], [7, 9], ""),
        ([[1, 2]], [], f"it contains rows of {EMBEDDING}, which trainable_token_indices does not"),
        ([[1, 2]], {"lm_head": [7]}, f"it contains rows of {EMBEDDING}, which"),
        ([[1, 2]], [7, 9], f"the trained rows of {EMBEDDING} have shape (1, 2), but "),
        ([1, 2], [7, 9], f"the trained rows of {EMBEDDING} have shape (2,), but "),
        (np.zeros((2, 0)), [7, 9], "names 2 tokens"),
        ([[1, NAN]], [7], f"the rows of {EMBEDDING} contain NaN or infinity"),
        ([[1, -np.inf]], [7], f"the rows of {EMBEDDING} contain NaN or infinity"),
        ([[1, np.inf]], [7], f"the rows of {EMBEDDING} contain NaN or infinity"),
    ],
)
def test_trained_rows_are_those_of_the_settings(rows: Any, indices: Any, expected: str) -> None:
    config = config_of(trainable_token_indices=indices)
    stored = peft_files.stored_rows(rows_of(embedding=rows), config)
    if not expected:
        peft_files._check_rows(WHERE, stored, config)
        return
    with pytest.raises(CheckpointError) as caught:
        peft_files._check_rows(WHERE, stored, config)
    assert str(caught.value).startswith(f"{WHERE}: ") and expected in str(caught.value)


@pytest.mark.parametrize(
    ("array", "kind", "expected"),
    [
        ([[1, 2]], None, ""),
        ([1, 2], UnsupportedModelError, "modules_to_save = lm_head is not supported"),
        ([[[1, 2]]], CheckpointError, "lm_head has shape (1, 1, 2), expected a matrix"),
        (np.zeros((0, 2)), CheckpointError, "lm_head has shape (0, 2), expected a matrix"),
        ([[1, NAN]], CheckpointError, "lm_head contains NaN or infinity"),
    ],
)
def test_whole_matrices_are_matrices(array: Any, kind: Any, expected: str) -> None:
    found = {HEAD: np.array(array, np.float32)}
    if kind is None:
        peft_files._check_whole(WHERE, found, config_of(modules_to_save=["lm_head"]))
        return
    with pytest.raises(kind) as caught:
        peft_files._check_whole(WHERE, found, config_of(modules_to_save=["lm_head"]))
    assert type(caught.value) is kind and expected in str(caught.value)


@pytest.mark.parametrize("bias", [[[1.0]], [NAN], [np.inf]])
def test_biases_are_vectors_that_were_asked_for(bias: Any) -> None:
    found = {"q_proj": np.array(bias, np.float32)}
    with pytest.raises(CheckpointError, match="the bias of q_proj must be a vector of finite"):
        peft_files._check_biases(WHERE, found, config_of(bias="all"))
    with pytest.raises(CheckpointError, match="bias is 'none', but there is one of q_proj"):
        peft_files._check_biases(WHERE, {"q_proj": np.ones(1, np.float32)}, config_of())


def test_a_tied_head_s_rows_are_the_embedding_s() -> None:
    both, config = (
        rows_of(embedding=[[1, 2]], head=[[1, 2]]),
        config_of(trainable_token_indices=[7]),
    )
    for given in (both, dict(reversed(both.items()))):
        assert [*peft_files._without_tied_copies(WHERE, given, config)] == [
            tensor_name(EMBEDDING, TOKENS)
        ]
    heads = rows_of(head=[[1, 2]], again=[[1, 2]])
    assert [*peft_files._without_tied_copies(WHERE, heads, config)] == [tensor_name(HEAD, TOKENS)]
    alone = rows_of(head=[[1, 2]])
    assert peft_files._without_tied_copies(WHERE, alone, config) == alone
    with pytest.raises(CheckpointError, match="are tied, but differ"):
        peft_files._without_tied_copies(WHERE, rows_of(embedding=[[1, 2]], head=[[1, 3]]), config)
    by_name = config_of(trainable_token_indices={"embed_tokens": [7], "lm_head": [7]})
    assert peft_files._without_tied_copies(WHERE, both, by_name) == both


@pytest.mark.parametrize(("tied", "other", "kept"), [(True, 1, 1), (True, 2, 2), (False, 1, 2)])
def test_a_tied_head_that_is_a_copy_is_left_out(tied: bool, other: int, kept: int) -> None:
    whole = {tensor_name(EMBEDDING, WHOLE): np.ones((2, 2)),
             tensor_name(HEAD, WHOLE): np.full((2, 2), other)}  # fmt: skip
    config = config_of(modules_to_save=["lm_head"], ensure_weight_tying=tied)
    assert [*peft_files._without_tied_copies(WHERE, whole, config)] == [*whole][:kept]
