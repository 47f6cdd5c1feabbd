"""llama.cpp's GGUF files, both ways: what an architecture's keys and tensors mean."""
