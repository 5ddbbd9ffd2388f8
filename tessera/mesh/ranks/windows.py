"""Windows of NCCL: the memory of a program's temporaries, when all its ranks send from the same
places.

NCCL's kernels for them load and store what lies on other ranks, a block in each direction at once,
where rings pass it on. They take some ten multiprocessors in place of 24, and matmuls run beside.
They find an array of another rank by its offset, so ranks compare first where everything lies that
they send. Where one of them has no windows, sends arguments and results alone, or has another plan,
as with parts of unequal extents, or where ranks run on several machines, all send from plain
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tessera import config
from tessera.launched import launched_here, launched_size
from tessera.runtime import libnccl
from tessera.runtime.device import device
from tessera.runtime.window_memory import WindowBuffer

from .communicator import communicator
from .envelope import here_in
from .group import Group
from .window_sums import NarrowSum, added_in_f32

_DIGEST_BYTES = 16


def windows_here() -> bool:
    """Whether this rank would have windows: others may not."""
    library = libnccl.open_library()
    return config.comm_windows and library is not None and library.has_windows and (
        launched_here() == launched_size())


def engines_here() -> bool:
    """Whether this rank would have its parts gathered by copy engines: in windows, of NCCL 2.28."""
    library = libnccl.open_library()
    return windows_here() and library is not None and library.has_engines


def window_memory(group: Group, index: int, nbytes: int, places: str,
                  groups: Sequence[tuple[Group, int]], sums: Sequence[NarrowSum] | None = ()
                  ) -> WindowBuffer | None:
    """Memory on this rank's GPU that the ranks of these groups reach; None where they send from
    memory of their own. All members of `group`, which has them all, call it.

    groups: each with the number of blocks of its communicator, 0 for the usual one
    places: where in it that lies which they send; "" for nowhere
    sums: those of bf16, for which there is none unless NCCL adds them in f32; None where some lie
        elsewhere
    """
    library = libnccl.open_library()
    mine = np.zeros(1 + _DIGEST_BYTES, np.uint8)
    mine[0] = bool(places) and sums is not None and windows_here()
    mine[1:] = np.frombuffer(hashlib.blake2b(
        f"{nbytes}\n{places}".encode(), digest_size=_DIGEST_BYTES).digest(), np.uint8)
    got = group.swap_bytes([mine] * group.size, [mine.size] * group.size,
                           here_in("comparing where lies what is sent"))
    if library is None or not (all(g[0] for g in got) and len({g.tobytes() for g in got}) == 1):
        return None
    made = WindowBuffer(nbytes, device(index), library)
    for one, blocks in groups:
        by = communicator(one, index)
        if by is not None:
            (by.of_blocks(blocks) if blocks else by).open_window(made)
    if sums:
        mine[0] = added_in_f32(sums, made, index)
        got = group.swap_bytes([mine] * group.size, [mine.size] * group.size,
                               here_in("comparing how NCCL adds"))
        return made if all(g[0] for g in got) else None
    return made


__all__ = ["engines_here", "window_memory", "windows_here"]
