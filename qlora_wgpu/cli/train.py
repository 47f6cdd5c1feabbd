"""``train``: a YAML file in, a PEFT adapter out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.cli._display import Display, memory_line
from qlora_wgpu.cli._model import open_model
from qlora_wgpu.cli._preparing import check_ids, prepare_data
from qlora_wgpu.cli._sample import Sample
from qlora_wgpu.cli._tuning import tune_device
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.data import Dataset, Tokenizer, bucket_length
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.memory import plan_training_memory
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.cross_entropy import Objective
from qlora_wgpu.report import Facts, write_png, write_report
from qlora_wgpu.selfcheck import ensure_sound
from qlora_wgpu.training import (
    Trainer,
    TrainResult,
    check_same_run,
    holds_run,
    refuse_existing_run,
)
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.reporters import ObserverList, reporters
from qlora_wgpu.tuning.tuner import Task
from qlora_wgpu.version import __version__


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--overwrite", is_flag=True, help="Replace a run that output.dir already holds.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run in output.dir from its newest whole checkpoint, bit by bit as if it "
    "had not stopped; begins one where there is none.",
)
def train(config: str, overrides: tuple[str, ...], overwrite: bool, resume: bool) -> None:
    """Fine-tune a model as CONFIG, a YAML file, says.

    Values of CONFIG can be replaced: `qlora-wgpu train run.yaml optim.learning_rate=1e-4`.
    The run's folder (output.dir) gets adapter/, checkpoints/, config.yaml, metrics.jsonl and
    report.html. Ctrl-C stops it with its state saved.
    """
    console = Console()
    settings = load_config(config, overrides)
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other: choose one")
    run(console, settings, overwrite=overwrite, resume=resume)


def run(
    console: Console, settings: Config, *, overwrite: bool = False, resume: bool = False
) -> TrainResult:
    """Loads data and model, trains, and shows what came of it."""
    train_path = settings.require_train_path()
    output = Path(settings.output.dir)
    if resume and holds_run(output):
        check_same_run(output, settings)
    elif not overwrite and not resume:
        refuse_existing_run(output)
    folder = ModelFolder.open(settings.model.path)
    # Says what is not supported before data is read.
    architecture = find_family(folder.config).read(folder.config)
    vocabulary = architecture.vocab_size
    for text in architecture.notes:
        console.print(f"note: {text}", style="yellow", highlight=False)
    tokenizer = Tokenizer.from_folder(folder.path)
    data = prepare_data(console, settings.data, train_path, tokenizer)
    check_ids(train_path, data, vocabulary)
    held_out = None
    if settings.data.eval is not None:
        held_out = prepare_data(console, settings.data, settings.data.eval, tokenizer)
        check_ids(settings.data.eval, held_out, vocabulary)

    def open_device() -> Device:
        return Device(settings.device.adapter, settings.device.backend)

    device = open_device()
    with console.status("opening the device") as status:
        ensure_sound(device, open_device, status.update)
    longest = max(data.longest, held_out.longest if held_out is not None else 0)
    if settings.data.packing:
        longest = max(longest, BatchPlan.of(data.lengths, settings).longest)
    length = bucket_length(longest, settings.data.max_seq_length)
    _planned(settings, folder, device, length)  # what is too large is said before kernels are timed
    tune_device(
        console,
        settings.device,
        device,
        Task(
            folder.config,
            settings.lora,
            settings.quant,
            settings.train.compute_dtype,
            settings.train.per_device_train_batch_size,
            length,
        ),
        _tokens(settings, data, length),
    )
    console.print(memory_line("planned", _planned(settings, folder, device, length)))
    model = open_model(
        console,
        settings.model.path,
        lora=settings.lora,
        quant=settings.quant,
        compute_dtype=settings.train.compute_dtype,
        device=device,
        seed=settings.train.seed,
        gradient_checkpointing=settings.train.gradient_checkpointing,
    )
    _show_setup(console, settings, model, data, held_out)
    model.objective = Objective(settings.train.label_smoothing_factor, settings.train.z_loss_weight)
    model.neftune_noise_alpha = settings.train.neftune_noise_alpha
    if settings.lora.init_from is not None:
        model.load_adapter(settings.lora.init_from)
    # The largest plan first, so that the smaller ones find room in its slots.
    model.prepare(settings.train.per_device_train_batch_size, length)
    sample = Sample(model, tokenizer, held_out or data)
    before = sample.text()
    others = reporters(settings.log.report_to, output, settings.model_dump())
    with Display(console) as display:
        trainer = Trainer(
            model, settings, ObserverList([display, *others]), overwrite=overwrite, resume=resume
        )
        result = trainer.train(data, held_out)
    after = "" if result.interrupted else sample.text()
    texts = {
        "prompt": sample.prompt, "expected": sample.expected, "before": before, "after": after,
    }  # fmt: skip
    _show_result(console, result, texts)
    _write_report(console, settings, model, result, texts)
    return result


def _show_setup(
    console: Console, settings: Config, model: QLoRAModel, data: Dataset, held_out: Dataset | None
) -> None:
    adapter, train_settings = model.adapter, settings.train
    rows = [
        ("device", model.device.name),
        ("base", f"{settings.model.path} ({settings.quant.scheme}, {model.compute_dtype})"),
        (
            "adapter",
            f"r {adapter.config.r} on {len(adapter.targets)} layers: "
            f"{adapter.num_parameters:,} parameters",
        ),
        ("training data", f"{len(data):,} rows, {data.num_label_tokens:,} learnt tokens"),
        (
            "step",
            f"{train_settings.per_device_train_batch_size} rows x "
            f"{train_settings.gradient_accumulation_steps} micro-batches",
        ),
    ]
    if held_out is not None:
        rows.append(
            ("held-out data", f"{len(held_out):,} rows, {held_out.num_label_tokens:,} tokens")
        )
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)


def _tokens(settings: Config, data: Dataset, length: int) -> int:
    """About how many tokens will be computed, padding included."""
    train = settings.train
    step = train.per_device_train_batch_size * train.gradient_accumulation_steps
    return BatchPlan.of(data.lengths, settings).total_steps * step * length


def _planned(settings: Config, folder: ModelFolder, device: Device, length: int) -> Counter[str]:
    """What training will take on the device, by kind."""
    return plan_training_memory(
        folder.config,
        settings.lora,
        settings.quant,
        settings.train.compute_dtype,
        batch_size=settings.train.per_device_train_batch_size,
        seq=length,
        gradient_checkpointing=settings.train.gradient_checkpointing,
        max_binding=device.max_binding,
        profile=device.profile,
    )


def _show_result(console: Console, result: TrainResult, texts: dict[str, str]) -> None:
    if result.interrupted:
        console.print(
            f"stopped after step {result.steps}; its state is saved: `--resume` goes on",
            style="yellow",
        )
    table = Table(show_header=False, box=None)
    if result.eval_loss_before is not None and result.eval_loss is not None:
        table.add_row(
            "held-out loss", f"{result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after"
        )
    if result.stopped_early and result.best_step is not None:
        table.add_row("best", f"{result.best_eval_loss:.4f} after step {result.best_step}")
    for name, text in texts.items():
        table.add_row(name, text)
    table.add_row(
        "trained",
        f"{result.num_tokens:,} tokens in {result.seconds:,.0f} s, device memory at most "
        f"{result.peak_bytes / 2**20:,.1f} MiB",
    )
    table.add_row("adapter", str(result.adapter_dir))
    console.print(table, highlight=False, markup=False)


def _write_report(
    console: Console,
    settings: Config,
    model: QLoRAModel,
    result: TrainResult,
    texts: dict[str, str],
) -> None:
    """Writes report.html, and with matplotlib loss.png, into the run's folder."""
    path = result.run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    figures = {
        "steps": f"{result.steps:,}",
        "loss": _number(result.train_loss),
        "held-out before": _number(result.eval_loss_before),
        "held-out after": _number(result.eval_loss),
        "tokens": f"{result.num_tokens:,}",
        "seconds": f"{result.seconds:,.0f}",
        "adapter parameters": f"{model.adapter.num_parameters:,}",
        "device memory": f"{result.peak_bytes / 2**20:,.0f} MiB",
    }
    facts = Facts(
        title=f"{Path(settings.model.path).name} on {Path(settings.data.train or '').name}",
        subtitle=f"{model.device.name}; qlora-wgpu {__version__}; "
        f"{settings.quant.scheme}, {settings.train.compute_dtype}, rank {settings.lora.r}",
        figures={name: value for name, value in figures.items() if value},
        texts=texts,
        memory=model.device.memory.by_kind,
        config=settings.to_yaml(),
    )
    write_report(result.run_dir / "report.html", facts, rows)
    with_png = write_png(result.run_dir / "loss.png", rows)
    told = " and loss.png" if with_png else ""
    console.print(f"{result.run_dir / 'report.html'}{told} written", highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
