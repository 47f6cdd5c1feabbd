"""A base and an adapter, found by what a user names: a run, an adapter or a model."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path

from qlora_wgpu.checkpoint.hub import is_hub_file, is_hub_model, owner_hint
from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, tokenizer_folder
from qlora_wgpu.config import Config, ModelConfig, QuantConfig, load_config
from qlora_wgpu.config.as_trained import config_of_run, find_run, without_none
from qlora_wgpu.config.paths import RunPaths, path_hint
from qlora_wgpu.data import Dataset, PromptFormat, Tokenizer, find_chat_template, read_prompt_files
from qlora_wgpu.errors import ConfigError, command, option
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists, is_dir, is_file, is_there
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.qlora_model import ComputeDtype
from qlora_wgpu.runs.opening import OpenedModel, load_adapted, opened_as_trained
from qlora_wgpu.runs.samples import OWN_TOKENS, Prompt, sample_prompts
from qlora_wgpu.training import Observer, checkpoint_folders
from qlora_wgpu.training.data import prompt_of_data
from qlora_wgpu.training.observers import Unwatched

# ---- what a user names ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelRef:
    """What is to be opened."""

    model: str  # folder or hub name of the base
    adapter: str | None  # folder of the adapter, or None for the base alone


def resolve_model(
    place: str | None, model: str | None = None, adapter: str | None = None
) -> ModelRef:
    """What is meant by a run's folder, an adapter's, or a model; options say what it does not."""
    if place is not None and adapter is not None:
        raise ConfigError(f"{place} and --adapter {adapter} both name an adapter: leave one out")
    if place is not None and (own := adapter_in(place)) is not None:
        adapter = own
    elif place is not None and model is not None:
        raise ConfigError(f"{place} and --model {model} both name a model: leave one out")
    else:
        model = model or place
    if model is not None:
        return ModelRef(model, adapter)
    if adapter is None:
        raise ConfigError("name a run's folder, such as runs/first, or a model with --model")
    return ModelRef(existing_base(adapter), adapter)


def adapter_of_run(run: Path) -> str:
    """The final adapter of a run, else that of its newest checkpoint."""
    final = RunPaths(run).adapter
    if _holds_adapter(final):
        return str(final)
    whole = [folder for folder in checkpoint_folders(run) if _holds_adapter(folder)]
    if not whole:
        raise ConfigError(f"the run in {run} has no adapter and no checkpoint yet")
    return str(whole[-1])


def base_of(adapter: str) -> str:
    """The base that an adapter's run, or else the adapter itself, names."""
    if (run := find_run(adapter)) is not None:
        return config_of_run(run).model.path
    name = load_adapter(adapter, biases=True)[1].base_model_name_or_path
    if name is None:
        raise ConfigError(f"{adapter} names no base model: name it with {option('model', ...)}")
    return name


def existing_base(adapter: str) -> str:
    """``base_of`` an adapter, where that is there."""
    base = base_of(adapter)
    if is_nowhere(base):
        raise ConfigError(
            f"{adapter} was trained on the model {base}, which is not there: name it with "
            f"{option('model', ...)}"
        )
    return base


def base_in(settings: Config) -> str:
    """The base that a configuration names."""
    path = settings.model.path
    if is_nowhere(path):
        if is_file(Path(path).expanduser()):
            raise ConfigError(
                f"model.path is the file {path}: name the folder that it lies in, or a .gguf file"
            )
        set_it = "add model.path=FOLDER" if command() else "set model.path to its folder"
        hint = path_hint(Path(path).expanduser()) or _model_like(Path(path))
        if not hint:
            hint = f"if it lies elsewhere now, {set_it}"
            if wanted := owner_hint(path):
                hint += f"; {wanted}"
        raise ConfigError(f"there is no model folder {path}: {hint}")
    return path


def adapter_in(place: str) -> str | None:
    """The adapter of a run's or an adapter's folder; None where a model is named."""
    folder = Path(place).expanduser()
    if _holds_adapter(folder):
        return str(folder)
    if _is_gguf(folder) or exists(folder / "config.json") or _is_on_the_hub(place):
        return None
    if _is_run(folder):
        return adapter_of_run(folder)
    run = _meant(folder)
    hint = "" if run is None else f": did you mean {run}?"
    named = place or "''"
    raise ConfigError(f"there is no run, adapter or model in {named}{hint}")


def _is_on_the_hub(place: str) -> bool:
    """Whether a name can be the hub's: ``runs/frist`` beside ``runs/first`` is none."""
    folder = Path(place).expanduser()
    if is_hub_file(place):
        return not exists(folder)
    return is_hub_model(place) and not exists(folder) and not _runs_in(folder.parent)


def _meant(place: Path) -> Path | None:
    """The run of a configuration, around or within a folder, or of almost that name."""
    around = [folder for folder in place.parents if _is_run(folder)]
    near = around or _runs_of(place) or _runs_in(place)
    if not near:
        names = [run.name for run in _runs_in(place.parent)]
        close = get_close_matches(place.name, names, cutoff=0.5)
        near = [place.with_name(name) for name in close]
    return near[0] if near else None


def _runs_of(config: Path) -> list[Path]:
    if not is_file(config):
        return []
    try:
        run = Path(load_config(config).output.dir)
    except ConfigError:  # it is some other file
        return []
    return [run] if _is_run(run) else []


def _runs_in(folder: Path) -> list[Path]:
    return sorted(filter(_is_run, folder.iterdir())) if is_dir(folder) else []


