"""Which loads may stay in the L1 cache: those of what is read again and nobody writes, and in
kernels that store as much."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.build import build
from tessera.runtime.target import parse_target
from tessera.tile.cuda.compile import ArgumentFacts, emit_kernel

HEAD = 'Tensor["M", "N", f32], w: Tensor["N", f32], O: Tensor["M", "N", f32]'
PASSES = """
    for k in range(0, N, 64):
        a = a + tile.load(x[m:m+1, k:k+64], fill=0)
    for k in range({}):
        O[m, k] = tile.reduce_sum(tile.load(x[m:m+1, k:k+64]) - a)
"""


def caches(body: str, shared: str = "", rows: str = "N") -> dict[str, set[str]]:
    """By parameter, those of its loads. rows: an extent that is known to be a multiple of 16."""
    source = f"""@kernel(grid=lambda M: M)
def k(x: {HEAD}):
    m, a = tile.group_id(0), tile.zeros((1, 64))
{body}"""
    arrays = np.zeros((4, 256), np.float32), np.zeros(256, np.float32), np.zeros((4, 256), "f4")
    function = build(source)["k"].lower(*arrays)
    facts = ArgumentFacts(frozenset({rows}), frozenset("xwO"), frozenset(shared))
    text = emit_kernel(function, 32, parse_target("sm_90a"), facts).emitted.source
    found = re.findall(r"load_(\w)(?:_\d+)? = use\(tiles.load\(.*'([\w:]*)'\)\)", text)
    return {name: {c for n, c in found if n == name} for name, _ in found}


def total(*boxes: str, to: str = "O[m, 0]") -> str:
    """The line that sums what is loaded, of w for each row."""
    terms = (f"tile.load({b}, fill=0)" + "[None, :]" * b.startswith("w") for b in boxes)
    return f"    {to} = tile.reduce_sum({' + '.join(terms)})\n"


@pytest.mark.parametrize("again", ["0, N, 64", "192, -1, -64"])
def test_what_is_gone_through_twice(again: str) -> None:
    assert caches(PASSES.format(again)) == {"x": {""}}
    assert caches(PASSES.format(again), shared="xwO") == {"x": {"L1::no_allocate"}}


def test_what_others_share_memory_with() -> None:
    """A batch norm's result in the place of its operand leaves the numbers of columns in L1."""
    body = "    O[m:m+1, 0:64] = tile.load(x[m:m+1, 0:64]) * tile.load(w[0:64])[None, :]\n"
    assert caches(body, shared="xO") == {"x": {"L1::no_allocate"}, "w": {""}}
    assert caches(body) == {"x": {""}, "w": {""}}


def test_what_is_gone_through_once_or_elsewhere() -> None:
    assert caches(total("x[m:m+1, 0:64]", "x[m:m+1, 64:128]")) == {"x": {"L1::no_allocate"}}
    assert caches(PASSES.format("64, N, 128").replace("k:k+64]) - a", "k+4:k+68]) - a")) == {
        "x": {"L1::no_allocate"}}


def test_accesses_that_begin_amid_sectors() -> None:
    """The next one takes what is left of these: of rows that are no multiple of 16 bytes, or
    columns that begin beside one."""
    whole = total("x[m:m+1, 0:64]", "w[0:64]")
    assert caches(whole, rows="M") == {"x": {""}, "w": {""}}
    assert caches(whole, shared="xwO", rows="M")["x"] == {"L1::no_allocate"}
    assert caches(total("x[m:m+1, 1:65]")) == {"x": {""}}


def test_what_every_group_reads_and_none_writes() -> None:
    body = total("w[0:64]", "x[m:m+1, 0:64]")
    assert caches(body) == {"w": {""}, "x": {"L1::no_allocate"}}
    written = body + "    w[0:64] = tile.zeros((64,))\n"
    assert caches(written)["w"] == {"L1::no_allocate"}


@pytest.mark.parametrize("at, kept", [("n", ""), ("n + 4 * m", "L1::no_allocate")])
def test_few_bytes_that_groups_along_an_axis_share(at: str, kept: str) -> None:
    """The numbers of columns in each block of rows."""
    body = "    n = tile.group_id(1) * 64\n" + total(
        f"w[{at}:{at}+64]", "x[m:m+1, n:n+64]", to="O[m, n]")
    assert caches(body) == {"w": {kept}, "x": {"L1::no_allocate"}}


@pytest.mark.parametrize("body", [
    total("x[m:m+1, 0:64]", "x[m+1:m+2, 0:64]"), total("x[m:m+1, 0:64]", "x[m:m+1, 64:128]")])
def test_neighbours_that_share_nothing(body: str) -> None:
    assert caches(body) == {"x": {"L1::no_allocate"}}


@pytest.mark.parametrize("body", [
    total("x[m:m+1, 0:64]", "x[m:m+1, 1:65]"), total("x[m:m+2, 0:64]", "x[m-1:m+1, 0:64]"),
    "    for k in range(5):\n        a += tile.load(x[m:m+1, 2*k:2*k+64], fill=0)\n"
    "    O[m, 0] = tile.reduce_sum(a)\n",
    # a column: its neighbours come with it
    "    for k in range(5):\n        O[m:m+1, k] = tile.load(x[m:m+1, k], fill=0)\n"])
def test_loads_that_overlap(body: str) -> None:
    assert caches(body) == {"x": {""}}
    assert caches(body, shared="xwO") == {"x": {"L1::no_allocate"}}


@pytest.mark.parametrize("store, cache", [
    ("O[m:m+1, 0:64] = a", ""), ("O[m:m+2, 0:64] = tile.broadcast(a, (2, 64))", ""),
    ("O[m, 0] = tile.reduce_sum(a)", "L1::no_allocate")])
def test_kernels_that_store_as_much(store: str, cache: str) -> None:
    body = f"    a += tile.load(x[m:m+1, 0:64], fill=0)\n    {store}\n"
    assert caches(body) == {"x": {cache}}
    assert caches(body, shared="xwO") == {"x": {"L1::no_allocate"}}
