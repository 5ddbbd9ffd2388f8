"""Truth in kernels as in Python: `and`, `or`, chained comparisons and ternaries evaluate what they
need and no more; a tile has no one truth; &, |, ^ and ~ of bools are logical."""

from __future__ import annotations

import numpy as np
import pytest

import emulator
import truth_programs
from kernels.build import build
from tessera.errors import TesseraError
from tessera.tile.ir.errors import TileError


# --- and, or --------------------------------------------------------------------------------------
def test_random_conditions_are_pythons(rng):
    """Guarded reads give Python's answer; one that is not is out of bounds in both."""
    outside = 0
    for _ in range(40):
        program, (x, p) = truth_programs.draw(rng), truth_programs.inputs(rng)
        k, lanes = truth_programs.kernel(program), truth_programs.LENGTH + 8
        o = np.full(lanes, -1, np.int32)
        try:
            want = program.python(x, p, lanes)
        except IndexError:
            outside += 1
            with pytest.raises(TesseraError, match="E_BOUNDS"):
                k(x, p, o)
            continue
        k(x, p, o)
        assert o.tolist() == want, program
    assert outside < 40


def test_random_conditions_as_emitted(rng):
    """The emulated device code reads no element that Python does not."""
    for _ in range(6):
        program, args, want = truth_programs.guarded(rng)
        k = truth_programs.kernel(program)
        emulator.compare(k, *args, groups=2, lanes=32, lockstep=False)
        k(*args)
        assert args[-1].tolist() == want, program


GUARDS = {
    "if i < N and x[i] > 0.0:\n        o[i] = 1.0": 1,
    "while i < N and x[i] > 0.0:\n        o[i] = 1.0\n        i += 64": 1,
    "if i >= N or x[i] <= 0.0:\n        return\n    o[i] = 1.0": 1,
    "if not (i >= N or x[i] <= 0.0):\n        o[i] = 1.0": 1,
    "if (x[i] if i < N else 0.0) > 0.0:\n        o[i] = 1.0": 1,
    "if i < N and (x[i] > 0.0 and x[i + 0 * N] > 0.0):\n        o[i] = 1.0": 1,
    "if 0 <= i < N and 0.0 < x[i] < 9.0:\n        o[i] = 1.0": 1,
    "v = i < N and x[i] > 0.0\n    if v:\n        o[i] = 1.0": 1,
    "assert i >= N or x[i] < 9.0\n    if i < N and x[i] > 0.0:\n        o[i] = 1.0": 2,
}


def guard(body: str):
    return build(f"""@kernel
def k(x: Tensor["N", f32], o: Tensor["N", f32]):
    i = tile.linear_id()
    {body}
""")["k"]


@pytest.mark.parametrize("body", GUARDS)
def test_guards(body, rng):
    x = rng.standard_normal(100).astype(np.float32)
    o = np.zeros(100, np.float32)
    guard(body)(x, o)
    assert np.array_equal(o, x > 0)


@pytest.mark.parametrize("body", GUARDS)
def test_guards_in_ptx(body):
    """Before every load stands a branch that depends on the comparison of the index."""
    k = guard(body)
    k(np.ones(100, np.float32), np.ones(100, np.float32))
    lines = [line.strip() for line in k.inspect_ir("ptx", target="sm_90").splitlines()]
    loads = [n for n, line in enumerate(lines) if "ld.global" in line and ".f32" in line
             or "ld.global.b32" in line]
    assert len(loads) >= GUARDS[body]
    for n in loads:
        before = [line for line in lines[:n] if line.startswith("@")]
        assert lines[n].startswith("@") or any("bra" in line for line in before), lines[n]


def test_a_uniform_guard():
    k = build("""@kernel
def k(x: Tensor["N", f32], o: Tensor["G", f32]):
    j = 0
    while j < N and x[j] > 0.0:
        j += 1
    o[0] = float(j)
""")["k"]
    o = np.zeros(1, np.float32)
    k(np.ones(100, np.float32), o)
    assert o[0] == 100
    emulator.compare(k, np.ones(9, np.float32), o, lanes=3, lockstep=False)


