"""What lies beyond an edge stays out of reductions, or the kernel is refused: interpreter, emitted
instructions and fp64 NumPy agree."""

from __future__ import annotations

import os

import numpy as np
import pytest

import emulator
import tessera as ts
from edge_programs import accepted
from kernels.build import build
from tessera import config
from tessera.tile.builder.edge_check import check_edges
from tessera.tile.builder.edge_rules import gives_zero, grouped
from tessera.tile.ir.edges import TileEdges
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.op_record import OPS

COUNT = 500 if os.environ.get("TESSERA_SLOW") == "1" else 24

HEAD = ('@ts.kernel\ndef k(x: Tensor["M", "N", f32], o: Tensor["M", f32], f: ts.int32, c: ts.int32)'
        ":\n")
LOAD = "t = tile.load(x[tile_m:tile_m+8, 0:64])"
STORE = "o[tile_m:tile_m+8] = tile.row_sum(tile.exp(t))"
S = "s = tile.alloc_shared((8, 64), f32)"


def kernel(*lines: str):
    return build(HEAD + "".join(f"    {line}\n" for line in "\n".join(lines).splitlines()))["k"]


def call(k, x: np.ndarray, f: int = 1, c: int = 0) -> np.ndarray:
    """What the interpreter leaves; the emitted instructions leave it too."""
    o = np.full(len(x), np.nan, np.float32)
    with config.scope(debug=True):
        k(x, o, f, c)
    emulator.compare(k, x, np.full(len(x), np.nan, np.float32), f, c, rtol=1e-4)
    return o


SUMS = {  # each leaves the sum of exp of each row
    "nothing": "",
    "branch": "if f > 0:\n    t = t * 1.0",
    "both branches": "if f > 0:\n    t = t * 1.0\nelse:\n    t = t + 0.0",
    "ternary": "t = t * 1.0 if f > 0 else t",
    "ternary with a mask": "t = tile.causal_mask(t, tile_m, 0) if f > 100 else t",
    "while": "while f > 0:\n    t = t * 1.0\n    f -= 1",
    "for with break": "for i in range(9):\n    if i > f:\n        break\n    t = t * 1.0",
    "loads in both branches": "if f > 0:\n    t = tile.load(x[tile_m:tile_m+8, 0:64])\n"
                              "else:\n    t = tile.load(x[tile_m:tile_m+8, 0:64]) + 0.0",
    "sort": "t = tile.sort(t)",
    "sort, the largest first": "t = tile.sort(t, descending=True)",
    "reshape and back": "t = tile.reshape(tile.reshape(t, (8, 4, 16)), (8, 64))",
    "reshape with a new axis": "t = tile.reshape(tile.reshape(t, (8, 1, 64)), (8, 64))",
    "transposes": "t = t.T\nt = tile.transpose(t)",
    "shared memory": f"{S}\ns[:, :] = t\ntile.barrier()\nt = tile.load(s)",
    "shared memory, transposed": "s = tile.alloc_shared((64, 8), f32)\ns[:, :] = t.T\n"
                                 "tile.barrier()\nt = tile.load(s.T)",
    "shared memory by halves": f"{S}\na = tile_m + 4\n"
                               "s[0:4, :] = tile.load(x[a-4:a, 0:64])\n"
                               "s[4:8, :] = tile.load(x[a:a+4, 0:64])\n"
                               "tile.barrier()\nt = tile.load(s)",
    "shared memory in a branch": f"{S}\ns[:, :] = t\ntile.barrier()\nif f > 0:\n"
                                 "    s[:, :] = t * 1.0\ntile.barrier()\nt = tile.load(s)",
    "cp_async": f"{S}\ntile.cp_async(s, x[tile_m:tile_m+8, 0:64])\ntile.cp_wait_group(0)\n"
                "tile.barrier()\nt = tile.load(s)",
    "a row statistic": "t = t + 0.0 * tile.row_max(tile.exp(t))",
    "where": "t = tile.where(t > 100.0, 0.0, t)",
    "where with a second load": "u = tile.load(x[tile_m:tile_m+8, 0:64])\n"
                                "t = tile.where(u > 100.0, 1.0, t)",
    "low edge": "t = tile.load(x[tile_m:tile_m+8, -3:61])",
    "an edge that may be low": "t = tile.load(x[tile_m:tile_m+8, c-3:c+61])",
    "inside": "t = tile.where(tile.inside(t), t, -math.inf)",
    "inside and more": "t = tile.where(tile.inside(t) & (t < 100.0), t, -math.inf)",
    "fill": "t = tile.load(x[tile_m:tile_m+8, 0:64], fill=-math.inf)",
    "fill of shared memory": f"{S}\ns[:, :] = t\ntile.barrier()\nt = tile.load(s, fill=-math.inf)",
}


