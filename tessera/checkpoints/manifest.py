"""The manifest as records: every field is checked before anything acts on it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import CheckpointError, TesseraError
from ..graph import random
from ..lazy_dataclass import dataclass
from ..mesh.domain import Rect
from ..numerics import NumericType, as_type
from .layout import DATA_FILE
from .values import TYPES, Plain, read

SCALE = "@scale"  # ends the name of what scales a tensor
_MOST_ELEMENTS = 1 << 56  # of a tensor; more would not have an address
_MOST_DIMS = 64  # of a NumPy array
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor, as `name` in a data file."""

    name: str
    file: str
    box: Rect


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and the pieces that cover it, each element once; one piece when it was saved whole.
    """

    shape: tuple[int, ...]
    type: NumericType
    param: bool
    pieces: tuple[TensorPiece, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0].box.shape == self.shape


@dataclass(frozen=True)
class DataFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. tensors: by path, scales among them as `path@scale`; values: numbers
    and text of the tree, by path."""

    step: int
    random: random.RandomState
    meta: Any
    tensors: dict[str, TensorEntry]
    values: dict[str, Plain]
    files: dict[str, DataFile]


def damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged: {what}",
                           hint="use another checkpoint, or copy this one again from its source")


def parse(folder: Path, plain: dict[str, Any]) -> Manifest:
    """The records of a manifest. Raises CheckpointError that names the field that is wrong."""
    top = _Fields(folder, plain, "")
    state = top.object("random")
    files = {name: _data_file(folder, top.object("files"), name)
             for name in top.object("files").plain}
    tensors = {path: _entry(folder, top.object("tensors"), path, files)
               for path in top.object("tensors").plain}
    for path in tensors:
        if path.endswith(SCALE) and path.removesuffix(SCALE) not in tensors:
            raise top.wrong("tensors", f"{path} scales a tensor that is not there")
    drawn = random.RandomState(state.count("seed", below=1 << 64), state.count("step"),
                               _launches(state))
    return Manifest(top.count("step"), drawn, top.value("meta"), tensors, _values(top, tensors),
                    files)


def _values(top: _Fields, tensors: Collection[str]) -> dict[str, Plain]:
    """The tree's numbers and text; there are none in checkpoints of tensors alone."""
    found: dict[str, Plain] = {}
    for path in top.object("values").plain if "values" in top.plain else ():
        entry = top.object("values").object(path)
        kind, value = entry.of("type", str, "a type"), entry.value("value")
        x = read(kind, value)
        if x is None:
            raise entry.wrong("value", f"a {kind[:60]} is needed, it is {str(value)[:60]!r}"
                              if kind in TYPES else f"{kind[:60]!r} is none of {', '.join(TYPES)}")
        if path in tensors:
            raise top.wrong("values", f"{path} is a tensor, too")
        found[path] = x
    return found


def _launches(state: _Fields) -> tuple[tuple[str, int], ...]:
    """Launches of kernels that drew, by name; there are none in checkpoints before they counted."""
    found = state.of("launches", list, "a list") if "launches" in state.plain else []
    if not all(type(x) is list and list(map(type, x)) == [str, int] and x[1] >= 0 for x in found):
        raise state.wrong("launches", f"pairs of a kernel and a number are needed, it is "
                                      f"{str(found)[:60]}")
    return tuple((kernel, number) for kernel, number in found)


@dataclass(frozen=True)
class _Fields:
    """An object of the manifest; `at` says where it stands, for messages."""

    folder: Path
    plain: dict[str, Any]
    at: str

    def wrong(self, key: str, what: str) -> CheckpointError:
        return damaged(self.folder, f"its manifest is malformed: {self.at}{key}: {what}")

    def value(self, key: str) -> Any:
        if key not in self.plain:
            raise self.wrong(key, "it is not there")
        return self.plain[key]

    def of(self, key: str, kind: type, name: str) -> Any:
        found = self.value(key)
        if type(found) is not kind:
            raise self.wrong(key, f"{name} is needed, it is {str(found)[:60]!r}")
        return found

    def object(self, key: str) -> _Fields:
        return _Fields(self.folder, self.of(key, dict, "an object"), f"{self.at}{key}.")

    def count(self, key: str, below: int | None = None) -> int:
        found = self.of(key, int, "an integer")
        if found < 0 or (below is not None and found >= below):
            most = f" and < {below}" if below else ""
            raise self.wrong(key, f"an integer >= 0{most} is needed, it is {found}")
        return found

    def extents(self, key: str) -> tuple[int, ...]:
        found = self.of(key, list, "a list")
        if len(found) > _MOST_DIMS:
            raise self.wrong(key, f"a tensor has {_MOST_DIMS} dimensions at most, not {len(found)}")
        if any(type(n) is not int or n < 0 for n in found) or \
                math.prod(max(n, 1) for n in found) > _MOST_ELEMENTS:
            raise self.wrong(key, f"extents of a tensor are needed, they are {str(found)[:60]}")
        return tuple(found)


