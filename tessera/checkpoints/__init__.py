"""Checkpoints on disk: all or nothing, checked when read, and nothing in them is executed.

    history = ts.checkpoints.History("runs/a", keep=2)
    history.save(step, {"params": params, "optimizer": state}, meta={"config": ...})
    saved = history.load()
    params = saved.tree({"params": params, "optimizer": state})["params"]

A checkpoint is a folder of safetensors files and `manifest.json`, which names them with their sizes
and SHA-256, each tensor with its shape and numeric type, the step, the random state and what the
caller adds as `meta`. The manifest is the commit: data files have names never used before and are
on the disk (fsync) before one rename makes the new manifest the folder's, so a crash at any moment
leaves the state before or the state after. Types that safetensors cannot name (fp6, fp4, int4, ...)
are stored as their raw bytes, U8. `manifest.json` missing means: that save was never finished.
Several ranks write and read one checkpoint together, each its parts of distributed tensors; what
fails on one of them is an error on all.
"""

from __future__ import annotations

from .history import History as History
from .read import Checkpoint as Checkpoint
from .read import load as load
from .write import save as save

__all__ = ["Checkpoint", "History", "load", "save"]
