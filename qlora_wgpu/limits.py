"""Limits of inputs; tools/reference.py writes them into docs/limits.md.

They are far above what real models, data and runs need, and low enough that a damaged or malicious
file costs neither minutes nor gigabytes.
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30

# Files that are read as a whole
MODEL_JSON_BYTES = 4 * MIB  # config.json, adapter_config.json and the like
INDEX_BYTES = 64 * MIB  # model.safetensors.index.json: the largest have a few MiB
TOKENIZER_CONFIG_BYTES = 16 * MIB  # tokenizer_config.json and the files next to it
TOKENIZER_BYTES = 128 * MIB  # tokenizer.json: the largest known has 33 MiB
TEMPLATE_BYTES = MIB  # a chat template
OWN_JSON_BYTES = 64 * MIB  # what this package wrote itself: states and caches
OWN_LOG_BYTES = GIB  # the log of a run

# A configuration in YAML
YAML_BYTES = 128 * KIB  # the file
YAML_NODES = 10_000  # keys, values and lists
YAML_DEPTH = 16  # nesting
YAML_KEY = 500  # characters of a key, which may be a pattern
PROBLEMS_SHOWN = 20  # problems that one message lists

# A safetensors file
HEADER_BYTES = 16 * MIB  # its header
TENSORS = 100_000  # tensors, of a GGUF file too
DIMENSIONS = 32  # dimensions of a tensor: NumPy's limit before version 2

# A GGUF file
GGUF_HEADER_BYTES = 128 * MIB  # its header: vocabulary and merges of the largest take some 20 MiB
GGUF_KEYS = 10_000  # keys
GGUF_STRINGS = 2**22  # strings of a list: tokens, merges
GGUF_NAME_BYTES = 64 * KIB  # the name of a key or of a tensor

# A model, by its config.json
LAYERS = 256  # layers
EXPERTS = 4096  # experts of a layer
LINEARS = 2**18  # matrices of all layers and experts: Qwen3-Next has 74,076
HEADS = 4096  # attention heads
HEAD_DIM = 1024  # elements of a head
DELTA_KEY = 512  # elements of a delta net's key
STATE_SIZE = 512  # rows of the state of a Mamba head
TAPS = 64  # tokens that a convolution sees
WIDTH = 2**20  # hidden_size and intermediate_size
VOCABULARY = 2**32  # vocabulary that is read
VOCABULARY_TRACED = 2**23  # vocabulary that is planned and trained, in chunks of logits
MATRIX_ELEMENTS = 2**37  # elements of one matrix
PARAMETERS = 2**42  # elements of all
NUMBERS = (1e-30, 1e15)  # epsilons, factors, scales, where they are not zero

# A run
STEPS = 10**9  # steps
COUNT = 2**31 - 1  # counts of anything else
LEARNING_RATES = (1e-12, 1e6)  # learning rate
BETA = 0.999999  # decay rates of moments: more is nearly one in float32
TOKENS_OF_A_ROW = 2**24  # tokens of a row
CLASSES = 10_000  # labels of a classifier
RANK = 4096  # rank

# Data files
MIXED_ROWS = 10**8  # rows of a mixture in an epoch, each of which takes some 30 bytes
MAX_LINE = 16 * MIB  # a row: a line of JSON, a record of CSV, a row of Parquet
JSON_LIST_BYTES = GIB  # a .json file, which is read as a whole
MAX_TEXT = 4 * MIB  # the text of a row of text
MAX_AT_ONCE = 3 * MIB // 2  # a chat or a prompt: tokenizing takes up to 500 times its size
MAX_DEPTH = 64  # nesting of lists and objects in a row
MAX_COLUMNS = 4096  # keys of a row, columns of a table
MAX_MESSAGES = 4096  # messages of a conversation
MAX_ENTRIES = 100_000  # entries of a data folder
MAX_TABLE_MEMORY = 768 * MIB  # memory of the process that reads a Parquet file
MAX_EXPANSION = 1000  # bytes of rows per byte of a Parquet file, beyond 128 MiB
MAX_QUOTED = 80  # characters of the data that a message quotes

# An image
IMAGE_BYTES = 32 * MIB  # the file
IMAGE_PIXELS = 50_000_000  # pixels, those of photographs of the largest phones
IMAGES_OF_A_ROW = 256  # images of a row
LONGEST_SIDE = 1 << 14  # width and height of an image whose memory is estimated

# A request to serve
REQUEST_BYTES = 16 * MIB  # the request
ANSWERS = 64  # answers to all of its prompts
STOP_TEXTS = 16  # stop texts
LOGIT_BIASES = 1024  # tokens with a logit bias
LOGPROBS = 20  # most likely tokens that are returned for each position

# Foreign templates, tokenizers and patterns, which run in a sandboxed process
CHILD_BYTES = 512 * MIB  # memory of the process
CHILD_SECONDS = 2.0  # seconds of computing for an answer
CHILD_WAIT = 20.0  # seconds by the clock for an answer
CHILD_SECONDS_REGAINED = 0.05  # seconds that an answer, or a row's message, adds to the budget
CHILD_SECONDS_PER_BYTE = 2e-7  # further seconds per byte of input
ANSWER_BYTES = 64 * MIB  # an answer
TOKEN_ID = 2**23  # a token id
PATTERNS = 2048  # patterns of one setting, such as rank_pattern: EVA writes one for each layer
PATTERN_CHARACTERS = 100_000  # characters of all of them