def _is_run(folder: Path) -> bool:
    return exists(RunPaths(folder).adapter) or exists(RunPaths(folder).metrics)


def _holds_adapter(folder: Path) -> bool:
    return is_file(folder / "adapter_config.json")


def _model_like(path: Path) -> str:
    """A question for the model of almost that name beside it, or nothing."""
    folder = path.expanduser().parent
    if not is_dir(folder):
        return ""
    models = [entry.name for entry in folder.iterdir() if is_file(entry / "config.json")]
    near = get_close_matches(path.name, models, n=1)
    return f"did you mean {path.with_name(near[0])}?" if near else ""


def is_nowhere(base: str) -> bool:
    """Whether a base is neither a folder, nor a GGUF file, nor has a name of the hub."""
    path = Path(base).expanduser()
    return not (is_dir(path) or _is_gguf(path) or is_hub_model(base) or is_hub_file(base))


def _is_gguf(path: Path) -> bool:
    return path.suffix == GGUF and is_file(path)


# ---- how prompts are written ---------------------------------------------------------------------


def prompt_of_run(settings: Config, source: OpenedModel) -> PromptFormat:
    """How prompts are written for what a run learns from."""
    objective = settings.train.objective
    return prompt_of_data(settings.require_train(), source.tokenizer, objective)


def run_prompts(
    settings: Config, source: OpenedModel, written: PromptFormat, data: Dataset
) -> tuple[Prompt, ...]:
    """The prompts of ``eval.sample_prompts``, written as the run's rows are, or of the data."""
    most = longest_text(source.pretrained.config)
    own, most_new = settings.eval.sample_prompts, settings.eval.sample_max_new_tokens
    if not own:
        return tuple(replace(prompt, most=most_new) for prompt in sample_prompts(data))
    more = most_new or OWN_TOKENS
    prompts = []
    for number, text in enumerate(own, 1):
        ids = written.ids([{"role": "user", "content": text}])
        if not ids:
            raise ConfigError(f"eval.sample_prompts: prompt {number} has no token")
        if most is not None and len(ids) + more > most:
            raise ConfigError(
                f"eval.sample_prompts: prompt {number} has {len(ids):,} tokens, and with the "
                f"{more:,} of an answer it is longer than the {most:,} that the model takes"
            )
        prompts.append(Prompt(ids, [], more))
    return tuple(prompts)


def tokenizer_for(source: OpenedModel, adapter: str | None) -> Tokenizer:
    """The base's tokenizer; what is kept beside the adapter where that has more tokens."""
    has_none = not is_there(source.path / "tokenizer.json")
    kept = None if adapter is None else tokenizer_folder(adapter)
    own = None if kept is None else Tokenizer.from_folder(kept)
    if own is not None and (has_none or own.vocab_size > source.tokenizer.vocab_size):
        return own
    return source.tokenizer


def prompt_for(source: OpenedModel, adapter: str | None) -> PromptFormat:
    """How prompts are written for a base, or for an adapter as it was trained.

    What is kept beside the adapter counts, else the chat template that its run names, else the
    base's own.
    """
    folder = source.path if adapter is None else tokenizer_folder(adapter)
    if folder is not None and (adapter is None or exists(folder / PROMPT_FORMAT)):
        return read_prompt_files(folder)
    run = None if adapter is None else find_run(adapter)
    if run is None:
        return read_prompt_files(folder or source.path)
    setting = config_of_run(run).data.chat_template
    return PromptFormat("chat", source.tokenizer, find_chat_template(setting, source.tokenizer))


# ---- opening -------------------------------------------------------------------------------------


def _checked(memory: str | int | None) -> str | int | None:
    """A size as the configuration takes it."""
    if memory is None:
        return None
    settings = {"model": {"path": "."}, "device": {"memory": memory}}
    return Config.model_validate(settings).device.memory


def open_adapter(
    adapter: str | PathLike[str],
    model: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    *,
    quant: QuantConfig | None = None,
    compute_dtype: ComputeDtype | None = None,
    gpu: str | None = None,
    backend: str | None = None,
    memory: str | int | None = None,
) -> QLoRAModel:
    """Opens an adapter on its base as it was trained: by its run's config.yaml, where it has one.

    Args:
        adapter: Folder of a run, or of a PEFT adapter such as one of a run's checkpoints.
        model: Folder or hub name of the base; by default what the run or the adapter names.
        observer: Is told what goes on, and if it is not known how the adapter was trained.
        quant: How the base's linear layers are stored, whatever the run says.
        compute_dtype: Element type of matmul operands, likewise.
        gpu: The GPU, likewise.
        backend: The WebGPU implementation, likewise.
        memory: Memory of the device that may be taken, such as ``"8GiB"``, likewise; what has no
            room waits in host memory.
    """
    observer = observer or Unwatched()
    adapter = adapter_in(str(adapter)) or str(adapter)
    settings = Config(model=ModelConfig(path=str(model or existing_base(adapter))))
    given = {
        "quant": {} if quant is None else quant.model_dump(),
        "train": {"compute_dtype": compute_dtype},
        "device": {"gpu": gpu, "backend": backend, "memory": _checked(memory)},
    }
    settings = opened_as_trained(settings, adapter, observer, without_none(given))
    source = OpenedModel.open(settings.model.path)
    opened = load_adapted(source, adapter, settings, observer)
    opened.read_prompts = partial(prompt_for, source)
    return opened
