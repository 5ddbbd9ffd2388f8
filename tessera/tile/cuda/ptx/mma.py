"""mma.sync: D = A B + C of one warp, operands and accumulator in registers.

Shapes m16 n8, k by type: 32 bytes of k a row (k16 for 16-bit types, k8 tf32, k32 8-bit types, k64
int4). A: 4 registers, B: 2, C and D: 4 (f16 accumulators: 2). Lane l holds, with g = l / 4 and
t = l % 4 and e elements in a 32-bit register:
    A.0 row g, A.1 row g + 8, columns e t ... e t + e - 1; A.2, A.3 the same rows, 4 e columns on
    B.0 rows e t ..., B.1 4 e rows on, column g
    C.0, C.1 row g, C.2, C.3 row g + 8, columns 2 t, 2 t + 1
(PTX ISA 9.7.14, figures of m16n8k16 and its relatives.)
"""

from __future__ import annotations

from ....lazy_dataclass import dataclass
from ..instruction import Instruction, family, one_of


@dataclass(frozen=True)
class MmaForm:
    """k of the instruction, its accumulators, and the oldest target."""

    k: int
    accumulators: tuple[str, ...]
    cc: str


FORMS: dict[str, MmaForm] = {
    "f16": MmaForm(16, ("f32", "f16"), "80"),
    "bf16": MmaForm(16, ("f32",), "80"),
    "tf32": MmaForm(8, ("f32",), "80"),
    "e4m3": MmaForm(32, ("f32",), "89"),
    "e5m2": MmaForm(32, ("f32",), "89"),
    "s8": MmaForm(32, ("s32",), "80"),
    "u8": MmaForm(32, ("s32",), "80"),
    "s4": MmaForm(64, ("s32",), "80"),
    "u4": MmaForm(64, ("s32",), "80"),
}
# Registers of C and D.
ACCUMULATOR = {"f32": "f32*4", "f16": "i32*2", "s32": "i32*4"}


@family(*({"a": t, "d": d} for t, form in FORMS.items() for d in form.accumulators),
        {"a": "e4m3", "b": "e5m2"}, {"a": "u8", "b": "s8", "d": "s32"},
        {"a": "f16", "k": 8}, {"a": "bf16", "k": 8}, {"a": "tf32", "k": 4})
def mma(a: str, d: str = "f32", *, b: str = "", k: int = 0) -> Instruction:
    """(A, B, C) -> D. `k`: half the full one gives the smaller instruction with half the registers.

    f16 with k 8 is the only one on sm_75. fp8 matmuls accumulate with about 14 bits on Hopper;
    sums of more than 128 terms in f32 are added by the caller.
    """
    form = FORMS[one_of("a", a, FORMS)]
    b = b or a
    one_of("b", b, [t for t, f in FORMS.items() if f.k == form.k and f.accumulators[0]
                    == form.accumulators[0] and (t == a or form.k > 16)])
    one_of("d", d, form.accumulators)
    k = one_of("k", k or form.k, (form.k, form.k // 2))
    half = k != form.k
    kinds = f"{d}.{a}.{b}.{d}"
    old = a == "f16" and half
    return Instruction(
        f"mma_m16n8k{k}_{kinds.replace('.', '_')}",
        f"d:{ACCUMULATOR[d]} <- a:i32*{2 if half else 4}, b:i32{'' if half else '*2'}, "
        f"c:{ACCUMULATOR[d]}",
        f"mma.sync.aligned.m16n8k{k}.row.col.{kinds} $d, $a, "
        f"{'{$b}' if half else '$b'}, $c;",
        isa="9.7.14 mma", effect="converge", cc="75" if old else form.cc)
