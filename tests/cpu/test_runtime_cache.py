"""The disk cache: whole entries, private folders, the size limit, many processes at once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import config
from tessera.errors import ArgumentError
from tessera.runtime import cache as cache_module
from tessera.runtime.cache import (
    MAGIC,
    STALE_S,
    CacheEntry,
    CacheWarning,
    DiskCache,
    content_name,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_warned", set())
    with config.scope(cache_dir=tmp_path / "cache"):
        yield DiskCache("things", limit_bytes=100_000)


def entry(size: int = 10, **meta) -> CacheEntry:
    return CacheEntry(meta, {"code": np.random.bytes(size), "text": b"abc", "none": b""})


def test_what_is_written_is_read(cache, rng):
    e = entry(1000, symbol="f", registers=[1, 2], warnings=["a\nb"])
    cache.write("one", e)
    assert cache.read("one") == e
    assert cache.read("two") is None


@pytest.mark.parametrize("damage", range(8))
def test_a_damaged_entry_is_dropped(cache, rng, damage):
    cache.write("one", entry(300))
    path = cache.folder() / "one"
    sound = bytearray(path.read_bytes())
    if damage < 5:
        sound[int(rng.integers(len(sound)))] ^= 1 << int(rng.integers(8))
    path.write_bytes([sound, sound, sound, sound, sound, sound[:20], b"", sound + b"x"][damage])
    assert cache.read("one") is None and not path.exists()
    cache.write("one", entry(3))
    assert cache.read("one") is not None


def test_private_folders(cache):
    cache.write("one", entry())
    assert cache.folder().stat().st_mode & 0o777 == 0o700
    assert (cache.folder() / "one").stat().st_mode & 0o077 == 0


# --- a cache that is no use stops nothing ------------------------------------------------------
def make_closed(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    cache.folder().chmod(0o770)


def make_foreign(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    cache.folder()
    me = os.geteuid()
    patch.setattr(os, "geteuid", lambda: me + 1)


def make_a_link(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    elsewhere = cache.path.parent.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700, exist_ok=True)
    cache.path.parent.mkdir()
    cache.path.symlink_to(elsewhere)


def make_a_file(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    cache.path.parent.write_text("mine")


def make_full(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    cache.folder()
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", refuse)


def make_homeless(cache: DiskCache, patch: pytest.MonkeyPatch) -> None:
    def nobody(path):
        raise RuntimeError("Could not determine home directory.")

    patch.setattr(Path, "expanduser", nobody)
    config._base.pop("cache_dir", None)
    for layer in config._layers:
        patch.delitem(layer.values, "cache_dir", raising=False)
    config._drop("cache_dir")


UNUSABLE = {
    "closed": (make_closed, "is writable by others (mode 770)"),
    "foreign": (make_foreign, "is not a folder of this user"),
    "link": (make_a_link, "is not a folder of this user"),
    "file": (make_a_file, "is not a folder of this user"),
    "full": (make_full, "No space left on device"),
    "homeless": (make_homeless, "TESSERA_CACHE_DIR"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_cannot_be_kept_is_made_and_said_once(cache, monkeypatch, kind):
    change, words = UNUSABLE[kind]
    made = []

    def make():
        made.append(entry(9))
        return made[-1]

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        change(cache, patch)
        for name in ("one", "two"):
            found, there = cache.made(name, make)
            assert found is made[-1] and not there
        cache.write("three", entry())
        cache.write_text("four.py", "x = 1")
        assert cache.read("three") is None
    assert [w.category for w in told] == [CacheWarning], [str(w.message) for w in told]
    assert words in str(told[0].message) and told[0].filename == __file__
    if kind == "closed":
        with pytest.raises(ArgumentError, match="writable by others"):
            cache.folder()


def test_a_computation_whose_code_is_in_hand_goes_on_without_a_cache(cache, rng):
    """A function that compiles a loop, in a folder that others may write to."""
    DiskCache("loops").folder().chmod(0o777)
    n = 100_003  # no other test compiles for it
    x = rng.normal(size=n).astype(np.float32)
    with pytest.warns(CacheWarning, match="loops is writable by others"):
        y = ts.jit(lambda x: ts.tanh(x) * 1.25 + x * x * 0.375)(x)
    np.testing.assert_allclose(y.numpy(), np.tanh(x) * 1.25 + x * x * 0.375, rtol=1e-5, atol=1e-6)


def test_a_read_only_cache_is_used_as_it_is(cache, monkeypatch):
    """Entries that are there are read; a damaged one that cannot be removed is made again."""
    cache.write("one", entry(5, n=1))
    cache.write("two", entry(5))
    (cache.folder() / "two").write_bytes(b"x")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "unlink", "replace"):
        monkeypatch.setattr(os, name, refuse)
    assert cache.made("one", entry)[1]
    with pytest.warns(CacheWarning, match="Read-only file system"):
        assert not cache.made("two", entry)[1]


# --- only what was verified is used -----------------------------------------------------------
@pytest.mark.parametrize("kind", ["link", "pipe", "writable by others", "another's", "folder"])
def test_an_entry_that_is_no_private_file_is_not_used(cache, monkeypatch, kind):
    cache.write("one", entry())
    path = cache.folder() / "one"
    if kind == "writable by others":
        path.chmod(0o660)
    elif kind == "another's":
        me, real = os.geteuid(), os.fstat

        def fstat(handle):
            about = real(handle)
            return about if stat.S_ISDIR(about.st_mode) else os.stat_result(
                [*about[:4], me + 1, *about[5:]])

        monkeypatch.setattr(os, "fstat", fstat)
    else:
        outside = cache.path.parent / "outside"
        os.rename(path, outside)
        {"link": lambda: path.symlink_to(outside), "pipe": lambda: os.mkfifo(path),
         "folder": path.mkdir}[kind]()
    if kind == "folder":
        with pytest.warns(CacheWarning, match="directory"):
            assert cache.read("one") is None
        return
    assert cache.read("one") is None and not path.exists()
    monkeypatch.undo()
    cache.write("one", entry(3))
    assert cache.read("one") is not None


def test_an_entry_under_another_name_is_not_used(cache):
    cache.write("one", entry())
    os.rename(cache.folder() / "one", cache.folder() / "two")
    assert cache.read("two") is None and not (cache.folder() / "two").exists()


@pytest.mark.parametrize("header", [
    b"xx", b"[]", b"{}", b'{"name": "one"}', b'{"name": "one", "sizes": 3, "meta": {}}',
    b'{"name": "one", "sizes": {"a": "b"}, "meta": {}}', b"[" * 5000])
def test_a_sealed_entry_of_another_make_is_not_used(cache, header):
    body = len(header).to_bytes(4, "little") + header
    cache.folder()
    (cache.path / "one").write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    assert cache.read("one") is None and not (cache.path / "one").exists()


def test_a_folder_that_is_exchanged_is_never_read(cache, monkeypatch):
    """Whoever may rename the folder above puts theirs in its place after it was checked: what is
    read, and written, is still in the one that was."""
    good, evil = entry(20), entry(20)
    cache.write("one", good)
    theirs = cache.path.parent / "theirs"
    with config.scope(cache_dir=theirs):
        cache.write("one", evil)
    checked = cache_module.need_private

    def exchange(about, path):
        checked(about, path)
        os.rename(cache.path, cache.path.parent / "ours")
        os.rename(theirs / "things", cache.path)

    monkeypatch.setattr(cache_module, "need_private", exchange)
    assert cache.read("one") == good
    os.rename(cache.path, theirs / "things")
    os.rename(cache.path.parent / "ours", cache.path)
    cache.write("two", good)
    assert "two" in os.listdir(cache.path.parent / "ours")
    assert "two" not in os.listdir(cache.path)


def test_those_unused_for_longest_go(cache):
    now = time.time()
    for i in range(9):
        cache.write(f"e{i}", entry(10_000))
        os.utime(cache.folder() / f"e{i}", (now - 1000 + i, now - 1000 + i))
    assert cache.read("e0") is not None  # used again: the newest now
    cache.write("new", entry(30_000))
    left = {p.name for p in cache.folder().iterdir()}
    assert "e0" in left and "new" in left and not left & {"e1", "e2"} and "e8" in left
    assert cache.size_bytes() <= cache.limit_bytes
    assert cache.clear() == len(left) and cache.size_bytes() == 0


def test_an_entry_beyond_the_limit_is_still_kept_once(cache):
    cache.write("large", entry(200_000))
    assert cache.read("large") is not None


def test_leftovers_of_dead_writers_go(cache):
    old, young = cache.folder() / ".new-old", cache.folder() / ".new-young"
    for path, age in ((old, STALE_S + 10), (young, 10)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    cache.write("one", entry())
    assert not old.exists() and young.exists()


def test_a_failed_write_leaves_nothing(cache, monkeypatch):
    def refuse(*_, **folders):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(CacheWarning, match="full"):
        cache.write("one", entry())
    assert not list(cache.folder().iterdir())


PROGRAM = """
import sys, hashlib
from tessera.runtime.cache import DiskCache, CacheEntry
cache, me = DiskCache("things", limit_bytes=60_000), sys.argv[1]
for i in range(120):
    name = str(i % 7)
    code = name.encode() * 5000
    cache.write(name, CacheEntry({"by": me}, {"code": code}))
    found = cache.read(str((i * 3) % 7))
    assert found is None or set(found.parts["code"]) == {ord(str((i * 3) % 7))}
