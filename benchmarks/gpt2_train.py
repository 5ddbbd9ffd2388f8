"""A run of GPT-2 124M on real text, on one GPU: losses, tokens per second, a profile of one step.

    python benchmarks/gpt2_train.py                   # 1,000 steps of 32 windows of 1024 bytes
    python benchmarks/gpt2_train.py --model gpt2-350m-fp8 --steps 200
    python benchmarks/gpt2_train.py --steps 20 --layers 2 --B 2 --T 128 --where cpu
    python benchmarks/gpt2_train.py --draw            # the curve again, from the figures on file

The text is that of examples/train.py, the source of Python's standard library, a byte a token. The
model is one of `python -m tessera bench step`, with gradients clipped at norm 1 and a cosine
schedule. Losses are read every EVERY steps, so the host runs ahead in between.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.bench.catalogue import MODELS
from tessera.bench.kernel_classes import ClassTimes, of_launch
from tessera.bench.models.record import StepModel, weights
from tessera.bench.models.step import OPTIMIZER, first_state
from tessera.bench.record import RESULTS
from tessera.data import ByteCorpus, python_library
from tessera.graph import tree
from tessera.runtime.device import device

ROOT = Path(__file__).resolve().parent.parent
CURVE = ROOT / "docs" / "reference" / "gpt2_train.png"
NAME = "gpt2_train"
EVERY, MEASURED = 50, 250  # steps between losses that are read, and between held-out losses
HELD_OUT = 8  # batches


def step_of(model: StepModel) -> Any:
    """(params, state, x, y, rate) -> (loss, norm of the gradient, params, state)."""
    @ts.jit(donate=("params", "state"))
    def step(params: Any, state: Any, x: Any, y: Any, rate: Any) -> Any:
        history = state.get("fp8")
        value, (grads, amax) = ts.value_and_grad(
            lambda p, h: model.loss(p, x, y, h), argnums=(0, 1))(params, history)
        grads, norm = ts.optim.clip_by_global_norm(grads, 1.0)
        params, new = OPTIMIZER.update(params, grads, state, rate)
        if history is not None:
            new["fp8"] = model.spelling.scaling.update(history, amax, state["step"])
        return value, norm, params, new

    return step


class TrainingRun:
    """Parameters and the optimizer's state where they are trained."""

    def __init__(self, model: StepModel, corpus: ByteCorpus, schedule: Any, where: str):
        self.model, self.corpus, self.schedule, self.where = model, corpus, schedule, where
        params = tree.map_tree(ts.tensor, weights(model))
        self.state = ts.to(first_state(model, params), where)
        self.params = ts.to(params, where)
        self.compiled, self.loss = step_of(model), ts.jit(model.plain.loss)

    def placed(self, batch: tuple) -> list[ts.Tensor]:
        return [ts.to(ts.tensor(x.astype(np.int32)), self.where) for x in batch]

    def step(self, number: int) -> tuple[Any, Any]:
        """The loss and the norm of the gradient, which may still be computed."""
        batch = self.corpus.batch(number, B=self.model.B, T=self.model.T)
        rate = ts.to(ts.tensor(np.float32(self.schedule(number))), self.where)
        value, norm, self.params, self.state = self.compiled(
            self.params, self.state, *self.placed(batch), rate)
        return value, norm

    def held_out(self) -> float:
        """Nats per byte."""
        batches = self.corpus.held_out_batches(HELD_OUT, B=self.model.B, T=self.model.T)
        return float(np.mean([self.loss(self.params, *self.placed(b)).item() for b in batches]))


def trained(run: TrainingRun, steps: int) -> dict[str, Any]:
    """Losses of all steps, and the time of those between two readings."""
    losses, norms, held_out, seconds = list[float](), list[float](), list[tuple[int, float]](), []
    waiting: list[tuple[Any, Any]] = []
    begin = time.perf_counter()
    for n in range(steps):
        waiting.append(run.step(n))
        if (n + 1) % EVERY == 0 or n + 1 == steps:
            losses += [float(value.item()) for value, _ in waiting]
            norms += [float(norm.item()) for _, norm in waiting]
            seconds.append((time.perf_counter() - begin) / len(waiting))
            print(f"step {n + 1}: loss {losses[-1]:.4f}, {1e3 * seconds[-1]:.1f} ms", flush=True)
            waiting.clear()
        if (n + 1) % MEASURED == 0 or n + 1 == steps:
            held_out.append((n + 1, run.held_out()))
        if not waiting:
            begin = time.perf_counter()
    ms = 1e3 * float(np.median(seconds))
    return {"ms": ms, "tokens_per_second": 1e3 * run.model.tokens / ms, "losses": losses,
            "norms": norms, "held_out": held_out}


def profile(run: TrainingRun, number: int) -> dict[str, Any]:
    """Of more steps, launch by launch, by class: each launch as its median of three."""
    seen = []
    for n in range(3):
        with ts.debug.profile() as p:
            run.step(number + n)[0].item()
        seen.append([r for r in p.launches.records if r.event.device >= 0])
    times = ClassTimes()
    for records in zip(*seen, strict=True):
        name = records[0].work.name  # without the number of the group
        times.add(of_launch(records[0]), name.partition("_")[2] or name,
                  float(np.median([r.us for r in records])))
    return times.figures()


def draw(figures: dict[str, Any]) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from progress import draw_curve

    draw_curve(CURVE, figures["losses"], figures["held_out"])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--steps", type=int, default=1000)
    flags.add_argument("--rate", type=float, default=6e-4)
    flags.add_argument("--where", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--draw", action="store_true")
    flags.add_argument("--model", choices=[m for m in MODELS if m.startswith("gpt2")],
                       default="gpt2-124m")
    sizes = ("layers", "d", "heads", "B", "T", "vocabulary")
    for name in sizes:
        flags.add_argument(f"--{name}", type=int, help="in place of the model's")
    a = flags.parse_args()
    given = {n: getattr(a, n) for n in sizes if getattr(a, n) is not None}
    model = MODELS[a.model].sized(**given)
    if a.draw:
        draw(json.loads((RESULTS / f"{NAME}.json").read_text()))
        return
    corpus = python_library()
    schedule = ts.optim.CosineSchedule(a.rate, a.steps, warmup=a.steps // 10, floor=a.rate / 10)
    run = TrainingRun(model, corpus, schedule, a.where)
    begin = time.perf_counter()
    run.loss(run.params, *run.placed(corpus.batch(0, B=model.B, T=model.T))).item()
    found = {"model": {"name": model.name, **model.figures()}, "steps": a.steps, "rate": a.rate,
             "corpus": corpus.sha256,
             "bytes": int(corpus.train.size), **trained(run, a.steps)}
    found["seconds"] = round(time.perf_counter() - begin, 1)
    if a.where == "cuda":
        found = {"device": device().name, **found, "profile": profile(run, a.steps)}
    usual = a.model == "gpt2-124m" and not given
    record.write(NAME if usual else f"{NAME}_{a.model}", found, shown=False)
    print(f"{found['tokens_per_second']:,.0f} tokens/s; held-out losses in nats per byte:",
          ", ".join(f"{loss:.3f} after {n}" for n, loss in found["held_out"]))


if __name__ == "__main__":
    main()
