"""What import-linter (`make lint`) does not see: imports from outside, and where files lie."""

import ast
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
