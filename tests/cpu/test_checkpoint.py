"""Checkpoints: exact, all or nothing under every fault and kill, and never trusted unread."""

from __future__ import annotations

import ast
import errno
import http
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from checkpoint_cases import assert_same, rewrite_manifest
from tessera import checkpoints
from tessera.checkpoints import History, load, save
from tessera.checkpoints.layout import MANIFEST
from tessera.checkpoints.locking import LOCK
from tessera.checkpoints.manifest import overlap, parse
from tessera.mesh.domain import Rect
from tessera.numerics import dtype_names

TYPES = [*dtype_names(), "bf16 @accum(f32) @stochastic_round", "fp6_e3m2 @saturate",
         "f16 @loss_scale(1024.0)", "fp8_e4m3 @scaled('amax')"]
WRITES = ("open", "write", "fsync", "close", "replace", "mkdir", "unlink", "rmdir")


def some_tensors(rng: np.random.Generator) -> dict[str, Any]:
    return {"w": ts.param(rng.normal(size=(5, 3)).astype(np.float32)),
            "more": [ts.tensor(rng.normal(size=7), "bf16"), ts.tensor(3)]}


def data_file(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


# --- round trips ------------------------------------------------------------------------------
@pytest.mark.parametrize("numeric", TYPES)
def test_every_type_comes_back_bit_by_bit(tmp_path, rng, numeric):
    shapes = [(3, 5), (4, 1), (0, 3), (2, 0), (1,)]
    if not ts.as_type(numeric).dtype.packed:
        shapes.append(())  # a packed scalar has no row
    if "scaled" in numeric:
        shapes = [(3, 5), (1,)]
    tensors = {}
    for i, shape in enumerate(shapes):
        values = rng.normal(size=shape) * 3
        values = np.abs(values) if "int" in numeric else values
        tensors[str(i)] = ts.tensor(values.astype(np.float32), numeric)
    save(tmp_path / "c", tensors)
    assert_same(load(tmp_path / "c").tree(tensors), tensors)


def test_not_numbers_and_negative_zero_survive(tmp_path):
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    values[0:1].view(np.uint32)[0] = 0x7FC12345  # a NaN with a payload
    save(tmp_path / "c", {"x": ts.tensor(values)})
    assert load(tmp_path / "c").tensors["x"].numpy().tobytes() == values.tobytes()


def test_step_random_state_and_meta_come_back(tmp_path):
    ts.random.seed(7)
    ts.random.uniform((3,))
    meta = {"config": {"lr": 0.1, "name": "a"}, "losses": [1.5, 0.1 + 0.2], "none": None}
    save(tmp_path / "c", {"x": ts.tensor([1.0])}, step=41, meta=meta)
    expected = ts.random.uniform((3,)).tolist()
    ts.random.seed(0)
    saved = load(tmp_path / "c")
    assert (saved.step, saved.meta) == (41, meta)
    ts.random.set_state(saved.random)
    assert ts.random.uniform((3,)).tolist() == expected


def test_the_manifest_says_what_is_in_the_files(tmp_path, rng):
    tensors = some_tensors(rng)
    save(tmp_path / "c", tensors, step=3)
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert (manifest["format"], manifest["version"], manifest["step"]) == \
        ("tessera-checkpoint", 1, 3)
    assert manifest["tensors"]["more.0"]["type"] == "bf16"
    assert manifest["tensors"]["w"]["shape"] == [5, 3]
    (entry,) = manifest["files"].values()
    assert entry["bytes"] == data_file(tmp_path / "c").stat().st_size


def test_other_tools_read_the_data_files(tmp_path, rng):
    """The library's own reader, and the type names it gives to what it knows."""
    import safetensors
    import safetensors.numpy

    plain = {"a": ts.tensor(rng.normal(size=(3, 2)).astype(np.float32)), "b": ts.tensor([1, 2])}
    save(tmp_path / "c", plain)
    read = safetensors.numpy.load_file(data_file(tmp_path / "c"))
    for name, x in plain.items():
        assert read[name].dtype == x.numpy().dtype and (read[name] == x.numpy()).all()
    narrow = {t: ts.tensor(rng.normal(size=(2, 5)), t)
              for t in ("bf16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "int4")}
    save(tmp_path / "d", narrow)
    kinds = {name: (t["dtype"], list(t["shape"])) for name, t in
             safetensors.deserialize(data_file(tmp_path / "d").read_bytes())}
    assert kinds == {"bf16": ("BF16", [2, 5]), "fp8_e4m3": ("F8_E4M3", [2, 5]),
                     "fp8_e5m2": ("F8_E5M2", [2, 5]), "fp6_e3m2": ("U8", [2, 6]),
                     "int4": ("U8", [2, 3])}


def test_large_trees_are_spread_over_files(tmp_path, rng):
    tensors = {f"t{i}": ts.tensor(rng.normal(size=64)) for i in range(7)}
    save(tmp_path / "c", tensors, file_bytes=2 * tensors["t0"].nbytes)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    assert_same(load(tmp_path / "c").tree(tensors), tensors)


def test_saving_again_replaces_all_and_leaves_nothing_behind(tmp_path, rng):
    save(tmp_path / "c", {"x": ts.tensor(rng.normal(size=9))}, step=1)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    new = some_tensors(rng)
    save(tmp_path / "c", new, step=2)
    assert_same(load(tmp_path / "c").tree(new), new)
    assert len(list((tmp_path / "c").iterdir())) == 3
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"


# --- what is refused --------------------------------------------------------------------------
@pytest.mark.parametrize("value, words", [
    ({"x": 3j}, "x is complex, which a checkpoint cannot hold"),
    ({"x": [ts.zeros(1), np.float64(3)]}, "x.1 is float64, which"),
    ({"x": ts.tanh}, "x is function, which"),
    ({"x": http.HTTPStatus.OK}, "x is HTTPStatus, which"),
    ({"x": 1 << 2000}, "x is an integer of 2001 bits"),
    ({"a": {"b": ts.tensor([1.0])}, "a.b": ts.tensor([2.0])}, "two leaves have the path 'a.b'"),
    ({"a": {"b": ts.tensor([1.0])}, "a.b": 2.0}, "two leaves have the path 'a.b'"),
    ({"a@": 2.0}, "the path 'a@' has an @"),
    ({"a": {"x@scale": ts.tensor([1.0])}}, "the path 'a.x@scale' has an @"),
])
def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path, value, words):
    with pytest.raises(ts.CheckpointError, match=words):
        save(tmp_path / "c", value)
    assert not (tmp_path / "c").exists()


def test_meta_is_plain_data(tmp_path):
    for meta in ({"x": object()}, {"x": np.float32(1)}, {"x": {1, 2}}):
        with pytest.raises(ts.CheckpointError, match="meta is not plain data"):
            save(tmp_path / "c", {}, meta=meta)
    for step in (-1, 1.5, True):
        with pytest.raises(ts.ArgumentError, match="integer >= 0"):
            save(tmp_path / "c", {}, step=step)


def test_a_model_of_another_shape_or_type_is_refused(tmp_path, rng):
    save(tmp_path / "c", {"w": ts.zeros((3, 4)), "b": ts.zeros(4), "old": ts.zeros(1)})
    asked = {"w": ts.zeros((4, 3)), "b": ts.zeros(4, "bf16"), "new": ts.zeros(1)}
    with pytest.raises(ts.CheckpointError) as caught:
        load(tmp_path / "c").tree(asked)
    text = str(caught.value)
    for words in ("w is f32[3, 4], asked for f32[4, 3]", "b is f32[4], asked for bf16[4]",
                  "new is not in it", "old is in it, but not asked for", "hint:"):
        assert words in text
    with pytest.raises(ts.CheckpointError, match=r"w is f32\[3, 4\], asked for float"):
        load(tmp_path / "c").tree({"w": 1.0}, part=True)
    with pytest.raises(ts.CheckpointError) as caught:
        load(tmp_path / "c").tree({"b": ts.zeros(4, "bf16")}, part=True)
    assert caught.value.hint.endswith("convert what was loaded: ts.cast(x, 'bf16')")


def flip_byte(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


DAMAGES = {
    "truncated": (lambda c: os.truncate(data_file(c), data_file(c).stat().st_size - 1),
                  "bytes, not"),
    "longer": (lambda c: data_file(c).write_bytes(data_file(c).read_bytes() + b"x"), "bytes, not"),
    "changed": (lambda c: flip_byte(data_file(c), -3), "not what was written"),
    "missing": (lambda c: data_file(c).unlink(), "is missing"),
    "manifest changed": (lambda c: (c / MANIFEST).write_text(
        (c / MANIFEST).read_text().replace('"step": 3', '"step": 4')), "changed after"),
    "manifest cut": (lambda c: os.truncate(c / MANIFEST, 40), "not JSON"),
    "manifest empty": (lambda c: os.truncate(c / MANIFEST, 0), "not JSON"),
    "manifest missing": (lambda c: (c / MANIFEST).unlink(), "no manifest.json"),
    "manifest too deep": (lambda c: (c / MANIFEST).write_text("[" * 100_000), "not JSON"),
    "other JSON": (lambda c: (c / MANIFEST).write_text("[1]"), "not the manifest of a checkpoint"),
    "other version": (lambda c: rewrite_manifest(c, lambda m: m.update(version=2)),
                      "format version 2, this tessera reads 1"),
    "no tensors": (lambda c: rewrite_manifest(c, lambda m: m.pop("tensors")), "malformed"),
    "tensor left out": (lambda c: rewrite_manifest(
        c, lambda m: m["tensors"].update(x=m["tensors"]["w"])), "does not hold x"),
    "other shape": (lambda c: rewrite_manifest(
        c, lambda m: m["tensors"]["w"].update(shape=[3, 5])), "by the manifest"),
    "negative shape": (lambda c: rewrite_manifest(
        c, lambda m: m["tensors"]["w"].update(shape=[-5, -3])), "malformed.*tensors.w.shape"),
    "unknown type": (lambda c: rewrite_manifest(
        c, lambda m: m["tensors"]["w"].update(type="f33")), "w of .* has a type that is not known"),
    "shape of text": (lambda c: rewrite_manifest(
        c, lambda m: m["tensors"]["w"].update(shape="ab")), "malformed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_an_error_that_says_what_and_where(tmp_path, rng, name):
    folder = save(tmp_path / "c", some_tensors(rng), step=3)
    damage, words = DAMAGES[name]
    damage(folder)
    with pytest.raises(ts.CheckpointError, match=words) as caught:
        load(folder)
    assert caught.value.hint


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "does not exist"), ("file", "is no folder"),
                        ("empty", "no manifest.json")):
        with pytest.raises(ts.CheckpointError, match=words):
            load(tmp_path / name)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ts.CheckpointError, match="not written"):
            save(path, {"x": ts.tensor([1.0])})
    assert (tmp_path / "file").read_text() == "x"


# --- attacks ----------------------------------------------------------------------------------
class Bomb:
    def __reduce__(self) -> tuple:
        return os._exit, (13,)


@pytest.mark.parametrize("name", [
    "../secret", "/etc/passwd", "tensors-00000000-00000.safetensors/x", "secret"])
def test_a_forged_manifest_cannot_read_other_files(tmp_path, rng, name):
    folder = save(tmp_path / "c", some_tensors(rng))
    rewrite_manifest(folder, lambda m: m["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(ts.CheckpointError, match="no name of a data file"):
        load(folder)


@pytest.mark.parametrize("data", [
    b"", b"\xff" * 8, (1 << 62).to_bytes(8, "little") + b"{}", b"PK\x03\x04" + b"\0" * 60,
    (2).to_bytes(8, "little") + b"[]",
    *[(len(h)).to_bytes(8, "little") + h + b"\0" * 8 for h in (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,80]}}',
        b'{"w":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
        b'{"w":{"dtype":"OBJ","shape":[2],"data_offsets":[0,8]}}')],
])
def test_a_forged_data_file_is_an_error(tmp_path, rng, data):
    import hashlib

    folder = save(tmp_path / "c", some_tensors(rng))
    file = data_file(folder)
    file.write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(folder, lambda m: m["files"].update({file.name: entry}))
    with pytest.raises(ts.CheckpointError, match="is damaged"):
        load(folder)


def test_a_pickle_is_never_opened(tmp_path, rng):
    """Neither as manifest nor as data; the code names no module that would execute it."""
    import pickle

    folder = save(tmp_path / "c", some_tensors(rng))
    (folder / MANIFEST).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ts.CheckpointError, match="not JSON"):
        load(folder)
    names = {getattr(n, "id", getattr(n, "attr", getattr(n, "name", None)))
             for file in Path(checkpoints.__file__).parent.glob("*.py")
             for n in ast.walk(ast.parse(file.read_text()))}
    assert {"load", "save", "History"} <= names
    assert not names & {"pickle", "marshal", "shelve", "eval", "exec", "import_module",
                        "__import__", "allow_pickle"}


