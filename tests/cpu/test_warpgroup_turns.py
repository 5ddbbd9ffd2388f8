"""Turns of warpgroups, in the programs that kernels with TURNS become: all take as many, whatever
iterations are theirs, and what an iteration issues stands inside of one."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from hopper_lowering import Known, program, run
from tessera import bf16
from tessera.kernels.attention import attention
from tessera.kernels.attention_backward import attention_keys, attention_queries
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_op, ops_in
from tessera.tile.ir.ir import For, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import Schedule

HEADS, S, D, BM = 2, 333, 64, 192
FACTS = Known(frozenset("SDTEBC"), frozenset("QKVG") | {
    "out", "lse", "delta", "dQ", "dK", "dV", "spans"})
RULES = {"spans": {}, "causal spans": {"causal": True}, "causal": {"causal": True},
         "window": {"causal": True, "window": 70}, "plain": {}}
KERNELS = {"result": attention, "queries": attention_queries, "keys": attention_keys}
IN_TURN = Schedule(TURNS=True)


def spans():
    """Documents of any length, of which the last sees nothing."""
    ids = np.searchsorted([0, 40, 41, 200, 290], np.arange(S), side="right")
    first, end = np.searchsorted(ids, ids, "left"), np.searchsorted(ids, ids, "right")
    return np.stack([first, np.where(first == 290, first, end)])[None].astype(np.int32)


def made(name, rule):
    """(kernel, program, operands, options)"""
    x, r = np.ones((HEADS, S, D), bf16.numpy), np.ones((HEADS, S), np.float32)
    outs = {"result": 1, "queries": 1, "keys": 2}[name]
    args = (x, x, x, *([] if name == "result" else [x, r, r]),
            *(np.full(x.shape, np.nan, bf16.numpy) for _ in range(outs)), 0.1)
    rule = RULES[rule] | ({"spans": spans(), "heads": HEADS} if "spans" in rule else {})
    rule |= {"BN": 48} | ({} if name == "result" else {"TURNS": True})
    kernel = KERNELS[name]
    schedule = IN_TURN if name == "result" else None
    return kernel, program(kernel, *args, BM=BM, facts=FACTS, schedule=schedule, **rule), args, rule


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", KERNELS)
def test_all_warpgroups_take_as_many(name, rule, monkeypatch):
    """On the machine one warpgroup is all. Here it is one of three at a time."""
    taken = {}
    for group in range(3):
        seen = taken[group] = []

        def own_row(m, op, start, group=group):
            return np.reshape(start + np.int32(64 * group + 63 * op.attr["last"]), (1, 1))

        def own_rows(m, op, start, stop, group=group):
            return np.reshape(start + 64 * group < stop, (1, 1))

        def noted(m, op, seen=seen):
            seen.append(op.name)

        for op, what in {"row_of_warpgroup": own_row, "own_rows": own_rows, "turn_take": noted,
                         "turn_pass": noted}.items():
            record = copy(OPS[op])
            object.__setattr__(record, "run", what)
            monkeypatch.setitem(OPS, op, record)
        kernel, lowered, args, options = made(name, rule)
        assert lowered.pipeline.warpgroups == 3 and lowered.pipeline.turns
        run(kernel, lowered, (-(-S // BM), HEADS), *args, BM=BM, **options)
    assert taken[0] == ["turn_take", "turn_pass"] * (len(taken[0]) // 2) and len(taken[0]) > 8
    assert taken[0] == taken[1] == taken[2]


@pytest.mark.parametrize("name", KERNELS)
def test_an_iteration_issues_in_its_turn(name):
    _, lowered, _, _ = made(name, "spans")
    loops = [n for n in walk(lowered.function.body) if isinstance(n, For) and any(
        is_op(x, "async_matmul") for x in n.body)]
    assert len(ops_in(lowered.function.body, "turn_begin")) == 1 and len(loops) > 1
    for loop in loops:
        names = [n.name if is_op(n, "turn_take", "turn_pass", "async_matmul", "matmul_wait") else ""
                 for n in loop.body]
        names = [n for n in names if n]
        first = names.index("async_matmul")
        issued = names[first:names.index("turn_pass")]
        assert names[first - 1] == "turn_take" and set(issued) == {"async_matmul"}
        assert names[first + len(issued) + 1] == "matmul_wait"
        assert names.count("turn_take") == names.count("turn_pass") == 1


def test_one_warpgroup_takes_none():
    x = np.ones((HEADS, 64, D), bf16.numpy)
    lowered = program(attention, x, x, x, np.empty_like(x), 0.1, BM=64, BN=48, facts=FACTS,
                      schedule=IN_TURN)
    assert lowered.pipeline.warpgroups == 1
    assert not ops_in(lowered.function.body, "turn_begin", "turn_take", "turn_pass")
