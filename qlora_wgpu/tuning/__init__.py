"""Choosing how kernels are cut by timing them on the user's adapter, once per adapter and shape."""
