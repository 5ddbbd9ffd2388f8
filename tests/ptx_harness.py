"""Kernels around single PTX records, for tests that need no GPU."""

from __future__ import annotations

import pytest

from tessera.errors import UnsupportedTargetError
from tessera.runtime.target import Target
from tessera.tile.cuda.instruction import Instruction, Operand

# Kernel parameters by register kind; a predicate is an int.
PARAMETERS = {"p": "i64", "x": "i32", "y": "f32", "z": "f64"}
SOURCE = {"i64": "p", "i32": "x", "i16": "x", "f32": "y", "f64": "z", "pred": "x"}


def require_compiler() -> None:
    """Skips the test or the module where the compiler or the assembler is not installed, and says
    which."""
    from tessera.runtime.ptxas import assembler

    try:
        assembler()
        from tessera.tile.cuda import numba_gate  # noqa: F401
    except UnsupportedTargetError as error:
        pytest.skip(str(error), allow_module_level=True)


def kernel_source(instruction: Instruction) -> str:
    """One call with run-time arguments; every result is stored."""
    head = ["from tessera.tile.cuda import use",
            "from tessera.tile.cuda.intrinsics import fragments",
            "from tessera.tile.cuda.ptx import memory",
            f"called = use({instruction.name!r})"]
    args = [_argument(head, i, o) for i, o in enumerate(instruction.args)]
    call, body = f"called({', '.join(args)})", []
    names = [f"r{i}" for i in range(len(instruction.results))]
    body.append(f"{', '.join(names)} = {call}" if names else call)
    if "wgmma.mma_async" in instruction.text:
        body = _in_order(head, instruction, body)
    for i, (name, o) in enumerate(zip(names, instruction.results, strict=True)):
        body += _stores(head, i, name, o)
    return "\n".join([*dict.fromkeys(head), "def kernel(p, x, y, z):",
                      *(f"    {line}" for line in body), ""])


def _in_order(head: list[str], instruction: Instruction, body: list[str]) -> list[str]:
    """A matmul between the fence, the commit and the wait that it needs, and does not write."""
    (acc,), whole = instruction.results, "wgmma.commit_group" in instruction.text
    head += ["from tessera.tile.cuda.ptx import wgmma", "fence = use('wgmma_fence')",
             "commit = use('wgmma_commit')",
             f"wait = use(wgmma.wait(0, {acc.count}, {acc.kind!r}))"]
    return [*([] if whole else ["fence()"]), *body, *([] if whole else ["commit()"]),
            "r0 = wait(r0)"]


def _argument(head: list[str], i: int, o: Operand) -> str:
    kind = "i32" if o.kind in ("pred", "i16") else o.kind
    value = f"{SOURCE[o.kind]} + {i}"  # registers of their own: the assembler counts on it
    if not o.count:
        return value
    head.append(f"full{i} = use(fragments.full({kind!r}, {o.count}))")
    return f"full{i}({value})"


def _stores(head: list[str], i: int, name: str, o: Operand) -> list[str]:
    element = {"f32": "f32", "f64": "f64", "i64": "b64"}.get(o.kind, "b32")
    head.append(f"store_{element} = use(memory.st('global', {element!r}, cache='wb'))")
    if not o.count:
        return [f"store_{element}(p, {name})"]
    head += [f"pick{i}_{j} = use(fragments.pick({j}))" for j in range(o.count)]
    return [f"store_{element}(p + {8 * j}, pick{i}_{j}({name}))" for j in range(o.count)]


def compile_sample(instruction: Instruction, target: Target):
    from tessera.tile.cuda.numba_gate import compile_source

    return compile_source(kernel_source(instruction), f"<{instruction.name}>", "kernel",
                          list(PARAMETERS.values()), target, threads=128, lineinfo=False)
