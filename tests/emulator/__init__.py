"""Emitted kernels without a GPU: their source runs on NumPy, against the interpreter.

    emulator.compare(kernel, *args)                   all threads of a block at once
    emulator.compare(kernel, *args, lockstep=False)   one thread at a time
    emulator.printed(kernel, *args)                   the lines that its threads print
    emulator.counted(kernel, *args)                   the bad elements that its sentinels count
    emulator.run(emitted, threads, grid, arrays, values)   a launch on raw arrays
    Builder(Block(threads)).call(instruction, ...)    an intrinsic by itself

A register is an array with one number per thread. An intrinsic's body runs as it is, on a Builder
of NumPy functions; only PTX instructions are written again here, with the hardware's NaN.

In lockstep control flow must be the same in all threads, as it is in kernels of tiles. Lockstep
hides missing barriers, so each byte of shared memory remembers who touched it since the last one:
another thread's access is an error. A copy (cp.async) arrives no earlier than at the wait for it.
Thread by thread is for threads that go different ways, atomics that give something back, reports,
and one thread's write before another's read of global memory; it is a hundred times slower, and
sees no missing barrier.

    registers.py      a register, and the Builder of intrinsics
    arithmetic.py     instructions of one number per thread: conversions, maths, bits
    memory.py         global memory and its arrays; shared memory and its barriers
    block.py          a block of threads in lockstep: loads, stores, copies, votes, shuffles
    matrices.py       ldmatrix, stmatrix and mma
    bulk_stores.py    stores by TMA, which read shared memory as late as they may
    threads.py        threads one at a time, their atomics and what a warp does together
    launch.py         whole kernels, compared with the interpreter
"""

from __future__ import annotations

from .block import Block
from .launch import Emulated, compare, counted, printed, run
from .memory import GlobalMemory
from .registers import KINDS, Builder, register
from .threads import Thread, ThreadBuilder

__all__ = ["KINDS", "Block", "Builder", "Emulated", "GlobalMemory", "Thread", "ThreadBuilder",
           "compare", "counted", "printed", "register", "run"]
