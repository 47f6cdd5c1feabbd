"""Code in untrusted files: chat templates, regular expressions and tokenizers.

Some of it runs in a child process (``process.py``) whose time and memory the operating system
limits: neither Jinja nor Python's ``re`` nor the tokenizers library can be interrupted from within.
"""
