"""Reading a checkpoint: every size, digest, shape and type is verified; nothing is executed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import CheckpointError
from ..graph import random, tree
from ..graph.devices import to
from ..lazy_dataclass import dataclass
from ..mesh.domain import Rect
from ..mesh.ranks.messages import raised_on_all, share, together
from ..mesh.tensor import DistTensor
from ..mesh.world import transport
from ..numerics import NumericType, unpack
from ..tensor import Tensor
from ..tile.launch.resident import Resident, offload
from .layout import (
    FORMAT,
    MANIFEST,
    VERSION,
    digest_of,
    named_leaves,
    need_shallow,
    read_regular,
    stored_as,
)
from .manifest import SCALE, DataFile, Manifest, TensorPiece, damaged, parse
from .shards import fill_part, need_settled
from .values import Plain, holds_number, misfit

_MISSING = (errno.ENOENT, errno.ENOTDIR)
Content = dict[str, dict[str, Any]]  # of a data file: {name: {dtype, shape, data}}


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors by path, and the numbers and texts beside them, all verified."""

    path: Path
    step: int
    tensors: Tensors
    random: random.RandomState
    meta: Any
    values: dict[str, Plain]

    def __getitem__(self, name: Any) -> Any:
        paths = (*self.tensors, *self.values)
        near = next((p for p in paths if p == name or p.startswith(f"{name}.")), None)
        raise CheckpointError(
            f"a checkpoint is not indexed: it has tensors by path, {', '.join(paths[:4])}"
            f"{', ...' if len(paths) > 4 else ''}, and no structure of its own",
            hint="saved.tree(like) gives what was saved in the structure of `like`"
            + ("" if near is None else f"; one alone is saved.tensors[{near!r}]"
               if near in self.tensors else f"; one alone is saved.values[{near!r}]"))

    @together("Checkpoint.tree")
    def tree(self, like: Any, *, part: bool = False) -> Any:
        """What was saved in the structure of `like`, whose shapes and types must agree; tensors
        distributed, on a GPU, or offloaded from it, where `like` has them, however they were saved.
        A number in `like` also takes a tensor without axes, which is what compiled functions give
        back for it. On several ranks all of them call it; what they ask for may differ.

        part: `like` may ask for some of the tensors only

        Raises CheckpointError, on every rank, that names what is missing, left over or different.
        """
        with raised_on_all(CheckpointError):
            paths, leaves, structure = named_leaves(like)
            self._need_fit(dict(zip(paths, leaves, strict=True)), part)
            found = [self._leaf(p, leaf) for p, leaf in zip(paths, leaves, strict=True)]
            self.tensors.forget()
        return tree.unflatten(structure, found)

    def _leaf(self, path: str, like: Any) -> Any:
        if path in self.values:
            return self.values[path]
        if isinstance(like, DistTensor):
            return self.tensors.parts(path, like)
        found = self.tensors[path]
        if not isinstance(like, Tensor):
            return found.item()
        if isinstance(like, Resident):
            found = to(found, like.device)
            if like.offloaded:
                offload(found)
        return found

    def _need_fit(self, asked: dict[str, Any], part: bool) -> None:
        there = [*self.tensors, *self.values]
        known = set(there)
        wrong = [f"{p} is not in it" for p in asked if p not in known]
        if not part:
            wrong += [f"{p} is in it, but not asked for" for p in there if p not in asked]
        wrong += [text for p in asked if p in known and (text := self._misfit(p, asked[p]))]
        if wrong:
            more = [f"... and {len(wrong) - 5} more"] if len(wrong) > 5 else []
            converted = [p for p in asked if p in known and self._is_of_another_type(p, asked[p])]
            raise CheckpointError(
                "\n  ".join([f"{self.path} does not fit:", *wrong[:5], *more]),
                hint="ask for the types that were saved, and convert what was loaded: "
                f"ts.cast(x, {str(asked[converted[0]].type)!r})" if len(converted) == len(wrong)
                else "build the model with the settings it was saved with (see its meta)",
            )

    def _misfit(self, path: str, leaf: Any) -> str | None:
        """What is wrong with asking for `leaf`."""
        if path in self.values:
            return misfit(path, self.values, leaf)
        shape, numeric = self.tensors.described(path)
        if isinstance(leaf, Tensor):
            fits = (shape, numeric) == (tuple(leaf.shape), leaf.type)
            asked = f"{leaf.type}{show_shape(leaf.shape)}"
        else:
            fits = holds_number(shape, numeric.dtype.kind, leaf)
            asked = type(leaf).__name__
        return None if fits else f"{path} is {numeric}{show_shape(shape)}, asked for {asked}"

    def _is_of_another_type(self, path: str, leaf: Any) -> bool:
        """Whether `leaf` is a tensor of these extents that has another type."""
        if path in self.values or not isinstance(leaf, Tensor):
            return False
        shape, numeric = self.tensors.described(path)
        return shape == tuple(leaf.shape) and numeric != leaf.type


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by path. A process alone reads all of them when it loads; on
    several ranks each then reads the files that it needs."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.entries, self.files = folder, manifest.tensors, manifest.files
        self._stored: dict[str, Content] = {}  # by file
        self._made: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.entries if not name.endswith(SCALE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, path: object) -> bool:
        return path in self.entries and not str(path).endswith(SCALE)

    def __getitem__(self, path: str) -> Tensor:
        if path not in self:
            raise KeyError(path)
        if path not in self._made:
            made = self._whole(path)
            if path + SCALE in self.entries:
                made.scale = self._whole(path + SCALE)
            self._made[path] = made
        return self._made[path]

    def described(self, path: str) -> tuple[tuple[int, ...], NumericType]:
        """Shape and numeric type, without reading the tensor."""
        entry = self.entries[path]
        return entry.shape, entry.type

    def parts(self, path: str, like: DistTensor) -> DistTensor:
        """The parts of a tensor that lies as `like` which this process holds."""
        need_settled(path, like)
        entry = self.entries[path]
        if path in self._made:
            boxes = [(Rect(entry.shape), lambda: self._made[path].array)]
        else:
            boxes = [(p.box, partial(self._array, p, entry.type)) for p in entry.pieces]
        held = {r: Tensor(fill_part(like, r, boxes), like.type) for r in like.held}
        return DistTensor(held, like.shape, like.type, like.layout, is_param=entry.param,
                          name=like.name)

    def _whole(self, path: str) -> Tensor:
        entry = self.entries[path]
        if entry.is_whole:
            return Tensor(self._array(entry.pieces[0], entry.type), entry.type,
                          is_param=entry.param)
        for piece in entry.pieces:  # their sizes are true before memory is asked for
            self._held(piece, entry.type)
        out = np.empty(entry.shape, entry.type.dtype.numpy)
        for piece in entry.pieces:
            out[piece.box.slices()] = self._array(piece, entry.type)
        return Tensor(out, entry.type, is_param=entry.param)

    def _array(self, piece: TensorPiece, numeric: NumericType) -> np.ndarray:
        """The elements of a piece."""
        data, dtype, shape = self._held(piece, numeric)["data"], numeric.dtype, piece.box.shape
        if not dtype.packed:
            return np.frombuffer(data, dtype.numpy).reshape(shape).copy()
        codes = np.frombuffer(data, np.uint8).reshape(stored_as(numeric, shape)[1])
        return unpack(codes, dtype, shape[-1] if shape else 1).reshape(shape)

    def _held(self, piece: TensorPiece, numeric: NumericType) -> dict[str, Any]:
        """A piece as its file has it, which is what the manifest says."""
        if piece.file not in self._stored:
            self._stored[piece.file] = _read_file(self.folder, piece.file, self.files[piece.file])
        held = self._stored[piece.file].get(piece.name)
        if held is None:
            raise damaged(self.folder, f"{piece.file} does not hold {piece.name}")
        kind, inner, size = stored_as(numeric, piece.box.shape)
        if (held["dtype"], list(held["shape"]), len(held["data"])) != (kind, inner, size):
            raise damaged(self.folder, f"{piece.name} is {held['dtype']}{held['shape']} in "
                                       f"{piece.file}, {kind}{inner} by the manifest")
        return held

    # --- all of it ------------------------------------------------------------------------------
    def read_all(self) -> None:
        """Verify and read everything, then let go of the files' bytes."""
        self.verify(self.files)
        for path in self:
            self[path]
        self.forget()

    def verify(self, files: Collection[str]) -> None:
        """These files are what was written, and hold what the manifest says."""
        for name in files:
            self._stored[name] = _read_file(self.folder, name, self.files[name])
        for entry in self.entries.values():
            for piece in entry.pieces:
                if piece.file in files:
                    self._held(piece, entry.type)

    def forget(self) -> None:
        """Let go of the files' bytes."""
        self._stored.clear()


