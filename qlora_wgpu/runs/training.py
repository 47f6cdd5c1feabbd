"""A whole training run: from a configuration to an adapter and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import Overrides
from qlora_wgpu.config.run_paths import RunPaths
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.budget import Fit
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.data import RunData, read_run_data
from qlora_wgpu.runs.opening import (
    OpenedModel,
    checking_device,
    load_model,
    open_device,
    run_launches,
    verified_layout,
)
from qlora_wgpu.runs.planning import plan_layout
from qlora_wgpu.runs.reporting import Reporter
from qlora_wgpu.runs.resolve import base_in, prompt_of_run, run_prompts
from qlora_wgpu.runs.samples import SampleTexts, Writer, writer_of
from qlora_wgpu.runs.settings import (
    AnyConfig,
    as_config,
    check_init_from,
    found_again,
    load_init_from,
    require_init_from,
    require_own_peers,
)
from qlora_wgpu.training import Observer, RunSetup, Sample, TrainResult, checkpoint_folders
from qlora_wgpu.training.callbacks import NO_CALLBACKS, Callbacks
from qlora_wgpu.training.checkpoints import start_of
from qlora_wgpu.training.data import source_figures
from qlora_wgpu.training.executor import Executor
from qlora_wgpu.training.integrations import services
from qlora_wgpu.training.observers import Events
from qlora_wgpu.training.preferences import training_options
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_log import RunLog
from qlora_wgpu.training.samples import keep_prompt, log_texts
from qlora_wgpu.training.start import check_output, refuse_both


def train(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    overrides: Overrides = (),
    callbacks: Callbacks = NO_CALLBACKS,
) -> TrainResult:
    """Fine-tunes a model: all that ``qlora_wgpu.train`` does, without a word.

    Args:
        config: As ``as_config`` takes it.
        observer: Is told what goes on; an ``Events`` is the run's own hub.
        overwrite: Whether a run in ``output.dir`` may be replaced.
        resume: Whether the run in ``output.dir`` goes on.
        overrides: Other values, as ``load_config`` takes them.
        callbacks: Functions that are called between steps.
    """
    settings = as_config(config, overrides)
    require_own_peers(config, settings, overrides)
    refuse_both(overwrite=overwrite, resume=resume)
    events = Events.of(observer)
    events.forget_stop()
    if resume:
        settings = found_again(settings, events)
    page = Reporter(settings, events)
    events.subscribe(page)
    try:
        return _train(settings, events, page, callbacks, overwrite=overwrite, resume=resume)
    except BaseException as err:
        page.failed(err)
        raise


def _train(
    settings: Config, events: Events, page: Reporter, callbacks: Callbacks, *,
    overwrite: bool, resume: bool,
) -> TrainResult:  # fmt: skip
    settings.require_train()
    check_output(settings, overwrite=overwrite, resume=resume)
    require_init_from(settings.lora)
    base = base_in(settings)
    device = open_device(settings.device, events)  # says that there is none before data is read
    source = OpenedModel.open(base, settings.model)  # and what is not supported
    for text in source.notes:
        events.note(text)
    check_init_from(source.pretrained, settings.lora)
    data = read_run_data(settings, source, events)
    prompt = prompt_of_run(settings, source)  # now that the data is there
    prompts = run_prompts(settings, source, prompt, data.held_out or data.train)
    data = replace(data, prompts=prompts)
    events.check()
    layout = None
    if settings.cluster.scheduler is None:
        fitted = plan_layout(settings, source.pretrained, data, device, events)
        settings, layout = _as_fitted(settings, fitted), fitted.layout
    opening = _computing(settings, source, data, device, layout, events, resume=resume)
    with opening as (model, executor, write):
        events.setup(_setup(settings, model, data))
        texts = _texts(settings, write, source, data, prompt)
        events.activity("writing texts before training")
        samples = texts.before()
        _tell_samples(samples, page, events)
        output, shown = Path(settings.output.dir), settings.model_dump()
        for service in services(settings.log.report_to, output, shown, resume=resume):
            events.subscribe(service, on_error="drop")
        run = Run(
            model, settings, events, data.train, data.held_out, overwrite=overwrite, resume=resume,
            executor=executor, texts=texts, callbacks=callbacks,
        )  # fmt: skip
        try:
            result = run.train()
        finally:
            events.close()
        keep_prompt(settings, source.path, prompt, result, events)
        if not result.interrupted:
            events.activity("writing texts after training")
            samples = _after(texts, samples, result, events)
            _tell_samples(samples, page, events)
    result = replace(result, sample=samples[0], samples=samples)
    reports = page.ended(result)
    events.reported(reports)
    result = replace(result, reports=reports)
    page.keep(result)
    events.check()
    return result


def _tell_samples(samples: tuple[Sample, ...], page: Reporter, events: Events) -> None:
    events.activity("")
    page.take_samples(samples)
    events.sampled(samples[0])


def _texts(
    settings: Config, write: Writer, source: OpenedModel, data: RunData, prompt: PromptFormat
) -> SampleTexts:
    """The texts of a run; an answer to a prompt of the user's own ends where a turn does."""
    own = bool(settings.eval.sample_prompts)
    ends = prompt.stop_ids if own else ()
    return SampleTexts(write, source.tokenizer, data.prompts, ends=ends, all_of_them=own)


