"""Whole hand-written kernels: what they take in registers and how their machine code looks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import ptx_kernels as kernels
from ptx_harness import require_compiler
from tessera.errors import CompileError, UnsupportedTargetError
from tessera.runtime.ptxas import find_tool, sass_counts
from tessera.runtime.target import parse_target
from tessera.tile.cuda import build as building
from tessera.tile.cuda.build import build

require_compiler()


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", list(kernels.KERNELS))
def test_nothing_spills_and_nothing_is_slow(name):
    built = kernels.KERNELS[name].oldest()
    assert not built.resources.spills and built.resources.stack_bytes == 0
    assert not built.warnings
    assert f".entry {kernels.KERNELS[name].name}(" in built.ptx


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_every_generation_takes_what_it_has(target):
    for source in (kernels.COPY, kernels.NOTHING, kernels.mma_gemm()):
        if parse_target(target).runs(parse_target(source.needs)):
            built = source.build(target)
            assert f".target {target}" in built.ptx and not built.resources.spills


@pytest.mark.parametrize("cc, target", [((9, 0), "sm_90"), ((8, 6), "sm_86")])
def test_without_a_target_it_is_the_device_s(monkeypatch, cc, target):
    monkeypatch.setattr(building, "device", lambda: SimpleNamespace(cc=cc))
    for source in (kernels.COPY, kernels.mma_gemm(), kernels.converter("to_bf16_rn", 8),
                   kernels.one_mma("bf16", "f32", "bf16")):
        built = source.build()
        assert str(built.target) == target and f".target {target}\n" in built.ptx
    if cc == (9, 0):
        assert str(kernels.WGMMA_GEMM.build().target) == "sm_90a"
        return
    with pytest.raises(UnsupportedTargetError, match="needs sm_90a.*8.6"):
        kernels.WGMMA_GEMM.build()


def counts(built) -> dict[str, int]:
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return sass_counts(built.sass())


def total(found: dict[str, int], start: str) -> int:
    return sum(n for opcode, n in found.items() if opcode.startswith(start))


def test_the_wgmma_loop_is_one_chain():
    built = kernels.WGMMA_GEMM.oldest()
    assert built.resources.registers == 168  # 384 threads: 65536 / 384, rounded down to 8
    found = counts(built)
    assert found["HGMMA.64x256x16.F32.BF16"] == 4  # one k-block: the loop was not copied
    assert total(found, "UTMALDG") == 2 and total(found, "USETMAXREG") == 2
    assert total(found, "R2UR") < 15  # descriptors stay in uniform registers
    assert total(found, "LDL") + total(found, "STL") == 0


def test_the_mma_loop_loads_matrices_and_copies_in_16_bytes():
    found = counts(kernels.mma_gemm().oldest())
    assert found["HMMA.16816.F32.BF16"] == 32 and total(found, "LDSM.16.M88.4") == 12
    assert total(found, "LDGSTS.E.BYPASS.128") == 8


def test_a_copy_moves_16_bytes():
    found = counts(kernels.COPY.build("sm_80"))
    assert total(found, "LDG.E.128") >= 1 and total(found, "STG.E.128") >= 1


def test_line_information_names_the_user():
    source, target = kernels.NOTHING, parse_target("sm_90a")
    lines = {n: ("/home/me/kernel.py", 100 + n) for n in range(1, 20)}
    built = build(source.text, source.name, source.parameters, target, threads=32, lines=lines)
    assert "/home/me/kernel.py" in built.ptx and b"/home/me" in built.kernel.cubin


def test_equal_sources_give_equal_code_in_any_order():
    first = kernels.COPY.oldest().ptx
    kernels.NOTHING.oldest()
    assert kernels.COPY.oldest().ptx == first


@pytest.mark.parametrize("body, says", [
    ("store(x, 1.5)", r"st_global_b32 takes x:i32, and is given a float64"),
    ("store(x)", "missing 1 required positional argument"),
    ("store(x, undefined_name)", "'undefined_name' is not defined"),
    ("store(x, four(0.0))", r"takes x:i32, and is given a UniTuple\(float32 x 4\)"),
    ("pick(four(0.0))", "element 7 of a fragment of 4"),
    ("add(four(0.0), eight(0.0))", "fragments of 4 and 8 elements meet"),
])
def test_wrong_calls_are_errors_at_the_emitted_line(body, says):
    text = kernels.HEAD + f"""
store = use(memory.st("global", "b32"))
four, eight = use(fragments.full("f32", 4)), use(fragments.full("f32", 8))
pick, add = use(fragments.pick(7)), use(fragments.add)
def wrong(x, n):
    {body}
"""
    with pytest.raises(CompileError, match=says) as caught:
        line = text.splitlines().index(f"    {body}") + 1
        build(text, "wrong", ("i64", "i32"), parse_target("sm_80"), threads=32,
              lines={line: ("/home/me/kernel.py", 7)})
    assert "wrong for sm_80" in str(caught.value) and body in str(caught.value)
    assert (caught.value.where.file, caught.value.where.line) == ("/home/me/kernel.py", 7)


FRAGMENTS = """
store = use(memory.st("global", "f32", 4))
four, pair = use(fragments.full("f32", 4)), use(fragments.gather("f32", 2))
add, mul, sub, neg = use(fragments.add), use(fragments.mul), use(fragments.sub), \\
    use(fragments.neg)
less, where = use(fragments.compare("<")), use(fragments.where)
exp = use(fragments.mapped(find_instruction("ex2_approx")))
top = use(fragments.reduce(find_instruction("f32_max"), ((0, 1), (2, 3))))
sums = use(fragments.reduce(fragments.add, ((0, 1, 2, 3),)))
join, swap, one = use(fragments.join(2)), use(fragments.pick((3, 2, 1, 0))), use(fragments.pick(0))
half = use(fragments.packed(convert.pack_half("bf16")))
back = use(fragments.unpacked(find_instruction("bf16_low"), find_instruction("bf16_high")))
bits = use(fragments.bitcast("i32"))
def work(x, y):
    a = four(y)
    b = add(mul(a, y), a)
    c = where(less(a, b), swap(a), neg(b))
    d = join(top(c), pair(y, one(exp(c))))
    store(x, d)
    store(x + 16, back(half(sub(d, one(sums(d))))))
"""


def test_fragments_stay_in_registers():
    head = kernels.HEAD + "from tessera.tile.cuda.instruction_names import find_instruction\n"
    built = build(head + FRAGMENTS, "work", ("i64", "f32"), parse_target("sm_90"), threads=32)
    assert "local" not in built.ptx and built.resources.stack_bytes == 0
    assert built.ptx.count("ex2.approx.ftz.f32") == 1  # of the four only one is used
    assert built.ptx.count("fma.rn.f32") >= 1  # mul and add met in LLVM
    assert built.ptx.count("cvt.rn.bf16x2.f32") == 2
