"""The ops in NumPy, float64: what the kernels are held to. Nothing at run time needs them."""
