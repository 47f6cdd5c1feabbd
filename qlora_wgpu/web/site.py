"""A site: a run's model, plans, texts and the page, as files for any web server."""

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
from qlora_wgpu.gpu.recording_device import RecordedBuffer, RecordingDevice
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

# ---- the page, and what it can do ----------------------------------------------------------------


def page_folder() -> Path:
    """Where the page's files are in the installed package."""
    return Path(str(resources.files("qlora_wgpu.web"))) / "page"


def put_page(folder: Path) -> None:
    """Copies the page, its libraries with their licences included."""
    shutil.copytree(page_folder(), folder, dirs_exist_ok=True)


SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def check_settings(settings: Config) -> None:
    """Refuses settings that need more than a page does."""
    model, data, lora, optim = settings.model, settings.data, settings.lora, settings.optim
    only = {
        "train.objective": (settings.train.objective, "sft"),
        "model.add_tokens": (model.add_tokens or None, None),
        "model.add_special_tokens": (model.add_special_tokens or None, None),
        "lora.init_from": (lora.init_from, None),
        "lora.trainable_token_indices": (lora.trainable_token_indices, None),
        "lora.modules_to_save": (lora.modules_to_save, None),
    }
    for name, (value, wanted) in only.items():
        if value != wanted:
            _refuse(name, value, f"is not trained in a browser: set it to {_in_yaml(wanted)}")
    if optim.name == "lion":
        _refuse("optim.name", "lion", "is not trained in a browser: set it to adamw or adamw_8bit")
    if lora.changes_base:
        why = "changes the base, which is not done for a browser: set it to default or gaussian"
        _refuse("lora.init_lora_weights", lora.init_lora_weights, why)
    if data.has_weights:
        raise ConfigError(
            "weights of rows are not trained in a browser: leave data.columns.weight out"
        )
    known, unknown = ", ".join(SCHEDULES), "is not known to the page:"
    if data.apply_chat_template:
        remedy = "set it to false, and write the rows as messages"
        _refuse("data.apply_chat_template", True, f"{unknown} {remedy}")
    if data.truncation == "windows":
        remedy = "set it to keep_start, or write longer texts in several rows"
        _refuse("data.truncation", data.truncation, f"{unknown} {remedy}")
    if (schedule := optim.lr_scheduler_type) not in SCHEDULES:
        _refuse("optim.lr_scheduler_type", schedule, f"{unknown} set it to one of {known}")
    if optim.lr_scheduler_kwargs:
        keywords = json.dumps(optim.lr_scheduler_kwargs)
        _refuse("optim.lr_scheduler_kwargs", keywords, f"{unknown} leave it out")


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise ConfigError(f"{name} = {_in_yaml(value)} {why}")


