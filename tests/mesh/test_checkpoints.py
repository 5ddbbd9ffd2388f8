"""Checkpoints of distributed tensors: any layout, any mesh, any number of ranks; and every failure
of one rank is an error of all that leaves what was there before."""

from __future__ import annotations

import copy
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

import tessera as ts
from mesh import saving
from mesh.launch import mpirun, needs_mpi
from mesh.layouts import problems
from mesh.saving import said
from tessera.checkpoints import History, load, save
from tessera.checkpoints.layout import MANIFEST, sealed
from tessera.mesh.layout import Layout, Split
from tessera.mesh.tensor import DistTensor
from tessera.mesh.world import transport

PROGRAMS = Path(saving.__file__)


def launch(ranks: int, program: str, folder: Path, **env: str) -> Any:
    return mpirun(ranks, program, folder, battery=PROGRAMS, **env)


def stored(folder: Path) -> dict[str, dict[str, int]]:
    """{file: {name: bytes}} of what lies on the disk."""
    import safetensors

    return {f.name: {n: len(t["data"]) for n, t in safetensors.deserialize(f.read_bytes())}
            for f in sorted(folder.glob("*.safetensors"))}


# --- from anywhere to anywhere ----------------------------------------------------------------
WRITERS = {"alone": lambda folder: saving.write(folder),
           **{f"simulated {n}": lambda folder, n=n: ts.dist.simulate(saving.write, n, folder)
              for n in (3, 4, 6)}}
READERS = {"alone": lambda folder: [saving.read(folder)],
           **{f"simulated {n}": lambda folder, n=n: ts.dist.simulate(saving.read, n, folder)
              for n in (2, 4, 5)}}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_one_mesh_has_written_others_read(tmp_path, writer):
    WRITERS[writer](tmp_path)
    digests = {name: set(read(tmp_path)) for name, read in READERS.items()}
    assert len(set.union(*digests.values())) == 1, digests


@needs_mpi
def test_under_mpirun(tmp_path):
    """Written by two, four and three, read by more, fewer and one."""
    digests = set()
    for writes, reads in ((2, 4), (4, 2)):
        assert launch(writes, "write", tmp_path).status == 0
        run = launch(reads, "read", tmp_path)
        assert run.status == 0, run.text
        digests |= {saving.read(tmp_path), *(run.results[r] for r in range(reads)),
                    *ts.dist.simulate(saving.read, 3, tmp_path)}
    ts.dist.simulate(saving.write, 3, tmp_path)
    again = launch(2, "read", tmp_path)
    assert again.status == 0, again.text
    assert len(digests | {again.results[r] for r in range(2)}) == 1


@settings(max_examples=40)
@given(problems(count=2))
def test_any_layout_comes_back_in_any_other(problem):
    shape, dtype, one, other = problem
    assume(shape or not dtype.packed)  # a packed scalar has no row
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    x = ts.tensor(values, dtype)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "c"), {"x": ts.dist.distribute(x, one)})
        saved = load(Path(folder, "c"))
        found = saved.tree({"x": ts.dist.distribute(ts.cast(ts.zeros(shape), dtype), other)})["x"]
        names = [n for held in stored(Path(folder, "c")).values() for n in held]
    assert saved.tensors["x"].array.tobytes() == x.array.tobytes()
    meant = ts.dist.distribute(x, other)
    assert found.layout == meant.layout and found.held.keys() == meant.held.keys()
    for rank, part in meant.held.items():
        assert found.held[rank].array.tobytes() == part.array.tobytes(), rank
    assert len(names) == len(set(names))


