"""A model over HTTP, as clients of OpenAI's chat completions ask for it."""
