"""Rows on the lowering of graph functions, on the inspector of it, and on the standard library."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from library_cases import attention
from lowering_cases import apart as apart
from tessera import Tensor, bf16, f32
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.cuda.levels import origin_of
from tessera.graph.schedule.op_ids import value_ids
from tessera.tile.ir.ir import walk
from tolerance import assert_close

LEVELS = ("graph", "schedule", "tile", "target")


@ts.jit
def gemm(a, b):
    return ts.gemm(a, b)


@ts.jit
def softmax(x):
    return ts.softmax(x)


@ts.jit
def flash_attention(q, k, v):
    return ts.attention(q, k, v, causal=True)


@ts.jit
def block(x, w, b):
    """Two groups; an op that is not used, one that is computed already, a constant, a view."""
    y = ts.gelu(x @ w + b)
    ts.exp(x)
    again = ts.gelu(x @ w + b)
    return ts.reshape(ts.softmax(y + again) * 2.0, (-1,))


FUNCTIONS = {
    "gemm": (gemm, (Tensor[256, 128, bf16], Tensor[128, 512, bf16])),
    "softmax": (softmax, (Tensor[64, 512, bf16],)),
    "flash_attention": (flash_attention, (Tensor[2, 4, 256, 64, bf16],) * 3),
    "block": (block, (Tensor[60, 32, f32], Tensor[32, 48, f32], Tensor[48, f32])),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


def program_of(name):
    fn, types = FUNCTIONS[name]
    return CudaProgram(fn.graph(*types))


@pytest.mark.row("IR-02")
class TestScheduleIR:
    def text(self, name):
        fn, types = FUNCTIONS[name]
        return ts.debug.lowering(fn, *types).sections["schedule"].text

    def test_lists_groups_with_blocks_and_stages(self):
        found = re.findall(r"^  (g\d) (\w+) over \[(.*)\]  block (\S+)  stages (\d)  warps (\d+)",
                           self.text("block"), re.M)
        assert [g[:3] for g in found] == [("g0", "gemm", "60, 48"), ("g1", "rows", "60, 48")]
        assert found[0][3] == "64x64x16" and found[0][4] == "2"  # f32: multiply-adds of threads
        assert found[1][3] == "32x48"  # whole rows
        (only,) = re.findall(r"block (\S+)  stages (\d+)", self.text("gemm"))
        assert only == ("64x64x64", "12")  # bf16: tensor cores, small blocks and a ring of 192 KB

    def test_fusion_shows_in_the_steps(self):
        """What a group does, op by op, in the order in which it does it."""
        steps = re.findall(r"= (\w+)\(", self.text("softmax"))
        assert steps == ["cast", "reduce_max", "sub", "exp", "reduce_sum", "div", "cast"]

    def test_the_decisions_are_what_is_compiled(self):
        """Blocks are the tiles of the Tile IR; stages the slots of the ring in the Target."""
        fn, types = FUNCTIONS["gemm"]
        assert "tile<64x64 x f32> = matmul" in fn.inspect_ir("tile", *types)
        assert "next_of_12(" in fn.inspect_ir("target")
        (launch,) = program_of("gemm").launches
        s = launch.group.schedule.with_values({"stages": 3, "n": 128})
        other = replace(launch.group, schedule=s)
        assert "64, 64, 64)" in launch.source.text
        assert "64, 128, 64)" in source_of(other).text

    def test_it_is_a_value_with_a_hash(self):
        a, b = program_of("block").plan, program_of("block").plan
        assert a == b and a.hash == b.hash
        changed = replace(a, steps=(replace(a.groups[0], schedule=ts.Schedule(m=32)),))
        assert changed.hash != a.hash


@pytest.mark.row("IR-09")
class TestLoweringOrder:
    @each
    def test_every_op_of_the_graph_has_a_place(self, name):
        """Total: each id is in a group, or the plan says why it needs no kernel."""
        fn, types = FUNCTIONS[name]
        graph, plan = fn.graph(*types), program_of(name).plan
        names = value_ids(graph)
        ids = [names[n.outputs[0]] for n in graph.nodes]
        fates, groups = dict(plan.fates), {g.name: set(g.ops) for g in plan.groups}
        assert list(fates) == ids
        for i, fate in fates.items():
            if fate in groups:
                assert i in groups[fate]
            else:
                assert re.match(r"a constant|not used|the same as %\d+|no work|v\d+, view of v",
                                fate)

    def test_the_reasons(self):
        """One op of each kind in `block`."""
        fates = dict(program_of("block").plan.fates)
        graph = FUNCTIONS["block"][0].graph()
        by_name: dict[str, list[str]] = {}
        for node, fate in zip(graph.nodes, fates.values(), strict=True):
            by_name.setdefault(node.op.name, []).append(fate)
        assert by_name["exp"] == ["not used"] and by_name["constant"] == ["a constant"]
        assert by_name["matmul"][0] == "g0" and "the same as" in by_name["matmul"][1]
        assert by_name["softmax"] == ["g1"] and "view of" in by_name["reshape"][0]

    @each
    def test_each_level_keeps_the_ids_of_the_one_above(self, name):
        made = program_of(name)
        for launch in made.launches:
            ids = set(launch.group.ops)
            tile = set()
            for node in walk(launch.kernel.function().body):
                origin = origin_of(launch, node.where.file, node.where.line)
                assert origin.ops and set(origin.ops) <= ids  # every op of the Tile IR has ids
                tile.update(origin.ops)
            assert tile == ids  # and every id of the group is kept

    @each
    def test_each_level_is_derived_from_the_one_above(self, name):
        """A group's text follows from the group alone, the Tile IR from the text."""
        for launch in program_of(name).launches:
            again = source_of(replace(launch.group))
            assert again.text == launch.source.text
            assert launch.kernel.fn.__code__.co_filename == again.file


