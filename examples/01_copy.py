"""A copy and a sum of vectors, written with tiles; and saxpy, written for each lane.

    python examples/01_copy.py [--device cuda]

Start here. A kernel is a function that many groups of lanes run at once. `tile_n` is where this
group's block of the extent N begins; the size of the block is read from the slice.
"""

import tessera as ts
from tessera import Tensor, f32


@ts.kernel
def copy(x: Tensor["N"], y: Tensor["N"], BN=1024):
    y[tile_n:tile_n+BN] = ts.tile.load(x[tile_n:tile_n+BN])


@ts.kernel
def add(x: Tensor["N"], y: Tensor["N"], z: Tensor["N"], BN=1024):
    a = ts.tile.load(x[tile_n:tile_n+BN])
    b = ts.tile.load(y[tile_n:tile_n+BN])
    z[tile_n:tile_n+BN] = a + b


@ts.kernel
def saxpy(x: Tensor["N", f32], y: Tensor["N", f32], alpha: f32):
    i = ts.tile.linear_id()                    # this lane's number, over all groups
    if i < N:                                  # the last group may have lanes to spare
        y[i] = alpha * x[i] + y[i]


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    x, y, N = arrays.normal(100_003), arrays.normal(100_003), 100_003
    a, b = arrays.get(x), arrays.get(y)

    out = arrays.empty(N)
    copy(x, out)
    check("copy", out, a, 0.0)

    add(x, y, out)
    check("add", out, a + b, 1e-7)

    saxpy(x, y, 2.0)                           # y is changed in place
    check("saxpy", y, 2.0 * a + b, 1e-7)

    print("\nThe Tile IR of copy:")
    print(copy.inspect_ir("tile"))


if __name__ == "__main__":
    main()
