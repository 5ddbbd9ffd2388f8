"""One record, all meanings: no list of op names beside the records, no name that is no op, and an
elementwise op that is declared in one place is everywhere."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import guide_tables
import tessera as ts
from cpu import test_ops_registry
from mesh import test_sharded_ops
from mesh.sharding import MESH, spread
from op_names import Table, compared, op_tables
from ptx_harness import require_compiler
from registries import restored
from tessera.graph.cpu.target import CPU
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.spell import expression
from tessera.graph.cuda.passes import attention_kernels, library_ops, merged_moves
from tessera.graph.cuda.program import host_keys
from tessera.graph.op import OPS
from tessera.graph.ops.elementwise_record import elementwise, public_unary
from tessera.graph.schedule import offload
from tessera.graph.schedule.fuse import fuse
from tessera.mesh.layout import Layout, Split
from tessera.planning.flops import count_graph
from tessera.tile.cuda.emit.registry import load_all
from tessera.tile.ops import OPS as TILE_OPS
from tolerance import assert_close

PACKAGE = Path(__file__).resolve().parents[2] / "tessera"
FILES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
# Kernels have ops and rules of their own; records of the graph are free to name each other.
OUTSIDE = {rel: p for rel, p in FILES.items() if not rel.startswith(("tile/", "graph/ops/"))}
CALLS = {call.name for module in (library_ops, attention_kernels, host_keys, merged_moves, offload)
         for call in vars(module).values() if isinstance(call, library_ops.LibraryCall)}

# Rewrites that match particular ops, and rules that one room has for particular ops.
RULES = {
    "graph/simplify.py:RULES": "identities, each of one op",
    "graph/schedule/region_copies.py:MOVES": "how each structural op moves elements",
    "graph/cuda/passes/weighted_keys.py:": "what each op does to scores and weights of attention",
    "graph/cuda/passes/plain_attention.py:": "what each op does to scores and weights of attention",
    "graph/cuda/passes/window_reductions.py:KNOWN": "what constants are made of",
    "graph/cuda/passes/displaced_reads.py:_part": "what constants are made of",
    "graph/cuda/passes/attention_masks.py:_narrow": "moves of the numbers of a mask",
    "graph/cuda/passes/packed_values.py:moves": "moves that have an expression for an element",
    "graph/cuda/kernels/pointwise_loops.py:_lifted": "what is a sum where its operands are sums",
    "graph/cuda/kernels/small_systems.py:": "how a lane does each op on a few rows",
    "onnx/spellings.py:": "how each op is said in another format, and which are not",
    "mesh/sharding/rewrites.py:RULES": "ops that a mesh computes by others",
    "mesh/collectives/replicated.py:RULES": "who has the results of ops that hold graphs",
    "mesh/sharding/localize.py:SPECIAL": "what a rank makes of its own part by the place it has",
    "mesh/sharding/control_flow.py:": "how bodies of ops that hold graphs are partitioned",
    "graph/ir.py:skipped": "what bodies of ops that hold graphs are given",
    "mesh/parallel/ring.py:SEQUENCE": "where operands of the two ops of this file have a sequence",
    "mesh/parallel/ring.py:RESULTS": "where results of the two ops of this file have a sequence",
}
# Collections of other things, some of which are called like ops.
OTHERS = {
    "__all__": "names that a module gives",
    "foreign.py": "words of other libraries, and what is said here instead",
    "numerics/policy.py:_CUSTOM_METHODS": "methods of a policy class, as the ops are called",
    "graph/operators.py": "operators of Python, ufuncs and methods of NumPy",
    "graph/numpy_calls.py": "functions of NumPy that take a tensor",
    "graph/weak_numbers.py": "operators of Python",
    "graph/cuda/lower.py:MAKERS": "kinds of groups, some called as an op is",
    "graph/cuda/argument_views.py:READERS": "kinds of groups, some called as an op is",
    "graph/cuda/argument_views.py:WRITERS": "kinds of groups, some called as an op is",
    "graph/cuda/passes/data_movement.py:MOVED": "ops that a cast may pass: each element once",
    "graph/cuda/passes/pad_rows.py:_is_joined": "copies that write zeros behind what they copy",
    "graph/cuda/passes/data_movement.py:CARRIED": "moves of one operand that a cast may pass",
    "graph/cuda/passes/packed_products.py:_weights": "what a kernel does to weights that it reads",
    "graph/cpu/": "kinds of loop ops, functions of loop templates and LLVM's instructions",
    "debug/profile_page.py:COLOURS": "sorts of work",
    "bench/kernel_classes.py:": "classes of kernels and sorts of work, some called as an op is",
    "graph/regions/types.py": "privileges of a region",
    "state/effect.py": "names of effects",
    "mesh/sharding/layout_change_ops.py": "kinds of collectives",
    "mesh/sharding/collective_order.py:REDUCTIONS": "kinds of collectives",
    "mesh/sharding/sharded_graph.py:IN_WINDOWS": "collectives that NCCL has in windows",
    "debug/fabric_command.py:CALLS": "collectives that are timed",
    "graph/cuda/passes/computed_moves.py:": "moves, each with where its elements come from",
    "graph/cuda/passes/followed_values.py:": "moves, each with where its elements come from",
    "graph/cuda/element_places.py:MOVED": "moves, each with where its elements come from",
    "graph/cuda/kernels/batch_key.py:KINDS": "kinds of groups, some called as an op is",
    "mesh/sharding/collective_order.py:send_together": "kinds of collectives",
    "graph/cuda/passes/data_movement.py:is_joined": "what may stand between a part and its whole",
    "graph/cuda/kernels/integer_sums.py:_same_all_along": "what repeats one number",
    "graph/cuda/passes/transpose_codes.py:_columns_of": "what is between codes and their columns",
}


# The same of kernels: places where particular ops are matched or spelled.
KERNEL_RULES = {
    "tile/cuda/emit/elementwise.py:": "how arithmetic is spelled: the emission of each op",
    "tile/cuda/emit/warps.py:": "how exchanges of a warp are spelled: the emission of each op",
    "tile/cuda/intrinsics/elementwise.py:": "bodies of ops, under the names of the ops",
    "tile/cuda/intrinsics/bf16_pairs.py:NAMES": "ops that have an instruction for two numbers",
    "tile/cuda/intrinsics/scan.py:word": "the instruction of a scan of bits",
    "tile/cuda/intrinsics/warps.py:REDUX": "the instruction of a reduction",
    "tile/cuda/lower/warp_specialised/check.py:_op": "what gives a slot back",
    "tile/cuda/lower/warp_specialised/defaults.py:positive": "the sign of arithmetic",
    "tile/cuda/lower/warp_specialised/layouts.py:PLACED": "ops whose tiles lie as wgmma has them",
    "tile/cuda/lower/warp_specialised/machine.py:op": "the two ops that may see a running matmul",
    "tile/cuda/lower/warp_specialised/masks.py:": "what -inf and 0 become in a softmax",
    "tile/cuda/lower/warp_specialised/pressure.py:IN_MEMORY": "ops of the form that hold nothing",
    "tile/cuda/lower/warp_specialised/qualify.py:ALLOWED": "accesses that the form has code for",
    "tile/cuda/lower/warp_specialised/qualify.py:STORES": "stores that the form has code for",
    "tile/cuda/lower/pick_elements.py:PICKED": "the ops that the pass puts others in place of",
    "tile/cuda/lower/warp_specialised/qualify.py:MATMULS": "matmuls that the form has code for",
    "tile/cuda/lower/warp_specialised/rewrite.py:READ_IN_PIECES": "operands of registers",
    "tile/cuda/lower/assign_layouts.py:turned": "transpositions of tiles and of views",
    "tile/cuda/lower/assign_layouts.py:op": "what a tile of codes comes from",
    "tile/cuda/lower/assign_layouts.py:SCANS": "scans, whose tiles lie in pieces of columns",
    "tile/cuda/lower/assign_layouts.py:simple": "what makes positions of a tile of nothing",
    "tile/cuda/lower/find_positions.py:EXTREME": "the ops that the pass puts others in place of",
    "tile/passes/index_runs.py:": "runs and divisors of each op that keeps them",
    "tile/cuda/lower/warp_specialised/sink.py:LIGHT": "the chain that is moved to its reader",
    "tile/frontend/block_origins.py:_written": "calls that write, as a kernel names them",
    "tile/frontend/constructs/calls.py:": "calls of functions of math and of places",
    "tile/frontend/constructs/conditions.py:EACH": "what to write for a word of Python on tiles",
    "tile/builder/edge_facts.py:adds_to": "the steps from a sum to its term",
    "tile/builder/ir_builder.py:": "Python's operators on numbers, and the numbers they ignore",
    "tile/frontend/op_calls.py:": "maths of whole numbers, as Python has it",
    "tile/frontend/constructs/ranges.py:order_lanes": "what a lane writes",
    "tile/frontend/constructs/operators.py:LOGICAL": "what Python's operators are on bools",
    "tile/frontend/trace_kernel.py:named": "the numbers by which a kernel says how it is launched",
    "tile/frontend/whole_array_blocks.py:": "ops that blocks compute in a way of their own",
    "tile/interpreter/launch.py:scalars_in_grid": "the two numbers that a guard starts from",
    "tile/interpreter/wrapping.py:SIGNS": "the operators of a message",
    "tile/passes/contracted_extents.py:SAME": "what stands between a load and its matmul",
    "tile/ir/affine.py:note": "the affine form of each op that has one",
    "tile/passes/batch_axes.py:IDS": "numbers of a launch that become those of one row of a batch",
    "tile/passes/argument_layouts.py:": "where the indices of an access stand",
    "tile/passes/independent_iterations.py:ELEMENTS": "where the indices of an access stand",
    "tile/passes/integer_facts.py:_divisor": "the divisor of each op that keeps one",
    "tile/passes/operation_counts.py:follow": "numbers of the group in the middle",
    "tile/passes/operation_counts.py:ring_bytes": "what stands between a load and its matmul",
    "tile/passes/part_blocks.py:MASKS": "by what a kernel says itself which elements count",
    "tile/passes/part_blocks.py:start": "where a block begins, and how much further on",
    "tile/passes/thread_guards.py:": "guards solved for the number of the thread, op by op",
    "tile/cuda/emit/thread_elements.py:split_constant": "sums with a number that ends an address",
}
KERNEL_OTHERS = {
    "__all__": "names that a module gives",
    "tile/cuda/emit/emitter.py:BUILTINS": "names of Python",
    "tile/cuda/intrinsics/atomics.py:BITWISE": "kinds of atomics, with methods of Builder",
}


NAMES_THAT_BEGIN = {"tile/frontend/block_origins.py:_written": "how names of ops begin"}


@cache
def kernel_tables() -> list[Table]:
    load_all()  # ops that only the compiler has
    return [t for rel, p in KERNEL_FILES.items() if not rel.startswith("tile/ops/")
            for t in op_tables(p, rel, TILE_OPS)]


@cache
def found_tables() -> list[Table]:
    return [t for rel, p in OUTSIDE.items() for t in op_tables(p, rel, OPS)]


def reason(key: str, reasons: dict[str, str]) -> str | None:
    """The entry that allows a table: its key, a file or a folder, or a name in every file."""
    return next((k for k in reasons if key.startswith(k) or key.endswith(f":{k}")), None)


def test_lists_of_op_names_are_in_the_records() -> None:
    """A fact about an op is a field of its record; a list of names beside it is forgotten when an
    op is added."""
    strange = [f"{t.key} line {t.line}: {', '.join(t.names)}" for t in found_tables()
               if not reason(t.key, RULES) and not reason(t.key, OTHERS)]
    assert not strange, "put the fact into graph/op.py:Op, or say here why not:\n" + "\n".join(
        strange)


def test_lists_of_kernel_ops_are_in_the_records() -> None:
    strange = [f"{t.key} line {t.line}: {', '.join(t.names)}" for t in kernel_tables()
               if not reason(t.key, KERNEL_RULES) and not reason(t.key, KERNEL_OTHERS)]
    assert not strange, ("put the fact into tile/ir/op_record.py:TileOp, or say here why not:\n"
                         + "\n".join(strange))


def test_what_is_allowed_is_there() -> None:
    graph, kernels = ([t.key for t in found()] for found in (found_tables, kernel_tables))
    for keys, reasons in ((graph, RULES), (graph, OTHERS), (kernels, KERNEL_RULES),
                          (kernels, KERNEL_OTHERS)):
        unused = [k for k in reasons if not any(reason(key, {k: ""}) for key in keys)]
        assert not unused, f"no such list any more: {unused}"


def test_rules_name_ops_that_exist() -> None:
    for table in found_tables():
        if reason(table.key, RULES):
            unknown = [n for n in table.names if n not in OPS]
            assert not unknown, f"{table.key} line {table.line} names no op: {unknown}"


def strangers(files: dict[str, Path], known: Collection[str]) -> list[str]:
    """What names of ops are compared with, and is no op."""
    return [f"{rel}:{line} {name!r}" for rel, path in files.items()
            for line, name in compared(path) if name not in known]


def test_names_that_are_compared_are_ops() -> None:
    """`node.op.name == "..."`, `node.op.name in (...)`, OPS["..."], a rewriter's emit("...")."""
    assert not strangers(OUTSIDE, {*OPS, *TILE_OPS, *CALLS})


