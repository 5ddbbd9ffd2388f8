"""Results: how an accumulator leaves. Stores of 16-bit tensors with aligned rows go through shared
memory by TMA, where that has room, else in accesses of 16 bytes; a quotient by a row statistic in
front of them is a product with its reciprocal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tessera.tile.cuda.lower.warp_specialised.computed import packs_a_product
from tessera.tile.cuda.lower.warp_specialised.program import (
    PANEL_BYTES,
    Refused,
    turned_panel,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Nodes,
    is_op,
    is_part,
    map_blocks,
)
from tessera.tile.ir.ir import (
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    defining_ops,
    definitions,
    operands,
    regions,
    uses,
    walk,
)
from tessera.tile.ir.register_layout import RegisterLayout, warpgroups
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.integer_facts import Knowledge

HALVES = ("bf16", "f16")
COLUMNS = 8  # of 16 bits in 16 bytes
PANEL = PANEL_BYTES // 2  # columns of 16 bits in a row of shared memory
MOST_BUFFERS = 4  # of a warp; two already run one beside the other
MOST_AXES = 5  # of a TMA descriptor


def widen_stores(function: Function, groups: int, known: Knowledge, facts: Any, room: int,
                 loops: int = 1) -> tuple[Function, int]:
    """store_tile -> store_panels where TMA can bring the tile to its place, store_rows where 16
    bytes at once are surely aligned. Layouts are there. room: panels that each warp may have.
    loops: over tiles, one in another. Returns the panels that each warp takes, too."""
    return _Stores(function, groups, known, facts, room, loops).run()


class _Stores:
    def __init__(self, function: Function, groups: int, known: Knowledge, facts: Any, room: int,
                 loops: int):
        self.function, self.groups, self.known = function, groups, known
        self.aligned, self.shared = facts.aligned, getattr(facts, "shared", False)
        self.watched: frozenset[str] = getattr(facts, "watched", frozenset())
        self.made = defining_ops(function.body)
        self.types = definitions(function)
        self.used = uses(function.body)
        self.quotients: set[SSAValue] = set()
        self.read_later = self._read_later()
        # Where a matmul feeds another, registers are full in a long loop, and addresses spill.
        chained = packs_a_product(function.body)
        self.room, self.buffers = 0 if chained else min(room, MOST_BUFFERS), 0
        self.accesses = self._accesses()
        self.repeated = {id(n) for n in _inner_loops(function.body, loops)}

    def run(self) -> tuple[Function, int]:
        body = map_blocks(self.function.body, self.stores)
        body = map_blocks(body, self.divisions)
        if self.buffers:
            body = _ended(body)
        return replace(self.function, body=body), self.buffers

    def _read_later(self) -> set[int]:
        """Stores of tensors that are read after them, by the lane that wrote (see `order`)."""
        found: set[int] = set()
        reads: set[Operand] = set()
        for node in reversed(list(walk(self.function.body))):
            if is_op(node, "load_tile"):
                reads.add(self.tensor(node))
            elif is_op(node, "store_tile") and self.tensor(node) in reads:
                found.add(id(node))
        return found

    def _accesses(self) -> Counter:
        """How many ops reach each tensor, by a view or whole."""
        found: Counter = Counter()
        for node in walk(self.function.body):
            if isinstance(node, Op) and not is_part(node):
                found.update({self.made[x].args[0] if is_part(self.made.get(x)) else x
                              for x in operands(node) if isinstance(x, SSAValue)})
        return found

    def tensor(self, op: Op) -> Operand:
        view = self.made.get(op.args[0])
        return view.args[0] if view is not None else op.args[0]

    def stores(self, nodes: Nodes) -> list[Node]:
        return [replace(n, name=self.way(n)) if is_op(n, "store_tile") else n for n in nodes]

    def way(self, store: Op) -> str:
        """The op that writes a tile."""
        view = self.made.get(store.args[0])
        if is_op(view, "windows"):
            if not self.fits_windows(store, view):
                raise Refused(f"{view.args[0].name} is written in windows that rows of "  # type: ignore[union-attr]
                              "accumulators do not fill")
            return "store_rows"
        if not self.wide(store):
            return "store_tile"
        tile = self.types[store.args[1]]  # type: ignore[index]
        rows, columns = tile.shape  # type: ignore[union-attr]
        turned = self.turned(tile)
        otherwise = "store_tile" if turned or columns % (4 * COLUMNS) else "store_rows"
        if not self.alone(store):
            return otherwise
        if turned:
            each = turned_panel(tile.shape)[0]  # type: ignore[union-attr]
            panels = columns // (64 * self.groups) * -(-rows // each) if each else 0
        else:
            panels = rows // (64 * self.groups) * -(-columns // PANEL) if columns >= PANEL else 0
        if not panels or min(self.room, panels) < min(2, panels):
            return otherwise
        self.buffers = max(self.buffers, min(self.room, panels))
        return "store_panels"

    def alone(self, store: Op) -> bool:
        """Whether nothing else reaches the tensor while TMA writes this tile: no other access, no
        other parameter that is the same memory, no second time in the same tile of the grid."""
        tensor = self.tensor(store)
        t = self.types[tensor]  # type: ignore[index]
        assert isinstance(t, GlobalTensor)
        return (not self.shared and self.accesses[tensor] == 1 and len(t.dims) <= MOST_AXES
                and id(store) not in self.repeated)

    def fits_windows(self, store: Op, view: Op) -> bool:
        """Whether rows of an accumulator go to pixels of windows: columns lie in one of them."""
        tensor, tile = self.types[view.args[0]], self.types[store.args[1]]  # type: ignore[index]
        assert isinstance(tensor, GlobalTensor) and isinstance(tile, TileType)
        policy, columns = tensor.numeric.policy, tile.shape[1]
        return (
            policy.rounding == "nearest_even" and not policy.saturate and tile.layout is not None
            and tensor.dtype.name in (*HALVES, "f32")
            and tile.dtype.name in ("f32", tensor.dtype.name)
            and RegisterLayout.parse(tile.layout, tile.shape) == warpgroups(tile.shape, self.groups)
            and columns % (4 * COLUMNS) == 0 == view.attr["channels"] % columns
            and self.known.divisor(view.args[2]) % columns == 0
            and all(map(self.known.natural, view.args[1:]))
            and view.args[0].name in self.aligned  # type: ignore[union-attr]
            and view.args[0].name not in self.watched  # type: ignore[union-attr]
            and id(store) not in self.read_later)

    def turned(self, tile: Any) -> bool:
        """Whether a tile is an accumulator's transpose, with columns for all consumers."""
        plain = warpgroups(tile.shape[::-1], self.groups)
        return tile.shape[1] % (64 * self.groups) == 0 and RegisterLayout.parse(
            tile.layout, tile.shape) == plain.permuted((1, 0))

    def wide(self, store: Op) -> bool:
        if id(store) in self.read_later:
            return False
        view, value = (self.made.get(x) for x in store.args)
        if view is None or view.name != "view":
            return False
        tensor, tile = (self.types.get(x)  # type: ignore[arg-type]
                        for x in (view.args[0], store.args[1]))
        if not isinstance(tensor, GlobalTensor) or not isinstance(tile, TileType) \
                or tile.layout is None:
            return False
        policy, rank = tensor.numeric.policy, len(tensor.dims)
        plain = policy.rounding == "nearest_even" and not policy.saturate
        kept = tuple(view.attr["kept"])
        if not plain or tensor.dtype.name not in HALVES or tile.dtype.name not in (
                "f32", tensor.dtype.name) or (
                len(kept) != 2 or kept[1] != rank - 1 or kept[0] > kept[1]):
            return False
        if not self.turned(tile) and RegisterLayout.parse(
                tile.layout, tile.shape) != warpgroups(tile.shape, self.groups):
            return False
        fits = tile.shape[1] % COLUMNS == 0 and view.args[0].name in self.aligned  # type: ignore[union-attr]
        rows = self.known.extent(str(tensor.dims[-1])) % COLUMNS == 0
        if not fits or not rows or self.known.divisor(view.args[-1]) % COLUMNS or not all(
                self.known.natural(view.args[1 + a]) for a in kept):
            return False
        if tile.shape[1] % (4 * COLUMNS) == 0 and is_op(
                value, "div_or_zero") and self.used[store.args[1]] == 1 and is_op(  # type: ignore[index]
                self.made.get(value.args[1]), "expand_dims"):
            self.quotients.add(store.args[1])  # type: ignore[arg-type]
        return True

    def divisions(self, nodes: Nodes) -> list[Node]:
        return [replace(n, name="row_quotient") if isinstance(n, Op) and n.outs
                and n.outs[0].value in self.quotients else n for n in nodes]


def _inner_loops(nodes: Nodes, over_tiles: int) -> list[Node]:
    """What lies in a loop inside of the loops over tiles."""
    found: list[Node] = []
    for node in nodes:
        if over_tiles < 0:
            found.append(node)
        for region in regions(node):
            found += _inner_loops(region, over_tiles - isinstance(node, For | While))
    return found


def _ended(body: Nodes) -> Nodes:
    """The consumers end when TMA has read what they left in shared memory."""
    *before, roles = body
    assert isinstance(roles, If)
    return (*before, replace(roles, orelse=(*roles.orelse, Op("panels_read", (), ()))))
