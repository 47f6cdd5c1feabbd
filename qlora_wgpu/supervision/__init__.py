"""A command in a process of its own: what is left when a GPU's driver takes that process away.

Only the standard library is imported here, so that the supervising process stays small.
"""
