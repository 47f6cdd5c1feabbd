"""A site: the page, a run's model, plans and tokenizer, as files for any web server."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn

from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.config import Config
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template
from qlora_wgpu.data.batches import bucket_length
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import file_bytes, is_file
from qlora_wgpu.gpu.kernel_config import (
    CPU_PROFILE,
    FEW_REGISTERS,
    GPU_PROFILE,
    Profile,
    gpu_profile,
)
from qlora_wgpu.gpu.recording_device import RecordingDevice
from qlora_wgpu.limits import MIB, TOKENIZER_BYTES
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel, device_layout
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.training.finish import save_prompt
from qlora_wgpu.training.preferences import training_options
from qlora_wgpu.version import __version__
from qlora_wgpu.web.variant import FilledBuffers, Shaders, SiteFiles, Variant, WeightFiles

# ---- the page, and what it supports --------------------------------------------------------------


def page_folder() -> Path:
    """The page's folder in the installed package."""
    return Path(str(resources.files("qlora_wgpu.web"))) / "page"


def put_page(folder: Path) -> None:
    """Copies the page, with its libraries and their licenses."""
    shutil.copytree(page_folder(), folder, dirs_exist_ok=True)


SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def check_settings(settings: Config) -> None:
    """Raises a ConfigError for settings that the page does not support."""
    model, data, lora, optim = settings.model, settings.data, settings.lora, settings.optim
    only = {
        "train.objective": (settings.train.objective, "sft"),
        "model.add_tokens": (model.add_tokens or None, None),
        "model.add_special_tokens": (model.add_special_tokens or None, None),
        "lora.init_from": (lora.init_from, None),
        "lora.trainable_token_indices": (lora.trainable_token_indices, None),
        "lora.modules_to_save": (lora.modules_to_save, None),
    }
    for name, (value, supported) in only.items():
        if value != supported:
            _refuse(name, value, f"set it to {_in_yaml(supported)}")
    if optim.name == "lion":
        _refuse("optim.name", "lion", "set it to adamw or adamw_8bit")
    if lora.changes_base:
        _refuse("lora.init_lora_weights", lora.init_lora_weights, "set it to default or gaussian")
    if data.has_weights:
        raise ConfigError("row weights are not supported in a browser: remove data.columns.weight")
    if data.apply_chat_template:
        _refuse("data.apply_chat_template", True, "set it to false, and write the rows as messages")
    if data.truncation == "windows":
        remedy = "set it to keep_start, or split long documents into several rows"
        _refuse("data.truncation", data.truncation, remedy)
    if (schedule := optim.lr_scheduler_type) not in SCHEDULES:
        _refuse("optim.lr_scheduler_type", schedule, f"set it to one of {', '.join(SCHEDULES)}")
    if optim.lr_scheduler_kwargs:
        _refuse("optim.lr_scheduler_kwargs", json.dumps(optim.lr_scheduler_kwargs), "remove it")


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    raise ConfigError(f"{name} = {_in_yaml(value)} is not supported in a browser: {remedy}")


