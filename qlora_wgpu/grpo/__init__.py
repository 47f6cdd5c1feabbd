"""Group relative policy optimization: completions are sampled, scored and learned from."""