@pytest.mark.row("IR-10")
@pytest.mark.parametrize("name", ["gemm", "softmax", "flash_attention"])
def test_all_four_levels(name):
    fn, types = FUNCTIONS[name]
    texts = {level: fn.inspect_ir(level, *types) for level in LEVELS}
    assert all(texts.values())
    assert "graph " in texts["graph"] and "tile.func @g0" in texts["tile"]
    assert "def g0" in texts["target"]
    assert {"gemm": "gemm over", "softmax": "rows over", "flash_attention": "attention over"}[
        name] in ts.debug.lowering(fn).sections["schedule"].text
    op = {"gemm": "matmul(", "softmax": "reduce_max(", "flash_attention": "causal_mask("}[name]
    assert op in texts["tile"]


@pytest.mark.row("DBG-13")
class TestInspector:
    @each
    def test_four_sections_that_share_ids(self, name):
        fn, types = FUNCTIONS[name]
        low = ts.debug.lowering(fn, *types)
        assert tuple(low.sections) == LEVELS
        assert all(s.lines and not s.missing for s in low.sections.values())
        graph = low.sections["graph"].ids
        groups = {f"g{i}" for i in range(len(program_of(name).plan.groups))}
        done = {i for i, fate in low.fates.items() if fate in groups}
        assert done and graph >= done
        for level in LEVELS[1:]:
            ids = low.sections[level].ids
            assert ids <= graph, level
            # What is left of a step after simplification may be no statement of its own.
            assert len(done - ids) <= (0 if level != "target" else 1), (level, done - ids)

    def test_an_op_and_a_line_at_each_level(self):
        fn, types = FUNCTIONS["block"]
        low = ts.debug.lowering(fn, *types)
        graph = low.sections["graph"]
        (gelu,) = [ids for ids, t in zip(graph.ops, graph.lines, strict=True)
                   if "= gelu(" in t and re.match(r"g\d", low.fates[ids[0]])]
        found = low.op(gelu[0])
        assert list(found) == list(LEVELS)
        assert "gelu(" in found["schedule"][0]
        assert any("sigmoid(" in t for t in found["tile"])
        assert any("sigmoid(" in t for t in found["target"])
        (line,) = {x for x, t in zip(low.sections["graph"].links, low.sections["graph"].lines,
                                     strict=True) if "softmax(" in t}
        assert any("reduce_max" in t for t in low.of(line)["tile"])

    def test_printed_side_by_side(self):
        fn, types = FUNCTIONS["softmax"]
        text = ts.debug.lowering(fn, *types).side_by_side(width=240)
        (row,) = [r for r in text.splitlines() if "= softmax(" in r]
        cells = row.split(" | ")
        assert len(cells) == 4
        assert "reduce_max(v1)" in cells[1] and "reduce_max(" in cells[3]
        assert "reduce_max" in cells[2]
        assert max(map(len, text.splitlines())) <= 240 + 12

    def test_what_has_no_kernel_says_so(self):
        low = ts.debug.lowering(ts.jit(lambda x: ts.cast(x, "bf16 @accum(bf16)") @ ts.cast(
            x, "bf16 @accum(bf16)")), Tensor[8, 8, f32])
        assert low.sections["graph"].text and not low.sections["tile"].text
        assert "accumulates in bf16" in low.sections["tile"].missing
        assert "has no kernel for GPUs" in str(low)


