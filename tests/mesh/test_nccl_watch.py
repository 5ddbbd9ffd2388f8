"""What NCCL sends and never arrives: found by the thread that looks at what was sent last."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from fake_driver import driver as driver
from tessera import config
from tessera.mesh.errors import MeshError, StalledError
from tessera.mesh.ranks import nccl_watch
from tessera.mesh.ranks.nccl_watch import NOT_READY, SentCall
from tessera.runtime.buffer import lasts, own_stream
from tessera.runtime.copies import SideStream
from tessera.runtime.device import device
from tessera.runtime.graphs import DeviceGraph, recording_stream


@pytest.fixture
def events(monkeypatch):
    """The answers of the driver about an event, by turns; the last stays. Collects what it did."""
    asked = SimpleNamespace(answers=[0], recorded=0, destroyed=0, record_status=0,
                            capturing=0)

    def query(event):
        return (asked.answers.pop(0) if len(asked.answers) > 1 else asked.answers[0],)

    def record(event, stream):
        asked.recorded += 1
        return (asked.record_status,)

    def destroy(event):
        asked.destroyed += 1
        return (0,)

    fake = SimpleNamespace(cuStreamIsCapturing=lambda stream: (0, asked.capturing),
                           cuEventCreate=lambda flags: (0, 5), cuEventRecord=record,
                           cuEventQuery=query, cuEventDestroy=destroy)
    monkeypatch.setattr(nccl_watch, "driver", lambda: fake)
    monkeypatch.setattr(nccl_watch, "device",
                        lambda index: SimpleNamespace(current=nullcontext))
    monkeypatch.setattr(nccl_watch, "POLL_S", 0.01)
    return asked


@dataclass(frozen=True)
class Linked:
    """Stands for a communicator."""

    name: str
    index: int = 0


def sent(failure: str = "", limit_s: int = 1) -> SentCall:
    group = SimpleNamespace(ranks=(0, 1, 3), axis="dp",
                            transport=SimpleNamespace(rank=1, size=4))
    by = SimpleNamespace(group=group, index=0, failure=lambda: failure)
    return SentCall(by, "all_reduce", 0, limit_s, None, 1)


def test_what_arrives_is_no_error(events):
    events.answers = [NOT_READY, NOT_READY, 0]
    assert nccl_watch.look(sent()) is None
    assert events.recorded == events.destroyed == 1


def test_what_does_not_arrive_in_time_names_rank_collective_and_the_others(events):
    events.answers = [NOT_READY]
    error = nccl_watch.look(sent())
    assert isinstance(error, StalledError)
    assert "rank 1 of 4 has waited 1 s for ranks 0, 3 in all_reduce over 'dp'" in str(error)
    assert "TESSERA_COMM_TIMEOUT" in error.hint


def test_of_the_others_those_are_named_that_do_not_wait_on_their_gpu(events, monkeypatch):
    """A rank waits with it, the other does not; both pages say so as long as it lasts."""
    pages = []
    monkeypatch.setattr(nccl_watch.status_page, "late", lambda: {2, 3})
    monkeypatch.setattr(nccl_watch.status_page, "wait_on_gpu", pages.append)
    events.answers = [NOT_READY]
    assert "has waited 1 s for rank 3 in all_reduce" in str(nccl_watch.look(sent()))
    assert pages == ["all_reduce over 'dp' through NCCL"]
    events.answers = [NOT_READY, NOT_READY, 0]
    assert nccl_watch.look(sent()) is None
    assert pages[1:] == ["all_reduce over 'dp' through NCCL", ""]


def test_what_nccl_reports_is_told_at_once(events):
    events.answers = [NOT_READY]
    error = nccl_watch.look(sent(failure="remote process exited", limit_s=0))
    assert isinstance(error, MeshError) and "remote process exited" in str(error)
    assert "rank 1 has lost ranks 0, 3" in str(error)


def test_a_stream_that_records_a_graph_is_looked_at_later(events):
    events.capturing = 1
    assert nccl_watch.look(sent()) is None
    assert not events.recorded  # an event would be part of the graph


def test_no_event_is_put_on_a_stream_while_any_thread_records_a_graph(events, driver):
    """Which streams are part of the graph is known at its end; the driver says of one that it is
    not, and it becomes one before the event is there."""
    looked = []
    DeviceGraph.record(device(0), recording_stream(0), [
        lambda: looked.append((nccl_watch.look(sent()), events.recorded))])
    assert looked == [(None, 0)]
    assert nccl_watch.look(sent()) is None and events.recorded == 1


def test_a_call_is_looked_at_again_when_the_graph_is_there(events, driver, monkeypatch):
    """It may be the last one, and never be done."""
    by = Linked("one")
    monkeypatch.setattr(nccl_watch, "_last", {(by, 0): sent()})
    seen = []
    DeviceGraph.record(device(0), recording_stream(0),
                       [lambda: seen.append(nccl_watch.look_at_new(0))])
    assert seen == [0] and not events.recorded
    assert nccl_watch.look_at_new(0) == 1 and events.recorded == 1
    assert nccl_watch.look_at_new(1) == 1 and events.recorded == 1


def test_a_stream_that_is_gone_is_not_looked_at(events):
    events.record_status = 900
    assert nccl_watch.look(sent()) is None


def test_a_stream_of_others_may_be_gone_when_it_is_looked_at(events, monkeypatch):
    """Nothing is asked of it then: the event is behind the call from the beginning."""
    monkeypatch.setattr(nccl_watch, "_running", True)
    monkeypatch.setattr(nccl_watch, "_last", {})
    behind = []
    monkeypatch.setattr(nccl_watch, "StreamEvent", lambda on, stream: behind.append(stream)
                        or SimpleNamespace(done=True))
    by = Linked("one")
    nccl_watch.sent(by, "all_reduce", 77)
    monkeypatch.setattr(nccl_watch, "_is_capturing", None)
    assert behind == [77] and nccl_watch.look(nccl_watch._last[by, 77]) is None
    assert not events.recorded


def test_nothing_is_put_into_a_graph_that_others_record(events, monkeypatch):
    monkeypatch.setattr(nccl_watch, "_last", {})
    events.capturing = 1
    nccl_watch.sent(Linked("one"), "all_reduce", 77)
    assert not nccl_watch._last


def test_streams_of_ours_are_used_again(driver):
    on = device()
    with own_stream(on) as one, own_stream(on) as other:
        assert one != other and lasts(one) and lasts(other)
    with own_stream(on) as again:
        assert again in (one, other)
    side = SideStream(on, 1)
    stream = side.stream
    assert stream in (one, other)
    del side
    with own_stream(on) as again:
        assert again == stream


def test_the_last_call_of_each_stream_is_noted_with_its_limit(monkeypatch):
    monkeypatch.setattr(nccl_watch, "_running", True)
    monkeypatch.setattr(nccl_watch, "_last", {})
    monkeypatch.setattr(nccl_watch, "lasts", lambda stream: True)
    one, other = Linked("one"), Linked("other")
    with config.scope(comm_timeout=7):
        nccl_watch.sent(one, "all_gather", 0)
    first = nccl_watch._last[one, 0]
    assert first.limit_s == 7
    nccl_watch.sent(one, "receive", 3)
    nccl_watch.sent(other, "send", 3)
    nccl_watch.sent(one, "all_reduce", 0)
    kept = {at: call.what for at, call in nccl_watch._last.items()}
    assert kept == {(one, 0): "all_reduce", (one, 3): "receive", (other, 3): "send"}
    assert nccl_watch._last[one, 0].number == first.number + 3
