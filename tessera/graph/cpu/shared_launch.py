"""Launches of a loop that worker threads help with, told and joined by machine code.

A worker that has helped looks at its mailbox for a while before it sleeps again, without the GIL:
the next launch of the same step finds it in less than a microsecond, where waking a thread takes
some ten of the launching thread and more of the worker, and hands the GIL to and fro. A mailbox
is words that only change hands by one exchange:

    asleep -> idle            the launching thread, which then wakes the worker
    idle -> filled -> posted  a launch that has a loop for it
    posted -> taken -> done   the worker, around the loop
    posted -> idle            the launch, when all is done and the worker did not come
    done -> idle              the launch, which waits for it
    idle -> asleep            the worker, that was recalled or has seen nothing for LOOKING_NS

So a launch never waits for a worker that has not begun, and a worker touches nothing of a launch
that is over.

The launching thread claims units from the first one on, its first helper from the last one back, so
in each loop they meet about the middle: what one of them has written, and the next loop reads at
the same place, lies in the caches of its own core. The lowest bit of the scratch memory's address
is the end that a thread begins at; of more helpers every second one is on either side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from . import pool
from .machine_code import obtain

# Of a worker, behind the last loop. A step of a U-Net (benchmarks/cpu_models.py) in two threads of
# realtime priority, in turn, on 2 cores of AMD EPYC, 2026-11-26: with 0, 50 and 200 us 13.8, 11.8
# and 11.5 ms, and 14.0 where Python woke each helper; in minutes in which two threads gained little
# 18.5, 17.6, 20.1 and 19.1. Under a load of 8 50 us cost nothing, 200 up to a third.
LOOKING_NS = 50_000
MOST = 62  # helpers, of which a launch keeps a bit each
_SLOT = np.zeros(1, np.int64)
SLOT = _SLOT.ctypes.data  # of results and exceptions, of which there are none
STATES = {name: str(i) for i, name in enumerate(pool.STATES)}

SERVE = """def loops(box, call, scratch):
    begun = clock_ns()
    while True:
        state, now = look_again(box, 0), clock_ns()
        if state == {posted}:
            if exchanged(box, 0, {posted}, {taken}):
                invoke(word(box, 2), word(box, 3), word(box, 4), word(box, 5))
                publish(box, 0, {done})
                begun = clock_ns()
        elif state == {asleep}:
            break
        elif state == {idle}:
            if now - begun > {looking} or word(box, 1) != 0:
                if exchanged(box, 0, {idle}, {asleep}):
                    break
"""
SHARE = """def loops(layout, call, scratch):
    posted = 0
    for k in range(word(layout, 2)):
        box = word(layout, 4 + k)
        if exchanged(box, 0, {idle}, {filled}):
            set_word(box, 2, word(layout, 0))
            set_word(box, 3, word(layout, 1))
            set_word(box, 4, call)
            set_word(box, 5, scratch + (k + 1) * word(layout, 3) + 1 - k % 2)
            publish(box, 0, {posted})
            posted |= 1 << k
    invoke(word(layout, 0), word(layout, 1), call, scratch)
    for k in range(word(layout, 2)):
        if posted >> k & 1:
            box = word(layout, 4 + k)
            if not exchanged(box, 0, {posted}, {idle}):
                await_word(box, 0, {done})
                publish(box, 0, {idle})
"""


def sharing(function: Any, layout: np.ndarray, threads: int, scratch_bytes: int = 0, *,
            wake: bool = True) -> Callable[[bytes], None]:
    """A function that launches a loop on up to so many threads, this one included.

    layout: the loop's table, and scratch_bytes its scratch memory of each thread; wake: whether
    sleeping workers are told as well
    """
    each, table = -(-scratch_bytes // 64) * 64, layout.ctypes.data
    helpers = pool.POOL.helpers(min(threads - 1, MOST))
    if not helpers:
        def alone(call: bytes, keep: Any = layout) -> None:
            function(SLOT, SLOT, table, call, pool.scratch(each) if each else 0)

        return alone
    share, of_workers = _compiled(), _table(function, table, each, helpers)
    words, total = of_workers.ctypes.data, each * (1 + len(helpers))

    def launch(call: bytes, keep: Any = (layout, of_workers)) -> None:
        if wake:
            for helper in helpers:
                helper.wake()
        share(SLOT, SLOT, words, call, pool.scratch(total) if total else 0)

    return launch


def _table(function: Any, layout: int, each: int, helpers: Sequence[pool.Worker]) -> np.ndarray:
    address = ctypes.cast(function, ctypes.c_void_p).value
    return np.array([address, layout, len(helpers), each, *(h.address for h in helpers)], np.int64)


@cache
def _compiled() -> Any:
    """SHARE, and SERVE for the workers."""
    served = obtain(SERVE.format(looking=LOOKING_NS, **STATES))
    pool.Worker.serve = staticmethod(lambda mailbox: served(SLOT, SLOT, mailbox, b"", 0))
    return obtain(SHARE.format(**STATES))


__all__ = ["sharing"]
