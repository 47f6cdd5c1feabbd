"""Our kernels as CUDA, and what NVIDIA's compiler makes of them."""
