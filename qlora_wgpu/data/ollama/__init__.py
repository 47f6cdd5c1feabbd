"""What Ollama is told of a model: templates in Go's language, and the Modelfile."""
