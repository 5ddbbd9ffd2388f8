"""Python's search for circles, paused while much is made of which little is dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MUCH = 50_000  # objects more than were dropped; a search among them takes some ten milliseconds


@contextmanager
def collection_paused() -> Iterator[None]:
    """Without that search: lowering makes much and drops little of it, and every search walks
    through all that the program has. A seventh of the time for a step of GPT-2.

    What is there behind it counts as old, where it is much: else the next search, in the second
    call, would walk through all of it, and two more through what is left."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MUCH and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # to the oldest objects, without a look at any
        gc.enable()


__all__ = ["collection_paused"]
