"""Writing a checkpoint: data files first, then one rename of the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, CheckpointError, TesseraError
from ..graph import random, tree
from ..numerics import NumericType, as_type
from ..tensor import Tensor
from .layout import FORMAT, MANIFEST, VERSION, make_folder, sealed, stored_as, sweep, sync_folder

FILE_BYTES = 1 << 30  # a data file is closed when it has reached this size


def save(path: str | os.PathLike, tensors: Any, *, step: int = 0, meta: Any = None,
         file_bytes: int = FILE_BYTES) -> Path:
    """Write a tree of tensors as a checkpoint; one that is there already is replaced at once.

    meta: anything JSON can hold. The state of ts.random is saved too. Raises CheckpointError when
    it cannot be written; then what was there before is still whole.
    """
    folder, named = Path(path), _named_tensors(tensors)
    manifest = _describe(named, step, meta)
    made: list[Path] = []
    committed = False
    try:
        make_folder(folder)
        token = secrets.token_hex(4)
        for i, names in enumerate(_groups(named, file_bytes)):
            file = folder / f"tensors-{token}-{i:05d}.safetensors"
            made.append(file)
            manifest["files"][file.name] = _write_tensors(file, {n: named[n] for n in names})
            for n in names:
                manifest["tensors"][n]["file"] = file.name
        made.append(folder / f"manifest-{token}.tmp")
        _write_file(made[-1], [sealed(manifest)])
        sync_folder(folder)
        os.replace(made[-1], folder / MANIFEST)
        committed = True
        sync_folder(folder)
        sweep(folder, manifest["files"].keys() | {MANIFEST})
    except OSError as err:
        if not committed:
            for file in made:
                with contextlib.suppress(OSError):
                    os.unlink(file)
        what = "written, but not tidied up" if committed else "not written"
        raise CheckpointError(
            f"checkpoint {folder} is {what}: {err}",
            hint="see that the disk has room and the folder is yours; what was saved before is "
            "untouched",
        ) from err
    return folder


def _named_tensors(tensors: Any) -> dict[str, Tensor]:
    """Leaves by path; the scale of a scaled tensor beside it, as `path@scale`."""
    leaves, structure = tree.flatten(tensors)
    named: dict[str, Tensor] = {}
    for path, x in zip(tree.paths(structure), leaves, strict=True):
        if not isinstance(x, Tensor) or not _can_be_named(x.type):
            kind = x.type if isinstance(x, Tensor) else type(x).__name__
            raise CheckpointError(
                f"{path or 'the value'} is {kind}, which a checkpoint cannot hold",
                hint="a tensor of a type that a string can name (ts.tensor, ts.dequantize); "
                "numbers and text belong into meta",
            )
        if path in named:
            raise CheckpointError(f"two tensors have the path {path!r}",
                                  hint="use dict keys without dots")
        named[path] = x
        if x.scale is not None:
            named[f"{path}@scale"] = x.scale
    return named


def _can_be_named(numeric: NumericType) -> bool:
    try:
        return as_type(str(numeric)) == numeric
    except TesseraError:
        return False


def _describe(named: Mapping[str, Tensor], step: int, meta: Any) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ArgumentError(f"the step of a checkpoint is an integer >= 0, got {step!r}")
    try:
        plain = json.loads(json.dumps({} if meta is None else meta))
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"meta is not plain data: {err}",
                              hint="dicts, lists, text, numbers, booleans and None") from err
    entries = {
        name: {"shape": list(x.shape), "type": str(x.type), "param": x.is_param}
        for name, x in named.items()
    }
    state = asdict(random.get_state())
    return {"format": FORMAT, "version": VERSION, "step": step, "random": state, "meta": plain,
            "tensors": entries, "files": {}}


def _groups(named: Mapping[str, Tensor], file_bytes: int) -> Iterator[list[str]]:
    """Names per data file."""
    group: list[str] = []
    size = 0
    for name, x in named.items():
        group.append(name)
        size += x.buffer.nbytes
        if size >= file_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_tensors(file: Path, named: Mapping[str, Tensor]) -> dict[str, Any]:
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
    return _write_file(file, [len(text).to_bytes(8, "little") + text, *buffers])


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_file(file: Path, parts: list[Any]) -> dict[str, Any]:
    """Create a file, which must not exist, and bring it to the disk. Its size and digest."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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
