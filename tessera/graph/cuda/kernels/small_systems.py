"""Systems of a few equations, each in the registers of one lane: solve, inv, slogdet, det, Cholesky
factors and triangular systems of up to four rows, where a library would launch a kernel or two for
each step and wait for what they report.

A matrix [n, n] is n * n tiles of one element for each matrix of the batch. Rows change places by
selects, so that lanes stay together; a pivot of 0 fails an assertion, as it raises on the CPU.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....numerics import as_type
from ...ir import Graph, Node, Value
from ...op import OPS, Aval
from ...schedule.build_schedule import ScheduleBuilder
from ...schedule.groups import FusionGroup
from ...schedule.ir import ScheduledGroup
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ..choose_schedule import blocks, chosen
from .failed_checks import NOT_POSITIVE, SINGULAR
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital

MOST = 4  # rows
COLUMNS = 4  # of right sides that one lane has
LANES = 128  # of a group
# a (, b) as [L, n, n] (and [L, n, m]) -> [L, n, m], [L, n, n], or two of [L]
WAYS = ("solve", "inv", "slogdet", "det", "cholesky", "triangular_solve")
SMALL = {way: library_call(f"small_{way}", multi=way == "slogdet") for way in WAYS}
WAY_OF = {op.name: way for way, op in SMALL.items()}


# --- which ----------------------------------------------------------------------------------------
def solve_small_systems(graph: Graph) -> Graph:
    """Systems of a few rows as kernels of ours."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _opened(node) if node.op.name in SMALL and _is_small(node) else [node]
    return graph if len(nodes) == len(graph.nodes) else Graph(
        graph.name, graph.inputs, graph.captures, tuple(nodes), graph.outputs)


def _is_small(node: Node) -> bool:
    avals = [v.aval for v in (*node.inputs, *node.outputs)]
    if not all(isinstance(d, int) and d for a in avals for d in a.shape):
        return False
    a = avals[0]
    leads = [v.aval.shape[:-2] for v in node.inputs]
    return (a.dtype.name in ("f32", "f64") and 1 < int(a.shape[-1]) <= MOST
            and a.shape[-1] == a.shape[-2] and all(lead == leads[0] for lead in leads))


def _opened(node: Node) -> list[Node]:
    """With one axis of matrices."""
    made: list[Node] = []

    def reshaped(v: Value, shape: tuple[int, ...]) -> Value:
        out = Value(Aval(shape, v.aval.type))
        made.append(Node(OPS["reshape"], (v,), {"shape": shape}, (out,), node.where))
        return out

    lead = prod(extents_of(node.inputs[0])[:-2])
    given = tuple(reshaped(v, (lead, *extents_of(v)[-2:])) for v in node.inputs)
    flat = [(lead, *extents_of(v)[-2:]) if node.op.name not in ("slogdet", "det") else (lead,)
            for v in node.outputs]
    outs = tuple(Value(Aval(s, v.aval.type)) for s, v in zip(flat, node.outputs, strict=True))
    attrs = {k: v for k, v in node.attrs.items() if k in ("lower", "unit")}
    made.append(Node(SMALL[node.op.name], given, attrs, outs, node.where))
    for v, out in zip(outs, node.outputs, strict=True):
        made.append(Node(OPS["reshape"], (v,), {"shape": out.aval.shape}, (out,), node.where))
    return made


