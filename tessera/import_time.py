"""What keeps `import tessera` short, and what it says where its packages are missing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hundreds of modules make objects that stay: the garbage collector, which would go through
    them 160 times, an eighth of the time of the import, takes them for old ones behind it. Else its
    first look at them, a moment later, took another seventh."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else some are to be looked at by no collection
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if was_on:
            gc.enable()


@contextmanager
def telling_what_to_install() -> Iterator[None]:
    """A missing package names the remedy: who has run `make` has an environment with all of them,
    and may have called another Python."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tessera"):
            error.add_note("hint: pip install -e .   (in the checkout; after `make` its Python is "
                           ".venv/bin/python)")
        raise
