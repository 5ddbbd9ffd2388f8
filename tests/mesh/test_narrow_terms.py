"""Terms of sums of bf16 matmuls over ranks: rounded by each rank, added in f32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_cut_products import PRODUCTS
from mesh.test_cut_products import worth_it as worth_it
from mesh.test_gpu_programs import SPLIT, on_ranks, placed
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_windows import small as small
from tessera.mesh.sharding import sharded_graph

N, M, K = 4, 24, 16  # rows are split over N ranks, and K columns come of M of them
BF16 = ml_dtypes.bfloat16


def operands(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, of which f32 holds all sums: there is one right result, in any order."""
    x, y = (rng.integers(-30, 31, (N * M, K)).astype(np.float32) for _ in range(2))
    return x, y


def product(x: Any, y: Any) -> Any:
    """x' y of both, as gradients of weights are made; joined with what keeps it off the results."""
    return ts.cast(ts.transpose(x) @ y, "f32") * 2.0


def scattered(x: Any, y: Any) -> Any:
    return ts.shard(ts.transpose(x) @ y, ts.ShardSpec(("row",), ("x",))) * 2.0


def right(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Terms of ranks in bf16, their total rounded."""
    a, b = (t.astype(np.float64).reshape(N, M, K) for t in (x, y))
    terms = np.einsum("rmi,rmj->rij", a, b).astype(BF16).astype(np.float64)
    made = terms.sum(0).astype(BF16).astype(np.float32)
    whole = (x.astype(np.float64).T @ y).astype(BF16).astype(np.float32)
    assert (made != whole).any()  # else it shows nothing
    return made * 2.0


def run(f: Callable[..., Any], x: np.ndarray, y: np.ndarray, kind: str = "bf16"
        ) -> list[tuple[np.ndarray, str]]:
    def program(mesh: Any) -> tuple[np.ndarray, str]:
        g = ts.jit(f)
        given = [placed(mesh, t, "rows", kind) for t in (x, y)]
        for _ in range(3):
            made = g(*given)
        return ts.cast(made, "f32").numpy(), str(g.plan)

    return on_ranks(N, program)


@pytest.mark.parametrize("f", [product, scattered])
def test_terms_are_rounded_and_added_in_f32_on_hosts(rng, f):
    x, y = operands(rng)
    for made, plan in run(f, x, y):
        np.testing.assert_array_equal(made, right(x, y))
        assert plan.startswith("all_reduce" if f is product else "reduce_scatter")
        assert f": {K * K * 2 * (2 if f is product else 1) * 3 // 4} bytes, " in plan


@pytest.mark.parametrize("f", [product, scattered])
def test_windows_take_them_as_they_are(gpus, nccl, rng, small, f):
    x, y = operands(rng)
    for made, plan in run(f, x, y):
        np.testing.assert_array_equal(made, right(x, y))
        assert "through NCCL, in windows" in plan and "as f32" not in plan
    assert nccl.library.opened
    last = [nbytes for _, what, nbytes in nccl.calls][-N:]
    assert last == [K * K * 2 * (N if f is product else 1)] * N


@pytest.mark.parametrize("why", ["windows are off", "NCCL adds in bf16", "messages are short"])
@pytest.mark.parametrize("f", [product, scattered])
def test_without_windows_they_are_sent_wide(gpus, nccl, rng, small, f, why, monkeypatch):
    if why == "NCCL adds in bf16":
        monkeypatch.setattr(nccl, "in_f32", False)
    if why == "messages are short":
        monkeypatch.setattr(sharded_graph, "LEAST_WINDOW_BYTES", 1 << 20)
    x, y = operands(rng)
    with ts.config.scope(comm_windows=why != "windows are off"):
        found = run(f, x, y)
    for made, plan in found:
        np.testing.assert_array_equal(made, right(x, y))
        assert " as f32" in plan
        assert ("in windows" in plan) == (why == "NCCL adds in bf16")
    last = [nbytes for _, what, nbytes in nccl.calls][-N:]
    assert last == [K * K * 4 * (N if f is product else 1)] * N


def test_a_rank_without_windows_is_enough_for_wide_terms(gpus, nccl, rng, small):
    x, y = operands(rng)
    nccl.library.without = {2}
    for made, plan in run(product, x, y):
        np.testing.assert_array_equal(made, right(x, y))
        assert " as f32" in plan and "in windows" not in plan
    assert not nccl.library.opened


@pytest.mark.parametrize("shape", [(K, K), (K * K,)])
@pytest.mark.parametrize("spec", [None, SPLIT["rows"]])
def test_a_sum_that_is_a_result_is_copied_to_where_it_lies(gpus, nccl, rng, small, shape, spec):
    """Outside of the temporaries NCCL would add in bf16."""
    x, y = operands(rng)

    def result(x: Any, y: Any) -> Any:
        made = ts.shard(ts.transpose(x) @ y, spec)
        return made if spec else ts.reshape(made, shape)

    for made, plan in run(result, x, y):
        np.testing.assert_array_equal(made.reshape(K, K), right(x, y) / 2)
        assert "through NCCL, in windows" in plan and "as f32" not in plan


def joined(x: Any, y: Any) -> Any:
    made = ts.shard(ts.transpose(x) @ y, None)
    return ts.concatenate([made, -made])


def test_a_sum_that_is_a_part_of_a_result_is_sent_wide(gpus, nccl, rng, small):
    """It is made where the result lies."""
    x, y = operands(rng)
    for made, plan in run(joined, x, y):
        np.testing.assert_array_equal(made[:K], right(x, y) / 2)
        np.testing.assert_array_equal(made[K:], -right(x, y) / 2)
        assert " as f32" in plan


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_other_types_are_rounded_behind_their_sum(rng, kind):
    x, y = operands(rng)
    for _, plan in run(scattered, x, y, kind):
        assert f": {K * K * 4 * 3 // 4} bytes, " in plan


def test_sums_of_rows_are_rounded_behind_their_sum(rng):
    x, y = operands(rng)
    for _, plan in run(lambda x, y: ts.cast(ts.cast(ts.sum(ts.cast(
            x * y, "f32"), axis=0), "bf16"), "f32") * 2.0, x, y):
        assert f": {K * 4 * 2 * 3 // 4} bytes, " in plan


def test_narrow_terms_are_not_added_to_before_they_are_summed(rng):
    """x + term on one rank would be rounded once more there."""
    x, y = operands(rng)
    z = rng.standard_normal((K, K)).astype(BF16)
    for made, _ in run(lambda x, y: ts.shard(ts.transpose(x) @ y + ts.tensor(
            z.astype(np.float32), "bf16"), None), x, y):
        want = (right(x, y) / 2 + z.astype(np.float32)).astype(BF16).astype(np.float32)
        np.testing.assert_array_equal(made, want)


def test_the_host_between_gpus_takes_them_as_they_are(gpus, rng):
    x, y = operands(rng)
    for made, plan in run(product, x, y):
        np.testing.assert_array_equal(made, right(x, y))
        assert "through the host" in plan and "as f32" not in plan


def looped(x: Any, y: Any) -> Any:
    """The same sum in each iteration, times two in the last."""
    def body(carry: Any, _: Any) -> Any:
        return product(x, y) + carry * 0.0, None

    return ts.scan(body, ts.zeros((K, K)), None, length=3)[0]


def test_sums_in_loops_are_sent_wide(gpus, nccl, rng, small):
    """What loops hold lies in no windows."""
    x, y = operands(rng)
    for made, plan in run(looped, x, y):
        np.testing.assert_array_equal(made, right(x, y))
        assert " as f32, 3 times" in plan


def test_a_program_that_has_other_sums_too_opens_windows_for_these(gpus, nccl, rng, small):
    """Where its bf16 sums cannot go there, as parts of a result."""
    x, y = operands(rng)

    def both(x: Any, y: Any) -> Any:
        return joined(x, y), ts.sum(ts.cast(x, "f32") ** 2, axis=0) * 2.0

    def program(mesh: Any) -> tuple[np.ndarray, np.ndarray, str]:
        f = ts.jit(both)
        given = [placed(mesh, t, "rows", "bf16") for t in (x, y)]
        made, squares = f(*given)
        return ts.cast(made, "f32").numpy(), squares.numpy(), str(f.plan)

    for made, squares, plan in on_ranks(N, program):
        np.testing.assert_array_equal(made[:K], right(x, y) / 2)
        np.testing.assert_array_equal(squares, 2 * (x ** 2).sum(0))
        assert " as f32 through NCCL, in windows" in plan


@pytest.mark.parametrize("shares", [(1, 1, 2)])
@pytest.mark.parametrize("name", ["reduce", "scatter rows"])
def test_parts_of_matmuls_go_through_windows_too(gpus, nccl, rng, small, worth_it, name, shares):
    """By the communicator whose kernels have blocks for which matmuls leave room."""
    left, right, out, _, _ = PRODUCTS[name]
    x, w = (rng.integers(-30, 31, s).astype(np.float32) for s in ((64, 96), (96, 64)))

    def program(mesh: Any) -> tuple[np.ndarray, str]:
        f = ts.jit(lambda x, w: ts.shard(x @ w, SPLIT[out]))
        given = [placed(mesh, t, how, "bf16") for t, how in ((x, left), (w, right))]
        for _ in range(3):
            made = f(*given)
        return ts.cast(made, "f32").numpy(), str(f.plan)

    a, b = x.astype(np.float64).reshape(64, N, 24), w.astype(np.float64).reshape(N, 24, 64)
    terms = np.einsum("mrk,rkn->rmn", a, b).astype(BF16).astype(np.float64)
    want = terms.sum(0).astype(BF16).astype(np.float32)
    for made, plan in on_ranks(N, program):
        np.testing.assert_array_equal(made, want)
        assert "parts (1:1:2) beside its matmul through NCCL, in windows" in plan
        assert "as f32" not in plan