def test_a_policy_class_is_found_by_name_only_when_it_is_declared(tmp_path, monkeypatch):
    """A name in a file is never turned into an import."""
    @ts.precision_policy
    class HalvedInt8:
        storage, scale, compute, accumulate = ts.int8, ts.f32, ts.f32, ts.f32

        def quantize(self, x):
            return ts.cast(x * 2.0, ts.int8), ts.tensor(0.5)

        def dequantize(self, q, scale):
            return ts.cast(q, ts.f32) * scale

    x = {"x": ts.tensor([1.0, 2.0], HalvedInt8)}
    folder = save(tmp_path / "c", x)
    assert load(folder).tensors["x"].numpy().tolist() == [1.0, 2.0]
    rewrite_manifest(folder, lambda m: m["tensors"]["x"].update(type="os.system"))
    with pytest.raises(ts.CheckpointError, match="a type that is not known here") as caught:
        load(folder)
    assert "precision_policy" in caught.value.hint


# --- links, pipes, depth, size ----------------------------------------------------------------
def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_neither_saving_nor_pruning_follows_a_link_out_of_the_run(tmp_path, rng):
    """A run that begins from a link to another project's checkpoint: it loads; saving into it is
    refused; when it is old the link goes and what it leads to stays."""
    x = some_tensors(rng)
    precious, run = save(tmp_path / "precious", x, step=1), tmp_path / "run"
    before = contents(precious)
    history = History(run)
    run.mkdir()
    (run / "step-00000001").symlink_to(precious)
    assert_same(history.load().tree(x), x)
    with pytest.raises(ts.CheckpointError, match="step-00000001 is a link: what it leads to"):
        history.save(1, some_tensors(rng))
    for step in (2, 3):
        history.save(step, x)
    assert os.listdir(run) and history.steps() == [2, 3] and not (run / "step-00000001").exists()
    assert contents(precious) == before