@settings(max_examples=12)
@given(problems(count=2))
def test_ranks_of_one_mesh_write_and_those_of_another_read(problem):
    shape, dtype, one, other = problem
    assume(shape or not dtype.packed)
    x = ts.tensor(np.random.default_rng(4).normal(size=shape).astype(np.float32), dtype)
    like = ts.cast(ts.zeros(shape), dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")

        def read() -> bytes:
            found = load(path).tree({"x": ts.dist.distribute(like, other)})["x"]
            return found.local.array.tobytes()

        ts.dist.simulate(lambda: save(path, {"x": ts.dist.distribute(x, one)}), one.mesh)
        parts = ts.dist.simulate(read, other.mesh)
        assert sum(len(held) for held in stored(path).values()) == \
            len(json.loads((path / MANIFEST).read_text())["tensors"]["x"]["pieces"])
    meant = ts.dist.distribute(x, other)
    assert parts == [meant.held[r].array.tobytes() for r in range(other.mesh.size())]


def test_a_box_is_written_once_by_the_first_rank_that_has_it(tmp_path):
    """Over dp everything repeats: ranks 0 and 1 write, 2 and 3 write nothing."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))

    def program():
        x = ts.dist.distribute(np.arange(60, dtype=np.float32).reshape(10, 6),
                               ts.ShardSpec(("col",), ("tp",)), mesh=mesh)
        whole = ts.dist.distribute(np.ones(5, np.float32), None, mesh=mesh)
        save(tmp_path / "c", {"x": x, "whole": whole, "plain": ts.ones((3,))})

    ts.dist.simulate(program, mesh)
    found = {name.split("-")[2]: held for name, held in stored(tmp_path / "c").items()}
    assert found == {"00000": {"plain": 12, "whole@0.0": 20, "x@0.0": 120},
                     "00001": {"x@1.0": 120}}


def test_bytes_on_the_disk_are_those_of_the_whole(tmp_path):
    saving.write(tmp_path)
    alone = sum(sum(held.values()) for held in stored(tmp_path / "c").values())
    ts.dist.simulate(saving.write, 4, tmp_path)
    together = sum(sum(held.values()) for held in stored(tmp_path / "c").values())
    plain = {n: saving.meant(n) for n in saving.KINDS}
    save(tmp_path / "p", plain)
    whole = sum(sum(held.values()) for held in stored(tmp_path / "p").values())
    padding = sum(plain[n].shape[0] * 4 * 3 for n in ("fp4", "fp6"))  # a row ends in a whole byte
    assert whole <= alone == together <= whole + padding


def test_stages_of_a_pipeline_each_write_what_they_have(tmp_path):
    assert ts.dist.simulate(saving.write_stages, 3, tmp_path) == ["own"] * 3
    names = [n for held in stored(tmp_path / "c").values() for n in held]
    assert sorted(names) == ["stage0", "stage1", "stage2", "twin"]


def test_twins_on_two_parts_of_a_mesh_are_written_once(tmp_path):
    mesh = ts.dist.mesh(axes=("pp", "tp"), shape=(2, 2))
    spec = ts.ShardSpec(("row",), ("tp",))
    x = np.arange(10, dtype=np.float32).reshape(5, 2)

    def program():
        part = mesh.sub(pp=ts.dist.rank() // 2)
        tree = {"twin": ts.dist.distribute(x, spec, mesh=part)}
        save(tmp_path / "c", tree)
        return load(tmp_path / "c").tree(tree)["twin"].tolist()

    assert ts.dist.simulate(program, 4) == [x.tolist()] * 4
    assert [sum(held.values()) for held in stored(tmp_path / "c").values()] == [24, 16]


# --- what is refused --------------------------------------------------------------------------
def test_terms_of_a_sum_are_refused(tmp_path):
    mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
    layout = Layout(mesh, (Split(),), ("tp",), "sum")
    terms = DistTensor({r: ts.ones((3,)) for r in range(2)}, (3,), ts.as_type("f32"), layout)
    text = said(lambda: save(tmp_path / "c", {"w": terms}))
    assert "w is (-) + sum over tp on mesh(tp=2)" in text and "ts.shard(x, spec) adds" in text
    assert not (tmp_path / "c").exists()


def different_shapes(rank: int) -> Any:
    return {"w": ts.ones((3 + rank % 2,))}


def one_is_no_tensor(rank: int) -> Any:
    return {"w": ts.ones((3,)) if rank != 1 else ts.tanh}


def one_is_a_number(rank: int) -> Any:
    return {"w": ts.ones((3,)) if rank != 1 else 1.0}


def different_numbers(rank: int) -> Any:
    return {"w": [ts.ones(3), 8 if rank != 2 else 9]}


def one_is_distributed(rank: int) -> Any:
    mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
    return {"w": ts.ones((3,)) if rank != 1 else ts.dist.distribute(np.ones(3, np.float32), None,
                                                                    mesh=mesh)}


def other_layouts(rank: int) -> Any:
    mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
    spec = ts.ShardSpec(("row" if rank != 1 else "col",), ("tp",))
    return {"w": ts.dist.distribute(np.ones((3, 3), np.float32), spec, mesh=mesh)}


@pytest.mark.parametrize("make, words", [
    (different_shapes, "w is f32[3] on rank 0 and f32[4] on rank 1"),
    (one_is_no_tensor, "w is function, which a checkpoint cannot hold"),
    (one_is_a_number, "w is f32[3] on rank 0 and float 1.0 on rank 1"),
    (different_numbers, "w.1 is int 8 on rank 0 and int 9 on rank 2"),
    (one_is_distributed, "w is f32[3] on rank 0 and distributed f32[3] (-) on rank 1"),
    (other_layouts, "w is distributed f32[3, 3] (tp, -) on rank 0 and distributed f32[3, 3] "
                    "(-, tp) on rank 1"),
])
def test_ranks_that_save_different_things_all_learn_it(tmp_path, make, words):
    def program():
        text = said(lambda: save(tmp_path / "c", make(ts.dist.rank())))
        ts.dist.barrier()
        return text

    for text in ts.dist.simulate(program, 3):
        assert words in text, text
    assert not (tmp_path / "c").exists()


def test_a_rank_that_asks_for_something_else_is_an_error_on_all(tmp_path):
    def program():
        saved = load(tmp_path / "c")
        return said(lambda: saved.tree({"x": ts.zeros((3 + ts.dist.rank() // 2,))}))

    save(tmp_path / "c", {"x": ts.ones((3,))})
    texts = ts.dist.simulate(program, 3)
    assert all("x is f32[3], asked for f32[4]" in t for t in texts)
    assert texts[0].startswith("on rank 2: ") and not texts[2].startswith("on rank")


# --- damage -----------------------------------------------------------------------------------
def rewrite(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    (folder / MANIFEST).write_bytes(sealed(manifest))


def piece_file(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"tensors-*-{rank:05d}-00000.safetensors"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def pieces_of(manifest: dict, name: str = "weights.rows") -> list:
    return manifest["tensors"][name]["pieces"]


DAMAGES = {
    "missing": (lambda c: piece_file(c, 1).unlink(), "-00001-00000.safetensors is missing"),
    "truncated": (lambda c: os.truncate(piece_file(c, 2), 90), "has 90 bytes, not"),
    "changed": (lambda c: flip(piece_file(c, 1)), "-00001-00000.safetensors is not what was"),
    "a piece left out": (lambda c: rewrite(c, lambda m: pieces_of(m).pop()),
                         "tensors.weights.rows.pieces: they hold"),
    "pieces that overlap": (lambda c: rewrite(c, lambda m: pieces_of(m)[1].update(lo=[6, 0])),
                            "tensors.weights.rows.pieces: some lie on others"),
    "a piece outside": (lambda c: rewrite(c, lambda m: pieces_of(m)[0].update(lo=[11, 0])),
                        "does not lie in [13, 5]"),
    "another's piece": (lambda c: rewrite(c, lambda m: pieces_of(m)[0].update(name="more.0@0.0")),
                        "'more.0@0.0' is no piece of weights.rows"),
    "twice the same": (lambda c: rewrite(c, lambda m: pieces_of(m)[1].update(
        name=pieces_of(m)[0]["name"])), "two have the same name"),
    "no such piece": (lambda c: rewrite(c, lambda m: pieces_of(m)[0].update(
        name="weights.rows@9.9")), "does not hold weights.rows@9.9"),
    "in another file": (lambda c: rewrite(c, lambda m: pieces_of(m)[0].update(
        file=piece_file(c, 3).name)), "does not hold weights.rows@0.0"),
    "no manifest": (lambda c: (c / MANIFEST).unlink(), "no manifest.json"),
    "manifest changed": (lambda c: (c / MANIFEST).write_text(
        (c / MANIFEST).read_text().replace('"step": 3', '"step": 4')), "was changed after"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_an_error_on_every_rank(tmp_path, name):
    ts.dist.simulate(saving.write, 4, tmp_path)
    damage, words = DAMAGES[name]
    damage(tmp_path / "c")
    for ranks in (1, 2, 4):
        texts = ts.dist.simulate(saving.read_damaged, ranks, tmp_path) if ranks > 1 else \
            [saving.read_damaged(tmp_path)]
        assert all(words in text for text in texts), texts


@needs_mpi
def test_damage_is_an_error_on_every_rank_of_mpirun(tmp_path):
    ts.dist.simulate(saving.write, 4, tmp_path)
    flip(piece_file(tmp_path / "c", 1))
    run = launch(2, "read_damaged", tmp_path)
    assert run.status == 0 and len(run.results) == 2, run.text
    assert all("00001-00000.safetensors is not what was" in t for t in run.results.values())


def fields(plain: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where every value of a manifest stands, objects and lists too."""
    inner = plain.items() if isinstance(plain, dict) else enumerate(plain) \
        if isinstance(plain, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from fields(value, (*at, key))


GONE = object()
WRONG = [GONE, None, True, -1, 0.5, "x", [], [-1], ["x"], {}, 1 << 70, [1 << 70], [0, 1 << 62]]
FREE = {"meta", "step", "seed", "param", "value"}  # any such one could have been saved


def mutate(manifest: dict, at: tuple, value: Any) -> None:
    inner = manifest
    for key in at[:-1]:
        inner = inner[key]
    if value is not GONE:
        inner[at[-1]] = value
    else:
        del inner[at[-1]]


def test_a_manifest_with_any_field_wrong_is_refused(tmp_path):
    """Each field is left out and replaced by what it cannot be; the message names it."""
    mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
    x = ts.dist.distribute(np.arange(6, dtype=np.float32).reshape(3, 2),
                           ts.ShardSpec(("row",), ("tp",)), mesh=mesh)
    folder = save(tmp_path / "c", {"w": x, "b": ts.ones((2,)), "n": [3, 0.5, "a"]}, meta={"a": [1]})
    good, tried = json.loads((folder / MANIFEST).read_text()), 0
    del good["sha256"]
    for at in fields(good):
        if at[0] == "meta" and len(at) > 1:
            continue
        for value in WRONG:
            made = copy.deepcopy(good)
            mutate(made, at, value)
            (folder / MANIFEST).write_bytes(sealed(made))
            tried += 1
            text = said(lambda: load(folder))
            if not text:
                fewer = at[0] in ("tensors", "values") and len(at) < 3 and (
                    value is GONE or value == {})
                earlier = at[-1] == "launches" and value in (GONE, [])  # none were counted
                assert fewer or earlier or (at[-1] in FREE and value is not GONE), (at, value)
                assert at[-1] != "seed" or value < 1 << 64
                continue
            names = {str(k) for k in at} | {"type that is not known", "format", "safetensors"}
            assert any(n in text for n in names) and str(folder) in text, (at, value, text)
    assert tried > 300


@pytest.mark.parametrize("at, value", [
    (("tensors", "weights.rows", "pieces", 0, "lo"), "x"), (("files",), []), (("random",), None),
    (("tensors", "weights.rows", "pieces"), []), (("tensors", "weights.both", "type"), 3)])
def test_all_ranks_refuse_it(tmp_path, at, value):
    ts.dist.simulate(saving.write, 3, tmp_path)
    rewrite(tmp_path / "c", lambda m: mutate(m, at, value))
    texts = ts.dist.simulate(saving.read_damaged, 3, tmp_path)
    assert all(f"malformed: {'.'.join(map(str, at))}: " in t for t in texts), texts


# --- failures while writing -------------------------------------------------------------------
class DiskOfOneRank:
    """Lets `at` calls that change the disk through on one rank; the next one fails there."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int, at: int):
        self.rank, self.at, self.calls = rank, at, 0
        for name in ("open", "write", "fsync", "close", "replace", "mkdir", "unlink"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = transport().rank == self.rank and not (
                name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR))
            self.calls += ours
            if ours and self.calls == self.at + 1:
                self.name = name
                if name == "close":
                    real(*args)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path, rank):
    """At every write of that rank. The old checkpoint or, once it is committed, the new one is
    whole, and of the other nothing is left but what could not be removed. Where nothing went
    through what cannot be closed, and of a lock that stays behind, nobody need be told."""
    spec = ts.ShardSpec(("row",), ("tp",))

    def tree(value: float) -> dict[str, Any]:
        mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
        return {"x": ts.dist.distribute(np.full((7, 2), value, np.float32), spec, mesh=mesh),
                "y": ts.full((3,), value)}

    def program(value: int) -> str:
        text = said(lambda: save(tmp_path / "c", tree(float(value)), step=value, file_bytes=1))
        ts.dist.barrier()
        return text

    states, at = [], 0
    while True:
        assert ts.dist.simulate(program, 3, 1) == [""] * 3
        old = set(os.listdir(tmp_path / "c"))
        with pytest.MonkeyPatch.context() as patch:
            disk = DiskOfOneRank(patch, rank, at)
            texts = ts.dist.simulate(program, 3, 2)
        saved = load(tmp_path / "c")
        states.append(saved.step)
        assert all((x.numpy() == saved.step).all() for x in saved.tensors.values())
        if disk.calls <= at:
            assert texts == [""] * 3 and saved.step == 2
            break
        what = "not written" if saved.step == 1 else "written, but not tidied up"
        unharmed = disk.name in ("close", "unlink") and saved.step == 2 and texts == [""] * 3
        said_so = f"{what}: on rank {rank}: [Errno 28] No space"
        assert unharmed or all(said_so in t for t in texts), texts
        if saved.step == 1:
            assert set(os.listdir(tmp_path / "c")) == old
        at += 1
    assert at >= 4 and states == sorted(states) and states[0] == 1


@needs_mpi
def test_a_full_disk_under_mpirun(tmp_path):
    run = launch(4, "fail_to_write", tmp_path)
    assert run.status == 0 and len(run.results) == 4, run.text
    for text in run.results.values():
        assert "not written: on rank 1: [Errno 28] No space left on device" in text
    assert load(tmp_path / "c").step == 3


def test_ranks_that_save_other_trees_than_those_with_the_other_parts_are_told(tmp_path):
    """Once the manifest lacked the parts, and only who loaded it was told. A stage may be saved by
    its ranks alone, and what all hold whole by any of them."""
    mesh = ts.dist.mesh(axes="dp", shape=3)

    def program(names, folder):
        x = ts.dist.tensor((7, 2), ts.ShardSpec(("row",), ("dp",)), mesh, init=3.0)
        own = {names(ts.dist.rank()): x}
        average = ts.dist.tensor((4,), None, mesh, init=1.0)
        save(folder, own | {"average": average} if ts.dist.rank() == 0 else own)

    ts.dist.simulate(program, mesh, lambda rank: "x", tmp_path)
    with pytest.raises(ts.CheckpointError, match=r"is not written: on rank 0: x has 14 elements "
                       r"and ranks save 10 of them, ranks 0, 2 alone: all ranks that have a part"):
        ts.dist.simulate(program, mesh, lambda rank: "y" if rank == 1 else "x", tmp_path)
    assert load(tmp_path).tensors["x"].tolist() == [[3.0, 3.0]] * 7
    assert load(tmp_path).tensors["average"].tolist() == [1.0] * 4


def test_ranks_that_save_to_different_folders_are_told_and_lose_nothing(tmp_path):
    """As with a folder named by each rank's clock, or on a disk of each machine's own."""
    folders = [tmp_path / "0", tmp_path / "1"]
    save(folders[0], {"x": ts.zeros(1)}, step=3)
    folders[1].mkdir()
    before = sorted(folders[0].iterdir())

    def program():
        x = ts.dist.from_local(np.ones((2, 3), np.float32), ts.ShardSpec(("row",), ("dp",)), mesh)
        try:
            save(folders[ts.dist.rank()], {"x": x}, step=4)
        except ts.CheckpointError as error:
            return error.message
        return "saved"

    mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
    for rank, text in enumerate(ts.dist.simulate(program, mesh)):
        assert text == (f"checkpoint {folders[rank]} is not written: on rank 0: rank 1 has written "
                        f"to {folders[1]}, which is not {folders[0]} here: all ranks save to one "
                        "folder, on a disk that all of them see")
    assert load(folders[0]).step == 3 and sorted(folders[0].iterdir()) == before
    assert not [*folders[1].iterdir()]


@needs_mpi
def test_a_slow_disk_is_waited_for(tmp_path):
    run = launch(2, "write_slowly", tmp_path)
    assert run.status == 0 and len(run.results) == 2 and run.seconds > 5, run.text


@needs_mpi
def test_a_rank_that_is_killed_while_it_writes_loses_nothing(tmp_path):
    run = launch(4, "killed_while_writing", tmp_path)
    print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
    assert run.status != 0 and not run.results and run.seconds < 60, run.text
    assert run.text.count("was killed") == 1 and "tessera: rank 1 of 4 (pid " in run.text, run.text
    assert "() at " in run.text and "saving.py:" in run.text, run.text
    assert 'save(folder / "c", some_tree(1), step=4, file_bytes=64)' in run.text, run.text
    files = len(list((tmp_path / "c").iterdir()))
    saving.read(tmp_path)
    saving.write(tmp_path)
    assert len(list((tmp_path / "c").iterdir())) < files, "what the kill left is tidied up"


# --- a run's history --------------------------------------------------------------------------
def test_all_ranks_learn_of_an_older_one_that_is_whole(tmp_path):
    history = History(tmp_path / "run", how="--resume {step}")

    def keep():
        for step in (1, 2):
            history.save(step, saving.some_tree(step))

    ts.dist.simulate(keep, 4)
    piece_file(history.path(2), 3).unlink()
    for text in ts.dist.simulate(lambda: said(history.load), 4):
        assert "00003-00000.safetensors is missing" in text
        assert text.endswith("the checkpoint of step 1 is whole: --resume 1")
    assert ts.dist.simulate(lambda: history.load(1).step, 4) == [1] * 4


def test_all_ranks_learn_that_somebody_writes_there(tmp_path):
    def program():
        def claim():
            with History(tmp_path / "run").claim():
                raise AssertionError("claimed")

        return said(claim)

    with History(tmp_path / "run").claim():
        texts = ts.dist.simulate(program, 3)
    assert all("this process writes to" in t for t in texts), texts
    assert texts[1].startswith("on rank 0: ")


def test_all_ranks_learn_that_an_old_one_cannot_be_removed(tmp_path, monkeypatch):
    history = History(tmp_path / "run")

    def program(steps: list[int]) -> str:
        return "".join(said(lambda s=step: history.save(s, {"x": ts.ones((2,))}))
                       for step in steps)

    real = os.unlink

    def refuse(path: Any, **where: Any) -> None:
        if path == MANIFEST:
            raise OSError(errno.EACCES, "Permission denied")
        real(path, **where)

    ts.dist.simulate(program, 2, [1, 2])
    monkeypatch.setattr(os, "unlink", refuse)
    texts = ts.dist.simulate(program, 2, [3])
    assert all("is saved, but an older one cannot be removed" in t for t in texts), texts
    assert history.load().step == 3
