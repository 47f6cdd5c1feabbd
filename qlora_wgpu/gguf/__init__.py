"""llama.cpp's architectures: what its files say of a model, read both ways."""
