"""Text as bytes for a language model: one token per byte, batches that are a function of the step.

    corpus = ts.data.python_library()            # or ts.data.from_file("my.txt")
    tokens, targets = corpus.batch(step, B=16, T=128, seed=0)
    corpus.batch(step, B=16, T=128, rows=slice(4, 8))       # a rank's own part of that

A batch depends on (seed, step) only, so the data position of a run is its step: nothing is lost and
nothing is read twice after a restart.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ArgumentError, DataError
from .lazy_dataclass import dataclass
from .numerics import fold_in, random_bits

VOCABULARY = 256
LEAST_BYTES = 4096  # of either part: less teaches and measures nothing
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, eq=False)
class ByteCorpus:
    """Bytes to train on and bytes to measure with. Raises DataError when either is too short."""

    name: str
    train: np.ndarray  # [N] uint8
    held_out: np.ndarray  # [M] uint8

    def __post_init__(self) -> None:
        for part in ("train", "held_out"):
            size = getattr(self, part).size
            if size < LEAST_BYTES:
                raise DataError(
                    f"{self.name}: {size} bytes are left for {part.replace('_', '-')} use, "
                    f"at least {LEAST_BYTES} are needed",
                    hint="give a longer text: some 100 kB teach a model words, some MB more",
                )

    @cached_property
    def sha256(self) -> str:
        """Of both parts: two runs with equal digests see equal batches."""
        train, held_out = (np.ascontiguousarray(a).data for a in (self.train, self.held_out))
        digest = hashlib.sha256(train)
        digest.update(hashlib.sha256(held_out).digest())
        return digest.hexdigest()

    def batch(self, step: int, *, B: int, T: int, seed: int = 0, rows: Any = slice(None)
              ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), each [B, T] int64: B windows that start at random places.

        targets[b, t] is the byte after tokens[b, t].
        rows: which of the B are read, a slice or an array of numbers: those of one rank, say
        """
        room = self._room(self.train, "train", T)
        key = fold_in(seed, step)
        return _windows(self.train, (random_bits(key, B) % np.uint32(room))[rows], T)

    def held_out_batches(self, count: int, *, B: int, T: int) -> Iterator[tuple]:
        """`count` batches of windows spread evenly over the held-out bytes; the same each time."""
        room = self._room(self.held_out, "held_out", T)
        starts = np.linspace(0, room - 1, count * B).astype(np.int64)
        for i in range(count):
            yield _windows(self.held_out, starts[i * B:(i + 1) * B], T)

    def require_window(self, T: int) -> None:
        """Raises ArgumentError when windows of T bytes do not fit one of the parts."""
        self._room(self.train, "train", T)
        self._room(self.held_out, "held_out", T)

    def _room(self, part: np.ndarray, name: str, T: int) -> int:
        """Places where a window of T tokens and one more byte can start."""
        if T < 1 or part.size <= T:
            raise ArgumentError(
                f"{self.name}: windows of T = {T} do not fit the {part.size} bytes of {name}",
                hint="a shorter T or a longer text",
            )
        return int(part.size - T)


def _windows(part: np.ndarray, starts: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    places = starts.astype(np.int64)[:, None] + np.arange(T + 1)  # [B, T + 1]
    window = part[places].astype(np.int64)
    return window[:, :-1], window[:, 1:]


def from_file(path: str | os.PathLike, *, held_out: float = 0.05) -> ByteCorpus:
    """A file's bytes; the last `held_out` of it (a fraction) is kept for measuring.

    Raises DataError when the file is missing, unreadable, empty or too short.
    """
    if not 0 < held_out < 1:
        raise ArgumentError(f"held_out is a fraction between 0 and 1, got {held_out}")
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):  # a pipe or a device may have no end
            raise OSError(errno.EINVAL, "it is no regular file")
        text = np.fromfile(path, np.uint8)
    except OSError as err:
        raise DataError(f"cannot read {os.fspath(path)}: {err.strerror}",
                        hint="--data takes a readable file with text") from err
    if not text.size:
        raise DataError(f"{os.fspath(path)} is empty", hint="give a file with text")
    cut = int(text.size * (1 - held_out))
    return ByteCorpus(str(Path(path).name), text[:cut], text[cut:])


def python_library(folder: str | os.PathLike | None = None, *, limit_bytes: int = 12_000_000
                   ) -> ByteCorpus:
    """The source text of Python's own standard library: real text that every machine has.

    Every 20th file is held out whole, so that no window of it was trained on. Files come in the
    order of their path's hash: a cut at limit_bytes then keeps a mixture of all packages.
    Raises DataError when there is no source text, as in some minimal installations.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    train, held_out, total = bytearray(), bytearray(), 0
    for i, file in enumerate(_source_files(root)):
        try:
            text = file.read_bytes()
        except OSError as err:
            raise DataError(f"cannot read {file}: {err.strerror}",
                            hint="train on a file of your own: --data FILE") from err
        if i % 20 == 0:
            held_out += text
        else:
            train += text
        total += len(text)
        if total >= limit_bytes:
            break
    if total < 20 * LEAST_BYTES:
        raise DataError(
            f"{root} holds {total} bytes of Python source, too little to train on",
            hint="install Python's library as source, or train on a file: --data FILE",
        )
    parts = [np.frombuffer(p, np.uint8) for p in (train, held_out)]
    for part in parts:
        part.setflags(write=False)
    return ByteCorpus("the source of Python's standard library", *parts)


def _source_files(root: Path) -> list[Path]:
    """*.py below root without tests and installed packages, in the order of their path's hash."""
    found = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda f: hashlib.sha1(f.relative_to(root).as_posix().encode(),
                                                    usedforsecurity=False).digest())


__all__ = ["ByteCorpus", "from_file", "python_library"]
