"""A loaded model: its weights, its inputs, its memory, and what it computes."""
