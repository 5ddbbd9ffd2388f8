"""What a checkpoint looks like on the disk: names, the manifest's seal, how types are stored."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..graph import tree
from ..numerics import NumericType, row_bytes

MOST_NESTED = 200
FORMAT, VERSION = "tessera-checkpoint", 1
MANIFEST = "manifest.json"
# Names of https://github.com/huggingface/safetensors (TensorInfo dtypes); the rest is stored as U8.
SAFETENSORS = {
    "f64": "F64", "f32": "F32", "tf32": "F32", "f16": "F16", "bf16": "BF16",
    "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "bool_": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}
DATA_FILE = re.compile(r"tensors-[0-9a-f]{8}(-\d{5}){1,2}\.safetensors")
TEMPORARY = re.compile(r"manifest-[0-9a-f]{8}\.tmp")


def stored_as(numeric: NumericType, shape: tuple[int, ...]) -> tuple[str, list[int], int]:
    """(safetensors dtype, shape in the file, bytes) of a tensor."""
    dtype = numeric.dtype
    if not dtype.packed and dtype.name in SAFETENSORS:
        return SAFETENSORS[dtype.name], list(shape), math.prod(shape) * dtype.numpy.itemsize
    inner = [*shape[:-1], row_bytes(shape[-1] if shape else 1, dtype)]
    return "U8", inner, math.prod(inner)


def need_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ArgumentError(f"the step of a checkpoint is an integer >= 0, got {step!r}")


def sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON, with the digest of all the rest in it."""
    return json.dumps(manifest | {"sha256": digest_of(manifest)}, indent=1).encode()


def digest_of(manifest: dict[str, Any]) -> str:
    """SHA-256 over the manifest in one canonical spelling."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def make_folder(folder: Path) -> None:
    """The folder and those above it, each on the disk before it is used."""
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    os.mkdir(folder)
    above = open_folder(folder.parent)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def open_folder(folder: Path, *, links: bool = True) -> int:
    """A descriptor of the folder, through which all in it is reached.

    links: whether the name may be that of a link to a folder; CheckpointError when it is and may
    not
    """
    follow = 0 if links else os.O_NOFOLLOW
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
    except OSError as err:
        if not links and folder.is_symlink():
            raise CheckpointError(f"{folder} is a link: what it leads to is not this run's",
                                  hint="remove the link, or put a copy of the folder in its place"
                                  ) from err
        raise


def close_folder(handle: int) -> None:
    """Close what nothing was written through."""
    with contextlib.suppress(OSError):
        os.close(handle)


def read_regular(file: Path, expected: int | None = None) -> tuple[int, bytes]:
    """Size and bytes of a regular file; of one that has not the `expected` size no bytes.

    Raises OSError; for a pipe, a device or a folder it does so at once.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as opened:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return about.st_size, opened.read() if expected in (None, about.st_size) else b""


def sweep(folder: int, kept: Any) -> None:
    """Remove files of ours that the manifest does not name."""
    for name in os.listdir(folder):
        if name not in kept and (DATA_FILE.fullmatch(name) or TEMPORARY.fullmatch(name)):
            os.unlink(name, dir_fd=folder)


def need_shallow(plain: Any, what: str) -> None:
    """Raise CheckpointError for plain data that is nested deeper than JSON can be relied upon."""
    level, depth = [plain], 0
    while level:
        if depth > MOST_NESTED:
            raise CheckpointError(f"{what} is nested deeper than {MOST_NESTED} levels",
                                  hint="what refers to itself, or is that deep, belongs into a "
                                       "file of its own")
        level = [inner for x in level if isinstance(x, dict | list | tuple)
                 for inner in (x.values() if isinstance(x, dict) else x)]
        depth += 1


def named_leaves(value: Any) -> tuple[list[str], list[Any], tree.TreeDef]:
    """Paths and leaves of a tree, and its structure."""
    try:
        leaves, structure = tree.flatten(value)
        return tree.paths(structure), leaves, structure
    except RecursionError as err:
        raise CheckpointError("the tree of tensors is nested deeper than Python recurses",
                              hint="keep layers in one list: some hundred levels are possible"
                              ) from err
