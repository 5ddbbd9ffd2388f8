"""Train a byte-level transformer on text: by default the source of Python's standard library.

    python examples/train.py                                  # some minutes on two cores
    python examples/train.py --data my.txt --out runs/mine --sample 400
    python examples/train.py --dtype "bf16 @accum(f32)"       # what the matmuls compute in
    python examples/train.py --out runs/mine --resume         # after Ctrl-C, a crash, a kill
    mpirun -n 8 python examples/train.py --mesh dp=4,tp=2     # on several processes
    mpirun -n 2 python examples/train.py --mesh dp=2 --target cuda  # each with a GPU
    python examples/train.py --mesh dp=4,tp=2                 # the same mesh, all in this process
    python -m tessera plan examples/train.py --mesh dp=8,tp=9 # what a large one takes on 72 GPUs

The model is in transformer.py. On a mesh the windows of a batch are split over dp, heads and hidden
units over tp, blocks over pp; what it computes is the same. The folder --out receives checkpoints,
loss.png and result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from progress import Progress, draw_curve, interruptible
from transformer import (
    Config,
    dashed,
    init_params,
    loss_of,
    place,
    place_batch,
    place_params,
    stage,
    stage_params,
    stages_of,
    step_batch,
)

import tessera as ts
from tessera.data import VOCABULARY, ByteCorpus, from_file, python_library


# --- one step, one measurement, one sample ----------------------------------------------------
class Model:
    """The compiled functions of a run; what they compute on is in the run."""

    def __init__(self, c: Config):
        (trained,), (plain,) = stages_of(c, c.dropout), stages_of(c)

        def loss(params: dict, tokens: ts.Tensor, targets: ts.Tensor) -> ts.Tensor:
            return loss_of(trained(params, tokens), targets)

        compiled = functools.partial(ts.jit, target=c.target, capture_graph=c.target == "cuda")

        @functools.partial(compiled, donate=("params", "state"))
        def step(params: dict, state: dict, tokens: ts.Tensor, targets: ts.Tensor, lr: float):
            value, grads = ts.value_and_grad(loss)(params, tokens, targets)
            grads, norm = ts.optim.clip_by_global_norm(grads, c.clip)
            params, state = c.optimizer.update(params, grads, state, lr)
            return params, state, value, norm

        @compiled
        def measure(params: dict, tokens: ts.Tensor, targets: ts.Tensor):
            return loss_of(plain(params, tokens), targets)

        self.c, self.step, self.measure = c, step, measure

    def advance(self, run: Run, batch: tuple, lr: float) -> tuple[float, float]:
        """One step of training: the loss, and the norm of the gradient before it is clipped."""
        run.params[0], run.state[0], loss, norm = self.step(
            run.params[0], run.state[0], *batch, lr)
        return float(loss), float(norm)

    def loss(self, params: list, batch: tuple) -> float:
        return float(self.measure(params[0], *place_batch(self.c, batch)))

    def held_out_loss(self, params: list, corpus: ByteCorpus, batches: int) -> float:
        """Mean cross-entropy in nats per byte, on the same windows each time."""
        windows = corpus.held_out_batches(batches, B=self.c.B, T=self.c.T)
        with same_randomness():
            return float(np.mean([self.loss(params, batch) for batch in windows]))


class Pipelined(Model):
    """The same for a model in stages, through which the parts of a batch stream."""

    def __init__(self, c: Config):
        self.c = c
        twins = [("0.embedding", f"{c.stages - 1}.embedding")]

        def pipe(dropout: float, microbatches: int) -> Any:
            return ts.pipeline(stages_of(c, dropout), microbatches, mesh=c.grid, tied=twins)

        @ts.jit
        def update(params: dict, grads: dict, state: dict, lr: float, norm: float):
            grads, _ = ts.optim.clip_by_global_norm(grads, c.clip, norm)
            return c.optimizer.update(params, grads, state, lr)

        self.training = pipe(c.dropout, c.microbatches).value_and_grad(loss_of)
        self.forward = pipe(0.0, c.microbatches)
        self.update, self.measure = update, ts.jit(loss_of)

    def advance(self, run: Run, batch: tuple, lr: float) -> tuple[float, float]:
        loss, grads = self.training(run.params, *batch)
        norm = float(ts.optim.global_norm(grads))  # over all stages, the shared embedding once
        for s, g in enumerate(grads):
            if g is not None:
                run.params[s], run.state[s] = self.update(run.params[s], g, run.state[s], lr, norm)
        return float(loss), norm

    def loss(self, params: list, batch: tuple) -> float:
        logits = self.forward(params, place_batch(self.c, batch)[0])
        made = np.zeros(()) if logits is None else self.measure(logits, batch[1]).numpy()
        return float(self.told(made))

    def told(self, found: np.ndarray) -> np.ndarray:
        """What the last stage has found, on all ranks."""
        if ts.dist.world_size() == 1:
            return found
        found = ts.tensor(found.astype(np.float32))
        last = self.c.stages - 1
        return ts.dist.broadcast(found, axis="pp", root=last, mesh=self.c.grid).numpy()


def sampled(c: Config, run: Run) -> str:
    """Text of the model, generated on rank 0 with all weights."""
    if c.stages > 1 and ts.dist.world_size() > 1:
        return "(each rank has its stages alone: --resume in one process samples the whole model)"
    params = whole(merged(run.params))
    text = generate(c, params, b"def ", c.sample) if ts.dist.rank() == 0 else b""
    return ts.dist.share(text.decode(errors="replace"))


def whole(params: dict) -> dict:
    """The weights as tensors of this process; every rank of a mesh must ask for them."""
    return {k: whole(p) if isinstance(p, dict) else ts.tensor(p.numpy(), p.type)
            for k, p in params.items()}


def generate(c: Config, params: dict, prompt: bytes, count: int) -> bytes:
    """The prompt and `count` more bytes, each drawn from the softmax of logits / temperature.

    The window is computed anew for each byte, padded to T: causal attention does not see what
    stands behind.
    """
    logits = ts.jit(functools.partial(stage, c=c, first=True, last=True, dropout=0.0),
                    target=c.target)
    rng = np.random.default_rng(c.seed)
    text = bytearray(prompt)
    for _ in range(count):
        window = text[-c.T:]
        tokens = np.zeros((1, c.T), np.int64)
        tokens[0, :len(window)] = window
        scores = logits(params, tokens).numpy()[0, len(window) - 1]
        scores = scores.astype(np.float64) / max(c.temperature, 1e-6)
        text.append(int(np.argmax(scores + rng.gumbel(size=VOCABULARY))))
    return bytes(text)


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """What is drawn inside does not change what training draws afterwards."""
    before = ts.random.get_state()
    try:
        yield
    finally:
        ts.random.set_state(before)


# --- the run ----------------------------------------------------------------------------------
@dataclass
class Run:
    """Everything that changes while training, and is saved; weights and optimizer by stage."""

    params: list
    state: list
    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def save(self, c: Config, corpus: ByteCorpus, history: ts.checkpoints.History) -> None:
        meta = {"config": asdict(c), "corpus": corpus.sha256, "next_batch": self.step,
                "schedule": asdict(c.schedule), "losses": self.losses, "held_out": self.held_out}
        history.save(self.step, merged([self.tree(s) for s in self.here]), meta=meta)

    @property
    def here(self) -> list[int]:
        """The stages of this process."""
        return [s for s, own in enumerate(self.params) if own is not None]

    def tree(self, stage: int) -> dict:
        return {"params": self.params[stage], "optimizer": self.state[stage]}


def merged(trees: list[dict]) -> dict:
    """Trees with parts in common as one; of what several have, the first's."""
    found: dict = {}
    for tree in trees:
        for name, value in tree.items():
            found[name] = merged([found[name], value]) if name in found and isinstance(
                value, dict) else found.get(name, value)
    return found


