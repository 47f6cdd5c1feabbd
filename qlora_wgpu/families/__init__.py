"""Model families: a file for each model_type, and their common parts."""
