"""``estimate``: what training will take of a device's memory, and what fits, from config.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu.bench.shapes import find_shape
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.cli._sizes import read_bytes, whole_number
from qlora_wgpu.config import LoraConfig, QuantConfig, load_config
from qlora_wgpu.errors import ConfigError, OutOfMemoryError, QLoRAError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import GPU_PROFILE, Profile
from qlora_wgpu.model.memory import plan_training_memory

_LARGEST_BINDING = (1 << 31) - 1  # what most cards allow
_MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
_MOST_PLANNED = 1 << 24  # tokens of a micro-batch
_DTYPES = ("bfloat16", "float32")
_SEQ_STEP = 64  # in which sequences are tried


@dataclass(frozen=True)
class _EstimateRequest:
    """What is to be planned."""

    config: dict[str, Any]
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: str
    batch: int
    seq: int
    checkpointing: bool
    max_binding: int
    profile: Profile

    def plan(self) -> Counter[str]:
        return plan_training_memory(
            self.config,
            self.lora,
            self.quant,
            self.compute_dtype,
            batch_size=self.batch,
            seq=self.seq,
            gradient_checkpointing=self.checkpointing,
            max_binding=self.max_binding,
            profile=self.profile,
        )

    def total(self) -> int | None:
        """All bytes; None where there is more than kernels can count."""
        try:
            return sum(self.plan().values())
        except OutOfMemoryError:
            return None


@click.command()
@click.argument("target")
@click.argument("overrides", nargs=-1)
@click.option("--batch", metavar="N", help="Rows of a micro-batch.")
@click.option("--seq", metavar="N", help="Tokens of a row.")
@click.option("--rank", metavar="N", help="Rank of the adapter.")
@click.option("--checkpointing/--no-checkpointing", default=None, help="Recompute layers.")
@click.option("--scheme", metavar="nf4|none", help="How frozen layers are stored.")
@click.option("--dtype", metavar="|".join(_DTYPES), help="Type of matmul operands.")
@click.option("--budget", metavar="SIZE", help="Memory there is, such as 8GiB: shows what fits.")
@click.option("--json", "json_file", metavar="FILE", help="Where to write the figures.")
def estimate(
    target: str,
    overrides: tuple[str, ...],
    batch: str | None,
    seq: str | None,
    rank: str | None,
    checkpointing: bool | None,
    scheme: str | None,
    dtype: str | None,
    budget: str | None,
    json_file: str | None,
) -> None:
    """Show what training will take of a GPU's memory, without reading weights or using a GPU.

    TARGET is a run's YAML (with overrides, as for train), a config.json, a model folder or a
    shape's name, as for bench. The figures are the sum of the plan that training runs.
    """
    console = Console()
    limit = None if budget is None else read_bytes("--budget", budget)
    request, device = _request(target, overrides)
    if batch is not None:
        request = replace(request, batch=whole_number("--batch", batch))
    if seq is not None:
        request = replace(request, seq=whole_number("--seq", seq))
    if rank is not None:
        r = whole_number("--rank", rank)
        request = replace(request, lora=request.lora.model_copy(update={"r": r}))
    if checkpointing is not None:
        request = replace(request, checkpointing=checkpointing)
    if scheme is not None:
        quant = {
            **request.quant.model_dump(),
            "scheme": _one_of("--scheme", scheme, ("nf4", "none")),
        }
        request = replace(request, quant=QuantConfig.model_validate(quant))
    if dtype is not None:
        request = replace(request, compute_dtype=_one_of("--dtype", dtype, _DTYPES))
    if request.batch * request.seq > _MOST_PLANNED:
        raise ConfigError(
            f"{request.batch} rows of {request.seq} tokens are more than {_MOST_PLANNED:,} tokens "
            "at once, which is not planned: lower --batch or --seq"
        )
    memory = request.plan()
    fits = None if limit is None else _what_fits(request, limit)
    _show(console, target, request, device, memory, limit, fits)
    if json_file is not None:
        _write(json_file, request, device, memory, limit, fits)


def _request(target: str, overrides: tuple[str, ...]) -> tuple[_EstimateRequest, str]:
    max_binding, profile, name = _LARGEST_BINDING, GPU_PROFILE, "a GPU"
    try:
        device = Device()
    except QLoRAError:
        pass  # no adapter is needed: the plan is that of a common card
    else:
        max_binding, profile, name = device.max_binding, device.profile, device.name
    if Path(target).suffix in (".yaml", ".yml"):
        settings = load_config(target, list(overrides))
        train = settings.train
        config = _config_of(settings.model.path)
        request = _EstimateRequest(
            config, settings.lora, settings.quant, train.compute_dtype,
            train.per_device_train_batch_size, settings.data.max_seq_length,
            train.gradient_checkpointing, max_binding, profile,
        )  # fmt: skip
        return request, name
    if overrides:
        raise ConfigError(
            f"overrides such as {overrides[0]} belong to a YAML; for {target} there are options, "
            "see qlora-wgpu estimate --help"
        )
    config = dict(find_shape(target).config)
    request = _EstimateRequest(
        config, LoraConfig(), QuantConfig(), "bfloat16", 1, 1024, False, max_binding, profile
    )
    return request, name


def _config_of(path: str) -> dict[str, Any]:
    """A model's config.json; the weights beside it need not be there."""
    inside = Path(path).expanduser() / "config.json"
    return (
        read_json_object(inside)
        if inside.is_file()
        else dict(ModelFolder.without_weights(path).config)
    )


