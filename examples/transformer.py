"""The model that train.py trains: its settings, its weights, what it computes, and where weights
and batches lie on a mesh.

Decoder only, one token per byte. Pre-norm blocks, rotary positions, causal attention, tied
embedding, no biases. Weights are f32; with --dtype the operands of each product are low-precision
copies made on the fly, and gradients flow back through that rounding.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

import tessera as ts
from tessera.data import VOCABULARY


def flag(default: Any, text: str, *, choices: tuple | None = None, later: bool = False,
         longer: str = "") -> Any:
    """A setting of the run. `later`: may change when a run is resumed. `longer`: another name of
    its flag, where launchers such as torchrun take the short one for the beginning of theirs."""
    return field(default=default, metadata={"help": text, "choices": choices, "later": later,
                                            "longer": longer})


def dashed(name: str) -> str:
    return name.replace("_", "-")


def axes_of(text: str) -> dict[str, int]:
    """{"dp": 4, "tp": 2} of --mesh dp=4,tp=2. Raises ArgumentError that names what is wrong."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, extent = part.partition("=")
        wrong = f"{name!r} is no axis" if name not in ("dp", "tp", "pp") else \
            f"{name} stands twice" if name in axes else \
            f"{part!r} has no number of ranks, 1 or more" if not extent.isdecimal() or \
            int(extent) < 1 else None
        if wrong:
            raise ts.ArgumentError(f"--mesh {text}: {wrong}",
                                   hint="some of dp, tp and pp, as in --mesh dp=4,tp=2")
        axes[name] = int(extent)
    return axes


