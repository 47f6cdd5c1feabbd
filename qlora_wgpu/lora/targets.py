"""Target modules: the layers that get an adapter, and PEFT's names for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from qlora_wgpu.config import ALL_LINEAR, LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import ExpertSpec, LinearSpec, RouterSpec
from qlora_wgpu.lora.config import AdapterConfig, unfitting
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.lora.peft_names import is_named
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.sandbox.expressions import ExpressionError, fits

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")

# ---- choosing layers -------------------------------------------------------------------------


def targeted(
    linears: Sequence[LinearSpec],
    target_modules: str | Sequence[str],
    experts: Sequence[ExpertSpec] = (),
    ends: Sequence[LinearSpec] = (),
    routers: Sequence[RouterSpec] = (),
) -> list[LinearSpec]:
    """The layers that get an adapter, matched as in PEFT: by a whole name or its last parts.

    Routers, experts, embedding and head must be named; experts one by one or by the name of their
    ``ExpertSpec``, and all of a layer or none.
    """
    kept = [spec for spec in linears if not spec.adaptable]
    linears = [spec for spec in linears if spec.adaptable]
    if target_modules == ALL_LINEAR:
        return linears
    of_experts = (spec for stack in experts for spec in stack.linears)
    every = [*linears, *routers, *of_experts, *ends]
    if isinstance(target_modules, str):
        # PEFT matches a pattern with modules only.
        parameters = {spec.name for spec in routers if not spec.is_module}
        modules = [spec for spec in every if spec.name not in parameters]
        names = _fitting_pattern(modules, target_modules)
    else:
        stacks = {stack.name: stack for stack in experts}
        names = set[str]()
        for target in target_modules:
            whole = stacks.get(target)
            if any(is_named(spec.name, target) for spec in kept):
                raise ConfigError(
                    f"lora.target_modules: PEFT does not support LoRA on {target!r} of this model "
                    "type; leave it out"
                )
            names |= {s.name for s in whole.linears} if whole else _fitting_name(every, target)
    _check_stacks(names, experts)
    return [spec for spec in every if spec.name in names]


def _fitting_pattern(linears: Sequence[LinearSpec], pattern: str) -> set[str]:
    try:
        names = {spec.name for spec in linears if fits(pattern, spec.name)}
    except ExpressionError as err:
        raise ConfigError(f"lora.target_modules: {pattern[:80]!r} {err}") from err
    if not names:
        raise ConfigError(
            f"lora.target_modules: {pattern!r} matches no adaptable layer's full name, such as "
            f"{linears[0].name}"
        )
    return names


def _fitting_name(linears: Sequence[LinearSpec], target: str) -> set[str]:
    names = {s.name for s in linears if is_named(s.name, target)}
    if not names:
        leaves = sorted({s.name.rpartition(".")[2] for s in linears})
        near = difflib.get_close_matches(target, leaves, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"this model has {', '.join(leaves)}"
        raise ConfigError(f"lora.target_modules: unknown layer {target!r}; {hint}")
    return names


def _check_stacks(names: set[str], experts: Sequence[ExpertSpec]) -> None:
    for stack in experts:
        missing = [s.name for s in stack.linears if s.name not in names]
        if missing and len(missing) < stack.experts:
            raise ConfigError(
                f"lora.target_modules: {missing[0]!r} is missing, but either all or none of a "
                f"layer's experts can be adapted: name {stack.leaf!r}"
            )


def known_targets(
    targets: Sequence[str], linears: Sequence[LinearSpec], experts: Sequence[ExpertSpec]
) -> list[str]:
    """The names in a file that match a layer, since PEFT ignores others; all if none does."""
    stacks = {stack.name for stack in experts}
    known = [t for t in targets if t in stacks or any(is_named(spec.name, t) for spec in linears)]
    return known or list(targets)


def in_layers(linears: Sequence[LinearSpec], layers: Sequence[int] | None) -> list[LinearSpec]:
    """The linear layers of some decoder layers, numbered as PEFT reads their names."""
    if layers is None:
        return list(linears)
    chosen = [s for s in linears if (m := _LAYER.match(s.name)) and int(m[1]) in layers]
    if not chosen:
        raise ConfigError(
            f"lora.layers_to_transform {list(layers)} leaves no layer to adapt: layers are "
            "numbered from 0"
        )
    return chosen


# ---- checks ----------------------------------------------------------------------------------


def check_patterns(config: LoraConfig, targets: Sequence[LinearSpec]) -> None:
    """Checks that each pattern of ranks and alphas matches an adapted layer.

    PEFT ignores one that matches none, and so trains another adapter than intended.
    """
    names = [spec.name for spec in targets]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in unfitting(getattr(config, key), names):
            raise ConfigError(
                f"lora.{key}: {pattern[:80]!r} matches no adapted layer: use the last parts of a "
                f"name such as {names[0]}, or a regular expression"
            )


def check_experts(config: AdapterConfig, stacks: Sequence[ExpertSpec]) -> None:
    """Checks that the adapted experts of a layer have one rank and one scaling."""
    for stack in stacks:
        names = [spec.name for spec in stack.linears]
        if len({(config.rank_of(name), config.alpha_of(name)) for name in names}) > 1:
            raise ConfigError(
                "lora.rank_pattern or alpha_pattern: all experts of "
                f"{stack.name} must have the same value"
            )
    if stacks and config.use_dora:
        raise ConfigError(
            "lora.use_dora is not supported for experts, as in PEFT: leave them out of "
            "lora.target_modules"
        )


def bare_parameters(
    config: LoraConfig, adapted: Collection[str], routers: Sequence[RouterSpec]
) -> frozenset[str]:
    bare = [s.name for s in routers if s.name in adapted and not s.is_module]
    if bare and config.use_dora:
        raise ConfigError(
            f"lora.use_dora is not supported for {bare[0]}, a bare parameter in transformers, as "
            "in PEFT: leave it out of lora.target_modules"
        )
    return frozenset(bare)


def check_start(
    config: AdapterConfig,
    kind: str,
    targets: Sequence[LinearSpec],
    stacks: Sequence[ExpertSpec],
) -> None:
    if kind in ("default", "gaussian"):
        return
    if config.use_dora:
        raise ConfigError(
            f"lora.init_lora_weights: {kind} and lora.use_dora are mutually exclusive: an adapter "
            "with magnitudes cannot be saved as plain LoRA"
        )
    if config.trainable_token_indices:
        raise ConfigError(
            f"lora.init_lora_weights: {kind} and lora.trainable_token_indices are mutually "
            "exclusive: leave one of them out"
        )
    if stacks:
        raise ConfigError(
            f"lora.init_lora_weights: {kind} is not supported for experts: leave them out of "
            "lora.target_modules"
        )
    for spec in targets:
        if config.rank_of(spec.name) > min(spec.in_features, spec.out_features):
            raise ConfigError(
                f"lora.init_lora_weights: {kind} needs rank {config.rank_of(spec.name)} of "
                f"{spec.name}, which has {min(spec.in_features, spec.out_features)}: lower lora.r"
            )


# ---- PEFT's settings -------------------------------------------------------------------------

# Fields that LoraConfig and adapter_config.json share.
_ALIKE = (
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
    "modules_to_save", "ensure_weight_tying",
)  # fmt: skip


def peft_config(
    config: LoraConfig,
    targets: Sequence[LinearSpec],
    experts: Sequence[ExpertSpec] = (),
    within: str = "",
) -> AdapterConfig:
    names = config.target_modules
    if names == ALL_LINEAR:
        leaves = {stack.leaf for stack in experts}
        # If experts that are not adapted have the same last name, the whole name is needed.
        names = sorted({_shortest_name(spec, leaves) for spec in targets})
    if within and not isinstance(names, str):
        beyond = [spec.name for spec in targets if not spec.name.startswith(within)]
        others = [n for n in names if not any(is_named(b, n) for b in beyond)]
        ends = "|".join(re.escape(name.removeprefix(within)) for name in sorted(others))
        names = rf"{re.escape(within)}(?:.+\.)?(?:{ends})"
        if beyond:
            names = "|".join([names, *map(re.escape, beyond)])
    return AdapterConfig(
        **{key: getattr(config, key) for key in _ALIKE},
        lora_dropout=config.lora_dropout,
        target_modules=names if isinstance(names, str) else sorted(names),
        base_model_name_or_path=None,
        layers_to_transform=config.layers_to_transform,
        trainable_token_indices=config.trainable_token_indices or None,
    )


def _shortest_name(spec: LinearSpec, taken: set[str]) -> str:
    leaf = spec.name.rpartition(".")[2]
    return spec.name if leaf in taken or leaf.isdigit() else leaf  # layers are numbers, too


def lora_config(
    adapter: AdapterConfig,
    adapted: Collection[str] = (),
    experts: Sequence[ExpertSpec] = (),
    routers: Sequence[RouterSpec] = (),
) -> LoraConfig:
    """The settings with which a model is opened for an adapter.

    If target modules match experts or routers that have no tensors, the targets are the layers that
    do have some: PEFT's ``all-linear`` leaves experts out.
    """
    targets = adapter.target_modules
    of_experts = [spec for stack in experts for spec in stack.linears]
    if not isinstance(targets, str) and any(
        _fit_by_name_only(targets, adapted, specs) for specs in (of_experts, routers)
    ):
        targets = sorted(adapted)
    return LoraConfig(
        **{key: getattr(adapter, key) for key in _ALIKE},
        lora_dropout=adapter.lora_dropout,
        target_modules=targets,
        trainable_token_indices=adapter.trainable_token_indices,
    )


def _fit_by_name_only(
    targets: Sequence[str], adapted: Collection[str], specs: Sequence[LinearSpec]
) -> bool:
    if any(spec.name in adapted for spec in specs):
        return False
    return any(is_named(spec.name, target) for spec in specs for target in targets)


# ---- modules trained whole -------------------------------------------------------------------

_SETTING = "lora.modules_to_save"


def saved_modules(config: LoraConfig, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The modules that are trained whole, the embedding first; only the embedding if tied."""
    names = config.modules_to_save or []
    both = (vocabulary.embedding, vocabulary.head)
    if vocabulary.classes:  # PEFT names both heads that transformers' classifiers may have
        names = ["score", *(name for name in names if name not in ("classifier", "score"))]
    chosen = {_module(name, both) for name in names}
    if vocabulary.bias and vocabulary.head in chosen:
        raise ConfigError(
            f"{_SETTING}: {vocabulary.head} has a bias, which PEFT would also train, but this is "
            "not supported: leave it out, or name it in lora.target_modules"
        )
    if chosen and vocabulary.tied:
        if not config.ensure_weight_tying:
            raise ConfigError(
                f"{_SETTING} names {names[0]}, and {vocabulary.head} is tied to "
                f"{vocabulary.embedding}: set lora.ensure_weight_tying to true, which trains both "
                "as one; two separate ones, as PEFT trains without it, are not supported: merge an "
                "adapter that has two with PEFT"
            )
        return (vocabulary.embedding,)
    return tuple(module for module in both if module in chosen)


