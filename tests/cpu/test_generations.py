"""A generation that is added is compiled for by its record: every number of it decides something,
and no number of a chip stands elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import additions
import hopper_programs as kernels
import tessera as ts
from ptx_harness import require_compiler
from registries import restored
from tessera import Tensor, bf16, f16, f32, fp8_e4m3
from tessera.errors import UnsupportedTargetError
from tessera.graph.cuda.levels import program_of
from tessera.kernels.attention_backward import attention_keys
from tessera.kernels.conv import Geometry, conv_forward
from tessera.kernels.row_blocks import routine_blocks
from tessera.runtime.generations import GENERATIONS, Generation
from tessera.runtime.occupancy import occupancy
from tessera.runtime.target import Target, parse_target, target_of_device
from tessera.tile.cuda.compile import EmittedKernel, emit_kernel
from tessera.tile.cuda.emit.emitter import ArgumentFacts
from tessera.tile.cuda.emit.matmul import is_accumulator
from tessera.tile.ir.ir import Op, walk
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.tuning.gpus import gpu

FACTS = ArgumentFacts(divisible=frozenset("MNKSDBHTEC"),
                      aligned=frozenset("ABCQKVGXWYRxy") | {"lse", "delta", "dK", "dV"})
PRETENDED = "sm_91a"


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored():
        yield


def ones(dtype, *shape):
    return ts.ones(shape, dtype)


def emitted(kernel, *args, target: str = PRETENDED, schedule=None, **kwargs) -> EmittedKernel:
    return emit_kernel(kernel.lower(*args, **kwargs), 128, parse_target(target), FACTS,
                       schedule=schedule)


def text(made: EmittedKernel) -> str:
    """What was decided, how large it is, and the source."""
    return "\n".join([*made.emitted.notes, f"{made.threads} threads, {made.grid}",
                      made.emitted.source])


def gemm(kernel=kernels.gemm_nt, m=256, n=256, k=256, target=PRETENDED, **blocks) -> str:
    return text(emitted(kernel, ones(bf16, m, k), ones(bf16, n, k), ones(bf16, m, n),
                        target=target, **blocks))


def attention(causal=False, target=PRETENDED) -> str:
    x = ones(bf16, 4, 512, 128)
    return text(emitted(kernels.attention, x, x, x, x, 0.1, target=target, causal=causal))


def gradient(target=PRETENDED) -> str:
    x, y, r = ones(bf16, 4, 512, 64), ones(bf16, 4, 512, 128), ones(f32, 4, 512)
    return text(emitted(attention_keys, x, x, y, y, r, r, x, y, 0.1, target=target, BN=80))


# --- a generation is added --------------------------------------------------------------------
def test_a_generation():
    with pytest.raises(UnsupportedTargetError, match="no target 'sm_91a'"):
        parse_target(PRETENDED)
    new = additions.add_generation()
    assert parse_target(PRETENDED).generation is new
    assert target_of_device((9, 1)) == parse_target(PRETENDED)
    near = gpu(PRETENDED)
    assert near.generation is new and near.shared_bytes == 99 << 10
    with pytest.raises(UnsupportedTargetError, match="sm_90a, .*sm_91a"):
        parse_target("sm_1")
    with pytest.raises(ValueError, match="'sm_91a' is declared twice"):
        additions.add_generation()
    with pytest.raises(UnsupportedTargetError, match="limits of sm_93 are not known"):
        _ = Target(9, 3).generation


def test_schedules_get_smaller_and_what_does_not_fit_takes_another_form():
    additions.add_generation()
    assert "ring a_b: 6 x 32768" in gemm(target="sm_90a") and "ring a_b: 3 x 32768" in gemm()
    assert "set_registers(232, 'inc')" in gemm(target="sm_90a")
    assert "set_registers(208, 'inc')" in gemm()
    half = ones(f16, 256, 256)
    said = text(emitted(f16_gemm, half, half, half))
    assert "not warp-specialised: wgmma does not multiply f16" in said
    assert "by mma.sync f16" in said and "128 threads, groups" in said
    assert "by wgmma" in text(emitted(f16_gemm, half, half, half, target="sm_90a"))


def test_a_graph_for_it_has_smaller_blocks():
    from tessera.graph.cuda.levels import text_of

    additions.add_generation(lambda g: replace(g, group_shared_bytes=72 << 10))
    graph = ts.jit(lambda a, b: a @ b).graph(*(ts.Tensor[4096, 4096, bf16],) * 2)
    small, large = (text_of("schedule", graph, target) for target in (PRETENDED, "sm_90a"))
    assert "block 128x64x64  stages 2" in small and "block 128x256x64  stages 4" in large
    assert "ring a_b: 2 x 24576 bytes" in text_of("target", graph, PRETENDED)


def test_groups_of_threads_find_their_shared_memory_too():
    additions.add_generation(lambda g: replace(g, group_shared_bytes=40 << 10))
    assert staged(target="sm_90a").startswith("3 stages 3 stages")
    assert staged().startswith("1 stages 1 stages")


def test_machine_code_for_another_record_has_another_name():
    """A generation that a program registers is no part of our sources, which the name hashes."""
    from tessera.tile.launch.machine_code import CompileRequest

    function, names = decoded.lower(ones(fp8_e4m3, 128), ones(f32, 128)), []
    for size in (99, 99, 98):
        with restored():
            additions.add_generation(lambda g, size=size: replace(g, group_shared_bytes=size << 10))
            request = CompileRequest(128, ts.Schedule(), parse_target(PRETENDED))
            names.append(request.key(function))
            text = repr(parse_target(PRETENDED).generation)
    assert names[0] == names[1] != names[2]
    assert "frozenset" not in text and " at 0x" not in text  # else each process has its own names


def test_products_without_tensor_cores_have_the_layout_of_threads():
    additions.add_generation(lambda g: changed(without_wgmma(g), "warp_matmul.formats",
                                               ("f16",)))
    layouts = []
    for kernel, dtype in ((kernels.gemm_nt, bf16), (f16_gemm, f16)):
        made = emitted(kernel, *(ones(dtype, 256, 256),) * 3)
        layouts += [n.outs[0].type for n in walk(made.function.body)
                    if isinstance(n, Op) and n.name == "matmul"][:1]
    assert [is_accumulator(RegisterLayout.parse(t.layout, t.shape)) for t in layouts] == [
        False, True]


def test_the_cost_model_counts_by_its_form():
    from tessera.tile.passes.operation_counts import MatmulShape
    from tessera.tile.tuning.cost import groups_at_once, shared_traffic

    additions.add_generation(lambda g: replace(without_wgmma(g), groups=3))
    matmul = MatmulShape("f16", 128, 128, 64, 16)
    assert shared_traffic(matmul, 4, gpu("sm_90a")) == (128 + 2 * 128) * 64 * 2
    assert shared_traffic(matmul, 4, gpu(PRETENDED)) == (2 * 128 + 2 * 128) * 64 * 2
    small = decoded.lower(ones(fp8_e4m3, 128), ones(f32, 128))
    assert groups_at_once(small, ts.Schedule(warps=1), gpu(PRETENDED)) == 3


def test_its_ptx_comes_out_where_the_instructions_are_the_same():
    """The pretended chip's program, in the instructions of the one that it was made from."""
    require_compiler()
    from tessera.tile.cuda.build import build

    additions.add_generation()
    made = emitted(kernels.gemm_nt, *(ones(bf16, 256, 256),) * 3)
    e = made.emitted
    assert e.shared_bytes <= GENERATIONS[PRETENDED].group_shared_bytes
    built = build(e.source, e.name, tuple(p.abi for p in e.parameters), parse_target("sm_90a"),
                  threads=made.threads, shared_bytes=e.shared_bytes)
    assert "setmaxnreg.inc.sync.aligned.u32 \t208" in built.ptx.replace(" 208", " \t208")
    assert "wgmma.mma_async" in built.ptx and not built.resources.spills


