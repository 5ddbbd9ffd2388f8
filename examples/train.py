"""Train a byte-level transformer on text: by default the source of Python's standard library.

    python examples/train.py                                  # some minutes on two cores
    python examples/train.py --data my.txt --out runs/mine --sample 400
    python examples/train.py --dtype "bf16 @accum(f32)"       # what the products compute in
    python examples/train.py --out runs/mine --resume         # after Ctrl-C, a crash, a kill

Decoder only, one token per byte. Pre-norm blocks, rotary positions, causal attention, tied
embedding, no biases. Weights and optimizer state are f32; with --dtype the operands of each product
are low-precision copies made on the fly, and gradients flow back through that rounding.
The folder --out receives checkpoints, loss.png and result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from progress import Progress, draw_curve, interruptible

import tessera as ts
from tessera.data import VOCABULARY, ByteCorpus, from_file, python_library


def flag(default: Any, text: str, *, choices: tuple | None = None, later: bool = False) -> Any:
    """A setting of the run. `later`: may change when a run is resumed."""
    return field(default=default, metadata={"help": text, "choices": choices, "later": later})


@dataclass(frozen=True)
class Config:
    data: str = flag("", "text file; none: the source of Python's standard library")
    d: int = flag(128, "width of the model")
    layers: int = flag(4, "blocks")
    heads: int = flag(4, "attention heads; they divide d into even parts")
    norm: str = flag("rmsnorm", "normalisation", choices=("rmsnorm", "layernorm"))
    mlp: str = flag("gelu", "feed-forward part", choices=("gelu", "swiglu"))
    T: int = flag(128, "bytes the model looks back")
    B: int = flag(16, "windows per step")
    steps: int = flag(1500, "training steps", later=True)
    lr: float = flag(3e-3, "peak learning rate; cosine decay to a tenth of it")
    warmup: int = flag(50, "steps until the peak")
    weight_decay: float = flag(0.1, "AdamW's decay of matrices")
    clip: float = flag(1.0, "largest norm of the gradient")
    dropout: float = flag(0.0, "part of each block's output that is dropped")
    dtype: str = flag("f32", 'operands of products: "bf16", "fp8_e4m3 @loss_scale(1024)", ...')
    seed: int = flag(0, "of the weights, the batches and everything random")
    eval_every: int = flag(250, "steps between held-out losses", later=True)
    checkpoint_every: int = flag(250, "steps between checkpoints", later=True)
    sample: int = flag(300, "bytes to generate at the end", later=True)
    temperature: float = flag(0.7, "of the sampling; lower is more careful", later=True)
    numerics: str = flag("off", "NaN and Inf: ignore, report, or stop with the operation's line",
                         choices=("off", "flag", "raise"), later=True)

    def __post_init__(self) -> None:
        for name in ("d", "layers", "heads", "T", "B", "steps", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ts.ArgumentError(f"--{dashed(name)} must be at least 1")
        if self.d % (2 * self.heads):
            raise ts.ArgumentError(f"--d {self.d} is no multiple of twice --heads {self.heads}",
                                   hint="rotary positions turn pairs of elements of each head")
        if ts.as_type(self.dtype).dtype.kind != "float":
            raise ts.DTypeError(f"--dtype {self.dtype}: products with gradients need a float type")

    @property
    def optimizer(self) -> ts.optim.AdamW:
        return ts.optim.AdamW(weight_decay=self.weight_decay)

    @property
    def schedule(self) -> ts.optim.CosineSchedule:
        warmup = min(self.warmup, self.steps)
        return ts.optim.CosineSchedule(self.lr, self.steps, warmup, floor=self.lr / 10)


# --- the model --------------------------------------------------------------------------------
def init_params(c: Config) -> dict:
    """Normal weights of variance 1/fan_in; what adds to the residual stream starts smaller."""
    quiet = (2 * c.layers) ** -0.5

    def matrix(rows: int, columns: int, scale: float = 1.0) -> ts.Tensor:
        return ts.param(ts.random.normal((rows, columns), std=scale * rows**-0.5))

    def gain() -> ts.Tensor:
        return ts.param(ts.ones(c.d))

    hidden = 4 * c.d if c.mlp == "gelu" else -(-8 * c.d // 3 // 32) * 32  # as many weights
    blocks = [
        {
            "norm1": gain(),
            "qkv": matrix(c.d, 3 * c.d),
            "out": matrix(c.d, c.d, quiet),
            "norm2": gain(),
            "up": matrix(c.d, hidden if c.mlp == "gelu" else 2 * hidden),
            "down": matrix(hidden, c.d, quiet),
        }
        for _ in range(c.layers)
    ]
    embedding = ts.param(ts.random.normal((VOCABULARY, c.d), std=0.02))
    return {"embedding": embedding, "blocks": blocks, "norm": gain()}


def linear(c: Config, x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    """x w with both operands in the compute type.   x: [N, I]   w: [I, O]   y: f32 [N, O]"""
    return ts.cast(ts.cast(x, c.dtype) @ ts.cast(w, c.dtype), ts.f32)


def normalize(c: Config, x: ts.Tensor, gain: ts.Tensor) -> ts.Tensor:
    return ts.rmsnorm(x, gain) if c.norm == "rmsnorm" else ts.layernorm(x, gain)


def attention(c: Config, x: ts.Tensor, p: dict) -> ts.Tensor:
    """Causal self-attention with rotary positions.   x, y: [B*T, D]"""
    BT, D = x.shape
    qkv = linear(c, x, p["qkv"]).reshape(BT // c.T, c.T, 3 * D)
    q, k, v = ts.split_qkv(qkv, heads=c.heads)  # each [B, H, T, D/H]
    q, k = ts.rotary_embedding(q), ts.rotary_embedding(k)
    y = ts.attention(*(ts.cast(a, c.dtype) for a in (q, k, v)), causal=True)
    return linear(c, ts.merge_heads(y).reshape(BT, D), p["out"])


def feed_forward(c: Config, x: ts.Tensor, p: dict) -> ts.Tensor:
    """W2 gelu(W1 x), or W3 (silu(W1 x) * W2 x) with W1 and W2 as one matrix.   x, y: [B*T, D]"""
    h = linear(c, x, p["up"])
    if c.mlp == "swiglu":
        gate, up = ts.split(h, 2, axis=1)
        return linear(c, ts.silu(gate) * up, p["down"])
    return linear(c, ts.gelu(h), p["down"])


def logits_of(c: Config, params: dict, tokens: ts.Tensor, dropout: float = 0.0) -> ts.Tensor:
    """tokens: [B, T] integers   logits: [B*T, 256], of the byte after each"""
    x = ts.embedding(params["embedding"], tokens.reshape(-1))  # [B*T, D]
    for p in params["blocks"]:
        x = x + ts.dropout(attention(c, normalize(c, x, p["norm1"]), p), dropout)
        x = x + ts.dropout(feed_forward(c, normalize(c, x, p["norm2"]), p), dropout)
    return linear(c, normalize(c, x, params["norm"]), params["embedding"].T)


# --- one step, one measurement, one sample ----------------------------------------------------
class Model:
    """The compiled functions of a run; what they compute on is passed in and handed back."""

    def __init__(self, c: Config):
        def loss_of(params: dict, tokens: ts.Tensor, targets: ts.Tensor) -> ts.Tensor:
            return ts.cross_entropy(logits_of(c, params, tokens, c.dropout), targets.reshape(-1))

        @ts.jit
        def step(params: dict, state: dict, tokens: ts.Tensor, targets: ts.Tensor, lr: float):
            loss, grads = ts.value_and_grad(loss_of)(params, tokens, targets)
            grads, norm = ts.optim.clip_by_global_norm(grads, c.clip)
            params, state = c.optimizer.update(params, grads, state, lr)
            return params, state, loss, norm

        @ts.jit
        def measure(params: dict, tokens: ts.Tensor, targets: ts.Tensor):
            return ts.cross_entropy(logits_of(c, params, tokens), targets.reshape(-1))

        @ts.jit
        def logits(params: dict, tokens: ts.Tensor):
            return logits_of(c, params, tokens)

        self.c, self.step, self.measure, self.logits = c, step, measure, logits

    def held_out_loss(self, params: dict, corpus: ByteCorpus, batches: int) -> float:
        """Mean cross-entropy in nats per byte, on the same windows each time."""
        windows = corpus.held_out_batches(batches, B=self.c.B, T=self.c.T)
        with same_randomness():
            return float(np.mean([float(self.measure(params, *w)) for w in windows]))

    def generate(self, params: dict, prompt: bytes, count: int) -> bytes:
        """The prompt and `count` more bytes, each drawn from the softmax of logits / temperature.

        The window is computed anew for each byte, padded to T: causal attention does not see what
        stands behind.
        """
        rng = np.random.default_rng(self.c.seed)
        text = bytearray(prompt)
        for _ in range(count):
            window = text[-self.c.T:]
            tokens = np.zeros((1, self.c.T), np.int64)
            tokens[0, :len(window)] = window
            scores = self.logits(params, tokens).numpy()[len(window) - 1]
            scores = scores.astype(np.float64) / max(self.c.temperature, 1e-6)
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
    """Everything that changes while training, and is saved."""

    params: dict
    state: dict
    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def save(self, c: Config, corpus: ByteCorpus, history: ts.checkpoints.History) -> None:
        meta = {"config": asdict(c), "corpus": corpus.sha256, "next_batch": self.step,
                "schedule": asdict(c.schedule), "losses": self.losses, "held_out": self.held_out}
        history.save(self.step, {"params": self.params, "optimizer": self.state}, meta=meta)


def new_run(c: Config) -> Run:
    ts.random.seed(c.seed)
    params = init_params(c)
    return Run(params, c.optimizer.init(params))


def resumed_run(c: Config, saved: ts.checkpoints.Checkpoint, corpus: ByteCorpus) -> Run:
    """The run as it was; an error when the text or the model is not the one it was saved with."""
    if saved.meta["corpus"] != corpus.sha256:
        raise ts.DataError(f"{corpus.name} is not the text that {saved.path} was trained on",
                           hint="its SHA-256 differs: name the file it was trained on with --data")
    fresh = new_run(c)
    trees = saved.tree({"params": fresh.params, "optimizer": fresh.state})
    ts.random.set_state(saved.random)
    held_out = [tuple(pair) for pair in saved.meta["held_out"]]
    return Run(trees["params"], trees["optimizer"], saved.step, saved.meta["losses"], held_out)


def train(c: Config, run: Run, corpus: ByteCorpus, history: ts.checkpoints.History) -> bool:
    """Train until c.steps; False when interrupted. The last state is always saved."""
    model, saved_at = Model(c), run.step if run.losses else -1
    with interruptible() as interrupted, Progress(c.steps, run.step, c.B * c.T) as progress:
        while run.step < c.steps and not interrupted:
            tokens, targets = corpus.batch(run.step, B=c.B, T=c.T, seed=c.seed)
            run.params, run.state, loss, norm = model.step(
                run.params, run.state, tokens, targets, c.schedule(run.step))
            run.step += 1
            run.losses.append(float(loss))
            progress.advance(run.step, run.losses[-1], float(norm))
            if run.step % c.eval_every == 0 or run.step == c.steps:
                with progress.aside():
                    evaluate(model, run, corpus, progress)
            if run.step % c.checkpoint_every == 0:
                with progress.aside():
                    run.save(c, corpus, history)
                saved_at = run.step
        if saved_at != run.step:
            run.save(c, corpus, history)
    report(c, run, corpus, history.folder, progress)
    if not interrupted and c.sample:
        text = model.generate(run.params, b"def ", c.sample)
        print(f"\n--- a sample ---\n{text.decode(errors='replace')}\n---")
    return not interrupted


def evaluate(model: Model, run: Run, corpus: ByteCorpus, progress: Progress) -> None:
    """The held-out loss now, on more text at the end; and what the sentinels counted."""
    last = run.step == model.c.steps
    loss = model.held_out_loss(run.params, corpus, batches=32 if last else 8)
    run.held_out.append((run.step, loss))
    progress.say(f"step {run.step}: held-out loss {loss:.4f} nats/byte")
    if model.c.numerics == "flag" and (found := ts.debug.flags()):
        progress.say(str(found))


def report(c: Config, run: Run, corpus: ByteCorpus, out: Path, progress: Progress) -> None:
    """loss.png and result.json."""
    draw_curve(out / "loss.png", run.losses, run.held_out)
    result = {
        "config": asdict(c), "corpus": corpus.name, "parameters": sum(
            p.size for p in ts.optim.named_params(run.params).values()),
        "steps": run.step, "tokens_per_s": progress.tokens_per_s,
        "seconds": round(time.perf_counter() - progress.started, 1),
        "held_out": run.held_out, "losses": run.losses,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{progress.tokens_per_s:.0f} tokens/s; curve and figures: {out}/loss.png, result.json")


# --- the command line -------------------------------------------------------------------------
def dashed(name: str) -> str:
    return name.replace("_", "-")


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """(what is not part of Config, the settings that were given)."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="folder (runs/DATE-TIME)")
    parser.add_argument("--resume", nargs="?", type=int, const=-1, default=None, metavar="STEP",
                        help="continue the run in --out, from its newest checkpoint or from STEP")
    for f in fields(Config):
        parser.add_argument(f"--{dashed(f.name)}", type=type(f.default),
                            choices=f.metadata["choices"], help=f"{f.metadata['help']} "
                            f"({f.default})" if f.default != "" else f.metadata["help"])
    given = vars(parser.parse_args(argv))
    where = argparse.Namespace(out=given.pop("out"), resume=given.pop("resume"))
    return where, given