def _data_file(folder: Path, files: _Fields, name: str) -> DataFile:
    if not DATA_FILE.fullmatch(name):
        raise damaged(folder, f"{name!r} is no name of a data file")
    entry = files.object(name)
    digest = entry.of("sha256", str, "a digest")
    if not _DIGEST.fullmatch(digest):
        raise entry.wrong("sha256", f"64 hexadecimal digits are needed, it is {digest[:70]!r}")
    return DataFile(entry.count("bytes"), digest)


def _entry(folder: Path, tensors: _Fields, path: str, files: dict[str, DataFile]) -> TensorEntry:
    entry = tensors.object(path)
    shape, text = entry.extents("shape"), entry.of("type", str, "a numeric type")
    numeric, param = _known_type(folder, path, text), entry.of("param", bool, "true or false")
    if "pieces" in entry.plain:
        found = entry.of("pieces", list, "a list")
        pieces = tuple(_piece(entry, path, i, found, shape, files) for i in range(len(found)))
        _need_cover(entry, shape, pieces)
    else:
        pieces = (TensorPiece(path, _file(entry, files), Rect(shape)),)
    return TensorEntry(shape, numeric, param, pieces)


def _piece(entry: _Fields, path: str, i: int, found: list, shape: tuple[int, ...],
           files: dict[str, DataFile]) -> TensorPiece:
    if type(found[i]) is not dict:
        raise entry.wrong(f"pieces.{i}", f"an object is needed, it is {str(found[i])[:60]!r}")
    fields = _Fields(entry.folder, found[i], f"{entry.at}pieces.{i}.")
    name = fields.of("name", str, "a name")
    if not name.startswith(f"{path}@"):
        raise fields.wrong("name", f"{name[:60]!r} is no piece of {path}")
    lo, extents = fields.extents("lo"), fields.extents("shape")
    if len(lo) != len(shape) or len(extents) != len(shape) or any(
            a + n > e for a, n, e in zip(lo, extents, shape, strict=True)):
        raise fields.wrong("lo", f"{show_shape(extents)} from {show_shape(lo)} on does not lie in "
                                 f"{show_shape(shape)}")
    return TensorPiece(name, _file(fields, files), Rect(extents, lo))


def _file(fields: _Fields, files: dict[str, DataFile]) -> str:
    name = fields.of("file", str, "a file")
    if name not in files:
        raise fields.wrong("file", f"the manifest does not list {name[:60]!r}")
    return name


def _known_type(folder: Path, path: str, text: str) -> NumericType:
    """A policy class is found only when the program has registered it: nothing is imported."""
    try:
        return as_type(text)
    except TesseraError as err:
        raise CheckpointError(
            f"{path} of checkpoint {folder} has a type that is not known here: {err.message}",
            hint="declare its @ts.precision_policy class before loading",
        ) from err


def _need_cover(entry: _Fields, shape: tuple[int, ...], pieces: Sequence[TensorPiece]) -> None:
    """Raise CheckpointError unless each element is in one piece."""
    if not pieces:
        raise entry.wrong("pieces", "there are none")
    if len({p.name for p in pieces}) < len(pieces):
        raise entry.wrong("pieces", "two have the same name")
    whole, held = Rect(shape), sum(p.box.size for p in pieces)
    boxes = [p.box for p in pieces if p.box.size]
    if held != whole.size:
        raise entry.wrong("pieces", f"they hold {held} elements, the tensor has {whole.size}")
    if overlap(boxes):
        raise entry.wrong("pieces", "some lie on others")


def overlap(boxes: Sequence[Rect]) -> bool:
    """Whether two boxes have an index in common: of those sorted along one dimension, each is
    compared with the following ones that begin before it ends. The dimension is the one in which
    these are fewest, so a grid of N boxes takes far fewer than N^2 comparisons."""
    if len(boxes) < 2:
        return False
    lo = np.array([b.lo for b in boxes], np.int64)  # [N, D]
    hi = np.array([b.hi for b in boxes], np.int64)
    best = np.arange(len(boxes)), np.full(len(boxes), len(boxes))
    for dim in range(lo.shape[1]):
        order = np.argsort(lo[:, dim], kind="stable")
        ends = np.searchsorted(lo[order, dim], hi[order, dim])
        if ends.sum() < best[1].sum():
            best = order, ends
    order, ends = best
    lo, hi = lo[order], hi[order]
    for i, end in enumerate(ends.tolist()):
        others = slice(i + 1, end)
        if (np.maximum(lo[i], lo[others]) < np.minimum(hi[i], hi[others])).all(1).any():
            return True
    return False
