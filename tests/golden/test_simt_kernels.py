"""Kernels of single lanes, compiled without a GPU: registers, spills, and how an access is made."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import kernels.seeds as seeds
import tessera as ts
from kernels.build import build
from kernels.corpus import algorithms, read
from ptx_harness import require_compiler
from tessera.errors import UnsupportedTargetError
from tessera.tile.cuda.compile import compile_function
from tessera.tile.cuda.ptx_text import opcode_counts
from tessera.tile.ir.errors import TileError
from tessera.tile.kernel.kernel import Kernel
from tile_gpu import facts_of, prepare

require_compiler()
TARGETS = ["sm_80", "sm_90a"]
TILES = ("gemm", "norm", "softmax", "attention", "rows", "transpose", "pipeline", "per group")
LANE_PROGRAMS = [p for p in read("correct") if not any(word in p.name for word in TILES)]
X = np.zeros(300, np.float32)


def compiled(kernel, *args, groups=None, lanes=None, target="sm_90a", checked=False):
    bound, function, _, lanes, _, schedule = prepare(kernel, copy.deepcopy(args), {}, groups, lanes)
    return compile_function(function, lanes, schedule=schedule, target=target,
                            facts=facts_of(function, bound), checked=checked)


def made(source: str, *args, **options):
    return compiled(build(source)["k"], *args, **options)


def opcodes(source: str, *args, **options) -> dict[str, int]:
    return opcode_counts(made(source, *args, **options).built.ptx)


def count(found: dict[str, int], start: str) -> int:
    return sum(n for name, n in found.items() if name.startswith(start))


# --- whole programs -----------------------------------------------------------------------------
@pytest.mark.parametrize("program", LANE_PROGRAMS, ids=lambda p: p.name)
def test_right_programs_compile_without_spills(program, capsys):
    names = program.run(0)
    kernels = [k for k in names.values() if isinstance(k, Kernel)]
    assert kernels
    for function in (f for k in kernels for f in k.specializations):
        for target, checked in (*((t, False) for t in TARGETS), ("sm_90a", True)):
            built = compile_function(function, function.lanes or 128, target=target,
                                     checked=checked).built
            assert not built.resources.spills and not built.warnings


@pytest.mark.parametrize("program", algorithms(), ids=lambda p: p.name)
def test_algorithms_compile_without_spills(program):
    kernels = [k for k in program.run(0).values() if isinstance(k, Kernel)]
    assert kernels
    for function in (f for k in kernels for f in k.specializations):
        built = compile_function(function, function.lanes or 128, target="sm_90a").built
        assert not built.resources.spills and not built.warnings


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name, args", [
    ("saxpy", (X, X, 2.0)), ("tile_example", (X,)), ("process_chunks", (X, X)),
    ("cooperative_reduction", (X,)), ("optimized_memory_access", "bf16")])
def test_seeds_compile_without_spills(name, args, target):
    if args == "bf16":
        args = (ts.zeros((256, 256), "bf16"), ts.zeros((256, 256), "bf16"))
    built = compiled(getattr(seeds, name), *args, target=target).built
    assert not built.resources.spills and built.resources.stack_bytes == 0


def test_divergent_loops_stay_in_registers():
    source = """
@kernel
def k(out: Tensor["n", i32]):
    i = tile.linear_id()
    total = 0
    for a in range(0, i % 11):
        for b in range(a, i % 7 + a):
            if (a + b) % 3 == 2:
                break
            total += a * b
        if total > 200:
            break
    if i < n:
        out[i] = total
"""
    for target in TARGETS:
        built = made(source, np.zeros(300, np.int32), target=target).built
        assert built.resources.registers <= 40 and built.resources.stack_bytes == 0


# --- accesses -----------------------------------------------------------------------------------
def test_a_uniform_store_is_guarded_and_a_divergent_one_is_not():
    source = """
@kernel
def k(x: Tensor["n", f32]):
    x[0] = 1.0
    if tile.local_id() < 5:
        x[1] = 2.0
