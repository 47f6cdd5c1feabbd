"""Steps in Python with the kernels of a page, to compare those of a browser with."""

import json

import numpy as np
from safetensors.numpy import save_file
from support.tiny_tokenizer import write_folder

from qlora_wgpu.bench.workload import RandomFolder
from qlora_wgpu.data.examples import Example
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel, device_layout
from qlora_wgpu.training.batching import BatchSampler, padded_batch
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.preferences import training_options


def examples(vocab: int, count: int = 40, longest: int = 59) -> list[Example]:
    """Rows of random tokens, some of which are trained on."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        ids = rng.integers(0, vocab, int(rng.integers(5, longest + 1))).astype(np.int32)
        made.append(Example(ids, np.where(rng.random(len(ids)) < 0.6, ids, -100).astype(np.int32)))
    return made


def as_json(rows: list[Example]) -> list[dict[str, list[int]]]:
    """The same as a page is given them."""
    return [{"ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in rows]


def random_model(config: dict, folder):
    """A model folder of random weights and bytes as tokens."""
    random = RandomFolder(config)
    folder.mkdir(parents=True)
    tensors = {name: random[name].read().copy() for name in random.names()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_folder(folder, {"bos_token": "<s>", "eos_token": "</s>"})
    return folder


def in_python(config, rows, steps, device=None):
    """Losses and the adapter after some steps, with the page's kernels, and the model."""
    model = model_of(config, device)
    plan = plan_of(config, rows)
    optimizer = Optimizer(model, config.optim, plan.total_steps)
    losses = []
    for step in range(steps):
        accumulate(model, config, rows, step)
        optimizer.step(step + 1)
        sums = model.read_stats()
        model.zero_stats()
        losses.append(float(sums[0]) / float(sums[1]))
    return losses, model.read_flat(model.adapter.parameters), model


def model_of(config, device=None):
    """A run's model as its training begins."""
    device = device or Device()
    device.profile = CPU_PROFILE
    layout = device_layout(
        Pretrained.open(config.model.path), config.lora, config.quant, config.train.compute_dtype,
        device, forms=AdapterDtypes.of(config),
    )  # fmt: skip
    options = training_options(config.train)
    return QLoRAModel(layout, device, seed=config.train.seed, options=options)


def plan_of(config, rows):
    """The run's division of rows into steps."""
    return BatchSampler.of(np.array([len(row) for row in rows]), config)


def accumulate(model, config, rows, step):
    """Adds up the gradient of a step, counted from 0."""
    plan = plan_of(config, rows)
    for index, chosen in enumerate(plan.blocks(step)):
        batch = padded_batch(
            [[rows[i] for i in row] for row in chosen], plan.batch_size, config.data.max_seq_length
        )
        model.accumulate(
            *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
            dropout_key=plan.dropout_key(step + 1, index) if model.is_random else None,
        )


def gradient(config, rows, device):
    """The gradient of the first step, at parameters that ``families.html`` has, too."""
    model = model_of(config, device)
    flat = model.read_flat(model.adapter.parameters)
    away = ((np.arange(len(flat)) * 7919) % 1009 / 1009 - 0.5) / 100
    model.write_parameters((flat + away).astype(np.float32))
    accumulate(model, config, rows, 0)
    return model.read_flat(model.adapter.gradient)


def likeliest(model, prompt, count):
    """The tokens that follow a prompt, each the likeliest, computed without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(np.array([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
