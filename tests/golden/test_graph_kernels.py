"""Kernels of graph functions, compiled: what a row or an element of a large loop costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from ptx_harness import require_compiler
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import kernel_of
from tessera.runtime.target import parse_target

TARGET = parse_target("sm_90a")


def _kernel(kind: str, fn: Callable, *xs: Any) -> Any:
    """The first kernel of a kind that a function's graph becomes."""
    require_compiler()
    program = CudaProgram(ts.jit(fn).graph(*xs), TARGET)
    kernel, _ = kernel_of(next(g for g in program.plan.groups if g.kind == kind))
    kernel.inspect_ir("tile")
    return kernel


def _instructions(sass: str) -> Counter[str]:
    found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", sass, re.M)
    assert found
    return Counter(found)


def _zeros(*shape: int, dtype: Any = "f32") -> ts.Tensor:
    return ts.cast(ts.tensor(np.zeros(shape, np.float32)), dtype)


def _norm_backward(x: Any, w: Any, b: Any, dy: Any, dx: Any) -> Any:
    gx, gw, gb = ts.vjp(lambda x, w, b: ts.layernorm(x, w, b), x, w, b)[1](ts.cast(dy, "f32"))
    return gx + dx, gw, gb


def test_four_groups_of_a_norm_and_its_sums_run_at_once() -> None:
    """Each waits for the statistics of its own rows alone."""
    x, w = _zeros(2048, 768), _zeros(768)
    kernel = _kernel("strips", _norm_backward, x, w, w, _zeros(2048, 768, dtype="bf16"), x)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 128  # and 128 threads
    assert not _instructions(sass)["STL"] and not _instructions(sass)["LDL"]
    # One for each statistic, as the next one's stands before its memory is written again; the rest
    # are those of the sums at the end. Put side by side, two would do, and be no quicker.
    assert _instructions(sass)["BAR"] == 4 + 2


def test_a_product_of_few_columns_keeps_registers_for_its_widest_instruction() -> None:
    """Alone on a multiprocessor it is assembled for two, and ptxas refuses: 128 registers a thread
    are too few for a wgmma of 256 columns. What was there first is kept."""
    kernel = _kernel("gemm", lambda q, k: ts.cast(q @ k.mT, "f32") * 0.125,
                     *[ts.Tensor[2, 1024, 64, ts.bf16]] * 2)
    ptx = kernel.inspect_ir("ptx", target="sm_90a")
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert ".minnctapersm 1" in ptx


@pytest.mark.parametrize("kind, columns, fn", [
    ("bf16", 16384, ts.sort), ("f32", 16384, ts.sort)])
def test_two_groups_that_sort_long_rows_share_a_multiprocessor(kind: str, columns: int,
                                                               fn: Callable) -> None:
    kernel = _kernel("order", fn, ts.Tensor[64, columns, getattr(ts, kind)])
    sass = kernel.inspect_ir("sass", target="sm_90a")
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 64  # and 512 threads
    assert not _instructions(sass)["STL"] and not _instructions(sass)["LDL"]


def test_rows_ask_for_all_they_read_before_their_first_statistic() -> None:
    """The assembler would load the cotangent behind it, where the row's registers are free."""
    def gradient(x: Any, dy: Any) -> Any:
        return ts.cast(ts.vjp(ts.softmax, x)[1](dy), "bf16")

    x = _zeros(256, 1024)
    sass = _kernel("rows", gradient, x, x).inspect_ir("sass", target="sm_90a")
    order = re.findall(r"\b(LDG|SHFL)\b", sass)
    assert order[:9] == ["LDG"] * 8 + ["SHFL"] and order.count("LDG") == 8


def test_rows_of_two_narrow_operands_come_to_shared_memory() -> None:
    """Of one, or of 32 bits, they come to registers."""
    def gradient(x: Any, dy: Any) -> Any:
        return ts.cast(ts.vjp(ts.softmax, x)[1](dy), "bf16")

    x = _zeros(256, 1024, dtype="bf16")
    counts = _instructions(_kernel("rows", gradient, x, x).inspect_ir("sass", target="sm_90a"))
    assert (counts["LDGSTS"], counts["LDG"], counts["STL"]) == (4, 0, 0)
    wide = _instructions(_kernel("rows", gradient, x, _zeros(256, 1024)).inspect_ir(
        "sass", target="sm_90a"))
    one = _instructions(_kernel("rows", ts.softmax, x).inspect_ir("sass", target="sm_90a"))
    assert not wide["LDGSTS"] and not one["LDGSTS"]