@pytest.mark.parametrize("name", SUMS)
def test_what_lies_beyond_stays_out(name, rng):
    x = rng.standard_normal((13, 50)).astype(np.float32)
    k = kernel(LOAD, SUMS[name], STORE)
    for f in (0, 1):
        np.testing.assert_allclose(call(k, x, f), np.exp(x.astype(np.float64)).sum(1), rtol=1e-5)


def test_a_reshaped_row_times_its_sum_is_0_beyond(rng):
    """So shared memory may have it: a sum needs no mask there."""
    x = rng.standard_normal((13, 50)).astype(np.float32)
    k = kernel(f"t = tile.reshape(tile.reshape({LOAD[4:]}, (2, 4, 64)), (8, 64))", S,
               "s[:, :] = t * tile.row_sum(t)[:, None]", "tile.barrier()",
               "o[tile_m:tile_m+8] = tile.row_sum(tile.load(s))")
    np.testing.assert_allclose(call(k, x), x.astype(np.float64).sum(1) ** 2, rtol=1e-4, atol=1e-4)


def test_numbers_take_the_edge_of_what_they_meet(rng):
    """A branch without a load leaves zeros in the shape of the other one."""
    x = rng.standard_normal((13, 50)).astype(np.float32)
    k = kernel("t = tile.zeros((8, 64))", "if f > 0:", "    " + LOAD, STORE)
    for f in (0, 1):
        np.testing.assert_allclose(call(k, x, f), np.exp(f * x.astype(np.float64)).sum(1),
                                   rtol=1e-5)


ENDS = {  # other reductions of t = exp(x), whose elements are all above 0
    "row_max": ("tile.row_max(-t)", lambda e: -e.min(1)),
    "row_min": ("tile.row_min(t)", lambda e: e.min(1)),
    "row_prod": ("tile.row_prod(t + 1.0)", lambda e: (e + 1).prod(1)),
    "row_mean": ("tile.row_mean(t)", lambda e: e.mean(1)),
    "argmin": ("tile.cast(tile.argmin(-1.0 / t), f32)", lambda e: np.argmin(-1 / e, 1)),
    "reduce_max of a reshape": ("tile.reduce_max(tile.reduce_max(tile.reshape(-t, (8, 4, 16)), 2),"
                                " 1)", lambda e: -e.min(1)),
    "row_mean of a reshape": ("tile.row_mean(tile.reshape(tile.reshape(t, (64, 8)), (8, 64)))",
                              lambda e: e.mean(1)),
    "the last of cumsum": ("tile.row_max(tile.cumsum(t))", lambda e: e.sum(1)),
    "the last of cumprod": ("tile.row_min(tile.cumprod(1.0 / (t + 1.0)))",
                            lambda e: (1 / (e + 1)).prod(1)),
    "argsort": ("tile.row_max(tile.cast(tile.argsort(t), f32))",
                lambda e: np.full(len(e), e.shape[1] - 1.0)),
    "a matmul": ("tile.row_max(tile.dot(t, tile.ones((64, 16)), precision='f32'))",
                 lambda e: e.sum(1)),
    "softmax": ("tile.row_max(tile.softmax_online(t)[0])",
                lambda e: np.exp(e - e.max(1)[:, None]).max(1)),
}