def test_links_inside_a_folder_are_replaced_or_refused_never_written_through(tmp_path, rng):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = save(tmp_path / "c", some_tensors(rng))
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to(outside)
    new = some_tensors(rng)
    save(folder, new)
    assert_same(load(folder).tree(new), new)
    (folder / LOCK).symlink_to(tmp_path / "new")
    with pytest.raises(ts.CheckpointError, match="writer.lock is a link"):
        save(folder, new)
    assert outside.read_text() == "mine" and not (tmp_path / "new").exists()
    (tmp_path / "named").symlink_to(folder)  # a link that the caller names is the caller's
    (folder / LOCK).unlink()
    assert save(tmp_path / "named", some_tensors(rng), step=5) and load(folder).step == 5


@pytest.mark.parametrize("name", ["manifest", "data", "lock"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path, rng, name):
    folder = save(tmp_path / "c", some_tensors(rng))
    file = {"manifest": folder / MANIFEST, "data": data_file(folder), "lock": folder / LOCK}[name]
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(ts.CheckpointError, match="is no regular file"):
        save(folder, some_tensors(rng)) if name == "lock" else load(folder)


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"a": leaf}
    return leaf


def test_what_is_nested_too_deep_is_refused(tmp_path, rng):
    """Trees and meta of 3000 levels, when they are saved, asked for, or come in a manifest."""
    folder = save(tmp_path / "c", {"x": ts.zeros(2)}, meta=nested(150, 1))
    assert load(folder).meta == nested(150, 1)
    deep = nested(3000, ts.zeros(2))
    for act in (lambda: save(tmp_path / "d", deep), lambda: load(folder).tree(deep)):
        with pytest.raises(ts.CheckpointError, match="nested deeper than Python recurses"):
            act()
    for depth in (250, 3000):
        with pytest.raises(ts.CheckpointError, match="nested deeper|meta is not plain data"):
            save(tmp_path / "d", {}, meta=nested(depth, 1))
    assert not (tmp_path / "d").exists()
    manifest = (folder / MANIFEST).read_text()
    for depth in (250, 3000, 100_000):
        (folder / MANIFEST).write_text(manifest.replace('"step": 0', '"step": ' + "[" * depth
                                                        + "]" * depth))
        with pytest.raises(ts.CheckpointError, match="nested deeper|is not JSON"):
            load(folder)