def _module(name: str, both: tuple[str, str]) -> str:
    found = [module for module in both if is_named(module, name)]
    if not found:
        leaf = both[0].rpartition(".")[2]
        raise ConfigError(
            f"{_SETTING}: {name!r} is not supported (supported: {leaf}, {both[1]}): leave it out, "
            "or merge an adapter that has it with PEFT"
        )
    return found[0]


def check_saved(
    saved: Collection[str],
    config: LoraConfig,
    adapted: Collection[str],
    forms: AdapterDtypes,
    *,
    trains_rows: bool,
) -> None:
    """Checks that modules can be trained whole together with everything else that is trained."""
    if not saved:
        return
    if twice := sorted(set(saved) & set(adapted)):
        raise ConfigError(
            f"{_SETTING} and lora.target_modules both name {twice[0]}: leave it out of one of them"
        )
    if trains_rows:
        raise ConfigError(
            f"{_SETTING} trains whole matrices, lora.trainable_token_indices or model.add_tokens "
            "only rows of them: leave one of them out"
        )
    if config.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {config.init_lora_weights} and {_SETTING} are mutually "
            "exclusive: set lora.init_lora_weights to default"
        )
    if forms.gradient != "float32":
        raise ConfigError(
            f"{_SETTING} requires gradients in float32: set train.gradient_dtype to float32"
        )
