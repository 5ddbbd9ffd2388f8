"""`python -m tessera bench step`: training steps of ours and of torch.compile, in turn in one run.

    python -m tessera bench step                             every model
    python -m tessera bench step gpt2-124m --steps 5         some of them
    python -m tessera bench step gpt2-124m --ours            without PyTorch
    python -m tessera bench step gpt2-124m-b8 --losses 5     losses, gradients and updates compared
    python -m tessera bench step gpt2-124m-b8 --spellings    ways to write the same model
    python -m tessera bench step gpt2-350m --products        each product alone, beside cuBLAS

Each model is measured in a process of its own, which finds nothing compiled; starts from the disk
are of two more processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, UnsupportedTargetError
from ..runtime.device import device, has_gpu
from ..runtime.sustained import SustainedClock
from .catalogue import MODELS, model_named
from .differences import differences, first_step_text, losses_text, offsets_text
from .measure import (
    COMPILED,
    EAGER,
    OURS,
    PLAIN,
    is_gpt2,
    measure,
    measure_spellings,
    measure_start,
    need_torch,
    torch_matmuls,
    torch_side,
)
from .models.record import StepModel
from .record import folder, write
from .report import products_text, spellings_text, step_text
from .step_matmuls import measure_matmuls

INTERMIXED = True  # options in front of models, too
# Folders of compiled code: ours, then those of PyTorch's compiler.
CACHES = ("TESSERA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("step",), metavar="step",
                        help="training steps, beside torch.compile")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all, or some of: "
                        + ", ".join(MODELS))
    parser.add_argument("--ours", action="store_true", help="without PyTorch")
    parser.add_argument("--steps", type=int, default=5, metavar="N",
                        help="steps of a round, waited for at its end (5)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="rounds, of which the median counts (5)")
    parser.add_argument("--no-profile", action="store_true",
                        help="without GPU time by class of kernel")
    parser.add_argument("--no-start", action="store_true",
                        help="without starts from the disk cache")
    parser.add_argument("--losses", type=int, default=0, metavar="N",
                        help="instead: losses of N steps, the first step's gradients and updates, "
                             "of ours and of PyTorch in bf16, against PyTorch in f32")
    parser.add_argument("--orders", type=int, default=1, metavar="N",
                        help="with --losses: N runs of each in bf16, of the same rows in other "
                             "orders, which lie as far apart as rounding alone brings them (1)")
    parser.add_argument("--every-parameter", action="store_true",
                        help="with --losses: print all of them, not of the outer layers alone")
    parser.add_argument("--spellings", action="store_true",
                        help="instead: a GPT-2 in several spellings, ours alone")
    parser.add_argument("--products", action="store_true",
                        help="instead: each product of a step as it is launched, in a row under "
                             "load, beside cuBLAS, with its energy")
    parser.add_argument("--out", metavar="FOLDER",
                        help="for the JSON; benchmarks/results of a checkout, else here")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what a process of its own measures
    parser.add_argument("--to", help=argparse.SUPPRESS)  # the file for its figures


def run(args: argparse.Namespace) -> int:
    models = [model_named(name) for name in args.models or MODELS]
    check(args, models)
    if args.part:
        Path(args.to).write_text(json.dumps(run_side(args, models[0])))
        return 0
    target = Path(args.out) if args.out else folder()
    for model in models:
        if args.losses:
            figures = started(["--part", "losses"], model, args, {})
            print(losses_text(figures), offsets_text(figures),
                  first_step_text(figures, args.every_parameter), sep="\n\n")
            name = "losses"
        elif args.spellings:
            figures = started(["--part", "spellings"], model, args, {})
            print(spellings_text(model.name, figures["spellings"]))
            name = "spellings"
        elif args.products:
            figures = started(["--part", "products"], model, args, {})
            print(products_text(model.name, figures["products"]))
            name = "products"
        else:
            figures = stepped(model, args)
            print(step_text(model.name, figures))
            name = "step"
        path = target / f"{name}_{model.name}.json"
        write(path, device().name, {"name": model.name, **figures})
        print(f"written to {path}\n", flush=True)
    return 0


def check(args: argparse.Namespace, models: Sequence[StepModel]) -> None:
    """Raises what is wrong before anything is measured."""
    for name in ("steps", "rounds", "orders"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name} is {getattr(args, name)}", hint="at least 1")
    if args.losses < 0:
        raise ArgumentError(f"--losses is {args.losses}", hint="a number of steps")
    if args.losses and (args.ours or args.spellings):
        raise ArgumentError("--losses compares with PyTorch, and nothing else",
                            hint="without --ours and --spellings")
    if args.products and (args.losses or args.spellings):
        raise ArgumentError("--products measures matmuls alone",
                            hint="without --losses and --spellings")
    odd = [m.name for m in models if not is_gpt2(m)]
    if args.spellings and odd:
        raise ArgumentError(f"{odd[0]} has one spelling", hint="name a GPT-2: "
                            + ", ".join(n for n, m in MODELS.items() if is_gpt2(m)))
    if not (args.ours or args.spellings):
        need_torch()
    if not has_gpu():
        raise UnsupportedTargetError("a step is measured on a GPU, and there is none here",
                                     hint="python -m tessera doctor says what is missing")


def names_of(model: StepModel, ours: bool) -> list[str]:
    mine = [OURS, *[PLAIN] * model.fp8]
    return mine if ours else [*mine, COMPILED, *[EAGER] * model.eager]


# --- processes --------------------------------------------------------------------------------
def stepped(model: StepModel, args: argparse.Namespace) -> dict[str, Any]:
    """A process that finds nothing compiled, then for each side one that does."""
    with tempfile.TemporaryDirectory() as kept:
        env = {name: os.path.join(kept, name) for name in CACHES}
        figures = started(["--part", "step"], model, args, env)
        if not args.no_start:
            for name in [OURS, *[COMPILED] * (not args.ours)]:
                again = started(["--part", f"start {name}"], model, args, env)
                figures["sides"][name]["start_from_disk_s"] = round(again["seconds"], 2)
    return figures


def started(how: list[str], model: StepModel, args: argparse.Namespace, env: dict[str, str]
            ) -> dict[str, Any]:
    """The figures that a process of its own measures. Its messages go to ours; its failure ends
    us."""
    with tempfile.TemporaryDirectory() as there:
        file = os.path.join(there, "figures.json")
        flags = [f"--{n}={getattr(args, n)}" for n in ("steps", "rounds", "losses", "orders")]
        flags += [f"--{n}" for n in ("ours", "no-profile", "spellings")
                  if getattr(args, n.replace("-", "_"))]
        done = subprocess.run([sys.executable, "-m", "tessera", "bench", "step", model.name, *flags,
                               *how, "--to", file], env=os.environ | env)
        if done.returncode:
            raise SystemExit(f"error: measuring {model.name} ended with code {done.returncode}")
        return json.loads(Path(file).read_text())


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_side(args: argparse.Namespace, model: StepModel) -> dict[str, Any]:
    """What this process measures."""
    kind, _, name = args.part.partition(" ")
    if kind == "losses":
        return {"model": model.figures(), **differences(
            model, args.losses, torch_side().TorchStep, orders=args.orders)}
    if kind == "spellings":
        return {"model": model.figures(), "steps": args.steps, "rounds": args.rounds,
                "spellings": measure_spellings(model, args.steps, args.rounds)}
    if kind == "products":
        clock = SustainedClock(device(), rounds=args.rounds)
        if clock.no_energy:
            print_progress(f"without energy: {clock.no_energy}")
        peer = None if args.ours else torch_matmuls().TorchMatmul
        return {"model": model.figures(), "rounds": args.rounds,
                "products": measure_matmuls(model, clock, peer, print_progress)}
    if kind == "start":
        return {"seconds": measure_start(model, name)}
    found = measure(model, names_of(model, args.ours), args.steps, args.rounds,
                    not args.no_profile, print_progress)
    if not args.ours:
        found["torch"] = torch_side().version()
    return found


__all__ = ["add_arguments", "run"]
