"""wgmma: asynchronous D[64, n] (+)= A[64, k] B[k, n] of a warpgroup (sm_90a).

B is read from shared memory by descriptor, A too ("SS") or from registers ("RS"). Lane l of warp w
holds rows 16 w + l / 4 and 8 on: D.(4 j) and D.(4 j + 1) columns 8 j + 2 (l % 4) and one on, D.(4 j
+ 2), D.(4 j + 3) the same of the lower row. Two f32 neighbours packed are an A register, so a
matmul feeds the next one without moving.

Order of a matmul: `wgmma_fence`, the instructions, `wgmma_commit`, later `wait`. The accumulator
may not be touched before the wait; `matmul` writes a whole k-block as one statement, so that no
compiler can put anything between (C7510 ... C7514: serialised).
"""

from __future__ import annotations

import zlib

from ....lazy_dataclass import dataclass
from ..instruction import Instruction, family, one_of


@dataclass(frozen=True)
class WgmmaForm:
    """k of an instruction (32 bytes of a row), accumulators, may operands be MN-major."""

    k: int
    accumulators: tuple[str, ...]
    transposes: bool = False


FORMS: dict[str, WgmmaForm] = {
    "bf16": WgmmaForm(16, ("f32",), True),
    "f16": WgmmaForm(16, ("f32", "f16"), True),
    "tf32": WgmmaForm(8, ("f32",)),
    "e4m3": WgmmaForm(32, ("f32", "f16")),
    "e5m2": WgmmaForm(32, ("f32", "f16")),
    "s8": WgmmaForm(32, ("s32",)),
    "u8": WgmmaForm(32, ("s32",)),
}
A_REGISTERS = 4  # of one instruction in the RS form, whatever the type
_ISA = "9.7.15 wgmma"

Instruction("wgmma_fence", "", "wgmma.fence.sync.aligned;", isa=f"{_ISA}.fence", effect="converge",
            cc="90a", single=True)
Instruction("wgmma_commit", "", "wgmma.commit_group.sync.aligned;", isa=f"{_ISA}.commit_group",
            effect="converge", cc="90a", single=True)


