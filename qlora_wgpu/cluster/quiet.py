"""Dask's own messages, which are for those who run Dask; this package has a sentence for each."""

from __future__ import annotations

import logging
from importlib import import_module

_OTHERS = ("tornado.application", "asyncio")  # through which Dask's failures come as well


def quieten_dask() -> None:
    """Keeps Dask's tracebacks off the terminal.

    Importing Dask sets the levels of its loggers, so that it must be there before.
    """
    import_module("distributed")
    own = [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]
    for name in ("distributed", *own, *_OTHERS):
        logging.getLogger(name).setLevel(logging.CRITICAL)
