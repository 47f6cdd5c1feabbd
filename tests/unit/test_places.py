"""What a new family, op, dialect, command or setting still lacks: each test names the places.

Formats of rows have ``tests/data/test_format_places.py``; a shader's statements that no case
executes ``tests/selfcheck/test_coverage.py``.
"""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from families.test_config_keys import TRIALS
from references.config_trials import TEXTS
from references.sized import family_configs

from campaigns import drawn_configs
from qlora_wgpu import ops
from qlora_wgpu.cli import _COMMANDS
from qlora_wgpu.config import dialects
from qlora_wgpu.families.family import known_families
from qlora_wgpu.gguf.architectures import BY_MODEL_TYPE

ROOT = Path(__file__).parents[2]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def lacking(places: dict[str, bool]) -> list[str]:
    return [place for place, is_there in places.items() if not is_there]


# Families whose export to GGUF is refused by name.
WITHOUT_GGUF = {
    "flex_olmo", "gemma3n_text", "granitemoe_swa", "ministral", "nanochat", "olmo_hybrid", "youtu",
    "zamba2",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(known_families()) - set(TEXTS)))
def test_a_family_has_all_its_places(model_type: str) -> None:
    recorded = {config["model_type"] for config in family_configs().values()}
    tried = {name for name, _ in TRIALS}
    assert not lacking({
        "tests/references/cases.py: a case, recorded by record.py": model_type in recorded,
        "tests/references/configs.py --record: its keys": model_type in tried,
        "campaigns/drawn_configs.py: FAMILIES": model_type in drawn_configs.FAMILIES,
        "qlora_wgpu/gguf/architectures.py: a row": model_type in {*BY_MODEL_TYPE, *WITHOUT_GGUF},
    })  # fmt: skip


# Ops that are parts of a whole, whose places they share.
PARTS = {
    "apply": "dora", "balance_sums": "balance_loss", "cast": "as_operand", "combine": "experts",
    "convolve": "short_conv", "embedding": "trained rows", "expert_linear": "experts",
    "permute": "experts", "route": "experts", "route_by_scores": "experts",
    "with_factors": "experts",
}  # fmt: skip


def differentiable() -> list[str]:
    """The ops that record how their gradients are made."""
    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(ops.__path__)):
        module = importlib.import_module(f"{ops.__name__}.{name}")
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                is_public = not function.__name__.startswith("_")
                if is_public and "g.record(" in inspect.getsource(function):
                    found.append(function.__name__)
    return found


@pytest.mark.parametrize("op", sorted(set(differentiable()) - set(PARTS)))
def test_an_op_has_all_its_places(op: str) -> None:
    assert not lacking({
        f"{path}: {what}": re.search(rf"\b{op}\b", text(path)) is not None
        for path, what in {
            "tests/ops/test_shape_errors.py": "shapes that do not fit",
            "tests/reference/test_reference_gradients.py": "FORMULAS",
            "tests/ops/test_composition.py": "OPS",
        }.items()
    })  # fmt: skip


def other_trainers() -> list[str]:
    names = sorted(module.name for module in pkgutil.iter_modules(dialects.__path__))
    modules = (importlib.import_module(f"{dialects.__name__}.{name}") for name in names)
    return [module.DIALECT.name for module in modules if hasattr(module, "DIALECT")]


@pytest.mark.parametrize("trainer", other_trainers())
def test_a_dialect_has_all_its_places(trainer: str) -> None:
    told = {path: trainer in text(path) for path in ("docs/other-trainers.md", "docs/cli.md")}
    tried = any(trainer in path.read_text() for path in (ROOT / "tests/config").rglob("*.py"))
    assert not lacking(told | {"tests/config: files of it, converted": tried})


@pytest.mark.slow
@pytest.mark.parametrize("verb", sorted(_COMMANDS))
def test_a_command_has_all_its_places(verb: str) -> None:
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "cli.md"]
    told = any(f"qlora-wgpu {verb}" in path.read_text() for path in [*pages, ROOT / "README.md"])
    tried = any(f'"{verb}' in path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert not lacking({
        "docs/cli.md, by tools/reference.py": f"## {verb}" in text("docs/cli.md"),
        "docs: a page that uses it": told,
        "tests: one that calls it": tried,
    })  # fmt: skip
