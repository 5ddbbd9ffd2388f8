"""Calls as files: what a function computed, on what, and how the random numbers stood."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import bundles
from ..errors import ArgumentError, user_line
from ..graph import tree
from ..graph.devices import to
from ..graph.jit import JitFunction
from ..lazy_dataclass import dataclass
from ..numerics.random_state import RandomState, get_state, set_state
from ..runtime.device import has_gpu
from ..tensor import Tensor

RUN = "run.json"


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A recorded call, made again. inputs, results: its tensors by path; where: on which device the
    record was made, and this run; differing: the results with other bytes than the record's."""

    name: str
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    where: tuple[str, str]
    differing: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether every byte of the results is that of the record."""
        return not self.differing

    def __str__(self) -> str:
        how = "every byte as recorded" if self.same else f"differ: {', '.join(self.differing)}"
        return f"{self.name} on {self.where[1]}, recorded on {self.where[0]}: {how}"


def record(fn: Any, path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs), written as a file with which `ts.debug.replay(path)` makes the call
    again, in a process that lacks the source too: the graph, the arguments, the state of ts.random
    before it, and the SHA-256 of every result.

    fn and args as for `ts.export`. Raises ArgumentError for distributed arguments, else what
    ts.export raises.
    """
    compiled = fn if isinstance(fn, JitFunction) else JitFunction(fn)
    manifest, files = bundles.contents(compiled, args, kwargs)
    if manifest["mesh"] is not None:
        raise ArgumentError(f"{compiled.name} has distributed arguments: a record is of one device",
                            where=user_line(), hint="ts.export writes the function")
    given = bundles.function_of(_sealed(manifest, files)).leaves(args, kwargs)
    files |= {f"arguments/{i}": bundles.tensor_bytes(t) for i, t in enumerate(given)}
    state, place = get_state(), _device_name(given)
    out = compiled(*args, **kwargs)
    files[RUN] = json.dumps({
        "random": asdict(state), "device": place,
        "results": {name: _digest(y) for name, y in _named(out).items()}}).encode()
    bundles.write(Path(path), manifest, files)
    return out


def replay_run(path: str | os.PathLike) -> RecordedRun:
    """The call of a file that `record` wrote, made again: on a GPU where it was made on one and
    there is one here. ts.random stands afterwards as it did before."""
    files = bundles.read(Path(path))
    if RUN not in files:
        raise ArgumentError(f"{path} holds a function and no call of it", where=user_line(),
                            hint="ts.debug.record(f, path, *args) writes one; ts.load(path) reads "
                            "a function")
    f, run = bundles.function_of(files), json.loads(files[RUN])
    about = [leaf for leaf in f.manifest["leaves"] if "type" in leaf]
    given = [bundles.tensor_of(files[f"arguments/{i}"], leaf) for i, leaf in enumerate(about)]
    if run["device"] != "cpu" and has_gpu():
        given = [to(x, "cuda") for x in given]
    before = get_state()
    drawn = run["random"]
    set_state(RandomState(drawn["seed"], drawn["step"], tuple(map(tuple, drawn["launches"]))))
    try:
        results = _named(f.on_leaves(given))
    finally:
        set_state(before)
    differing = tuple(n for n, y in results.items() if _digest(y) != run["results"][n])
    return RecordedRun(f.name, dict(zip((leaf["name"] for leaf in about), given, strict=True)),
                       results, (run["device"], _device_name(given)), differing)


def _sealed(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {**files, bundles.MANIFEST: json.dumps(manifest).encode()}


def _named(out: Any) -> dict[str, Tensor]:
    leaves, structure = tree.flatten(out)
    return {path or "result": y for path, y in zip(tree.paths(structure), leaves, strict=True)}


def _digest(y: Tensor) -> str:
    return hashlib.sha256(bundles.tensor_bytes(y)).hexdigest()


def _device_name(given: list[Tensor]) -> str:
    return next((f"cuda:{x.place}" for x in given if x.place >= 0), "cpu")


__all__ = ["RecordedRun", "record", "replay_run"]
