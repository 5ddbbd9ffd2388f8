"""Collectives of tensors on GPUs between simulated ranks, with a driver and NCCL that pretend."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from tessera import config
from tessera.mesh.collectives import record
from tessera.mesh.ranks import communicator, ledger, own_arithmetic
from tessera.mesh.ranks.communicator import Communicator

TYPES = ("f32", "f64", "int32", "int64", "f16", "bf16")


def bits(x: ts.Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.buffer).view(np.uint8)


def mine(rank: int, shape: tuple, kind: str) -> ts.Tensor:
    values = 50 * np.random.default_rng([3, rank]).standard_normal(shape)
    return ts.tensor(values, kind)


@pytest.mark.parametrize("kind", TYPES)
def test_what_nccl_does_alone_has_the_bits_of_the_host(gpu, nccl, kind):
    def program() -> None:
        x = mine(ts.dist.rank(), (6, 5), kind)
        for call in (lambda x: ts.dist.all_reduce(x),
                     lambda x: ts.dist.reduce_scatter(x, dim=0),
                     lambda x: ts.dist.all_gather(x, dim=0)):
            got = call(x.to("cuda"))
            assert got.place == 0
            np.testing.assert_array_equal(bits(got), bits(call(x)))

    ts.dist.simulate(program, 2)
    assert {what for _, what, _ in nccl.calls} == {"all_reduce", "reduce_scatter", "all_gather"}


def test_a_call_is_compared_once_unless_the_setting_says_each(gpu, nccl, monkeypatch):
    compared = []
    agree = ledger.agree
    for module in (record, __import__("tessera.mesh.ranks.nccl", fromlist=["agree"])):
        monkeypatch.setattr(module, "agree", lambda *args: compared.append(1) or agree(*args))

    def program(times: int) -> None:
        x = ts.ones((8,)).to("cuda")
        for _ in range(times):
            x = ts.dist.all_reduce(x)

    ts.dist.simulate(program, 2, 5)
    assert len(compared) == 2  # each rank, once
    compared.clear()
    with config.scope(comm_check="each"):
        ts.dist.simulate(program, 2, 5)
    assert len(compared) == 10


class AnsweringLibrary:
    """NCCL's functions, which do nothing."""

    has_windows = False

    def __getattr__(self, name):
        return lambda *given: 0


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_repeated_call_runs_few_functions_and_leaves_its_operand_what_it_was(gpu, nccl, name,
                                                                              monkeypatch):
    monkeypatch.setattr(communicator.Communicator, "by_id",
                        lambda group, index: Communicator(group, index, AnsweringLibrary(), None))
    ran, origin, dims = [], object(), {} if name == "all_reduce" else {"dim": 0}

    def program() -> None:
        x, call = ts.ones((8,)).to("cuda"), getattr(ts.dist, name)
        for run in range(3):
            x.origin = origin
            if run == 2:
                sys.setprofile(lambda frame, what, _: "return" in what or ran.append(what))
            call(x, **dims)
            sys.setprofile(None)
            assert run == 0 or x.origin is origin  # it was read alone

    ts.dist.simulate(program, 2)
    assert len(ran) / 2 <= 70  # calls of functions, each about 0.1 us


def test_ranks_that_disagree_find_out_before_nccl_is_called(gpu, nccl):
    with pytest.raises(ts.TesseraError, match="disagree about their next collective"):
        ts.dist.simulate(lambda: ts.dist.all_reduce(
            ts.ones((4 + ts.dist.rank(),)).to("cuda")), 2)
    assert not nccl.calls


def test_traffic_counts_what_nccl_sends(gpu, nccl):
    def program() -> list:
        x = ts.ones((8,)).to("cuda")
        ts.dist.all_reduce(x)
        with ts.dist.traffic() as sent:
            ts.dist.all_reduce(x)
        return sent

    (sent,), _ = ts.dist.simulate(program, 2)
    assert (sent.op, sent.types, sent.sent_bytes) == ("all_reduce", ("f32",), 32)
    assert sent.where.file == __file__


@pytest.mark.parametrize("op, kind, members, told", [
    ("sum", "f32", 8, True), ("sum", "int32", 8, True), ("sum", "bf16", 2, True),
    ("sum", "bf16", 3, False), ("sum", "bf16 @accum(bf16)", 3, True),
    ("max", "f32", 2, False), ("max", "int32", 8, True), ("mean", "f32", 2, False),
    ("sum", "f32 @stochastic_round", 2, False), ("sum", "fp8_e4m3", 2, False)])
def test_nccl_adds_where_the_policy_says_what_it_does(op, kind, members, told):
    numeric = ts.as_type(kind)
    assert own_arithmetic.adds_as_told(op, numeric, numeric, members) is told


# --- inside of compiled functions ---------------------------------------------------------------
CALLS = {
    "all_reduce": lambda x: ts.dist.all_reduce(x),
    "mean": lambda x: ts.dist.all_reduce(x, op="mean"),
    "max": lambda x: ts.dist.all_reduce(x, op="max"),
    "reduce_scatter": lambda x: ts.dist.reduce_scatter(x, dim=0),
    "reduce_scatter of columns": lambda x: ts.dist.reduce_scatter(x, dim=1),
    "all_gather": lambda x: ts.dist.all_gather(x, dim=0),
    "all_gather of columns": lambda x: ts.dist.all_gather(x, dim=1),
    "all_to_all": lambda x: ts.dist.all_to_all(x, split=0, concat=1),
    "broadcast": lambda x: ts.dist.broadcast(x, root=1),
    "permute": lambda x: ts.dist.permute(x, pairs=[(0, 1), (1, 0)]),
    "permute to one": lambda x: ts.dist.permute(x, pairs=[(0, 1)]),
}


@pytest.mark.parametrize("route", ["nccl", "host"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_of_a_compiled_function_have_the_bits_of_the_host(gpu, apart, request, n, kind,
                                                                      route):
    by = request.getfixturevalue("nccl") if route == "nccl" else None

    def program() -> None:
        x = mine(ts.dist.rank(), (6, 5), kind)
        for name, call in CALLS.items():
            f = ts.jit(lambda x, call=call: call(x * 2) + 1)
            got, want = f(x.to("cuda")), ts.jit(lambda x, call=call: call(x * 2) + 1)(x)
            assert got.place == 0
            np.testing.assert_array_equal(bits(got), bits(want), err_msg=name)

    ts.dist.simulate(program, n)
    gc.collect()
    assert by is None or {what for _, what, _ in by.calls} >= {"swap", "all_gather"}


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_their_gradients_are_those_of_the_host(gpu, apart, nccl, name):
    def program() -> None:
        x = mine(ts.dist.rank(), (6, 4), "f32")
        f = ts.jit(ts.grad(lambda x: ts.sum(ts.square(CALLS[name](x)))))
        np.testing.assert_allclose(f(x.to("cuda")).numpy(), f(x).numpy(), rtol=1e-5)

    ts.dist.simulate(program, 2)
    gc.collect()
