"""Which parameters a function writes: those arrays must be writable, and host copies go back."""

from __future__ import annotations

from collections.abc import Iterable

from tessera.errors import ArgumentError, user_line
from tessera.tile.ir.ir import For, Function, If, Op, SSAValue, While, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, View


def written_parameters(function: Function) -> frozenset[str]:
    """Names of the tensors that a store or an atomic reaches, through views and loops too."""
    if "written" not in function.kept:
        function.kept["written"] = _written_tensors(function)
    return function.kept["written"]


def _written_tensors(function: Function) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    places = _tensors_of_views(function)
    for node in walk(function.body):
        if isinstance(node, Op) and OPS[node.name].effect in ("write", "atomic"):
            found |= _of(places, node.args[:1])
    return found


def read_parameters(function: Function) -> frozenset[str]:
    """Names of the tensors whose elements an op may use: all but those that are only stored to."""
    found: frozenset[str] = frozenset()
    places = _tensors_of_views(function)
    for node in walk(function.body):
        if isinstance(node, Op) and not any(isinstance(d.type, View) for d in node.outs):
            first = 1 if OPS[node.name].effect == "write" else 0
            found |= _of(places, node.args[first:])
    return found


def _tensors_of_views(function: Function) -> dict[SSAValue, frozenset[str]]:
    """The tensors to which each tensor and view leads."""
    places: dict[SSAValue, frozenset[str]] = {
        p.value: frozenset({p.value.name}) for p in function.params
        if isinstance(p.type, GlobalTensor)}
    nodes = tuple(walk(function.body))
    while True:
        before = sum(map(len, places.values()))
        for node in nodes:
            _follow(node, places)
        if sum(map(len, places.values())) == before:
            return places


def require_writable(kernel: str, written: frozenset[str], arrays: Iterable[tuple[str, bool, str]]
                     ) -> None:
    """arrays: (name, whether it may be written, its library). Raises ArgumentError."""
    for name, writable, library in arrays:
        if name in written and not writable:
            raise ArgumentError(f"{kernel}: argument {name} is read-only ({library}), the kernel "
                                "writes it", where=user_line(),
                                hint="pass an array that may be written, or return a new tensor "
                                "from the kernel")


def _of(places: dict[SSAValue, frozenset[str]], operands: tuple) -> frozenset[str]:
    return frozenset().union(*(places.get(x, frozenset()) for x in operands))


def _follow(node: Op | For | While | If, places: dict[SSAValue, frozenset[str]]) -> None:
    """Where the views that a node makes lead to."""
    if isinstance(node, Op):
        pairs = [(made, node.args[:1]) for made in node.outs]
    elif isinstance(node, If):
        pairs = list(zip(node.outs, zip(node.thens, node.elses, strict=True), strict=True))
    else:
        pairs = list(zip(node.carried, zip(node.inits, node.yields, strict=True), strict=True))
    for made, sources in pairs:
        if isinstance(made.type, View):
            places[made.value] = places.get(made.value, frozenset()) | _of(places, sources)