@pytest.mark.row("PAR-06")
def test_a_chain_of_five_ops_is_one_kernel(gpu, driver, rng, apart):
    """One launch on the (fake) device, with the same values; on a real one in tests/gpu."""
    def chain(x):
        return ts.sqrt(ts.abs(ts.sin(x * 2.0) + 1.0))

    x = ts.tensor(rng.standard_normal((50, 70)).astype(np.float32))
    f = ts.jit(chain, target="cuda")
    got = f(x)
    assert len(f.graph().nodes) == 7 and len(driver.launches) == 1  # two of them are constants
    assert_close(got.array, chain(x).array, "f32", 4)


@pytest.mark.row("EX-29")
def test_stdlib_snippet(rng):
    """The seed's snippet, with a schedule under the name it uses; then all five are called."""
    names = {"my_custom_schedule": ts.Schedule(block=(64, 32), warps=4)}
    exec("""from tessera.stdlib import (
    # Pre-tuned, verified kernels
    flash_attention_2,
    efficient_layernorm,
    stable_softmax,
    fused_adam,
    rotary_embedding
)

# Users can either use as-is or customize
my_attention = flash_attention_2.with_schedule(
    my_custom_schedule
)
""", names)
    q, k, v = (ts.tensor(rng.standard_normal((2, 3, 70, 32)).astype(np.float32), "bf16")
               for _ in range(3))
    want = attention(*(x.array.astype(np.float64) for x in (q, k, v)))
    for kernel in (names["flash_attention_2"], names["my_attention"]):
        assert_close(kernel(q, k, v).array, want, "bf16", 16)
    assert names["my_attention"].schedule == names["my_custom_schedule"]
    x, g = (rng.standard_normal((4, 64)).astype(np.float32) for _ in range(2))
    assert_close(names["stable_softmax"](x), ts.softmax(x).array, "f32", 64)
    assert_close(names["efficient_layernorm"](x, g[0], g[1]),
                 ts.layernorm(x, g[0], g[1]).array, "f32", 64)
    assert_close(np.linalg.norm(names["rotary_embedding"](x), axis=1), np.linalg.norm(x, axis=1),
                 "f32", 64)
    p, m, v = x.copy(), np.zeros_like(x), np.zeros_like(x)
    names["fused_adam"](p, g, m, v, 1, lr=0.1)
    step = 0.1 * g / (np.abs(g) + 1e-8)  # Adam's first: both moments are of this gradient alone
    assert_close(p, x - step, "f32", 64)


@pytest.mark.row("EX-29")
def test_a_body_of_dots_is_the_librarys_attention(rng):
    """The other snippet that needs the library (Q24)."""
    import tessera.stdlib  # noqa: F401

    @ts.kernel.schedule(ts.Schedule(block=(64, 64), warps=4))
    def small_attention(Q, K, V): ...

    q, k, v = (ts.tensor(rng.standard_normal((2, 50, 32)).astype(np.float32), "bf16")
               for _ in range(3))
    want = attention(*(x.array.astype(np.float64) for x in (q, k, v)))
    assert_close(small_attention(q, k, v).array, want, "bf16", 16)