def _in_yaml(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def check_model(layout: ModelPlan) -> None:
    """Refuses a model whose micro-batches have inputs, or its adapter a start, beyond a page."""
    if layout.adapter.embedding is not None:
        raise ConfigError(
            f"lora.target_modules: LoRA on {layout.adapter.embedding.name} is not trained in a "
            "browser: leave it out"
        )
    batch = layout.step(StepOptions("loss", 1, 32)).batch
    if batch.angles:
        raise ConfigError(
            "rotations by a text's length (LongRoPE, dynamic RoPE) are not computed in a browser: "
            "choose another model"
        )
    if batch.embedded:
        raise ConfigError(
            "embeddings that wait in host memory (Gemma 4's of each layer) are not looked up in a "
            "browser: choose another model"
        )


# ---- texts ---------------------------------------------------------------------------------------

_TOKENIZER = "tokenizer.json"


def put_texts(files: SiteFiles, folder: Path, settings: Config, longest: int) -> dict[str, Any]:
    """Copies the tokenizer, and tells how rows and prompts are written."""
    tokenizer = Tokenizer.from_folder(folder)
    template = find_chat_template(settings.data.chat_template, tokenizer)
    data = settings.data
    name = files.put(_TOKENIZER, file_bytes(folder / _TOKENIZER, TOKENIZER_BYTES))
    prompts = [
        PromptFormat("chat", tokenizer, template),
        PromptFormat.alpaca(tokenizer),
        PromptFormat.text(tokenizer),
    ]
    told = {prompt.kind: _prompt_json(prompt, folder, settings) for prompt in prompts}
    return {
        "tokenizer": name,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_ids": sorted(tokenizer.eos_token_ids),
        "template": None if template is None else template.source,
        "tool_template": None if template is None else template.tool_source,
        "alpaca": BUILT_IN_TEMPLATES["alpaca"],
        "prompts": files.put_json("prompts.plan", told),
        "rows": {
            "format": data.format,
            "columns": dict(data.columns),
            "train_on": data.train_on,
            "truncation": data.truncation,
            "max_length": longest,
        },
    }


def _prompt_json(prompt: PromptFormat, base: Path, settings: Config) -> dict[str, Any]:
    """Where answers end, and what is kept beside an adapter that has learnt from such prompts."""
    with tempfile.TemporaryDirectory() as made:
        save_prompt(settings, base, prompt, Path(made))
        kept = {
            path.relative_to(made).as_posix(): file_bytes(path, TOKENIZER_BYTES).decode()
            for path in sorted(Path(made).rglob("*"))
            if is_file(path) and path.name != _TOKENIZER  # a page has it already
        }
    return {"turn_end": prompt.turn_end, "stop_text": prompt.stop_text, "files": kept}


# ---- the site ------------------------------------------------------------------------------------

MANIFEST = "site.json"
FORMAT = 1
_MAX_BINDING = 128 * MIB  # what WebGPU promises on every device


@dataclass(frozen=True)
class _Cut:
    """How kernels are cut for some browsers."""

    profile: Profile  # how
    # The vendors whose GPUs they are for, by WebGPU's names; none for all others
    vendors: tuple[str, ...] = ()
    suffix: str = ""  # of their folder's name


_CUTS: Mapping[str, Sequence[_Cut]] = {
    "gpu": (
        _Cut(GPU_PROFILE),
        _Cut(gpu_profile(None, few_registers=True), FEW_REGISTERS, "-few-registers"),
    ),
    "cpu": (_Cut(CPU_PROFILE),),
}


@dataclass(frozen=True)
class SiteOptions:
    """What a page offers."""

    ranks: Sequence[int] = ()  # ranks of the adapter; by default the run's
    # Lengths of rows, the longest of which rows are cut to; by default all that the run's
    # ``data.max_seq_length`` leads to
    buckets: Sequence[int] = ()
    # For which browsers kernels are cut: those on GPUs, or on software GPUs
    kernels: Literal["gpu", "cpu"] = "gpu"


@dataclass(frozen=True)
class Site:
    """What was written."""

    folder: Path  # where it is
    nbytes: int  # bytes of all files
    weight_bytes: int  # bytes of the weights
    # By rank and length of rows, the bytes that training takes of a GPU
    memory: Mapping[int, Mapping[int, int]]

    def moved(self, folder: Path) -> Site:
        """The same in another folder."""
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
    """Writes everything but the page itself."""
    check_settings(settings)
    buckets = _buckets(settings, options)
    files, shaders = SiteFiles(folder), Shaders()
    named = pretrained.name_or_path
    text = put_texts(files, text_folder, settings, max(buckets))
    weights = WeightFiles(files)
    variants = [
        _variant(settings, pretrained, rank, buckets, cut, (files, shaders, weights), progress)
        for cut in _CUTS[options.kernels]
        for rank in options.ranks or (settings.lora.r,)
    ]
    names = weights.end()
    files.put_json("shaders.plan", shaders.as_json())
    site = {
        "format": FORMAT,
        "made_by": f"qlora-wgpu {__version__}",
        "model": {
            "name": name_on_hub(named) or Path(named).name,  # paths stay at home
            "vocab_size": pretrained.architecture.vocab_size,
        },
        "needs": {
            "maxStorageBuffersPerShaderStage": shaders.most_bound,
            "maxComputeInvocationsPerWorkgroup": shaders.most_invocations,
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
    cut: _Cut,
    into: tuple[SiteFiles, Shaders, WeightFiles],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Writes the files of one rank, for some browsers."""
    files, shaders, weights = into
    filled = FilledBuffers(weights)
    device = RecordingDevice(cut.profile, _MAX_BINDING, filled.fill)
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
    made = Variant(model, device, shaders, files, f"plans/r{rank}{cut.suffix}").write(
        settings.optim, batch, buckets, filled
    )
    largest = max(_largest(device.buffers), made.pop("largest_slot"))
    return {**made, "vendors": cut.vendors, "largest": largest}


def _largest(buffers: Sequence[RecordedBuffer]) -> int:
    return max(buffer.nbytes for buffer in buffers)


def _buckets(settings: Config, options: SiteOptions) -> list[int]:
    """The lengths that rows are padded to."""
    longest = max(options.buckets, default=settings.data.max_seq_length)
    if options.buckets:
        return sorted(set(options.buckets))
    found = {bucket_length(n, longest) for n in range(1, longest + 1)}
    return sorted(found)


def _training(settings: Config) -> dict[str, Any]:
    """The settings that a page trains by, as the run's."""
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
