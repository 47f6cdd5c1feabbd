"""What became of a data set's rows, and what its user should know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from qlora_wgpu.data.chat_template import ChatTemplate, end_of_turn
from qlora_wgpu.data.columns import CHATS
from qlora_wgpu.data.conversations import USUAL_ROLES, roles_in_words
from qlora_wgpu.data.examples import Counts
from qlora_wgpu.data.masking import TrainOn
from qlora_wgpu.data.row_formats import TokenizedExample
from qlora_wgpu.data.tokenizer import Tokenizer

Truncation = Literal["keep_start", "keep_end", "windows", "drop", "error"]


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of how rows become examples."""

    max_seq_length: int  # longest example in tokens, at least 2
    chat_template: str | None = None  # ``data.chat_template``: see ``find_chat_template``
    row_format: str = "auto"  # a key of ``FORMATS``, or "auto" to go by the first row
    # The row's own name of each key of its format, where it has another
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "auto"  # the tokens that are learnt; see ``RowEncoder``
    # Treatment of longer rows: cut at the end (keep_start) or at the beginning (keep_end), left out
    # (drop), an error, or (windows) texts cut into several examples, other rows at the end
    truncation: Truncation = "keep_start"
    # What they are for: rows by themselves (sft), pairs of a chosen and a rejected answer (dpo,
    # orpo), or answers that are good or bad (kto)
    objective: str = "sft"
    as_chats: bool = False  # whether prompts and answers that are text become turns of a chat


_NAMED = 5  # empty rows, or roles, in a warning
# Why nothing is learnt of a row, where there is more to say of it.
_TOLD_APART = ("silent", "weightless", "wholly spared")


