"""The text of Tile IR: one op per line, in the manner of MLIR; parsing.py reads it back."""

from __future__ import annotations

from typing import Any

from tessera.errors import short_path
from tessera.numerics import DType, NumericType
from tessera.tile.ir.ir import Def, For, Function, GridAxis, If, Node, Op, Operand, While


def print_ir(function: Function, lines: bool = True) -> str:
    """The text of a function. lines=False leaves out where each op stands in the source."""
    params = ", ".join(f"{p.role} {p.value}: {p.type}" for p in function.params)
    out = [f"tile.func @{function.name}({params}) {{"]
    out += [f"  version {function.version}"]
    out += ["  launch " + " ".join([function.launch, *map(axis_text, function.grid)])]
    if function.lanes is not None:
        out += [f"  lanes {function.lanes}"]
    if function.modes:
        out += ["  modes " + " ".join(function.modes)]
    out += ["  result " + " ".join(function.result)]
    out += [f"  constant {name} = {attr_text(value)}" for name, value in function.constants]
    printer = _Printer(lines)
    printer.block(function.body, "  ")
    return "\n".join([*out, *printer.out, "}"]) + "\n"


def axis_text(axis: GridAxis) -> str:
    stride = ", stride" if axis.stride else ""
    return f"[{axis.lo}:{axis.dim} by {axis.block}{stride}]"


def attr_text(value: Any) -> str:
    """A compile-time value as text: numbers, names, dtypes, tuples."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(attr_text, value)) + "]"
    if isinstance(value, DType | NumericType):
        return f"<{value}>"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return repr(value)


class _Printer:
    def __init__(self, lines: bool):
        self.lines, self.out = lines, []  # type: ignore[var-annotated]

    def line(self, text: str, node: Node, indent: str) -> None:
        if self.lines and node.where is not None:
            text = f"{text}  // {short_path(node.where.file)}:{node.where.line}"
        self.out.append(indent + text)

    def block(self, nodes: tuple[Node, ...], indent: str) -> None:
        for node in nodes:
            if isinstance(node, Op):
                self.line(op_text(node), node, indent)
            elif isinstance(node, For):
                self.loop(node, indent)
            elif isinstance(node, While):
                self.while_(node, indent)
            else:
                self.if_(node, indent)

    def loop(self, n: For, indent: str) -> None:
        over = "" if n.over == "serial" else f" over {n.over}"
        head = f"for {n.var} = {n.lo} to {n.hi} by {n.step}{over}{carried(n.carried, n.inits)} {{"
        self.line(head, n, indent)
        self.block(n.body, indent + "  ")
        self.out.append(f"{indent}}}{yields(n.yields)}")

    def while_(self, n: While, indent: str) -> None:
        self.line(f"while{carried(n.carried, n.inits)} {{", n, indent)
        self.block(n.test, indent + "  ")
        self.out.append(f"{indent}}} do {n.cond} {{")
        self.block(n.body, indent + "  ")
        self.out.append(f"{indent}}}{yields(n.yields)}")

    def if_(self, n: If, indent: str) -> None:
        outs = f"{defs(n.outs)} = " if n.outs else ""
        self.line(f"{outs}if {n.cond} {{", n, indent)
        self.block(n.then, indent + "  ")
        if n.orelse or n.elses:
            self.out.append(f"{indent}}}{yields(n.thens)} else {{")
            self.block(n.orelse, indent + "  ")
            self.out.append(f"{indent}}}{yields(n.elses)}")
        else:
            self.out.append(f"{indent}}}{yields(n.thens)}")


def op_text(op: Op) -> str:
    """`%x: f32 = mul(%a, 2.0:f32) {attr=1}`"""
    outs = f"{defs(op.outs)} = " if op.outs else ""
    attrs = ", ".join(f"{k}={attr_text(v)}" for k, v in op.attrs)
    return f"{outs}{op.name}({names(op.args)})" + (f" {{{attrs}}}" if attrs else "")


def names(xs: tuple[Operand, ...]) -> str:
    return ", ".join(map(str, xs))


def defs(ds: tuple[Def, ...]) -> str:
    return ", ".join(map(str, ds))


def carried(ds: tuple[Def, ...], inits: tuple[Operand, ...]) -> str:
    if not ds:
        return ""
    return " carry " + ", ".join(f"{d} = {i}" for d, i in zip(ds, inits, strict=True))


def yields(xs: tuple[Operand, ...]) -> str:
    return f" yield {names(xs)}" if xs else ""
