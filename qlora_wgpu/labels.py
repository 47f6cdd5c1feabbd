"""Labels of tokens, as in Hugging Face's models and trainers."""

IGNORE_INDEX = -100  # the label of tokens that the loss is not taken on