@pytest.mark.parametrize("name, start", [(n, s) for n in ENDS for s in ("0", "-3", "c")
                                         if n != "argsort" or s == "0"])
def test_other_reductions(name, start, rng):
    x = rng.standard_normal((13, 9)).astype(np.float32)
    end, f = ENDS[name]
    k = kernel(f"t = tile.exp(tile.load(x[tile_m:tile_m+8, {start}:{start}+64]))",
               "if f > 0:", "    t = t * 1.0", f"o[tile_m:tile_m+8] = {end}")
    got = call(k, x, 1, -5)
    wanted = f(np.exp(x.astype(np.float64)))
    if name == "argmin":
        wanted = wanted + {"0": 0, "-3": 3, "c": 5}[start]
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


REFUSED = {  # (lines, the line that is named, what is said)
    "another edge in each iteration": (
        "t = tile.zeros((8, 16))\nfor k in tile.range(0, x.shape[1], 16):\n"
        "    t += tile.exp(tile.load(x[tile_m:tile_m+8, k:k+16]))\n"
        "o[tile_m:tile_m+8] = tile.row_sum(t)", 4, "another edge in each iteration of the loop"),
    "a difference of neighbours": (
        "t = tile.load(x[tile_m:tile_m+8, 1:65]) - tile.load(x[tile_m:tile_m+8, 0:64])\n"
        "o[tile_m:tile_m+8] = tile.row_sum(tile.abs(t))", 2, "two edges"),
    "a maximum of what a loop adds up": (
        "t = tile.zeros((8, 16))\nfor k in tile.range(0, x.shape[1], 16):\n"
        "    t += tile.load(x[tile_m:tile_m+8, k:k+16])\n"
        "o[tile_m:tile_m+8] = tile.row_max(t)", 4, "another edge in each iteration"),
    "shared memory of what lies apart from a row's sum, reshaped": (
        f"t = tile.reshape(tile.reshape({LOAD[4:]}, (2, 4, 64)), (8, 64))\n{S}\n"
        "s[:, :] = t - tile.row_sum(t)[:, None]\ntile.barrier()\n"
        "o[tile_m:tile_m+8] = tile.row_sum(tile.load(s))", 5, "was reshaped and stored"),
    "the block of the iteration before": (
        "t = tile.zeros((8, 16))\nd = tile.zeros((8,))\n"
        "for k in tile.range(0, x.shape[1], 16):\n"
        "    u = tile.load(x[tile_m:tile_m+8, k:k+16])\n    d += tile.row_sum(tile.abs(u - t))\n"
        "    t = u\no[tile_m:tile_m+8] = d", 5, "another edge in each iteration"),
    "branches with two edges": (
        "if f > 0:\n    t = tile.load(x[tile_m:tile_m+8, 0:64])\nelse:\n"
        "    t = tile.load(x[tile_m:tile_m+8, 1:65])\n"
        "o[tile_m:tile_m+8] = tile.row_max(t)", 5, "two different edges"),
    "an edge of a branch's own": (
        "t = tile.zeros((8, 64))\nif f > 0:\n    a = f * f\n"
        "    t = tile.load(x[tile_m:tile_m+8, a:a+64])\n"
        "o[tile_m:tile_m+8] = tile.row_max(t)", 5, "an edge of its own in a branch"),
    "parts of a buffer with two edges": (
        f"{S}\ns[:, 0:32] = tile.load(x[tile_m:tile_m+8, 0:32])\n"
        "s[:, 32:64] = tile.load(x[tile_m:tile_m+8, 0:32])\ntile.barrier()\n"
        "o[tile_m:tile_m+8] = tile.row_max(tile.load(s))", 5, "two different edges"),
    "single elements beside an edge": (
        f"{S}\ns[:, :] = tile.load(x[tile_m:tile_m+8, 0:64])\ntile.barrier()\n"
        "if tile.local_id() < 8:\n    s[tile.local_id(), 63] = 1.0\ntile.barrier()\n"
        "o[tile_m:tile_m+8] = tile.row_sum(tile.load(s))", 7, "single elements"),
    "a repeated row": (
        "t = tile.load(x[c:c+1, 0:64]) + tile.load(x[tile_m:tile_m+8, 0:64])\n"
        "o[0:64] = tile.col_max(t)", 2, "repeats an axis of extent 1"),
    "a sort from below 0": (
        "o[tile_m:tile_m+8] = tile.row_max(tile.sort(tile.load(x[tile_m:tile_m+8, c:c+64])))",
        1, "may begin below 0"),
    "a sort of a reshape": (
        "t = tile.reshape(tile.load(x[tile_m:tile_m+8, 0:64]), (16, 32))\nt = tile.sort(t)\n"
        "o[0:16] = tile.row_max(t)", 2, "was reshaped"),
    "a matmul of two edges": (
        "t = tile.load(x[tile_m:tile_m+8, 1:65]) + tile.load(x[tile_m:tile_m+8, 0:64])\n"
        "o[tile_m:tile_m+8] = tile.row_max(tile.dot(t, tile.ones((64, 16))))", 2, "a matmul"),
    "inside of nobody knows what": (
        "t = tile.load(x[tile_m:tile_m+8, 1:65]) + tile.load(x[tile_m:tile_m+8, 0:64])\n"
        "t = tile.where(tile.inside(t), t, 0.0)\no[tile_m:tile_m+8] = tile.row_max(t)", 2,
        "inside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_carry_an_edge_is_an_error(name, rng):
    text, line, said = REFUSED[name]
    k = kernel(text)
    with pytest.raises(ts.TesseraError) as info:
        k(rng.standard_normal((13, 50)).astype(np.float32), np.zeros(13, np.float32), 1, 0)
    error = info.value
    assert error.code == "E_EDGE" and said in str(error), str(error)
    assert error.where.text.strip() == text.splitlines()[line - 1].strip(), str(error)
    assert "fill=" in error.hint and "ts.tile.where(ts.tile.inside" in error.hint


def test_a_running_total_of_zeros_needs_no_mask(rng):
    """What a loop adds up block by block is 0 beyond the edge: loaded, squared, or filled."""
    x = rng.standard_normal((13, 50)).astype(np.float32)
    for load, f in (("tile.load(x[tile_m:tile_m+8, k:k+16])", lambda v: v),
                    ("tile.load(x[tile_m:tile_m+8, k:k+16]) * 0.5", lambda v: v * 0.5),
                    ("tile.exp(tile.load(x[tile_m:tile_m+8, k:k+16], fill=-math.inf))", np.exp)):
        k = kernel("t = tile.zeros((8, 16))", "for k in tile.range(0, x.shape[1], 16):",
                   f"    t += {load}", "o[tile_m:tile_m+8] = tile.row_sum(t)")
        np.testing.assert_allclose(call(k, x), f(x.astype(np.float64)).sum(1), rtol=1e-5, atol=1e-5)


def test_neighbours_of_two_edges_may_be_stored(rng):
    """No reduction: what is beyond reads as 0."""
    k = build('@ts.kernel\ndef k(x: Tensor["N", f32], y: Tensor["N", f32]):\n'
              "    y[tile_n:tile_n+16] = tile.load(x[tile_n-1:tile_n+15]) + "
              "tile.load(x[tile_n+1:tile_n+17])\n")["k"]
    x, y = rng.standard_normal(21).astype(np.float32), np.empty(21, np.float32)
    k(x, y)
    padded = np.pad(x, 1)
    np.testing.assert_array_equal(y, padded[:-2] + padded[2:])
    emulator.compare(k, x, y)


def test_atomics_are_reductions(rng):
    """Groups add to one row; what lies beyond the edge adds nothing."""
    k = build('@ts.kernel\ndef k(x: Tensor["M", "N", f32], o: Tensor[64, f32], p: Tensor["M", f32])'
              ":\n    t = tile.exp(tile.load(x[tile_m:tile_m+8, 0:64]))\n"
              "    tile.atomic_add(o[0:64], tile.col_sum(t))\n"
              "    s = tile.alloc_shared((8, 64), f32)\n    s[:, :] = 0.0\n    tile.barrier()\n"
              "    tile.atomic_add(s[:, :], t)\n    tile.barrier()\n"
              "    p[tile_m:tile_m+8] = tile.row_min(tile.load(s))\n")["k"]
    x = rng.standard_normal((13, 50)).astype(np.float32)
    o, p = np.zeros(64, np.float32), np.zeros(13, np.float32)
    k(x, o, p)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(o, np.pad(e.sum(0), (0, 14)), rtol=1e-5)
    np.testing.assert_allclose(p, e.min(1), rtol=1e-5)
    emulator.compare(k, x, np.zeros(64, np.float32), np.zeros(13, np.float32), rtol=1e-4)


def test_an_assert_is_a_reduction(rng):
    k = kernel("t = tile.load(x[tile_m:tile_m+8, -3:61])", 'assert t > 0.0, "positive"', STORE)
    x = rng.uniform(0.1, 1.0, (13, 50)).astype(np.float32)
    o = np.zeros(13, np.float32)
    k(x, o, 0, 0)
    np.testing.assert_allclose(o, np.exp(x.astype(np.float64)).sum(1), rtol=1e-5)
    x[9, 49] = -1.0
    with pytest.raises(ts.TesseraError, match="positive"):
        k(x, o, 0, 0)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1", "bf16", "f64",
                                   "int8", "uint8", "int32"])
