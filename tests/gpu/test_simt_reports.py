"""What kernels on a GPU print and report: lines, assertions, indices out of range."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from simt_cases import kernel
from tile_gpu import on_gpu

require_gpu()


def run_checked(k, *args, groups=None, lanes=None, checked=True, monkeypatch=None):
    """Runs with the kernel's sites registered; raises what the kernel reported."""
    import tessera.tile.launch.reports  # noqa: F401  kinds of errors
    from tessera.runtime import flags
    from tessera.tile.cuda.compile import compile_function
    from tile_gpu import facts_of, prepare

    bound, function, _, lanes_, _, schedule = prepare(k, args, {}, groups, lanes)
    made = compile_function(function, lanes_, schedule=schedule, facts=facts_of(function, bound),
                            checked=checked)
    monkeypatch.setitem(flags._tables, 1, (k.__name__,
                                           tuple(flags.ReportSite(*s) for s in made.emitted.sites)))
    return on_gpu(k, *args, groups=groups, lanes=lanes, checked=checked)


def test_printed_lines_are_those_of_the_interpreter(monkeypatch, capsys):
    from tessera.runtime import flags

    k = kernel("""
@kernel
def k(x: Tensor["n", f32], b: Tensor["n", ts.bool_]):
    i = tile.linear_id()
    print("groups", n, x[0])
    if i < 3:
        print("lane", i, f"x = {x[i]}, {b[i]}")
    if tile.group_id() == 1:
        print("done")
""")
    x, b = np.float32([0.1, -2.5, 1e30] + [0.0] * 61), np.zeros(64, bool)
    b[1] = True
    k[2, 32](x, b)
    wanted = capsys.readouterr().out.splitlines()
    flags.printed_lines().take()
    run_checked(k, x, b, groups=2, lanes=32, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(wanted)


def test_a_tile_is_printed_by_elements(monkeypatch):
    from tessera.runtime import flags

    k = kernel("""
@kernel
def k(X: Tensor["M", "N", f32]):
    print("tile", tile.load(X[0:4, 0:3]), "end")
""")
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    flags.printed_lines().take()
    run_checked(k, x, groups=1, lanes=64, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(
        f"tile [{i}, {j}] {x[i, j]} end" for i in range(4) for j in range(3))


@pytest.mark.parametrize("n", [1, 4, 40, 100])
def test_a_tile_of_one_axis_is_printed_whole(n, monkeypatch):
    """Each element once; the numbers printed with it in a line of their own."""
    from tessera.runtime import flags

    k = kernel(f"""
@kernel
def k(x: Tensor["n", f32]):
    t = tile.load(x[0:{n}])
    print("t", t, tile.reduce_sum(t))
""")
    x = np.arange(n, dtype=np.float32)
    flags.printed_lines().take()
    run_checked(k, x, groups=1, lanes=64, monkeypatch=monkeypatch)
    assert sorted(flags.printed_lines().take()) == sorted(
        [f"t (tile<{n} x f32>) {x.sum()}", *(f"t [{i}] {x[i]} (f32)" for i in range(n))])


def test_a_failed_assertion_is_reported(monkeypatch):
    k = kernel("""
@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    if i < n:
        assert x[i] < 5.0, f"x[{i}] is {x[i]}"
""")
    x = np.zeros(300, np.float32)
    run_checked(k, x, lanes=100, groups=3, monkeypatch=monkeypatch)
    x[123] = 7.5
    with pytest.raises(ts.TesseraError, match=r"lane 23 of group 1: x\[123\] is 7.5"):
        run_checked(k, x, lanes=100, groups=3, monkeypatch=monkeypatch)


def test_a_failed_assertion_on_a_tile_is_reported(monkeypatch):
    k = kernel("""
@kernel
def k(X: Tensor["M", "N", f32]):
    assert tile.load(X[tile_m:tile_m+10, 0:6]) >= 0.0, "negative"
""")
    x = np.zeros((20, 6), np.float32)
    run_checked(k, x, monkeypatch=monkeypatch)
    x[13, 5] = -1
    with pytest.raises(ts.TesseraError, match="group 1: negative"):
        run_checked(k, x, monkeypatch=monkeypatch)


@pytest.mark.parametrize("index, says", [
    ("i", "index 300 is outside of 'x': axis 0 has extent 300"), ("i - 1", "index -1 is outside")])
@pytest.mark.parametrize("how", ["y[0] = x[{}]", "x[{}] = 1.0", "tile.atomic_add(x, {}, 1.0)"])
def test_indices_out_of_range_are_reported(index, says, how, monkeypatch):
    k = kernel(f"""
@kernel
def k(x: Tensor["n", f32], y: Tensor["m", f32]):
    i = tile.linear_id()
    if i <= n and i % 300 == 0:
        {how.format(index)}
""")
    with pytest.raises(ts.TesseraError, match=says) as caught:
        run_checked(k, np.zeros(300, np.float32), np.zeros(1, np.float32), groups=4, lanes=100,
                    monkeypatch=monkeypatch)
    assert caught.value.code == "E_BOUNDS"


def test_indices_of_buffers_are_checked(monkeypatch):
    k = kernel("""
@kernel
def k(p: Tensor["n", i32], y: Tensor["n", f32]):
    s = tile.alloc_shared((4, 8), f32, stages=2)
    r = tile.alloc_register((3,), f32)
    i = tile.linear_id()
    for j in range(0, 3):
        r[j] = 1.0
    s[p[2], i % 4, i % 8] = 1.0
    y[i] = r[p[i]]
""")
    fine = np.array([0, 2, 1, 1] * 8, np.int32)
    run_checked(k, fine, np.zeros(32, np.float32), groups=1, lanes=32, monkeypatch=monkeypatch)
    for at, wrong, says in ((7, 3, "index 3 is outside of 'r'"), (2, 2, "stage 2 of 's'")):
        p = fine.copy()
        p[at] = wrong
        with pytest.raises(ts.TesseraError, match=says):
            run_checked(k, p, np.zeros(32, np.float32), groups=1, lanes=32,
                        monkeypatch=monkeypatch)
