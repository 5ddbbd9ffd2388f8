"""Reads the printed form of Tile IR back: parse_ir(print_ir(f)) == f.

The grammar is the printer's: one construct per line, so the reader goes line by line.
"""

from __future__ import annotations

import re
from typing import Any

from tessera.errors import source_line
from tessera.numerics import find_dtype, parse
from tessera.tile.ir.errors import TileIRError
from tessera.tile.ir.ir import (
    VERSION,
    Const,
    Def,
    For,
    Function,
    GridAxis,
    If,
    Node,
    Op,
    Operand,
    Param,
    SSAValue,
    While,
)
from tessera.tile.ir.types import parse_type


def parse_ir(text: str) -> Function:
    """The function that a printed text stands for. Raises TileIRError naming the line."""
    return _Reader(text).function()


def split(text: str, mark: str = ",") -> list[str]:
    """The parts of text between `mark`s that stand outside brackets and quotes."""
    parts, depth, start, quoted, i = [], 0, 0, False, 0
    while i < len(text):
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif depth == 0 and text.startswith(mark, i):
            parts.append(text[start:i])
            start = i + len(mark)
            i = start - 1
        i += 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def parse_attr(text: str) -> Any:
    text = text.strip()
    if text.startswith("["):
        return tuple(parse_attr(p) for p in split(text[1:-1]))
    if text.startswith("<"):
        numeric = parse(text[1:-1])
        return numeric if "@" in text else numeric.dtype
    if text.startswith('"'):
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text[1:-1])
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def parse_operand(text: str) -> Operand:
    text = text.strip()
    if text.startswith("%"):
        return SSAValue(text[1:])
    if text in ("true", "false"):
        return Const(text == "true", find_dtype("bool_"))
    number, _, dtype = text.rpartition(":")
    kind = find_dtype(dtype)
    return Const(float(number) if kind.kind == "float" else int(number), kind)


def parse_operands(text: str) -> tuple[Operand, ...]:
    return tuple(parse_operand(p) for p in split(text))


def parse_defs(text: str) -> tuple[Def, ...]:
    return tuple(_def(p) for p in split(text))


def _def(text: str) -> Def:
    name, _, kind = text.partition(":")
    return Def(SSAValue(name.strip()[1:]), parse_type(kind))


_AXIS = re.compile(r"\[(.+?):(.+?) by (\d+)(, stride)?\]")
_OP = re.compile(r"(?:(?P<outs>%.*?) = )?(?P<name>[\w.]+)"
                 r"\((?P<args>[^)]*)\)(?: \{(?P<attrs>.*)\})?$")
_FOR = re.compile(r"for (%\S+: .+?) = (\S+) to (\S+) by (\S+)(?: over (\w+))?(?: carry (.*))? \{$")


class _Reader:
    def __init__(self, text: str):
        self.lines = [line.strip() for line in text.strip().splitlines()]
        self.at = 0
        self.where: Any = None

    def fail(self, message: str) -> TileIRError:
        line = self.lines[min(self.at, len(self.lines) - 1)]
        return TileIRError(f"Tile IR, line {self.at + 1}: {message}: {line!r}")

    def next(self) -> str:
        if self.at >= len(self.lines):
            raise self.fail("the text ends inside a block")
        text, mark, place = self.lines[self.at].rpartition("  // ")
        self.at += 1
        self.where = None
        if not mark:
            return place
        file, _, line = place.rpartition(":")
        self.where = source_line(file, int(line))
        return text

    def function(self) -> Function:
        head = re.fullmatch(r"tile\.func @(\w+)\((.*)\) \{", self.next())
        if head is None:
            raise self.fail("expected tile.func @name(...) {")
        params = tuple(_param(p) for p in split(head[2]))
        version = int(self.expect("version"))
        if version != VERSION:
            raise self.fail(f"version {version} is not the version {VERSION} that is read here")
        launch, _, axes = self.expect("launch").partition(" ")
        lanes = int(self.expect("lanes")) if self.lines[self.at].startswith("lanes ") else None
        modes = tuple(self.expect("modes").split()) \
            if self.lines[self.at].startswith("modes ") else ()
        result = tuple(self.expect("result").split())
        constants = []
        while self.lines[self.at].startswith("constant "):
            name, _, value = self.expect("constant").partition(" = ")
            constants.append((name, parse_attr(value)))
        body, last = self.block()
        if last != "}":
            raise self.fail("expected }")
        grid = tuple(GridAxis(m[2], int(m[3]), m[1], bool(m[4])) for m in _AXIS.finditer(axes))
        return Function(head[1], params, grid, launch, result, tuple(constants), body, lanes,
                        modes=modes)

    def expect(self, word: str) -> str:
        line = self.next()
        if not line.startswith(word + " "):
            raise self.fail(f"expected {word!r}")
        return line[len(word) + 1:]

    def block(self) -> tuple[tuple[Node, ...], str]:
        """The nodes up to the line that closes the block, and that line."""
        nodes: list[Node] = []
        while not (line := self.next()).startswith("}"):
            nodes.append(self.node(line))
        return tuple(nodes), line

    def node(self, line: str) -> Node:
        where = self.where
        if line.startswith("for "):
            return self.loop(line, where)
        if line.startswith("while"):
            return self.while_(line, where)
        if branch := re.fullmatch(r"(?:(%.*) = )?if (\S+) \{", line):
            return self.if_(branch, where)
        op = _OP.fullmatch(line)
        if op is None:
            raise self.fail("not a construct of Tile IR")
        attrs = [p.partition("=") for p in split(op["attrs"] or "")]
        return Op(op["name"], parse_operands(op["args"]), parse_defs(op["outs"] or ""),
                  tuple((k.strip(), parse_attr(v)) for k, _, v in attrs), where)

    def loop(self, line: str, where: Any) -> For:
        head = _FOR.fullmatch(line)
        if head is None:
            raise self.fail("expected for %i: type = lo to hi by step {")
        carried, inits = _carried(head[6])
        body, last = self.block()
        lo, hi, step = map(parse_operand, head.groups()[1:4])
        return For(_def(head[1]), lo, hi, step, carried, inits, body, _yields(last),
                   head[5] or "serial", where)

    def while_(self, line: str, where: Any) -> While:
        carried, inits = _carried(line[len("while carry "):-2] if " carry " in line else None)
        test, middle = self.block()
        cond = re.fullmatch(r"\} do (\S+) \{", middle)
        if cond is None:
            raise self.fail("expected } do %cond {")
        body, last = self.block()
        return While(carried, inits, test, parse_operand(cond[1]), body, _yields(last), where)

    def if_(self, head: re.Match[str], where: Any) -> If:
        then, last = self.block()
        orelse: tuple[Node, ...] = ()
        elses: tuple[Operand, ...] = ()
        thens = _yields(last.removesuffix(" else {"))
        if last.endswith(" else {"):
            orelse, last = self.block()
            elses = _yields(last)
        return If(parse_operand(head[2]), then, orelse, parse_defs(head[1] or ""), thens, elses,
                  where)


def _param(text: str) -> Param:
    role, _, rest = text.partition(" ")
    made = _def(rest)
    return Param(made.value, made.type, role)


def _carried(text: str | None) -> tuple[tuple[Def, ...], tuple[Operand, ...]]:
    pairs = [p.rpartition(" = ") for p in split(text or "")]
    return tuple(_def(d) for d, _, _ in pairs), tuple(parse_operand(i) for _, _, i in pairs)


def _yields(line: str) -> tuple[Operand, ...]:
    return parse_operands(line.partition(" yield ")[2])