# --- schedule -------------------------------------------------------------------------------------
def schedule_small(builder: ScheduleBuilder, group: FusionGroup) -> None:
    (node,) = group.nodes
    reads = [builder.operand(v) for v in builder.reads(group)]
    writes = [builder.operand(v) for v in group.outputs]
    L, n, _ = extents_of(node.inputs[0])
    m = extents_of(node.inputs[1])[2] if len(node.inputs) == 2 else n
    step = builder.step(node)
    s = chosen(None, LANES, warps=LANES // 32)
    builder.add(group.kind, (L, n, m), reads, writes, [step], s,
                (blocks(L, LANES), blocks(m, COLUMNS) if len(node.inputs) == 2 else 1),
                way=WAY_OF[node.op.name], lower=bool(node.attrs.get("lower", True)),
                unit=bool(node.attrs.get("unit", False)),
                kept=tuple(node.outputs.index(v) for v in group.outputs))


# --- kernel ---------------------------------------------------------------------------------------
class _Lane:
    """The matrices of a kernel: a[i][j] and b[i][j] are names of tiles."""

    def __init__(self, group: ScheduledGroup):
        self.w, (self.step,) = KernelWriter(group), group.steps
        self.group, (self.L, self.n, self.m) = group, group.space
        self.kind = self.w.type(group.reads[0].type)
        self.count = 0
        self.line(f"l = tile.group_id(0) * {LANES}")
        self.line(f"c = tile.group_id(1) * {COLUMNS}")
        place = self.w.type(as_type("int64"))
        self.line(f"each = tile.arange(0, {LANES}, {place}) + l")
        self.line(f"inside = each < {self.L}")

    def line(self, text: str) -> None:
        self.w.line(text, self.step)

    def new(self, text: str) -> str:
        self.count += 1
        self.line(f"t{self.count} = {text}")
        return f"t{self.count}"

    def load(self, operand: Any, rows: int, columns: int, stride: int, first: str = "0") -> list:
        """Elements of each matrix, 0 beyond its columns."""
        V = capital(operand.name)
        return [[self.new(f"tile.gather({V}, tile.where(inside & ({first} + {j} < {stride}), "
                          f"each * {rows * stride} + {i * stride} + {first} + {j}, "
                          f"{self.L * rows * stride}))")
                 for j in range(columns)] for i in range(rows)]

    def store(self, name: str, values: list, stride: int, first: str = "0") -> None:
        rows, V = len(values), capital(name)
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                place = self.new(f"tile.where(inside & ({first} + {j} < {stride}), each * "
                                 f"{rows * stride} + {i * stride} + {first} + {j}, -1)")
                self.line(f"tile.scatter({V}, {place}, {value})")

    def need(self, condition: str, what: str) -> None:
        self.line(f'assert ({condition}) | ~inside, "{what}"')
        self.w.checks = True

    # --- LU -------------------------------------------------------------------------------------
    def eliminate(self, a: list, b: list, sign: str = "") -> str:
        """To a triangle above, rows with the largest pivots first; the sign of the permutation."""
        n = self.n
        for c in range(n):
            for r in range(c + 1, n):
                swap = self.new(f"tile.abs({a[r][c]}) > tile.abs({a[c][c]})")
                for rows in (a, b):
                    for j in range(c if rows is a else 0, len(rows[c]) if rows else 0):
                        up, down = rows[c][j], rows[r][j]
                        rows[c][j] = self.new(f"tile.where({swap}, {down}, {up})")
                        rows[r][j] = self.new(f"tile.where({swap}, {up}, {down})")
                if sign:
                    sign = self.new(f"tile.where({swap}, -{sign}, {sign})")
            for r in range(c + 1, n):
                pivot = a[c][c]
                if sign:  # a column of zeros stays one
                    pivot = self.new(f"tile.where({pivot} == 0.0, 1.0, {pivot})")
                factor = self.new(f"{a[r][c]} / {pivot}")
                for rows, begin in ((a, c + 1), (b, 0)):
                    for j in range(begin, len(rows[c]) if rows else 0):
                        rows[r][j] = self.new(f"{rows[r][j]} - {factor} * {rows[c][j]}")
        return sign

    def substitute(self, a: list, b: list, lower: bool, unit: bool) -> None:
        n = self.n
        for i in range(n) if lower else reversed(range(n)):
            if not unit:
                self.need(f"{a[i][i]} != 0.0", SINGULAR)
            known = range(i) if lower else range(i + 1, n)
            for j in range(len(b[i])):
                for k in known:
                    b[i][j] = self.new(f"{b[i][j]} - {a[i][k]} * {b[k][j]}")
                if not unit:
                    b[i][j] = self.new(f"{b[i][j]} / {a[i][i]}")


def small_source(group: ScheduledGroup) -> KernelText:
    lane, way = _Lane(group), group.attr("way")
    n, m, w = lane.n, lane.m, lane.w
    a = lane.load(group.reads[0], n, n, n)
    if way in ("solve", "triangular_solve"):
        b = lane.load(group.reads[-1], n, min(m, COLUMNS), m, "c")  # the matrix itself, maybe
        if way == "solve":
            lane.eliminate(a, b)
        triangle = way == "triangular_solve"
        lane.substitute(a, b, triangle and group.attr("lower"), triangle and group.attr("unit"))
        lane.store(group.writes[0].name, b, m, "c")
    elif way == "inv":
        full = [lane.new(f"tile.full(({LANES},), {v}, {lane.kind})") for v in ("0.0", "1.0")]
        b = [[full[i == j] for j in range(n)] for i in range(n)]
        lane.eliminate(a, b)
        lane.substitute(a, b, False, False)
        lane.store(group.writes[0].name, b, n)
    elif way == "cholesky":
        lane.store(group.writes[0].name, _factored(lane, a), n)
    else:
        _determinant(lane, a, way)
    return w.finish_flat()


def _factored(lane: _Lane, a: list) -> list:
    """The lower factor of the symmetric part."""
    n = lane.n
    zero = lane.new(f"tile.full(({LANES},), 0.0, {lane.kind})")
    made = [[zero] * n for _ in range(n)]
    for j in range(n):
        for i in range(j, n):
            value = a[j][j] if i == j else lane.new(f"0.5 * ({a[i][j]} + {a[j][i]})")
            for k in range(j):
                value = lane.new(f"{value} - {made[i][k]} * {made[j][k]}")
            if i == j:
                lane.need(f"{value} > 0.0", NOT_POSITIVE)
                made[j][j] = lane.new(f"tile.sqrt({value})")
            else:
                made[i][j] = lane.new(f"{value} / {made[j][j]}")
    return made


def _determinant(lane: _Lane, a: list, way: str) -> None:
    one = lane.new(f"tile.full(({LANES},), 1.0, {lane.kind})")
    sign = lane.eliminate(a, [], one)
    pivots = [a[i][i] for i in range(lane.n)]
    if way == "det":
        for p in pivots:
            sign = lane.new(f"{sign} * {p}")
        results = [sign]
    else:
        log = ""
        for p in pivots:
            sign = lane.new(f"{sign} * tile.where({p} < 0.0, -1.0, tile.where({p} == 0.0, 0.0, "
                            f"tile.where({p} > 0.0, 1.0, {p})))")
            size = lane.new(f"tile.log(tile.abs({p}))")
            log = lane.new(f"{log} + {size}") if log else size
        results = [sign, log]
    for o, k in zip(lane.group.writes, lane.group.attr("kept"), strict=True):
        lane.line(f"{capital(o.name)}[l:l+{LANES}] = {results[k]}")


kernel_kind("small_system", "elementwise", small_source, schedule_small, SMALL.values())

__all__ = ["solve_small_systems"]
