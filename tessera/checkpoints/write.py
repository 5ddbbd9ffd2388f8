"""Writing a checkpoint: data files first, then one rename of the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import CheckpointError, TesseraError
from ..graph import random
from ..lazy_dataclass import dataclass
from ..mesh.ranks.envelope import ranks_text
from ..mesh.ranks.messages import first_error, gather, raised_on_all, share, together
from ..mesh.ranks.transport import Transport
from ..mesh.tensor import DistTensor
from ..mesh.world import patience, transport
from ..numerics import NumericType, as_type
from ..tensor import Tensor
from .layout import (
    FORMAT,
    MANIFEST,
    VERSION,
    close_folder,
    make_folder,
    named_leaves,
    need_shallow,
    need_step,
    open_folder,
    sealed,
    stored_as,
    sweep,
)
from .locking import writing
from .manifest import SCALE
from .shards import need_settled, own_pieces, owners
from .values import Plain, encode_value, is_plain

FILE_BYTES = 1 << 30  # a data file is closed when it has reached this size


@together("checkpoints.save")
@patience(first=True)  # a disk takes longer than ranks that compute
def save(path: str | os.PathLike, tensors: Any, *, step: int = 0, meta: Any = None,
         file_bytes: int = FILE_BYTES) -> Path:
    """Write a tree of tensors as a checkpoint; one that is there already is replaced at once.

    tensors: a tree, in which numbers (int, float, bool), text and None may stand beside them
    meta: anything JSON can hold. The state of ts.random is saved too. On several ranks all of them
    call it: each writes its parts of distributed tensors, and what it alone has; of a plain tensor
    that several have, which is taken to be the same on all, the first of them writes its own. The
    manifest, with meta and the random state, is rank 0's.
    The folder is locked meanwhile: of two programs that save to it at once, one is refused.
    Raises CheckpointError, on every rank, when it cannot be written; then what was there before is
    still whole.
    """
    return save_to(Path(path), tensors, step, meta, file_bytes, links=True)


def save_to(folder: Path, tensors: Any, step: int, meta: Any, file_bytes: int = FILE_BYTES, *,
            links: bool) -> Path:
    """links: whether the folder's name may be that of a link."""
    here = transport()
    with raised_on_all(CheckpointError):
        leaves, manifest = _leaves(tensors), _describe(step, meta)
    owner = owners(leaves, here)
    named = _named_tensors({p: x for p, x in leaves.items() if isinstance(x, Tensor)}, owner,
                           here.rank)
    manifest["tensors"] = _entries(named)
    manifest["values"] = {p: encode_value(p, x) for p, x in leaves.items()
                          if not isinstance(x, Tensor)}
    token = share(secrets.token_hex(4), here)
    with contextlib.ExitStack() as held:
        save = _Save(folder, manifest, here)
        with raised_on_all(CheckpointError):
            save.begin(held, links)
        if save.goes_on():
            save.attempt(lambda: save.open(held, links))
        if save.goes_on():
            save.attempt(lambda: save.write_tensors(named, token, file_bytes))
            save.gather()
        if save.goes_on():
            save.attempt(lambda: save.commit(token) if here.rank == 0 else None)
        if not save.goes_on():
            save.give_up()
    return folder