@pytest.mark.parametrize("dims", [65, 3000])
def test_more_dimensions_than_an_array_has_are_refused(tmp_path, rng, dims):
    folder = save(tmp_path / "c", {"w": ts.zeros(1)})
    ones = [1] * dims
    for change in ({"shape": ones}, {"shape": [1], "pieces": [
            {"name": "w@0.0", "file": data_file(folder).name, "lo": ones, "shape": ones}]}):
        rewrite_manifest(folder, lambda m, c=change: m["tensors"]["w"].update(c))
        with pytest.raises(ts.CheckpointError, match=f"64 dimensions at most, not {dims}"):
            load(folder)


def pieces_in_rows(count: int) -> tuple[tuple[int, ...], list]:
    return (count, 2), [((i, 0), (1, 2)) for i in range(count)]


def pieces_in_stairs(count: int) -> tuple[tuple[int, ...], list]:
    """Two pieces per column, which meet at another height in each."""
    n = count // 2
    return (n + 1, n), [b for c in range(n)
                        for b in (((0, c), (c + 1, 1)), ((c + 1, c), (n - c, 1)))]


@pytest.mark.parametrize("lay", [pieces_in_rows, pieces_in_stairs])
def test_a_manifest_of_8000_pieces_is_read_in_under_two_seconds(lay, tmp_path):
    """Of processor time; that each element is in one piece included."""
    shape, boxes = lay(8000)
    file = "tensors-00000000-00000.safetensors"
    pieces = [{"name": f"w@{i}", "file": file, "lo": lo, "shape": extents}
              for i, (lo, extents) in enumerate(boxes)]
    plain = {"step": 0, "random": {"seed": 0, "step": 0}, "meta": {},
             "files": {file: {"bytes": 0, "sha256": "0" * 64}},
             "tensors": {"w": {"shape": shape, "type": "f32", "param": False, "pieces": pieces}}}
    plain = json.loads(json.dumps(plain))
    start = time.process_time()
    assert len(parse(tmp_path, plain).tensors["w"].pieces) == 8000
    assert time.process_time() - start < 2
    if lay is pieces_in_rows:
        plain["tensors"]["w"]["pieces"][0]["lo"] = [7999, 0]
        with pytest.raises(ts.CheckpointError, match="some lie on others"):
            parse(tmp_path, plain)


