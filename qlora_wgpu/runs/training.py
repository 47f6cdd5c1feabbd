"""A whole training run: from a configuration to an adapter and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import Overrides
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.budget import Fit
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.data import RunData, read_run_data
from qlora_wgpu.runs.locating import base_in, prompt_of_run, run_prompts
from qlora_wgpu.runs.opening import (
    OpenedModel,
    checking_device,
    load_model,
    open_device,
    run_launches,
    sound_layout,
)
from qlora_wgpu.runs.planning import plan_layout
from qlora_wgpu.runs.reporting import Reporter
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
from qlora_wgpu.training import (
    Observer,
    RunSetup,
    Sample,
    Trainer,
    TrainResult,
    check_resumable,
    checkpoint_folders,
    refuse_existing_run,
    require_writable,
    settle_run,
    training_options,
)
from qlora_wgpu.training.checkpoints import start_of
from qlora_wgpu.training.computing import Computing
from qlora_wgpu.training.data import source_figures
from qlora_wgpu.training.observers import Guarded, ObserverList, Unwatched, Watched, reporters
from qlora_wgpu.training.run_folder import SAMPLES
from qlora_wgpu.training.run_log import RunLog
from qlora_wgpu.training.samples import keep_prompt, log_texts
from qlora_wgpu.training.steering import NO_CALLBACKS, Callbacks


def train(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    overrides: Overrides = (),
    callbacks: Callbacks = NO_CALLBACKS,
) -> TrainResult:
    """Fine-tunes a model: all that ``qlora-wgpu train`` does, without a word.

    The driver is checked the first time, memory is planned before weights are read, kernels are
    timed where the run is long, and ``output.dir`` gets the adapter, checkpoints, metrics.jsonl,
    config.yaml and report.html. Ctrl-C and SIGTERM end it early with its state saved.

    Args:
        config: A ``Config``, the path of a YAML file, or a mapping with its sections.
        observer: Is told what goes on; by default nobody is.
        overwrite: Whether a run in ``output.dir`` may be replaced.
        resume: Whether the run in ``output.dir`` goes on from its newest whole checkpoint, bit by
            bit; begins one where there is none. A finished one is left as it is.
        overrides: Other values, as ``load_config`` takes them.
        callbacks: Functions that are called between steps.

    Returns:
        The run's figures, a text before and after, and what was written.

    Raises:
        QLoRAError: As ``qlora_wgpu.train`` says.
    """
    settings = as_config(config, overrides)
    require_own_peers(config, settings, overrides)
    observer = observer or Unwatched()
    observer.forget_stop()
    if resume:
        settings = found_again(settings, observer)
    reporter = Reporter(settings, observer)
    everyone = ObserverList([Watched(observer), Watched(reporter)])
    try:
        return _train(settings, everyone, reporter, callbacks, overwrite=overwrite, resume=resume)
    except BaseException as err:
        reporter.failed(err)
        raise


def _train(
    settings: Config, observer: Observer, reporter: Reporter, callbacks: Callbacks, *,
    overwrite: bool, resume: bool,
) -> TrainResult:  # fmt: skip
    check_output(settings, overwrite=overwrite, resume=resume)
    require_init_from(settings.lora)
    base = base_in(settings)
    device = open_device(settings.device, observer)  # says that there is none before data is read
    source = OpenedModel.open(base, settings.model)  # and what is not supported
    for text in source.notes:
        observer.note(text)
    check_init_from(source.pretrained, settings.lora)
    data = read_run_data(settings, source, observer)
    prompt = prompt_of_run(settings, source)  # now that the data is there
    prompts = run_prompts(settings, source, prompt, data.held_out or data.train)
    data = replace(data, prompts=prompts)
    observer.check()
    layout = None
    if settings.cluster.scheduler is None:
        fitted = plan_layout(settings, source.pretrained, data, device, observer)
        settings, layout = _as_fitted(settings, fitted), fitted.layout
    opening = _computing(settings, source, data, device, layout, observer, resume=resume)
    with opening as (model, computing, write):
        observer.setup(_setup(settings, model, data))
        texts = _texts(settings, write, source, data, prompt)
        observer.activity("writing texts before training")
        samples = texts.before()
        observer.activity("")
        reporter.take_samples(samples)
        observer.sampled(samples[0])
        others = reporters(
            settings.log.report_to, Path(settings.output.dir), settings.model_dump(), resume=resume
        )
        guarded = [Guarded(reporter, observer.warning) for reporter in others]
        everyone = ObserverList([observer, *guarded])
        trainer = Trainer(
            model, settings, everyone, overwrite=overwrite, resume=resume, computing=computing,
            texts=texts, **vars(callbacks),
        )  # fmt: skip
        try:
            result = trainer.train_within(data.train, data.held_out)
        finally:
            for each in guarded:
                each.close()
        keep_prompt(settings, source.path, prompt, result, observer)
        if not result.interrupted:
            observer.activity("writing texts after training")
            samples = _after(texts, samples, result, observer)
            observer.activity("")
            reporter.take_samples(samples)
            observer.sampled(samples[0])
    result = replace(result, sample=samples[0], samples=samples)
    reports = reporter.ended(result)
    observer.reported(reports)
    observer.check()
    return replace(result, reports=reports)


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
        log_texts(RunLog(result.run_dir / SAMPLES, observer.warning), result.steps, written)
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
) -> Iterator[tuple[AdapterModel, Computing | None, Writer]]:  # fmt: skip
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


def check_output(settings: Config, *, overwrite: bool, resume: bool) -> None:
    """Makes sure that nothing is lost or mixed up, before anything takes time.

    Raises:
        ConfigError: If ``output.dir`` holds a run that may not be replaced, is another one, or is
            being written.
    """
    if overwrite and resume:
        raise ConfigError("overwrite and resume exclude each other: choose one")
    settings.require_train()
    output = Path(settings.output.dir)
    require_writable(output)
    if not (overwrite or resume):
        refuse_existing_run(output)
    settle_run(output)
    if resume:
        check_resumable(output, settings)


def _open_model(
    settings: Config, source: OpenedModel, data: RunData, device: Device, layout: ModelPlan,
    observer: Observer,
) -> QLoRAModel:  # fmt: skip
    """The model on its device, ready for its longest step."""
    assert source.pretrained.folder is not None
    source.pretrained.folder.start_fingerprint()  # checkpoints keep it
    layout = sound_layout(
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
