"""Labels of tokens, as Hugging Face's models and trainers have them."""

IGNORE_INDEX = -100  # the label of a token that is not learnt
