"""The same programs on processes that torchrun or srun has started: by sockets, without MPI."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from pathlib import Path

import pytest

import tessera as ts
from mesh import faults
from mesh.battery import collectives
from mesh.launch import STOPPED_S, TOLD, started_as_by
from mesh.processes import processes_of_run
from mesh.test_mpi import FAILURES
from tessera import launched
from tessera.mesh import world
from tessera.mesh.errors import MeshError
from tessera.mesh.ranks import rendezvous

FAULTS = Path(faults.__file__)


@pytest.mark.parametrize("launcher, ranks", [("torchrun", 2), ("torchrun", 4), ("srun", 3)])
def test_tcp_gives_the_bits_of_the_simulation(launcher, ranks, tmp_path):
    run = started_as_by(launcher, ranks, "collectives", tmp_path, fresh=ranks < 4)
    assert run.status == 0, run.text
    assert run.results == dict(enumerate(ts.dist.simulate(collectives, ranks)))


@pytest.mark.parametrize("program", sorted({*FAILURES} - {"fail_early"}))
def test_all_ranks_stop(program, tmp_path):
    run = started_as_by("srun", 3, program, tmp_path)
    assert run.status != 0 and run.seconds < STOPPED_S, run.text
    assert not {0, 2} & run.results.keys(), run.text
    for words in FAILURES[program]:
        assert words in run.text, run.text
    assert run.text.count("(pid ") == (program == "killed"), run.text


ENDS = {"killed_as_it_waits": (1, "(pid "), "killed_with_a_child": (1, "(pid "),
        "leave_with_3": (3, "rank 1 of 3 has left by sys.exit(3); stopping all ranks"),
        "fail": (1, "rank 1 of 3 failed; stopping all ranks"), "catch_an_exit": (0, "")}


@pytest.mark.parametrize("program", ENDS)
def test_how_a_program_ends(program, tmp_path):
    run = started_as_by("srun", 3, program, tmp_path, fresh=True,
                        RUN_OF_TEST=(mark := uuid.uuid4().hex))
    status, text = ENDS[program]
    assert abs(run.status) in (status, 9) and run.seconds < STOPPED_S, run.text
    assert run.text.count("tessera: ") == bool(text) and text in run.text, run.text
    begin = time.monotonic()
    while processes_of_run(mark):
        assert time.monotonic() - begin < 20
        time.sleep(0.05)


@pytest.mark.parametrize("program, words", [
    ("numpy_on_one", "numpy"), ("share_at_the_end", "has ended the program"),
    ("large_and_late", "numpy"), ("two_threads", "two threads of rank")])
def test_mistakes_are_named(program, words, tmp_path):
    run = started_as_by("torchrun", 3, program, tmp_path, battery=FAULTS)
    assert run.status == 1 and run.seconds < STOPPED_S, run.text
    assert words in run.text, run.text


def test_a_rank_that_never_communicates_is_missed(tmp_path):
    run = started_as_by("torchrun", 2, "no_start", tmp_path, battery=FAULTS)
    assert run.status == 1 and run.seconds < STOPPED_S, run.text
    assert "rank 0 of 2 has waited 3 s for rank 1, of which it has heard nothing" in run.text


@pytest.mark.parametrize("agent", [False, True])
def test_the_port_may_be_taken(agent, tmp_path):
    """By one that accepts and says nothing, as torchrun's own store."""
    with socket.create_server(("", 0)) as silent:
        more = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent else {}
        run = started_as_by("torchrun", 2, "collectives", tmp_path,
                            MASTER_PORT=str(silent.getsockname()[1]), **more)
        silent.setblocking(False)
        called = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                link, _ = silent.accept()
                link.settimeout(1)
                with link:
                    assert link.recv(64) == b""  # nothing is said to a stranger
                called += 1
    assert run.status == 0 and len(run.results) == 2, run.text
    assert bool(called) != agent


def test_processes_with_one_rank_are_told(tmp_path, monkeypatch):
    told = TOLD["torchrun"]
    monkeypatch.setitem(TOLD, "torchrun", lambda rank, ranks: told(min(rank, 1), ranks))
    run = started_as_by("torchrun", 3, "collectives", tmp_path)
    assert run.status == 1 and "MASTER_PORT" in run.text, run.text
    assert re.search(r"\[E_MESH\] rank 1 of 3 on \S+ calls rank 0 of 3 for a second time", run.text)
    # those that have called are told, too
    assert run.text.count("rank 1 of 3 has not met the others: rank 1 of 3 on ") == 2, run.text
    assert run.text.count("Error: [E_MESH]") == 3, run.text


