"""The training example on a mesh: the losses of some steps, as one process, simulated or mpirun.

    mpirun -n 4 python tests/mesh/example.py losses FOLDER     each rank writes FOLDER/<rank>
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 20
FEWER = 8  # where many processes train
SMALL = {"d": 24, "layers": 2, "heads": 3, "T": 16, "B": 6, "steps": 40, "warmup": 4, "lr": 0.01}
# By the number of ranks; what 3 and 4 do not divide: heads, rows, hidden units of swiglu.
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "dp=4": {}, "tp=4": {}, "dp=2,tp=2": {"mlp": "swiglu"}, "dp=2,pp=2": {"microbatches": 2},
        "pp=2,dp=2": {"microbatches": 4, "B": 8},
        "dp=4 zero 1": {"zero": 1}, "dp=4 zero 2": {"zero": 2}, "dp=4 zero 3": {"zero": 3},
    },
    3: {"tp=3": {"heads": 2}},
    2: {"dp=2": {}},
}


@functools.cache
def modules() -> tuple[Any, Any]:
    """train.py and transformer.py, found as when train.py is run."""
    sys.path.insert(0, str(EXAMPLES))
    import train
    import transformer

    return train, transformer


def settings(name: str, ranks: int, **more: Any) -> dict[str, Any]:
    return {**SMALL, **RUNS[ranks][name], "mesh": name.split()[0], **more}


def losses(count: int = STEPS, **flags: Any) -> list[float]:
    """The losses of the first steps of a run."""
    train, transformer = modules()
    c = transformer.Config(**flags)
    data = corpus()
    run = train.new_run(c)
    model = train.Model(c) if c.stages == 1 else train.Pipelined(c)
    found = []
    for step in range(count):
        batch = transformer.step_batch(c, data, step)
        found.append(model.advance(run, batch, c.schedule(step))[0])
    return found


@functools.cache
def corpus() -> ts.data.ByteCorpus:
    rng = np.random.default_rng(7)
    words = [b"tile", b"tensor", b"graph", b"mesh", b"policy", b"kernel"]
    text = np.frombuffer(b" ".join(words[i] for i in rng.integers(0, 6, 20_000)), np.uint8)
    return ts.data.ByteCorpus("words", text[:-10_000], text[-10_000:])


def write_text(file: Path) -> Path:
    """The corpus as a file that --data takes."""
    file.write_bytes(corpus().train.tobytes() + corpus().held_out.tobytes())
    return file


def losses_of(out: Path) -> list[float]:
    """Those of a run that wrote to this folder."""
    found: list[float] = json.loads((out / "result.json").read_text())["losses"]
    return found


def alone(name: str, ranks: int) -> list[float]:
    """The same run on no mesh, which several meshes have in common."""
    return _losses_of_flags(*settings(name, ranks, mesh="", zero=0).items())


@functools.cache
def _losses_of_flags(*flags: tuple[str, Any]) -> list[float]:
    return losses(**dict(sorted(flags)))


def main() -> None:
    ranks = ts.dist.world_size()
    found = {name: losses(FEWER, **settings(name, ranks)) for name in RUNS[ranks]}
    Path(sys.argv[2], str(ts.dist.rank())).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