KERNEL_FILES = {rel: p for rel, p in FILES.items() if rel.startswith("tile/")
                and "/ptx/" not in rel}  # which has words of PTX that are called like ops


def test_rules_of_kernels_name_ops_that_exist() -> None:
    for table in kernel_tables():
        if reason(table.key, KERNEL_RULES) and not reason(table.key, NAMES_THAT_BEGIN):
            unknown = [n for n in table.names if n not in TILE_OPS]
            assert not unknown, f"{table.key} line {table.line} names no op: {unknown}"


def test_names_that_ops_of_kernels_are_compared_with_are_ops() -> None:
    load_all()
    assert not strangers(KERNEL_FILES, TILE_OPS)


def test_a_record_computes_numbers_that_are_known() -> None:
    """As the op does on arrays: what a division by zero gives, Python has no number for."""
    known = {"add": (7, 2, 9), "floordiv": (-7, 2, -4), "mod": (-7, 2, 1), "shl": (3, 2, 12),
             "maximum": (7, 2, 7), "div": (7, 2, 3.5)}
    for name, (x, y, out) in known.items():
        assert TILE_OPS[name].value_of(x, y) == out
    assert TILE_OPS["floordiv"].value_of(7, 0) == 0
    assert TILE_OPS["matmul"].value_of(7, 2) is None and TILE_OPS["convert"].value_of(7) is None


