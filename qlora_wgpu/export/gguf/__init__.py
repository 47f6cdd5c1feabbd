"""Whole models as GGUF files, llama.cpp's format."""
