"""``eval``: the held-out loss of a base and an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from qlora_wgpu import runs
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._options import (
    FILE_OR_FOLDER,
    OutputFile,
    allow_code_option,
    batch_option,
    max_new_tokens_option,
    overrides_argument,
)
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.runs.evaluation import Evaluation, GenerationEval, HeldOutLoss
from qlora_wgpu.visible import visible, visible_json

_SHOWN_LABELS = 20  # of a confusion matrix in the terminal


@click.command("eval")
@click.argument("config", type=click.Path())
@overrides_argument
@click.option(
    "--adapter",
    type=FILE_OR_FOLDER,
    help="Folder of a PEFT adapter; by default the run's.",
)
@click.option(
    "--data",
    "data_path",
    type=FILE_OR_FOLDER,
    help="Held-out data to evaluate on, instead of data.eval.",
)
@click.option(
    "--generate",
    "answers",
    is_flag=True,
    help="Also generate the first answer of each row, greedily, and report exact matches.",
)
@click.option(
    "--predictions",
    "file",
    type=OutputFile(),
    help="JSONL file for generated answers: prompt, reference, prediction, exact_match and "
    "base_prediction of each row. Implies --generate.",
)
@max_new_tokens_option
@batch_option("Number of answers to generate at a time.")
@allow_code_option
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def evaluate(
    config: str,
    overrides: tuple[str, ...],
    adapter: str | None,
    data_path: str | None,
    answers: bool,
    file: Path | None,
    max_new_tokens: int,
    batch: int,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Measure held-out loss and perplexity of base and adapter.

    CONFIG is a run's YAML or its folder, such as runs/first. The adapter in its output.dir is
    evaluated on its held-out data (data.eval or data.eval_split), that of GRPO and RLOO by its
    rewards. An adapter in its run's folder is
    opened with the settings of the run's config.yaml; overrides take precedence.
    """
    console = Terminal(stderr=as_json)
    with Display(console) as display:
        result = runs.evaluate(
            config, display, adapter=adapter, data=data_path, overrides=overrides,
            generate=GenerationEval(max_new_tokens, batch) if answers or file is not None else None,
            allow_code=allow_code,
        )  # fmt: skip
    _show(console, result, as_json=as_json)
    if file is not None:  # last, so that an error here loses nothing that is shown
        write_file(file, _lines(result))


def _show(console: Terminal, result: Evaluation, *, as_json: bool) -> None:
    """Prints the metrics, as a table or JSON."""
    matches = _matches(result)
    losses = {} if result.base is None else {"base": result.base}
    if result.adapter is not None:
        losses["adapter"] = result.adapter
    if as_json:
        metrics: dict[str, Any] = {"data": result.data, "adapter_path": result.adapter_path}
        for name, row in losses.items():
            if row.metrics:
                metrics[name] = {"loss": row.loss, _counted(result): row.tokens, **row.metrics}
                if row.confusion_matrix is not None:
                    metrics[name]["labels"] = list(row.labels)
                    metrics[name]["confusion_matrix"] = row.confusion_matrix
                continue
            metrics[name] = {
                "loss": row.loss,
                "perplexity": row.perplexity,
                "mean_token_accuracy": row.token_accuracy,
                "tokens": row.tokens,
                **({"exact_match": matches[name]} if matches else {}),
            }
        write_json(metrics)
        return
    if result.base is None or result.base.metrics:
        counted = _counted(result)
        _print_metrics(console, losses, "answers or pairs" if counted == "answers" else counted)
        return
    table = Table(box=None)
    columns = ["", "loss", "perplexity", "token accuracy", "tokens"]
    for name in [*columns, *(["exact match"] if matches else [])]:
        table.add_column(name, justify="right" if name else "left")
    for name, row in losses.items():
        share = f"{row.token_accuracy or 0.0:.1%}"
        values = [f"{row.loss:.4f}", f"{row.perplexity:,.2f}", share, f"{row.tokens:,}"]
        table.add_row(name, *values, *([f"{matches[name]:.1%}"] if matches else []))
    console.print(table)


def _counted(result: Evaluation) -> str:
    """What an evaluation with metrics counts."""
    if result.base is None:
        return "rows"
    return "completions" if "reward" in result.base.metrics else "answers"


def _matches(result: Evaluation) -> dict[str, float]:
    """The share of exact matches of base and adapter; empty if nothing was generated."""
    given = {"base": result.base_predictions, "adapter": result.adapter_predictions}
    return {
        name: sum(each.exact_match for each in answers) / len(answers)
        for name, answers in given.items()
        if answers
    }


def _lines(result: Evaluation) -> bytes:
    """A line of JSON for each row, with the answers of adapter and base."""
    lines = []
    for base, own in zip(
        result.base_predictions, result.adapter_predictions or result.base_predictions, strict=True
    ):
        row: dict[str, Any] = {
            "prompt": own.prompt,
            "reference": own.reference,
            "prediction": own.prediction,
            "exact_match": own.exact_match,
        }
        if result.adapter_predictions:
            row["base_prediction"] = base.prediction
        lines.append(visible_json(row))
    return "".join(line + "\n" for line in lines).encode()


def _print_metrics(console: Terminal, losses: dict[str, HeldOutLoss], what: str) -> None:
    """A row for each metric, and a classifier's confusion matrix."""
    table = Table(box=None)
    for name in ("", *losses):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("loss", *(f"{row.loss:.4f}" for row in losses.values()))
    names = dict.fromkeys(name for row in losses.values() for name in row.metrics)
    for name in names:
        table.add_row(name, *(f"{row.metrics.get(name, 0.0):.4f}" for row in losses.values()))
    table.add_row(what, *(f"{row.tokens:,}" for row in losses.values()))
    console.print(table)
    for row in losses.values():
        if row.confusion_matrix is not None and len(row.labels) <= _SHOWN_LABELS:
            console.print(_confusion(row))


def _confusion(row: HeldOutLoss) -> Table:
    """A row for each true label, a column for each predicted one."""
    assert row.confusion_matrix is not None
    table = Table(box=None, title="true label by row, predicted by column", title_justify="left")
    is_single = len(row.confusion_matrix[0]) == len(row.labels) and not isinstance(
        row.confusion_matrix[0][0], list
    )
    columns = row.labels if is_single else ("true negatives", "false positives", "false negatives",
                                            "true positives")  # fmt: skip
    for name in ("", *columns):
        table.add_column(visible(name), justify="right" if name else "left")
    for name, counts in zip(row.labels, row.confusion_matrix, strict=True):
        flat = counts if is_single else [count for part in counts for count in part]
        table.add_row(visible(name), *(f"{count:,}" for count in flat))
    return table