def test_edges_of_other_types(dtype, rng):
    """Neutral elements in each type, at both edges, through a branch and a sort."""
    k = build(f'@ts.kernel\ndef k(x: Tensor["M", "N", ts.{dtype}], o: Tensor["M", f32], '
              f'z: Tensor["M", 16, ts.{dtype}], c: ts.int32):\n'
              "    t = tile.load(x[tile_m:tile_m+4, c:c+16])\n    if c > -100:\n"
              "        t = tile.maximum(t, t)\n"
              "    o[tile_m:tile_m+4] = tile.cast(tile.row_max(t), f32)\n"
              "    z[tile_m:tile_m+4, 0:16] = tile.sort(tile.load(x[tile_m:tile_m+4, 0:16]))\n"
              )["k"]
    low, high = (1, 7) if dtype == "uint8" else (-6, 0)
    x = ts.tensor(rng.integers(low, high, (6, 10)).astype(np.float32), dtype)
    o, z = np.zeros(6, np.float32), ts.zeros((6, 16), dtype)
    k(x, o, z, -3)
    wide = np.asarray(ts.cast(x, ts.f32).numpy())
    np.testing.assert_array_equal(o, wide.max(1))
    np.testing.assert_array_equal(np.asarray(ts.cast(z, ts.f32).numpy())[:, :10], np.sort(wide, 1))
    emulator.compare(k, x, np.zeros(6, np.float32), ts.zeros((6, 16), dtype), -3)