def test_accesses_say_what_they_reach() -> None:
    """An op that reads or writes memory is an access, but for those that have no element."""
    load_all()
    silent = {op.name for op in TILE_OPS.values()
              if op.effect in ("read", "write", "atomic") and not op.access}
    assert silent == {"matmul", "matmul_codes", "matmul_codes_stacked", "unpack_codes",
                      "take_operand", "hold_operand", "read_columns", "read_row", "read_tile",
                      "ring_load", "store_rows", "store_panels", "next_tile"}, (
        "of tiles in shared memory, and of rings")
    assert TILE_OPS["cp_async"].reads and not TILE_OPS["cp_async"].writes
    assert all(TILE_OPS[n].writes for n in ("store_tile", "atomic", "compare_exchange"))


def test_the_scan_finds_tables_and_comparisons(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text('A = frozenset({"exp", "log", "gone"})\n'
                    'def f(node, rw, v):\n'
                    '    if node.op.name in A or node.op.name == "left":\n'
                    '        return rw.emit("other", v)\n'
                    '    return {"exp": 1, "log": 2}[node.op.name]\n')
    tables = list(op_tables(file, "x.py", {"exp", "log"}))
    assert [(t.key, t.line, t.names) for t in tables] == [
        ("x.py:A", 1, ("exp", "log", "gone")), ("x.py:f", 5, ("exp", "log"))]
    assert sorted(compared(file)) == [(3, "exp"), (3, "gone"), (3, "left"), (3, "log"),
                                      (4, "other"), (5, "exp"), (5, "log")]


# --- an elementwise op from one declaration -------------------------------------------------------
@pytest.fixture
def squareplus() -> Iterator[Callable]:
    """The public function of an op declared here alone; the registries are given back after."""
    with restored():
        op = elementwise(
            "squareplus", lambda x: (x + np.sqrt(x * x + 4)) / 2,
            "({0} + sqrt({0} * {0} + 4)) * 0.5",
            lambda y, x: (lambda: 0.5 + 0.5 * x / ts.sqrt(x * x + 4.0),),
            doc="(x + sqrt(x^2 + 4)) / 2", hint="squareplus of -inf is -inf + inf")
        yield public_unary("squareplus", op, "(x + sqrt(x^2 + 4)) / 2")


def values(rng: np.random.Generator, shape: tuple[int, ...] = (6, 40)) -> ts.Tensor:
    return ts.tensor(rng.standard_normal(shape).astype(np.float32))


def expected(x: ts.Tensor) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return (wide + np.sqrt(wide * wide + 4)) / 2


def terms(x: ts.Tensor) -> np.ndarray:
    """The larger of the two that cancel where x is negative."""
    return np.sqrt(np.asarray(x, np.float64)**2 + 4) / 2


class TestOneDeclaration:
    def test_it_computes_and_has_a_derivative(self, squareplus, rng):
        x = values(rng)
        assert_close(squareplus(x).array, expected(x), "f32", scale=terms(x))
        slope = 0.5 + 0.5 * np.asarray(x, np.float64) / np.sqrt(np.asarray(x, np.float64)**2 + 4)
        assert_close(ts.grad(lambda x: ts.sum(squareplus(x)))(x).array, slope, "f32", scale=1)
        assert squareplus(ts.cast(x, ts.bf16)).type == ts.bf16

    def test_it_is_in_a_compiled_loop(self, squareplus, rng):
        x, f = values(rng), ts.jit(lambda x: squareplus(x * 2.0) + 1.0)
        assert_close(f(x).array, expected(x * 2.0) + 1, "f32", scale=terms(x * 2.0))
        loops = [unit for unit in fuse(f.graph(x), CPU) if unit.kind == "loop"]
        assert ["mul squareplus add"] == [" ".join(n.op.name for n in g.nodes) for g in loops]

    def test_kernels_for_gpus_have_it(self, squareplus, rng):
        """Its text follows from the loop, is carried out by the interpreter, and is compiled."""
        x, f = values(rng), ts.jit(lambda x: squareplus(x * 2.0))
        program = CudaProgram(f.graph(x), "sm_90a")
        (y,) = program.run([x.array])
        assert_close(y, expected(x * 2.0), "f32", scale=terms(x * 2.0))
        assert expression(OPS["squareplus"].loop, "float") == \
            "({0} + tile.sqrt({0} * {0} + 4.0)) * 0.5"

    def test_its_kernel_is_compiled(self, squareplus, rng):
        require_compiler()
        f = ts.jit(lambda x: squareplus(x))
        assert "sqrt.rn.f32" in f.inspect_ir("ptx", values(rng))

    def test_it_has_a_cost(self, squareplus, rng):
        (work,) = count_graph(ts.jit(squareplus).graph(values(rng)))
        assert (work.flops, work.bytes) == (240, 2 * 4 * 240)

    def test_sentinels_know_it(self, squareplus, fresh_config):
        ts.debug.flags()
        with ts.debug.numerics("flag"):
            squareplus(ts.tensor([1.0, -math.inf]))
        first = ts.debug.flags().first
        assert first is not None and (first.op, first.kind) == ("squareplus", "nan")
        assert "squareplus of -inf is -inf + inf" in str(first.error())

    def test_a_mesh_splits_it(self, squareplus, rng):
        x, rows = values(rng), Layout(MESH, (Split(("dp",)), Split()))
        y = ts.jit(lambda x: squareplus(x))(spread(x, rows, rng))
        assert_close(y.array, expected(x), "f32", scale=terms(x))
        assert y.layout == rows, "it runs where its rows are"

    def test_the_tables_of_the_guide_show_it(self, squareplus):
        row = "| `squareplus` | (x + sqrt(x^2 + 4)) / 2 | reverse, forward |"
        assert row in guide_tables.ops_table()
        assert "ts.squareplus" not in guide_tables.functions_table(), "it is a program's own"
        inspect.unwrap(squareplus).__module__ = "tessera.graph.ops.squareplus"
        table = guide_tables.functions_table().splitlines()
        assert any("ts.squareplus" in line and "`graph.ops.squareplus`" in line for line in table)

    def test_the_tests_of_the_registry_take_it(self, squareplus, rng):
        """Each that is run on samples, and that of layouts on a mesh."""
        op, ran = OPS["squareplus"], []
        for name, test in vars(test_ops_registry).items():
            takes = set(inspect.signature(test).parameters) if name.startswith("test_") else set()
            own = name != "test_an_element_is_what_the_op_gives"  # of ops that move elements
            for s in op.samples if own and takes in ({"op", "s", "rng"}, {"op", "s"}) else ():
                test(**{k: v for k, v in (("op", op), ("s", s), ("rng", rng)) if k in takes})
                ran.append(name)
        assert {"test_compiled_equals_eager", "test_jvp_is_the_finite_difference",
                "test_second_derivatives", "test_vmap_is_a_loop"} <= set(ran)
        test_sharded_ops.test_layouts_give_what_the_whole_gives(op, op.samples[0], rng)
        assert [p.values[0] for p in test_ops_registry.cases_of([op])] == [op, op]


def test_every_op_of_loops_runs_on_gpus() -> None:
    """A loop template that kernels cannot say, of floats or of integers, stops here."""
    for op in OPS.values():
        if op.loop is not None and not op.name.startswith("test_"):
            text = re.sub(r"\{[a-z]+\}", "2.0", op.loop)
            assert any(expression(text, kind) for kind in op.loop_kinds), op.name


@pytest.mark.parametrize("ufunc", [np.log2, np.exp2, np.log10, np.arcsin, np.absolute, np.isnan])
def test_a_ufunc_that_is_the_meaning_of_an_op_is_the_op(ufunc: np.ufunc, rng) -> None:
    x = ts.tensor(rng.uniform(0.1, 0.9, 5).astype(np.float32))
    y = ufunc(x)
    assert isinstance(y, ts.Tensor)
    np.testing.assert_allclose(y.array, ufunc(x.array.astype(np.float64)), rtol=1e-5)


def test_ops_of_kernels_are_declared_before_their_emission_is_imported() -> None:
    """Passes ask the records of ops that other passes put in: emission comes later."""
    load_all()
    late = {r.name: r.run or r.numpy for r in TILE_OPS.values()
            if ".emit." in getattr(r.run or r.numpy or r.lower, "__module__", "")}
    assert not late, f"declare them beside the pass that puts them in: {sorted(late)}"
