"""Accumulators in registers that bear names of their own for the whole kernel, in place of values.

What a loop carries while a matmul still writes it, or what branches join, LLVM copies, and ptxas
then waits for each matmul before the next (C7515). Registers that are declared by name in the
kernel's outermost block are copied by nobody: `declare_held` first, then `clear_held`,
`held_matmul` and `take_held`, which stand in order as they are written.
"""

from __future__ import annotations

from ..instruction import Instruction, family

_ISA = "9.7.15 wgmma"


def _names(name: str, count: int, first: int = 0) -> list[str]:
    return [f"{name}_{i}" for i in range(first, first + count)]


@family()
def declare_held(name: str, count: int) -> Instruction:
    """`count` f32 registers, once in a kernel and in front of what uses them."""
    registers = ", ".join(_names(f"held_{name}", count))
    return Instruction(f"declare_{name}x{count}", "", f".reg .f32 {registers};", isa="5.1 .reg",
                       cc="90a", single=True, outermost=True)


@family()
def clear_held(name: str, count: int) -> Instruction:
    """0 in all of them."""
    lines = [f"mov.f32 {x}, 0f00000000;" for x in _names(f"held_{name}", count)]
    return Instruction(f"clear_{name}x{count}", "", "\n".join(lines), isa="9.7.9 mov", cc="90a",
                       single=True)


@family()
def held_matmul(name: str, n: int, a: str, *, b_offsets: tuple[int, ...]) -> Instruction:
    """(A, B): D[64, n] += A B as one statement: fence, its wgmmas and commit. A is in registers, 4
    for each step, B is in shared memory, contiguous along n."""
    count = n // 2
    lines = [".reg .pred on;", ".reg .b64 at_b;", "wgmma.fence.sync.aligned;",
             "setp.ne.b32 on, 1, 0;"]
    into = "{" + ", ".join(_names(f"held_{name}", count)) + "}"
    for step, offset in enumerate(b_offsets):
        left = "{" + ", ".join(f"$a.{4 * step + i}" for i in range(4)) + "}"
        lines += [f"add.s64 at_b, $b, {offset};",
                  f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{a}.{a} {into}, {left}, at_b, on, "
                  "1, 1, 1;"]
    lines.append("wgmma.commit_group.sync.aligned;")
    return Instruction(f"matmul_{name}_n{n}_{a}_k{16 * len(b_offsets)}",
                       f"a:i32*{4 * len(b_offsets)}, b:i64", "\n".join(lines),
                       isa=f"{_ISA}.mma_async", effect="converge", cc="90a", single=True)


@family()
def held_product(name: str, n: int, a: str, *, a_offsets: tuple[int, ...],
                 b_offsets: tuple[int, ...], majors: str = "KK", accumulate: bool = False
                 ) -> Instruction:
    """(A, B): D[64, n] = A B, or += A B, of operands in shared memory."""
    lines = [".reg .pred on;", ".reg .b64 at_a, at_b;", "wgmma.fence.sync.aligned;",
             f"setp.ne.b32 on, {int(accumulate)}, 0;"]
    into = "{" + ", ".join(_names(f"held_{name}", n // 2)) + "}"
    turned = ", ".join(str(int(m == "M")) for m in majors)
    for step, (left, right) in enumerate(zip(a_offsets, b_offsets, strict=True)):
        lines += [f"add.s64 at_a, $a, {left};", f"add.s64 at_b, $b, {right};",
                  f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{a}.{a} {into}, at_a, at_b, on, "
                  f"1, 1, {turned};"]
        if not step and not accumulate:
            lines.append("setp.ne.b32 on, 1, 0;")
    lines.append("wgmma.commit_group.sync.aligned;")
    return Instruction(f"product_{name}_n{n}_{a}_k{16 * len(b_offsets)}_{majors}{accumulate:d}",
                       "a:i64, b:i64", "\n".join(lines), isa=f"{_ISA}.mma_async",
                       effect="converge", cc="90a", single=True)


@family()
def take_held(name: str, count: int, first: int = 0) -> Instruction:
    """`count` of them from the number `first` on as a value, behind the wait for their matmuls."""
    lines = [f"mov.f32 $x.{i}, {r};" for i, r in enumerate(_names(f"held_{name}", count, first))]
    return Instruction(f"take_{name}_{first}x{count}", f"x:f32*{count} <- ", "\n".join(lines),
                       isa="9.7.9 mov", cc="90a", single=True)


@family()
def wait_held(pending: int) -> Instruction:
    """Until at most `pending` groups are in flight."""
    return Instruction(f"wait_held_{pending}", "", f"wgmma.wait_group.sync.aligned {pending};",
                       isa=f"{_ISA}.wait_group", effect="converge", cc="90a", single=True)