class _Save:
    """A save in its phases. After each of them all ranks know whether one has failed."""

    def __init__(self, folder: Path, manifest: dict[str, Any], here: Transport):
        self.folder, self.manifest, self.here = folder, manifest, here
        self.handle = -1  # of the folder
        self.made: list[str] = []
        self.folders: dict[str, tuple[int, str]] = {}  # on rank 0: of files: the writer, where
        self.committed = False
        self.error: OSError | None = None
        self.failed: str | None = None  # of any rank

    def begin(self, held: contextlib.ExitStack, links: bool) -> None:
        """Rank 0 makes the folder and locks it for all."""
        if self.here.rank == 0:
            self.attempt(lambda: make_folder(self.folder))
            self.attempt(lambda: self.open(held, links))
            self.attempt(lambda: held.enter_context(writing(self.handle, self.folder)))

    def open(self, held: contextlib.ExitStack, links: bool) -> None:
        if self.handle < 0:
            self.handle = open_folder(self.folder, links=links)
            held.callback(close_folder, self.handle)

    def attempt(self, action: Callable[[], Any]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except CheckpointError:  # it says all there is to say
            raise
        except OSError as err:
            self.error = err

    def goes_on(self) -> bool:
        if self.failed is None:
            found = first_error(None if self.error is None else str(self.error), self.here)
            if found is not None:
                rank, text = found
                self.failed = f"on rank {rank}: {text}" if self.here.size > 1 else text
        return self.failed is None

    def write_tensors(self, named: Mapping[str, Stored], token: str, file_bytes: int) -> None:
        """This rank's tensors, in files of its own."""
        rank = f"{self.here.rank:05d}-" if self.here.size > 1 else ""
        for i, names in enumerate(_groups(named, file_bytes)):
            file = f"tensors-{token}-{rank}{i:05d}.safetensors"
            self.made.append(file)
            self.manifest["files"][file] = _write_tensors(
                self.handle, file, {n: named[n].tensor for n in names})
            for n in names:
                named[n].entry["file"] = file
        if self.here.size > 1:  # rank 0 commits what others have written
            os.fsync(self.handle)

    def gather(self) -> None:
        """Rank 0 learns what every rank has written."""
        mine = {k: self.manifest[k] for k in ("files", "tensors", "values")}
        mine["folder"] = str(self.folder.absolute())
        all_told = gather(mine, self.here)
        saved = [{*told["tensors"]} for told in all_told]
        for rank, told in enumerate(all_told[1:], start=1):
            self.manifest["files"] |= told["files"]
            self.folders |= dict.fromkeys(told["files"], (rank, told["folder"]))
            self.manifest["values"] |= told["values"]
            for path, entry in told["tensors"].items():
                held = self.manifest["tensors"].setdefault(path, entry)
                if "pieces" in entry and held is not entry:
                    held["pieces"] += entry["pieces"]
        if self.error is None and saved:
            self.error = _incomplete(self.manifest["tensors"], saved)

    def commit(self, token: str) -> None:
        """The new manifest becomes the folder's. Raises FileNotFoundError when a rank has written
        elsewhere: to another path, or to a disk of its machine alone."""
        there = set(os.listdir(self.handle)) if self.folders else set()
        for file, (rank, folder) in self.folders.items():
            if file not in there:
                raise FileNotFoundError(
                    f"rank {rank} has written to {folder}, which is not {self.folder.absolute()} "
                    "here: all ranks save to one folder, on a disk that all of them see")
        self.made.append(f"manifest-{token}.tmp")
        _write_file(self.handle, self.made[-1], [sealed(self.manifest)])
        os.fsync(self.handle)
        os.replace(self.made[-1], MANIFEST, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        self.committed = True
        os.fsync(self.handle)
        sweep(self.handle, self.manifest["files"].keys() | {MANIFEST})

    def give_up(self) -> NoReturn:
        self.committed = share(self.committed, self.here)  # then the files are in use
        if not self.committed:
            for file in self.made:
                with contextlib.suppress(OSError):
                    os.unlink(file, dir_fd=self.handle)
        what = "written, but not tidied up" if self.committed else "not written"
        raise CheckpointError(
            f"checkpoint {self.folder} is {what}: {self.failed}",
            hint="what was saved before is untouched; of a disk, see that it has room and the "
            "folder is yours",
        ) from self.error


def _incomplete(tensors: Mapping[str, dict], saved: Sequence[set[str]]) -> OSError | None:
    """What is wrong where ranks save different trees: a tensor of which some have a part, and do
    not save it. saved: paths, by rank"""
    for path, entry in tensors.items():
        held = sum(prod(p["shape"]) for p in entry.get("pieces", ()))
        if "pieces" in entry and held != prod(entry["shape"]):
            writers = [rank for rank, paths in enumerate(saved) if path in paths]
            return OSError(f"{path} has {prod(entry['shape'])} elements and ranks save {held} of "
                           f"them, {ranks_text(writers)} alone: all ranks that have a part of a "
                           "tensor save it, under the same path")
    return None


@dataclass(frozen=True)
class Stored:
    """A tensor as it is written, and the manifest's entry that will name its file: that of a
    tensor, or that of a box of the distributed tensor `path`, which `whole` describes."""

    tensor: Tensor
    entry: dict[str, Any]
    path: str
    whole: dict[str, Any] | None = None


def _leaves(tensors: Any) -> dict[str, Tensor | Plain]:
    """The tensors, numbers and texts by path. Raises CheckpointError for what a checkpoint cannot
    hold."""
    paths, leaves, _ = named_leaves(tensors)
    found: dict[str, Tensor | Plain] = {}
    for path, x in zip(paths, leaves, strict=True):
        if is_plain(x):
            encode_value(path, x)  # which says what is too large
        elif not isinstance(x, Tensor) or not _can_be_named(x.type):
            kind = x.type if isinstance(x, Tensor) else type(x).__name__
            drawn = isinstance(x, random.RandomState)
            raise CheckpointError(
                f"{path or 'the value'} is {kind}, which a checkpoint cannot hold",
                hint="leave it out: every checkpoint has it, as saved.random" if drawn else
                "a tensor of a type that a string can name (ts.tensor, ts.dequantize), int, float, "
                "bool, str or None; other plain data belongs into meta",
            )
        if path in found:
            raise CheckpointError(f"two leaves have the path {path!r}",
                                  hint="use dict keys without dots")
        if "@" in path:
            raise CheckpointError(f"the path {path!r} has an @, which begins the names of scales "
                                  "and parts", hint="use dict keys without @")
        if isinstance(x, DistTensor):
            need_settled(path, x)
        found[path] = x
    return found


def _named_tensors(leaves: Mapping[str, Tensor], owner: Mapping[str, int], rank: int
                   ) -> dict[str, Stored]:
    """What this rank writes, by name: tensors by path, the scale of a scaled tensor beside it as
    `path@scale`, the boxes of a distributed one."""
    named: dict[str, Stored] = {}
    for path, x in leaves.items():
        if isinstance(x, DistTensor):
            if x.mesh.world_ranks[0] == owner[path]:
                for name, box, piece in own_pieces(path, x):
                    entry = {"name": name, "lo": list(box.lo), "shape": list(box.shape)}
                    named[name] = Stored(piece, entry, path, _entry(x))
        elif owner[path] == rank:
            named[path] = Stored(x, _entry(x), path)
            if x.scale is not None:
                named[path + SCALE] = Stored(x.scale, _entry(x.scale), path + SCALE)
    return named


def _entry(x: Tensor) -> dict[str, Any]:
    return {"shape": list(x.shape), "type": str(x.type), "param": x.is_param}


def _can_be_named(numeric: NumericType) -> bool:
    try:
        return as_type(str(numeric)) == numeric
    except TesseraError:
        return False


def _describe(step: int, meta: Any) -> dict[str, Any]:
    need_step(step)
    try:
        plain = json.loads(json.dumps({} if meta is None else meta))
    except (TypeError, ValueError, RecursionError) as err:
        raise CheckpointError(f"meta is not plain data: {err}",
                              hint="dicts, lists, text, numbers, booleans and None") from err
    need_shallow(plain, "meta")
    state = asdict(random.get_state())
    return {"format": FORMAT, "version": VERSION, "step": step, "random": state, "meta": plain,
            "tensors": {}, "values": {}, "files": {}}


def _entries(named: Mapping[str, Stored]) -> dict[str, Any]:
    """The manifest's tensors by path; of a distributed one its pieces, each a box of the whole."""
    found: dict[str, Any] = {}
    for stored in named.values():
        if stored.whole is None:
            found[stored.path] = stored.entry
        else:
            held = found.setdefault(stored.path, {**stored.whole, "pieces": []})
            held["pieces"].append(stored.entry)
    return found


def _groups(named: Mapping[str, Stored], file_bytes: int) -> Iterator[list[str]]:
    """Names per data file."""
    group: list[str] = []
    size = 0
    for name, x in named.items():
        group.append(name)
        size += x.tensor.buffer.nbytes
        if size >= file_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_tensors(folder: int, file: str, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """One safetensors file: u64 length, JSON header, buffers. Its size and digest."""
    header: dict[str, Any] = {}
    at = 0
    order = sorted(named, key=lambda n: (-named[n].dtype.numpy.itemsize, n))  # keeps them aligned
    for name in order:
        kind, shape, size = stored_as(named[name].type, named[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    buffers = (_bytes_of(named[name].buffer) for name in order)
    return _write_file(folder, file, [len(text).to_bytes(8, "little") + text, *buffers])


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_file(folder: int, file: str, parts: list[Any]) -> dict[str, Any]:
    """Create a file, which must not exist, and bring it to the disk. Its size and digest."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644,
                     dir_fd=folder)
    try:
        for part in parts:
            digest.update(part)
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(handle, rest):]
            size += len(part)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"bytes": size, "sha256": digest.hexdigest()}
