"""What a message is: every one between ranks says so in a header, which is checked before its bytes
are used.

The header has the number of the message on its way between two ranks, a digest of what both ends
must have the same (operation, types, extents, ranks, the user's line), the shape of the sender's
operand, the length of the bytes that follow, and the call as text. So a rank that gets something
else than it expects finds out, and can name what the other one does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tessera.errors import SourceLine, user_line
from tessera.graph.trace import current_line

from ...lazy_dataclass import dataclass
from ..errors import DisagreementError, MeshError

Shape = tuple[int, ...]
MAX_DIMS, _MAX_TEXT = 32, 480
_MAGIC = b"tessera1"
_FIXED = struct.Struct("<8sqq16sHH4x")  # magic, number, length, digest, dimensions, text
HEADER_BYTES = _FIXED.size + 8 * MAX_DIMS + _MAX_TEXT  # at most
HINT = ("all ranks of an axis must make the same calls in the same order, on operands of one type "
        "and shape, from one line; look for a branch that depends on the rank")


@dataclass(frozen=True)
class MessageLabel:
    """What a message belongs to.

    text: the call, for people   where: the user's line   key: what both ends must have the same
    shape: of the sender's operand, which may differ between ranks
    """

    text: str
    where: SourceLine | None
    key: str
    shape: Shape = ()

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.key.encode(errors="surrogatepass"), digest_size=16).digest()

    def __str__(self) -> str:
        return f"{self.text} at {self.where}" if self.where else self.text

    def of(self, part: str) -> MessageLabel:
        """The label of one part of this call: its messages are no other part's."""
        return MessageLabel(self.text, self.where, f"{self.key} {part}", self.shape)


def place_of(where: SourceLine | None) -> tuple[str, int] | None:
    """A line by which ranks compare: without the folder, which may be another on another node."""
    return (os.path.basename(where.file), where.line) if where else None


def here_in(text: str, *more: object) -> MessageLabel:
    """The label of something that has only a name, at the user's line, or that of the node in a
    graph which runs. more: what else must be the same."""
    where = current_line() or user_line()
    return MessageLabel(text, where, repr((text, place_of(where), more)))


@dataclass(frozen=True)
class Header:
    """The header of a message as it came."""

    number: int
    length: int
    digest: bytes
    shape: Shape
    text: str


def pack(label: MessageLabel, number: int, length: int) -> bytes:
    text = str(label).encode(errors="replace")[:_MAX_TEXT]
    return b"".join([
        _FIXED.pack(_MAGIC, number, length, label.digest, len(label.shape), len(text)),
        struct.pack(f"<{len(label.shape)}q", *label.shape), text])


def unpack(data: memoryview, source: int) -> tuple[Header, int]:
    """The header that bytes begin with, and where it ends. Raises MeshError for other bytes."""
    if len(data) >= _FIXED.size:
        magic, number, length, digest, ndim, size = _FIXED.unpack_from(data)
        at = _FIXED.size + 8 * ndim
        if magic == _MAGIC and length >= 0 and ndim <= MAX_DIMS and at + size <= len(data):
            shape = struct.unpack_from(f"<{ndim}q", data, _FIXED.size)
            text = bytes(data[at:at + size]).decode(errors="replace")
            return Header(number, length, digest, shape, text), at + size
    raise MeshError(f"rank {source} has sent {len(data)} bytes that are no message",
                    hint="all ranks must run the same version of Tessera")


def check(got: Header, label: MessageLabel, number: int, rank: int, source: int,
          expected: int | None
          ) -> None:
    """Raise what is wrong with a message from `source` that this rank takes for one of `label`.

    number: how many have come from there before   expected: its bytes, None for any number
    """
    if got.digest != label.digest:
        raise disagreement(f"ranks {min(rank, source)} and {max(rank, source)} disagree about "
                           "what they exchange",
                           [(rank, str(label), label.digest), (source, got.text, got.digest)],
                           label.where)
    if got.number != number:
        raise MeshError(f"rank {rank} has got message {got.number} of rank {source} in {label}, "
                        f"where number {number} was to come", where=label.where)
    if expected is not None and got.length != expected:
        raise MeshError(f"rank {rank} expects {expected} bytes from rank {source} in {label.text}, "
                        f"which sent {got.length} in {got.text}", where=label.where, hint=HINT)


def disagreement(what: str, calls: Iterable[tuple[int, str, bytes]], where: SourceLine | None
                 ) -> DisagreementError:
    """The error that shows what each rank does. calls: rank, text and digest"""
    by_call: dict[tuple[str, bytes], list[int]] = {}
    for rank, text, digest in calls:
        by_call.setdefault((text, digest), []).append(rank)
    lines = [f"  {ranks_text(ranks)}: {text}"
             for (text, _), ranks in sorted(by_call.items(), key=lambda item: min(item[1]))]
    if len({text for text, _ in by_call}) < len(by_call):
        lines.append("  what looks alike differs in the ranks of its axis, or in what it was told "
                     "of other ranks' extents: are the meshes the same?")
    return DisagreementError("\n".join([f"{what}:", *lines]), where=where, hint=HINT)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`, `ranks 0-71`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def raise_broken(rank: int, error: MeshError) -> NoReturn:
    """For a rank that goes on to communicate after messages have been mixed up."""
    raise MeshError(f"rank {rank} cannot communicate any more, since an earlier call failed: "
                    f"{error.message}", hint="do not go on after that error: messages are on their "
                    "way that nobody will take") from error


def raise_forked(rank: int) -> NoReturn:
    """For a child of a rank that communicates."""
    raise MeshError(f"this process was forked from rank {rank} and is no rank itself",
                    hint="communicate in the rank; let children compute and give back results")
