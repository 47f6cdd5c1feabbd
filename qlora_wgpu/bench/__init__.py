"""Benchmarks of training steps and kernels, against the GPU's measured peak."""
