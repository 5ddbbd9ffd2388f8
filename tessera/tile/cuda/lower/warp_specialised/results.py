"""Results: how an accumulator leaves. Stores of 16-bit tensors with aligned rows move 16 bytes a
lane; a quotient by a row statistic in front of them is a product with its reciprocal."""

from __future__ import annotations

from dataclasses import replace

from tessera.tile.cuda.lower.warp_specialised.rewrite import Nodes, is_op, map_blocks
from tessera.tile.ir.ir import Function, Node, Op, Operand, SSAValue, definitions, uses, walk
from tessera.tile.ir.register_layout import RegisterLayout, warpgroups
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.passes.integer_facts import Knowledge

HALVES = ("bf16", "f16")
COLUMNS = 8  # of 16 bits in 16 bytes


def widen_stores(function: Function, groups: int, known: Knowledge,
                 aligned: frozenset[str]) -> Function:
    """store_tile -> store_rows where 16 bytes at once are surely aligned. Layouts are there."""
    return _Stores(function, groups, known, aligned).run()


class _Stores:
    def __init__(self, function: Function, groups: int, known: Knowledge,
                 aligned: frozenset[str]):
        self.function, self.groups, self.known = function, groups, known
        self.aligned = aligned
        self.made = {d.value: n for n in walk(function.body) if isinstance(n, Op)
                     for d in n.outs}
        self.types = definitions(function)
        self.used = uses(function.body)
        self.quotients: set[SSAValue] = set()
        self.read_later = self._read_later()

    def run(self) -> Function:
        body = map_blocks(self.function.body, self.stores)
        return replace(self.function, body=map_blocks(body, self.divisions))

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

    def tensor(self, op: Op) -> Operand:
        view = self.made.get(op.args[0])  # type: ignore[arg-type]
        return view.args[0] if view is not None else op.args[0]

    def stores(self, nodes: Nodes) -> list[Node]:
        return [replace(n, name="store_rows") if is_op(n, "store_tile") and self.wide(n)
                else n for n in nodes]

    def wide(self, store: Op) -> bool:
        if id(store) in self.read_later:
            return False
        view, value = (self.made.get(x) for x in store.args)  # type: ignore[arg-type]
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
        if not plain or tensor.dtype.name not in HALVES or tile.dtype.name != "f32" or (
                len(kept) != 2 or kept[1] != rank - 1 or kept[0] > kept[1]):
            return False
        if RegisterLayout.parse(tile.layout, tile.shape) != warpgroups(tile.shape, self.groups):
            return False
        fits = tile.shape[1] % (4 * COLUMNS) == 0 and view.args[0].name in self.aligned  # type: ignore[union-attr]
        rows = self.known.extent(str(tensor.dims[-1])) % COLUMNS == 0
        if not fits or not rows or self.known.divisor(view.args[-1]) % COLUMNS or not all(
                self.known.natural(view.args[1 + a]) for a in kept):
            return False
        if is_op(value,
                 "div_or_zero") and self.used[store.args[1]] == 1 and is_op(  # type: ignore[index]
                self.made.get(value.args[1]), "expand_dims"):  # type: ignore[arg-type]
            self.quotients.add(store.args[1])  # type: ignore[arg-type]
        return True

    def divisions(self, nodes: Nodes) -> list[Node]:
        return [replace(n, name="row_quotient") if isinstance(n, Op) and n.outs
                and n.outs[0].value in self.quotients else n for n in nodes]
