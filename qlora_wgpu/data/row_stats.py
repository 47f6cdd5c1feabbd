"""Settings of the preprocessing, and counts and warnings about a data set's rows."""

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
from qlora_wgpu.images.placeholders import ImageFiles

Truncation = Literal["keep_start", "keep_end", "windows", "drop", "error"]


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of how rows become examples."""

    max_seq_length: int  # maximum length of an example in tokens, at least 2
    chat_template: str | None = None  # ``data.chat_template``: see ``find_chat_template``
    row_format: str = "auto"  # a key of ``FORMATS``, or "auto" to detect it
    columns: Mapping[str, str] = field(default_factory=dict)  # column names by the format's keys
    train_on: TrainOn = "auto"  # the tokens that the loss is taken on; see ``RowEncoder``
    # Longer rows are truncated at the end (keep_start) or the beginning (keep_end), dropped, an
    # error, or (windows) plain text becomes several examples and other rows keep their start
    truncation: Truncation = "keep_start"
    objective: str = "sft"  # ``train.objective``
    as_chats: bool = False  # ``data.apply_chat_template``: whether text becomes turns of a chat
    images: ImageFiles | None = None  # how images become tokens; None ignores them
    labels: tuple[str, ...] = ()  # ``train.labels``: names of the classes, in order
    problem_type: str = "single_label_classification"  # ``train.problem_type``


_NAMED = 5  # locations of rows in a warning
# Reasons for a row without labels that have a warning of their own.
_REASONS = ("no assistant", "zero weight", "all excluded")
_ALL_EXCLUDED = "only assistant turns with weight 0 or train: false"


class RowStats:
    """Counts what becomes of each row, for the warnings at the end."""

    def __init__(
        self, name: str, how: PreprocessConfig, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        self.num: Counter[str] = Counter()  # rows by what became of them
        # Documents have no end-of-turn token, and scored sequences need none.
        self.has_turns = how.objective not in ("reward", "classification")
        self._name = name
        self._how = how
        self._tokenizer = tokenizer
        self._template = template
        self._first: dict[str, list[str]] = {}  # locations of the first rows
        self._left_out: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._other_roles: set[str] = set()
        self._unknown_id = _unknown_id(tokenizer)
        self._has_end_label = not tokenizer.eos_token_ids
        self._first_chat = True
        self._other_end: int | None = None

    def count(self, what: str, where: str = "", by: int = 1) -> None:
        """Counts a row and notes its location if it is among the first."""
        self.num[what] += by
        if where and len(first := self._first.setdefault(what, [])) < _NAMED:
            first.append(where)

    @property
    def counts(self) -> Counts:
        """Counts of the rows so far."""
        num = self.num
        no_labels = sum(num[what] for what in (*_REASONS, "no labels"))
        return Counts(num["rows"], num["truncated"], num["dropped"], no_labels, num["empty"])

    def encoded(self, encoded: TokenizedExample, row_format: str) -> None:
        """Looks for end-of-turn and unknown tokens in a row that is not truncated yet."""
        if self._first_chat and self._template is not None and row_format in CHATS:
            self._first_chat = False
            self._other_end = end_of_turn(self._template, self._tokenizer)
        ends = not self._tokenizer.eos_token_ids.isdisjoint(encoded.labels)
        if ends or (self._other_end is not None and self._other_end in encoded.labels):
            self._has_end_label = True
        self.unknown(encoded.ids)

    def left_out(self, where: str, what: Iterable[str]) -> None:
        """Notes what the chat template omits from a row."""
        for each in what:
            self._left_out[each] += 1
            self._first.setdefault(each, [where])

    def unread(self, where: str, column: str) -> None:
        """Notes a column of images, videos or audio."""
        self._unread[column] += 1
        self._first.setdefault(column, [where])

    def unknown(self, ids: Sequence[int]) -> None:
        """Counts the unknown tokens of a row."""
        if unknown := ids.count(self._unknown_id):
            self.count("unknown tokens", by=unknown)
            self.count("unknown")

    def without_labels(self, roles: Set[str], *, has_excluded: bool = False) -> None:
        """Counts a row that is dropped because no loss would be taken on it."""
        if has_excluded:
            self.count("all excluded")
        elif roles and "assistant" not in roles:
            self.count("no assistant")
            self._other_roles |= roles
        else:
            self.count("no labels")

    def no_examples(self) -> str:
        """Why there are no examples."""
        counts = self.counts
        if not counts.rows:
            return f"{self._name} has no rows"
        rows = _fit(counts.rows, "its only row", f"all of its {counts.rows} rows")
        is_, has = _fit(counts.rows, "is", "are"), _fit(counts.rows, "has", "have")
        if counts.empty == counts.rows:
            return f"{self._name} has no content: {rows} {is_} empty"
        reasons = {
            "no assistant": f"{has} {self._no_assistant}",
            "zero weight": f"{has} the weight 0",
            "all excluded": f"{has} {_ALL_EXCLUDED}",
        }
        for reason, words in reasons.items():
            if self.num[reason] == counts.rows:
                return f"{self._name} has nothing to train on: {rows} {words}"
        dropped = counts.dropped + counts.without_labels + counts.empty
        rows = _fit(dropped, "its only row was", f"all of its {dropped} rows were")
        other = ", or keep the ends of rows (data.truncation: keep_end)"
        return (
            f"{self._name} has nothing to train on within {self._within}: {rows} dropped; raise "
            f"data.max_seq_length{'' if self._how.truncation == 'keep_end' else other}"
        )

    @property
    def _within(self) -> str:
        return f"max_seq_length={self._how.max_seq_length}"

    @property
    def _no_assistant(self) -> str:
        unusual = self._other_roles - USUAL_ROLES
        advice = "; rename the role that answers to assistant" if unusual else ""
        return f"no assistant turn to train on (roles: {roles_in_words(self._other_roles)}){advice}"

    def warnings(self) -> list[str]:
        """Warnings about truncated, dropped and skipped rows, and about missing labels."""
        notes = [*self._of_rows(), *self._of_ends()]
        for what, count in self._left_out.most_common(_NAMED):
            rows = _fit(count, "1 row", f"{count} rows")
            notes.append(
                f"the chat template omits {what} from {rows} ({self._places(what, count)})"
            )
        for name, count in self._unread.most_common(_NAMED):
            rows, first = _fit(count, "1 row", f"{count} rows"), self._places(name, count)
            notes.append(f"the column {name} of {rows} is ignored: only text is read ({first})")
        if count := self.num["unknown tokens"]:
            unknown = self._tokenizer.special_tokens["unk_token"]
            tokens = _fit(count, "1 token", f"{count:,} tokens")
            notes.append(
                f"{tokens} in {self.num['unknown']} of {self.counts.rows} rows "
                f"{_fit(count, 'is', 'are')} {unknown}: the vocabulary lacks these characters, "
                "perhaps those of another alphabet, so the model cannot read them"
            )
        return [f"{self._name}: {note}" for note in notes]

    def _of_rows(self) -> Iterator[str]:
        counts, num, within = self.counts, self.num, self._within
        longer = f"longer than {within}"

        def note(count: int, verb: str, what: str, outcome: str = "") -> str:
            verbs = {"is": "are", "has": "have"}
            was = f" and {_fit(count, 'was', 'were')} {outcome}" if outcome else ""
            return f"{count} of {counts.rows} rows {_fit(count, verb, verbs[verb])} {what}{was}"

        if count := counts.empty:
            yield note(count, "is", "empty", f"skipped ({self._places('empty', count)})")
        if count := counts.truncated:
            where = "beginning" if self._how.truncation == "keep_end" else "end"
            yield note(count, "is", longer, f"truncated at the {where}")
        if count := num["long texts"]:
            windows = _fit(num["windows"], "1 window", f"{num['windows']:,} windows")
            yield note(count, "is", longer, f"split into {windows}")
        if count := counts.dropped:
            yield note(count, "is", longer, "dropped")
        if count := num["no assistant"]:
            yield note(count, "has", self._no_assistant)
        if count := num["zero weight"]:
            yield note(count, "has", "the weight 0", "dropped")
        if count := num["rejected"]:
            labelled = note(count, "is", "labelled false and trained on like the others")
            them = _fit(count, "it", "them")
            yield f"{labelled}: remove {them}, or set train.objective: kto to use the labels"
        if count := num["all excluded"]:
            yield note(count, "has", _ALL_EXCLUDED, "dropped")
        if count := num["excluded turns"]:
            ignored = f"which train.objective: {self._how.objective} ignores"
            yield note(count, "has", f"answers with weight 0 or train: false, {ignored}")
        if count := num["equal answers"]:
            places = (
                f"within {within} and thus no preference ({self._places('equal answers', count)})"
            )
            yield note(count, "has", f"identical chosen and rejected answers {places}")
        if count := num["no labels"]:
            yield note(count, "has", f"nothing to train on within {within}", "dropped")

    def _places(self, what: str, count: int) -> str:
        first = self._first[what]
        return ", ".join(first) + (", …" if count > len(first) else "")

    def _of_ends(self) -> Iterator[str]:
        if self._tokenizer.eos_token_id is None:
            yield "the tokenizer has no EOS token, so none is trained on"
        elif self.has_turns and not self._has_end_label:
            yield (
                "no end-of-turn token is trained on, so the model will not learn when to stop: "
                "check that data.chat_template is the one its tokenizer was made for"
            )


def _fit(count: int, one: str, several: str) -> str:
    return one if count == 1 else several


def _unknown_id(tokenizer: Tokenizer) -> int:
    """Id of the unknown token; -1 if there is none, or if it is also the BOS or EOS token."""
    text = tokenizer.special_tokens.get("unk_token")
    others = (tokenizer.bos_token, tokenizer.eos_token)
    unknown = None if text is None or text in others else tokenizer.token_id(text)
    return -1 if unknown is None else unknown
