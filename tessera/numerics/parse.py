"""The string form of numeric types: dtype ('@' name ['(' arg ')'])*, white space free.

    parse("fp8_e4m3 @accum(f32) @stochastic_round") == fp8_e4m3 @accum(f32) @stochastic_round
    parse('int8@per_channel(0) @scaled("amax")')    # quotes are optional

A cursor over the text, no eval. A malformed string raises PolicyError with position and caret.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NoReturn

import numpy as np

from tessera.errors import DTypeError, PolicyError, did_you_mean
from tessera.lazy_dataclass import dataclass
from tessera.numerics.dtypes import DType, dtype_names, find_dtype
from tessera.numerics.policy import (
    ModifierKind,
    NumericType,
    Policy,
    as_type,
    custom_policies,
    is_custom_policy,
    modifier_kinds,
    need_order,
)

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARGUMENT = re.compile(r"""(?P<quote>["']?)(?P<text>[\w.:+-]*)(?P=quote)""")


@dataclass
class _Cursor:
    text: str
    at: int = 0

    def fail(self, message: str, at: int | None = None, hint: str | None = None) -> NoReturn:
        at = self.at if at is None else at
        shown = self.text.replace("\n", " ").replace("\t", " ")
        raise PolicyError(f"{message} at position {at}\n  {shown}\n  {' ' * at}^", hint=hint)

    def skip_space(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match here, moved past it; None (and no move) when there is none or it is empty."""
        self.skip_space()
        match = pattern.match(self.text, self.at)
        if match is None or match.end() == self.at:
            return None
        self.at = match.end()
        return match

    def accept(self, char: str) -> bool:
        self.skip_space()
        if not self.text.startswith(char, self.at):
            return False
        self.at += len(char)
        return True

    @property
    def done(self) -> bool:
        self.skip_space()
        return self.at == len(self.text)


@functools.cache
def parse(text: str) -> NumericType:
    """The numeric type that `text` names. PolicyError with position and caret when malformed.

    A text is read once, until a new policy class changes what names mean.
    """
    cursor = _Cursor(text)
    base = _parse_head(cursor)
    policy = _parse_modifiers(cursor, base.policy)
    need_order(base.dtype, policy)
    return base if policy == base.policy else NumericType(base.dtype, policy)


def parse_policy(text: str) -> Policy:
    """The policy that a list of modifiers names: parse_policy(str(p)) == p without `custom`."""
    return _parse_modifiers(_Cursor(text), Policy())


def _parse_head(cursor: _Cursor) -> NumericType:
    match = cursor.take(_NAME)
    if match is None:
        cursor.fail("expected a dtype name", hint="such as 'fp8_e4m3 @accum(f32)'")
    name, custom = match.group(), custom_policies()
    if name in custom:
        return as_type(custom[name])
    return as_type(_dtype(cursor, name, match.start()))


def _dtype(cursor: _Cursor, name: str, at: int) -> DType:
    if name not in dtype_names():
        known = (*dtype_names(), *custom_policies())
        cursor.fail(f"unknown dtype {name!r}", at, did_you_mean(name, known))
    return find_dtype(name)


def _parse_modifiers(cursor: _Cursor, policy: Policy) -> Policy:
    seen: dict[str, str] = {}
    while not cursor.done:
        if not cursor.accept("@"):
            cursor.fail(f"expected '@' but found {cursor.text[cursor.at]!r}")
        policy = _parse_modifier(cursor, policy, seen)
    return policy


def _parse_modifier(cursor: _Cursor, policy: Policy, seen: dict[str, str]) -> Policy:
    match = cursor.take(_NAME)
    if match is None:
        cursor.fail("expected a modifier name after '@'")
    name, at = match.group(), match.start()
    kind = modifier_kinds().get(name)
    if kind is None:
        cursor.fail(f"unknown modifier {name!r}", at, did_you_mean(name, tuple(modifier_kinds())))
    if kind.field in seen:
        cursor.fail(f"@{name} contradicts or repeats @{seen[kind.field]}", at)
    seen[kind.field] = name
    if kind.when is not None:
        if cursor.accept("("):
            cursor.fail(f"@{name} takes no argument", cursor.at - 1)
        return kind(kind.when).apply(policy)
    return kind(_parse_argument(cursor, kind)).apply(policy)


def _parse_argument(cursor: _Cursor, kind: ModifierKind) -> DType | str | float | int:
    """The argument between parentheses, checked, so that an error can point at it."""
    if not cursor.accept("("):
        cursor.fail(f"@{kind.name} needs an argument: {kind.example}")
    cursor.skip_space()
    at = cursor.at
    match = cursor.take(_ARGUMENT)
    if match is None or not match.group("text"):
        cursor.fail(f"expected the argument of @{kind.name}, as in {kind.example}", at)
    if not cursor.accept(")"):
        cursor.fail(f"expected ')' after the argument of @{kind.name}")
    word = match.group("text")
    if kind.field in ("accum", "packed_for"):
        value: DType | str | float | int = _dtype(cursor, word, at)
    else:
        value = _number(cursor, word, at, kind)
    try:
        return kind.check(value)
    except DTypeError as error:
        cursor.fail(error.message, at, error.hint)


def _number(cursor: _Cursor, word: str, at: int, kind: ModifierKind) -> str | float | int:
    """The word as the number that the modifier wants, or as it is for a modifier of words."""
    converter = {"loss_scale": float, "per_channel": int}.get(kind.field)
    if converter is None:
        return word
    try:
        return converter(word)
    except ValueError:
        cursor.fail(f"@{kind.name} needs a number; got {word!r}", at)


LIKE_TYPE = re.compile(r"(b?float|bf|fp|u?int|tf|f)\d\w*")


def is_type(item: Any) -> bool:
    """Whether the last item of Tensor[...] is a numeric type and no extent: of ours, NumPy's, or a
    string such as "float32" or "bf16 @accum(f32)".

    Raises DTypeError for a string that can only be a misspelled type.
    """
    if isinstance(item, DType | NumericType | np.dtype) or is_custom_policy(item) or (
            isinstance(item, type) and issubclass(item, np.generic)):
        return True
    word = item.partition("@")[0].strip() if isinstance(item, str) else ""
    if not LIKE_TYPE.fullmatch(word):
        return False
    try:
        find_dtype(word)
    except DTypeError:
        if word[:1] == "f" and word[1:].isdigit():
            return False  # f1, f2 may be extents
        raise
    return True