"""
    text = made(source, X).source
    assert "store_x(x + (i64(0)) * 4, f32(1.0), first_lane)" in text
    assert "(i64(i32(1))) * 4, f32(2.0))" in text


def test_neighbours_share_an_address():
    """What is known now of an index is a part of the instruction."""
    source = """
@kernel
def k(x: Tensor["m", "n", f32], y: Tensor["m", f32]):
    i = tile.local_id()
    y[i] = x[i, i + 64] + x[i, i + 128] * x[i, i + 64 - 128]
"""
    text = made(source, np.zeros((40, 300), np.float32), np.zeros(40, np.float32)).built.sass()
    assert all(f"+{n}]" in text for n in ("0x100", "0x200", "-0x100")), text


def test_divisions_by_powers_of_two_are_shifts():
    source = """
@kernel
def k(x: Tensor["n", i32], y: Tensor["n", i32]):
    i = tile.linear_id()
    y[i] = x[i] // 8 + x[i] % 32
"""
    found = opcodes(source, np.zeros(300, np.int32), np.zeros(300, np.int32))
    assert count(found, "shr.s32") == count(found, "and.b32") == 1 and not count(found, "selp")


def test_shifts_by_what_is_known_are_one_instruction():
    source = """
@kernel
def k(x: Tensor["n", i32], y: Tensor["n", i32]):
    i = tile.linear_id()
    y[i] = (x[i] << 3) ^ (x[i] >> 5)
"""
    found = opcodes(source, np.zeros(300, np.int32), np.zeros(300, np.int32))
    assert count(found, "shr.s32") == 1 and count(found, "shl.b32") == 2  # one of linear_id
    assert not count(found, "selp")


def test_indices_are_tested_in_checked_builds_alone():
    source = """
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    i = tile.linear_id()
    y[i] = x[i + 1]
"""
    plain, checked = (made(source, X, X, checked=c) for c in (False, True))
    assert not plain.emitted.sites and "claim" not in plain.source
    assert [s[1:] for s in checked.emitted.sites] == [
        (f"index {{}} is outside of '{name}': axis 0 has extent {{}}", "bounds", ("i64", "i64"))
        for name in "xy"]
    assert {p.kind for p in checked.parameters} >= {"claim", "report", "kernel"}


@pytest.mark.parametrize("columns, width, loads", [
    (64, 4, {"ld.global.v4.b32": 1}), (64, 8, {"ld.global.v4.b32": 2}),
    (33, 4, {"ld.global.b32": 4}), (64, 2, {"ld.global.v2.b32": 1})])
def test_vectors_move_as_wide_as_rows_allow(columns, width, loads):
    source = f"""
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32]):
    tile.store_vector(y[1], tile.load_vector(x[0], width={width}))
"""
    x = np.zeros((2, columns), np.float32)
    found = opcodes(source, x, x)
    assert {k: n for k, n in found.items() if k.startswith("ld.global")} == loads
    assert count(found, "st.global") == sum(loads.values())


def test_vectors_of_packed_rows_compile():
    source = """
@kernel
def k(x: Tensor["R", "C", ts.fp6_e3m2], y: Tensor["R", "C", ts.fp6_e3m2]):
    tile.store_vector(y[1], tile.load_vector(x[0], width=4))
"""
    x = ts.zeros((2, 30), "fp6_e3m2")
    found = opcodes(source, x, x)
    assert count(found, "ld.") and any(count(found, s) for s in ("st.", "atom", "red"))


@pytest.mark.parametrize("columns, accesses", [(64, {"v2.b32": 1}), (62, {"b32": 2})])
def test_pairs_move_at_once_where_rows_begin_at_pairs(columns, accesses):
    source = """
@kernel
def k(x: Tensor["R", "C", f32], y: Tensor["R", "C", f32]):
    s, i = tile.alloc_shared((64,), f32), 2 * tile.local_id()
    a, b = tile.load_pair(x[0], i)
    tile.store_pair(s, i, b, a)
    tile.barrier()
    a, b = tile.load_pair(s, 62 - i)
    tile.store_pair(y[1], i, a, b)