# --- every number decides something -----------------------------------------------------------
@ts.kernel
def f16_gemm(A: ts.Tensor["M", "K", f16], B: ts.Tensor["N", "K", f16], C: ts.Tensor["M", "N", f16],
             BM=128, BN=128, BK=64):
    m, n = ts.tile.group_id(0) * BM, ts.tile.group_id(1) * BN
    acc = ts.tile.zeros((BM, BN))
    for k in range(0, K, BK):
        a = ts.tile.load(A[m:m + BM, k:k + BK])
        acc = ts.tile.dot(a, ts.tile.load(B[n:n + BN, k:k + BK]).T, acc)
    C[m:m + BM, n:n + BN] = acc


@ts.kernel
def fp8_gemm(A: ts.Tensor["M", "K", fp8_e4m3], B: ts.Tensor["N", "K", fp8_e4m3],
             C: ts.Tensor["M", "N", f32]):
    m, n = ts.tile.group_id(0) * 64, ts.tile.group_id(1) * 64
    acc = ts.tile.zeros((64, 64))
    for k in range(0, K, 256):
        a = ts.tile.load(A[m:m + 64, k:k + 256])
        acc = ts.tile.dot(a, ts.tile.load(B[n:n + 64, k:k + 256]).T, acc)
    C[m:m + 64, n:n + 64] = acc