def test_what_cannot_fail_needs_no_branch():
    """A condition of indices alone stays one instruction each."""
    k = build("""@kernel
def k(o: Tensor["N", f32]):
    i = tile.linear_id()
    if 0 <= i < N and ((i & 3) == 1 or not i > 70):
        o[i] = 1.0
""")["k"]
    o = np.zeros(90, np.float32)
    k(o)
    assert np.array_equal(np.flatnonzero(o), [i for i in range(90) if i % 4 == 1 or i <= 70])
    assert k.inspect_ir("tile").count("if ") == 1


def test_a_guarded_division(recwarn):
    k = build("""@kernel
def k(d: Tensor["N", i32], o: Tensor["N", i32]):
    i = tile.linear_id()
    if i < N:
        o[i] = 1 if d[i] != 0 and 12 // d[i] > 3 else 0
""")["k"]
    o = np.zeros(4, np.int32)
    k(np.array([0, 3, 4, 0], np.int32), o)
    assert o.tolist() == [0, 1, 0, 0] and not recwarn.list


def test_compile_time_operands_decide_what_is_traced():
    """As before: the side that is not taken need not even make sense."""
    k = build("""@kernel
def k(x: Tensor["N", f32], o: Tensor["N", f32], *, FAST=False):
    i = tile.linear_id()
    if i < N and FAST:
        o[i] = tile.no_such_op(x)
    elif i < N and not FAST:
        o[i] = x[i]
    bias = None
    if bias is not None and bias[i] > 0.0:
        o[i] = 2.0
""")["k"]
    o = np.zeros(4, np.float32)
    k(np.arange(4, dtype=np.float32), o)
    assert o.tolist() == [0, 1, 2, 3]


def test_values_of_and_and_or():
    k = build("""@kernel
def k(x: Tensor["N", i32], o: Tensor["K", "N", i32]):
    i = tile.linear_id()
    if i < N:
        o[0, i] = x[i] or 9
        o[1, i] = x[i] and 9
        o[2, i] = 0 or x[i]
        o[3, i] = x[i] or i or 7
        o[4, i] = 5 and x[i]
""")["k"]
    x, o = np.array([0, 3, 0, -1], np.int32), np.zeros((5, 4), np.int32)
    k(x, o)
    each = list(enumerate(x.tolist()))
    assert o.tolist() == [[v or 9 for _, v in each], [v and 9 for _, v in each],
                          [0 or v for _, v in each], [v or i or 7 for i, v in each],
                          [5 and v for _, v in each]]
    emulator.compare(k, x, np.zeros((5, 4), np.int32), lanes=7, lockstep=False)


def test_a_side_that_acts_acts_where_it_is_asked():
    """Also when its value is known."""
    k = build("""
def note(count, i):
    tile.atomic_add(count, i % 2, 1)
    return True

@kernel
def k(o: Tensor["N", i32], count: Tensor["C", i32]):
    i = tile.linear_id()
    if i < N and note(count, i):
        o[i] = 1
""")["k"]
    o, count = np.zeros(9, np.int32), np.zeros(2, np.int32)
    k(o, count)
    assert o.tolist() == [1] * 9 and count.tolist() == [5, 4]


def test_a_broken_loop_does_not_ask_again():
    """After `break` the condition is not evaluated: x[i] may be gone."""
    k = build("""@kernel
def k(x: Tensor["N", f32], o: Tensor["G", i32]):
    i = 0
    while x[i] < 5.0:
        i += 1
        if i == N:
            break
    o[0] = i
""")["k"]
    o = np.zeros(1, np.int32)
    k(np.zeros(6, np.float32), o)
    assert o[0] == 6