@pytest.mark.parametrize("fn, passing", [
    (ts.layernorm, 0), (lambda x, w, b: ts.sum(x * w + b, axis=-1), 1)])
def test_rows_pass_the_nearest_cache_where_none_are_stored(fn: Callable, passing: int) -> None:
    """And what all groups read stays there."""
    w = _zeros(1024, dtype="bf16")
    kernel = _kernel("rows", fn, _zeros(64, 1024, dtype="bf16"), w, w)
    found = Counter(re.findall(r"\bLDG\.E(\.NA)?\.128\b",
                               kernel.inspect_ir("sass", target="sm_90a")))
    assert found[""] == (3 - passing) * (found.total() // 3) and found.total() >= 3


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_row_is_divided_by_its_sum_without_a_branch(dtype: str) -> None:
    kernel = _kernel("rows", ts.softmax, _zeros(64, 1024, dtype=dtype))
    counts = _instructions(kernel.inspect_ir("sass", target="sm_90a"))
    assert 16 < counts["MUFU"] < 24 and not counts["FCHK"]  # a power for each of 16 elements


@pytest.mark.parametrize("dtype", ["uint8", "bf16", "f32"])
def test_both_sides_of_a_transposition_move_in_accesses_of_16_bytes(dtype: str) -> None:
    """Bytes and halves share words between them."""
    kernel = _kernel("move", ts.transpose, _zeros(1024, 512, dtype=dtype))
    sass = kernel.inspect_ir("sass", target="sm_90a")
    found = re.findall(r"\b(LDG|STS|LDS|STG)\b[\w.]*?\.(\w+) ", sass)
    assert Counter(found) == dict.fromkeys(
        ((op, "128") for op in ("LDG", "STS", "LDS", "STG")), 4)
    counts = _instructions(sass)
    assert counts["BAR"] == 1 and not counts["LDL"] and not counts["STL"]


def test_a_sigmoid_does_not_branch() -> None:
    kernel = _kernel("loop", ts.sigmoid, _zeros(4096))
    counts = _instructions(kernel.inspect_ir("sass", target="sm_90a"))
    assert counts["MUFU"] == 8 and not counts["CALL"] and not counts["BSSY"]


def test_a_row_of_a_loss_is_copied_to_shared_memory_and_two_of_them_fit() -> None:
    def loss(x: Any, labels: Any) -> Any:
        loss, back = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), labels), x)
        return loss, back(ts.ones(()))

    labels = ts.tensor(np.zeros(4, np.int32))
    kernel = _kernel("rows", loss, _zeros(4, 50304, dtype="bf16"), labels)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    counts = _instructions(sass)
    assert counts["LDGSTS"] >= 2 and counts["LDG"] == 2  # the row; its label, and its element
    assert not counts["STL"] and not counts["LDL"] and not counts["CALL"]
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 128  # twice 256 threads


E4M3 = 'fp8_e4m3 @scaled("amax")'


def test_a_scaled_cast_rounds_once_and_divides_by_nothing() -> None:
    """A product with the reciprocal and half an instruction of rounding for each element."""
    require_compiler()
    program = CudaProgram(ts.jit(lambda x: ts.cast(x, E4M3)).graph(_zeros(1024, 3072)), TARGET)
    kernel, _ = kernel_of(next(g for g in program.plan.groups
                               if g.writes[0].type.dtype.name == "fp8_e4m3"))
    kernel.inspect_ir("tile")
    counts = _instructions(kernel.inspect_ir("sass", target="sm_90a"))
    elements = counts["FMUL"]
    assert elements >= 16 and counts["F2FP"] == elements / 2
    assert not counts["CALL"] and not counts["MUFU"]
    assert sum(counts.values()) - counts["NOP"] < 8 * elements


