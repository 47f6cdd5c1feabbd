"""The names under which bitsandbytes stores a 4-bit weight, for their reader and their writer.

A weight ``X`` is U8 (or any other type of the same bytes) and has companions ``X.absmax`` and so
on. Its state, a JSON object as bytes, is ``X.quant_state.bitsandbytes__nf4``, or ``__fp4``.
"""

STATE = ".quant_state.bitsandbytes__"
NF4_STATE = f"{STATE}nf4"
STATES = (NF4_STATE, f"{STATE}fp4")

ABSMAX = "absmax"
QUANT_MAP = "quant_map"
NESTED_ABSMAX = "nested_absmax"
NESTED_QUANT_MAP = "nested_quant_map"

QUANT_MAP_SIZE = 16
NESTED_QUANT_MAP_SIZE = 256
