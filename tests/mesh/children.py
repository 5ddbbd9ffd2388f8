"""A script of ranks that starts children, whose lines in front of __main__ children run anew.

    mpirun -n 2 python tests/mesh/children.py METHOD,communicates FOLDER
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import numpy as np

import tessera as ts

METHOD, _, FAULT = sys.argv[1].partition(",")
mesh = ts.dist.mesh(axes=("dp",), shape=(ts.dist.world_size(),))
if FAULT == "at once":
    w = ts.dist.tensor((3, 4), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)


def load(i: int) -> np.ndarray:
    """A batch, as a data loader makes them."""
    if FAULT == "later":
        ts.dist.barrier()
    return np.full((4, 3), ts.dist.rank() + i, np.float32)


def main() -> None:
    mean, found = ts.jit(lambda x: ts.mean(x)), []
    with multiprocessing.get_context(METHOD).Pool(1) as pool:
        for batch in pool.imap(load, range(3)):
            x = ts.dist.from_local(batch, ts.ShardSpec(("row",), ("dp",)), mesh)
            found.append(float(mean(x)))
    Path(sys.argv[2], str(ts.dist.rank())).write_text(str(found))


if __name__ == "__main__":
    main()