def _after(
    texts: SampleTexts, samples: Sequence[Sample], result: TrainResult, observer: Observer
) -> tuple[Sample, ...]:
    """The texts after training; ``samples.jsonl`` gets them, too."""
    written = list(texts.write())
    if not result.was_finished:
        log_texts(RunLog(RunPaths(result.run_dir).samples, observer.warning), result.steps, written)
    pairs = zip(samples, written, strict=True)
    return tuple(replace(sample, after=each.text) for sample, each in pairs)


def _as_fitted(settings: Config, fitted: Fit) -> Config:
    """The settings of a run whose layers are recomputed, if they have to be."""
    if fitted.options.checkpointing == settings.train.gradient_checkpointing:
        return settings
    train = settings.train.model_copy(update={"gradient_checkpointing": True})
    return settings.model_copy(update={"train": train})


@contextmanager
def _computing(
    settings: Config, source: OpenedModel, data: RunData, device: Device,
    layout: ModelPlan | None, observer: Observer, *, resume: bool,
) -> Iterator[tuple[AdapterModel, Executor | None, Writer]]:  # fmt: skip
    """The adapter's model, who computes its micro-batches if not it itself, and its texts."""
    if layout is not None:
        if resume and settings.lora.changes_base:  # it need not be found again
            start = start_of(checkpoint_folders(Path(settings.output.dir)))
            layout.adapter.start = None if start is None else layout.adapter.join(start)
        model = _open_model(settings, source, data, device, layout, observer)
        yield model, None, writer_of(model)
        return
    from qlora_wgpu.runs.clustered import opened_cluster

    with opened_cluster(settings, source, data, device, observer) as (owned, cluster):
        yield owned, cluster, cluster.text


def _open_model(
    settings: Config, source: OpenedModel, data: RunData, device: Device, layout: ModelPlan,
    observer: Observer,
) -> QLoRAModel:  # fmt: skip
    """The model on its device, ready for its longest step."""
    assert source.pretrained.folder is not None
    source.pretrained.folder.start_fingerprint()  # checkpoints keep it
    layout = verified_layout(
        device,
        lambda: checking_device(settings.device),
        lambda layout: run_launches(settings, layout, data.length),
        layout,
        observer,
    )
    options = training_options(settings.train, weighted=settings.data.has_weights)
    model = load_model(layout, device, observer, seed=settings.train.seed, options=options)
    load_init_from(model, settings.lora)
    # The largest plan first, so that the smaller ones find room in its slots.
    model.prepare(settings.rows_at_once, data.length)
    return model


def _setup(settings: Config, model: AdapterModel, data: RunData) -> RunSetup:
    held_out = data.held_out
    return RunSetup(
        device=model.device.name,
        base=settings.model.path,
        scheme=model.layout.pretrained.scheme(settings.quant),
        compute_dtype=model.compute_dtype,
        rank=model.adapter.config.r,
        adapted_layers=len(model.adapter.adapted),
        adapter_parameters=model.adapter.num_parameters,
        batch_size=settings.train.per_device_train_batch_size,
        accumulation=settings.train.gradient_accumulation_steps,
        train_rows=data.train.num_rows,
        train_tokens=data.train.num_label_tokens,
        sources=source_figures(data.train),
        eval_rows=None if held_out is None else held_out.num_rows,
        eval_tokens=None if held_out is None else held_out.num_label_tokens,
    )
