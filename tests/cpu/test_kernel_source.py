"""Where a kernel's source is found, and that it is what was compiled: here pytest rewrites the
asserts of this file."""

from __future__ import annotations

import ast
import linecache

import numpy as np
import pytest
from _pytest.assertion.rewrite import rewrite_asserts

import tessera as ts
from tessera import Tensor, f32
from tessera.tile.frontend import source
from tessera.tile.frontend.source import capture
from tessera.tile.ir.errors import KernelAssertionError, TileError

LIMIT = 8.0


def within(a, limit=LIMIT):
    assert a < limit and not a > 100, f"{a} is beyond {limit}"
    return a * 2.0


@ts.kernel
def doubled(x: Tensor["N", f32]):
    i = ts.tile.linear_id()
    assert x[0] > 0.0, "negative"
    assert N == 8 or N > 16 and not x[1] < 0.0
    if i < N:
        x[i] = within(x[i])


def test_asserts_in_a_file_that_pytest_rewrites():
    assert any(n.startswith("@py") for n in within.__code__.co_varnames)  # else this shows nothing
    x = np.ones(8, np.float32)
    doubled(x)
    assert (x == 2).all()
    with pytest.raises(KernelAssertionError, match="negative"):
        doubled(-x)
    with pytest.raises(KernelAssertionError, match="9.0 is beyond 8.0"):
        doubled(np.full(8, 9, np.float32))


TEXT = """\
def k(x: Tensor["N", f32]):
    assert x[0] > 0.0, "negative"
    assert x[1] == x[0] or not x[2] in (1.0, 2.0), f"no {x[0]}"
    x[0:8] = ts.tile.load(x[0:8]) * 2.0
"""


def rewritten(text: str, later: str, name: str):
    """The function of a text as pytest compiles it, whose file says something else later."""
    path = f"/kernels/rewritten_{name}.py"
    tree = ast.parse(text)
    rewrite_asserts(tree, text.encode())
    scope = {"Tensor": Tensor, "f32": f32, "ts": ts}
    exec(compile(tree, path, "exec"), scope)
    linecache.cache[path] = (len(later), None, later.splitlines(keepends=True), path)
    return scope["k"]


@pytest.mark.parametrize("old, new", [
    ("2.0\n", "3.0\n"), ("tile.load", "tile.exp"), ("> 0.0", "> 4.0"),
    ("    assert x[1] ==", "    assert x[5] =="), ("(x:", "(y:")])
def test_a_rewritten_function_that_changed_is_seen(old, new):
    assert ts.kernel(rewritten(TEXT, TEXT, "same")) is not None
    with pytest.raises(TileError, match="changed after it was imported"):
        ts.kernel(rewritten(TEXT, TEXT.replace(old, new), "other"))


def step(a):
    return a + 1.0


@ts.kernel
def stepped(x: Tensor["N", f32]):
    x[0:N] = step(step(ts.tile.load(x[0:N])))


def test_a_helper_is_read_once_and_again_when_it_was_reloaded(monkeypatch):
    read = []
    monkeypatch.setattr(source, "capture", lambda f: read.append(f) or capture(f))
    x, y = np.zeros(4, np.float32), np.zeros(5, np.float32)
    stepped(x)
    stepped(y)  # of another extent: traced anew
    assert read == [step] and (x == 2).all() and (y == 2).all()
    text = "def step(a):\n    return a + 8.0\n"
    linecache.cache["/kernels/reloaded.py"] = (len(text), None, text.splitlines(True), "")
    scope: dict = {}
    exec(compile(text, "/kernels/reloaded.py", "exec"), scope)
    monkeypatch.setattr(step, "__code__", scope["step"].__code__)
    ts.kernel(stepped.fn)(x)
    assert read == [step, step] and (x == 18).all()
