"""The tracer's tables of Python's constructs, and its parts, each used without the others above."""

from __future__ import annotations

import ast

import numpy as np
import pytest

import tessera as ts
from tessera import Tensor, tile
from tessera.numerics import f32, i32
from tessera.tile.builder.edge_facts import EdgeFacts
from tessera.tile.builder.ir_builder import IRBuilder
from tessera.tile.builder.kernel_spec import KernelSpec
from tessera.tile.builder.launch_grid import LaunchGrid
from tessera.tile.builder.source_position import SourcePosition
from tessera.tile.builder.value_table import ValueTable
from tessera.tile.frontend.source import capture
from tessera.tile.frontend.tracer import (
    EXPRESSIONS,
    OUTSIDE,
    REFUSED,
    STATEMENTS,
    expression,
    statement,
)
from tessera.tile.ir.edges import TileEdges
from tessera.tile.ir.errors import TileError
from tessera.tile.ir.handles import Handle
from tessera.tile.ir.ir import Const, Op, SSAValue
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.kernel.decorator import kernel

# Rewritten before the trace (exits.py), or read by the construct that they stand in.
REWRITTEN = {ast.Return, ast.Break, ast.Continue, ast.FormattedValue}


# --- the tables -----------------------------------------------------------------------------------
@pytest.mark.parametrize("base, table, refused", [(ast.expr, EXPRESSIONS, OUTSIDE),
                                                  (ast.stmt, STATEMENTS, REFUSED)])
def test_every_construct_is_traced_or_refused_in_words(base, table, refused):
    named = {*table, *refused, *REWRITTEN}
    new = {"TypeAlias", "TemplateStr", "Interpolation"}  # of Python 3.12 and 3.14
    missing = {k.__name__ for k in base.__subclasses__()} - {k.__name__ for k in named}
    assert missing <= new
    assert not set(table) & set(refused)


def test_a_construct_is_one_function(monkeypatch):
    """An assignment inside an expression, which the language does not have."""
    def k(x: ts.Tensor["n", ts.f32], y: ts.Tensor["n", ts.f32]):
        i = tile.linear_id()
        if i < x.shape[0]:
            y[i] = (a := x[i] + 1.0) * a

    x = np.arange(5, dtype=np.float32)
    with pytest.raises(TileError, match="an assignment inside an expression is not part"):
        ts.kernel(k)(x, np.zeros_like(x))
    monkeypatch.setattr("tessera.tile.frontend.tracer.EXPRESSIONS", dict(EXPRESSIONS))

    @expression(ast.NamedExpr)
    def walrus(t, e):
        value = t.env[e.target.id] = t.ir.named(t.expr(e.value), e.target.id)
        return value

    y = np.zeros_like(x)
    ts.kernel(k)(x, y)
    np.testing.assert_array_equal(y, (x + 1) * (x + 1))


@pytest.mark.parametrize("register, kind", [(expression, ast.BinOp), (statement, ast.If)])
def test_a_construct_has_one_entry(register, kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} is traced by .* already"):
        register(kind)(lambda t, node: None)


# --- the parts ------------------------------------------------------------------------------------
def sample(a, b):
    return a + b


@pytest.fixture
def ir() -> IRBuilder:
    values, position = ValueTable(), SourcePosition(capture(sample))
    return IRBuilder(values, EdgeFacts(values, position), position)


def scalar(ir: IRBuilder, name: str, dtype=i32) -> Handle:
    made = Handle(ir.names.fresh(name), Scalar(dtype))
    ir.values.types[made.value] = made.type
    return made


def test_the_builder_folds_promotes_and_emits(ir):
    assert ir.arithmetic("add", (2, 3)) == 5 and not ir.block
    n = scalar(ir, "n")
    assert ir.arithmetic("add", (n, 0)) is n and not ir.block
    out = ir.arithmetic("mul", (n, 2.0))
    assert [op.name for op in ir.block] == ["convert", "mul"]
    assert out.type == Scalar(f32) and ir.values.defined_by[out.value] is ir.block[-1]
    assert ir.block[-1].args[1] == Const(2.0, f32)


def test_the_builder_names_the_line(ir):
    ir.position.node = ir.position.source.tree.body[0]
    ir.divergent = 1
    with pytest.raises(TileError, match="barrier needs the whole group") as error:
        ir.emit("barrier", [])
    assert error.value.where.text == "return a + b"


@kernel
def first_and_next(t):
    return [t, tile.where(t == 0, 3, 9 - t)]


@kernel
def added(x, u):
    found = []
    for j in (0, 4):
        k = u + j
        found = found + [x[k] + float(u)]
    return found


@kernel
def named_twice(x: ts.Tensor["n", f32], y: ts.Tensor["n", f32]):
    t = tile.local_id()
    both = first_and_next(t + 1)
    k = both[1]
    y[t] = added(x, t + 2)[1] + added(x, first_and_next(t)[1])[0] + float(both[1] + k)


def test_a_value_keeps_its_name_where_others_know_it(rng):
    """As an argument, or an element of a list, of which another variable is the same value."""
    x, y = rng.standard_normal(32).astype(np.float32), np.zeros(32, np.float32)
    named_twice[1, 4](x, y)
    t = np.arange(4)
    after = np.where(t == 0, 3, 9 - t)
    want = x[t + 6] + (t + 2) + (x[after] + after) + 2 * (8 - t)
    np.testing.assert_allclose(y[:4], want, rtol=1e-6)


