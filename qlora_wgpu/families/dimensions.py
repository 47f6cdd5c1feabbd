"""A decoder's dimensions, by Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.config_reader import ConfigReader


@dataclass(frozen=True)
class Dimensions:
    """A decoder's dimensions, by Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def read(cls, read: ConfigReader, head_dim: int | None = None) -> Dimensions:
        """Reads them.

        Args:
            read: The config.json.
            head_dim: The value where no key says it; by default the usual division.

        Raises:
            UnsupportedModelError: If they do not fit each other.
        """
        hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        dimensions = cls(
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", head_dim or hidden_size // heads),
            hidden_size=hidden_size,
            num_attention_heads=heads,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            vocab_size=read.integer("vocab_size"),
        )
        if heads % dimensions.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {dimensions.num_key_value_heads}"
            )
        if dimensions.head_dim % 2:
            raise UnsupportedModelError(f"config.json: head_dim {dimensions.head_dim} is odd")
        return dimensions

    @property
    def query_size(self) -> int:
        """Elements of all heads' queries of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of all heads' keys of a token, or of their values."""
        return self.num_key_value_heads * self.head_dim
