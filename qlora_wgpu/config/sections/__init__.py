"""The sections of a run's settings, with every key and its default."""
