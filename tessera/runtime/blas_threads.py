"""The threads of the BLAS that NumPy calls: how many are used is a matter of the whole process."""

from __future__ import annotations

import threading
from typing import Any


class _SingleThread:
    """While active, BLAS uses one thread. Nested and concurrent uses count; the last restores."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.Lock(), 0
        self.before: list[int] = []
        self.libraries: list[Any] | None = None

    def __enter__(self) -> None:
        with self.lock:
            if self.libraries is None:
                from threadpoolctl import ThreadpoolController

                found = ThreadpoolController().lib_controllers
                self.libraries = [x for x in found if x.user_api == "blas"]
            if self.depth == 0:
                self.before = [x.get_num_threads() for x in self.libraries]
                for x in self.libraries:
                    x.set_num_threads(1)
            self.depth += 1

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                for x, n in zip(self.libraries or (), self.before, strict=True):
                    x.set_num_threads(n)


single_thread = _SingleThread()

__all__ = ["single_thread"]
