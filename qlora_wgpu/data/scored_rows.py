"""Rows of reward models and classifiers: pairs of whole sequences, and sequences with a label.

Trailing padding tokens are removed: transformers scores a sequence at its last token other than
padding, and what follows that token does not change its score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from qlora_wgpu.data.columns import EmptyRow, with_columns
from qlora_wgpu.data.messages import from_json, kind_of, with_system
from qlora_wgpu.data.preferences import Answer, prompt_of, side_of
from qlora_wgpu.data.row_formats import RowEncoder, TokenizedExample, encoded_or_raised
from qlora_wgpu.data.row_source import Answers, AnswerSource, Placed, RowSource, groups_of
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import CLASSES

_SHOWN = 8  # names in an error


def without_padding(encoded: TokenizedExample, tokenizer: Tokenizer) -> TokenizedExample:
    """The example without trailing padding tokens (the EOS token, if there is no other)."""
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    end = len(encoded.ids)
    while end > 1 and encoded.ids[end - 1] == padding:
        end -= 1
    if end == len(encoded.ids):
        return encoded
    return replace(encoded, ids=encoded.ids[:end], labels=encoded.labels[:end])


# ---- pairs ---------------------------------------------------------------------------------------


class RewardSource(AnswerSource):
    """Pairs of a chosen and a rejected sequence, as TRL's RewardTrainer encodes them."""

    def _encoder(self) -> RowEncoder:
        return RowEncoder(self.tokenizer, self.template, "all", use_flags=False)

    def _answers(self, row: dict[str, Any], row_format: str) -> Answers | DataError:
        try:
            if not row_format:
                return EmptyRow("the row has no value")
            margin_of(row)
            return sequences_of(row)
        except DataError as err:
            return err

    def _finished(
        self, row: Mapping[str, Any], side: TokenizedExample, name: str
    ) -> TokenizedExample:
        targets = (margin_of(row) if name == "chosen" else 0.0,)
        return replace(without_padding(side, self.tokenizer), answer=name, targets=targets)


