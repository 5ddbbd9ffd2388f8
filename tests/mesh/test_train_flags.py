"""The command line of the training example on several ranks: any number of them, and one message
for what is wrong."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera as ts
from mesh import example
from mesh.example import losses_of
from mesh.launch import mpirun, needs_mpi

REHEARSAL = Path(__file__).with_name("rehearsal.py")
STEPS = 3
FLAGS = ["--sample", "0", "--eval-every", "100"]
for name, value in {**example.SMALL, "steps": STEPS}.items():
    FLAGS += [f"--{name}", str(value)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return example.write_text(tmp_path / "words.txt")


def launch(ranks: int, folder: Path, *flags: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return mpirun(ranks, "run", folder, battery=REHEARSAL, flags=[*FLAGS, *map(str, flags)])


def main(*flags: Any) -> int:
    return example.modules()[0].main([*FLAGS, *map(str, flags)])


# --- what is refused ----------------------------------------------------------------------------
WRONG = {
    "--mesh tp": "--mesh tp: 'tp' has no number of ranks",
    "--mesh dp=0": "--mesh dp=0: 'dp=0' has no number of ranks, 1 or more",
    "--mesh dp=-2": "--mesh dp=-2: 'dp=-2' has no number of ranks",
    "--mesh dp=two": "--mesh dp=two: 'dp=two' has no number of ranks",
    "--mesh dp=2,dp=2": "--mesh dp=2,dp=2: dp stands twice",
    "--mesh dp=2,cp=2": "--mesh dp=2,cp=2: 'cp' is no axis",
    "--mesh dp=2,": "--mesh dp=2,: '' is no axis",
    "--mesh pp=3": "--mesh pp=3 has more stages than --layers 2",
    "--mesh pp=2 --microbatches 7": "--microbatches 7 are more than the 6 windows that a rank has "
                                    "of --B 6",
    "--mesh pp=2,dp=2 --microbatches 4": "--microbatches 4 are more than the 3 windows",
    "--zero 1": "--zero 1 splits over dp, which one process does not have",
    "--zero 2 --mesh tp=3": "--zero 2 splits over dp, which tp=3 does not have",
}


@pytest.mark.parametrize("flags", WRONG)
def test_a_mesh_that_makes_no_sense_is_named(flags, text, tmp_path, capsys):
    assert main(*flags.split(), "--data", text, "--out", tmp_path / "out") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: [E_ARGUMENT] ") and WRONG[flags] in printed
    assert "hint: " in printed and not (tmp_path / "out").exists()


@needs_mpi
@pytest.mark.parametrize("ranks, flags, words", [
    (3, "--mesh dp=2", "--mesh dp=2 has 2 ranks, mpirun started 3"),
    (2, "--mesh dp=2,tp=2", "--mesh dp=2,tp=2 has 4 ranks, mpirun started 2"),
    (3, "--mesh tp", "'tp' has no number of ranks"),
    (3, "--data nowhere.txt", "No such file"),
    (3, "--d 25", "--d 25 is no multiple of twice --heads 3"),
])
def test_what_is_wrong_for_all_ranks_is_said_once(ranks, flags, words, text, tmp_path):
    run = launch(ranks, tmp_path / "ranks", "--data", text, *flags.split(), "--out",
                 tmp_path / "out")
    print(f"all stopped after {run.seconds:.1f} s")
    assert run.status == 1 and not run.results and run.seconds < 40, run.text
    assert run.text.count("error: ") == 1 and words in run.text, run.text
    assert "Traceback" not in run.text and run.text.count("stopping all ranks") == 1, run.text


# Of torch.distributed.run, version 2.11, those with two dashes: it matches what begins like one of
# them before it knows that they are the program's.
TORCHRUN = """nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone
max-restarts monitor-interval start-method event-log-handler role module no-python run-path log-dir
redirects tee local-ranks-filter node-rank master-addr master-port local-addr logs-specs
numa-binding signals-to-handle virtual-local-rank duplicate-stdout-filters
duplicate-stderr-filters""".split()


def test_every_flag_gets_through_torchrun():
    train, transformer = example.modules()[:2]
    launcher = argparse.ArgumentParser()
    for name in TORCHRUN:
        launcher.add_argument(f"--{name}")
    launcher.add_argument("rest", nargs=argparse.REMAINDER)
    longest = [f.metadata["longer"] or f.name for f in fields(train.Config)]
    flags = [w for name in longest for w in (f"--{transformer.dashed(name)}", "1")]
    given = launcher.parse_args(["--nproc-per-node", "2", "train.py", *flags])
    assert given.rest == ["train.py", *flags]
    assert train.parse(["--width", "32"])[1] == {"d": 32}


@needs_mpi
def test_help_and_unknown_flags_are_said_once(tmp_path):
    run = launch(3, tmp_path, "--help")
    assert run.status == 0 and run.text.count("usage: ") == 1, run.text
    run = launch(3, tmp_path, "--mash", "dp=3")
    assert run.status == 2 and run.text.count("unrecognized arguments: --mash") == 1, run.text


# --- what runs ------------------------------------------------------------------------------------
@needs_mpi
@pytest.mark.row("CORE-21")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_without_a_mesh_ranks_share_the_batch(ranks, text, tmp_path):
    """6 windows on 5 ranks: one of them has 2."""
    out = tmp_path / "out"
    run = launch(ranks, tmp_path / "ranks", "--data", text, "--out", out)
    assert run.status == 0 and len(run.results) == ranks, run.text
    assert (f"; on mesh(dp={ranks})" in run.text) == (ranks > 1)
    assert main("--data", text, "--out", tmp_path / "alone") == 0
    np.testing.assert_allclose(losses_of(out), losses_of(tmp_path / "alone"), rtol=1e-5)


@needs_mpi
def test_what_cannot_be_resumed_is_said_once(text, tmp_path):
    out = tmp_path / "out"
    resume = ["--out", out, "--resume"]
    for folder, words in (("a", "there is no checkpoint in"),
                          ("b", "holds a run already, at step 3"),
                          ("c", "step-00000003 is damaged")):
        if folder == "b":
            assert main("--data", text, "--out", out) == 0
        if folder == "c":
            manifest = ts.checkpoints.History(out).path(3) / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
        flags = ["--data", text, "--out", out] if folder == "b" else resume
        run = launch(3, tmp_path / folder, *flags)
        assert run.status == 1 and not run.results, run.text
        assert run.text.count("error: ") == 1 and words in run.text, run.text
    assert not (out / "step-00000004").exists()


def test_a_run_of_one_mesh_is_resumed_on_what_is_asked_for(text, tmp_path, capsys):
    """The saved mesh is what is taken when none is given."""
    out = tmp_path / "out"
    assert main("--data", text, "--mesh", "dp=2", "--zero", "1", "--out", out) == 0
    resume = ["--out", out, "--resume", "--steps", "5"]
    assert main(*resume, "--mesh", "") == 1
    assert "--zero 1 splits over dp, which one process" in capsys.readouterr().err
    assert main(*resume) == 0
    assert "; on mesh(dp=2)" in capsys.readouterr().out
    assert main("--out", out, "--resume", "--steps", "6", "--mesh", "tp=3", "--zero", "0") == 0
    assert "step 5 of 6; " in capsys.readouterr().out and len(losses_of(out)) == 6
