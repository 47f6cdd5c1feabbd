"""Small vision-language models with their processors, and rows with pictures for them."""

import json

from support.image_models import FAMILIES, folder_of, rgb_of

from references.seeded import VOCAB

R, ALPHA, RATE, NEW_TOKENS = 4, 8, 5e-3, 3
# Heights and widths of the pictures of each row, and what is asked and answered.
ROWS = (
    (((40, 60),), "What is it?", "A cat."),
    ((), "Hello", "Hi."),
    (((97, 97), (30, 84)), "Compare them.", "They are alike."),
)
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 14,
}  # fmt: skip
QWEN = {
    "depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "hidden_size": 24,
    "intermediate_size": 44, "out_hidden_size": 72,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# The family of the folder's files, changes of its image processor, and config.json.
CASES = {
    "smolvlm": (
        "smolvlm",
        {"size": {"longest_edge": 112}},
        {"text_config": {"model_type": "llama", **TEXT}, "scale_factor": 2, **UNTIED,
         "vision_config": {**SIGLIP, "image_size": 56}},
    ),
    "gemma3": (  # whose images are larger than its sliding window
        "gemma3",
        {"size": {"height": 112, "width": 112}},
        {"text_config": {**TEXT, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 12,
                         "layer_types": ["sliding_attention", "full_attention"], **UNTIED},
         "vision_config": {**SIGLIP, "image_size": 112}, "mm_tokens_per_image": 16, **UNTIED},
    ),
    "qwen2_5_vl": (
        "qwen2_vl",
        {"size": {"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 12}},
        {"text_config": {**TEXT, "rope_theta": 1e4,
                         "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}},
         "vision_config": {**QWEN, "window_size": 56, "fullatt_block_indexes": [1]}, **UNTIED},
    ),
    "qwen3_vl": (
        "qwen2_vl",
        {"size": {"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 12}},
        {"text_config": {**TEXT, "head_dim": 20,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                             "mrope_section": [4, 3, 3],
                                             "mrope_interleaved": True}},
         "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 1],
                           "num_position_embeddings": 25}, **UNTIED},
    ),
}  # fmt: skip


def written(case, folder):
    """Writes a case's tokenizer and processor; returns its family and the ids for config.json."""
    family, images, _ = CASES[case]
    folder_of(family, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**FAMILIES[family]["images"], **images}))
    config = json.loads((folder / "config.json").read_text())
    if case == "gemma3":
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 16}))
    return family, {key: value for key, value in config.items() if key.endswith(("_id", "_index"))}


def messages(row):
    """A row's messages, whose images are parts without content."""
    sizes, question, answer = ROWS[row]
    parts = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": question}]
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def pictures(row):
    """The pixels of a row's images."""
    return [rgb_of(*size) for size in ROWS[row][0]]
