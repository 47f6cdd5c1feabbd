"""Several GPUs and machines: how they reach each other, through Dask distributed (an extra)."""
