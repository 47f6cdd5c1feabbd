"""Choosing how kernels are cut by timing them on the user's GPU, once per GPU and shape."""
