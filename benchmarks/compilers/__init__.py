"""Compilers of GPUs, in Mesa, asked what they make of kernels without such a GPU."""
