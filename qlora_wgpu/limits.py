"""Limits at the doors through which what others wrote comes in; docs/limits.md tells of each."""

from __future__ import annotations

# Data files (qlora_wgpu/data)
MAX_LINE = 16 << 20  # bytes of a row: a line of JSON, a record of CSV
MAX_TEXT = 4 << 20  # bytes of a row's text
MAX_AT_ONCE = 3 << 19  # bytes that are tokenized at once, which takes up to 500 times the memory
MAX_DEPTH = 64  # lists and objects within one another in a row
MAX_COLUMNS = 4096  # keys of a row, columns of a table
MAX_MESSAGES = 4096  # messages of a conversation
MAX_ENTRIES = 100_000  # entries of a data folder that are looked at
MAX_TABLE_MEMORY = 768 << 20  # bytes that the process which reads a Parquet file may take
MAX_EXPANSION = 1000  # bytes of a Parquet file's rows for each of its own, from 128 MiB on
MAX_QUOTED = 80  # characters of the user's data in a message
