"""Races, missing barriers and uninitialised reads: one record per address of every memory.

Within a group only a barrier orders lanes, so the vector clock of a lane is the number of barriers
its group has passed (the epoch). Two groups of a launch are ordered by what one releases and the
other acquires, with atomics (`happens_before.py`), else by nothing. Two accesses to one address,
one of them a write, are a race when nothing orders them: between groups, or between lanes of a
group in the same epoch. Whole-group statements on global memory are ordered among themselves
(`GROUP`: the compiler keeps their order); tile ops on shared memory are not (`MANY`: each lane
touches elements that the others touched), which is why the explicit style needs its barriers.

A conflict between accesses of one statement of one lane set is none: each lane keeps its elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import SourceLine
from tessera.lazy_dataclass import dataclass
from tessera.tile.interpreter.happens_before import ALL, Clocks, Publication
from tessera.tile.interpreter.memory import Local, Memory
from tessera.tile.ir.errors import KernelError, RaceError, UninitialisedError
from tessera.tile.ir.ir import Function

GROUP, MANY = -1, -2  # pseudo lanes: ordered statements of the group; unordered lanes of it
ANY_GROUP = -2
CLUSTER_EPOCH = 1 << 16  # epochs from a barrier of a cluster to the next, of its groups


class Shadow:
    """Who last wrote and read each address: site (0 never), group, lane, epoch, time of the group.

    reads has the last reader's lane too, beside MANY where others read before, and the site of the
    last of these.
    published: what a release made known at an address. read_log, update_log: all reads, and all
    atomic updates, of which the records keep the last: (address, group, lane, time) of each.
    """

    def __init__(self, size: int):
        self.write = np.zeros((5, size), np.int32)
        self.reads = np.zeros((7, size), np.int32)
        self.published: dict[int, Publication] = {}
        self.read_log: list[np.ndarray] = []
        self.update_log: list[np.ndarray] = []
        self.atomic = np.zeros(size, bool)
        # The site of an async copy into an element, and from it, that has not arrived.
        self.pending, self.copied = np.zeros(size, np.int32), np.zeros(size, np.int32)


@dataclass(frozen=True)
class Conflict:
    """Two accesses to one element that nothing orders; `other` came first.

    group is ANY_GROUP where several groups did it, a lane is GROUP or MANY where all lanes did.
    """

    space: str
    memory: str
    index: tuple[int, ...]
    group: int
    lane: int
    action: str  # 'reads' | 'writes'
    other_group: int
    other_lane: int
    other_action: str


@dataclass
class AccessBatch:
    """n addresses with the group and lane that touch them and the group's epoch there."""

    memory: Memory
    address: np.ndarray
    group: np.ndarray
    lane: np.ndarray
    epoch: np.ndarray
    site: int
    where: SourceLine | None = None  # the expression in the line that `site` is
    element: np.ndarray | None = None  # where address counts cells of shared memory: of the tensor

    def placed(self, values: np.ndarray | None = None) -> tuple[AccessBatch, np.ndarray | None]:
        """By cells of the memory that arguments share, each element as often as it has cells."""
        alias = self.memory.alias
        if alias is None:
            return self, values
        cells = alias.cells[self.address]  # [n, k]
        group, lane, epoch, element = (np.repeat(x, cells.shape[1]) for x in (
            self.group, self.lane, self.epoch, self.address))
        more = None if values is None else np.repeat(values, cells.shape[1])
        return AccessBatch(self.memory, cells.reshape(-1), group, lane, epoch, self.site,
                           self.where, element), more


