"""Exchange within a warp: shuffles, votes, matches, reductions, and the election of one lane."""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

# The clamp operand: with width 32, up stops at lane 0 and the others at lane 31.
_CLAMP = {"up": 0, "down": 31, "bfly": 31, "idx": 31}


@family(*({"mode": m, "kind": k} for m in _CLAMP for k in ("i32", "f32")),
        {"mode": "bfly", "kind": "f32", "width": 4})
def shfl(mode: str, kind: str = "i32", *, width: int = 32) -> Instruction:
    """(x, lane or distance) -> the other lane's x, in all 32 lanes; segments of `width` lanes.

    idx also tells the assembler that a value is the same in the whole warp.
    """
    one_of("mode", mode, _CLAMP)
    one_of("kind", kind, ("i32", "f32"))
    one_of("width", width, (2, 4, 8, 16, 32))
    clamp = (32 - width) << 8 | _CLAMP[mode]
    narrow = f"_w{width}" if width < 32 else ""
    return Instruction(f"shfl_{mode}_{kind}{narrow}", f"d:{kind} <- x:{kind}, lane:i32",
                       f"shfl.sync.{mode}.b32 $d, $x, $lane, {clamp}, -1;", isa="9.7.9 shfl.sync",
                       effect="converge")


for _mode in ("any", "all", "uni"):
    Instruction(f"vote_{_mode}", "d:pred <- p:pred", f"vote.sync.{_mode}.pred $d, $p, -1;",
                isa="9.7.13 vote.sync", effect="converge")
Instruction("vote_ballot", "d:i32 <- p:pred", "vote.sync.ballot.b32 $d, $p, -1;",
            isa="9.7.13 vote.sync", effect="converge")
Instruction("match_any", "d:i32 <- x:i32, mask:i32", "match.any.sync.b32 $d, $x, $mask;",
            isa="9.7.13 match.sync", effect="converge")
Instruction("match_all", "d:i32, same:pred <- x:i32, mask:i32",
            "match.all.sync.b32 $d|$same, $x, $mask;", isa="9.7.13 match.sync", effect="converge")
Instruction("active_mask", "d:i32 <- ", "activemask.b32 $d;", isa="9.7.13 activemask",
            effect="converge")
# One lane of the full warp; the assembler knows that the branch on it is taken by one.
Instruction("elect", "lane:i32, chosen:pred <- ", "elect.sync $lane|$chosen, -1;",
            isa="9.7.13 elect.sync", effect="converge", cc="90")

for _op, _type in (("add", "s32"), ("min", "s32"), ("max", "s32"), ("min", "u32"), ("max", "u32"),
                   ("and", "b32"), ("or", "b32"), ("xor", "b32")):
    Instruction(f"redux_{_op}_{_type}", "d:i32 <- x:i32", f"redux.sync.{_op}.{_type} $d, $x, -1;",
                isa="9.7.13 redux.sync", effect="converge", cc="80")
