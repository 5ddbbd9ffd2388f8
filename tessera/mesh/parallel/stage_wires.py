"""Values that go from a stage of a pipeline on a GPU to its neighbours by NCCL, beside kernels.

A rank sends to the one after it and to the one before it, and gets from both. Each of these four is
a communicator of two ranks with a stream of its own: what waits for one rank keeps nothing of
another from going. What is sent comes behind the kernels that made it; what comes is waited for by
the kernels that read it. The host waits for none of it.

NCCL has no tags. Along one way messages come in the order in which they were sent, which is that in
which schedules take them. A message is asked for when all that its rank does before it is launched:
then whatever waits for the whole GPU waits for other ranks, and never for what this one has still
to send. The host is ahead of the GPU, so it still comes beside kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tessera.numerics import NumericType, stored_bytes
from tessera.runtime.buffer import DEFAULT, PooledBuffer, new_stream
from tessera.runtime.copies import StreamEvent
from tessera.runtime.device import device
from tessera.tensor import Tensor
from tessera.tile.launch.resident import Resident, on_gpu

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..ranks import status_page
from ..ranks.communicator import Communicator
from ..ranks.group import Group
from .schedules import Forward, PipelineStep
from .stage_messages import Coming, Wire


class OneWay:
    """The messages from one rank to another, seen from either."""

    def __init__(self, by: Communicator):
        self.by, self.device = by, device(by.index)
        self.peer = 1 - by.group.index
        self.stream = new_stream(self.device)
        self._going: deque[tuple[StreamEvent, Resident]] = deque()  # kept until they are sent

    def connect(self, sends: bool) -> None:
        """NCCL connects two ranks at their first message, and the host of each waits there for the
        other's. So the first is sent where both are, and not from the middle of a schedule."""
        with self.device.current():
            memory = PooledBuffer(4, self.device, self.stream)
            call = self.by.send if sends else self.by.receive
            call(self.peer, (memory.pointer, memory.nbytes), self.stream)
            StreamEvent(self.device, self.stream).hold_up(DEFAULT)  # where the memory is given back

    def send(self, x: Resident) -> None:
        """Behind what was launched before."""
        while self._going and self._going[0][0].done:
            self._going.popleft()
        if x.memory.nbytes:
            with self.device.current():
                StreamEvent(self.device, DEFAULT).hold_up(self.stream)
                self.by.send(self.peer, (x.memory.pointer, x.memory.nbytes), self.stream)
            self._going.append((StreamEvent(self.device, self.stream), x))

    def receive(self, shape: tuple[int, ...], numeric: NumericType) -> OnItsWay:
        """The next message, beside the kernels that were launched before."""
        nbytes = stored_bytes(shape, numeric.dtype)
        with self.device.current():
            memory = PooledBuffer(nbytes, self.device, self.stream)
            if nbytes:
                self.by.receive(self.peer, (memory.pointer, nbytes), self.stream)
            made = Resident(shape, numeric, self.by.index, memory)
            return OnItsWay(made, StreamEvent(self.device, self.stream))

    def close(self) -> None:
        """What is launched from here on comes behind what was sent, whose memory is free then."""
        if self._going:
            self._going[-1][0].hold_up(DEFAULT)
            self._going.clear()


@dataclass(frozen=True)
class OnItsWay:
    """A tensor that comes; kernels launched after `wait` find it there."""

    tensor: Resident
    arrived: StreamEvent

    def wait(self) -> Resident:
        self.arrived.hold_up(DEFAULT)
        return self.tensor


@dataclass(frozen=True)
class Ways:
    """Those of a rank: by the place that sends, and whether it sends forward."""

    ways: dict[tuple[int, bool], OneWay]
    places: int
    me: int

    def out(self, forward: bool) -> OneWay:
        return self.ways[self.me, forward]

    def come(self, forward: bool) -> OneWay:
        return self.ways[(self.me + (-1 if forward else 1)) % self.places, forward]


_ways: WeakKeyDictionary[Communicator, Ways] = WeakKeyDictionary()


def ways_of(by: Communicator) -> Ways:
    """Those between neighbours on an axis, from its communicator, made once: all its ranks call
    it, at the same time."""
    if by not in _ways:
        n, found = by.group.size, {}
        for forward in (True, False):
            for place in range(n):
                to = (place + (1 if forward else -1)) % n
                ranks = by.group.ranks[place], by.group.ranks[to]
                name = f"{by.group.axis} {'forward' if forward else 'back'}, {place} to {to}"
                made = by.split(Group(by.group.transport, ranks, name), 0)
                if by.group.index in (place, to):
                    found[place, forward] = OneWay(made)
                    found[place, forward].connect(by.group.index == place)
        _ways[by] = Ways(found, n, by.group.index)
    return _ways[by]


class NcclWire(Wire):
    """The link of a rank whose neighbours have GPUs of their own."""

    def __init__(self, rows: Sequence[int], peers: Sequence[int], part: Mesh, by: Communicator):
        super().__init__(by.group.transport, rows, peers, part, by.index)
        self.ways = ways_of(by)

    def expect(self, step: PipelineStep) -> None:
        pass

    def send(self, to: int, step: PipelineStep, own: Tensor) -> None:
        status_page.note(f"sending {step} of stage {step.stage}")
        self.ways.out(isinstance(step, Forward)).send(on_gpu(own, self.ways.out(True).by.index))

    def receive(self, source: int, step: PipelineStep, shape: tuple[int, ...],
                numeric: NumericType) -> Coming:
        status_page.note(f"receiving {step} of stage {step.stage}")
        return self.ways.come(isinstance(step, Forward)).receive(shape, numeric)

    def close(self) -> None:
        super().close()
        for way in self.ways.ways.values():
            way.close()


__all__ = ["NcclWire", "OneWay", "ways_of"]