def test_every_op_that_makes_a_tile_of_tiles_says_how_edges_go_through_it():
    silent = {r.name for r in OPS.values() if r.public and r.rule is not None and r.edges is None}
    places = {"cp_async", "cp_commit_group", "cp_wait_group", "barrier", "load_vector",
              "store_vector", "load_pair", "store_pair", "launch_dependents",
              "grid_dependency_wait", "cluster_shared", "cluster_barrier", "prefetch_box",
              "own_row", "own_iterations", "discard_box", "store_span"}
    numbers = {r.name for r in OPS.values() if r.family in ("ids", "warp")}
    # a gather and windows say it where they are called, from the tensor that they read
    assert silent - places - numbers == {"full", "arange", "ramp", "gather", "windows",
                                         "print", "device_assert"}


def test_random_kernels(request):
    """Chains of loads at both edges, masks, control flow, reshapes, sorts, shared memory, matmuls
    and reductions."""
    seed = int(request.config.option.seed)
    ran = refused = 0
    for program in accepted(seed):
        refused += program is None
        if program is None:
            continue
        args = program.call()
        with config.scope(debug=True, device="cpu"):
            program.kernel()(*args)
        program.check(*args[4:8])
        emulator.compare(program.kernel(), *program.call(), rtol=1e-3, atol=1e-3)
        ran += 1
        if ran == COUNT:
            break
    print(f"{ran} kernels ran, {refused} were refused")
    assert refused < ran  # the generator mostly draws what can be carried