def accumulator(n: int, d: str) -> tuple[str, int]:
    """Register kind and count of D[64, n]."""
    return ("f32", n // 2) if d == "f32" else ("i32", n // 4) if d == "f16" else ("i32", n // 2)


def _check(n: int, a: str, b: str, d: str, majors: str) -> WgmmaForm:
    form = FORMS[one_of("a", a, FORMS)]
    one_of("b", b, ("e4m3", "e5m2") if a in ("e4m3", "e5m2") else (a,))
    one_of("d", d, form.accumulators)
    one_of("n", n, [8, 24, *range(16, 257, 16)] if d == "s32" else range(8, 257, 8))
    one_of("majors", majors, ("KK", "KM", "MK", "MM") if form.transposes else ("KK",))
    return form


def _statement(form: WgmmaForm, kinds: str, n: int, operands: tuple[str, str, str, str],
               majors: str) -> str:
    """One wgmma of D, A, B and the predicate scale-d. majors: of the operands in shared memory."""
    signs = "" if kinds.startswith("s32") else ", 1, 1"
    transposed = "".join(f", {int(m == 'M')}" for m in majors) if form.transposes else ""
    return (f"wgmma.mma_async.sync.aligned.m64n{n}k{form.k}.{kinds} {', '.join(operands)}"
            f"{signs}{transposed};")


@family(*({"n": 64, "a": t, "d": d} for t, form in FORMS.items() for d in form.accumulators),
        *({"n": 64, "a": t, "d": "s32" if t[1] == "8" else "f32", "registers_a": True}
          for t in FORMS),
        {"n": 256, "a": "bf16"}, {"n": 8, "a": "bf16", "majors": "MM"},
        {"n": 32, "a": "f16", "majors": "KM", "registers_a": True},
        {"n": 96, "a": "e4m3", "b": "e5m2"})
def wgmma(n: int, a: str, d: str = "f32", *, b: str = "", registers_a: bool = False,
          majors: str = "KK") -> Instruction:
    """(D, A, B, accumulate) -> D, one instruction; A and B are descriptors or 4 registers of A.

    majors: "K" or "M" for A and B: the axis along which the operand is contiguous (16-bit types).
    """
    b = b or a
    form, (kind, count) = _check(n, a, b, d, majors), accumulator(n, d)
    kinds = f"{d}.{a}.{b}"
    name = f"wgmma_m64n{n}k{form.k}_{kinds.replace('.', '_')}_{'RS' if registers_a else 'SS'}"
    left = f"a:i32*{A_REGISTERS}" if registers_a else "a:i64"
    return Instruction(
        f"{name}_{majors}", f"acc:{kind}*{count} <- acc, {left}, b:i64, accumulate:pred",
        _statement(form, kinds, n, ("$acc", "$a", "$b", "$accumulate"),
                   majors[1:] if registers_a else majors),
        isa=f"{_ISA}.mma_async", effect="converge", cc="90a", single=True)


@family(
    {"n": 256, "a": "bf16", "a_offsets": (0, 2, 4, 6), "b_offsets": (0, 2, 4, 6), "wait": 0},
    {"n": 128, "a": "bf16", "a_offsets": (0, 2), "b_offsets": (0, 2), "accumulate": "no"},
    {"n": 64, "a": "f16", "b_offsets": (0, 128), "majors": "KM"},
    {"n": 128, "a": "e4m3", "a_offsets": (0, 2), "b_offsets": (0, 2), "accumulate": "flag",
     "rows": (0, 512), "wait": 1},
    {"n": 64, "a": "tf32", "a_offsets": (0, 2), "b_offsets": (0, 2)},
    {"n": 64, "a": "s8", "d": "s32", "a_offsets": (0, 2), "b_offsets": (0, 2)},
)
def matmul(n: int, a: str, d: str = "f32", *, b: str = "", b_offsets: tuple[int, ...],
           a_offsets: tuple[int, ...] = (), rows: tuple[int, ...] = (0,), majors: str = "KK",
           accumulate: str = "yes", wait: int | None = None) -> Instruction:
    """A whole k-block as one statement: fence, its wgmmas, commit, and perhaps a wait.

    (D, A, B) -> D. accumulate "no": (A, B) -> D, the first step overwrites and D needs no zeros;
    "flag": a last argument says whether the first step accumulates.
    b_offsets, a_offsets: added to the descriptors at each k step, in their 16-byte units
    (descriptor.steps); without a_offsets A is in registers, 4 for each step.
    rows: descriptor offset of each 64-row block of A; D has their accumulators one after another.
    wait: at most that many groups stay in flight behind this one.
    """
    b = b or a
    one_of("accumulate", accumulate, ("yes", "no", "flag"))
    form, (kind, count) = _check(n, a, b, d, majors), accumulator(n, d)
    steps, kinds = len(b_offsets), f"{d}.{a}.{b}"
    if a_offsets and len(a_offsets) != steps or not a_offsets and rows != (0,):
        one_of("len(a_offsets)", len(a_offsets), (steps,))
    first = "$accumulate" if accumulate == "flag" else "first"
    lines = [".reg .pred first, on;", ".reg .b64 at_a, at_b;", "wgmma.fence.sync.aligned;",
             f"setp.ne.b32 first, {int(accumulate == 'yes')}, 0;", "setp.ne.b32 on, 1, 0;"]
    for step, b_offset in enumerate(b_offsets):
        lines.append(f"add.s64 at_b, $b, {b_offset};")
        for block, row in enumerate(rows):
            into = _registers("acc", block * count, count)
            left = _registers("a", step * A_REGISTERS, A_REGISTERS)
            if a_offsets:
                left = "at_a"
                lines.append(f"add.s64 at_a, $a, {a_offsets[step] + row};")
            lines.append(_statement(form, kinds, n, (into, left, "at_b", "on" if step else first),
                                    majors if a_offsets else majors[1:]))
    lines.append("wgmma.commit_group.sync.aligned;")
    if wait is not None:
        lines.append(f"wgmma.wait_group.sync.aligned {wait};")
    left = "a:i64" if a_offsets else f"a:i32*{A_REGISTERS * steps}"
    result = f"acc:{kind}*{count * len(rows)}"
    operands = f"{result} <- {'acc, ' * (accumulate != 'no')}{left}, b:i64" \
        + ", accumulate:pred" * (accumulate == "flag")
    text = "\n".join(lines)
    digest = zlib.crc32(text.encode())
    return Instruction(
        f"wgmma_matmul_m{64 * len(rows)}n{n}k{form.k * steps}_{kinds.replace('.', '_')}_"
        f"{digest:08x}", operands, text, isa=f"{_ISA}.mma_async", effect="converge", cc="90a",
        single=True)


def _registers(name: str, start: int, count: int) -> str:
    return "{" + ", ".join(f"${name}.{start + i}" for i in range(count)) + "}"


@family({"pending": 0, "count": 128}, {"pending": 1, "count": 64},
        {"pending": 0, "count": 64, "kind": "i32"})
def wait(pending: int, count: int, kind: str = "f32") -> Instruction:
    """Until at most `pending` groups are in flight; the accumulator passes through.

    Nothing that uses the result can move before the wait. The PTX names no operand, so ptxas may
    still move independent work across.
    """
    one_of("kind", kind, ("f32", "i32"))
    return Instruction(f"wgmma_wait_{pending}_{kind}x{count}", f"x:{kind}*{count} <- x",
                       f"wgmma.wait_group.sync.aligned {pending};", isa=f"{_ISA}.wait_group",
                       effect="converge", cc="90a", single=True)