def test_pieces_that_overlap_are_found_however_they_lie(rng):
    """Against every pair of random boxes in 0 to 3 dimensions."""
    seen = set()
    for _ in range(400):
        dims = int(rng.integers(4))
        boxes = [Rect(rng.integers(1, 4, dims).tolist(), rng.integers(0, 5, dims).tolist())
                 for _ in range(rng.integers(5))]
        expected = any((a & b).size for i, a in enumerate(boxes) for b in boxes[:i])
        assert overlap(boxes) == expected, boxes
        seen.add(expected)
    assert seen == {True, False}


# --- faults: every write to the disk fails once ------------------------------------------------
class PowerCut(BaseException):
    """Nothing after it happens: no handler of ours catches it, and every later write raises too."""


class Faults:
    """Lets `at` calls that change the disk through; the next one fails, after half of its bytes
    when it is a write. As an error (the disk is full) or as a power cut (all later ones too)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, cut: bool):
        self.calls, self.at, self.cut = 0, at, cut
        for name in WRITES:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **kwargs)
            now, self.calls = self.calls, self.calls + 1
            if now == self.at or (self.cut and now > self.at):
                if name == "write" and now == self.at:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                if name == "close":
                    real(*args)
                raise PowerCut if self.cut else OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    @property
    def hit(self) -> bool:
        return self.calls > self.at


def survive(act: Any, at: int, cut: bool) -> bool:
    """Run `act` with a fault; whether there was one to hit."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, at, cut)
        try:
            act()
        except (PowerCut, ts.CheckpointError):
            assert faults.hit
            return True
    return faults.hit


