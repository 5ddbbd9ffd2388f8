"""What a checkpoint looks like on the disk: names, the manifest's seal, how types are stored."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ..numerics import NumericType, row_bytes

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
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """The folder's entries on the disk: without it a rename may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, kept: Any) -> None:
    """Remove files of ours that the manifest does not name."""
    for name in os.listdir(folder):
        if name not in kept and (DATA_FILE.fullmatch(name) or TEMPORARY.fullmatch(name)):
            os.unlink(folder / name)
