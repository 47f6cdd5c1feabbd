"""What came with a stranger's files and computes: templates, patterns and tokenizers.

Some of it runs in a process of its own (``process.py``, and ``child.py`` on the other side), which
the operating system holds to its limits: neither Jinja nor Python's regular expressions nor the
library of tokenizers can be stopped from within.
"""
