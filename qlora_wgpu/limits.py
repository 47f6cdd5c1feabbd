"""Limits of what is read from outside; docs/limits.md explains each.

They are far above what real models, data and runs have, and low enough that a file which is
damaged, or made to do harm, costs neither minutes nor gigabytes.
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30

# Files that are read whole.
MODEL_JSON_BYTES = 4 * MIB  # config.json, adapter_config.json and the like
INDEX_BYTES = 64 * MIB  # the index of the largest models takes a few MiB
TOKENIZER_CONFIG_BYTES = 16 * MIB
TOKENIZER_BYTES = 128 * MIB  # the largest known has 33 MiB
TEMPLATE_BYTES = MIB
OWN_JSON_BYTES = 64 * MIB  # what this package wrote itself: states and caches
OWN_LOG_BYTES = 1024 * MIB

# A configuration in YAML.
YAML_BYTES = 128 * KIB  # a chat template may be written in it
YAML_NODES = 10_000  # keys, values, lists
YAML_DEPTH = 16
YAML_KEY = 500  # characters; it may be a pattern
PROBLEMS_SHOWN = 20

# A safetensors file.
HEADER_BYTES = 16 * MIB
TENSORS = 100_000
DIMENSIONS = 32  # NumPy's limit before version 2

# A GGUF file.
GGUF_HEADER_BYTES = 128 * MIB  # vocabulary and merges of the largest take some 20 MiB
GGUF_KEYS = 10_000
GGUF_STRINGS = 2**22  # of a list: tokens, merges
GGUF_NAME_BYTES = 64 * KIB  # of a key, as the format has it, or a tensor's name

# A model, by its config.json: some ten times the largest that there are.
LAYERS = 256
EXPERTS = 4096
LINEARS = 2**18  # matrices of all layers and experts: Qwen3-Next has 74,076
HEADS = 4096
HEAD_DIM = 1024
DELTA_KEY = 512  # elements of a delta net's key
TAPS = 64  # tokens that a convolution sees
WIDTH = 2**20  # of the residual stream and of an MLP
VOCABULARY = 2**32
VOCABULARY_TRACED = 2**23  # logits are computed in chunks, which are many beyond
MATRIX_ELEMENTS = 2**37
PARAMETERS = 2**42
NUMBERS = (1e-30, 1e15)  # epsilons, factors, scales: the least above zero, and the largest

# A run.
STEPS = 10**9
COUNT = 2**31 - 1  # of anything else
LEARNING_RATES = (1e-12, 1e6)
BETA = 0.999999  # more is one in float32, nearly
TOKENS_OF_A_ROW = 2**24
RANK = 4096

# Data files (qlora_wgpu/data)
MIXED_ROWS = 10**8  # of a mixture, an epoch: each takes some 30 bytes
MAX_LINE = 16 << 20  # bytes of a row: a line of JSON, a record of CSV
JSON_LIST_BYTES = 1 << 30  # of a .json file, which is read whole
MAX_TEXT = 4 << 20  # bytes of a row's text
MAX_AT_ONCE = 3 << 19  # bytes that are tokenized at once, which takes up to 500 times the memory
MAX_DEPTH = 64  # lists and objects within one another in a row
MAX_COLUMNS = 4096  # keys of a row, columns of a table
MAX_MESSAGES = 4096  # messages of a conversation
MAX_ENTRIES = 100_000  # entries of a data folder that are looked at
MAX_TABLE_MEMORY = 768 << 20  # bytes that the process which reads a Parquet file may take
MAX_EXPANSION = 1000  # bytes of a Parquet file's rows for each of its own, from 128 MiB on
MAX_QUOTED = 80  # characters of the user's data in a message

# A request to `serve`
REQUEST_BYTES = 16 * MIB
ANSWERS = 64  # to all of its prompts
STOP_TEXTS = 16
LOGIT_BIASES = 1024  # tokens of a text that are made likelier, or less likely
LOGPROBS = 20  # likeliest tokens that are told beside a chosen one

# A stranger's template, tokenizer or pattern in a process of its own (qlora_wgpu/sandbox)
CHILD_BYTES = 512 << 20
CHILD_SECONDS = 2.0  # of computing, for one answer
CHILD_WAIT = 20.0  # seconds by the clock, for one answer; what others leave does not lessen them
CHILD_SECONDS_REGAINED = 0.05  # with each answer: what all together take is bounded as well
CHILD_SECONDS_PER_BYTE = 2e-7  # of the question
ANSWER_BYTES = 64 << 20
TOKEN_ID = 1 << 23
PATTERNS = 2048  # of one setting, such as rank_pattern: EVA writes one for each layer
PATTERN_CHARACTERS = 100_000  # of all of them