def _what_fits(request: _EstimateRequest, budget: int) -> dict[str, int]:
    """The most rows at the asked length, and the most tokens of one row; 0 for none."""
    most = max(_MOST_TOKENS // request.seq, 1)
    rows = _most(lambda n: replace(request, batch=n).total(), budget, most)
    most = _MOST_TOKENS // _SEQ_STEP
    steps = _most(lambda n: replace(request, batch=1, seq=n * _SEQ_STEP).total(), budget, most)
    return {"batch": rows, "seq": steps * _SEQ_STEP}


def _most(total: Callable[[int], int | None], budget: int, most: int) -> int:
    """The largest n up to ``most`` whose total fits; it grows about linearly, so few are made."""
    low, low_total = 0, 0
    high, high_total = most + 1, None
    guess = 1
    while high - low > 1:
        found = total(guess)
        if found is not None and found <= budget:
            # From the second on, the last two tell the slope.
            slope = max((found - low_total) / (guess - low), 1.0) if low else float(found)
            low, low_total = guess, found
        else:
            high, high_total = guess, found
            slope = max(((found or 2 * budget) - low_total) / (guess - low), 1.0)
        step = int((budget - low_total) / slope) if low > 1 or high_total else 1
        guess = min(max(low + step, low + 1), high - 1)
    return low


def _show(
    console: Console,
    target: str,
    request: _EstimateRequest,
    device: str,
    memory: Counter[str],
    budget: int | None,
    fits: dict[str, int] | None,
) -> None:
    checkpointed = ", gradient checkpointing" if request.checkpointing else ""
    console.print(
        f"{target}: batch {request.batch}, sequence {request.seq}, rank {request.lora.r}, "
        f"{request.quant.scheme}, {request.compute_dtype}{checkpointed}; planned for {device}",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("on the device")
    table.add_column("MiB", justify="right")
    for kind, nbytes in memory.most_common():
        table.add_row(kind, f"{nbytes / 2**20:,.1f}")
    table.add_row("total", f"{sum(memory.values()) / 2**20:,.1f}", style="bold")
    console.print(table)
    if budget is not None and fits is not None:
        verdict = "fits" if sum(memory.values()) <= budget else "does not fit"
        most = (
            f"at most batch {fits['batch']} at sequence {request.seq}"
            if fits["batch"]
            else f"nothing fits at sequence {request.seq}"
        )
        row = f", or sequence {fits['seq']} at batch 1" if fits["seq"] else ""
        console.print(f"{budget / 2**30:,.1f} GiB: {verdict}; {most}{row}", highlight=False)


def _write(
    name: str,
    request: _EstimateRequest,
    device: str,
    memory: Counter[str],
    budget: int | None,
    fits: dict[str, int] | None,
) -> None:
    figures = {
        "batch": request.batch,
        "seq": request.seq,
        "rank": request.lora.r,
        "scheme": request.quant.scheme,
        "compute_dtype": request.compute_dtype,
        "gradient_checkpointing": request.checkpointing,
        "device": device,
        "bytes": dict(memory),
        "total": sum(memory.values()),
        "budget": budget,
        "fits": fits,
    }
    try:
        Path(name).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"--json {name} cannot be written: {err.strerror}") from err


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{option} must be {' or '.join(allowed)}, got {value!r}")
    return value
