"""Imports go one way: cli, runs, tuning, bench, training, model, families, ops, graph, gpu."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import qlora_wgpu

ROOT = Path(qlora_wgpu.__file__).parent
LEAVES = {
    "config": set(),
    "data": set(),
    "quant": set(),
    "reference": set(),
    "errors": set(),
    "labels": set(),
    "report": set(),
}
MAY_USE = {
    **{name: {"errors"} for name in LEAVES},
    "data": {"errors", "config", "labels"},
    "checkpoint": {"errors", "quant"},
    "gpu": {"errors"},
    "graph": {"gpu", "errors"},
    "ops": {"graph", "gpu", "errors"},
    "families": {"ops", "graph", "gpu", "config", "checkpoint", "errors"},
    "lora": {"families", "ops", "graph", "config", "checkpoint", "errors"},
    "model": {
        "families",
        "lora",
        "ops",
        "graph",
        "gpu",
        "config",
        "checkpoint",
        "quant",
        "errors",
        "labels",
    },
    "selfcheck": {
        "model",
        "families",
        "lora",
        "ops",
        "graph",
        "gpu",
        "config",
        "quant",
        "reference",
        "errors",
    },
    "export": {"model", "families", "lora", "checkpoint", "quant", "config", "errors"},
    "generation": {"model", "ops", "data", "errors"},
    "bench": {
        "training",
        "model",
        "families",
        "ops",
        "graph",
        "gpu",
        "config",
        "checkpoint",
        "quant",
        "errors",
    },
    "tuning": {"bench", "model", "families", "gpu", "config", "quant", "errors"},
    "runs": {
        "tuning",
        "selfcheck",
        "report",
        "training",
        "generation",
        "bench",
        "model",
        "lora",
        "families",
        "gpu",
        "config",
        "data",
        "checkpoint",
        "errors",
        "labels",
    },
    "training": {
        "model",
        "lora",
        "ops",
        "graph",
        "gpu",
        "config",
        "data",
        "checkpoint",
        "errors",
        "labels",
    },
}
FOREIGN = {"torch", "transformers", "peft", "bitsandbytes"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in MAY_USE:  # cli, __init__ and __main__ may use everything
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "qlora_wgpu" or len(parts) == 1 or parts[1] == room:
                continue
            if parts[1] not in MAY_USE[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_rooms_form_no_cycle() -> None:
    others = {room: used - {room} for room, used in MAY_USE.items()}
    TopologicalSorter(others).prepare()  # raises CycleError


def test_webgpu_is_imported_in_one_place_and_torch_nowhere() -> None:
    for path in ROOT.rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & FOREIGN, path
        if path.relative_to(ROOT).as_posix() not in ("gpu/wgpu_native.py", "gpu/dawn.py"):
            assert not roots & {"wgpu", "wgpudawn"}, path


def test_shaders_and_configs_hold_no_python() -> None:
    for folder in ("shaders", "configs"):
        assert not list((ROOT.parent / folder).rglob("*.py"))
