"""break, continue and early return as structured control flow, on the AST.

What follows an `if` that always leaves moves into its other branch: `if i >= n: return` needs no
flag. Elsewhere a flag says that the way was left: what follows is guarded by it, and the loops that
it leaves test it before each iteration. The else of a loop is an `if` on its flag of break.
"""

from __future__ import annotations

import ast
from dataclasses import field
from typing import Any

from ...lazy_dataclass import dataclass
from ..ir.handles import UNSET

RETURN, RETURNED = "__result", "__returned"


@dataclass
class _Scope:
    """flags: names that are set when this loop's way is left, for break and for continue."""

    number: int
    used: set[str] = field(default_factory=set)

    @property
    def brk(self) -> str:
        return f"__break{self.number}"

    @property
    def cont(self) -> str:
        return f"__continue{self.number}"


class Exits:
    """`.body` is the function's body without break, continue, return; `.flags` those it needs.

    .unset: what the result is at first: nothing has it a type yet where a loop's iteration returns
    a value, and it is None where no return has one
    """

    def __init__(self, tree: ast.FunctionDef):
        self.count = 0
        self.returns: list[ast.Return] = []
        self.flags: set[str] = set()
        self.gives = any(isinstance(n, ast.Return) and n.value is not None and not (
            isinstance(n.value, ast.Constant) and n.value.value is None) for n in ast.walk(tree))
        self.body = self.block(_copied(tree.body), None, tail=True)
        self.unset = UNSET if self.flags and self.gives else None

    def block(self, stmts: list[ast.stmt], loop: _Scope | None, tail: bool) -> list[ast.stmt]:
        """tail: what follows the block is the end of the function (loop None) or of the
        iteration."""
        out: list[ast.stmt] = []
        for i, s in enumerate(stmts):
            rest = stmts[i + 1:]
            if isinstance(s, ast.Return | ast.Break | ast.Continue):
                return out + self.leave(s, loop, tail)
            if isinstance(s, ast.If) and _leaves(s):
                return out + self.branch(s, rest, loop, tail)
            if isinstance(s, ast.If):  # nothing leaves it, but loops inside may have exits
                out.append(self.copy_if(s, self.block(s.body, loop, False),
                                        self.block(s.orelse, loop, False)))
                continue
            if isinstance(s, ast.For | ast.While):
                orelse, s.orelse = s.orelse, []
                returns = _has_return(s)  # before its body is rewritten
                broke = _Scope(self.count).brk
                out += self.loop(s)
                if orelse:
                    rest = [*([guard([broke], orelse, s)] if _assigns(out, broke) else orelse),
                            *rest]
                    if not returns:
                        return out + self.block(rest, loop, tail)
                if returns:
                    guarded = self.block(rest, loop, tail)
                    return out + ([guard([RETURNED], guarded, s)] if guarded else [])
                continue
            out.append(s)
        return out

    def leave(self, s: ast.stmt, loop: _Scope | None, tail: bool) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        if isinstance(s, ast.Return):
            self.returns.append(s)
            value = s.value or ast.Constant(None)
            if self.gives:
                out.append(_at(ast.Assign([ast.Name(RETURN, ast.Store())], value), s))
            if tail and loop is None:
                return out or [_at(ast.Pass(), s)]
            return [*out, self.set(RETURNED, s)]
        assert loop is not None  # Python's own parser refuses it elsewhere
        if isinstance(s, ast.Break):
            loop.used.add(loop.brk)
            return [self.set(loop.brk, s)]
        if tail:
            return [_at(ast.Pass(), s)]
        loop.used.add(loop.cont)
        return [self.set(loop.cont, s)]

    def set(self, flag: str, at: ast.stmt) -> ast.stmt:
        if flag == RETURNED:
            self.flags.add(flag)
        return _at(ast.Assign([ast.Name(flag, ast.Store())], ast.Constant(True)), at)

    def branch(self, s: ast.If, rest: list[ast.stmt], loop: _Scope | None,
               tail: bool) -> list[ast.stmt]:
        if not rest:
            return [self.copy_if(s, self.block(s.body, loop, tail),
                                 self.block(s.orelse, loop, tail))]
        if _always(s.body):
            return [self.copy_if(s, self.block(s.body, loop, tail),
                                 self.block(s.orelse + rest, loop, tail))]
        if s.orelse and _always(s.orelse):
            return [self.copy_if(s, self.block(s.body + rest, loop, tail),
                                 self.block(s.orelse, loop, tail))]
        before = set(loop.used) if loop else set()
        first = self.copy_if(s, self.block(s.body, loop, False), self.block(s.orelse, loop, False))
        flags = sorted((loop.used - before if loop else set())
                       | ({RETURNED} if _has_return(s) else set()))
        flags = flags or sorted(loop.used if loop else [])
        return [first, guard(flags, self.block(rest, loop, tail), s)]

    @staticmethod
    def copy_if(s: ast.If, body: list[ast.stmt], orelse: list[ast.stmt]) -> ast.stmt:
        return _at(ast.If(s.test, body or [_at(ast.Pass(), s)], orelse), s)

    def loop(self, s: ast.For | ast.While) -> list[ast.stmt]:
        """The loop with its flags: `s.exits` are tested before each iteration."""
        scope = _Scope(self.count)
        self.count += 1
        returns = _has_return(s)
        s.body = self.block(s.body, scope, tail=True)
        if returns:
            self.flags.add(RETURNED)
        flags = sorted(scope.used & {scope.brk}) + ([RETURNED] if returns else [])
        s.exits = flags  # type: ignore[union-attr]
        s.resets = sorted(scope.used & {scope.cont})  # type: ignore[union-attr]
        starts = [_at(ast.Assign([ast.Name(f, ast.Store())], ast.Constant(False)), s)
                  for f in sorted(scope.used)]
        return [*starts, s]


def _at(node: ast.stmt, like: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(node, like))


def _assigns(stmts: list[ast.stmt], flag: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == flag for s in stmts for n in ast.walk(s))


def guard(flags: list[str], body: list[ast.stmt], like: ast.stmt) -> ast.stmt:
    """An `if` that none of these flags is set."""
    tests: list[ast.expr] = [ast.UnaryOp(ast.Not(), ast.Name(f, ast.Load())) for f in flags]
    test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)
    return _at(ast.If(test, body or [ast.Pass()], []), like)


def _copied(node: Any) -> Any:
    """A copy of a tree: copy.deepcopy, which has to look for cycles, takes three times as long."""
    if isinstance(node, list):
        return [_copied(n) for n in node]
    if not isinstance(node, ast.AST) or not vars(node):
        return node
    made = type(node).__new__(type(node))
    held = vars(made)
    held.update(vars(node))
    for name in node._fields:  # the rest, where it stands in the text, is numbers
        if isinstance(part := held.get(name), list | ast.AST):
            held[name] = _copied(part)
    return made


def _leaves(s: ast.stmt) -> bool:
    """Whether a break, continue or return of the enclosing loop or function is inside."""
    if isinstance(s, ast.Return | ast.Break | ast.Continue):
        return True
    if isinstance(s, ast.If):
        return any(map(_leaves, s.body + s.orelse))
    return isinstance(s, ast.For | ast.While) and (_has_return(s) or any(map(_leaves, s.orelse)))


def _has_return(s: ast.stmt) -> bool:
    return any(isinstance(n, ast.Return) for n in ast.walk(s))


def _always(body: list[ast.stmt]) -> bool:
    """Whether the end of this block is never reached."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Break | ast.Continue):
        return True
    return isinstance(last, ast.If) and _always(last.body) and _always(last.orelse)
