"""ldmatrix, stmatrix: 8x8 tiles of 16-bit elements between shared memory and mma's registers.

Lane l gives the address of row l % 8 of tile l / 8; lanes beyond count * 8 are ignored. Register i
of a lane holds row lane / 4, columns 2 (lane % 4) and one on, of tile i; transposed with trans.
A row of a tile is 16 bytes, aligned.
"""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

_CASES = tuple({"count": n, "trans": t} for n in (1, 2, 4) for t in (False, True))


def _registers(count: int) -> tuple[str, str]:
    one_of("count", count, (1, 2, 4))
    return (f"x:i32*{count}", "$x") if count > 1 else ("x:i32", "{$x}")


@family(*_CASES)
def ldmatrix(count: int, *, trans: bool = False) -> Instruction:
    """`count` tiles at the lanes' shared addresses."""
    operands, text = _registers(count)
    return Instruction(f"ldmatrix_x{count}{'_trans' * trans}", f"{operands} <- at:i32",
                       f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 "
                       f"{text}, [$at];", isa="9.7.14 ldmatrix", effect="converge")


@family(*_CASES)
def stmatrix(count: int, *, trans: bool = False) -> Instruction:
    """The reverse: (address, registers)."""
    operands, text = _registers(count)
    return Instruction(f"stmatrix_x{count}{'_trans' * trans}", f"at:i32, {operands}",
                       f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 "
                       f"[$at], {text};", isa="9.7.14 stmatrix", effect="converge", cc="90")


Instruction("movmatrix_trans", "d:i32 <- x:i32", "movmatrix.sync.aligned.m8n8.trans.b16 $d, $x;",
            isa="9.7.14 movmatrix", effect="converge")