class Sanitizer:
    """Keeps the shadows; raises RaceError or UninitialisedError at the first conflict.

    keep_going: the errors are put into `found` instead, one for each pair of lines.
    """

    def __init__(self, keep_going: bool = False) -> None:
        self.keep_going = keep_going
        self.found: dict[Any, KernelError] = {}
        self.sites: list[SourceLine] = [SourceLine("", 0)]
        self.numbers: dict[Any, int] = {}
        self.looped: set[int] = set()  # sites inside of loops
        self.clocks = Clocks()

    def begin(self, function: Function, groups: int) -> None:
        """A launch begins, whose groups nothing has ordered yet."""
        self.clocks = Clocks(function, groups)

    def report(self, error: KernelError) -> None:
        """Raises it, or keeps the first of its kind and lines."""
        if not self.keep_going:
            raise error
        others = tuple(where for _, where in error.also)
        self.found.setdefault((error.code, error.where, others), error)

    def site(self, where: SourceLine | None, looped: bool = False) -> int:
        number = self._number(where)
        if looped:
            self.looped.add(number)
        return number

    def _number(self, where: SourceLine | None) -> int:
        place = where or SourceLine("<generated>", 0)
        key = (place.file, place.line)
        if key not in self.numbers:
            self.numbers[key] = len(self.sites)
            self.sites.append(place)
        return self.numbers[key]

    def shadow(self, memory: Memory) -> Shadow:
        if memory.alias is not None:
            shared = memory.alias.shared
            shared.shadow = shared.shadow or Shadow(shared.size)
            return shared.shadow
        if memory.shadow is None:
            memory.shadow = Shadow(len(memory.flat))
        return memory.shadow

    def read(self, a: AccessBatch) -> None:
        """Checks and records reads."""
        a, _ = a.placed()
        s = self.shadow(a.memory)
        self._arrived(s, a, "reads")
        if isinstance(a.memory, Local):
            self._initialised(s, a)
        bad = self._unordered(s, self._conflict(s.write[:, a.address], a), a, s.write)
        if bad.any():
            self._race(a, bad, s.write, "reads", "wrote")
        self._log(s.read_log, a)
        old = s.reads[:, a.address]
        lane, group = a.lane.copy(), a.group.copy()
        seen = old[0] > 0
        other = seen & (old[1] != a.group)
        group[other] = ANY_GROUP
        mixed = seen & ~other & (old[3] == a.epoch) & (old[2] != a.lane)
        lane[mixed] = MANY
        s.reads[0, a.address], s.reads[3, a.address] = a.site, a.epoch
        s.reads[4, a.address] = self.clocks.times[a.group]
        s.reads[1, a.address], s.reads[2, a.address] = group, lane
        s.reads[6, a.address] = np.where(old[5] != a.lane, old[0], old[6])
        s.reads[5, a.address] = a.lane
        # Two readers in one access: the second hides the first, so mark what differs.
        lost = s.reads[2, a.address] != lane
        s.reads[2, a.address[lost]] = MANY
        s.reads[6, a.address[lost]] = a.site
        lost = s.reads[1, a.address] != group
        s.reads[1, a.address[lost]] = ANY_GROUP

    def wrote(self, a: AccessBatch, atomic: bool = False, values: np.ndarray | None = None) -> None:
        """Checks and records writes."""
        a, values = a.placed(values)
        s = self.shadow(a.memory)
        self._arrived(s, a, "writes")
        self._arrived(s, a, "writes", s.copied)
        bad = self._conflict(s.write[:, a.address], a)
        if atomic:
            bad &= ~s.atomic[a.address]
        bad = self._unordered(s, bad, a, s.write)
        if bad.any():
            self._race(a, bad, s.write, "writes", "wrote")
        bad = self._unordered(s, self._conflict(s.reads[:, a.address], a), a, s.reads)
        if bad.any():
            self._race(a, bad, s.reads, "writes", "read")
        if atomic:
            if isinstance(a.memory, Local):
                self._initialised(s, a, "updated")
            self._mark_update(s, a)
            return
        self._same_statement(a, values)
        for at in map(int, a.address) if s.published else ():
            s.published.pop(at, None)  # a plain store releases nothing
        self._mark(s, a)
        s.atomic[a.address] = False

    def updated(self, a: AccessBatch, changed: np.ndarray, order: str, read: bool) -> None:
        """Atomic updates one after the other, by an order: what they make other groups see.

        changed: those that changed what was there; one that did not cannot be told from none.
        """
        a, more = a.placed(changed)
        assert more is not None
        s = self.shadow(a.memory)
        for at, g, one, new in zip(*(x.tolist() for x in (a.address, a.group, a.lane, more)),
                                   strict=True):
            lane = ALL if one == GROUP else one
            before = s.published.get(at)
            if read and order == "acq_rel":
                self.clocks.acquire(g, lane, before)
            if new:
                s.published[at] = self.clocks.release(g, lane, before)

    def in_flight(self, a: AccessBatch, source: AccessBatch) -> None:
        """An async copy that will write these addresses, and read those, some time later."""
        self.wrote(a)
        a, _ = a.placed()
        self.shadow(a.memory).pending[a.address] = a.site
        source, _ = source.placed()
        self.shadow(source.memory).copied[source.address] = a.site

    def has_read(self, source: AccessBatch) -> None:
        """The copy from these addresses is made now."""
        self.read(source)
        source, _ = source.placed()
        self.shadow(source.memory).copied[source.address] = 0

    def landed(self, a: AccessBatch) -> None:
        """The copy is complete: written now, by lanes that nobody knows."""
        a, _ = a.placed()
        s = self.shadow(a.memory)
        s.pending[a.address] = 0
        self._mark(s, a)

    def _mark(self, s: Shadow, a: AccessBatch) -> None:
        s.write[0, a.address], s.write[1, a.address] = a.site, a.group
        s.write[2, a.address], s.write[3, a.address] = a.lane, a.epoch
        s.write[4, a.address] = self.clocks.times[a.group]

    def _mark_update(self, s: Shadow, a: AccessBatch) -> None:
        """An atomic update: of those of several groups the record is of ANY_GROUP."""
        self._log(s.update_log, a)
        earlier, before = s.atomic[a.address], s.write[1, a.address]
        self._mark(s, a)
        s.atomic[a.address] = True
        if a.memory.space == "global":
            others = (earlier & (before != a.group)) | (s.write[1, a.address] != a.group)
            s.write[1, a.address[others]] = ANY_GROUP

    def _log(self, log: list[np.ndarray], a: AccessBatch) -> None:
        """Keeps an access, where atomics may order it and the kernel writes the tensor."""
        if self.clocks.active and a.memory.space == "global" and (
                a.memory.alias is not None or a.memory.name in self.clocks.written):
            log.append(np.stack([a.address, a.group, a.lane, self.clocks.times[a.group]]))

    def _unordered(self, s: Shadow, bad: np.ndarray, a: AccessBatch, records: np.ndarray
                   ) -> np.ndarray:
        """Of conflicts with what the records say, those that no atomic orders."""
        if not self.clocks.active or a.memory.space != "global" or not bad.any():
            return bad
        out, old = bad.copy(), records[:, a.address]
        many = s.atomic[a.address] if records is s.write else old[1] == ANY_GROUP
        one = bad & ~many & (old[1] != a.group)
        out[one] = self.clocks.unordered(a.group[one], a.lane[one], *old[[1, 2, 4]][:, one])
        log = s.update_log if records is s.write else s.read_log
        if not (bad & many).any() or not log:
            return out
        log[:] = [np.concatenate(log, axis=1)]
        for g in np.unique(a.group[bad & many]):
            for lane in np.unique(a.lane[bad & many & (a.group == g)]):
                mine = bad & many & (a.group == g) & (a.lane == lane)
                others = log[0][:, np.isin(log[0][0], a.address[mine]) & (log[0][1] != g)]
                n = others.shape[1]
                left = self.clocks.unordered(np.full(n, g), np.full(n, lane), *others[1:])
                out[mine] = np.isin(a.address[mine], others[0][left])
        return out

    def _conflict(self, old: np.ndarray, a: AccessBatch) -> np.ndarray:
        seen = old[0] > 0
        if isinstance(a.memory, Local) and a.memory.space == "register":
            return np.zeros(seen.shape, bool)
        other_group = old[1] != a.group
        same_epoch = (old[3] == a.epoch) & ~other_group
        if isinstance(a.memory, Local):  # of another group of the cluster, whose barriers order
            other_group &= old[3] // CLUSTER_EPOCH == a.epoch // CLUSTER_EPOCH
        lanes = (old[2] != a.lane) | (old[2] == MANY)
        itself = (old[0] == a.site) & (old[2] == MANY) & (a.lane == MANY)
        return seen & (other_group | (same_epoch & lanes & ~itself))

    def _same_statement(self, a: AccessBatch, values: np.ndarray | None) -> None:
        """Two lanes that write different values to one address in one statement."""
        if a.memory.space == "register" or a.address.size < 2:
            return
        order = np.argsort(a.address, kind="stable")
        same = a.address[order][1:] == a.address[order][:-1]
        if values is not None:
            v = values[order]
            same &= (v[1:] != v[:-1]) | (a.group[order][1:] != a.group[order][:-1])
        if not same.any():
            return
        i = int(np.argmax(same))
        first, second = order[i], order[i + 1]
        self.report(RaceError(
            f"race on {_element(a, first)}: {_who(a.group[first], a.lane[first])} and "
            f"{_who(a.group[second], a.lane[second])} write it in the same statement",
            where=a.where or self.sites[a.site],
            hint="give each lane its own element, let one lane write (if ts.tile.local_id() == 0:)"
            ", or use ts.tile.atomic_add",
            conflict=_conflict(a, second, "writes", a.group[first], a.lane[first], "writes")))

    def _arrived(self, s: Shadow, a: AccessBatch, verb: str, copies: np.ndarray | None = None
                 ) -> None:
        pending = (s.pending if copies is None else copies)[a.address]
        if pending.any():
            i = int(np.argmax(pending > 0))
            site = self.sites[pending[i]]
            self.report(RaceError(
                f"{_who(a.group[i], a.lane[i])} {_verb(verb, a, i)} {_element(a, i)} while an "
                f"asynchronous copy {'into' if copies is None else 'from'} it (line {site.line}) "
                "may still be under way",
                where=a.where or self.sites[a.site], also=(("the copy", site),),
                hint="wait for it: ts.tile.cp_wait_group(0), then ts.tile.barrier()",
                conflict=_conflict(a, i, verb, a.group[i], MANY,
                                   "writes" if copies is None else "reads")))

    def _initialised(self, s: Shadow, a: AccessBatch, done: str = "read") -> None:
        never = s.write[0, a.address] == 0
        if never.any():
            i = int(np.argmax(never))
            self.report(UninitialisedError(
                f"{_element(a, i)} is {done}, but nothing has written it",
                where=a.where or self.sites[a.site],
                hint=f"write every element that is {done}, for example buffer[...] = 0.0"
                + ("" if done == "read" else ", then ts.tile.barrier()")))

    def _race(self, a: AccessBatch, bad: np.ndarray, old: np.ndarray, verb: str, did: str) -> None:
        i = int(np.argmax(bad))
        site, group, lane = old[:3, a.address[i]]
        if did == "read" and lane == MANY and old[5, a.address[i]] == a.lane[i] != MANY:
            site = old[6, a.address[i]]  # its own read is no race
        before = self.sites[site]
        across = group != a.group[i]
        who = _who(group, lane) if group != ANY_GROUP else "other groups"
        if not across:
            order = "with no barrier in between"
            hint = _between(before, self.sites[a.site], {int(site), a.site} <= self.looped)
        elif isinstance(a.memory, Local):
            order = "with no barrier of the cluster in between"
            hint = "put ts.tile.cluster_barrier(...) between the two accesses"
        elif self.clocks.active:
            order = "in the same launch: no atomic orders the two"
            hint = ("give each group its own elements, or order them: the first one releases what "
                    "it did, ts.tile.atomic_add(flag, i, 1, release=True), and the other, all "
                    "lanes of it, waits until an atomic of its own, ts.tile.atomic_add(flag, i, "
                    "0), sees that")
        else:
            order = "in the same launch: nothing orders groups"
            hint = "give each group its own elements, or use ts.tile.atomic_add"
        self.report(RaceError(
            f"race on {_element(a, i)}: {_who(a.group[i], a.lane[i])} {_verb(verb, a, i)} it, and "
            f"{who} {did} it "
            f"at line {before.line}, {order}",
            where=a.where or self.sites[a.site], also=(("the other access", before),), hint=hint,
            conflict=_conflict(a, i, verb, group, lane, {"wrote": "writes", "read": "reads"}[did])))


