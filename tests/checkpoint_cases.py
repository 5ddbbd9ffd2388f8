"""What tests of checkpoints share: comparing trees bit for bit, and forging a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.checkpoints.layout import MANIFEST, sealed
from tessera.graph import tree


def assert_same(found: Any, expected: Any) -> None:
    """Same structure, types, flags and bits, scales included."""
    got, structure = tree.flatten(found)
    want, wanted = tree.flatten(expected)
    assert structure == wanted
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.type, a.is_param) == (b.shape, b.type, b.is_param)
        assert a.buffer.dtype == b.buffer.dtype and a.buffer.tobytes() == b.buffer.tobytes()
        assert (a.scale is None) == (b.scale is None)
        if b.scale is not None:
            assert_same(a.scale, b.scale)


def rewrite_manifest(folder: Path, change: Any) -> None:
    """A forged manifest whose own digest is right."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    (folder / MANIFEST).write_bytes(sealed(manifest))