def test_a_value_gets_the_name_it_is_assigned(ir):
    n = scalar(ir, "n")
    total = ir.named(ir.arithmetic("add", (n, 4)), "total")
    assert str(total.value.name) == "total" and ir.block[-1].outs[0].value == total.value
    assert ir.values.forms.form(total.value) == {None: 4, n.value: 1}


def test_ranges_of_counters_and_of_what_is_computed_from_them(ir):
    values, i = ir.values, scalar(ir, "i")
    values.loop_bounds[i.value] = tuple(Const(n, i32) for n in (2, 11, 4))  # 2, 6, 10
    assert values.reach(i.value) == (2, 10)
    x = ir.arithmetic("sub", (ir.arithmetic("mul", (i, 3)), 1))
    assert values.span(values.forms.form(x.value)) == (5, 29)
    assert values.least(values.forms.form(x.value)) == 5
    n = scalar(ir, "n")
    values.dims[n.value] = "N"
    assert values.least({None: 7, n.value: 2}) == 7 and values.span({None: 7, n.value: 2}) is None
    assert values.least({None: 7, n.value: -2}) is None
    assert values.extents_behind(ir.arithmetic("add", (n, 1)).value) == {"N"}


def test_numbers_computed_twice_are_equal(ir):
    n = scalar(ir, "n")
    halves = [ir.arithmetic("floordiv", (n, 2)) for _ in range(2)]
    other = ir.arithmetic("floordiv", (n, 3))
    first, second, third = ({None: 0, h.value: 1} for h in (*halves, other))
    assert first != second and ir.values.canonical(first) == ir.values.canonical(second)
    assert ir.values.canonical(first) != ir.values.canonical(third)


@pytest.mark.parametrize("extent, block, expected", [(100, 32, (0, 3)), (96, 32, (0, 2)),
                                                     (0, 32, (0, 0))])
def test_the_range_of_a_coordinate_of_the_grid(ir, extent, block, expected):
    grid = LaunchGrid(ir, KernelSpec((), (), None, Schedule(), fixed_dims=(("M", extent),)))
    m, n = (grid.group_coordinate(grid.axis(d, block)) for d in ("M", "N"))
    assert ir.values.reach(m.value) == expected and ir.values.reach(n.value) is None
    assert grid.axis("M", block) == 0
    with pytest.raises(TileError, match="cut into blocks of"):
        grid.axis("M", block + 1)


def test_an_edge_is_carried_to_a_mask(ir):
    n = scalar(ir, "n")
    ir.values.dims[n.value] = "N"
    x = ir.emit("full", [], shape=(4, 32), value=1.0, dtype=f32)
    ir.facts.declare(x.value, TileEdges.of([None, ir.facts.make_edge(0, n, False)]))
    y = ir.arithmetic("exp", [x])
    assert ir.facts.of(y).at(1).key == ir.facts.of(x).at(1).key and ir.facts.of(y).at(0) is None
    s = ir.emit("reduce_sum", [y], axis=1)
    *_, mask, total = (op for op in ir.block if isinstance(op, Op))
    assert mask.name == "edge_mask" and mask.args == (y.value, Const(0, i32), n.value)
    assert total.args == (mask.outs[0].value,) and s.type == TileType(f32, (4,))
    assert ir.facts.of(s).at(0) is None


def test_a_value_made_anew_knows_nothing(ir):
    value = SSAValue("again")
    ir.values.loop_bounds[value] = ir.values.coordinates[value] = (0, 1)
    ir.facts.of_value[value] = ir.facts.implied[value] = TileEdges((), True)
    ir.facts.redefine(value)
    assert not any(value in table for table in (
        ir.values.loop_bounds, ir.values.coordinates, ir.facts.of_value, ir.facts.implied))


# --- results --------------------------------------------------------------------------------------
def test_a_result_without_a_type_has_that_of_the_tile(rng):
    @kernel
    def doubled(x: Tensor["N"]) -> Tensor["N"]:
        t = tile.load(x[tile_n:tile_n + 4])
        return t + t

    @kernel
    def same(x: Tensor["N"]) -> Tensor["N"]:
        return tile.load(x[tile_n:tile_n + 4])

    for dtype in (np.float32, np.float64):
        x = rng.standard_normal(7).astype(dtype)
        assert doubled(x).dtype == dtype and np.array_equal(doubled(x), 2 * x)
    x = ts.ones(3, "bf16")
    assert same(x).type == "bf16" and ts.jit(same)(x).type == "bf16"


def test_a_result_without_an_annotation_beside_one_that_has_it():
    @kernel
    def two(x: Tensor["N", f32]) -> Tensor["N", f32]:
        t = tile.load(x[tile_n:tile_n + 4])
        return t, t

    with pytest.raises(TileError, match="returns 2 values, its annotation names 1") as err:
        two(np.ones(4, np.float32))
    assert "annotate each: -> tuple[" in err.value.hint


def test_a_name_that_annotations_as_text_do_not_see_is_told():
    from tessera import Tensor as Local

    @kernel
    def k(x: Local["N", f32]):
        x[0] = 1.0

    with pytest.raises(ts.TesseraError, match="k: its annotation .* the name 'Local'") as e:
        k(np.ones(4, np.float32))
    assert "from __future__ import annotations" in e.value.hint
