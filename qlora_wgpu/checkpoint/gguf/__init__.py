"""GGUF files, llama.cpp's format, as bases: read as if they were Hugging Face's folders."""