def new_run(c: Config) -> Run:
    ts.random.seed(c.seed)
    params = stage_params(c, init_params(c))
    return Run(params, [None if p is None else c.optimizer.init(p) for p in params])


def need_meta(saved: ts.checkpoints.Checkpoint) -> None:
    """Raise CheckpointError unless meta is what Run.save writes: another program may have written
    the checkpoint."""
    def need(fits: bool, what: str) -> None:
        if not fits:
            raise ts.CheckpointError(f"{saved.path} holds no run of this program: {what}",
                                     hint="name the folder of a run of train.py with --out")

    meta = saved.meta if isinstance(saved.meta, dict) else {}
    losses, held_out = meta.get("losses"), meta.get("held_out")
    need(isinstance(meta.get("config"), dict), "its meta has no config")
    need(isinstance(meta.get("corpus"), str), "its meta has no digest of a corpus")
    need(isinstance(losses, list) and all(type(x) is float for x in losses),
         "its meta has no list of losses")
    need(len(losses or ()) == saved.step,
         f"its meta has {len(losses or ())} losses, of {saved.step} steps")
    need(isinstance(held_out, list) and all(
        isinstance(x, list) and [type(v) for v in x] == [int, float] for x in held_out),
        "its meta has no list of held-out losses with their steps")
    known = {f.name: type(f.default) for f in fields(Config)}
    for name, value in meta["config"].items():
        need(name in known, f"its config has {name!r}, which is no setting")
        need(type(value) is known[name] or (known[name], type(value)) == (float, int),
             f"its config has {name} = {str(value)[:40]!r}, {known[name].__name__} is needed")


