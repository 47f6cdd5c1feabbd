"""What became of a data set's rows, and what its user should know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from qlora_wgpu.data.chat_template import ChatTemplate, end_of_turn
from qlora_wgpu.data.conversations import USUAL_ROLES, roles_in_words
from qlora_wgpu.data.examples import Counts
from qlora_wgpu.data.row_formats import CHATS, Encoded, TrainOn
from qlora_wgpu.data.tokenizer import Tokenizer

Truncation = Literal["keep_start", "keep_end", "windows", "drop", "error"]


@dataclass(frozen=True)
class Preparation:
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


class Tally:
    """Told of each row what it is and what becomes of it; says in the end what to tell of them.

    Attributes:
        counts: Counts of what became of the rows so far.
        has_turns: Whether there is an end of turns to be learnt; documents have none.
    """

    def __init__(
        self, name: str, how: Preparation, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        """Begins with no row.

        Args:
            name: The data set's, for messages.
            how: Settings of the preparation.
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
        """
        self.counts = Counts()
        self.has_turns = True
        self._name = name
        self._how = how
        self._tokenizer = tokenizer
        self._template = template
        self._empty: list[str] = []  # where the first of them stand
        self._same: list[str] = []  # where the first pairs of one answer stand
        self._num_same = self._num_weightless = self._num_bad = self._num_spared = 0
        self._num_wholly_spared = 0
        self._num_long_texts = self._num_windows = 0
        self._num_left_out: Counter[str] = Counter()
        self._num_unread: Counter[str] = Counter()
        self._first_left_out: dict[str, str] = {}
        self._silent = 0  # rows in which the assistant says nothing
        self._silent_roles: set[str] = set()
        self._unknown_id = _unknown_id(tokenizer)
        self._unknown_tokens = self._rows_with_unknown = 0
        self._is_end_learnt = not tokenizer.eos_token_ids
        self._first_chat = True
        self._other_end: int | None = None

    def read(self) -> None:
        """A row was read."""
        self._count(rows=1)

    def empty(self, where: str) -> None:
        """It holds nothing and is left out."""
        self._count(empty=1)
        if len(self._empty) < _NAMED:
            self._empty.append(where)

    def encoded(self, encoded: Encoded, row_format: str) -> None:
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
            self._num_left_out[each] += 1
            self._first_left_out.setdefault(each, where)

    def unread(self, where: str, column: str) -> None:
        """It has a column of images or the like, of which nothing is learnt."""
        self._num_unread[column] += 1
        self._first_left_out.setdefault(column, where)

    def unknown(self, ids: Sequence[int]) -> None:
        """Counts the tokens of a row that stand for what the tokenizer does not know."""
        if unknown := ids.count(self._unknown_id):
            self._unknown_tokens += unknown
            self._rows_with_unknown += 1

    def too_long(self) -> None:
        """It is left out because it is too long."""
        self._count(dropped=1)

    def without_labels(self, roles: Set[str], *, is_spared: bool = False) -> None:
        """It is left out because nothing in it is learnt."""
        self._count(without_labels=1)
        if is_spared:
            self._num_wholly_spared += 1
        elif roles and "assistant" not in roles:
            self._silent += 1
            self._silent_roles |= roles

    def without_weight(self) -> None:
        """It is left out because its weight in the loss is 0."""
        self._count(without_labels=1)
        self._num_weightless += 1

    def windows(self, count: int) -> None:
        """It is a text that is cut into so many examples."""
        self._num_long_texts += 1
        self._num_windows += count

    def same_answers(self, where: str) -> None:
        """It is kept, a pair whose two answers are one and the same."""
        self._num_same += 1
        if len(self._same) < _NAMED:
            self._same.append(where)

    def kept(self, *, is_cut: bool, is_bad: bool = False, is_spared: bool = False) -> None:
        """It is an example now."""
        self._count(truncated=int(is_cut))
        self._num_bad += is_bad
        self._num_spared += is_spared

    def _count(self, **more: int) -> None:
        now = self.counts
        self.counts = replace(now, **{n: getattr(now, n) + count for n, count in more.items()})

    def nothing(self) -> str:
        """Why no example is left."""
        counts = self.counts
        if not counts.rows:
            return f"{self._name} holds no row at all"
        if counts.empty == counts.rows:
            rows = _fit(counts.rows, "its only row is", f"all of its {counts.rows} rows are")
            return f"{self._name} holds nothing: {rows} empty"
        if self._silent == counts.rows:
            rows = _fit(counts.rows, "its only row", f"its {counts.rows} rows")
            return f"{self._name} has nothing to learn: {rows} {self._without_assistant()}"
        if self._num_weightless == counts.rows:
            rows = _fit(counts.rows, "its only row has", f"all of its {counts.rows} rows have")
            return f"{self._name} has nothing to learn: {rows} the weight 0"
        if self._num_wholly_spared == counts.rows:
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
        return (
            f"{_fit(self._silent, 'holds', 'hold')} no turn of the assistant, which is what is "
            f"learnt: roles are {roles}{advice}"
        )

    @staticmethod
    def _wholly_spared(count: int) -> str:
        return f"{_fit(count, 'has', 'have')} no turn to learn without weight 0 or train false"

    def warnings(self) -> list[str]:
        """Sentences about what was cut, left out, or will not be learnt."""
        notes = [*self._of_rows(), *self._of_ends()]
        for what, count in self._num_left_out.most_common(_NAMED):
            rows = _fit(count, "1 row", f"{count} rows")
            first = _places([self._first_left_out[what]], count)
            notes.append(f"the chat template leaves {what} out of {rows} ({first})")
        for column, count in self._num_unread.most_common(_NAMED):
            rows = _fit(count, "1 row", f"{count} rows")
            first = _places([self._first_left_out[column]], count)
            notes.append(f"the column {column} of {rows} is not read: only text is ({first})")
        if count := self._unknown_tokens:
            unknown = self._tokenizer.special_tokens["unk_token"]
            tokens = _fit(count, "1 token", f"{count:,} tokens")
            notes.append(
                f"{tokens} in {self._rows_with_unknown} of {self.counts.rows} rows "
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
            yield f"{holds} left out ({_places(self._empty, count)})"
        if count := counts.truncated:
            where = "beginning" if self._how.truncation == "keep_end" else "end"
            was = _fit(count, "was", "were")
            yield f"{rows(count, 'is', 'are')} longer than {within} and {was} cut at the {where}"
        if count := self._num_long_texts:
            was = _fit(count, "was", "were")
            long = f"{rows(count, 'is', 'are')} longer than {within} and {was} cut into"
            yield f"{long} {_fit(self._num_windows, '1 window', f'{self._num_windows:,} windows')}"
        if count := counts.dropped:
            was = _fit(count, "was", "were")
            yield f"{rows(count, 'is', 'are')} longer than {within} and {was} left out"
        if count := self._silent:
            yield f"{count} of {counts.rows} rows {self._without_assistant()}"
        if count := self._num_weightless:
            have = rows(count, "has the weight 0 and was", "have the weight 0 and were")
            yield f"{have} left out"
        if count := self._num_bad:
            yield (
                f"{rows(count, 'is', 'are')} labelled false and learnt like the others: leave "
                f"{_fit(count, 'it', 'them')} out, or set train.objective: kto, which learns from "
                "labels what is bad"
            )
        if count := self._num_wholly_spared:
            was = _fit(count, "was", "were")
            yield f"{count} of {counts.rows} rows {self._wholly_spared(count)} and {was} left out"
        if count := self._num_spared:
            yield (
                f"{rows(count, 'has', 'have')} answers with weight 0 or train false, which count "
                f"like the others in train.objective: {self._how.objective}"
            )
        if count := self._num_same:
            have = rows(count, "has", "have")
            yield (
                f"{have} one and the same answer as chosen and rejected within {within}, which "
                f"compares nothing ({_places(self._same, count)})"
            )
        told = self._silent + self._num_weightless + self._num_wholly_spared
        if count := counts.without_labels - told:
            nothing = f"nothing to learn within {within} and {_fit(count, 'was', 'were')} left out"
            yield f"{rows(count, 'has', 'have')} {nothing}"

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


def _places(first: list[str], count: int) -> str:
    """Where the first of some rows stand."""
    return ", ".join(first) + (", …" if count > len(first) else "")


def _unknown_id(tokenizer: Tokenizer) -> int:
    """Id of the token that stands for what a tokenizer does not know; -1 without one of its own."""
    text = tokenizer.special_tokens.get("unk_token")
    others = (tokenizer.bos_token, tokenizer.eos_token)  # which every row may have
    unknown = None if text is None or text in others else tokenizer.token_id(text)
    return -1 if unknown is None else unknown
