"""examples/train.py: it learns, resumes bit by bit, survives kills, and says what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.checkpoints.layout import sealed
from tessera.data import ByteCorpus

ROOT = Path(ts.__file__).parents[1]
TINY = "--d 16 --layers 2 --heads 2 --T 16 --B 4 --warmup 2 --sample 0".split()


def load_train(patch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; its neighbours are found as when it is run."""
    patch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("train_example", ROOT / "examples" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_train(monkeypatch)


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A text with something to learn: words in random order."""
    words = [b"tile", b"tensor", b"graph", b"mesh", b"policy", b"kernel"]
    file = tmp_path / "text.txt"
    file.write_bytes(b" ".join(words[i] for i in rng.integers(0, len(words), 40_000)))
    return file


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


# --- what comes out ---------------------------------------------------------------------------
@pytest.mark.parametrize("options", [
    [], ["--mlp", "swiglu", "--norm", "layernorm", "--dropout", "0.1", "--seed", "3"],
])
def test_it_learns_and_writes_its_figures(train, text, tmp_path, capsys, options):
    out = tmp_path / "run"
    flags = ["--d", "32", "--T", "32", "--B", "8", "--steps", "80", "--lr", "0.01",
             "--sample", "40", "--eval-every", "40", "--temperature", "0.3"]
    assert train.main([*TINY, *flags, *options, "--data", str(text), "--out", str(out)]) == 0
    found = result(out)
    losses = found["losses"]
    assert len(losses) == 80 and losses[0] == pytest.approx(np.log(256), abs=0.3)
    assert [step for step, _ in found["held_out"]] == [40, 80]
    assert found["held_out"][-1][1] < 1.0, "a byte of six words costs 0.3"
    assert found["tokens_per_s"] > 0 and found["config"]["d"] == 32
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr().out
    assert re.search(r"step 80/80  loss \d\.\d+  \|grad\| \d+\.\d+  [\d,]+ tokens/s", printed)
    sample = printed.split("--- a sample ---\n")[1].split("\n---")[0]
    assert sample.startswith("def ")
    assert len(sample) <= 44 <= len(sample.encode())  # a byte that is no text becomes a longer mark
    assert sum(letter in "tile tensor graph mesh policy kernel" for letter in sample[4:]) > 32


def test_the_figures_are_those_of_the_model(train, text, tmp_path):
    """Held-out loss and parameters, once more from the checkpoint with NumPy in f64."""
    out = tmp_path / "run"
    train.main([*TINY, "--steps", "3", "--data", str(text), "--out", str(out)])
    saved = ts.checkpoints.History(out).load()
    weights = {n.removeprefix("params."): x.numpy().astype(np.float64)
               for n, x in saved.tensors.items() if n.startswith("params.")}
    assert result(out)["parameters"] == sum(w.size for w in weights.values())
    corpus = ts.data.from_file(text)
    losses = [reference_loss(weights, *w, layers=2, heads=2)
              for w in corpus.held_out_batches(8, B=4, T=16)]
    assert saved.meta["held_out"][-1][1] == pytest.approx(np.mean(losses), rel=1e-5)


def reference_loss(w: dict, tokens: np.ndarray, targets: np.ndarray, layers: int, heads: int):
    """The model's equations in NumPy, written independently of the example."""
    x = w["embedding"][tokens]  # [B, T, D]
    B, T, D = x.shape
    hd = D // heads

    def norm(x, g):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g

    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, hd, 2) / hd)
    turn = np.exp(1j * angle)  # [T, hd/2]

    def rotate(x):
        z = (x[..., : hd // 2] + 1j * x[..., hd // 2:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    for i in range(layers):
        p = {k: w[f"blocks.{i}.{k}"] for k in ("norm1", "qkv", "out", "norm2", "up", "down")}
        qkv = np.einsum("btd,dhn->bhtn", norm(x, p["norm1"]), p["qkv"])
        q, k, v = np.split(qkv, 3, -1)
        scores = rotate(q) @ rotate(k).swapaxes(-1, -2) / np.sqrt(hd)
        scores[:, :, np.triu_indices(T, 1)[0], np.triu_indices(T, 1)[1]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + np.einsum("bhtn,hnd->btd", y, p["out"])
        h = norm(x, p["norm2"]) @ p["up"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ p["down"]
    z = norm(x, w["norm"]) @ w["embedding"].T
    z = z - z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -np.take_along_axis(logp, targets[..., None], -1).mean()


@pytest.mark.parametrize("dtype", [
    "bf16 @accum(f32)", "f16 @loss_scale(1024)", "fp8_e4m3 @saturate", "tf32",
    "fp6_e3m2 @saturate @stochastic_round @loss_scale(4096)"])
def test_narrow_products_train_on_f32_masters(train, text, tmp_path, dtype):
    out = tmp_path / "run"
    flags = ["--dtype", dtype, "--steps", "30", "--lr", "0.01", "--data", str(text)]
    assert train.main([*TINY, *flags, "--out", str(out)]) == 0
    losses = result(out)["losses"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 1.0
    manifest = json.loads(next(out.glob("step-*/manifest.json")).read_text())
    assert {t["type"] for n, t in manifest["tensors"].items() if n != "optimizer.step"} == {"f32"}
    assert train.main([*TINY, *flags[2:], "--out", str(tmp_path / "f32")]) == 0
    assert result(tmp_path / "f32")["losses"] != losses, "the narrow type changed nothing"


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_products_round_operands_and_result_to_the_type(train, rng, dtype):
    import ml_dtypes

    kind = {"bf16": ml_dtypes.bfloat16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}[dtype]
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((6, 8), (8, 4)))
    c = train.Config(d=8, heads=2, dtype=dtype)
    linear = sys.modules[train.Config.__module__].linear
    got = ts.jit(lambda x, w: linear(c, x, w))(x, w)
    exact = x.astype(kind).astype(np.float64) @ w.astype(kind).astype(np.float64)
    assert str(got.type) == "f32"
    np.testing.assert_allclose(got.numpy(), exact, rtol=2 * float(ml_dtypes.finfo(kind).eps),
                               atol=1e-2)
    assert (got.numpy().astype(kind).astype(np.float32) == got.numpy()).all()
    assert (got.numpy() != (x @ w)).any()


def test_each_step_takes_its_rate_from_the_schedule(train, text, tmp_path, monkeypatch):
    rates = []

    class Spied(train.Model):
        def __init__(self, c):
            super().__init__(c)
            real = self.step
            self.step = lambda *args: rates.append(args[-1]) or real(*args)

    monkeypatch.setattr(train, "Model", Spied)
    flags = [*TINY, "--steps", "9", "--lr", "0.5", "--warmup", "3", "--data", str(text)]
    assert train.main([*flags, "--out", str(tmp_path / "run")]) == 0
    falling = [0.05 + 0.225 * (1 + np.cos(np.pi * i / 6)) for i in range(6)]
    assert rates == pytest.approx([0.5 / 3, 1 / 3, 0.5, *falling])


# --- resuming ---------------------------------------------------------------------------------
def interrupt_at(train: ModuleType, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C while the batch of this step is made: that step is still finished."""
    real = ByteCorpus.batch

    def batch(self: ByteCorpus, now: int, **sizes: int) -> Any:
        if now == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, now, **sizes)

    monkeypatch.setattr(ByteCorpus, "batch", batch)


@pytest.mark.parametrize("options", [
    [], ["--dropout", "0.2", "--dtype", "bf16 @stochastic_round @accum(f32)"],
])
def test_five_steps_and_five_more_equal_ten(train, text, tmp_path, monkeypatch, capsys, options):
    """Bit by bit, with everything random switched on, whatever is evaluated on the way."""
    flags = [*TINY, *options, "--steps", "10", "--eval-every", "4", "--data", str(text)]
    assert train.main([*flags, "--out", str(tmp_path / "straight")]) == 0
    out = str(tmp_path / "parts")
    with monkeypatch.context() as patch:
        interrupt_at(train, patch, 5)
        assert train.main([*flags, "--out", out]) == 130
    assert f"--out {out} --resume" in capsys.readouterr().out
    assert len(result(tmp_path / "parts")["losses"]) == 5
    ts.random.seed(99)  # as in a new process
    assert train.main(["--out", out, "--resume", "--eval-every", "3"]) == 0
    whole, parts = result(tmp_path / "straight"), result(tmp_path / "parts")
    assert parts["losses"] == whole["losses"]
    assert [step for step, _ in parts["held_out"]] == [4, 6, 9, 10]
    assert parts["held_out"][-1] == whole["held_out"][-1]
    states = [ts.checkpoints.History(tmp_path / n).load().tensors for n in ("straight", "parts")]
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        assert x.buffer.tobytes() == states[1][name].buffer.tobytes(), name
    if not options:
        flags[flags.index("--steps") + 1] = "11"
        assert train.main([*flags, "--seed", "1", "--out", str(tmp_path / "other")]) == 0
        assert result(tmp_path / "other")["losses"][:5] != whole["losses"][:5]


def test_a_run_can_be_made_longer(train, text, tmp_path):
    out = str(tmp_path / "run")
    assert train.main([*TINY, "--steps", "4", "--data", str(text), "--out", out]) == 0
    assert train.main(["--out", out, "--resume", "--steps", "6"]) == 0
    found = result(tmp_path / "run")
    assert len(found["losses"]) == 6 and found["config"]["steps"] == 6


# Run by the child itself: `preexec_fn` would fork this process, whose libraries (JAX) object.
TAKE_TERMINAL = "fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
IGNORE_HANGUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"


def start(arguments: list[str], first: str = "", **options: Any) -> subprocess.Popen:
    """The example in a process of its own, which runs the statement `first` before it."""
    program = [sys.executable, str(ROOT / "examples" / "train.py"), *arguments]
    command = program
    if first:
        modules = "fcntl, os, signal, sys, termios"
        last = "os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", f"import {modules}; {first}; {last}", *program]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


def test_killed_again_and_again_it_ends_where_it_would_have(train, text, tmp_path):
    """SIGKILL some time after the first checkpoint of each life; at most the steps since the last
    checkpoint are lost, and the losses are those of a run that was left alone."""
    flags = [*TINY, "--steps", "60", "--checkpoint-every", "2", "--data", str(text)]
    assert train.main([*flags, "--out", str(tmp_path / "straight")]) == 0
    out = tmp_path / "killed"
    history, reached = ts.checkpoints.History(out), 0
    for life in range(3):
        arguments = ["--resume"] if history.steps() else flags
        child = start([*arguments, "--out", str(out)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = child.stdout.readline()
        assert f"step {reached} of 60" in first, first
        deadline = time.monotonic() + 60
        while not history.steps() or history.steps()[-1] < min(reached + 2, 60):
            assert time.monotonic() < deadline and child.poll() in (None, 0), "no checkpoint"
            time.sleep(0.002)
        time.sleep(0.003 * life)
        child.kill()
        child.communicate()
        reached = history.load().step
        assert reached % 2 == 0
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert result(out)["losses"] == result(tmp_path / "straight")["losses"]


# --- on a terminal ----------------------------------------------------------------------------
def test_on_a_terminal_it_draws_and_stops_at_ctrl_c(text, tmp_path):
    """Real keys on a pseudo-terminal: a live bar, Ctrl-C, a checkpoint, the line that resumes."""
    master, slave = pty.openpty()
    out = tmp_path / "run"
    flags = [*TINY, "--steps", "1000000", "--data", str(text), "--out", str(out)]
    child = start(flags, TAKE_TERMINAL, stdin=slave, stdout=slave, stderr=slave,
                  start_new_session=True)
    os.close(slave)
    shown, pressed = b"", False
    try:
        while True:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not pressed and b"tokens/s" in shown:
                os.write(master, b"\x03")
                pressed = True
    finally:
        os.close(master)
        child.wait(60)
    screen = shown.decode(errors="replace")
    assert child.returncode == 130, screen
    assert "\x1b[" in screen and "1000000" in screen
    step = ts.checkpoints.History(out).load().step
    assert f"stopped at step {step}; to continue:" in screen and "--resume" in screen
    assert (out / "loss.png").exists() and "Traceback" not in screen


def test_a_terminal_that_is_closed_stops_it_with_a_checkpoint(text, tmp_path):
    """SIGHUP, from the system and once more from a shell, while nothing can be shown any more."""
    master, slave = pty.openpty()
    out = tmp_path / "run"
    child = start([*TINY, "--steps", "1000000", "--data", str(text), "--out", str(out)],
                  TAKE_TERMINAL, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 130
    assert ts.checkpoints.History(out).load().step > 0
    assert (out / "loss.png").exists()


def test_what_nohup_ignores_stays_ignored(text, tmp_path):
    out = tmp_path / "run"
    child = start([*TINY, "--steps", "40", "--data", str(text), "--out", str(out)],
                  IGNORE_HANGUP, stdout=subprocess.PIPE, text=True)
    while "step 1/" not in child.stdout.readline():
        pass
    child.send_signal(signal.SIGHUP)
    child.communicate(timeout=180)
    assert child.returncode == 0 and len(result(out)["losses"]) == 40


# --- sentinels --------------------------------------------------------------------------------
@pytest.mark.row("CARD-05")
def test_sentinels_are_a_flag_of_the_run(train, text, tmp_path, capsys):
    """Three runs that overflow: ignored, reported, stopped at the line that made it."""
    flags = [*TINY, "--steps", "6", "--eval-every", "3", "--lr", "1e38", "--warmup", "0",
             "--clip", "1e30", "--data", str(text)]
    codes, printed = {}, {}
    for mode in ("off", "flag", "raise"):
        codes[mode] = train.main([*flags, "--numerics", mode, "--out", str(tmp_path / mode)])
        printed[mode] = capsys.readouterr()
    assert codes == {"off": 0, "flag": 0, "raise": 1}
    assert "numerics" not in printed["off"].out
    assert not np.isfinite(result(tmp_path / "off")["losses"]).all()
    assert re.search(r"numerics: .*nan \d+", printed["flag"].out)
    assert "first made by " in printed["flag"].out
    assert re.search(r"error: \[E_NAN_INF\]", printed["raise"].err)
    assert re.search(r"(examples/\w+\.py|tessera/.*):\d+", printed["raise"].err)


def test_sentinels_stay_silent_when_all_is_well(train, text, tmp_path, capsys):
    ts.debug.flags()  # what other tests have left
    flags = [*TINY, "--steps", "4", "--data", str(text)]
    assert train.main([*flags, "--numerics", "raise", "--out", str(tmp_path / "a")]) == 0
    assert train.main([*flags, "--numerics", "flag", "--out", str(tmp_path / "b")]) == 0
    assert "numerics" not in capsys.readouterr().out


# --- mistakes ---------------------------------------------------------------------------------
def refused(train: ModuleType, capsys: pytest.CaptureFixture, arguments: list[str]) -> str:
    """The message of a run that does not begin; nothing of it is a traceback."""
    assert train.main(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: [E_") and "Traceback" not in message
    return message


@pytest.mark.parametrize("size, words", [(None, "No such file"), (0, "is empty"),
                                         (500, "are left for train use")])
def test_a_file_that_cannot_be_trained_on_is_named(train, tmp_path, capsys, size, words):
    file = tmp_path / "t.txt"
    if size is not None:
        file.write_bytes(b"x" * size)
    message = refused(train, capsys, ["--data", str(file), "--out", str(tmp_path / "run")])
    assert words in message and "t.txt" in message and "hint:" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags, words", [
    (["--d", "30", "--heads", "4"], "--d 30 is no multiple of twice --heads 4"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--eval-every", "0"], "--eval-every must be at least 1"),
    (["--dtype", "bf17"], "bf17"),
    (["--dtype", "int8"], "--dtype int8: matmuls with gradients need a float type"),
    (["--dtype", "bf16 @acum(f32)"], "acum"),
    (["--lr", "-1"], "CosineSchedule"),
    (["--dropout", "1.0"], "dropout needs 0 <= p < 1"),
    (["--clip", "0"], "limit must be positive"),
    (["--T", "100000"], "T = 100000 do not fit"),
    (["--seed", "-1"], "--seed -1 is no integer from 0 to 2^64 - 1"),
    (["--seed", str(2**64)], "is no integer from 0 to 2^64 - 1"),
    (["--B", "1000000000"], "--B 1000000000, --T 16, --d 16 and --layers 2 take more than"),
    (["--d", "4000000"], "take more than"),
    (["--layers", "1000000000000"], "take more than"),
    (["--lr", "nan"], "--lr must be a finite number, got nan"),
])
def test_settings_that_make_no_sense_are_named(train, text, tmp_path, capsys, flags, words):
    """None of them leaves a checkpoint."""
    out = tmp_path / "run"
    message = refused(train, capsys, [*TINY, *flags, "--data", str(text), "--out", str(out)])
    assert words in message
    assert not list(tmp_path.glob("run/step-*"))


FOREIGN = {
    "no meta": (lambda m: m.update(meta=None), "its meta has no config"),
    "other meta": (lambda m: m.update(meta=[1]), "its meta has no config"),
    "no corpus": (lambda m: m["meta"].pop("corpus"), "no digest of a corpus"),
    "no losses": (lambda m: m["meta"].pop("losses"), "no list of losses"),
    "losses of text": (lambda m: m["meta"].update(losses=["a", "b"]), "no list of losses"),
    "fewer losses": (lambda m: m["meta"]["losses"].pop(), "1 losses, of 2 steps"),
    "step of another": (lambda m: m.update(step=10**30), "losses, of 10000"),
    "held-out of numbers": (lambda m: m["meta"].update(held_out=5), "no list of held-out losses"),
    "held-out of pairs": (lambda m: m["meta"].update(held_out=[[1]]), "no list of held-out losses"),
    "a setting too many": (lambda m: m["meta"]["config"].update(evil=1), "'evil', which is no"),
    "text for a number": (lambda m: m["meta"]["config"].update(d="x"), "d = 'x', int is needed"),
    "no such choice": (lambda m: m["meta"]["config"].update(mlp="x"), "--mlp is 'x'"),
    "a width of 0": (lambda m: m["meta"]["config"].update(d=0), "--d must be at least 1"),
    "too wide": (lambda m: m["meta"]["config"].update(d=10**9), "take more than"),
    "endless text": (lambda m: m["meta"]["config"].update(data="/dev/zero"), "no regular file"),
    "code for a type": (lambda m: m["meta"]["config"].update(dtype="__import__('os')"),
                        "unknown dtype"),
}


def test_a_checkpoint_of_another_program_is_refused_in_words(train, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main([*TINY, "--steps", "2", "--data", str(text), "--out", str(out)]) == 0
    file = next(out.glob("step-*/manifest.json"))
    good = json.loads(file.read_text())
    del good["sha256"]
    capsys.readouterr()
    for name, (change, words) in FOREIGN.items():
        manifest = json.loads(json.dumps(good))
        change(manifest)
        file.write_bytes(sealed(manifest))
        message = refused(train, capsys, ["--out", str(out), "--resume", "--steps", "3"])
        assert words in message, (name, message)


def test_memory_that_is_not_there_is_an_error_of_one_line(train, text, tmp_path, capsys,
                                                          monkeypatch):
    def none_left(*args: Any, **sizes: int) -> Any:
        raise MemoryError("Unable to allocate 9. TiB")

    monkeypatch.setattr(ByteCorpus, "batch", none_left)
    assert train.main([*TINY, "--data", str(text), "--out", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: out of memory: Unable to allocate 9. TiB\n  hint: a smaller")


def test_a_run_is_not_overwritten(train, text, tmp_path, capsys):
    out = tmp_path / "run"
    flags = [*TINY, "--steps", "2", "--data", str(text), "--out", str(out)]
    assert train.main(flags) == 0
    before = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
    capsys.readouterr()
    message = refused(train, capsys, flags)
    assert "holds a run already, at step 2" in message and "--resume continues it" in message
    assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before


def test_what_cannot_be_resumed_is_named(train, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert "no checkpoint in" in refused(train, capsys, ["--out", str(out), "--resume"])
    assert not out.exists()
    flags = [*TINY, "--steps", "6", "--checkpoint-every", "2", "--data", str(text)]
    assert train.main([*flags, "--out", str(out)]) == 0
    capsys.readouterr()
    resume = ["--out", str(out), "--resume"]
    assert "has --d 16, asked for 32" in refused(train, capsys, [*resume, "--d", "32"])
    assert "no checkpoint of step 3" in refused(train, capsys, [*resume, "3"])
    moved = tmp_path / "moved.txt"
    shutil.move(text, moved)
    assert "No such file" in refused(train, capsys, resume)
    text.write_bytes(moved.read_bytes()[1:])
    assert "is not the text that" in refused(train, capsys, resume)
    shutil.move(moved, text)
    with (out / "step-00000006" / "manifest.json").open("a") as manifest:
        manifest.write("!")
    message = refused(train, capsys, resume)
    assert "step-00000006 is damaged" in message
    assert "hint: the checkpoint of step 4 is whole: --resume 4" in message
    assert train.main([*resume, "4"]) == 0
    assert len(result(out)["losses"]) == 6
    assert ts.checkpoints.History(out).load().step == 6


def test_two_runs_do_not_share_a_folder(train, text, tmp_path, capsys):
    out = tmp_path / "run"
    with ts.checkpoints.History(out).claim():
        message = refused(train, capsys, [*TINY, "--data", str(text), "--out", str(out)])
    assert "this process writes to" in message


def test_a_resumed_run_holds_the_folder_before_it_reads(train, text, tmp_path, capsys, monkeypatch):
    """Else it would go on from what another one has long left behind, and prune that one's work."""
    out = tmp_path / "run"
    flags = [*TINY, "--steps", "2", "--data", str(text), "--out", str(out)]
    assert train.main(flags) == 0
    seen = []
    real = ts.checkpoints.History.load

    def load(self, step=None):
        with pytest.raises(ts.CheckpointError, match="this process writes to"):
            ts.checkpoints.History(out).claim().__enter__()
        seen.append(step)
        return real(self, step)

    monkeypatch.setattr(ts.checkpoints.History, "load", load)
    assert train.main(["--out", str(out), "--resume", "--steps", "3"]) == 0
    assert seen == [None]
    with ts.checkpoints.History(out).claim():
        capsys.readouterr()
        assert "this process writes to" in refused(train, capsys, ["--out", str(out), "--resume"])
    assert seen == [None], "it read what it does not hold"


def test_help_shows_every_setting_with_its_default(train, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("--d D", "--dtype", "--numerics", "--checkpoint-every", "--resume [STEP]"):
        assert name in printed
    assert f"training steps ({train.Config().steps})" in printed


# --- what it is measured with -----------------------------------------------------------------
@pytest.mark.parametrize("side", ["tessera", "torch"])
def test_the_benchmark_of_its_speed_runs(side):
    if side == "torch":
        pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "benchmarks" / "train_speed.py"), "--child", side,
               "--width", "32", "--layers", "1", "--batch", "2", "--length", "8", "--warmup", "1",
               "--steps", "2"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, env=os.environ | {
        "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens_per_s"] > 0 and 4 < found["loss"] < 8


@pytest.mark.parametrize("flags, words", [
    (["--mesh", "dp=2"], "--target cuda --mesh dp=2 is 2 processes, each with a GPU"),
])
def test_what_a_gpu_cannot_do_is_refused(train, flags, words, capsys):
    assert train.main([*TINY, "--target", "cuda", *flags]) != 0
    assert words in capsys.readouterr().err