"""
    x = np.zeros((2, columns), np.float32)
    found = opcodes(source, x, x, lanes=columns // 2)
    for what in ("ld.global", "st.global"):
        assert {k: n for k, n in found.items() if k.startswith(what)} == {
            f"{what}.{k}": n for k, n in accesses.items()}
    assert found["ld.shared.v2.b32"] == found["st.shared.v2.b32"] == 1


def test_checked_pairs_report_odd_ones_and_both_elements():
    source = """
@kernel
def k(x: Tensor["n", f32]):
    a, b = tile.load_pair(x, tile.local_id())
    x[tile.local_id()] = a + b
"""
    sites = [s[1] for s in made(source, X, checked=True).emitted.sites]
    assert sites.count("load_pair of 'x' from an odd element on") == 1
    assert sites.count("index {} is outside of 'x': axis 0 has extent {}") == 3


@pytest.mark.parametrize("access", [
    "x[0:8] = tile.gather(A[row, :], at)", "tile.scatter(A[row, :], at, tile.ones((8,)))",
    "tile.scatter(A[row, :], at, tile.ones((8,)), mode='add')", "A[row, at] = tile.ones((8,))"])
def test_checked_positions_report_the_row_that_they_lie_in(access):
    source = f"""
@kernel
def k(A: Tensor["M", "N", f32], x: Tensor["n", f32], p: Tensor["n", i32], row: i32):
    at = tile.load(p[0:8])
    {access}
"""
    arguments = np.zeros((4, 16), np.float32), X, np.zeros(300, np.int32), 1
    sites = [s[1] for s in made(source, *arguments, checked=True).emitted.sites]
    assert sites == ["index {} is outside of 'A': axis 0 has extent {}"]


def test_arrays_of_a_lane_become_registers_where_indices_are_constant():
    source = """
@kernel
def k(x: Tensor["n", f32]):
    r = tile.alloc_register((3,), f32)
    i = tile.linear_id()
    r[0], r[1], r[2] = x[i], 2.0, 3.0
    x[i] = r[0] * r[1] + r[2]
"""
    assert made(source, X).built.resources.stack_bytes == 0


def test_packed_elements_are_written_by_atomics_on_their_bits():
    source = """
@kernel
def k(x: Tensor["n", f32], z: Tensor["n", ts.fp4_e2m1]):
    i = tile.linear_id()
    z[i] = x[i]
"""
    found = opcodes(source, X, ts.zeros((300,), "fp4_e2m1"))
    assert count(found, "red.relaxed.gpu.global.and") == 1
    assert count(found, "red.relaxed.gpu.global.or") == 1 and not count(found, "st.global")


# --- atomics and warps --------------------------------------------------------------------------
ATOMIC = """
@kernel
def k(x: Tensor["n", {0}], y: Tensor["n", {0}]):
    i = tile.linear_id()
    {1}tile.atomic_{2}(x, i % 7, y[i], scope={3!r})
"""


@pytest.mark.parametrize("dtype, kind, scope, wanted", [
    ("i32", "add", "device", "red.relaxed.gpu.global.add.u32"),
    ("i32", "min", "system", "red.relaxed.sys.global.min.s32"),
    ("f32", "add", "group", "red.relaxed.cta.global.add.f32"),
    ("i64", "xor", "device", "red.relaxed.gpu.global.xor.b64"),
    ("f32", "max", "device", "atom.relaxed.gpu.global.cas.b32"),
    ("bf16", "add", "device", "atom.relaxed.gpu.global.cas.b16"),
    ("int8", "add", "device", "atom.relaxed.gpu.global.cas.b32"),
    ("f64", "exchange", "device", "atom.relaxed.gpu.global.exch.b64")])
def test_atomics_use_what_the_hardware_has(dtype, kind, scope, wanted):
    args = [ts.zeros((300,), dtype)] * 2
    found = opcodes(ATOMIC.format(dtype, "", kind, scope), *args)
    assert found.get(wanted) == 1
    assert count(found, "atom") + count(found, "red.") == 1
    read = opcodes(ATOMIC.format(dtype, "y[i] = ", kind, scope), *args)
    assert read.get(wanted.replace("red.", "atom.")) == 1


def test_a_group_that_updates_as_one_does_so_in_one_thread():
    source = """
