"""The seed documents' kernels, called on a GPU: against the interpreter and against NumPy in f64.

Arrays of torch and CuPy lie there; NumPy's are sent by device="cuda".

The CUDA target adds no barriers to shared memory: in the language the user's barriers order it,
and the interpreter names the lines where one is missing. The attention kernel as printed copies
the next block of V while slower warps may still multiply by the last one, so here it runs as
printed where there is one block, and for longer sequences with the barrier that it lacks.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from attention_cases import attended64
from conformance.test_kernel_rows import stored_copy
from gpu_harness import require_gpu
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.runtime.device import device
from tolerance import assert_close

require_gpu()

LAST = "            m_i = m_i_new\n"
BARRIER = "            ts.tile.barrier()\n"
LIBRARIES = ["torch", "cupy", "numpy"]
DROPPED = 0.25


def ordered(kernel: Any) -> Any:
    """The attention kernel with a barrier behind its second matmul."""
    text = inspect.getsource(kernel.fn)
    assert text.count(LAST) == 1
    return build(text.replace(LAST, LAST + BARRIER))[kernel.__name__]


# --- arrays ---------------------------------------------------------------------------------------
def put(library: str, x: Any) -> Any:
    """A copy in a library; numbers as they are."""
    if not isinstance(x, np.ndarray):
        return x
    if library == "numpy":
        return x.copy()
    module = pytest.importorskip(library)
    if library == "cupy":
        if x.dtype == ml_dtypes.bfloat16:
            pytest.skip("CuPy has no bf16")
        return module.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return module.from_numpy(x.view(np.int16).copy()).view(module.bfloat16).cuda()
    return module.from_numpy(x.copy()).cuda()


def get(x: Any) -> Any:
    """An array of any of them, in f64."""
    if type(x).__module__.startswith("torch"):
        x = x.double().cpu()
    elif type(x).__module__.startswith("cupy"):
        x = x.get()
    return np.asarray(x).astype(np.float64)


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(ml_dtypes.bfloat16)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def on_gpu(kernel: Any, library: str, args: tuple, **options: Any) -> tuple[Any, list]:
    """(result, arguments) after a call there, in f64. Twice: the second takes the short way."""
    for _ in range(2):
        placed = [put(library, x) for x in args]
        with config.scope(device="cuda" if library == "numpy" else "auto"):
            result = kernel(*placed, **options)
        device().synchronize()
    found = [get(x) if isinstance(a, np.ndarray) else a for x, a in zip(placed, args, strict=True)]
    return (result if result is None else get(result)), found


# --- kernels without loops over blocks ------------------------------------------------------------
@dataclass(frozen=True)
class Seed:
    """sizes: of the calls.  args: of (rng, size).  wanted: {number of the argument, or None for
    the result: what it holds afterwards}, by NumPy in f64.  terms: of the longest sum."""

    kernel: Any
    sizes: tuple
    args: Callable[..., tuple]
    wanted: Callable[..., dict]
    terms: Callable[..., int] = lambda size: 1
    dtype: str = "f32"


def matmul_(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def every_fourth(src: np.ndarray, dst: np.ndarray) -> dict:
    want = np.zeros(src.shape)
    want[::4] = src[::4]
    return {1: want}


VECTORS = (1, 127, 128, 1000, 10**5 + 3)
PRODUCTS = ((64, 64, 32), (130, 100, 70), (65, 1, 33), (1, 1, 1), (256, 192, 512))
SEEDS = {
    "saxpy": Seed(seeds.saxpy, VECTORS, lambda rng, n: (floats(rng, n), floats(rng, n), 2),
                  lambda x, y, a: {1: 2.0 * x.astype(np.float64) + y}, lambda n: 2),
    "tile_example": Seed(seeds.tile_example, VECTORS, lambda rng, n: (floats(rng, n),),
                         lambda x: {0: 2.0 * x.astype(np.float64)}),
    "process_chunks": Seed(
        seeds.process_chunks, VECTORS, lambda rng, n: (floats(rng, n), np.full(n, np.nan, "f4")),
        lambda x, y: {0: x, 1: x.astype(np.float64) ** 2 + 1}),
    "cooperative_reduction": Seed(
        seeds.cooperative_reduction, VECTORS, lambda rng, n: (1 + floats(rng, n),),
        lambda x: {None: x.astype(np.float64).sum()}, lambda n: n),
    "memory_hierarchy_example": Seed(
        seeds.memory_hierarchy_example, ((64, 64), (130, 70), (1, 1)),
        lambda rng, s: (floats(rng, *s),), lambda a: {0: a}),
    "optimized_memory_access": Seed(
        seeds.optimized_memory_access, (128, 384),
        lambda rng, m: (halves(rng, m, 128), np.zeros((m, 128), ml_dtypes.bfloat16)),
        every_fourth, dtype="bf16"),
    "gemm": Seed(
        seeds.gemm, PRODUCTS,
        lambda rng, s: (halves(rng, s[0], s[2]), halves(rng, s[2], s[1]), floats(rng, *s[:2])),
        lambda a, b, c: {2: c + matmul_(a, b)}, lambda s: s[2]),
    "corrected_gemm": Seed(
        seeds.corrected_gemm, PRODUCTS,
        lambda rng, s: (halves(rng, s[0], s[2]), halves(rng, s[2], s[1]),
                        np.zeros(s[:2], np.float32)),
        lambda a, b, c: {2: matmul_(a, b)}, lambda s: s[2]),
    # As printed: for two blocks of K its loop turns once, and the last block is never computed.
    "double_buffered_gemm": Seed(
        seeds.double_buffered_gemm, (64,),
        lambda rng, k: (halves(rng, 64, k), halves(rng, k, 64), np.zeros((64, 64), np.float32)),
        lambda a, b, c: {2: matmul_(a[:, :32], b[:32])}, lambda k: k),
}
CALLS = [pytest.param(name, size, id=f"{name}-{size}") for name, s in SEEDS.items()
         for size in s.sizes]


@pytest.mark.row("EX-10", "EX-11", "EX-12", "EX-13", "EX-14", "EX-15", "EX-30", "EX-31", "KERN-01",
                 "KERN-08", "KERN-09", "KERN-11", "KERN-12", "KERN-13", "KERN-14")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name, size", CALLS)
def test_a_seed(name, size, library, rng):
    seed = SEEDS[name]
    args = seed.args(rng, size)
    wanted, kept = seed.wanted(*args), copy.deepcopy(args)
    with config.scope(device="cpu", debug=False):
        result = seed.kernel(*kept)
    got, found = on_gpu(seed.kernel, library, args)
    n, scale = seed.terms(size), math.sqrt(seed.terms(size))
    for at, want in wanted.items():
        here, there = (got, result) if at is None else (found[at], kept[at])
        assert_close(here, want, dtype=seed.dtype, n=n, scale=scale)
        assert_close(here, get(there), dtype=seed.dtype, n=n, scale=scale)
    for at, want in enumerate(args):
        if at not in wanted and isinstance(want, np.ndarray):
            np.testing.assert_array_equal(found[at], get(want))


@pytest.mark.row("EX-11", "TILE-06", "KERN-11")
@pytest.mark.parametrize("groups", [1, 3, 50])
def test_chunks_over_any_number_of_groups(groups, rng):
    x, y = floats(rng, 1000), np.full(1000, np.nan, np.float32)
    _, (_, got) = on_gpu(seeds.process_chunks[groups], "torch", (x, y))
    assert_close(got, x.astype(np.float64) ** 2 + 1, dtype="f32")


@pytest.mark.row("EX-13", "TILE-22")
def test_the_copy_of_the_memory_hierarchy(rng):
    kernel = stored_copy()
    a = floats(rng, 130, 70)
    _, (_, out) = on_gpu(kernel, "torch", (a, np.full_like(a, np.nan)))
    np.testing.assert_array_equal(out, a)


# --- attention ------------------------------------------------------------------------------------
SMALL = ts.Schedule(m=64, n=64, warps=4, stages=2)


@pytest.mark.row("EX-33")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [64, 33, 1])
@pytest.mark.parametrize("kernel", [seeds.flash_attention, seeds.flash_printed],
                         ids=lambda k: k.__name__)
def test_one_block_of_flash_attention_as_printed(kernel, length, causal, rng):
    """The second of its corrections is 1 where there is no other block."""
    args = tuple(halves(rng, 3, length, 64) for _ in range(3))
    got, _ = on_gpu(kernel.with_schedule(SMALL), "torch", (*args, causal))
    assert np.abs(got - attended64(*args, causal)[0]).max() < 0.02


@pytest.mark.row("EX-33", "TILE-10", "TILE-11", "TILE-23", "KERN-10")
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [64, 100, 33, 513])
def test_flash_attention(length, causal, library, rng):
    kernel = ordered(seeds.flash_attention).with_schedule(SMALL)
    args = tuple(halves(rng, 3, length, 64) for _ in range(3))
    got, _ = on_gpu(kernel, library, (*args, causal))
    with config.scope(device="cpu"):
        assert np.abs(got - get(kernel(*args, causal))).max() < 0.01
    assert np.abs(got - attended64(*args, causal)[0]).max() < 0.02


@pytest.mark.row("EX-33")
def test_flash_attention_corrected_twice_is_wrong(rng):
    args = tuple(halves(rng, 4, 256, 64) for _ in range(3))
    kernel = ordered(seeds.flash_printed).with_schedule(SMALL)
    got, _ = on_gpu(kernel, "torch", args)
    assert np.abs(got - attended64(*args, True)[0]).max() > 0.1


@pytest.mark.row("EX-33", "KERN-15", "DBG-16", "SCHED-16")
def test_every_candidate_of_flash_attention(rng, tmp_path):
    args = tuple(halves(rng, 4, 300, 128) for _ in range(3))
    kernel = ordered(seeds.flash_attention)
    with config.scope(cache_dir=tmp_path):
        got, _ = on_gpu(kernel, "torch", args)
    assert np.abs(got - attended64(*args, True)[0]).max() < 0.02
    trace = kernel.tuning_trace
    print(trace.text())
    assert len(trace) == 16 and trace.count("chosen") == 1
    assert all(t.measured_ms is not None or t.reason for t in trace)
    assert not [t for t in trace if t.error == "E_WRONG_RESULT"]
    assert kernel.best_config["m"] in (64, 128) and kernel.best_config["n"] in (64, 128)


@pytest.mark.row("TILE-13", "TILE-46", "TILE-47", "TILE-48", "TILE-54", "TILE-57", "TILE-58",
                 "SCHED-15")
@pytest.mark.parametrize("blocks", [(32, 32), (64, 48)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(64, 64), (33, 70), (1, 100)])
def test_the_goals_attention(queries, keys, causal, blocks, rng):
    m, n = blocks
    kernel = seeds.tuned_attention.with_schedule(ts.Schedule(m=m, n=n, BD=64, warps=4, stages=2))
    args = (halves(rng, 2, queries, 64), halves(rng, 2, keys, 64), halves(rng, 2, keys, 64))
    got, _ = on_gpu(kernel, "torch", args, dropout=0.0, causal=causal)
    assert np.abs(got - attended64(*args, causal)[0]).max() < 0.02
    ts.random.seed(7)
    dropped, _ = on_gpu(kernel, "torch", args, dropout=DROPPED, causal=causal)
    ts.random.seed(7)
    with config.scope(device="cpu"):
        for _ in range(2):  # as there: each launch draws anew
            want = get(kernel(*args, dropout=DROPPED, causal=causal))
    assert np.abs(dropped - want).max() < 0.02  # the same elements are dropped
    assert queries == 1 or np.abs(dropped - got).max() > 0.05


# --- launches -------------------------------------------------------------------------------------
def launched(call: Callable[[Any], None]) -> list[tuple[tuple, tuple]]:
    """(grid, block) of each kernel that call(stream) launches, from a graph that captures it."""
    from cuda.bindings import driver as d

    def done(result: tuple) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) == 2 else result[1:]

    stream = done(d.cuStreamCreateWithPriority(1, 0))
    d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    call(int(stream))
    graph = done(d.cuStreamEndCapture(stream))
    _, count = done(d.cuGraphGetNodes(graph, 0))
    nodes, _ = done(d.cuGraphGetNodes(graph, count))
    found = []
    for node in nodes:
        if done(d.cuGraphNodeGetType(node)) == d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            p = done(d.cuGraphKernelNodeGetParams(node))
            found.append(((p.gridDimX, p.gridDimY, p.gridDimZ),
                          (p.blockDimX, p.blockDimY, p.blockDimZ)))
    d.cuGraphDestroy(graph), d.cuStreamDestroy(stream)
    return found


@pytest.mark.row("TILE-73", "KERN-11", "SCHED-03")
@pytest.mark.parametrize("groups, lanes", [(None, None), (7, None), (3, 64), (2, 100)])
def test_a_group_is_a_block(groups, lanes, rng):
    torch = pytest.importorskip("torch")
    x = torch.zeros(1000, device="cuda")
    seeds.tile_example.launch(x, groups=groups, lanes=lanes)
    device().synchronize()
    ((grid, block),) = launched(lambda stream: seeds.tile_example.launch(
        x, groups=groups, lanes=lanes, stream=stream))
    assert grid == (groups or 8, 1, 1) and block == (lanes or 128, 1, 1)


@pytest.mark.row("TILE-74", "SCHED-03")
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_a_tile_is_the_warps_of_a_block(warps, rng):
    kernel = build("""@kernel