@pytest.mark.parametrize("cut", [False, True], ids=["disk full", "power cut"])
@pytest.mark.parametrize("first", [False, True], ids=["replacing", "first"])
def test_a_fault_at_any_write_leaves_the_old_or_the_new(tmp_path, rng, cut, first):
    old, new = some_tensors(rng), some_tensors(rng)
    outcomes, at = [], 0
    while True:
        path = tmp_path / f"{at}" / "deep" / "c"
        if not first:
            save(path, old, step=1, meta={"which": "old"})
        hit = survive(lambda p=path: save(p, new, step=2, meta={"which": "new"},
                                          file_bytes=1), at, cut)
        if first and not (path / MANIFEST).exists():
            outcomes.append(None)
            with pytest.raises(ts.CheckpointError):
                load(path)
        else:
            saved = load(path)
            outcomes.append(saved.step)
            assert saved.meta["which"] == {1: "old", 2: "new"}[saved.step]
            assert_same(saved.tree(new), {1: old, 2: new}[saved.step])
        save(path, old, step=3)  # and afterwards all is well, with nothing left over
        assert_same(load(path).tree(old), old)
        assert len(list(path.iterdir())) == 2
        if not hit:
            break
        at += 1
    before = None if first else 1
    assert at > 12 and outcomes[0] == before and outcomes[-1] == 2
    assert outcomes == sorted(outcomes, key=lambda x: x or 0), "old again after a commit"


def test_a_fault_at_any_write_keeps_a_history_readable(tmp_path, rng):
    trees = {step: some_tensors(rng) for step in (1, 2, 3)}
    for cut in (False, True):
        for at in range(100):
            history = History(tmp_path / f"{cut}{at}")
            history.save(1, trees[1])
            history.save(2, trees[2])
            hit = survive(lambda h=history: h.save(3, trees[3]), at, cut)
            newest = history.steps()[-1]
            assert newest in (2, 3)
            for step in history.steps():
                assert_same(history.load(step).tree(trees[1]), trees[step])
            assert len(history.steps()) >= 2, "the previous one went before the new one was there"
            history.save(3, trees[3])
            assert history.steps() == [2, 3]
            assert sorted(os.listdir(history.folder)) == ["step-00000002", "step-00000003"]
            if not hit:
                break
        else:
            raise AssertionError("a save of 100 writes?")


def test_bytes_reach_the_disk_before_the_name_that_commits_them(tmp_path, rng, monkeypatch):
    """The order that a power cut needs: data, fsync, folder, manifest, rename, folder, tidying."""
    save(tmp_path / "c", some_tensors(rng), step=1)
    events, names = [], {}

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = real(*args, **kwargs)
            if name == "open":
                names[out] = Path(args[0]).name.split("-")[0]
            what = names.get(args[0]) if name in ("write", "fsync") else Path(args[-1]).name \
                if name in ("replace", "unlink") else None
            if name != "open" and what != LOCK and (not events or events[-1] != (name, what)):
                events.append((name, what.split("-")[0] if what else None))
            return out

        monkeypatch.setattr(os, name, call)

    for name in ("open", "write", "fsync", "replace", "unlink"):
        spy(name)
    save(tmp_path / "c", some_tensors(rng), step=2)
    monkeypatch.undo()
    assert events == [
        ("write", "tensors"), ("fsync", "tensors"), ("write", "manifest"), ("fsync", "manifest"),
        ("fsync", "c"), ("replace", "manifest.json"), ("fsync", "c"), ("unlink", "tensors"),
    ]


def test_the_state_of_random_numbers_is_in_every_checkpoint(tmp_path):
    with pytest.raises(ts.CheckpointError, match="rng is RandomState") as caught:
        ts.checkpoints.save(tmp_path / "c", {"w": ts.ones(2), "rng": ts.random.get_state()})
    assert "saved.random" in caught.value.hint
    ts.random.seed(4)
    ts.checkpoints.save(tmp_path / "c", {"w": ts.ones(2)})
    drawn = ts.normal((3,)).tolist()
    ts.random.set_state(ts.checkpoints.load(tmp_path / "c").random)
    assert ts.normal((3,)).tolist() == drawn