def fp8() -> str:
    return text(emitted(fp8_gemm, *(ones(fp8_e4m3, 256, 256),) * 2, ones(f32, 256, 256)))


@ts.kernel
def decoded(x: ts.Tensor["N", fp8_e4m3], y: ts.Tensor["N", f32]):
    y[0:128] = ts.tile.cast(ts.tile.load(x[0:128]), f32)


@ts.kernel
def summed(x: ts.Tensor["N", f32], y: ts.Tensor["N", f32]):
    ts.tile.atomic_add(y[0:512], ts.tile.load(x[0:512]))


@ts.kernel
def halved(x: ts.Tensor["N", bf16], y: ts.Tensor["N", bf16]):
    a = ts.tile.cast(ts.tile.load(x[0:512]), f32)
    b = ts.tile.cast(ts.tile.cast(a * a, bf16), f32)
    y[0:512] = ts.tile.cast(ts.tile.cast(ts.tile.cast(b + a, bf16), f32) * a, bf16)


@ts.kernel
def waiting(x: ts.Tensor["N", f32]):
    ts.tile.grid_dependency_wait()
    x[0:512] = ts.tile.full((512,), 1.0)


def waits() -> bool:
    return emitted(waiting, ones(f32, 512)).emitted.dependent


def held(threads=128, registers=32, shared_bytes=0) -> str:
    return str(occupancy(PRETENDED, threads=threads, registers=registers,
                         shared_bytes=shared_bytes))


def shared_rows() -> int:
    return routine_blocks(100, 1 << 16, 16, parse_target(PRETENDED).generation).groups


def decode_parts() -> int:
    types = Tensor[1, 32, 1, 256, bf16], *(Tensor[1, 8, 1024, 256, bf16],) * 2
    plan = str(program_of(ts.jit(ts.attention).graph(*types), PRETENDED).plan)
    return int(re.search(r"call decode_cluster\(.* P=(\d+)", plan).group(1))


def staged(target=PRETENDED) -> str:
    made = emitted(kernels.gemm_nt, *(ones(bf16, 256, 256),) * 3, target=target,
                   schedule=ts.Schedule(warps=4, unit="mma"))
    return " ".join(f"{n.attr['stages']} stages" for n in walk(made.function.body)
                    if isinstance(n, Op) and n.name == "allocate") + text(made)


def convolved() -> str:
    same = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (8, 8), (8, 8))
    return text(emitted(conv_forward, ones(bf16, 64, 64), ones(bf16, 64, 576), ones(bf16, 64, 64),
                        same))


def without_wgmma(g: Generation) -> Generation:
    return replace(g, warpgroup_matmul=None)


@dataclass(frozen=True)
class Field:
    """A field with another value, and what is then said that was not before. base: what else is
    changed, in both."""

    value: Any
    probe: Callable[[], str]
    says: str
    base: Callable[[Generation], Generation] = lambda g: g


