"""This package's version: pyproject.toml reads it here, and a bare checkout has it, too."""

__version__ = "0.1.0"