# --- the parts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("a, b, groups", [
    ((8, 64), (8, 4, 16), [([0], [0]), ([1], [1, 2])]),
    ((8, 64), (512,), [([0, 1], [0])]),
    ((8, 1, 64), (8, 64), [([0], [0]), ([1, 2], [1])]),
    ((8, 64), (8, 64, 1), [([0], [0]), ([1], [1]), ([], [2])]),
    ((6, 4), (8, 3), [([0, 1], [0, 1])]),
])
def test_runs_of_axes_with_the_same_elements(a, b, groups):
    assert grouped(a, b) == groups


@pytest.mark.parametrize("name, values, zero", [
    ("add", (0.0, 0.0), True), ("add", (0.0, None), False), ("add", (0.0, 1.5), False),
    ("mul", (0.0, 0.5), True), ("mul", (0.0, None), False), ("exp", (0.0,), False),
    ("tanh", (0.0,), True), ("where", (None, 0.0, 0.0), True), ("where", (None, 0.0, 1.0), False),
])
def test_whether_an_op_of_zeros_is_zero(name, values, zero):
    kinds = (ts.bool_, ts.f32, ts.f32) if name == "where" else (ts.f32,) * len(values)
    assert gives_zero(name, values, tuple(kinds), ()) is zero


def test_a_lost_edge_is_found(monkeypatch, rng):
    """The check of the IR sees a rule that forgets, and an op that was given no mask."""
    x, o = rng.standard_normal((13, 50)).astype(np.float32), np.zeros(13, np.float32)

    def tampered(value: str) -> None:
        def check(known, nodes):
            for v in [v for v in known.of_value if v.name.startswith(value)]:
                known.of_value[v] = TileEdges()
            check_edges(known, nodes)

        monkeypatch.setattr("tessera.tile.frontend.trace_kernel.check_edges", check)
        kernel(LOAD, "if f > 0:", "    t = tile.tanh(t)", "w = tile.exp(t)",
               "o[tile_m:tile_m+8] = tile.row_sum(w)")(x, o, 1, 0)

    with pytest.raises(TileIRError, match="lost the edge of axis"):
        tampered("w")
    monkeypatch.setattr("tessera.tile.frontend.trace_kernel.check_edges", check_edges)
    monkeypatch.setattr("tessera.tile.builder.ir_builder.within",
                        lambda b, record, args, attrs: args)
    with pytest.raises(TileIRError, match="reduce_sum sees elements beyond an edge along axis 1"):
        kernel(LOAD, STORE)(x, o, 1, 0)


def test_rows_gathered_by_positions_beyond_the_edge_stay_out_of_matmuls(rng):
    """Positions beyond the edge are read as 0, so that the row gathered there is the first."""
    k = build("""@ts.kernel
def k(x: Tensor["M", "N", f32], w: Tensor[4, 8, f32], at: Tensor["M", ts.int32],
      z: Tensor["G", 16, 8, f32]):
    t = tile.gather(x[:, 0:16], tile.load(at[tile_m:tile_m + 4]))
    z[tile_m // 4, :, :] = tile.dot(t.T, tile.load(w[0:4, 0:8]), precision="f32")
""")["k"]
    x, w = rng.standard_normal((7, 16)), rng.standard_normal((4, 8))
    at, z = rng.integers(0, 7, 7).astype(np.int32), np.full((2, 16, 8), np.nan, np.float32)
    x, w = x.astype(np.float32), w.astype(np.float32)
    k(x, w, at, z)
    for g in range(2):
        rows = x[at[4 * g:4 * g + 4]].astype(np.float64)
        np.testing.assert_allclose(z[g], rows.T @ w[:len(rows)], rtol=1e-5, atol=1e-5)
