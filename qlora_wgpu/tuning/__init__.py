"""Chooses the configuration of kernels by timing them on the user's GPU, once per GPU and shape."""
