"""Trained rows of the embedding and of an untied head, and LoRA on the embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import Architecture, LinearSpec
from qlora_wgpu.lora.config import TokenIndices
from qlora_wgpu.lora.peft_names import is_named

_SETTING = "lora.trainable_token_indices"


@dataclass(frozen=True)
class Vocabulary:
    """The matrices of a model that have a row for each token."""

    embedding: str  # the embedding's module
    head: str  # the head's
    rows: int
    columns: int
    tied: bool  # whether the head is the embedding
    padding: int | None = None  # the row that gets no gradient where it is looked up
    new: tuple[int, ...] = ()  # the tokens that were added, whose rows are trained in any case
    # Whether the head has a bias, which PEFT ignores if it trains rows of the head, and trains if
    # it trains the whole head.
    bias: bool = False
    classes: int = 0  # the head's rows if it is that of a reward model or classifier

    @classmethod
    def of(cls, architecture: Architecture) -> Vocabulary:
        return cls(
            architecture.embed_name.removesuffix(".weight"),
            architecture.head_name.removesuffix(".weight"),
            architecture.vocab_size,
            architecture.hidden_size,
            architecture.tied,
            architecture.padding_idx,
            architecture.new_tokens,
            bool(architecture.head_bias),
            architecture.classes,
        )

    @property
    def head_layer(self) -> LinearSpec:
        return LinearSpec(self.head, self.classes or self.rows, self.columns)

    def rows_of(self, module: str) -> int:
        return self.head_layer.out_features if module == self.head else self.rows

    @property
    def embedding_layer(self) -> LinearSpec:
        """The embedding as PEFT adapts it: a layer from tokens to hidden states."""
        return LinearSpec(self.embedding, self.columns, self.rows)

    def trained(self, indices: TokenIndices | None) -> dict[str, tuple[int, ...]]:
        """The trained rows by module, the embedding's first."""
        indices = self.with_new(indices)
        if not indices:
            return {}
        named = {self.embedding: indices} if isinstance(indices, list) else self._named(indices)
        for rows in named.values():
            self._check(rows)
        if self.bias and (self.tied or self.head in named):
            hint = f"name only {self.embedding} if the two are not tied"
            raise ConfigError(
                f"{_SETTING}: {self.head} has a bias, which PEFT ignores when its rows are "
                f"trained: {'tokens cannot be added to this model' if self.new else hint}"
            )
        if self.tied and self.head in named:
            if named.get(self.embedding) != named[self.head]:  # PEFT trains two where one is named
                raise ConfigError(
                    f"{_SETTING}: {self.head} is tied to {self.embedding}, so both have the same "
                    "trained rows: name the same tokens for both, or only those of the embedding"
                )
            named = {self.embedding: named[self.head]}
        return {m: tuple(named[m]) for m in (self.embedding, self.head) if m in named}

    def with_new(self, indices: TokenIndices | None) -> TokenIndices | None:
        """The setting with the tokens that were added, for each matrix."""
        if not self.new:
            return indices or None
        given = indices or []
        named = self._named(given) if isinstance(given, dict) else {self.embedding: given}
        if self.tied:
            return _with(next(iter(named.values())), self.new)
        return {
            module.rpartition(".")[2]: _with(named.get(module, []), self.new)
            for module in (self.embedding, self.head)
        }

    def _named(self, indices: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
        named: dict[str, Sequence[int]] = {}
        for name, rows in indices.items():
            modules = [m for m in (self.embedding, self.head) if is_named(m, name)]
            if not modules:
                leaf = self.embedding.rpartition(".")[2]
                raise ConfigError(
                    f"{_SETTING}: unknown matrix {name!r} (this model has {leaf} and {self.head})"
                )
            if modules[0] in named:
                raise ConfigError(f"{_SETTING} names {modules[0]} twice")
            named[modules[0]] = rows
        return named

    def _check(self, rows: Sequence[int]) -> None:
        if not rows:
            raise ConfigError(f"{_SETTING}: a list of tokens must not be empty")
        if beyond := [row for row in rows if not 0 <= row < self.rows]:
            raise ConfigError(
                f"{_SETTING}: token {beyond[0]} does not exist: the model's vocabulary has "
                f"{self.rows:,} tokens"
            )
        if len(set(rows)) < len(rows):
            twice = next(row for i, row in enumerate(rows) if row in rows[:i])
            raise ConfigError(f"{_SETTING}: token {twice} is listed twice")


def _with(rows: Sequence[int], new: Sequence[int]) -> list[int]:
    return [*rows, *(token for token in new if token not in rows)]


def check_ends(
    config: LoraConfig, vocabulary: Vocabulary, adapted: set[str], *, trains_rows: bool
) -> None:
    ends = [name for name in (vocabulary.embedding, vocabulary.head) if name in adapted]
    if not ends:
        return
    name = ends[0]
    if config.use_dora:
        raise ConfigError(
            f"lora.use_dora is not supported for {name}: leave it out of lora.target_modules, or "
            "set lora.use_dora to false"
        )
    if config.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {config.init_lora_weights} is not supported for {name}: "
            "leave it out of lora.target_modules, or set lora.init_lora_weights to default"
        )
    if trains_rows:
        raise ConfigError(
            f"lora.target_modules names {name} while rows of tokens are trained "
            "(lora.trainable_token_indices, model.add_tokens); PEFT cannot load both: leave one "
            "of them out"
        )
    if config.ensure_weight_tying and vocabulary.tied:
        raise ConfigError(
            f"lora.ensure_weight_tying and {name} in lora.target_modules: {vocabulary.head} is "
            f"tied to {vocabulary.embedding}, and one pair for both is not supported; set "
            "ensure_weight_tying to false, with which PEFT adapts only what is named"
        )
