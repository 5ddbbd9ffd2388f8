"""The card that launches are planned for: its multiprocessors, and what is so many for each."""

from __future__ import annotations

from typing import Any

import pytest

import tessera as ts
from tessera import Tensor, bf16, f32
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.long_strips import long_strips
from tessera.kernels.attention import largest_share
from tessera.kernels.cards import Card, card_for, multiprocessors_of, planning_for
from tessera.kernels.decode_attention import decode_plan
from tessera.kernels.row_blocks import strip_count
from tessera.runtime.device import has_gpu
from tessera.runtime.generations import Generation
from tessera.runtime.target import parse_target


def chip(target: str) -> Generation:
    return parse_target(target).generation


@pytest.mark.skipif(has_gpu(), reason="this machine's GPU is asked where it is of that target")
@pytest.mark.parametrize("target, count", [("sm_80", 108), ("sm_90a", 132), ("sm_100a", 148)])
def test_without_a_gpu_the_one_that_stands_for_a_target_is_planned_for(target, count):
    assert multiprocessors_of(chip(target)) == count


@pytest.mark.parametrize("count", [66, 114, 132])
def test_a_card_that_is_planned_for_says_its_own(count):
    with planning_for(Card(count)):
        assert multiprocessors_of(chip("sm_90a")) == count
        assert card_for(chip("sm_90a").warpgroup_matmul).multiprocessors == count
        assert strip_count(2, chip("sm_90a")) == count // 2
        assert long_strips(8000, 8192, chip("sm_90a")).rows == -(-8000 // (2 * count))


def first_extents(fn: Any, *types: Any) -> list[int]:
    """Of what is neither an operand nor a result: parts of sums among them."""
    plan = CudaProgram(ts.jit(fn).graph(*types), "sm_90a").plan
    return [b.shape[0] for b in plan.buffers if b.kind == "temporary"]


def filter_gradient(groups: int) -> Any:
    return lambda x, g, w: ts.vjp(
        lambda w: ts.conv2d(x, w, padding=1, groups=groups), w)[1](g)


PARTS = {
    "product": (lambda a, b: a.T @ b, (Tensor[1 << 17, 64, f32],) * 2, {66: 128, 132: 256}),
    "filters": (filter_gradient(1), (Tensor[256, 24, 16, 16, bf16], Tensor[256, 24, 16, 16, bf16],
                                     Tensor[24, 24, 3, 3, bf16]), {66: 14, 132: 29}),
    "depthwise filters": (filter_gradient(64), (
        Tensor[256, 64, 16, 16, bf16], Tensor[256, 64, 16, 16, bf16], Tensor[64, 1, 3, 3, bf16]),
        {66: 171, 132: 342}),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("count", [66, 132])
def test_sums_are_in_parts_for_its_multiprocessors(name, count):
    fn, types, parts = PARTS[name]
    with planning_for(Card(count)):
        assert parts[count] in first_extents(fn, *types)


def test_few_queries_are_attended_in_parts_for_its_multiprocessors():
    """Of warps and of warpgroups; where two of a multiprocessor are even."""
    for streamed in (False, True):
        one, half = (decode_plan(8, 4, 1 << 17, 128, streamed=streamed, multiprocessors=n).parts
                     for n in (132, 66))
        assert 2 * half - 1 <= one <= 2 * half + 1
    assert [decode_plan(heads, 4, 2048, 128, streamed=True).slots > 0
            for heads in (223, 224, 448, 449)] == [False, True, True, False]
    assert [decode_plan(heads, 4, 2048, 128, streamed=True, multiprocessors=66).slots > 0
            for heads in (111, 112, 224, 225)] == [False, True, True, False]


def test_blocks_are_dealt_out_where_they_come_out_even_on_its_multiprocessors():
    assert largest_share(1, 66 * 8, 66) == 1.0
    assert largest_share(1, 66 * 9, 132) > 1.1