def _in_yaml(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def check_model(layout: ModelPlan) -> None:
    """Raises a ConfigError for a model or an adapter that the page does not support."""
    if layout.adapter.embedding is not None:
        raise ConfigError(
            f"lora.target_modules: LoRA on {layout.adapter.embedding.name} is not supported in a "
            "browser: remove it"
        )
    batch = layout.step(StepOptions("loss", 1, 32)).batch
    if batch.angles:
        raise ConfigError(
            "RoPE that depends on the sequence length (LongRoPE, dynamic) is not supported in a "
            "browser: choose another model"
        )
    if batch.embedded:
        raise ConfigError(
            "embeddings in host memory (such as Gemma 4's per-layer ones) are not supported in a "
            "browser: choose another model"
        )


# ---- prompts -------------------------------------------------------------------------------------

_TOKENIZER = "tokenizer.json"


def put_prompts(
    files: SiteFiles, folder: Path, settings: Config, longest: int, *, refuses_images: bool = False
) -> dict[str, Any]:
    """Copies the tokenizer; returns how the page formats rows and prompts.

    Rows with images are refused for models that read them, and ignored with a note for others.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template = find_chat_template(settings.data.chat_template, tokenizer)
    data = settings.data
    name = files.put(_TOKENIZER, file_bytes(folder / _TOKENIZER, TOKENIZER_BYTES))
    prompts = [
        PromptFormat("chat", tokenizer, template),
        PromptFormat.alpaca(tokenizer),
        PromptFormat.text(tokenizer),
    ]
    formats = {prompt.kind: _prompt_json(prompt, folder, settings) for prompt in prompts}
    return {
        "tokenizer": name,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_ids": sorted(tokenizer.eos_token_ids),
        "template": None if template is None else template.source,
        "tool_template": None if template is None else template.tool_source,
        "alpaca": BUILT_IN_TEMPLATES["alpaca"],
        "prompts": files.put_json("prompts.plan", formats),
        "rows": {
            "format": data.format,
            "columns": dict(data.columns),
            "train_on": data.train_on,
            "truncation": data.truncation,
            "max_length": longest,
            "refuses_images": refuses_images,
        },
    }


def _prompt_json(prompt: PromptFormat, base: Path, settings: Config) -> dict[str, Any]:
    """Where answers end, and the files that belong to an adapter trained on this format."""
    with tempfile.TemporaryDirectory() as made:
        save_prompt(settings, base, prompt, Path(made))
        kept = {
            path.relative_to(made).as_posix(): file_bytes(path, TOKENIZER_BYTES).decode()
            for path in sorted(Path(made).rglob("*"))
            if is_file(path) and path.name != _TOKENIZER  # the page has it
        }
    return {"turn_end": prompt.turn_end, "stop_text": prompt.stop_text, "files": kept}


# ---- the site ------------------------------------------------------------------------------------

MANIFEST = "site.json"
FORMAT = 1
_MAX_BINDING = 128 * MIB  # WebGPU's default limit


@dataclass(frozen=True)
class _Tiling:
    """How kernels are tiled for some GPUs."""

    profile: Profile
    vendors: tuple[str, ...] = ()  # the GPUs' vendors, by WebGPU's names; empty for all others
    suffix: str = ""  # of the plans' folder


_TILINGS: Mapping[str, Sequence[_Tiling]] = {
    "gpu": (
        _Tiling(GPU_PROFILE),
        _Tiling(gpu_profile(None, few_registers=True), FEW_REGISTERS, "-few-registers"),
    ),
    "cpu": (_Tiling(CPU_PROFILE),),
}


@dataclass(frozen=True)
class SiteOptions:
    """What the page offers."""

    ranks: Sequence[int] = ()  # of the adapter; by default the run's
    # Row lengths, to the largest of which rows are truncated; by default the buckets of the run's
    # ``data.max_seq_length``
    buckets: Sequence[int] = ()
    kernels: Literal["gpu", "cpu"] = "gpu"  # tilings for GPUs, or for software GPUs


@dataclass(frozen=True)
class Site:
    """A site that was written."""

    folder: Path
    nbytes: int  # of all files
    weight_bytes: int
    memory: Mapping[int, Mapping[int, int]]  # bytes of GPU memory, by rank and row length

    def moved(self, folder: Path) -> Site:
        """The same site in another folder."""
        return replace(self, folder=folder)


def write_site(
    settings: Config,
    pretrained: Pretrained,
    text_folder: Path,
    folder: Path,
    options: SiteOptions,
    *,
    sample: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Site:
    """Writes all files except the page's own."""
    check_settings(settings)
    buckets = _buckets(settings, options)
    files, shaders = SiteFiles(folder), Shaders()
    named = pretrained.name_or_path
    reads_images = pretrained.architecture.images is not None
    text = put_prompts(files, text_folder, settings, max(buckets), refuses_images=reads_images)
    weights = WeightFiles(files)
    variants = [
        _variant(settings, pretrained, rank, buckets, tiling, (files, shaders, weights), progress)
        for tiling in _TILINGS[options.kernels]
        for rank in options.ranks or (settings.lora.r,)
    ]
    names = weights.end()
    files.put_json("shaders.plan", shaders.as_json())
    site = {
        "format": FORMAT,
        "made_by": f"qlora-wgpu {__version__}",
        "model": {
            "name": name_on_hub(named) or Path(named).name,  # local paths are private
            "vocab_size": pretrained.architecture.vocab_size,
        },
        "needs": {
            "maxStorageBuffersPerShaderStage": shaders.max_bindings,
            "maxComputeInvocationsPerWorkgroup": shaders.max_invocations,
            "maxStorageBufferBindingSize": max(v["largest"] for v in variants),
            "maxBufferSize": max(v["largest"] for v in variants),
        },
        "weights": names,
        "shaders": "shaders.plan",
        "variants": [{k: v for k, v in each.items() if k != "largest"} for each in variants],
        "buckets": buckets,
        "training": _training(settings),
        "text": text,
        "sample": sample,
        "files": files.listed,
    }
    (folder / MANIFEST).write_text(json.dumps(site, indent=1, allow_nan=False) + "\n", "utf-8")
    sizes = {name: each["bytes"] for name, each in files.listed.items()}
    return Site(
        folder,
        sum(sizes.values()),
        sum(sizes[name] for name in names),
        {
            v["rank"]: {int(n): b for n, b in v["memory"].items()}
            for v in variants
            if not v["vendors"]
        },
    )


def _variant(
    settings: Config,
    pretrained: Pretrained,
    rank: int,
    buckets: Sequence[int],
    tiling: _Tiling,
    into: tuple[SiteFiles, Shaders, WeightFiles],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Writes the files of one rank and tiling."""
    files, shaders, weights = into
    filled = FilledBuffers(weights)
    device = RecordingDevice(tiling.profile, _MAX_BINDING, filled.fill)
    lora = settings.lora.model_copy(
        update={"r": rank, "lora_alpha": settings.lora.lora_alpha * rank / settings.lora.r}
    )
    layout = device_layout(
        pretrained, lora, settings.quant, settings.train.compute_dtype, device,
        forms=AdapterDtypes.of(settings), keep=settings.model.cache,
    )  # fmt: skip
    check_model(layout)
    model = QLoRAModel(
        layout, device, seed=settings.train.seed, options=training_options(settings.train),
        progress=progress,
    )  # fmt: skip
    batch = settings.train.per_device_train_batch_size
    made = Variant(model, device, shaders, files, f"plans/r{rank}{tiling.suffix}").write(
        settings.optim, batch, buckets, filled
    )
    largest = max(*(buffer.nbytes for buffer in device.buffers), made.pop("largest_slot"))
    return {**made, "vendors": tiling.vendors, "largest": largest}


def _buckets(settings: Config, options: SiteOptions) -> list[int]:
    """The lengths that rows are padded to."""
    if options.buckets:
        return sorted(set(options.buckets))
    longest = settings.data.max_seq_length
    return sorted({bucket_length(n, longest) for n in range(1, longest + 1)})


def _training(settings: Config) -> dict[str, Any]:
    """The run's settings for training, for the page."""
    train, optim, data = settings.train, settings.optim, settings.data
    return {
        "batch_size": train.per_device_train_batch_size,
        "accumulation": train.gradient_accumulation_steps,
        "epochs": train.num_train_epochs,
        "max_steps": train.max_steps,
        "seed": train.seed,
        "random": settings.lora.lora_dropout > 0 or train.neftune_noise_alpha > 0,
        "packing": data.packing,
        "grouped": data.group_by_length and not data.packing,
        "learning_rate": optim.learning_rate,
        "scheduler": optim.lr_scheduler_type,
        "warmup_ratio": optim.warmup_ratio,
        "warmup_steps": optim.warmup_steps,
        "beta1": optim.adam_beta1,
        "beta2": optim.adam_beta2,
        "loraplus": optim.loraplus_lr_ratio,
    }
