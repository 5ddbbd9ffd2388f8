"""Checkpoints that several ranks write and read, for one process, simulated ranks and mpirun.

    mpirun -n 4 python tests/mesh/saving.py PROGRAM FOLDER     each rank writes FOLDER/<rank>

The checkpoint is FOLDER/c. What is in it follows from seeds, so every reader knows what to find.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera.checkpoints import load, save
from tessera.graph import tree
from tessera.mesh.ranks.messages import raised_on_all
from tessera.mesh.tensor import gather_whole
from tessera.mesh.world import transport

# What is saved: shape, numeric type, and layouts to lie in, by turns; None: replicated; "plain": a
# tensor of no mesh. 13 rows and 11 columns divide by nothing; one row is less than there are ranks.
Kind = tuple[tuple[int, ...], str, list[Any]]
KINDS: dict[str, Kind] = {
    "rows": ((13, 5), "f32", [ts.ShardSpec(("row",), ("a",)), ts.ShardSpec(("col",), ("b",)), None,
                              "plain"]),
    "both": ((5, 11), "bf16", [ts.ShardSpec(("row", "col"), ("a", "b")),
                               ts.ShardSpec(("col",), (("b", "a"),)), "plain", None]),
    "dealt": ((11, 3), "f32", [ts.dist.Cyclic(("a", "b"), 2), ts.dist.Cyclic(("b", "a"), 1),
                               ts.ShardSpec(("row",), ("b",)), None]),
    "fp6": ((3, 22), "fp6_e3m2", [ts.ShardSpec(("col",), ("a",)), None,
                                  ts.ShardSpec(("col",), (("a", "b"),)), "plain"]),
    "fp4": ((2, 9), "fp4_e2m1", [ts.ShardSpec(("col",), ("b",)), ts.ShardSpec(("row",), ("a",)),
                                 "plain", None]),
    "whole": ((4, 3), "f64", [None, "plain", ts.ShardSpec(("row",), ("a",)), None]),
    "scalar": ((), "f32", [None, "plain", None, "plain"]),
    "empty": ((0, 4), "f32", [ts.ShardSpec(("row",), ("a",)), None, "plain",
                              ts.ShardSpec(("col",), ("b",))]),
    "few": ((1, 6), "int32", [ts.ShardSpec(("row",), (("a", "b"),)), "plain", None, None]),
    "plain": ((7,), "f32", ["plain", ts.ShardSpec(("row",), ("a",)), "plain", None]),
    "scaled": ((6, 4), "fp8_e4m3 @scaled('amax')", ["plain"] * 4),
}
# What stands beside the tensors, number by number and type by type.
SETTINGS: dict[str, Any] = {
    "layers": 12, "large": 2**64 + 1, "below": -3, "rate": 0.1, "least": 5e-324, "zero": -0.0,
    "nan": float("nan"), "inf": float("-inf"), "act": "gelu", "on": True, "one": 1,
    "text": "\u00fc \ud800 \n\0", "none": None}


def elements(x: ts.Tensor) -> np.ndarray:
    """Those of the whole tensor as they are stored; all ranks ask for them."""
    return gather_whole(x) if isinstance(x, ts.dist.DistTensor) else x.array


def grid(turn: int = 0) -> ts.dist.Mesh:
    """A mesh of the ranks there are, of 4 in a program that runs alone; each turn another shape."""
    ranks = ts.dist.world_size() if ts.dist.world_size() > 1 else 4
    first = [d for d in range(1, ranks + 1) if ranks % d == 0]
    a = first[(turn + 1) % len(first)]
    return ts.dist.mesh(axes=("a", "b"), shape=(a, ranks // a))


def meant(name: str) -> ts.Tensor:
    shape, numeric, _ = KINDS[name]
    seed = sum(name.encode())
    made = ts.tensor(3 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32),
                     numeric)
    made.is_param = name == "rows"
    return made


def laid(name: str, mesh: ts.dist.Mesh, turn: int, x: ts.Tensor) -> ts.Tensor:
    """x as it lies at a turn."""
    layout = KINDS[name][2][turn % 4]
    return x if layout == "plain" else ts.dist.distribute(x, layout, mesh=mesh)


def some_tree(turn: int = 0) -> dict[str, Any]:
    mesh = grid(turn)
    flat = {n: laid(n, mesh, turn, meant(n)) for n in KINDS}
    return {"weights": flat, "more": [flat.pop("fp4"), flat.pop("plain")], "settings": SETTINGS}


def blank(turn: int) -> dict[str, Any]:
    """The same structure with nothing in it."""
    mesh = grid(turn)
    flat = {n: laid(n, mesh, turn, ts.cast(ts.zeros(meant(n).shape), meant(n).type)) for n in KINDS}
    settings = {k: v if v is None else type(v)() for k, v in SETTINGS.items()}
    return {"weights": flat, "more": [flat.pop("fp4"), flat.pop("plain")], "settings": settings}


def assert_meant(found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Every tensor bit by bit, lying as asked; whole ones are put together from all ranks."""
    settings, asked = found["settings"], {**asked, "settings": None}
    found = {**found, "settings": None}
    assert [*map(repr, settings.items())] == [*map(repr, SETTINGS.items())]
    names = {"more.0": "fp4", "more.1": "plain"}
    leaves, structure = tree.flatten(found)
    likes = tree.flatten(asked)[0]
    for path, x, like in zip(tree.paths(structure), leaves, likes, strict=True):
        want = meant(names.get(path, path.split(".")[-1]))
        assert type(x) is type(like) and x.type == want.type and x.is_param == want.is_param, path
        if isinstance(like, ts.dist.DistTensor):
            assert x.layout == like.layout and x.held.keys() == like.held.keys(), path
        assert elements(x).dtype == elements(want).dtype, path
        assert elements(x).tobytes() == elements(want).tobytes(), path
        if want.scale is not None:
            assert x.scale.array.tobytes() == want.scale.array.tobytes(), path