def resumed_run(c: Config, saved: ts.checkpoints.Checkpoint, corpus: ByteCorpus) -> Run:
    """The run as it was; an error when the text or the model is not the one it was saved with."""
    if saved.meta["corpus"] != corpus.sha256:
        raise ts.DataError(f"{corpus.name} is not the text that {saved.path} was trained on",
                           hint="its SHA-256 differs: name the file it was trained on with --data")
    run = new_run(c)
    for s in run.here:
        found = saved.tree(run.tree(s), part=c.stages > 1)
        run.params[s], run.state[s] = found["params"], found["optimizer"]
    ts.random.set_state(saved.random)
    run.step, run.losses = saved.step, saved.meta["losses"]
    run.held_out = [tuple(pair) for pair in saved.meta["held_out"]]
    return run


def train(c: Config, run: Run, corpus: ByteCorpus, history: ts.checkpoints.History) -> bool:
    """Train until c.steps; False when interrupted. The last state is always saved."""
    model = Model(c) if c.stages == 1 else Pipelined(c)
    saved_at, stop = run.step if run.losses else -1, False
    with interruptible() as interrupted, Progress(c.steps, run.step, c.B * c.T) as progress:
        while run.step < c.steps and not stop:
            batch = step_batch(c, corpus, run.step)
            loss, norm = model.advance(run, batch, c.schedule(run.step))
            run.step += 1
            run.losses.append(loss)
            progress.advance(run.step, loss, norm)
            if run.step % c.eval_every == 0 or run.step == c.steps:
                with progress.aside():
                    evaluate(model, run, corpus, progress)
            if run.step % c.checkpoint_every == 0:
                with progress.aside():
                    run.save(c, corpus, history)
                saved_at = run.step
            stop = ts.dist.share(bool(interrupted))  # all ranks at the same step
        if saved_at != run.step:
            run.save(c, corpus, history)
    if ts.dist.rank() == 0:
        report(c, run, corpus, history.folder, progress)
    if not stop and c.sample:
        print(f"\n--- a sample ---\n{sampled(c, run)}\n---")
    return not stop


def evaluate(model: Model, run: Run, corpus: ByteCorpus, progress: Progress) -> None:
    """The held-out loss now, on more text at the end of a longer run; and what the sentinels
    counted."""
    last = run.step == model.c.steps >= 100
    loss = model.held_out_loss(run.params, corpus, batches=32 if last else 8)
    run.held_out.append((run.step, loss))
    progress.say(f"step {run.step}: held-out loss {loss:.4f} nats/byte")
    if model.c.numerics == "flag" and (found := ts.debug.flags()):
        progress.say(str(found))


