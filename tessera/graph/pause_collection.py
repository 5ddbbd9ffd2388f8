"""Python's search for circles, paused while much is made of which little is dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Without that search: lowering makes much and drops little of it, and every search walks
    through all that the program has. A seventh of the time for a step of GPT-2."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = ["collection_paused"]