@dataclass(frozen=True)
class Config:
    data: str = flag("", "text file; none: the source of Python's standard library")
    d: int = flag(128, "width of the model", longer="width")
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
    dtype: str = flag("f32", 'operands of matmuls: "bf16", "fp8_e4m3 @loss_scale(1024)", ...')
    seed: int = flag(0, "of the weights, the batches and everything random")
    eval_every: int = flag(250, "steps between held-out losses", later=True)
    checkpoint_every: int = flag(250, "steps between checkpoints", later=True)
    sample: int = flag(300, "bytes to generate at the end", later=True)
    temperature: float = flag(0.7, "of the sampling; lower is more careful", later=True)
    mesh: str = flag("", "axes of the mesh: dp=4,tp=2; under mpirun dp=<ranks> unless given",
                     later=True)
    microbatches: int = flag(4, "parts of a batch that stream through the stages of --mesh pp=...",
                             later=True)
    zero: int = flag(0, "ZeRO stage: what is split over dp too. 1: optimizer state, 2: gradients, "
                     "3: weights", choices=(0, 1, 2, 3), later=True)
    target: str = flag("cpu", "what computes: cpu, or cuda, a GPU for each process",
                       choices=("cpu", "cuda"), later=True)
    numerics: str = flag("off", "NaN and Inf: ignore, report, or stop with the operation's line",
                         choices=("off", "flag", "raise"), later=True)

    def __post_init__(self) -> None:
        for name in ("d", "layers", "heads", "T", "B", "steps", "eval_every", "checkpoint_every",
                     "microbatches"):
            if getattr(self, name) < 1:
                raise ts.ArgumentError(f"--{dashed(name)} must be at least 1")
        for f in fields(self):  # those of a checkpoint have not come through the command line
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise ts.ArgumentError(f"--{dashed(f.name)} is {value!r}",
                                       hint="one of " + ", ".join(map(str, choices)))
            if isinstance(f.default, float) and not math.isfinite(value):
                raise ts.ArgumentError(f"--{dashed(f.name)} must be a finite number, got {value}")
        if not 0 <= self.seed < 2**64:
            raise ts.ArgumentError(f"--seed {str(self.seed)[:40]} is no integer from 0 to 2^64 - 1")
        if self.d % (2 * self.heads):
            raise ts.ArgumentError(f"--d {self.d} is no multiple of twice --heads {self.heads}",
                                   hint="rotary positions turn pairs of elements of each head")
        if ts.as_type(self.dtype).dtype.kind != "float":
            raise ts.DTypeError(f"--dtype {self.dtype}: matmuls with gradients need a float type")
        if self.mesh or self.zero:
            self.need_mesh()
        if self.target == "cuda" and self.axes:
            self.need_gpus()

    def need_mesh(self) -> None:
        """Raise ArgumentError for a mesh that this program, or the other settings, do not fit."""
        axes, ranks = self.axes, ts.dist.world_size()
        if self.grid is not None and ranks not in (1, self.grid.size()):
            raise ts.ArgumentError(
                f"--mesh {self.mesh} has {self.grid.size()} ranks, mpirun started {ranks}",
                hint=f"mpirun -n {self.grid.size()}, or a mesh of {ranks}: --mesh dp={ranks}")
        if self.zero and "dp" not in axes:
            raise ts.ArgumentError(
                f"--zero {self.zero} splits over dp, which {self.mesh or 'one process'} does not "
                "have", hint="--mesh dp=4, or --zero 0")
        if axes.get("pp", 1) > self.layers:
            raise ts.ArgumentError(f"--mesh {self.mesh} has more stages than --layers "
                                   f"{self.layers}", hint="a stage has at least one block")
        windows = -(-self.B // axes.get("dp", 1))
        if axes.get("pp", 1) > 1 and self.microbatches > windows:
            raise ts.ArgumentError(
                f"--microbatches {self.microbatches} are more than the {windows} windows that a "
                f"rank has of --B {self.B}", hint=f"--microbatches {windows}, or a larger --B")

    def need_gpus(self) -> None:
        """Raise ArgumentError for a mesh that does not compute on GPUs."""
        ranks, size = ts.dist.world_size(), math.prod(self.axes.values())
        if ranks != size:
            raise ts.ArgumentError(
                f"--target cuda --mesh {self.mesh} is {size} processes, each with a GPU",
                hint=f"mpirun -n {size} python examples/train.py ...; or --target cpu, which plays "
                "them in this one")

    def need_memory(self) -> None:
        """Raise ArgumentError when a step cannot fit this machine: the weights, their gradients and
        AdamW's two moments, and of each byte of a batch its logits and their gradient, in f32. What
        else a step keeps is not counted."""
        weights = self.layers * (4 * self.d + 2 * self.hidden) * self.d
        windows = -(-self.B // self.axes.get("dp", 1))
        needed = 16 * weights // (self.grid.size() if self.grid else 1)
        needed += 8 * VOCABULARY * windows * self.T // self.stages
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise ts.ArgumentError(
                f"--B {self.B}, --T {self.T}, --d {self.d} and --layers {self.layers} take more "
                f"than {needed >> 30} GiB, this machine has {there >> 30}",
                hint="windows cost B x T, weights layers x d x d")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward part; of swiglu such that it has as many weights."""
        return 4 * self.d if self.mlp == "gelu" else -(-8 * self.d // 3 // 32) * 32

    @functools.cached_property
    def grid(self) -> ts.dist.Mesh | None:
        """The mesh that --mesh names; None for a process that computes alone."""
        axes = self.axes
        if not axes:
            return None
        gpus = [f"cuda:{i}" for i in range(math.prod(axes.values()))]
        return ts.dist.mesh(gpus if self.target == "cuda" else None, tuple(axes),
                            tuple(axes.values()))

    @property
    def axes(self) -> dict[str, int]:
        """The axes of --mesh; under mpirun dp with all ranks unless given."""
        ranks = ts.dist.world_size()
        return axes_of(self.mesh) if self.mesh else {"dp": ranks} if ranks > 1 else {}

    @property
    def stages(self) -> int:
        """Of the pipeline: the places of the mesh axis pp."""
        return self.grid.size("pp") if self.grid and "pp" in self.grid.axes else 1

    def part(self, stage: int) -> ts.dist.Mesh | None:
        """The ranks that a stage runs on; None where nothing is split."""
        if self.grid is None or "pp" not in self.grid.axes:
            return self.grid
        return self.grid.sub(pp=stage) if len(self.grid.axes) > 1 else None

    @property
    def optimizer(self) -> Any:
        adam = ts.optim.AdamW(weight_decay=self.weight_decay)
        return ts.dist.zero(adam, self.zero, axis="dp") if self.zero else adam

    @property
    def schedule(self) -> ts.optim.CosineSchedule:
        warmup = min(self.warmup, self.steps)
        return ts.optim.CosineSchedule(self.lr, self.steps, warmup, floor=self.lr / 10)


# --- where things lie -------------------------------------------------------------------------
LAYOUT = {"batch": "dp", "heads": "tp", "hidden": "tp"}  # which axis splits which dimension
DIMS = {
    "embedding": ("byte", "d"), "norm": ("d",), "norm1": ("d",), "norm2": ("d",),
    "qkv": ("d", "heads", "qkv"), "out": ("heads", "head", "d"),
    "gate": ("d", "hidden"), "up": ("d", "hidden"), "down": ("hidden", "d"),
}


def place(mesh: ts.dist.Mesh | None, x: Any, dims: tuple[str, ...]) -> Any:
    """x on a mesh, its dimensions split as LAYOUT says; x itself without a mesh. Of a type, what
    stands in for such a tensor in a plan."""
    if mesh is None:
        return x
    layout = {name: axis for name, axis in LAYOUT.items() if axis in mesh.axes}
    if isinstance(x, ts.Tensor | np.ndarray):
        return ts.dist.distribute(x, layout, mesh=mesh, dims=dims)
    return ts.dist.stand_in(x.shape, layout, mesh, x.type, dims=dims, param="batch" not in dims)


def place_params(mesh: ts.dist.Mesh | None, params: dict) -> dict:
    return {name: place_params(mesh, p) if isinstance(p, dict) else place(mesh, p, DIMS[name])
            for name, p in params.items()}


def place_batch(c: Config, batch: tuple) -> tuple:
    """(tokens, targets) that all ranks have, on the mesh of the run, windows split."""
    return tuple(place(c.grid, x, ("batch", "T")) for x in batch)


def step_batch(c: Config, corpus: ts.data.ByteCorpus, step: int) -> tuple:
    """(tokens, targets) of a step of the run; on a mesh each rank reads its own windows alone."""
    draw = functools.partial(corpus.batch, step, B=c.B, T=c.T, seed=c.seed)
    if c.grid is None:
        return draw()
    split = {"dp"} & set(c.grid.axes)
    spec = ts.ShardSpec(("row",) * len(split), tuple(split))
    windows = spec.resolve(c.grid, 1)

    @functools.cache
    def own(rank: int) -> tuple:
        return draw(rows=ts.dist.indices(windows, (c.B,), rank))

    return tuple(ts.dist.from_local(lambda rank, i=i: own(rank)[i], spec, c.grid,
                                    shape=(c.B, c.T)) for i in range(2))


# --- weights ----------------------------------------------------------------------------------
def init_params(c: Config) -> dict:
    """Normal weights of variance 1/fan_in; what adds to the residual stream starts smaller."""
    quiet = (2 * c.layers) ** -0.5
    head = c.d // c.heads

    def normal(*shape: int, fan_in: int, scale: float = 1.0) -> ts.Tensor:
        return ts.param(ts.random.normal(shape, std=scale * fan_in**-0.5))

    def gain() -> ts.Tensor:
        return ts.param(ts.ones(c.d))

    def block() -> dict:
        gate = {"gate": normal(c.d, c.hidden, fan_in=c.d)} if c.mlp == "swiglu" else {}
        return {
            "norm1": gain(),
            "qkv": normal(c.d, c.heads, 3 * head, fan_in=c.d),
            "out": normal(c.heads, head, c.d, fan_in=c.d, scale=quiet),
            "norm2": gain(),
            **gate,
            "up": normal(c.d, c.hidden, fan_in=c.d),
            "down": normal(c.hidden, c.d, fan_in=c.hidden, scale=quiet),
        }

    blocks = {str(i): block() for i in range(c.layers)}
    embedding = ts.param(ts.random.normal((VOCABULARY, c.d), std=0.02))
    return {"embedding": embedding, "blocks": blocks, "norm": gain()}


def stage_params(c: Config, params: dict) -> list[dict | None]:
    """The weights by stage, on the ranks of each; None for a stage of other ranks. The first and
    the last stage both have the embedding."""
    alone = ts.dist.world_size() == 1
    cuts = [i * c.layers // c.stages for i in range(c.stages + 1)]
    found: list[dict | None] = []
    for s in range(c.stages):
        whole = c.grid.sub(pp=s) if c.stages > 1 else None
        if whole is not None and not alone and not whole.has(ts.dist.rank()):
            found.append(None)
            continue
        own = {"blocks": {str(i): params["blocks"][str(i)] for i in range(cuts[s], cuts[s + 1])}}
        if s in (0, c.stages - 1):
            own = {"embedding": params["embedding"], **own}
        if s == c.stages - 1:
            own["norm"] = params["norm"]
        placed = place_params(c.part(s), own)
        found.append(c.optimizer.shard(placed) if c.zero else placed)
    return found


# --- what it computes -------------------------------------------------------------------------
def linear(c: Config, x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    """x w with both operands in the compute type.   x: [N, I]   w: [I, O]   y: f32 [N, O]"""
    return ts.cast(ts.cast(x, c.dtype) @ ts.cast(w, c.dtype), ts.f32)


def normalize(c: Config, x: ts.Tensor, gain: ts.Tensor) -> ts.Tensor:
    return ts.rmsnorm(x, gain) if c.norm == "rmsnorm" else ts.layernorm(x, gain)


def attention(c: Config, x: ts.Tensor, p: dict) -> ts.Tensor:
    """Causal self-attention with rotary positions.   x, y: [B*T, D]"""
    BT, D = x.shape
    qkv = linear(c, x, p["qkv"].reshape(D, 3 * D)).reshape(BT // c.T, c.T, c.heads, 3, D // c.heads)
    q, k, v = (qkv[:, :, :, i].swapaxes(1, 2) for i in range(3))  # each [B, H, T, D/H]
    q, k = ts.rotary_embedding(q), ts.rotary_embedding(k)
    y = ts.attention(*(ts.cast(a, c.dtype) for a in (q, k, v)), causal=True)
    return linear(c, ts.merge_heads(y).reshape(BT, D), p["out"].reshape(D, D))


def feed_forward(c: Config, x: ts.Tensor, p: dict) -> ts.Tensor:
    """Wd gelu(Wu x), or Wd (silu(Wg x) * Wu x).   x, y: [B*T, D]"""
    h = linear(c, x, p["up"])
    h = ts.silu(linear(c, x, p["gate"])) * h if c.mlp == "swiglu" else ts.gelu(h)
    return linear(c, h, p["down"])


def stage(params: dict, x: ts.Tensor, *, c: Config, first: bool, last: bool, dropout: float
          ) -> ts.Tensor:
    """One stage. x: tokens [B, T] of the first, else [B, T, D]. Gives [B, T, D], of the last stage
    the logits [B, T, 256] of the byte after each."""
    B = x.shape[0]
    if first:
        x = ts.embedding(params["embedding"], x.reshape(-1))
    x = x.reshape(B * c.T, c.d)
    for p in params["blocks"].values():
        x = x + ts.dropout(attention(c, normalize(c, x, p["norm1"]), p), dropout)
        x = x + ts.dropout(feed_forward(c, normalize(c, x, p["norm2"]), p), dropout)
    if last:
        x = linear(c, normalize(c, x, params["norm"]), params["embedding"].T)
    return x.reshape(B, c.T, -1)


def stages_of(c: Config, dropout: float = 0.0) -> list:
    """The stages as functions (params, x) -> y; one of them is the whole model."""
    last = c.stages - 1
    return [functools.partial(stage, c=c, first=s == 0, last=s == last, dropout=dropout)
            for s in range(c.stages)]


def loss_of(logits: ts.Tensor, targets: ts.Tensor) -> ts.Tensor:
    """Mean cross-entropy in nats per byte.   logits: [B, T, 256]   targets: [B, T]"""
    return ts.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
