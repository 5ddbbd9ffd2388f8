"""Which calls ranks make through NCCL once they have compared them: numbered, and compared again
while the ranks run on.

What NCCL carries has no header: calls that are alike for it, of one kind and size, are taken for
each other. So each group counts its calls and keeps what they were, and from which lines. Once a
second the thread of nccl_watch.py tells the next rank of a group how far this one is, with its last
calls, and that rank compares; at the end of the program all do. A call costs three list entries
and no message. TESSERA_COMM_CHECK=each compares every call before it is made.

What a compiled function is given beside distributed tensors, such as a learning rate, must be the
same on all ranks too: some elements of it are kept and told with the call.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from tessera.errors import SourceLine

from ...lazy_dataclass import dataclass
from ..errors import MeshError, PolicyMismatch
from .envelope import MessageLabel, disagreement
from .group import Group
from .transport import Transport

KEPT, TOLD = 4096, 256  # calls that are kept, and told in a message; no GPU is so far behind
_HEAD = struct.Struct("<QQQI")  # group, calls, sum of all, calls that are told
_WORD = (1 << 64) - 1
TOLERANCE = 1e-6  # of the size of a number that ranks give alike
LEFT_TOLERANCE = 1e-5  # of what number_of makes of those
ALIKE = ("give all ranks the same seed, compute it alike, or give one rank's values: "
         "ts.dist.share, ts.dist.broadcast")
Samples = Sequence[Sequence[float]]  # elements of each operand
LeftSamples = dict[str, Any]  # of calls in front that sent nothing, see LeftOperands
Given = tuple[Samples, LeftSamples]
NOTHING: Given = (), {}
Told = tuple[int, int, Sequence[int], Sequence[Given]]  # calls, sum of all, the last, operands
ToldCall = tuple[str, SourceLine | None]
_NONE: ToldCall = ("no call any more", None)


@dataclass
class CallSequence:
    """The calls of a group. state: how many there were, and a sum of all in their order."""

    group: Group
    state: tuple[int, int] = (0, 0)
    calls: list[int] = field(default_factory=lambda: [0] * KEPT)  # the last ones, by number
    given: list[Given] = field(default_factory=lambda: [NOTHING] * KEPT)  # see plain_operands.py
    sums: list[int] = field(default_factory=lambda: [0] * KEPT)  # behind each
    known: set[int] = field(default_factory=set)  # what this rank has called
    new: list[int] = field(default_factory=list)  # of it, what the next rank has no text of
    told: int = 0
    waiting: Told | None = None  # by a rank that is ahead

    def number_of(self, label: MessageLabel, operands: Sequence[str] = ()) -> int:
        """What a call is in here. operands: the names of what it is given."""
        call = _digest(label.key)
        _texts[call], _operands[call] = (str(label), label.where), operands
        if call not in self.known:
            self.known.add(call)
            self.new.append(call)
        return call

    def add(self, call: int, given: Given = NOTHING) -> None:
        """A call is made."""
        number, total = self.state
        total = (total * 0x9E3779B97F4A7C15 + call) & _WORD
        at = number % KEPT
        self.calls[at], self.sums[at], self.given[at] = call, total, given
        self.state = number + 1, total

    @property
    def number(self) -> int:
        """Of the group, the same on all its ranks."""
        return _digest(repr(self.group.ranks))

    def message(self) -> bytes:
        """How far this rank is, its last calls and what they were given, and texts of those that
        are new."""
        number, total = self.state
        last = range(max(0, number - TOLD), number)
        calls = [self.calls[i % KEPT] for i in last]
        new, self.new = self.new, []
        given = [self.given[i % KEPT] for i in last]
        rest = {c: _texts[c][0] for c in new}, given if any(map(any, given)) else None
        return _HEAD.pack(self.number, number, total, len(calls)) + struct.pack(
            f"<{len(calls)}Q", *calls) + json.dumps(rest).encode()

    def compare(self, told: Told, end: bool) -> MeshError | None:
        """What is wrong with what the rank before tells of itself. While that rank is ahead of this
        one it is kept for later, unless nobody makes calls any more (end)."""
        number, total, last, given = told
        mine, first = self.state[0], number - len(last)
        for i, (call, values) in enumerate(zip(last, given, strict=True), first):
            if mine - KEPT <= i < mine and self.calls[i % KEPT] != call:
                return self._error(i, _call_text(call), _call_text(self.calls[i % KEPT]))
            if mine - KEPT <= i < mine and (
                    error := self._given_error(i, call, *values)) is not None:
                return error
        if number > mine and not end:
            self.waiting = told
        elif number > mine:
            return self._error(mine, _call_text(last[max(0, mine - first)]), _NONE)
        elif number < mine and end:
            return self._error(number, _NONE, _call_text(self.calls[number % KEPT]))
        elif 0 < number > mine - KEPT and self.sums[(number - 1) % KEPT] != total:
            return MeshError(f"{self._what()}; it was before call {first}")
        return None

    def _given_error(self, at: int, call: int, theirs: Samples, left: LeftSamples
                     ) -> MeshError | None:
        """What is wrong with what a call was given, or calls in front of it that sent nothing."""
        samples, own = self.given[at % KEPT]
        text, where = _call_text(call)
        for i, (x, y) in enumerate(zip(samples, theirs, strict=False)):
            if x and y and not nearly_equal(x, y):
                return self._differ(f"{_operands[call][i]}, in call {at} through NCCL, {text}",
                                    x, y, where)
        found = differing_operand([own, left])
        if found is None:
            return None
        name, (x, y) = found
        return self._differ(f"{name}, before call {at} through NCCL, {text}", x, y, where)

    def _differ(self, what: str, mine: Sequence[float], theirs: Sequence[float],
                where: SourceLine | None) -> MeshError:
        ranks, me = self.group.ranks, self.group.index
        lines = [f"  rank {rank}: {values_text(values)}"
                 for rank, values in sorted(((ranks[me], mine), (ranks[me - 1], theirs)))]
        return PolicyMismatch("\n".join([
            f"ranks {min(ranks[me - 1], ranks[me])} and {max(ranks[me - 1], ranks[me])} give "
            f"different values of what they hold alike, {what}; what is computed differs:",
            *lines]), where=where, hint=ALIKE)

    def _what(self) -> str:
        ranks, me = self.group.ranks, self.group.index
        return f"ranks {min(ranks[me - 1], ranks[me])} and {max(ranks[me - 1], ranks[me])} have " \
            f"made different calls over {self.group.axis!r} through NCCL: what they got is wrong"

    def _error(self, at: int, theirs: ToldCall, mine: ToldCall) -> MeshError:
        ranks, me = self.group.ranks, self.group.index
        return disagreement(f"{self._what()}; in call {at}",
                            [(ranks[me], mine[0], b"mine"), (ranks[me - 1], theirs[0], b"theirs")],
                            mine[1])


def nearly_equal(x: Sequence[float], y: Sequence[float]) -> bool:
    """Ranks on machines of two kinds may round differently what each computes for itself."""
    return all(math.isclose(a, b, rel_tol=TOLERANCE) or a != a and b != b
               for a, b in zip(x, y, strict=False))


def values_text(values: Sequence[float]) -> str:
    return ", ".join(f"{v:.6g}" for v in values)


def differing_operand(left: Sequence[LeftSamples]) -> tuple[str, list[Sequence[float]]] | None:
    """By rank, what calls were given that sent nothing: the first operand that some who made them
    as often were given otherwise, with its last values on all ranks; () where there are none."""
    for program in sorted(set().union(*left)):
        by_rank = [one.get(program) for one in left]
        for calls in sorted({known[1] for known in by_rank if known}):
            numbers = [known[2] for known in by_rank if known and known[1] == calls]
            if max(numbers) - min(numbers) > LEFT_TOLERANCE * calls:
                names, _, _, first, _ = next(k for k in by_rank if k and k[1] == calls)
                values = [[k[3][i] if k else () for k in by_rank] for i in range(len(first))]
                at = next((i for i, v in enumerate(values) if not all(
                    nearly_equal(first[i], x) for x in v)), 0)
                return f"{names[at]}, in {calls} call{'s' * (calls > 1)} of it", values[at]
    return None


def _call_text(call: int) -> ToldCall:
    return _texts.get(call, ("another call", None))


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"),
                                          digest_size=8).digest(), "little")


_sequences: dict[tuple[Transport, tuple[int, ...]], CallSequence] = {}
_texts: dict[int, ToldCall] = {}  # of this rank's calls, with their lines, and of those told
_operands: dict[int, Sequence[str]] = {}  # of this rank's calls, what they are given


def sequence_of(group: Group) -> CallSequence:
    """That of a group."""
    key = group.transport, group.ranks
    if key not in _sequences:
        _sequences[key] = CallSequence(group)
    return _sequences[key]


# --- the exchange --------------------------------------------------------------------------------
def exchange() -> MeshError | None:
    """Tell the next rank of each group how far this one is, where it has gone on, and look at what
    the ranks before tell; the first thing that is wrong."""
    for here in {transport for transport, _ in list(_sequences) if transport.may_tell}:
        tell(here, False)
        if (error := look(here, False)) is not None:
            return error
    return None


def tell(here: Transport, end: bool) -> None:
    """end: again, for the last time."""
    for sequence in _of(here):
        ranks = sequence.group.ranks
        if len(ranks) > 1 and (sequence.state[0] != sequence.told or end):
            sequence.told = sequence.state[0]
            here.tell(ranks[(sequence.group.index + 1) % len(ranks)], sequence.message())


def look(here: Transport, end: bool) -> MeshError | None:
    """What is wrong with what was told. end: all ranks have ended."""
    found = {s.number: s for s in _of(here)}
    for data in here.told():
        group, number, total, count = _HEAD.unpack_from(data)
        at = _HEAD.size + 8 * count
        texts, given = json.loads(data[at:])
        for call, text in texts.items():
            _texts.setdefault(int(call), (text, None))
        if group in found:  # else this rank is not there yet, and a later message tells
            calls = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
            found[group].waiting = number, total, calls, given or [NOTHING] * count
    for sequence in found.values():
        held, sequence.waiting = sequence.waiting, None
        if held is not None and (error := sequence.compare(held, end)) is not None:
            return error
    return None


def _of(here: Transport) -> list[CallSequence]:
    return [s for (transport, _), s in list(_sequences.items()) if transport is here]


__all__ = ["CallSequence", "exchange", "look", "sequence_of", "tell"]