FORM, KNOBS = "warpgroup_matmul", "warpgroup_matmul.defaults"
FIELDS: dict[str, Field] = {
    "groups": Field(5, held, "5 groups"),
    "warps": Field(8, held, "2 groups, 8 of 8 warps"),
    "shared_bytes": Field(64 << 10, lambda: held(shared_bytes=31 << 10), "2 groups"),
    "group_shared_bytes": Field(80 << 10, gemm, "ring a_b: 2 x 32768"),
    "registers": Field(32768, lambda: held(registers=128), "2 groups"),
    "register_unit": Field(512, lambda: held(registers=40), "10 groups"),
    "thread_registers": Field(31, held, "a thread at most 31 registers"),
    "group_threads": Field(64, held, "1 to 64 threads"),
    "shared_unit": Field(64 << 10, lambda: held(shared_bytes=1024), "2 groups"),
    "reserved_bytes": Field(32 << 10, lambda: held(shared_bytes=1024), "4 groups"),
    "async_copies": Field(False, staged, "go through registers"),
    "ring_stages": Field(2, staged, "2 stages 2 stages"),
    "converts": Field((), lambda: text(emitted(decoded, ones(fp8_e4m3, 128),
                                                        ones(f32, 128))), "0.0, ''))"),
    "dependent_launches": Field(False, lambda: f"dependent: {waits()}", "dependent: False"),
    "cluster_groups": Field(1, lambda: f"groups of a cluster: {shared_rows()}",
                            "groups of a cluster: 1"),
    "most_cluster_groups": Field(8, lambda: f"parts of a cluster: {decode_parts()}",
                                 "parts of a cluster: 8"),
    "bf16_pairs": Field(False, lambda: text(emitted(halved, ones(bf16, 512), ones(bf16, 512))),
                        "= to_bf16("),
    "vector_sums": Field(False, lambda: text(emitted(summed, ones(f32, 512), ones(f32, 512))),
                         "0, 1, ("),
    "warp_matmul.formats": Field(("f16",), gemm, "by threads", without_wgmma),
    "warp_matmul.step_bytes": Field(
        16, lambda: text(emitted(f16_gemm, *(ones(f16, 256, 256),) * 3)), ", True))",
        without_wgmma),
    "warp_matmul.short_sums": Field((), fp8, "False, False))", without_wgmma),
    "warp_matmul.longest_sum": Field(256, fp8, "False, False, 256))", without_wgmma),
    FORM: Field(None, gemm, "sm_91a has no wgmma"),
    f"{FORM}.operands": Field({}, gemm, "wgmma does not multiply bf16"),
    f"{FORM}.rows": Field(128, lambda: gemm(BM=64), "64 rows, not a multiple of 128"),
    f"{FORM}.most_columns": Field(64, gemm, "multiples of 8 up to 64 are done"),
    f"{FORM}.column_step": Field(256, gemm, "multiples of 256 up to 256 are done"),
    f"{FORM}.step_bytes": Field(64, gemm, "b_offsets=(0, 4)"),
    f"{FORM}.registers": Field({1: None}, gemm, "256 threads, persistent"),
    f"{FORM}.most_registers": Field(
        {1: (255, 255), 2: (40, 232)}, gradient, "overlap=1"),
    f"{FORM}.copies.most_box": Field(64, gemm, "has 128 rows; a copy brings 64"),
    f"{FORM}.copies.alignment_bytes": Field(64, gemm, "may not be multiples of 64 bytes"),
    f"{FORM}.copies.most_corner": Field(0, convolved, "padding of at most 0 pixels, not 1"),
    f"{FORM}.copies.most_offset": Field(1, convolved, "window of at most 1 pixels, not 2"),
    f"{FORM}.copies.most_stride": Field(0, convolved, "stride of at most 0 pixels, not 1"),
    f"{KNOBS}.stages": Field((2, 1), gemm, "ring a_b: 2 x 32768",
                             lambda g: changed(g, f"{KNOBS}.ring_bytes", 0)),
    f"{KNOBS}.ring_bytes": Field(64 << 10, gemm, "stages=4"),
    f"{KNOBS}.other_registers": Field((180, 200), gemm, "there is room for 28"),
    f"{KNOBS}.pinned_sixteenths": Field((2, 3), attention, "pin=16"),
    f"{KNOBS}.shared_l2_bytes": Field(1 << 20, attention, "floordiv(i32(2048), S)"),
    f"{KNOBS}.strip": Field(5, lambda: attention(causal=True), "i32(5)"),
    f"{KNOBS}.strip_rows": Field(1024, gemm, "i32(8)"),
    f"{FORM}.operands.bf16.name": Field("f16", gemm, "wgmma.matmul(128, 'f16'"),
    f"{FORM}.operands.bf16.any_major": Field(
        False, lambda: gemm(kernels.gemm_nn), "wgmma reads bf16 only along the contracted axis"),
    f"{FORM}.operands.bf16.packs": Field(False, attention, "a computed operand of bf16"),
    f"{FORM}.operands.bf16.by_columns": Field(
        True, lambda: gemm(kernels.gemm_tn), "operand_columns.read("),
    f"{FORM}.operands.bf16.short_sums": Field(True, gemm, "accumulate='no'"),
}