# --- what launchers say ---------------------------------------------------------------------------
SAID = {
    "none": ({}, (1, 0, 1, 0)),
    "mpich": ({"PMI_SIZE": 4, "PMI_RANK": 3, "MPI_LOCALNRANKS": 2, "MPI_LOCALRANKID": 1},
              (4, 3, 2, 1)),
    "open mpi": ({"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_RANK": 2,
                  "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 0}, (4, 2, 2, 0)),
    "torchrun": ({"WORLD_SIZE": 8, "RANK": 5, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 1,
                  "MASTER_ADDR": "a", "MASTER_PORT": 1}, (8, 5, 4, 1)),
    "no rank": ({"WORLD_SIZE": 8, "MASTER_ADDR": "a", "MASTER_PORT": 1}, (1, 0, 1, 0)),
    "a part of the address": ({"WORLD_SIZE": 8, "RANK": 5, "MASTER_PORT": 1}, (8, 5, 8, 5)),
    "no address": ({"WORLD_SIZE": 8, "RANK": 5}, (1, 0, 1, 0)),
    "srun": ({"SLURM_STEP_NUM_TASKS": 7, "SLURM_NTASKS": 9, "SLURM_PROCID": 6, "SLURM_LOCALID": 0,
              "SLURM_NODEID": 3, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, (7, 6, 1, 0)),
    "srun's middle": ({"SLURM_STEP_NUM_TASKS": 7, "SLURM_PROCID": 5, "SLURM_LOCALID": 1,
                       "SLURM_NODEID": 2, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, (7, 5, 2, 1)),
    "as srun": ({"SLURM_NTASKS": 2, "SLURM_PROCID": 1, "SLURM_LOCALID": 1, "MASTER_ADDR": "a"},
                (2, 1, 2, 1)),
    "a batch script": ({"SLURM_NTASKS": 8, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}, (1, 0, 1, 0)),
    "torchrun below srun": ({"WORLD_SIZE": 8, "RANK": 5, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 1,
                             "MASTER_ADDR": "a", "MASTER_PORT": 1, "SLURM_STEP_NUM_TASKS": 2,
                             "SLURM_PROCID": 1}, (8, 5, 4, 1)),
}


@pytest.mark.parametrize("name", SAID)
def test_what_launchers_say(name, monkeypatch):
    variables, want = SAID[name]
    monkeypatch.setattr(os, "environ", {k: str(v) for k, v in variables.items()})
    assert (launched.launched_size(), launched.launched_rank(), launched.launched_here(),
            launched.launched_local_rank()) == want


@pytest.mark.parametrize("variables, said", [
    ({}, ""), ({"WORLD_SIZE": 8}, ""), ({"WORLD_SIZE": 1, "MASTER_ADDR": "a"}, ""),
    ({"SLURM_NTASKS": 8, "MASTER_ADDR": "a"}, "SLURM_NTASKS=8 MASTER_ADDR=a and no SLURM_PROCID"),
    ({"WORLD_SIZE": 8, "MASTER_ADDR": "a", "RANK": 7}, ""),
    ({"WORLD_SIZE": 8, "MASTER_ADDR": "a"}, "WORLD_SIZE=8 MASTER_ADDR=a and no RANK"),
    ({"WORLD_SIZE": 8, "MASTER_PORT": 1, "RANK": "x"}, "WORLD_SIZE=8 MASTER_PORT=1 and RANK=x")])
def test_a_process_that_is_told_of_others_and_not_which_it_is_runs_alone(variables, said,
                                                                       monkeypatch):
    """And is told so."""
    monkeypatch.setattr(os, "environ", {k: str(v) for k, v in variables.items()})
    assert launched.half_told() == said
    if said:
        with pytest.warns(UserWarning, match=f"{said}: .* runs alone") as told:
            assert world._process_transport.__wrapped__().size == 1
        assert told[0].filename == __file__


@pytest.mark.parametrize("variables, want", [
    ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, ("a", 29500)),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
     ("a", 29501)),
    ({"SLURM_STEP_NODELIST": "gpu[07-10,12],login1", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "1"},
     ("gpu07", 20032)),
    ({"SLURM_STEP_NODELIST": "n1-ib.cluster,n2", "MASTER_PORT": "5"}, ("n1-ib.cluster", 5))])
def test_where_rank_0_is_looked_for(variables, want, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    assert rendezvous.address() == want


def test_nothing_says_where_rank_0_is(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(MeshError, match="nothing says where rank 0 is") as info:
        rendezvous.address()
    assert "MASTER_ADDR" in info.value.hint


@pytest.mark.parametrize("port", ["65528", "99999", "0", "http", "-1"])
def test_a_master_port_that_is_none(port, monkeypatch):
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "a", "MASTER_PORT": port})
    with pytest.raises(MeshError, match=f"MASTER_PORT={port} is no port") as info:
        rendezvous.address()
    assert "1 to 65527" in info.value.hint


@pytest.mark.parametrize("variables, words", [
    ({"RANK": "2"}, "told to be rank 2 of 2"),
    ({"RANK": "1", "MASTER_ADDR": "none.invalid"}, "none.invalid, where rank 0 is looked for, is")])
def test_a_rank_that_cannot_meet_the_others_says_why(variables, words, monkeypatch):
    """At once where no waiting helps; a name that is not known may come to be."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **variables}
    monkeypatch.setattr(os, "environ", told)
    with ts.config.scope(comm_timeout=1), pytest.raises(MeshError, match=words):
        rendezvous.join_world(0)
