"""Which rows of embedding and head a setting trains."""

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.lora.trained_tokens import Vocabulary

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def of(*, tied=False, **more):
    return Vocabulary(EMBEDDING, HEAD, 20, 8, tied, **more)


@pytest.mark.parametrize(
    ("vocabulary", "indices", "expected"),
    [
        (of(), None, {}),
        (of(), [], {}),
        (of(), [3, 1], {EMBEDDING: (3, 1)}),
        (of(), [0, 19], {EMBEDDING: (0, 19)}),
        (of(), {"lm_head": [3], "embed_tokens": [4, 3]}, {EMBEDDING: (4, 3), HEAD: (3,)}),
        (of(), {"lm_head": [3]}, {HEAD: (3,)}),
        (of(tied=True), {"lm_head": [3], "embed_tokens": [3]}, {EMBEDDING: (3,)}),
        (of(tied=True), [3], {EMBEDDING: (3,)}),
        (of(bias=True), [3], {EMBEDDING: (3,)}),
        (of(new=(18, 19)), None, {EMBEDDING: (18, 19), HEAD: (18, 19)}),
        (of(new=(18, 19)), [3, 18], {EMBEDDING: (3, 18, 19), HEAD: (18, 19)}),
        (of(new=(19,)), {"lm_head": [3]}, {EMBEDDING: (19,), HEAD: (3, 19)}),
        (of(tied=True, new=(19,)), {"embed_tokens": [3]}, {EMBEDDING: (3, 19)}),
        (of(tied=True, new=(19,)), None, {EMBEDDING: (19,)}),
    ],
)
def test_rows_by_matrix(vocabulary, indices, expected):
    made = vocabulary.trained(indices)
    assert made == expected and [*made] == [*expected]


@pytest.mark.parametrize(
    ("vocabulary", "indices", "message"),
    [
        (of(), {"embed_tokens": []}, "a list of tokens must not be empty"),
        (of(), [20], "token 20 does not exist: the model's vocabulary has 20 tokens"),
        (of(), [3, -1], "token -1 does not exist"),
        (of(), [3, 4, 5, 4], "token 4 is listed twice"),
        (of(), {"norm": [3]}, r"unknown matrix 'norm' \(this model has embed_tokens and lm_head"),
        (of(), {"embed_tokens": [3], EMBEDDING: [4]}, f"names {EMBEDDING} twice"),
        (of(tied=True), {"lm_head": [3]}, "lm_head is tied to model.embed_tokens, so both have"),
        (of(tied=True), {"lm_head": [3], "embed_tokens": [4]}, "so both have the same trained"),
        (of(tied=True, bias=True), [3], "has a bias, .* name only model.embed_tokens if the two"),
        (of(bias=True), {"lm_head": [3]}, "lm_head has a bias, which PEFT ignores"),
        (of(tied=True, bias=True, new=(19,)), None, "tokens cannot be added to this model"),
    ],
)
def test_what_cannot_be_trained_is_a_sentence(vocabulary, indices, message):
    with pytest.raises(ConfigError, match=f"trainable_token_indices.*{message}"):
        vocabulary.trained(indices)


def test_a_classifier_s_head_has_a_row_for_each_class():
    assert (of().rows_of(HEAD), of().rows_of(EMBEDDING)) == (20, 20)
    assert (of(classes=3).rows_of(HEAD), of(classes=3).rows_of(EMBEDDING)) == (3, 20)
    layer = of().embedding_layer  # from tokens to hidden states
    assert (layer.in_features, layer.out_features) == (20, 8)