def changed(record: Any, path: str, value: Any) -> Any:
    """The record with another value of a field; a dot goes into a field, and into a mapping."""
    name, _, rest = path.partition(".")
    if isinstance(record, dict):
        return record | {name: changed(record[name], rest, value)}
    return replace(record, **{name: changed(getattr(record, name), rest, value) if rest else value})


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_decides_something(path):
    case = FIELDS[path]

    def said(change: Callable[[Generation], Generation]) -> str:
        with restored():
            additions.add_generation(lambda g: change(case.base(g)))
            try:
                return case.probe()
            except ts.TesseraError as error:
                return str(error)

    before, after = said(lambda g: g), said(lambda g: changed(g, path, case.value))
    assert case.says not in before
    assert case.says in after, after


def paths(record: Any, at: str = "") -> Iterator[str]:
    for field in fields(record):
        value, path = getattr(record, field.name), f"{at}{field.name}"
        if not is_dataclass(value) or path == FORM:
            yield path
        if is_dataclass(value):
            yield from paths(value, f"{path}.")


def test_every_field_is_in_the_table():
    record = GENERATIONS["sm_90a"]
    form = record.warpgroup_matmul.operands["bf16"]
    names = {*paths(record), *paths(form, f"{FORM}.operands.bf16.")} - {"target", "name"}
    assert names == set(FIELDS)


# --- and stands nowhere else ------------------------------------------------------------------
PACKAGE = Path(ts.__file__).parent
HOME = {"runtime/generations.py", "runtime/target.py"}
# Targets by name: of the table of data sheets; of instructions, which say who has them.
NAMES = {"tile/tuning/gpus.py", "tile/cuda/instruction.py", *(str(f.relative_to(PACKAGE))
                                  for f in (PACKAGE / "tile/cuda/ptx").glob("*.py"))}
LIMITS = {n for g in GENERATIONS.values() for n in (g.shared_bytes, g.group_shared_bytes)
          if n % (1 << 16)}


def number(node: ast.AST) -> object:
    """The value of an expression of constants."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.LShift):
        a, b = number(node.left), number(node.right)
        if isinstance(a, int) and isinstance(b, int):
            return a * b if isinstance(node.op, ast.Mult) else a << b if b < 64 else None
    return None


# What a file that holds one has in its text: two of three have not, and are not parsed.
MAY_HOLD = re.compile(r"\.cc\b|\d{5}|\d_\d|0[xob]|[\d)]\s*(\*|<<)\s*[\d(]"
                      r"|['\"](sm_)?(7|8|9|10|12)\da?['\"]", re.IGNORECASE)


def chip_facts(source: str, names: bool) -> Iterator[str]:
    """Comparisons of compute capabilities, limits as numbers, and (names) targets as text."""
    if not MAY_HOLD.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        at = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Attribute) and s.attr == "cc" for s in sides) and any(
                    isinstance(s, ast.Tuple) for s in sides):
                yield f"{at}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant | ast.BinOp):
            value = number(node)
            if isinstance(value, int) and value in LIMITS:
                yield f"{at}: {ast.unparse(node)}"
            if names and isinstance(value, str) and re.fullmatch(r"(sm_)?(7|8|9|10|12)\da?", value):
                yield f"{at}: {value!r}"


def test_no_number_of_a_chip_stands_elsewhere():
    found = {str(name): facts for file in sorted(PACKAGE.rglob("*.py"))
             if str(name := file.relative_to(PACKAGE)) not in HOME
             and (facts := list(chip_facts(file.read_text(), str(name) not in NAMES)))}
    assert not found, f"{found}: put it into the record, in runtime/generations.py"


@pytest.mark.parametrize("source, finds", [
    ("wide = target.cc >= (9, 0)", 1), ("most = 227 * 1024", 1), ("most = 232448", 1),
    ("most = 99 << 10", 1), ("x = parse_target('sm_80')", 1), ("x = parse_target('90')", 1),
    ("'what sm_80 has'", 0), ("same = a.cc == b.cc", 0), ("most = 64 * 1024", 0),
    ("x = 90", 0)])
def test_a_number_of_a_chip_is_found(source, finds):
    assert len(list(chip_facts(source, True))) == finds