@together("checkpoints.load")
def load(path: str | os.PathLike) -> Checkpoint:
    """Read a checkpoint, verifying every size, digest, shape and type. Loads no code. On several
    ranks all of them call it: each verifies some of the files now, and reads those that it needs,
    verified again, when it does.

    Raises CheckpointError, on every rank, for a folder that is none, an unfinished one, another
    version, and whatever is missing, truncated or changed.
    """
    folder, here = Path(path), transport()
    plain: dict[str, Any] = {}
    with raised_on_all(CheckpointError):
        if here.rank == 0:
            plain = _read_manifest(folder)
    plain = share(plain)
    with raised_on_all(CheckpointError):
        manifest = parse(folder, plain)
        tensors = Tensors(folder, manifest)
        if here.size == 1:
            tensors.read_all()
        else:
            for name in list(manifest.files)[here.rank::here.size]:
                tensors.verify([name])
                tensors.forget()
    return Checkpoint(folder, manifest.step, tensors, manifest.random, manifest.meta,
                      manifest.values)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        _, text = read_regular(folder / MANIFEST)
    except OSError as err:
        state = f"cannot be read: {MANIFEST}: {err.strerror}" if err.errno not in _MISSING else \
            "has no manifest.json: it is no checkpoint, or its save was never finished" \
            if folder.is_dir() else "does not exist" if not folder.exists() else "is no folder"
        raise CheckpointError(f"{folder} {state}",
                              hint="name a folder that ts.checkpoints.save wrote") from err
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise damaged(folder, f"{MANIFEST} is not JSON ({err})") from err
    need_shallow(manifest, f"{folder / MANIFEST}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not the manifest of a checkpoint",
                              hint=f'its "format" would be "{FORMAT}"')
    if repr(manifest.get("version")) != repr(VERSION):  # True and 1.0 are none
        raise CheckpointError(
            f"{folder} has format version {manifest.get('version')}, this tessera reads {VERSION}",
            hint="load it with the tessera that wrote it",
        )
    seal = manifest.pop("sha256", None)
    if seal != digest_of(manifest):
        raise damaged(folder, f"{MANIFEST} was changed after it was written (SHA-256 differs)")
    return manifest


def _read_file(folder: Path, name: str, entry: DataFile) -> Content:
    """The tensors of a data file as safetensors gives them."""
    import safetensors

    try:
        size, data = read_regular(folder / name, entry.bytes)
    except FileNotFoundError as err:
        raise damaged(folder, f"{name} is missing") from err
    except OSError as err:
        raise CheckpointError(f"cannot read {folder / name}: {err.strerror}") from err
    if size != entry.bytes:
        raise damaged(folder, f"{name} has {size} bytes, not {entry.bytes}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise damaged(folder, f"{name} is not what was written (SHA-256 differs)")
    try:
        return dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as err:
        raise damaged(folder, f"{name} is not a safetensors file ({err})") from err