class RowStats:
    """Counts what becomes of each row, and says in the end what to tell of it.

    Attributes:
        num: Rows by what became of them.
        has_turns: Whether there is an end of turns to be learnt; documents have none.
    """

    def __init__(
        self, name: str, how: PreprocessConfig, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        """Begins with no row; the name is the data set's, for messages."""
        self.num: Counter[str] = Counter()
        self.has_turns = True
        self._name = name
        self._how = how
        self._tokenizer = tokenizer
        self._template = template
        self._first: dict[str, list[str]] = {}  # where the first of them stand
        self._left_out: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._silent_roles: set[str] = set()
        self._unknown_id = _unknown_id(tokenizer)
        self._is_end_learnt = not tokenizer.eos_token_ids
        self._first_chat = True
        self._other_end: int | None = None

    def count(self, what: str, where: str = "", by: int = 1) -> None:
        """Counts a row, and keeps where it stands if it is among the first."""
        self.num[what] += by
        if where and len(first := self._first.setdefault(what, [])) < _NAMED:
            first.append(where)

    @property
    def counts(self) -> Counts:
        """What became of the rows so far."""
        num = self.num
        unlearnt = sum(num[what] for what in (*_TOLD_APART, "unlearnt"))
        return Counts(num["rows"], num["truncated"], num["dropped"], unlearnt, num["empty"])

    def encoded(self, encoded: TokenizedExample, row_format: str) -> None:
        """It has been encoded, and not been cut yet."""
        if self._first_chat and self._template is not None and row_format in CHATS:
            self._first_chat = False
            self._other_end = end_of_turn(self._template, self._tokenizer)
        ends = not self._tokenizer.eos_token_ids.isdisjoint(encoded.labels)
        if ends or (self._other_end is not None and self._other_end in encoded.labels):
            self._is_end_learnt = True
        self.unknown(encoded.ids)

    def left_out(self, where: str, what: Iterable[str]) -> None:
        """The chat template leaves something of it out."""
        for each in what:
            self._left_out[each] += 1
            self._first.setdefault(each, [where])

    def unread(self, where: str, column: str) -> None:
        """It has a column of images or the like, of which nothing is learnt."""
        self._unread[column] += 1
        self._first.setdefault(column, [where])

    def unknown(self, ids: Sequence[int]) -> None:
        """Counts the tokens of a row that stand for what the tokenizer does not know."""
        if unknown := ids.count(self._unknown_id):
            self.count("unknown tokens", by=unknown)
            self.count("unknown")

    def without_labels(self, roles: Set[str], *, is_spared: bool = False) -> None:
        """It is left out because nothing in it is learnt."""
        if is_spared:
            self.count("wholly spared")
        elif roles and "assistant" not in roles:
            self.count("silent")
            self._silent_roles |= roles
        else:
            self.count("unlearnt")

    def nothing(self) -> str:
        """Why no example is left."""
        counts = self.counts
        if not counts.rows:
            return f"{self._name} holds no row at all"
        if counts.empty == counts.rows:
            rows = _fit(counts.rows, "its only row is", f"all of its {counts.rows} rows are")
            return f"{self._name} holds nothing: {rows} empty"
        if self.num["silent"] == counts.rows:
            rows = _fit(counts.rows, "its only row", f"its {counts.rows} rows")
            return f"{self._name} has nothing to learn: {rows} {self._without_assistant()}"
        if self.num["weightless"] == counts.rows:
            rows = _fit(counts.rows, "its only row has", f"all of its {counts.rows} rows have")
            return f"{self._name} has nothing to learn: {rows} the weight 0"
        if self.num["wholly spared"] == counts.rows:
            rows = _fit(counts.rows, "its only row", f"all of its {counts.rows} rows")
            return f"{self._name} has nothing to learn: {rows} {self._wholly_spared(counts.rows)}"
        left_out = counts.dropped + counts.without_labels + counts.empty
        rows = _fit(left_out, "its only row was", f"all of its {left_out} rows were")
        other = ", or keep the ends of rows (data.truncation: keep_end)"
        return (
            f"{self._name} has nothing to learn within {self._within}: {rows} left out; raise "
            f"data.max_seq_length{'' if self._how.truncation == 'keep_end' else other}"
        )

    @property
    def _within(self) -> str:
        return f"max_seq_length={self._how.max_seq_length}"

    def _without_assistant(self) -> str:
        roles = roles_in_words(self._silent_roles)
        unusual = self._silent_roles - USUAL_ROLES
        advice = "; call the one who answers assistant" if unusual else ""
        holds = _fit(self.num["silent"], "holds", "hold")
        return (
            f"{holds} no turn of the assistant, which is what is learnt: roles are {roles}{advice}"
        )

    @staticmethod
    def _wholly_spared(count: int) -> str:
        return f"{_fit(count, 'has', 'have')} no turn to learn without weight 0 or train false"

    def warnings(self) -> list[str]:
        """Sentences about what was cut, left out, or will not be learnt."""
        notes = [*self._of_rows(), *self._of_ends()]
        for what, count in self._left_out.most_common(_NAMED):
            rows, first = _fit(count, "1 row", f"{count} rows"), self._places(what, count)
            notes.append(f"the chat template leaves {what} out of {rows} ({first})")
        for column, count in self._unread.most_common(_NAMED):
            rows, first = _fit(count, "1 row", f"{count} rows"), self._places(column, count)
            notes.append(f"the column {column} of {rows} is not read: only text is ({first})")
        if count := self.num["unknown tokens"]:
            unknown = self._tokenizer.special_tokens["unk_token"]
            tokens = _fit(count, "1 token", f"{count:,} tokens")
            notes.append(
                f"{tokens} in {self.num['unknown']} of {self.counts.rows} rows "
                f"{_fit(count, 'is', 'are')} {unknown}: the tokenizer does not know what stands "
                "there, such as another alphabet, and the model cannot read it"
            )
        return [f"{self._name}: {note}" for note in notes]

    def _of_rows(self) -> Iterator[str]:
        counts, within = self.counts, self._within

        def rows(count: int, one: str, several: str) -> str:
            return f"{count} of {counts.rows} rows {_fit(count, one, several)}"

        if count := counts.empty:
            holds = rows(count, "holds nothing and was", "hold nothing and were")
            yield f"{holds} left out ({self._places('empty', count)})"
        if count := counts.truncated:
            where = "beginning" if self._how.truncation == "keep_end" else "end"
            was = _fit(count, "was", "were")
            yield f"{rows(count, 'is', 'are')} longer than {within} and {was} cut at the {where}"
        if count := self.num["long texts"]:
            was = _fit(count, "was", "were")
            long = f"{rows(count, 'is', 'are')} longer than {within} and {was} cut into"
            windows = self.num["windows"]
            yield f"{long} {_fit(windows, '1 window', f'{windows:,} windows')}"
        if count := counts.dropped:
            was = _fit(count, "was", "were")
            yield f"{rows(count, 'is', 'are')} longer than {within} and {was} left out"
        if count := self.num["silent"]:
            yield f"{count} of {counts.rows} rows {self._without_assistant()}"
        if count := self.num["weightless"]:
            have = rows(count, "has the weight 0 and was", "have the weight 0 and were")
            yield f"{have} left out"
        if count := self.num["bad"]:
            yield (
                f"{rows(count, 'is', 'are')} labelled false and learnt like the others: leave "
                f"{_fit(count, 'it', 'them')} out, or set train.objective: kto, which learns from "
                "labels what is bad"
            )
        if count := self.num["wholly spared"]:
            was = _fit(count, "was", "were")
            yield f"{count} of {counts.rows} rows {self._wholly_spared(count)} and {was} left out"
        if count := self.num["spared"]:
            yield (
                f"{rows(count, 'has', 'have')} answers with weight 0 or train false, which count "
                f"like the others in train.objective: {self._how.objective}"
            )
        if count := self.num["same"]:
            have = rows(count, "has", "have")
            yield (
                f"{have} one and the same answer as chosen and rejected within {within}, which "
                f"compares nothing ({self._places('same', count)})"
            )
        if count := self.num["unlearnt"]:
            nothing = f"nothing to learn within {within} and {_fit(count, 'was', 'were')} left out"
            yield f"{rows(count, 'has', 'have')} {nothing}"

    def _places(self, what: str, count: int) -> str:
        """Where the first of some rows stand."""
        first = self._first[what]
        return ", ".join(first) + (", …" if count > len(first) else "")

    def _of_ends(self) -> Iterator[str]:
        if self._tokenizer.eos_token_id is None:
            yield "the tokenizer has no end-of-sequence token, so none is learnt"
        elif self.has_turns and not self._is_end_learnt:
            yield (
                "no end-of-turn token is learnt anywhere, so the model will not learn when to "
                "stop: check that data.chat_template is the one its tokenizer was made for"
            )


def _fit(count: int, one: str, several: str) -> str:
    """The words for one, or for several."""
    return one if count == 1 else several


def _unknown_id(tokenizer: Tokenizer) -> int:
    """Id of the token that stands for what a tokenizer does not know; -1 without one of its own."""
    text = tokenizer.special_tokens.get("unk_token")
    others = (tokenizer.bos_token, tokenizer.eos_token)  # which every row may have
    unknown = None if text is None or text in others else tokenizer.token_id(text)
    return -1 if unknown is None else unknown