# --- programs -------------------------------------------------------------------------------------
def write(folder: Path) -> str:
    """Every layout, at turn 0."""
    ts.random.seed(11)
    save(folder / "c", some_tree(), step=3, meta={"note": [0.1, None]}, file_bytes=200)
    return "written"


def read(folder: Path) -> str:
    """At every other turn, on other meshes, and by path without any."""
    saved = load(folder / "c")
    assert (saved.step, saved.meta, saved.random.seed) == (3, {"note": [0.1, None]}, 11)
    for turn in range(4):
        like = blank(turn)
        assert_meant(saved.tree(like), like)
    part = saved.tree({"weights": {"rows": blank(1)["weights"]["rows"]}}, part=True)
    assert elements(part["weights"]["rows"]).tobytes() == elements(meant("rows")).tobytes()
    digest = hashlib.sha256()
    for name in sorted(saved.tensors):
        digest.update(name.encode() + elements(saved.tensors[name]).tobytes())
    ts.dist.barrier()
    return digest.hexdigest()


def said(action: Callable[[], Any]) -> str:
    """What a CheckpointError says, "" when there is none."""
    try:
        action()
    except ts.CheckpointError as error:
        return f"{error.message} | {error.hint}"
    return ""


def read_damaged(folder: Path) -> str:
    """What load says; then all ranks still understand each other."""
    text = said(lambda: load(folder / "c").tree(blank(0)))
    ts.dist.barrier()
    return text


def stages(rank: int) -> dict[str, Any]:
    """What a stage of a pipeline has: a tensor of its own, and one that the first two share."""
    twin = {"twin": ts.ones((3,)), "heads": 4} if rank < 2 else {}
    return {f"stage{rank}": ts.full((2, 2), float(rank)), f"place{rank}": rank, **twin}


def write_stages(folder: Path) -> str:
    """Ranks with different trees; each then reads its own, and rank 0 all."""
    rank, size = ts.dist.rank(), ts.dist.world_size()
    save(folder / "c", stages(rank))
    saved = load(folder / "c")
    assert set(saved.tensors) == {"twin", *(f"stage{r}" for r in range(size))}
    found = saved.tree(stages(rank) if rank else {}, part=True)
    assert not rank or found[f"stage{rank}"].tolist() == [[rank] * 2] * 2
    assert not rank or found[f"place{rank}"] == rank
    assert saved.values == {"heads": 4, **{f"place{r}": r for r in range(size)}}
    ts.dist.barrier()
    return "own"


def fail_to_write(folder: Path) -> str:
    """The disk of rank 1 is full when it brings its file there."""
    write(folder)
    real = os.fsync

    def full(handle: int) -> None:
        if transport().rank == 1:
            raise OSError(28, "No space left on device")
        real(handle)

    os.fsync = full
    try:
        text = said(lambda: save(folder / "c", some_tree(1), step=4, file_bytes=200))
    finally:
        os.fsync = real
    ts.dist.barrier()
    read(folder)
    return text


def write_slowly(folder: Path) -> str:
    """The disk of rank 1 takes longer than ranks wait for each other elsewhere."""
    real = os.fsync

    def slow(handle: int) -> None:
        time.sleep(2.5 if ts.dist.rank() == 1 else 0)
        real(handle)

    os.fsync = slow
    ts.dist.barrier()  # how long it takes until all have started is the machine's affair
    ts.config.set(comm_timeout=4)
    write(folder)
    with raised_on_all(ts.CheckpointError):
        time.sleep(5 if ts.dist.rank() == 1 else 0)
    return read(folder)


def killed_while_writing(folder: Path) -> str:
    """SIGKILL of rank 1 with half of its second file written."""
    write(folder)
    ts.dist.barrier()
    real, calls = os.write, []

    def last(handle: int, data: Any) -> int:
        calls.append(handle)
        if ts.dist.rank() == 1 and len(calls) > 4:
            real(handle, bytes(data)[:len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(handle, data)

    os.write = last
    save(folder / "c", some_tree(1), step=4, file_bytes=64)
    return "unreached"


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    text = globals()[sys.argv[1]](folder)
    (folder / str(ts.dist.rank())).write_text(text)