def k(x: Tensor["M", "N", f32], y: Tensor["M", f32]):
    y[tile_m:tile_m+16] = tile.row_sum(tile.load(x[tile_m:tile_m+16, 0:64]))
""")["k"].with_schedule(ts.Schedule(warps=warps))
    torch = pytest.importorskip("torch")
    x, y = torch.ones(100, 50, device="cuda"), torch.zeros(100, device="cuda")
    kernel(x, y)
    device().synchronize()
    ((grid, block),) = launched(lambda stream: kernel.launch(x, y, stream=stream))
    assert grid == (7, 1, 1) and block == (32 * warps, 1, 1)
    assert (y == 50).all()


@pytest.mark.row("TILE-80")
def test_memory_keeps_its_values_between_launches(rng):
    torch = pytest.importorskip("torch")
    x = torch.arange(1000.0, device="cuda")
    for _ in range(3):
        seeds.tile_example(x)
    torch.cuda.synchronize()
    assert (x == 8 * torch.arange(1000.0, device="cuda")).all()


# --- contracts ------------------------------------------------------------------------------------
@pytest.mark.row("DBG-06", "EX-27")
def test_a_contract_on_a_whole_array_function(rng):
    score = build("""from math import sqrt
d = 64
@ts.verify.numerics(stable=True, bounded=[-100, 100])
@kernel.auto
def attention_score(q: ts.Tile, k: ts.Tile) -> ts.Tile:
    scores = tile.dot(q, k.T) / sqrt(d)
    # Verification ensures no overflow/underflow
    return scores
""")["attention_score"]
    q, k = floats(rng, 70, 64), floats(rng, 33, 64)
    with config.scope(device="cuda"):
        assert np.abs(score(q, k) - matmul_(q, k.T) / 8).max() < 0.02
        with pytest.raises(ts.NumericsError, match="100"):
            score(np.full((8, 64), 1e3, np.float32), np.ones((8, 64), np.float32))
