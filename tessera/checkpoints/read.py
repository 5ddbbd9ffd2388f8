"""Reading a checkpoint: every size, digest, shape and type is verified; nothing is executed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..dims import show_shape
from ..errors import CheckpointError, TesseraError
from ..graph import random, tree
from ..numerics import NumericType, as_type, unpack
from ..tensor import Tensor
from .layout import DATA_FILE, FORMAT, MANIFEST, VERSION, digest_of, stored_as


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors by path, all verified."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    random: random.RandomState
    meta: dict[str, Any]

    def tree(self, like: Any) -> Any:
        """The tensors in the structure of `like`, whose shapes and numeric types must agree.

        Raises CheckpointError that names what is missing, left over or different.
        """
        leaves, structure = tree.flatten(like)
        paths = tree.paths(structure)
        wrong = [f"{p} is not in it" for p in paths if p not in self.tensors]
        wrong += [f"{p} is in it, but not asked for" for p in self.tensors if p not in set(paths)]
        for path, leaf in zip(paths, leaves, strict=True):
            held = self.tensors.get(path)
            if held is not None and (held.shape, held.type) != (tuple(leaf.shape), leaf.type):
                wrong.append(f"{path} is {held.type}{show_shape(held.shape)}, "
                             f"asked for {leaf.type}{show_shape(leaf.shape)}")
        if wrong:
            more = [f"... and {len(wrong) - 5} more"] if len(wrong) > 5 else []
            raise CheckpointError(
                "\n  ".join([f"{self.path} does not fit:", *wrong[:5], *more]),
                hint="build the model with the settings it was saved with (see its meta)",
            )
        return tree.unflatten(structure, [self.tensors[p] for p in paths])


def load(path: str | os.PathLike) -> Checkpoint:
    """Read a checkpoint, verifying every size, digest, shape and type. Loads no code.

    Raises CheckpointError for a folder that is none, an unfinished one, another version, and
    whatever is missing, truncated or changed.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    try:
        stored: dict[str, dict] = {}
        for name, entry in manifest["files"].items():
            stored |= _read_tensors(folder, name, entry)
        tensors = {n: _rebuild(folder, n, e, stored) for n, e in manifest["tensors"].items()
                   if not n.endswith("@scale")}
        for name in manifest["tensors"]:
            if name.endswith("@scale"):
                tensors[name.removesuffix("@scale")].scale = _rebuild(
                    folder, name, manifest["tensors"][name], stored)
        state = random.RandomState(**manifest["random"])
        return Checkpoint(folder, manifest["step"], tensors, state, manifest["meta"])
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        if isinstance(err, TesseraError):
            raise
        raise _damaged(folder, f"its manifest is malformed ({type(err).__name__}: {err})") from err


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged: {what}",
                           hint="use another checkpoint, or copy this one again from its source")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as err:
        state = "has no manifest.json: it is no checkpoint, or its save was never finished" \
            if folder.is_dir() else "does not exist" if not folder.exists() else "is no folder"
        raise CheckpointError(f"{folder} {state}",
                              hint="name a folder that ts.checkpoints.save wrote") from err
    try:
        manifest = json.loads(text)
    except ValueError as err:
        raise _damaged(folder, f"{MANIFEST} is not JSON ({err})") from err
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not the manifest of a checkpoint",
                              hint=f'its "format" would be "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has format version {manifest.get('version')}, this tessera reads {VERSION}",
            hint="load it with the tessera that wrote it",
        )
    seal = manifest.pop("sha256", None)
    if seal != digest_of(manifest):
        raise _damaged(folder, f"{MANIFEST} was changed after it was written (SHA-256 differs)")
    return manifest


def _read_tensors(folder: Path, name: str, entry: dict[str, Any]) -> dict[str, dict]:
    """The tensors of a data file as safetensors gives them: {name: {dtype, shape, data}}."""
    import safetensors

    if not DATA_FILE.fullmatch(name):
        raise _damaged(folder, f"{name!r} is no name of a data file")
    try:
        size = os.stat(folder / name).st_size
        if size != entry["bytes"]:
            raise _damaged(folder, f"{name} has {size} bytes, not {entry['bytes']}")
        data = (folder / name).read_bytes()
    except FileNotFoundError as err:
        raise _damaged(folder, f"{name} is missing") from err
    except CheckpointError:
        raise
    except OSError as err:
        raise CheckpointError(f"cannot read {folder / name}: {err.strerror}") from err
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise _damaged(folder, f"{name} is not what was written (SHA-256 differs)")
    try:
        return {n: t | {"file": name} for n, t in safetensors.deserialize(data)}
    except safetensors.SafetensorError as err:
        raise _damaged(folder, f"{name} is not a safetensors file ({err})") from err


def _rebuild(folder: Path, name: str, entry: dict[str, Any], stored: dict[str, dict]) -> Tensor:
    held = stored.get(name)
    if held is None or held["file"] != entry["file"]:
        raise _damaged(folder, f"{entry['file']} does not hold {name}")
    numeric, shape = _known_type(folder, name, entry["type"]), tuple(entry["shape"])
    kind, inner, size = stored_as(numeric, shape)
    if (held["dtype"], list(held["shape"]), len(held["data"])) != (kind, inner, size):
        raise _damaged(folder, f"{name} is {held['dtype']}{held['shape']} in {held['file']}, "
                               f"{kind}{inner} by the manifest")
    dtype = numeric.dtype
    if dtype.packed:
        codes = np.frombuffer(held["data"], np.uint8).reshape(inner)
        array = unpack(codes, dtype, shape[-1] if shape else 1).reshape(shape)
    else:
        array = np.frombuffer(held["data"], dtype.numpy).reshape(shape).copy()
    return Tensor(array, numeric, is_param=bool(entry["param"]))


def _known_type(folder: Path, name: str, text: str) -> NumericType:
    """A policy class is found only when the program has registered it: nothing is imported."""
    try:
        return as_type(text)
    except TesseraError as err:
        raise CheckpointError(
            f"{name} of checkpoint {folder} has a type that is not known here: {err.message}",
            hint="declare its @ts.precision_policy class before loading",
        ) from err