def report(c: Config, run: Run, corpus: ByteCorpus, out: Path, progress: Progress) -> None:
    """loss.png and result.json."""
    result = {
        "config": asdict(c), "corpus": corpus.name, "parameters": sum(
            p.size for p in ts.optim.named_params(init_params(c)).values()),
        "steps": run.step, "tokens_per_s": progress.tokens_per_s,
        "seconds": round(time.perf_counter() - progress.started, 1),
        "held_out": run.held_out, "losses": run.losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if ts.dist.world_size() == 1:
        draw_curve(out / "loss.png", run.losses, run.held_out)
    else:  # matplotlib takes 37 MB, which this rank gives back by not loading it
        drawing = [sys.executable, str(Path(__file__).with_name("progress.py"))]
        subprocess.run([*drawing, str(out / "result.json"), str(out / "loss.png")], check=True)
    print(f"{progress.tokens_per_s:.0f} tokens/s; curve and figures: {out}/loss.png, result.json")


# --- what it would take elsewhere --------------------------------------------------------------
PLANNED = Config(d=4608, layers=8, heads=36, mlp="swiglu", T=2048, B=64, dtype="bf16 @accum(f32)")


def plan(mesh: ts.dist.Mesh) -> tuple:
    """A step of PLANNED on a mesh that need not be here: `python -m tessera plan train.py --mesh
    dp=8,tp=9`. Weights, optimizer and batch are types alone."""
    if "pp" in mesh.axes:
        raise ts.ArgumentError("plan of train.py is of one function, and stages are several",
                               hint="python -m tessera plan --transformer NAME plans them")
    c = PLANNED
    params = place_params(mesh, ts.jit(lambda: init_params(c)).infer())
    lies = {path: p.layout for path, p in ts.optim.named_params(params).items()}
    state = ts.dist.stand_ins(ts.jit(c.optimizer.init).infer(params),
                              lambda path, _: lies.get(path.partition(".")[2]), mesh)
    batch = place(mesh, ts.Tensor[c.B, c.T, ts.int64], ("batch", "T"))
    return Model(c).step, (params, state, batch, batch, c.lr)


# --- the command line -------------------------------------------------------------------------
def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """(what is not part of Config, the settings that were given)."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="folder (runs/DATE-TIME)")
    parser.add_argument("--resume", nargs="?", type=int, const=-1, default=None, metavar="STEP",
                        help="continue the run in --out, from its newest checkpoint or from STEP")
    for f in fields(Config):
        names = [f"--{dashed(n)}" for n in (f.name, f.metadata["longer"]) if n]
        parser.add_argument(*names, type=type(f.default),
                            choices=f.metadata["choices"], help=f"{f.metadata['help']} "
                            f"({f.default})" if f.default != "" else f.metadata["help"])
    given = vars(parser.parse_args(argv))
    where = argparse.Namespace(out=given.pop("out"), resume=given.pop("resume"))
    return where, given


def resumed_config(saved: dict[str, Any], given: dict[str, Any]) -> Config:
    """The saved settings, with those given now that may change."""
    fixed = [f.name for f in fields(Config) if not f.metadata["later"]]
    for name in fixed:
        if name in given and name in saved and given[name] != saved[name]:
            raise ts.ArgumentError(
                f"the run has --{dashed(name)} {saved[name]}, asked for {given[name]}",
                hint="leave the flag out when resuming, or begin a new run in another folder")
    return Config(**saved | given)


def rank0_first(make: Callable[[], Any]) -> Any:
    """make() on all ranks, on rank 0 before the others: of what is wrong for all, rank 0's error
    ends them while they wait, so that it is said once."""
    made, left = None, None
    try:
        made = make() if ts.dist.rank() == 0 else None
    except SystemExit as error:
        if error.code:
            raise
        left = error  # --help: the others leave, too
    ts.dist.share(None)
    if left is not None:
        raise left
    return made if ts.dist.rank() == 0 else make()


def settled(given: dict[str, Any], saved: ts.checkpoints.Checkpoint | None
            ) -> tuple[Config, ByteCorpus]:
    """All settings, and the text."""
    if saved:
        need_meta(saved)
    c = resumed_config(saved.meta["config"], given) if saved else Config(**given)
    corpus = from_file(c.data) if c.data else python_library()
    corpus.require_window(c.T)
    c.need_memory()
    return c, corpus


def run_command(argv: list[str] | None) -> int:
    where, given = rank0_first(lambda: parse(argv))
    out = where.out or Path(ts.dist.share(time.strftime("runs/%Y%m%d-%H%M%S")))
    history = ts.checkpoints.History(out, how="--resume {step}")
    if given.get("data"):
        given["data"] = str(Path(given["data"]).absolute())
    with history.claim():  # before anything is read: nobody else goes on from it meanwhile
        saved = None
        if where.resume is not None:
            saved = history.load(None if where.resume < 0 else where.resume)
        elif steps := ts.dist.share(history.steps()):
            raise ts.CheckpointError(f"{out} holds a run already, at step {steps[-1]}",
                                     hint="--resume continues it; another --out begins a new one")
        c, corpus = rank0_first(lambda: settled(given, saved))
        run = resumed_run(c, saved, corpus) if saved else new_run(c)
        print(f"{corpus.name}: {corpus.train.size:,} bytes, {corpus.held_out.size:,} held out; "
              f"step {run.step} of {c.steps}; writes to {out}" + (f"; on {c.grid}" if c.grid else
                                                                  ""))
        with ts.debug.numerics(c.numerics):
            finished = train(c, run, corpus, history)
    if not finished:
        print(f"stopped at step {run.step}; to continue:\n  "
              f"python {sys.argv[0]} --out {out} --resume")
    return 0 if finished else 130


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: trained; 1: an error; 130: interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files that are no text
    try:
        with ts.dist.rank0_only():
            return run_command(argv)
    except ts.CheckpointError as error:  # all ranks have it: rank 0 says so, which ends the others
        if ts.dist.rank():
            ts.dist.share(None)
        error.where = None
        print(f"error: {error}", file=sys.stderr)
    except (ts.ArgumentError, ts.DataError, ts.DTypeError) as error:
        error.where = None  # the user's line is the command
        print(f"error: {error}", file=sys.stderr)
    except ts.TesseraError as error:
        print(f"error: {error}", file=sys.stderr)
    except MemoryError as error:
        print(f"error: out of memory: {error}\n  hint: a smaller --B, --T, --d or --layers",
              file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted at once; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
