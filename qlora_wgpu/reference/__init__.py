"""The ops in NumPy, float64, as references for the kernels; not needed at run time."""