def resumed_config(saved: dict[str, Any], given: dict[str, Any]) -> Config:
    """The saved settings, with those given now that may change."""
    fixed = [f.name for f in fields(Config) if not f.metadata["later"]]
    for name in fixed:
        if name in given and given[name] != saved[name]:
            raise ts.ArgumentError(
                f"the run has --{dashed(name)} {saved[name]}, asked for {given[name]}",
                hint="leave the flag out when resuming, or begin a new run in another folder")
    return replace(Config(**saved), **given)


def run_command(argv: list[str] | None) -> int:
    where, given = parse(argv)
    out = where.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    history = ts.checkpoints.History(out, how="--resume {step}")
    if given.get("data"):
        given["data"] = str(Path(given["data"]).absolute())
    saved = None
    if where.resume is not None:
        saved = history.load(None if where.resume < 0 else where.resume)
    elif history.steps():
        raise ts.CheckpointError(f"{out} holds a run already, at step {history.steps()[-1]}",
                                 hint="--resume continues it; another --out begins a new one")
    c = resumed_config(saved.meta["config"], given) if saved else Config(**given)
    corpus = from_file(c.data) if c.data else python_library()
    corpus.require_window(c.T)
    run = resumed_run(c, saved, corpus) if saved else new_run(c)
    print(f"{corpus.name}: {corpus.train.size:,} bytes, {corpus.held_out.size:,} held out; "
          f"step {run.step} of {c.steps}; writes to {out}")
    with history.claim(), ts.debug.numerics(c.numerics):
        finished = train(c, run, corpus, history)
    if not finished:
        print(f"stopped at step {run.step}; to continue:\n  "
              f"python {sys.argv[0]} --out {out} --resume")
    return 0 if finished else 130


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: trained; 1: an error; 130: interrupted."""
    try:
        return run_command(argv)
    except (ts.ArgumentError, ts.CheckpointError, ts.DataError, ts.DTypeError) as error:
        error.where = None  # the user's line is the command
        print(f"error: {error}", file=sys.stderr)
    except ts.TesseraError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted at once; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
