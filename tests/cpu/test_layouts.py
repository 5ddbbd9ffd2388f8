"""Layouts: who holds which element, and relabelling that moves nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.build import build
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.assign_layouts import Hint, assign_layouts, split_warps
from tessera.tile.cuda.lower.insert_barriers import order
from tessera.tile.ir.ir import Def, If, Op, definitions, walk, with_regions
from tessera.tile.ir.register_layout import (
    RegisterLayout,
    accumulator,
    bits_of,
    blocked,
    dealt,
    warpgroups,
    warps_over,
)
from tessera.tile.ir.types import TileType
from tessera.tile.passes import verify

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def bare(d):
    return Def(d.value, replace(d.type, layout=None)) if isinstance(d.type, TileType) else d


def without_layouts(function):
    """The function as it was before."""
    def nodes(block):
        return tuple(node(n) for n in block)

    def node(n):
        if isinstance(n, Op):
            return replace(n, outs=tuple(map(bare, n.outs)))
        name = "outs" if isinstance(n, If) else "carried"
        return with_regions(replace(n, **{name: tuple(map(bare, getattr(n, name)))}), nodes)

    return replace(function, body=nodes(function.body))


@st.composite
def layouts(draw) -> RegisterLayout:
    """Any permutation of the bits of a shape, some of them replicas."""
    shape = draw(shapes)
    bits = [(axis, b) for axis, n in enumerate(shape) for b in range(bits_of(n))]
    order_ = draw(st.permutations(bits))
    cut = draw(st.integers(0, len(bits)))
    threads = [*order_[cut:], *[None] * draw(st.integers(0, 2))]
    return RegisterLayout(shape, tuple(order_[:cut]), tuple(draw(st.permutations(threads))))


def held(layout: RegisterLayout) -> dict[tuple[int, int], tuple[int, ...]]:
    """(thread, register) -> index, of those that lie inside."""
    out = {}
    for thread in range(1 << len(layout.threads)):
        part = [0] * len(layout.shape)
        for axis in range(len(layout.shape)):
            for first, to, count in layout.terms(axis):
                part[axis] |= (thread >> first & (1 << count) - 1) << to
        for i, base in enumerate(layout.bases):
            index = tuple(a + b for a, b in zip(part, base, strict=True))
            if all(a < n for a, n in zip(index, layout.shape, strict=True)):
                out[thread, i] = index
    return out


@given(layouts())
def test_every_element_is_held_once_by_each_replica(layout):
    count = Counter(held(layout).values())
    assert set(count) == set(product(*map(range, layout.shape)))
    assert set(count.values()) == {1 << len(layout.replicas)}


@given(layouts())
def test_text_round_trips(layout):
    assert RegisterLayout.parse(layout.text, layout.shape) == layout


@given(layouts(), st.data())
def test_relabelling_moves_nothing(layout, data):
    before = held(layout)
    axes = tuple(data.draw(st.permutations(range(len(layout.shape)))))
    swapped = layout.permuted(axes)
    after = held(swapped)
    for (thread, i), index in before.items():
        base = tuple(layout.bases[i][a] for a in axes)
        assert after[thread, swapped.number[base]] == tuple(index[a] for a in axes)
    axis = data.draw(st.integers(0, len(layout.shape)))
    assert layout.insert(axis).drop(axis) == layout
    assert held(layout.insert(axis)) == {
        k: (*v[:axis], 0, *v[axis:]) for k, v in before.items()}


@given(layouts(), st.data())
def test_dropping_an_axis_makes_replicas(layout, data):
    axis = data.draw(st.integers(0, len(layout.shape) - 1))
    rest = layout.drop(axis)
    bits = layout.thread_bits(axis)
    assert len(rest.replicas) == len(layout.replicas) + len(bits)
    assert rest.shape == layout.shape[:axis] + layout.shape[axis + 1:]
    small = layout.shrunk(layout.shape[:axis] + (1,) + layout.shape[axis + 1:])
    if layout.shape[axis] > 1:
        assert small.drop(axis) == rest


def test_reshape_of_powers_of_two_is_free():
    layout = blocked((16, 64), 128, 4)
    made = layout.reshaped((4, 4, 64))
    assert made is not None
    flat = {k: np.ravel_multi_index(v, (16, 64)) for k, v in held(layout).items()}
    again = {k: np.ravel_multi_index(v, (4, 4, 64)) for k, v in held(made).items()}
    assert Counter(flat.values()) == Counter(again.values())
    assert {k[0]: 0 for k in flat} == {k[0]: 0 for k in again}
    for (thread, i), at in flat.items():
        base = layout.bases[i]
        index = np.unravel_index(np.ravel_multi_index(base, (16, 64)), (4, 4, 64))
        assert again[thread, made.number[tuple(map(int, index))]] == at
    assert blocked((6, 4), 32).reshaped((8, 3)) is None
    assert blocked((4, 6), 32).reshaped((24,)) is None


@pytest.mark.parametrize("before, after", [((192, 64), (12, 16, 64)), ((6, 4), (24,)),
                                           ((3, 8, 2), (6, 8)), ((24,), (3, 8)),
                                           ((32, 24), (2, 16, 24)), ((5, 3), (1, 5, 3))])
def test_the_first_axis_and_those_that_stay_may_have_any_extent(before, after):
    """Each thread and register that exists has the same element of both."""
    layout = blocked(before, 128)
    made = layout.reshaped(after)
    assert made.shape == after and made.count == layout.count

    def elements(layout):
        found = {}
        for thread in range(128):
            for number, base in enumerate(layout.bases):
                index = list(base)
                for i, bit in enumerate(layout.threads):
                    if bit is not None:
                        index[bit[0]] |= (thread >> i & 1) << bit[1]
                if all(i < n for i, n in zip(index, layout.shape, strict=True)):
                    found[thread, number] = int(np.ravel_multi_index(index, layout.shape))
        return found

    assert elements(layout) == elements(made)
    assert set(elements(made).values()) == set(range(np.prod(before)))


@pytest.mark.parametrize("vector", [1, 2, 8])
def test_blocked_gives_neighbours_to_neighbours(vector):
    layout = blocked((4, 256), 64, vector)
    where = held(layout)
    assert layout.run(1) == vector
    assert where[1, 0] == (0, vector) and where[0, vector - 1] == (0, vector - 1)


def test_no_thread_stands_beyond_a_row_that_is_a_multiple_of_many_elements():
    """Rows of 384 are three times 128: threads stand side by side over 128, and have three of these
    in registers."""
    rows = blocked((64, 384), 256, 16, whole=128)
    assert rows.text == "1.0 1.1 1.2 1.3 0.5 1.7 1.8 | 1.4 1.5 1.6 0.0 0.1 0.2 0.3 0.4"
    assert rows.count == 64 * 384 // 256 and not rows.overhangs(1)
    assert blocked((64, 384), 256, 16).overhangs(1)
    assert blocked((64, 384), 256, 16, whole=256) == blocked((64, 384), 256, 16)
    assert blocked((64, 512), 256, 16, whole=128) == blocked((64, 512), 256, 16)


def test_a_warp_stays_in_a_row_while_there_are_rows():
    assert blocked((8, 768), 256, 4, rows=True).text == (
        "1.0 1.1 1.7 1.8 1.9 | 1.2 1.3 1.4 1.5 1.6 0.0 0.1 0.2")
    assert blocked((2, 768), 256, 4, rows=True).text == (
        "1.0 1.1 1.9 | 1.2 1.3 1.4 1.5 1.6 0.0 1.7 1.8")
    for shape in ((1, 2048), (64, 16)):  # one row; more rows in a warp
        assert blocked(shape, 128, 4, rows=True) == blocked(shape, 128, 4)


@pytest.mark.parametrize("shape, threads", [((128, 128), 128), ((128, 256), 256), ((64, 64), 32),
                                            ((16, 256), 64), ((256, 8), 64), ((48, 80), 32)])
@pytest.mark.parametrize("vectors", [(1, 1), (4, 1), (1, 4), (4, 4)])
def test_threads_that_add_up_have_as_many_rows_as_columns(shape, threads, vectors):
    """Every element once; neighbours as asked; what a thread reads for each k is little."""
    layout = dealt(shape, threads, vectors)
    bits = [b for b in (*layout.registers, *layout.threads) if b is not None]
    assert sorted(bits) == [(a, i) for a in (0, 1) for i in range(bits_of(shape[a]))]
    assert 1 << len(layout.threads) == threads
    if min(shape) >= 64:
        rows, columns = (len({base[a] for base in layout.bases}) for a in (0, 1))
        assert max(rows, columns) <= 2 * min(rows, columns)
        assert [layout.run(a) >= v for a, v in enumerate(vectors)] == [True, True]


def test_accumulators_are_those_of_the_isa():
    layout = accumulator((128, 64), warps_over((128, 64), 4, 1))
    where = held(layout)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        assert [where[lane, i] for i in range(4)] == [
            (row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)]
    groups = warpgroups((128, 256), 2)
    where = held(groups)
    assert groups.count == 128
    assert where[32, 0] == (16, 0) and where[128, 0] == (64, 0) and where[0, 4] == (0, 8)


def test_warps_are_split_into_squares():
    assert split_warps((128, 128), 4) == (2, 2)
    assert split_warps((256, 64), 8) in ((8, 1), (4, 2))
    assert split_warps((16, 256), 4) == (1, 4)


# --- the pass -----------------------------------------------------------------------------------
def lowered(body: str, lanes: int = 128, params: str = 'X: Tensor["M", "N", f32]', **sizes):
    kernel = build(f"@kernel\ndef k({params}):\n{body}")["k"]
    arrays = [np.zeros((64, 64), np.float32)] * params.count("Tensor")
    return assign_layouts(kernel.lower(*arrays), Hint(lanes, GENERATIONS["sm_90a"]))


def conversions(function) -> int:
    return sum(isinstance(n, Op) and n.name == "convert_layout" for n in walk(function.body))


def test_every_tile_gets_a_layout_and_row_kernels_need_no_conversion():
    function = lowered("    x = tile.load(X[0:64, 0:64])\n"
                       "    p = tile.exp(x - tile.row_max(x))\n"
                       "    X[0:64, 0:64] = p / tile.row_sum(p)\n")
    types = [t for t in definitions(function).values() if isinstance(t, TileType)]
    assert types and all(t.layout is not None for t in types)
    assert conversions(function) == 0
    verify(without_layouts(function))


def test_conversions_stand_where_two_anchors_meet():
    function = lowered("    x = tile.load(X[0:64, 0:64])\n    X[0:64, 0:64] = x + x.T\n")
    assert conversions(function) == 1
    text = [n for n in walk(function.body) if isinstance(n, Op) and n.name == "convert_layout"]
    (op,) = text
    before, after = (definitions(function)[v] for v in (op.args[0], op.outs[0].value))
    assert before.layout != after.layout and before.shape == after.shape


def test_positions_are_computed_again_and_not_exchanged():
    """Numbers of rows and of columns by one name; what is loaded goes from thread to thread."""
    body = "    i = tile.arange(0, 64)\n    x, y = tile.load(X[0:64, 0:64]), {}\n" \
           "    X[0:64, 0:64] = tile.where(i[:, None] >= i[None, :], x, y[:, None] + y[None, :])\n"
    assert conversions(lowered(body.format("tile.exp(tile.cast(i, f32) * 0.5)"))) == 0
    assert conversions(lowered(body.format("tile.load(X[0, 0:64])"))) == 1


def barriers(function, **options) -> int:
    made = order(function, **options)
    return sum(isinstance(n, Op) and n.name == "barrier" for n in walk(made.body))


def test_same_elements_in_the_same_threads_need_no_barrier():
    assert barriers(lowered("    x = tile.load(X[0:64, 0:64])\n    X[0:64, 0:64] = x * 2.0\n")) == 0


def test_one_thread_writes_what_several_hold_and_all_read():
    body = "    X[0:16, 0] = tile.row_sum(tile.load(X[0:16, 0:64]))\n" \
           "    X[0:16, 0] = tile.load(X[0:16, 0]) * 2.0\n"
    assert barriers(lowered(body)) == 3
    own = "    X[0:64, 0:64] = tile.load(X[0:64, 0:64]) * 2.0\n"
    assert barriers(lowered(own), spare=True) == 1


def test_another_view_of_what_was_written_needs_one():
    body = "    X[0:32, 0:64] = tile.zeros((32, 64))\n    x = tile.load(X[16:48, 0:64])\n" \
           "    X[32:64, 0:64] = x\n"
    assert barriers(lowered(body)) == 2


def test_boxes_with_nothing_in_common_need_none():
    body = "    for j in range(0, 64, 16):\n" \
           "        X[j:j+16, 0:32] = tile.zeros((16, 32))\n" \
           "        X[j:j+16, {}] = tile.zeros((16, 32))\n"
    assert barriers(lowered(body.format("32:64"))) == 0
    assert barriers(lowered(body.format("31:63"))) == 2
    assert barriers(lowered(body.format("32:64")), overlapping=True) == 2


def test_parts_of_a_groups_own_part_have_nothing_in_common():
    """Unless the part is another one in each iteration."""
    body = "    first = tile.group_id(0) * 64\n    for j in range(0, 64, 16):\n" \
           "        at = first{}\n" \
           "        X[0:16, at:at+32] = tile.zeros((16, 32))\n" \
           "        X[0:16, at+{}:at+64] = tile.zeros((16, {}))\n"
    assert barriers(lowered(body.format("", 32, 32))) == 0
    assert barriers(lowered(body.format("", 16, 48))) == 2
    assert barriers(lowered(body.format(" + j", 32, 32))) == 2


def test_a_loop_is_looked_at_twice():
    body = "    for j in range(0, 64, 16):\n        x = tile.load(X[j:j+16, 0:64])\n" \
           "        X[0:16, 0:64] = x\n"
    assert barriers(lowered(body)) == 2


def test_two_tensors_may_be_one():
    body = "    X[0:16, 0:64] = tile.load(Y[16:32, 0:64])\n"
    two = 'X: Tensor["M", "N", f32], Y: Tensor["M", "N", f32]'
    function = lowered(body, params=two)
    assert barriers(function) == 0
    assert barriers(function, overlapping=True) == 1


def test_uniform_elements_are_ordered():
    body = "    X[0, 0] = 1.0\n    X[0, 1] = X[0, 0] + 1.0\n"
    assert barriers(lowered(body)) == 2  # before the read, and before the write after it
