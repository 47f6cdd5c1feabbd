"""Images of a vision-language model's prompts: their pixels, and the tokens that stand for them."""