def sequences_of(row: Mapping[str, Any]) -> tuple[Answer, Answer]:
    """The chosen and the rejected sequence, each with the prompt if there is one."""
    chosen, rejected = side_of(row, "chosen"), side_of(row, "rejected")
    prompt = prompt_of(row, chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None and not isinstance(prompt, str):
            prompt_turns, answers = prompt, (chosen, rejected)
            one, other = (
                [*prompt_turns, {"role": "assistant", "content": answer}] for answer in answers
            )
            return _chat(row, one), _chat(row, other)
        before = prompt or ""
        return _text(before + chosen), _text(before + rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("'chosen' and 'rejected' must both be text or both be messages")
    if isinstance(prompt, str):  # whole conversations contain it already
        prompt = [] if len(chosen) > 1 else [{"role": "user", "content": prompt}]
    turns = prompt or []
    return _chat(row, [*turns, *chosen]), _chat(row, [*turns, *rejected])


def _text(text: str) -> Answer:
    if not text.strip():
        raise EmptyRow("an answer has only white space")
    return Answer({"text": text}, "text")


def _chat(row: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> Answer:
    options = {key: row.get(key) for key in ("tools", "chat_template_kwargs")}
    return Answer({"messages": with_system(list(messages), row), **options}, "messages")


def margin_of(row: Mapping[str, Any]) -> float:
    """The row's margin: by how much the chosen reward should exceed the rejected one."""
    value = row.get("margin")
    return 0.0 if value is None else _number(value, "'margin'")


def _number(value: object, what: str) -> float:
    try:
        number = float(value) if isinstance(value, Real | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not abs(number) <= 1e30:
        raise DataError(f"{what} must be a finite number, got {kind_of(value)}")
    return number


# ---- labels --------------------------------------------------------------------------------------


class LabelledSource(RowSource):
    """Sequences with a label: text or chats, as transformers' examples encode them."""

    def _encoded_rows(self, *, empty: bool) -> Iterator[TokenizedExample]:
        encoder = RowEncoder(self.tokenizer, self.template, "all", use_flags=False, add_eos=False)
        for rows in groups_of(self._formatted()):
            encoded = encoder.encode_many([(row, row_format) for _, row, row_format in rows])
            for (where, row, row_format), each in zip(rows, encoded, strict=True):
                self._read()
                targets: tuple[float, ...] = ()
                try:
                    if row_format and not isinstance(each, EmptyRow):
                        targets = targets_of(row, self.how)
                except DataError as err:
                    each = err
                if isinstance(each, EmptyRow):
                    self._tally.count("empty", where)
                    continue
                whole = encoded_or_raised(each, where)
                self._tally.encoded(whole, row_format)
                self._tally.left_out(where, whole.left_out)
                cut = self._cut(whole, where)
                if cut is None:
                    self._tally.count("dropped")
                    continue
                self._tally.count("truncated", by=cut is not whole)
                yield replace(without_padding(cut, self.tokenizer), targets=targets)


def targets_of(row: Mapping[str, Any], how: PreprocessConfig) -> tuple[float, ...]:
    """A row's class, or a number for each class."""
    value = _label_of(row)
    if how.problem_type == "regression":
        values = value if isinstance(value, list) else [value]
        width = max(len(how.labels), 1)
        if len(values) != width:
            raise DataError(f"'label' must have {width} numbers, got {len(values)}")
        return tuple(_number(each, "'label'") for each in values)
    if how.problem_type == "single_label_classification":
        if isinstance(value, list):
            raise DataError(
                "'label' is a list: set train.problem_type: multi_label_classification if several "
                "labels may apply to a row"
            )
        return (float(_class_of(value, how.labels)),)
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(each, float) for each in values):  # as transformers expects them
        if len(values) != len(how.labels) or not {*values} <= {0.0, 1.0}:
            raise DataError(
                f"'label' must have 0.0 or 1.0 for each of the {len(how.labels)} labels, or the "
                "labels that apply"
            )
        return tuple(values)
    chosen = {_class_of(each, how.labels) for each in values}
    return tuple(float(number in chosen) for number in range(len(how.labels)))


def _label_of(row: Mapping[str, Any]) -> Any:
    value = from_json(row.get("label", row.get("labels")))
    if value is None:
        raise EmptyRow("'label' is missing")
    return value


def _class_of(value: object, labels: Sequence[str]) -> int:
    if isinstance(value, str) and value.strip() in labels:
        return labels.index(value.strip())
    number = _class_number(value)
    if number is None or number >= len(labels):
        names = ", ".join(labels[:_SHOWN]) + (", …" if len(labels) > _SHOWN else "")
        shown = repr(value[:80]) if isinstance(value, str) else repr(value)
        raise DataError(
            f"'label' must be one of train.labels ({names}) or a number below {len(labels)}, got "
            f"{shown}"
        )
    return number


def _class_number(value: object) -> int | None:
    """The class that a number stands for, also as text of a table; None if it is no class."""
    if isinstance(value, str):
        return int(value) if value.strip().isdecimal() and len(value) < 9 else None
    if not isinstance(value, Real):
        return None
    number = float(value)
    return int(number) if 0 <= number < CLASSES and number.is_integer() else None


def has_label(row: Mapping[str, Any]) -> bool:
    """Whether a row is text with a label; chats may have one for other reasons."""
    return row.get("text") is not None and row.get("label") is not None


def problem_type_of(label: object) -> str:
    """``train.problem_type`` for labels like this one."""
    if isinstance(label, list):
        return "multi_label_classification"
    is_class = not isinstance(label, float) or label.is_integer()
    return "single_label_classification" if is_class else "regression"


def label_names(rows: Iterable[Placed], columns: Mapping[str, str], problem_type: str) -> list[str]:
    """The names of all labels of some rows: sorted, or of numbers 0, 1, … up to the largest."""
    numbers, names = set[int](), set[str]()
    for where, given in rows:
        try:
            value = _label_of(with_columns(given, columns))
        except EmptyRow:
            continue
        except DataError as err:
            raise DataError(f"{where}: {err}") from err
        values = value if isinstance(value, list) else [value]
        is_vector = values and all(isinstance(each, float) for each in values)
        if is_vector and problem_type == "multi_label_classification":
            numbers.add(len(values) - 1)
            continue
        for each in values:
            number = _class_number(each)
            if number is not None:
                numbers.add(number)
            elif isinstance(each, str) and each.strip():
                names.add(each.strip())
            else:
                raise DataError(
                    f"{where}: 'label' must be a class's number or name, got {kind_of(each)}"
                )
        if numbers and names:
            raise DataError(
                f"{where}: 'label' is a number in some rows and a name in others: use one of both"
            )
        if len(names) > CLASSES:
            raise DataError(f"{where}: 'label' has more than {CLASSES:,} different names")
    return sorted(names) or [str(number) for number in range(max(numbers, default=-1) + 1)]
