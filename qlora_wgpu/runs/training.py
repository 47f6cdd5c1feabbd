"""A whole training run, from a configuration to an adapter and its report."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cluster.owner import Cluster
from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import Overrides
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data import bucket_length
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.grpo.completer import MOST_AT_ONCE
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.sampler import RolloutSampler
from qlora_wgpu.images.thumbnails import thumbnail
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.steps import StepKind
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.runs.data import RunData, read_run_data
from qlora_wgpu.runs.images import features_of
from qlora_wgpu.runs.opening import OpenedModel, load_training, open_device, place_training
from qlora_wgpu.runs.placement import with_fitting_rollouts
from qlora_wgpu.runs.prompts import (
    SampleTexts,
    Writer,
    longest_sample,
    prompt_of_run,
    run_prompts,
    writer_of,
)
from qlora_wgpu.runs.reporting import Reporter
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.rewards import reward_model_bytes, reward_models
from qlora_wgpu.runs.settings import (
    AnyConfig,
    as_config,
    check_init_from,
    load_init_from,
    relocate_paths,
    require_init_from,
    require_own_peers,
)
from qlora_wgpu.runs.workload import DeviceSpec, RolloutShape, RunShapes, TrainingWorkload
from qlora_wgpu.training import Observer, RunSetup, Sample, TrainResult, checkpoint_folders
from qlora_wgpu.training.batching import BatchSampler, sorted_by_length
from qlora_wgpu.training.callbacks import TrainerCallback, subscribe_callbacks
from qlora_wgpu.training.checkpoints import start_of
from qlora_wgpu.training.data import source_shares
from qlora_wgpu.training.evaluation import log_texts
from qlora_wgpu.training.finish import keep_prompt
from qlora_wgpu.training.integrations import services
from qlora_wgpu.training.observers import Events
from qlora_wgpu.training.policies import RolloutPlan, policy_of
from qlora_wgpu.training.preferences import Block, KLPairs, in_blocks, samples_of
from qlora_wgpu.training.run import Run
from qlora_wgpu.training.run_folder import RunLog
from qlora_wgpu.training.scoring import with_labels
from qlora_wgpu.training.start import check_output, refuse_both

# ---- the run -------------------------------------------------------------------------------------


def train(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    overrides: Overrides = (),
    callbacks: Sequence[TrainerCallback] = (),
    reward_funcs: Sequence[Callable[..., Any]] = (),
    allow_code: bool = False,
) -> TrainResult:
    """Fine-tunes a model as ``qlora_wgpu.train`` does, without printing anything.

    An ``Events`` as observer becomes the run's own.
    """
    settings = as_config(config, overrides)
    require_own_peers(config, settings, overrides)
    refuse_both(overwrite=overwrite, resume=resume)
    events = Events.of(observer)
    subscribe_callbacks(events, callbacks)
    events.forget_stop()
    if resume:
        settings = relocate_paths(settings, events)
    page = Reporter(settings, events)
    events.subscribe(page)
    rewards = _rewards_of(settings, reward_funcs, allow_code=allow_code)
    try:
        return _train(
            settings, events, page, callbacks, rewards, overwrite=overwrite, resume=resume
        )
    except BaseException as err:
        page.failed(err)
        raise
    finally:
        if rewards is not None:
            rewards.close()


def _rewards_of(
    settings: Config, functions: Sequence[Callable[..., Any]], *, allow_code: bool
) -> RewardSet | None:
    """The reward functions of GRPO and RLOO; None for other objectives."""
    if settings.train.objective in POLICY_OBJECTIVES:
        return RewardSet.of(
            settings, functions, allow_code=allow_code, reward_model=reward_models(settings.device)
        )
    if functions:
        raise ConfigError(
            f"reward_funcs is not used by train.objective: {settings.train.objective}: set it to "
            "grpo or rloo"
        )
    return None


def _train(
    settings: Config, events: Events, page: Reporter, callbacks: Sequence[TrainerCallback],
    rewards: RewardSet | None, *, overwrite: bool, resume: bool,
) -> TrainResult:  # fmt: skip
    settings.require_train()
    settings = with_labels(settings)
    check_output(settings, overwrite=overwrite, resume=resume)
    require_init_from(settings.lora)
    base = base_in(settings)
    device = open_device(settings.device, events)  # an error before data is read if there is none
    source = OpenedModel.open(base, settings.model).for_objective(settings.train)  # or refused
    for text in source.notes:
        events.note(text)
    check_init_from(source.pretrained, settings.lora)
    data = read_run_data(settings, source, events)
    prompt = prompt_of_run(settings, source)  # once the data has been read
    if not settings.train.is_scored:  # others generate sample texts
        prompts = run_prompts(settings, source, prompt, data.held_out or data.train)
        data = replace(data, prompts=prompts)
    events.check()
    features = features_of(settings, source, data.images, device, events)
    events.check()
    shapes = run_shapes(settings, data)
    workload = TrainingWorkload.of(
        settings,
        source.pretrained,
        data.length,
        shapes,
        rollout_shape(data, settings),
        images=features is not None,
    )
    if settings.cluster.scheduler is None:  # else workers do
        workload = with_fitting_rollouts(workload, device)
    if rewards is not None and rewards.models:
        nbytes = reward_model_bytes(settings, DeviceSpec.of(device))
        workload = replace(workload, reward_models=nbytes)
    opening = _opened_model(settings, source, workload, data, device, events, resume=resume)
    with opening as (settings, model, executor, write):
        events.setup(_setup(settings, model, data))
        if rewards is not None and rewards.models:
            events.activity("loading reward models")
            rewards.load_models()
            events.activity("")
        # Answers to prompts of the configuration, and completions, end with the turn
        own = bool(settings.eval.sample_prompts) or rewards is not None
        texts = SampleTexts(
            write, source.tokenizer, data.prompts, ends=prompt.stop_ids if own else (),
            all_of_them=own, features=features or {},
        )  # fmt: skip
        samples: tuple[Sample, ...] = ()
        if data.prompts:
            events.activity("generating samples before training")
            samples = texts.before()
            _report_samples(samples, page, events, data)
        output, dumped = Path(settings.output.dir), settings.model_dump()
        for service in services(settings.log.report_to, output, dumped, resume=resume):
            events.subscribe(service, on_error="drop")
        run = Run(
            model, settings, events, data.train, data.held_out, overwrite=overwrite, resume=resume,
            executor=executor, texts=texts if samples else None, callbacks=callbacks,
            features=features,
            rollouts=None if rewards is None else partial(
                RolloutSampler, rewards=rewards, tokenizer=source.tokenizer,
                stop_ids=prompt.stop_ids,
                at_once=MOST_AT_ONCE if workload.rollouts is None else workload.rollouts.count,
                sample=None if executor is None else executor.complete,
            ),
        )  # fmt: skip
        try:
            result = run.train()
        finally:
            events.close()
        keep_prompt(settings, source.path, prompt, result, events)
        if samples and not result.interrupted:
            events.activity("generating samples after training")
            samples = _after(texts, samples, result, events)
            _report_samples(samples, page, events, data)
    result = replace(result, sample=next(iter(samples), None), samples=samples)
    reports = page.ended(result)
    events.reported(reports)
    result = replace(result, reports=reports)
    page.keep(result)
    events.check()
    return result


_PICTURES = 4  # of a prompt in the report


def _report_samples(
    samples: tuple[Sample, ...], page: Reporter, events: Events, data: RunData
) -> None:
    events.activity("")
    images = data.images
    pictures = [
        [thumbnail(images[key]) for key in prompt.images[:_PICTURES]] for prompt in data.prompts
    ]
    page.take_samples(samples, [[*filter(None, own)] for own in pictures])
    events.sampled(samples[0])


def _after(
    texts: SampleTexts, samples: Sequence[Sample], result: TrainResult, observer: Observer
) -> tuple[Sample, ...]:
    """The samples with the texts after training, which are also logged to ``samples.jsonl``."""
    written = list(texts.write())
    if not result.was_finished:
        log_texts(RunLog(RunPaths(result.run_dir).samples, observer.warning), result.steps, written)
    pairs = zip(samples, written, strict=True)
    return tuple(replace(sample, after=each.text) for sample, each in pairs)


@contextmanager
def _opened_model(
    settings: Config, source: OpenedModel, workload: TrainingWorkload, data: RunData,
    device: Device, observer: Observer, *, resume: bool,
) -> Iterator[tuple[Config, AdapterModel, Cluster | None, Writer]]:  # fmt: skip
    """The settings as placed, the model, the cluster if there is one, and the text generator."""
    if settings.cluster.scheduler is not None:
        from qlora_wgpu.runs.cluster import opened_cluster

        with opened_cluster(settings, source, workload, device, observer) as (owned, cluster):
            yield settings, owned, cluster, cluster.text
        return
    placed = place_training(settings, workload, data.computed_tokens, device, observer)
    assert isinstance(placed.workload, TrainingWorkload)
    if placed.workload.step.checkpointing != settings.train.gradient_checkpointing:
        train = settings.train.model_copy(update={"gradient_checkpointing": True})
        settings = settings.model_copy(update={"train": train})
    if resume and settings.lora.changes_base:  # the checkpoint has it, so it is not recomputed
        start = start_of(checkpoint_folders(Path(settings.output.dir)))
        adapter = placed.layout.adapter
        adapter.start = None if start is None else adapter.join(start)
    model = load_training(settings, placed, device, observer, observer)
    load_init_from(model, settings.lora)
    # The largest plan first, since smaller ones reuse its slots.
    model.prepare(settings.rows_at_once, data.length, images=bool(data.images))
    yield settings, model, None, writer_of(model)


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
        sources=source_shares(data.train),
        eval_rows=None if held_out is None else held_out.num_rows,
        eval_tokens=None if held_out is None else held_out.num_label_tokens,
    )


# ---- the shapes of everything that a run computes ------------------------------------------------

_PLANNED_STEPS = 2000  # whose batch lengths are planned

_Lengths = npt.NDArray[np.int64]


def run_shapes(settings: Config, data: RunData) -> RunShapes:
    """What a run computes in addition to its longest step, to plan its memory."""
    longest = max(settings.data.max_seq_length, data.plan.longest)
    if isinstance(data.plan, RolloutPlan):
        return _rollout_shapes(settings, data, data.plan, longest)
    rows, held_out = settings.rows_at_once, data.held_out
    preference = samples_of(settings.train)
    measured: Iterable[int] = ()
    answers: Iterable[tuple[StepKind, int]] = ()
    if preference is not None:
        measured, answers = _answer_shapes(data, preference, rows, longest)
    elif held_out is not None:
        limit = max(longest, held_out.longest)
        chunks = sorted_by_length(held_out, rows)
        measured = dict.fromkeys(
            bucket_length(max(len(example) for row in chunk for example in row), limit)
            for chunk in chunks
        )
    trained = _lengths(_training_blocks(data), data.train.lengths, longest)
    return RunShapes(
        tuple(len(prompt.ids) for prompt in data.prompts),
        longest_sample(data.prompts),
        tuple(measured),
        tuple(dict.fromkeys([bucket_length(data.plan.longest, longest), *trained])),
        tuple(answers),
    )


def _rollout_shapes(settings: Config, data: RunData, plan: RolloutPlan, longest: int) -> RunShapes:
    """What GRPO computes: micro-batches of all lengths that completions may have."""
    most = bucket_length(plan.longest, longest)
    shortest = int(plan.lengths.min()) + 1
    lengths = (bucket_length(tokens, longest) for tokens in range(plan.longest, shortest - 1, -1))
    others = [length for length in dict.fromkeys(lengths) if length != most]
    policy = policy_of(settings)
    assert policy is not None
    kinds: tuple[StepKind, ...] = ()
    if policy.needs_old or policy.has_reference:
        kinds = ("logps",)
    return RunShapes(
        tuple(len(prompt.ids) for prompt in data.prompts),
        longest_sample(data.prompts),
        (),
        (most, *others),
        tuple((kind, length) for kind in kinds for length in (most, *others)),
    )


def rollout_shape(data: RunData, settings: Config) -> RolloutShape | None:
    """The generation of GRPO and RLOO; None for other objectives."""
    plan = data.plan
    if not isinstance(plan, RolloutPlan):
        return None
    rows = [data.train, *filter(None, [data.held_out])]
    prompts = tuple(np.unique(np.concatenate([each.lengths for each in rows])).tolist())
    completions = plan.num_prompts * plan.num_generations
    capacity = prompts[-1] + settings.grpo.max_completion_length
    generations = plan.num_generations
    if data.held_out is not None:
        generations = min(generations, settings.grpo.num_generations_eval or generations)
    return RolloutShape(prompts, capacity, min(MOST_AT_ONCE, completions), generations)


def _answer_shapes(
    data: RunData, preference: Preference | Scoring, batch_size: int, longest: int
) -> tuple[Iterable[int], Iterable[tuple[StepKind, int]]]:
    """Lengths of evaluation batches, and kinds and lengths of the other steps, in order."""
    measured: dict[int, None] = {}
    others: dict[tuple[StepKind, int], None] = {}
    for dataset in (data.train, data.held_out):
        if dataset is None:
            continue
        limit = max(longest, dataset.longest)
        blocks = in_blocks(dataset, preference, batch_size)
        own = _lengths(blocks, dataset.lengths, limit)
        reference = list(own) if preference.has_reference else []
        if preference.has_divergence:
            examples = KLPairs(dataset, limit)  # each prompt with another's answer
            lengths = np.array([len(examples[i]) for i in range(len(dataset))], np.int64)
            reference += _lengths(blocks, lengths, limit)
            steps = blocks if dataset is not data.train else _training_blocks(data)
            compared = _lengths(steps, lengths, limit)
            others |= dict.fromkeys(("divergence", length) for length in compared)
        others |= dict.fromkeys(("sums", length) for length in reference)
        if dataset is data.held_out:
            measured |= dict.fromkeys(own)
    return measured, others


def _training_blocks(data: RunData) -> list[Block]:
    plan = data.plan
    assert isinstance(plan, BatchSampler)
    steps = range(min(plan.total_steps, _PLANNED_STEPS))
    return [block for step in steps for block in plan.blocks(step)]


def _lengths(blocks: Iterable[Block], lengths: _Lengths, longest: int) -> list[int]:
    """The distinct padded lengths of some micro-batches."""
    found: dict[int, None] = {}
    for block in blocks:
        tokens = max(int(lengths[list(row)].sum()) for row in block)
        found[bucket_length(tokens, max(longest, tokens))] = None
    return list(found)
