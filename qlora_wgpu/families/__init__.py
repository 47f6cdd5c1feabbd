"""Model families: a file for each model_type, and what their forwards share."""