@kernel
def k(c: Tensor["m", i32], out: Tensor["n", i32]):
    out[tile.linear_id()] = tile.atomic_add(c, 0, 1)
    tile.atomic_add(c, 1, 1)
"""
    built = made(source, np.zeros(2, np.int32), np.zeros(300, np.int32))
    assert built.source.count("if first_lane != 0") == 2
    found = opcode_counts(built.built.ptx)
    assert found["atom.acq_rel.gpu.global.add.u32"] == 1
    assert found["red.relaxed.gpu.global.add.u32"] == 1 and found["bar.sync"] >= 2


@pytest.mark.parametrize("index, dtype, wanted, barriers", [
    ("1", "i32", "red.release.gpu.global.add.u32", 1),
    ("tile.local_id()", "i32", "red.release.gpu.global.add.u32", 0),
    ("1", "bf16", "atom.release.gpu.global.cas.b16", 1)])
def test_an_update_that_releases(index, dtype, wanted, barriers):
    """What all threads wrote comes before that of the group's one."""
    source = f"""
@kernel
def k(c: Tensor["m", {dtype}], out: Tensor["n", i32]):
    out[tile.linear_id()] = 1
    tile.atomic_add(c, {index}, 1, release=True)
"""
    found = opcodes(source, ts.zeros((300,), dtype), np.zeros(300, np.int32))
    assert found.get(wanted) == 1 and count(found, "bar.sync") == barriers


@pytest.mark.parametrize("call", ["c, 0, 1, scope='group'", "c[0:16], tile.zeros((16,), i32)"])
def test_what_cannot_release(call):
    source = f"""
@kernel
def k(c: Tensor["m", i32]):
    tile.atomic_add({call}, release=True)
"""
    with pytest.raises(TileError, match="is of one element, for other groups"):
        build(source)["k"].lower(np.zeros(300, np.int32))


def test_atomic_tiles_add_four_at_a_time_on_hopper():
    source = """
@kernel
def k(X: Tensor["M", "N", f32], Y: Tensor["M", "N", f32]):
    tile.atomic_add(Y[tile_m:tile_m+16, 0:32], tile.load(X[tile_m:tile_m+16, 0:32]))
"""
    x = np.zeros((64, 64), np.float32)
    fours = count(opcodes(source, x, x), "red.relaxed.gpu.global.add.v4.f32")
    assert fours and count(opcodes(source, x, x, target="sm_80"),
                           "red.relaxed.gpu.global.add.f32") == 4 * fours


def test_warps_reduce_integers_by_one_instruction():
    source = """
@kernel
def k(x: Tensor["n", i32], y: Tensor["n", f32]):
    i = tile.linear_id()
    x[i] = tile.warp_sum(x[i])
    y[i] = tile.warp_max(y[i])
"""
    found = opcodes(source, np.zeros(256, np.int32), np.zeros(256, np.float32), lanes=128)
    assert found["redux.sync.add.s32"] == 1 and found["shfl.sync.bfly.b32"] == 5
    found = opcodes(source, np.zeros(100, np.int32), np.zeros(100, np.float32), lanes=100)
    assert not count(found, "redux")  # the last warp has four lanes


# --- what is not there --------------------------------------------------------------------------
def test_a_breakpoint_is_for_the_interpreter():
    source = """
@kernel
def k(x: Tensor["n", f32]):
    v = x[0]
    breakpoint()
"""
    with pytest.raises(UnsupportedTargetError, match="breakpoint.. stops the interpreter") as error:
        made(source, X)
    assert error.value.where.text.strip() == "breakpoint()"
