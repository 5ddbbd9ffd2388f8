"""What keeps `import tessera` short."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hundreds of modules make objects that stay: the garbage collector, which would go through
    them 160 times, an eighth of the time of the import, looks at them afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
