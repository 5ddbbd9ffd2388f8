"""A kernel with a race, the report that finds it, and the kernel without it.

    python examples/08_debugging_a_race.py [--device cuda]

A race may give the right result a thousand times. So the interpreter does not wait for a wrong one:
with TESSERA_DEBUG=1, or `ts.config.scope(debug=True)`, it follows every element of memory and stops
at two accesses that nothing orders, with both lines.
"""

import tessera as ts
from tessera import Tensor, bf16, f32


@ts.kernel
def racy_gram(A: Tensor["M", "K", bf16], C: Tensor["M", "M", f32], BK=32):
    panel = ts.tile.alloc_shared((64, BK), bf16, swizzle="xor")
    acc = ts.tile.zeros((64, 64))
    for k in range(0, K, BK):
        ts.tile.cp_async(panel, A[0:64, k:k+BK])
        ts.tile.barrier()                      # the copy is complete, for all lanes
        acc = ts.tile.dot(panel, panel.T, acc)
    C[0:64, 0:64] = acc


@ts.kernel
def gram(A: Tensor["M", "K", bf16], C: Tensor["M", "M", f32], BK=32):
    panel = ts.tile.alloc_shared((64, BK), bf16, swizzle="xor")
    acc = ts.tile.zeros((64, 64))
    for k in range(0, K, BK):
        ts.tile.cp_async(panel, A[0:64, k:k+BK])
        ts.tile.barrier()
        acc = ts.tile.dot(panel, panel.T, acc)
        ts.tile.barrier()                      # all have read it: it may be overwritten
    C[0:64, 0:64] = acc


def main() -> None:
    from arrays import Arrays, check

    arrays = Arrays(__doc__)
    host = arrays.on_host()                    # races are looked for in the interpreter
    a, c = host.normal(50, 200, dtype=bf16), host.empty(50, 50)
    with ts.config.scope(debug=True):
        try:
            racy_gram(a, c)
        except ts.TesseraError as error:
            print(f"racy_gram is stopped:\n\n{error}\n")
        else:
            raise SystemExit("the race was not found")
        gram(a, c)
        print("gram runs under the same checks.\n")

    a, c = arrays.normal(64, 1000, dtype=bf16), arrays.empty(64, 64)
    gram(a, c)
    check("gram", c, arrays.get(a) @ arrays.get(a).T, 1e-5)


if __name__ == "__main__":
    main()
