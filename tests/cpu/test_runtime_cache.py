"""The disk cache: whole entries, private folders, the size limit, many processes at once."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tessera import config
from tessera.errors import ArgumentError
from tessera.runtime.cache import STALE_S, DiskCache, Entry, content_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path):
    with config.scope(cache_dir=tmp_path / "cache"):
        yield DiskCache("things", limit_bytes=100_000)


def entry(size: int = 10, **meta) -> Entry:
    return Entry(meta, {"code": np.random.bytes(size), "text": b"abc", "none": b""})


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
    cache.folder().chmod(0o770)
    with pytest.raises(ArgumentError, match="writable by others"):
        cache.read("one")


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
    def refuse(*_):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        cache.write("one", entry())
    assert not list(cache.folder().iterdir())


PROGRAM = """
import sys, hashlib
from tessera.runtime.cache import DiskCache, Entry
cache, me = DiskCache("things", limit_bytes=60_000), sys.argv[1]
for i in range(120):
    name = str(i % 7)
    code = name.encode() * 5000
    cache.write(name, Entry({"by": me}, {"code": code}))
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
        out, err = process.communicate(timeout=60)
        assert out.strip() == "fine", err
    assert not [p for p in cache.folder().iterdir() if p.name.startswith(".new-")]


MAKERS = """
import sys, time
from pathlib import Path
from tessera import config
from tessera.runtime.cache import DiskCache, Entry
folder, log = Path(sys.argv[1]), Path(sys.argv[2])
config.set(cache_dir=folder)
def make():
    with open(log, "a") as file:
        file.write("made\\n")
    time.sleep(0.3)
    return Entry({"by": "one"}, {"code": b"x" * 1000})
made, cached = DiskCache("things").made("one", make)
print(made.meta["by"], len(made.parts["code"]), cached)
"""


def test_one_process_makes_an_entry_for_all(cache, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKERS, str(tmp_path / "cache"), str(log)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
               for _ in range(4)]
    said = sorted(p.communicate(timeout=60)[0].strip() for p in running)
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