def test_products_of_fp8_and_their_derivatives_are_qgmma() -> None:
    def step(x: Any, w: Any, g: Any) -> Any:
        return ts.vjp(lambda x, w: ts.cast(ts.cast(x, E4M3) @ ts.cast(w, E4M3), "bf16"), x,
                      w)[1](g)

    require_compiler()
    xs = _zeros(512, 1024, dtype="bf16"), _zeros(1024, 2048), _zeros(512, 2048, dtype="bf16")
    program = CudaProgram(ts.jit(step).graph(*xs), TARGET)
    found = []
    for group in program.plan.groups:
        if group.kind == "move":  # along the contracted axis: bytes, of which no number is made
            kernel, _ = kernel_of(group)
            kernel.inspect_ir("tile")
            assert not _instructions(kernel.inspect_ir("sass", target="sm_90a"))["F2FP"]
        if group.kind == "gemm":
            kernel, _ = kernel_of(group)
            kernel.inspect_ir("tile")
            sass = kernel.inspect_ir("sass", target="sm_90a")
            counts = _instructions(sass)
            assert not counts["STL"] and not counts["LDL"]
            found += [set(re.findall(r"QGMMA\.\d+x\d+x32\.F32\.(\w+\.\w+)", sass))]
            assert not counts["HGMMA"] and not counts["QMMA"]
    assert found == [{"E5M2.E4M3"}, {"E4M3.E5M2"}]


def _activation_backward(w: Any, h: Any, g: Any) -> Any:
    """Codes of gelu's gradient, which both gradients of a matmul read."""
    scaling = ts.DelayedScaling(amax_history_len=1)
    return ts.vjp(lambda w, h: scaling.matmul(ts.gelu(h), w, scaling.init(1.0, 1.0, 1.0)),
                  w, h)[1](g)


def test_codes_in_both_orders_cost_few_registers() -> None:
    """Eight groups of four warps run at a time. What is kept in shared memory goes through it once
    more, four bytes in a word, and leaves by whole lines, all in accesses of 16 bytes."""
    args = _zeros(1024, 256), _zeros(2048, 1024, dtype="bf16"), _zeros(2048, 256)
    kernel = _kernel("strips", _activation_backward, *args)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 64
    assert not _instructions(sass)["STL"] and not _instructions(sass)["LDL"]
    found = Counter(re.findall(r"\b(STG|STS|LDS)\b[\w.]*?\.(\w+) ", sass))
    lines = 4 * 2  # 64 columns at a time, in words of four rows
    assert [found[op, "128"] for op in ("STG", "STS", "LDS")] == [lines, lines, 2 * lines]


@pytest.mark.parametrize("fn, weights, columns, groups", [
    (ts.softmax, 0, 65536, 2), (ts.layernorm, 2, 32768, 4)])
def test_three_groups_of_a_cluster_have_a_multiprocessor(fn: Callable, weights: int, columns: int,
                                                         groups: int) -> None:
    x, w = ts.Tensor[64, columns, "bf16"], ts.Tensor[columns, "bf16"]
    require_compiler()
    program = CudaProgram(ts.jit(lambda *xs: fn(*xs)).graph(x, *[w] * weights), TARGET)
    (group,) = program.plan.groups
    kernel, _ = kernel_of(group)
    kernel.inspect_ir("tile")
    assert (group.attr("cluster"), group.schedule.warps) == (groups, 8)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 65536 // (3 * 256) - 1
    counts = _instructions(sass)
    assert not counts["STL"] and counts["STAS"] == 2 and counts["UCGABAR_WAIT"] == 1


@pytest.mark.parametrize("norm, weights, columns, groups", [
    (ts.rmsnorm, 1, 8192, 1), (ts.layernorm, 2, 16384, 1), (ts.rmsnorm, 1, 65536, 4),
    (ts.layernorm, 2, 65536, 4), (ts.layernorm, 2, 131072, 8)])
def test_sums_of_long_rows_stay_in_registers(norm: Callable, weights: int, columns: int,
                                             groups: int) -> None:
    """Thirty-two in a lane for each. No block that is written waits for the one before it."""
    x, w = ts.Tensor[4096, columns, "bf16"], ts.Tensor[columns, "bf16"]

    def gradients(*xs: Any) -> Any:
        dx, *dws = ts.vjp(norm, *xs[:-1])[1](xs[-1])
        return ts.cast(dx, "bf16"), *dws

    kernel = _kernel("strips", gradients, x, *[w] * weights, x)
    sass = kernel.inspect_ir("sass", target="sm_90a")
    assert max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) < 128  # of 512 threads
    counts = _instructions(sass)
    assert not counts["STL"] and counts["BAR"] == 2 + (groups > 1)  # for a row, and its statistics