# --- tiles have no truth --------------------------------------------------------------------------
REFUSED = {
    "if t > 0.0 and u > 0.0:\n        pass": ("an 'and' on tile", "&"),
    "v = t or 9.0": ("an 'or' on tile", "|"),
    "v = 0.0 < t < 1.0": ("a chained comparison on tile", "&"),
    "v = not t": ("a 'not' on tile", "~t"),
    "while t < 10.0:\n        t = t * 2.0": ("a while on tile", "reduce_min"),
    "if t > 0.0:\n        pass": ("an if on tile", "where"),
    "v = t if t > 0.0 else u": ("an if on tile", "where"),
    "if n > 0 and t:\n        pass": ("an 'and' on tile", "where"),
    "v = [j for j in (1, 2) if n > j]": ("the if of a comprehension", "compile time"),
    "if A[0]:\n        pass": ("a place in memory", "load"),
    "v = not A[0]": ("a place in memory", "load"),
    "v = A[0] or 3": ("a place in memory", "load"),
    "assert A[0]": ("a place in memory", "load"),
    "while A[0]:\n        pass": ("a place in memory", "load"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line):
    k = build(f"""@kernel
def k(A: Tensor["N", "M", f32], n: i32):
    t = tile.load(A[0:4, 0:4])
    u = t * 2.0
    {line}
""")["k"]
    with pytest.raises(TileError) as caught:
        k(np.ones((4, 4), np.float32), 3)
    text = str(caught.value)
    assert all(part in text for part in REFUSED[line]), text
    assert line.split("\n")[0] in text


# --- &, |, ^, ~ of bools --------------------------------------------------------------------------
TILES = """@kernel
def k(A: Tensor["M", "N", f32], O: Tensor["K", "M", "N", f32]):
    x = tile.load(A[0:8, 0:32])
    p, q = x > 0.0, x < 1.0
    O[0, 0:8, 0:32] = tile.where(p & q, x, -9.0)
    O[1, 0:8, 0:32] = tile.where(p | q, x, -9.0)
    O[2, 0:8, 0:32] = tile.where(p ^ q, x, -9.0)
    O[3, 0:8, 0:32] = x * ~p
    O[4, 0:8, 0:32] = tile.where(~(p & (tile.row_max(x) > 2.0)), x, -9.0)
    O[5, 0:8, 0:32] = tile.where(p & True, x, -9.0) + (~True + 0.0)
"""
LANES = """@kernel
def k(A: Tensor["M", "N", f32], L: Tensor["M", i32]):
    i = tile.local_id()
    if i < M:
        a = A[i, 0] > 0.0
        b = A[i, 1] > 0.0
        r = 0
        if ~a:
            r += 1
        if a & b:
            r += 2
        if a | b:
            r += 4
        if a ^ b:
            r += 8
        a &= True
        if a & ~b:
            r += 16
        L[i] = r + (3 & 6) * 32
"""


def test_bools_of_tiles_are_logical(rng):
    x = rng.standard_normal((8, 32)).astype(np.float32)
    k, o = build(TILES)["k"], np.zeros((6, 8, 32), np.float32)
    k[1, 32](x, o)
    p, q, far = x > 0, x < 1, np.float32(-9)
    want = [np.where(p & q, x, far), np.where(p | q, x, far), np.where(p ^ q, x, far), x * ~p,
            np.where(~(p & (x.max(1, keepdims=True) > 2)), x, far), np.where(p, x, far)]
    assert np.array_equal(o, np.stack(want))
    emulator.compare(k, x, o, lanes=32, target="sm_90")
    k.inspect_ir("ptx", target="sm_80")


def test_bools_of_lanes_are_logical(rng):
    x = rng.standard_normal((8, 32)).astype(np.float32)
    k, out = build(LANES)["k"], np.zeros(8, np.int32)
    k[1, 32](x, out)
    a, b = x[:, 0] > 0, x[:, 1] > 0
    assert np.array_equal(out, ~a * 1 + (a & b) * 2 + (a | b) * 4 + (a ^ b) * 8 + (a & ~b) * 16
                          + 64)
    emulator.compare(k, x, out, groups=1, lanes=32, lockstep=False)
