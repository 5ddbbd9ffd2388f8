"""Kernels that begin while the one in front of them ends."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from emulator import compare
from emulator.block import Block
from kernels.build import build
from tessera.runtime.target import parse_target
from tessera.tile.cuda.lower.dependent_launch import use_dependent_launch
from tessera.tile.ir.ir import Op

SOURCE = """
@kernel
def k(X: Tensor["N", f32], Y: Tensor["N", f32]):
    n = tile.group_id(0) * 128
{later}    Y[n:n+128] = {value}
"""
WAIT = "    tile.grid_dependency_wait()\n"


def body_of(target: str, later: str = "", value: str = "tile.load(X[n:n+128])") -> list[str]:
    kernel = build(SOURCE.format(later=later, value=value))["k"]
    x = ts.zeros(256)
    kernel[2](x, ts.zeros(256))
    text = kernel.inspect_ir("target", target=target)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return lines[next(i for i, s in enumerate(lines) if s.startswith("def k(")) + 1:]


def test_a_kernel_waits_in_front_of_all_it_does():
    """Of what is read before its first statement, too, such as the key by which it draws."""
    for value in ("tile.load(X[n:n+128])", "tile.cast(tile.random_bits(n), f32)"):
        lines = body_of("sm_90a", value=value)
        assert lines[0] == "dependency_wait()" and lines.count("launch_dependents()") == 1
        said = lines[lines.index("launch_dependents()") - 1]  # by the last groups alone
        assert said.startswith("if i32(block_number() + ") and said.endswith(") >= all_groups():")


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_older_chips_launch_one_behind_the_other(target):
    assert not [s for s in body_of(target) if "depend" in s]


def test_a_kernel_that_says_where_it_waits_is_left_as_it_is():
    lines = body_of("sm_90a", later=WAIT)
    assert lines[0] != "dependency_wait()" and lines.count("dependency_wait()") == 1
    assert "launch_dependents()" not in lines


@pytest.mark.parametrize("N, gone", [(256, 64), (96, 24)])
def test_lines_of_a_box_are_discarded(N, gone, monkeypatch):
    """Once each, behind the barrier of those that have read them; none beyond the end of rows."""
    lines, by_name = [], Block._by_name

    def spy(block, instruction, args):
        if instruction.name == "discard_L2":
            lines.extend(block.spread(args[0])[block.on].tolist())
        return by_name(block, instruction, args)

    monkeypatch.setattr(Block, "_by_name", spy)

    @ts.kernel
    def k(X: ts.Tensor["M", "N", ts.f32], Y: ts.Tensor["M", "N", ts.f32]):
        n = ts.tile.group_id(0) * 128
        Y[0:8, n:n+128] = ts.tile.load(X[0:8, n:n+128])
        ts.tile.barrier()
        ts.tile.discard_box(X[0:8, n:n+128])

    x, y = ts.ones((8, N)), ts.zeros((8, N))
    k[(N + 127) // 128](x, y)
    assert (y.numpy() == 1).all() and np.isnan(x.numpy()).all()
    compare(k, np.ones((8, N), np.float32), np.zeros((8, N), np.float32),
            groups=(N + 127) // 128, target="sm_90a")
    assert len(set(lines)) == len(lines) == gone


NEAR = "    tile.prefetch_box(X[n:n+128])\n"


@pytest.mark.parametrize("first", [NEAR, "    if n < 256:\n    " + NEAR])
def test_what_is_asked_for_first_is_asked_for_in_front(first):
    """By a kernel that does not say where it waits, too."""
    lines = body_of("sm_90a", later=first)
    asked, wait = (next(i for i, s in enumerate(lines) if text in s)
                   for text in ("prefetch_X(", "dependency_wait()"))
    assert asked < wait == lines.index("launch_dependents()") - 2
    assert not any("load_X" in s for s in lines[:wait])


@pytest.mark.parametrize("later, value", [
    (NEAR, "tile.cast(tile.random_bits(n), f32)"),
    ("    Y[n:n+128] = tile.zeros((128,))\n" + NEAR, "tile.load(X[n:n+128])")])
def test_what_is_asked_for_behind_a_write_or_by_who_draws_waits(later, value):
    assert body_of("sm_90a", later=later, value=value)[0] == "dependency_wait()"


def test_a_batch_reads_its_table_first():
    kernel = build(SOURCE.format(later=NEAR, value="tile.load(X[n:n+128])"))["k"]
    kernel[2](ts.zeros(256), ts.zeros(256))
    chip = parse_target("sm_90a").generation
    (function,) = kernel.specializations
    batched = use_dependent_launch(function, chip, batched=True)
    names = [n.name for n in batched.body if isinstance(n, Op)]
    assert names[0] == "grid_dependency_wait"
    names = [n.name for n in use_dependent_launch(function, chip).body if isinstance(n, Op)]
    assert names.index("prefetch_box") < names.index("grid_dependency_wait")


def test_what_is_brought_near_before_is_asked_for_in_front():
    """A box that may begin in front of the tensor is asked for where it does not."""
    first = "    tile.prefetch_box(X[n - 64:n+64])\n    tile.prefetch_box(X[n:n+128])\n"
    lines = body_of("sm_90a", later=first + WAIT)
    asked = [i for i, line in enumerate(lines) if "prefetch_X(" in line]
    assert len(asked) == 2 and max(asked) < lines.index("dependency_wait()")
    assert lines[asked[0]].startswith("if (") and ">= 0: prefetch_X(" in lines[asked[0]]
    assert lines[asked[1]].startswith("prefetch_X(")


@pytest.mark.parametrize("target, asked", [("sm_90a", "prefetch_rows("), ("sm_80", "prefetch_X(")])
def test_whole_rows_are_asked_for_by_one_instruction(target, asked):
    @ts.kernel
    def k(X: ts.Tensor["N", 64, ts.f32], Y: ts.Tensor["N", 64, ts.f32]):
        n = ts.tile.group_id(0) * 32 - 16
        ts.tile.prefetch_box(X[n:n+32, :])
        ts.tile.grid_dependency_wait()
        Y[n:n+32, :] = ts.tile.load(X[n:n+32, :])

    x = ts.ones((40, 64))
    k[2](x, y := ts.zeros((40, 64)))
    assert (y.numpy()[:40] == 1).sum() == 40 * 64
    text = k.inspect_ir("target", target=target)
    assert [asked in line for line in text.splitlines() if "# " in line and "prefetch_box" in line
            and "prefetch" in line.partition("#")[0]] == [True]
    compare(k, x.numpy(), np.zeros((40, 64), np.float32), groups=2, target=target)


@pytest.mark.parametrize("extent", [300, 129])
def test_long_rows_are_asked_for_by_an_instruction_each(extent, monkeypatch):
    """Wherever they begin: the 16 bytes that lie whole in what there is of each."""
    asked, by_name = [], Block._by_name

    def spy(block, instruction, args):
        if instruction.name == "bulk_prefetch":
            asked.extend(zip(*(block.spread(x)[block.on].tolist() for x in args), strict=True))
        return by_name(block, instruction, args)

    monkeypatch.setattr(Block, "_by_name", spy)

    @ts.kernel
    def k(X: ts.Tensor["N", "E", ts.f32], Y: ts.Tensor["N", "E", ts.f32]):
        n = ts.tile.group_id(0) * 3 - 2
        ts.tile.prefetch_box(X[n:n+3, 32:160])
        ts.tile.grid_dependency_wait()
        Y[n:n+3, 0:256] = ts.tile.load(X[n:n+3, 0:256])

    x = np.arange(6 * extent, dtype=np.float32).reshape(6, extent)
    compare(k, x, np.zeros_like(x), groups=3, target="sm_90a")
    rows = 4 * (np.arange(6) * extent)
    begins, ends = (rows + 4 * 32) // 16 * 16, (rows + 4 * min(160, extent)) // 16 * 16
    first = min(asked)[0] - begins[0]
    found = sorted((at - first, at - first + n) for at, n in asked)
    assert found == [*zip(begins, ends, strict=True)]