print("fine")
"""


def test_processes_share_it(cache):
    env = dict(os.environ, TESSERA_CACHE_DIR=str(cache.folder().parent), PYTHONPATH=str(ROOT))
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(n)], env=env,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for n in range(3)]
    for process in running:
        out, err = process.communicate(timeout=180)
        assert out.strip() == "fine", err
    assert not [p for p in cache.folder().iterdir() if p.name.startswith(".new-")]


MAKERS = """
import sys, time
from pathlib import Path
from tessera import config
from tessera.runtime.cache import DiskCache, CacheEntry
folder, log = Path(sys.argv[1]), Path(sys.argv[2])
config.set(cache_dir=folder)
def make():
    with open(log, "a") as file:
        file.write("made\\n")
    time.sleep(0.3)
    return CacheEntry({"by": "one"}, {"code": b"x" * 1000})
made, cached = DiskCache("things").made("one", make)
print(made.meta["by"], len(made.parts["code"]), cached)
"""


def test_one_process_makes_an_entry_for_all(cache, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKERS, str(tmp_path / "cache"), str(log)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
               for _ in range(4)]
    said = sorted(p.communicate(timeout=180)[0].strip() for p in running)
    assert log.read_text() == "made\n"
    assert said == ["one 1000 False"] + ["one 1000 True"] * 3
    assert [p.name for p in cache.folder().iterdir()] == ["one"]


def test_threads_wait_for_each_other_too(cache):
    made = []

    def make():
        made.append(time.sleep(0.1))
        return entry(5)

    threads = [threading.Thread(target=cache.made, args=("one", make)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1 and cache.made("one", make)[1]


def test_who_fails_to_make_one_lets_the_next_try(cache):
    def fails():
        raise RuntimeError("no compiler")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            cache.made("one", fails)
    assert not list(cache.folder().iterdir())
    assert cache.made("one", lambda: entry(5, n=1))[0].meta == {"n": 1}


def test_without_locks_everybody_makes_one(cache, monkeypatch):
    def refuses(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert cache.made("one", lambda: entry(5, n=1))[0].meta == {"n": 1}


def test_names_depend_on_every_part():
    names = {content_name(*p) for p in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (b"abd",))}
    assert len(names) == 5 and content_name("a", b"b") == content_name(b"a", "b")