def _between(before: SourceLine, now: SourceLine, looped: bool) -> str:
    """Where the barrier belongs; a later line comes first when a loop leads back."""
    first, second = before.line, now.line
    if before.file != now.file or (first > second and not looped):
        return "put ts.tile.barrier() between the two accesses"
    if first < second:
        return f"put ts.tile.barrier() between line {first} and line {second}"
    if looped:
        return (f"put ts.tile.barrier() behind line {first}, before the loop comes back to line "
                f"{second}")
    return (f"line {first} reads what other lanes write there: read into a variable first, then "
            "ts.tile.barrier(), then write; or write to another tensor")


def _who(group: Any, lane: Any) -> str:
    lanes = {GROUP: "group", MANY: "the lanes of group"}
    if int(lane) in lanes:
        return f"{lanes[int(lane)]} {int(group)}"
    return f"lane {int(lane)} of group {int(group)}"


def _verb(verb: str, a: AccessBatch, i: Any) -> str:
    """writes, or write for several lanes."""
    return verb[:-1] if int(a.lane[i]) == MANY else verb


def _element(a: AccessBatch, i: Any) -> str:
    """`shared buffer 'smem'[3, 4]` for an address."""
    kind = "tensor" if a.memory.space == "global" else f"{a.memory.space} buffer"
    alias = a.memory.alias
    also = f", memory that {' and '.join(map(repr, alias.others(a.memory.name)))} shares" \
        if alias is not None else ""
    return f"{kind} '{a.memory.name}'[{', '.join(map(str, _index(a, i)))}]{also}"


def _index(a: AccessBatch, i: Any) -> tuple[int, ...]:
    """The index of an address; the stage first where a buffer has several."""
    memory, at = a.memory, int((a.address if a.element is None else a.element)[i])
    stage = at // memory.size % memory.stages if memory.size else 0
    index = np.unravel_index(at % max(memory.size, 1), memory.shape or (1,))
    return (stage,) * (memory.stages > 1) + tuple(int(k) for k in index)


def _conflict(a: AccessBatch, i: Any, action: str, other_group: Any, other_lane: Any,
              other_action: str) -> Conflict:
    return Conflict(a.memory.space, a.memory.name, _index(a, i), int(a.group[i]), int(a.lane[i]),
                    action, int(other_group), int(other_lane), other_action)
