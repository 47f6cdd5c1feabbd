"""Other trainers' files: which one wrote a file, and what it means here."""

from qlora_wgpu.config.dialects.conversion import Conversion, convert_file, dialect_of, key_for
from qlora_wgpu.config.dialects.reasons import reason_for

__all__ = ["Conversion", "convert_file", "dialect_of", "key_for", "reason_for"]
