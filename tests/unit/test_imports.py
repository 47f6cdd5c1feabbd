"""What import-linter (`make lint`) does not see: imports from outside, and where files lie."""

import ast
import importlib.util
from pathlib import Path

import pytest

import qlora_wgpu

ROOT = Path(qlora_wgpu.__file__).parent
FOREIGN = {"torch", "transformers", "peft", "bitsandbytes"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.slow
def test_webgpu_is_imported_in_one_place_and_torch_nowhere() -> None:
    for path in ROOT.rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & FOREIGN, path
        if path.relative_to(ROOT).as_posix() not in ("gpu/wgpu_native.py", "gpu/dawn.py"):
            assert not roots & {"wgpu", "wgpudawn"}, path


def test_shaders_and_configs_hold_no_python() -> None:
    for folder in ("shaders", "configs"):
        assert not list((ROOT.parent / folder).rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples", "campaigns"])
def test_what_scripts_import_is_there(folder: str) -> None:
    """No type checker reads them, and most run on a GPU or for hours."""
    missing = []
    for path in sorted((ROOT.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qlora_wgpu"):
                missing += [f"{path}: {alias.name}" for alias in node.names
                            if not _is_there(node.module or "", alias.name)]  # fmt: skip
    assert missing == []


def _is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
