"""Plans of decoder-only transformers from their shape alone: no program, no graph.

    plan_transformer(model("70b"), ts.dist.mesh(axes=("dp", "tp"), shape=(8, 9)), "nvl72", B=64)

Axes by name: dp splits the batch, tp heads, hidden units and vocabulary, pp layers. Where an extent
does not divide, the rank with the larger part counts. Formulas and their sources stand beside them:

    [P]  Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B: FLOPs of a token, MFU
    [M]  Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053: tensor parallel layers
    [N]  Narayanan et al. 2021, arXiv:2104.04473: pipelines
    [K]  Korthikanti et al. 2022, arXiv:2205.05198: activations
    [Z]  Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054: optimizer state over dp
    [F]  Dao et al. 2022, FlashAttention, arXiv:2205.14135: scores are not stored
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tessera.errors import ArgumentError, AxisError, did_you_mean
from tessera.numerics import DType, bf16

from ..graph.schedule.work import amount
from ..lazy_dataclass import dataclass
from ..mesh.device_mesh import Mesh
from ..mesh.partition import balanced
from .fabric import DeviceModel, Fabric, fabric_of
from .planner import Planned, PlannedCollectives, StepSegment, bubble
from .table_text import duration

MODELS: dict[str, Transformer] = {}
AXES = ("dp", "tp", "pp")
ATTENTION_PART = 0.6  # of the peak: FlashAttention-3 and cuDNN 9 on H100 and H200 with heads of 128
# reach 0.60 to 0.76 forward, 0.55 to 0.60 backward (arXiv:2407.08608; NVIDIA/cudnn-frontend,
# benchmark/sdpa_benchmark_training/results)
# Of AdamW, a parameter: reads gradient, master and two moments, writes these three and the weight.
UPDATE_BYTES = 2 + 12 + 12 + 2


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer.

    d: width   heads, kv_heads: of head_d elements   ffn: hidden units   vocab: tokens   T: sequence
    gated: three matrices in the feed-forward part instead of two   tied: embedding is the head too
    positions: learned, so many   biases: of matrices and norms   params: when given, their number
    """

    name: str
    layers: int
    d: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    T: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    params: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "d", "heads", "kv_heads", "ffn", "vocab", "T"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)}: a transformer needs at least 1")
        if self.d % self.heads or self.heads % self.kv_heads:
            raise ArgumentError(f"{self.heads} heads of a width of {self.d} with {self.kv_heads} "
                                "for keys: each divides the one before",
                                hint="heads divide d, kv_heads divide heads")

    @property
    def head_d(self) -> int:
        return self.d // self.heads

    @property
    def matrices(self) -> int:
        """Weights of one layer's matrices: query and output, key and value, feed-forward."""
        return (2 * self.d * self.d + 2 * self.d * self.kv_heads * self.head_d
                + (3 if self.gated else 2) * self.d * self.ffn)

    @property
    def layer_params(self) -> int:
        """Of one layer: matrices, two norms, and biases of each."""
        biases = (self.d + 2 * self.kv_heads * self.head_d + self.d + self.ffn + self.d
                  + 2 * self.d) if self.biases else 0
        return self.matrices + 2 * self.d + biases

    @property
    def count(self) -> float:
        """All parameters."""
        if self.params:
            return self.params
        tables = self.vocab * self.d * (1 if self.tied else 2) + self.positions * self.d
        return self.layers * self.layer_params + tables + self.d * (2 if self.biases else 1)

    def token_flops(self) -> float:
        """Of training on one token: 6 N + 12 L H Q T, appendix B of [P]; full attention."""
        return 6 * self.count + 12 * self.layers * self.d * self.T


def _register(m: Transformer) -> None:
    if m.name in MODELS:
        raise ArgumentError(f"the transformer {m.name!r} is declared twice")
    MODELS[m.name] = m


_register(Transformer("gpt2", 12, 768, 12, 12, 3072, 50257, 1024, False, True, 1024, True,
                      source="Radford et al. 2019; openai/gpt-2"))
_register(Transformer("gpt2-xl", 48, 1600, 25, 25, 6400, 50257, 1024, False, True, 1024, True,
                      source="Radford et al. 2019; openai/gpt-2"))
_register(Transformer("gpt3", 96, 12288, 96, 96, 49152, 50257, 2048, False, True, 2048, True,
                      source="Brown et al. 2020, arXiv:2005.14165, table 2.1"))
_register(Transformer("7b", 32, 4096, 32, 32, 11008, 32000, 4096,
                      source="Touvron et al. 2023, Llama 2, arXiv:2307.09288"))
_register(Transformer("8b", 32, 4096, 32, 8, 14336, 128256, 8192,
                      source="Llama team 2024, Llama 3, arXiv:2407.21783, table 3"))
_register(Transformer("70b", 80, 8192, 64, 8, 28672, 128256, 8192,
                      source="Llama team 2024, Llama 3, arXiv:2407.21783, table 3"))
_register(Transformer("405b", 126, 16384, 128, 8, 53248, 128256, 8192,
                      source="Llama team 2024, Llama 3, arXiv:2407.21783, table 3"))


def model(name: str = "", **given: Any) -> Transformer:
    """A registered transformer by name, with other fields where given; or one of the fields alone.

    Raises ArgumentError for an unknown name, and for a shape without layers, d, heads and vocab.
    """
    if name and name not in MODELS:
        raise ArgumentError(f"there is no transformer {name!r}",
                            hint=did_you_mean(name, list(MODELS)))
    known = {f.name for f in fields(Transformer)}
    for word in given.keys() - known:
        raise ArgumentError(f"a transformer has no {word!r}", hint=did_you_mean(word, list(known)))
    if name:
        if given and "kv_heads" not in given and "heads" in given:
            given["kv_heads"] = given["heads"]
        return replace(MODELS[name], **given)
    missing = [w for w in ("layers", "d", "heads", "vocab") if w not in given]
    if missing:
        raise ArgumentError(f"a transformer without a name needs {', '.join(missing)}",
                            hint="--transformer 70b, or --layers 4 --d 256 --heads 8 --vocab 256")
    whole = {"name": "transformer", "kv_heads": given["heads"], "ffn": 4 * given["d"], "T": 2048,
             "gated": False}
    return Transformer(**(whole | given))


# --- how it is trained ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Training:
    """How a step is split and stored.

    B: sequences of a step, on all ranks   microbatches: into which each pipeline cuts its part
    zero: 0 to 3, what dp splits: 1 optimizer state, 2 gradients too, 3 parameters too   chunks: of
    layers on each rank of the pipeline, above 1 interleaved   schedule: "1f1b" or "gpipe"
    sequence: norms split over tp along the sequence   remat: only the input of each layer is kept
    flash: scores are not stored   dtype: of matmuls   overlap: dp's exchanges beside arithmetic
    """

    B: int = 1
    microbatches: int = 1
    zero: int = 0
    chunks: int = 1
    schedule: str = "1f1b"
    sequence: bool = False
    remat: bool = False
    flash: bool = True
    dtype: DType = bf16
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ArgumentError(f"zero={self.zero}: ZeRO has the stages 0, 1, 2 and 3")
        if self.schedule not in ("1f1b", "gpipe"):
            raise ArgumentError(f"schedule={self.schedule!r}",
                                hint=did_you_mean(self.schedule, ["1f1b", "gpipe"]))
        if min(self.B, self.microbatches, self.chunks) < 1:
            raise ArgumentError("B, microbatches and chunks are at least 1")


@dataclass(frozen=True)
class ModelShare:
    """A model on one rank: the largest of each part.

    b: sequences of a microbatch   layers: of a stage   heads, kv_heads, ffn, vocab: of tp's share
    """

    dp: int
    tp: int
    pp: int
    b: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    def matrices(self, m: Transformer) -> int:
        """Weights of one layer's matrices on this rank."""
        return (2 * m.d * self.heads * m.head_d + 2 * m.d * self.kv_heads * m.head_d
                + (3 if m.gated else 2) * m.d * self.ffn)


def split_of(m: Transformer, mesh: Mesh, how: Training) -> ModelShare:
    """The shares of the busiest rank. Raises AxisError for an axis that is not dp, tp or pp,
    ArgumentError where there are more ranks than what they split."""
    unknown = [a for a in mesh.axes if a not in AXES]
    if unknown:
        raise AxisError(f"a transformer's plan knows the axes {', '.join(AXES)}, "
                        f"the mesh has {unknown[0]!r}", hint=did_you_mean(unknown[0], AXES))
    dp, tp, pp = (mesh.size(a) if a in mesh.axes else 1 for a in AXES)
    _need(how.B >= dp * how.microbatches, f"B={how.B} sequences", f"dp={dp} times "
          f"{how.microbatches} microbatches", f"--B {dp * how.microbatches}")
    _need(m.heads >= tp, f"{m.heads} heads", f"tp={tp}", f"tp <= {m.heads}")
    _need(m.layers >= pp * how.chunks, f"{m.layers} layers", f"pp={pp} times {how.chunks} chunks",
          f"pp <= {m.layers // how.chunks}")
    return ModelShare(dp, tp, pp, -(-how.B // (dp * how.microbatches)), -(-m.layers // pp),
                      -(-m.heads // tp), _kv_heads(m, tp), -(-m.ffn // tp), -(-m.vocab // tp))


def _need(enough: bool, what: str, over: str, hint: str) -> None:
    if not enough:
        raise ArgumentError(f"{what} cannot be split over {over}", hint=hint)


def _kv_heads(m: Transformer, tp: int) -> int:
    """The most key heads that the query heads of one rank read; shared ones are kept twice."""
    group = m.heads // m.kv_heads
    return max((hi - 1) // group - lo // group + 1 for lo, hi in balanced(m.heads, tp))


# --- memory ---------------------------------------------------------------------------------------
def params_of_rank(m: Transformer, s: ModelShare) -> float:
    """Of the rank that holds most: a stage's layers, and an end's tables with the first or last."""
    norms = m.layer_params - m.matrices  # whole on every rank of tp, biases too
    ends = m.d * s.vocab * (1 if m.tied or s.pp > 1 else 2) + m.positions * m.d + 2 * m.d
    mine = s.layers * (s.matrices(m) + norms) + ends
    if not m.params:
        return mine
    return mine * m.params / replace(m, params=0.0).count


def layer_activations(m: Transformer, s: ModelShare, how: Training) -> float:
    """Bytes that one layer keeps of one microbatch for its backward pass, in 2-byte types.

    s b h (10 + 24/t) for GPT [K, section 4.2], of which two bytes are dropout's masks; here by what
    is kept: inputs of two norms and of what follows them whole, query, key, value, attention's
    result, and hidden units in shares. Scores, 5 a s / h more, when flash is off.
    """
    tokens = s.b * m.T
    if how.remat:
        return 2.0 * tokens * m.d / (s.tp if how.sequence else 1)
    whole = 8 * m.d / (s.tp if how.sequence else 1)
    heads = (2 * 2 * s.heads + 2 * 2 * s.kv_heads) * m.head_d
    hidden = (6 if m.gated else 4) * s.ffn
    scores = 0 if how.flash else 5 * s.heads * m.T
    return tokens * (whole + heads + hidden + scores)


def microbatches_held(s: ModelShare, how: Training) -> float:
    """Whose activations the first stage keeps at once, in stages: all with GPipe; p with 1F1B, and
    p (1 + (p-1) / (p v)) with chunks [K, section 4.2.3]; no more than there are."""
    if how.schedule == "gpipe":
        return how.microbatches
    extra = 1 + (s.pp - 1) / (s.pp * how.chunks) if how.chunks > 1 else 1
    return min(how.microbatches, s.pp * extra)


def memory_of(m: Transformer, s: ModelShare, how: Training) -> dict[str, float]:
    """Bytes by role with mixed precision Adam: 2 + 2 + 12 a parameter, over dp as zero says [Z]."""
    n = params_of_rank(m, s)
    shares = [s.dp if how.zero >= stage else 1 for stage in (3, 2, 1)]
    logits = 4.0 * s.b * m.T * s.vocab  # f32, of the last stage: 4 s b v / t [K, section 4.3]
    work = 2 * logits if s.pp == 1 else 0.0  # and their gradient; later stages hold less else
    if how.zero == 3:  # the layer at work and the next, gathered
        work += 2 * 2 * (s.matrices(m) + 2 * m.d)
    if how.remat:
        work += layer_activations(m, s, replace(how, remat=False))
    return {
        "parameters": 2 * n / shares[0], "gradients": 2 * n / shares[1],
        "optimizer": 12 * n / shares[2],
        "activations": microbatches_held(s, how) * s.layers * layer_activations(m, s, how),
        "workspace": work,
    }


# --- time -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """Microseconds of one microbatch on one stage: forward, backward; and of a step's update."""

    matmuls: float
    attention: float
    loops: float
    backward: float  # of the sum, the part that is backward
    update: float

    @property
    def both(self) -> float:
        return self.matmuls + self.attention + self.loops


def times_of(m: Transformer, s: ModelShare, how: Training, device: DeviceModel) -> Times:
    """6 operations a weight and token, 12 d T a layer and token for scores, of which a causal
    kernel does half [P, F]; remat computes the forward pass twice, 8 and 16."""
    tokens, passes = s.b * m.T, 4 if how.remat else 3
    peak = device.peak(how.dtype)
    weights = s.layers * s.matrices(m) + m.d * s.vocab / s.pp
    matmuls = 2 * passes * tokens * weights / (peak * device.matmul_efficiency)
    scores = 4 * passes * s.layers * tokens * s.heads * m.head_d * m.T / 2
    attention = scores / (peak * (ATTENTION_PART if device.matmul_efficiency < 1 else 1.0))
    kept = s.layers * layer_activations(m, s, replace(how, remat=False))
    stream = 1e9 * device.memory_gbps * device.memory_efficiency
    logits = 4.0 * tokens * s.vocab / s.pp  # f32: written and read, their gradient too
    # What is kept is written and read forward; read, and its gradient written and read, backward.
    loops = ((5 + 2 * how.remat) * kept + 4 * logits) / stream
    update = UPDATE_BYTES * params_of_rank(m, s) / (s.dp if how.zero else 1) / stream
    return Times(1e6 * matmuls, 1e6 * attention, 1e6 * loops, (passes - 1) / passes, 1e6 * update)


def exchanges_of(m: Transformer, s: ModelShare, how: Training, mesh: Mesh, fabric: Fabric
                 ) -> tuple[PlannedCollectives, ...]:
    """The collectives of a step, as one rank of each group takes part in them."""
    found = [*_tensor_exchanges(m, s, how), *_data_exchanges(m, s, how),
             *_stage_exchanges(m, s, how)]
    return tuple(replace(e, us=cost.us, how=cost.how) for e in found
                 for cost in [fabric.time(e.op, e.bytes, mesh, e.axes)])


def _exchange(op: str, axis: str, size: float, count: float, why: str, hidden: bool = False
              ) -> PlannedCollectives:
    return PlannedCollectives(op, (axis,), size, count, 0.0, "", why, hidden=hidden)


def _tensor_exchanges(m: Transformer, s: ModelShare, how: Training) -> Iterator[PlannedCollectives]:
    """Two all_reduces of s b h a layer and direction [M, section 3]; with `sequence` each is a
    reduce_scatter and an all_gather [K, section 4.2.2]."""
    if s.tp == 1:
        return
    size = 2.0 * s.b * m.T * m.d
    count = (6 if how.remat else 4) * s.layers * how.microbatches
    if how.sequence:
        yield _exchange("all_gather", "tp", size, count, "activations before column-split weights")
        yield _exchange("reduce_scatter", "tp", size, count, "sums after row-split weights")
    else:
        yield _exchange("all_reduce", "tp", size, count, "sums after row-split weights")
    small = 4.0 * s.b * m.T  # maximum and sum of the softmax over a split vocabulary
    yield _exchange("all_reduce", "tp", small, 2 * how.microbatches, "loss over a split vocabulary")


def _data_exchanges(m: Transformer, s: ModelShare, how: Training) -> Iterator[PlannedCollectives]:
    """all_reduce of the gradients; with ZeRO a reduce_scatter, and an all_gather of the parameters,
    of stage 3 in each pass of each microbatch [Z, section 7]."""
    if s.dp == 1:
        return
    size, m_count, hidden = 2.0 * params_of_rank(m, s), how.microbatches, how.overlap
    if how.zero == 0:
        yield _exchange("all_reduce", "dp", size, 1, "gradients", hidden)
        return
    if how.zero < 3:
        yield _exchange("reduce_scatter", "dp", size, 1, "gradients", hidden)
        yield _exchange("all_gather", "dp", size, 1, "updated parameters", hidden)
        return
    yield _exchange("all_gather", "dp", size / s.layers, 2 * s.layers * m_count,
                    "parameters of a layer, each pass", hidden)
    yield _exchange("reduce_scatter", "dp", size / s.layers, s.layers * m_count,
                    "gradients of a layer", hidden)


def _stage_exchanges(m: Transformer, s: ModelShare, how: Training) -> Iterator[PlannedCollectives]:
    """s b h to the next stage and back, each microbatch and chunk [N, section 2.2]."""
    if s.pp > 1:
        size = 2.0 * s.b * m.T * m.d / (s.tp if how.sequence else 1)
        yield _exchange("permute", "pp", size, 2 * how.microbatches * how.chunks,
                        "activations to the next stage, gradients back")


def plan_transformer(m: Transformer, mesh: Mesh, fabric: str | Fabric | None = None,
                     how: Training | None = None, **given: Any) -> Planned:
    """The plan of a training step with AdamW and 2-byte weights.

    how, or fields of Training: B=64, microbatches=8, zero=1, ...
    Raises ArgumentError, AxisError for what cannot be split.
    """
    how = replace(how or Training(), **given)
    found = fabric_of(mesh, fabric)
    found.need(mesh)
    s, device = split_of(m, mesh, how), found.device_of(mesh)
    exchanges, times = exchanges_of(m, s, how, mesh, found), times_of(m, s, how, device)
    tokens = how.B * m.T
    ideal = 1e6 * tokens * m.token_flops() / (device.peak(how.dtype) * mesh.size())
    parts = _step_segments(s, how, times, exchanges)
    planned = Planned(f"a training step of {m.name}", mesh, found, device,
                      {k: v for k, v in memory_of(m, s, how).items() if v}, exchanges, parts, ideal,
                      _notes(s, how, device))
    return replace(planned, facts=_facts(m, how, planned))


def _step_segments(s: ModelShare, how: Training, t: Times,
                   exchanges: tuple[PlannedCollectives, ...]) -> tuple[StepSegment, ...]:
    n = how.microbatches
    inner = sum(e.total_us for e in exchanges if e.axes != ("dp",))
    busy = n * t.both + inner
    idle = bubble(s.pp, n, how.chunks)
    exposed, beside = _exposed(how, t, exchanges)
    parts = [StepSegment("matmuls", n * t.matmuls, "weights by activations"),
             StepSegment("attention", n * t.attention, "scores and values"),
             StepSegment("loops", n * t.loops, "norms, activations, residuals"),
             StepSegment("exchanges", inner + exposed, beside),
             StepSegment("bubble", busy * idle / (1 - idle), f"{idle:.1%} of the pipeline's time"),
             StepSegment("update", t.update, "AdamW")]
    return tuple(p for p in parts if p.us or p.name == "exchanges")


def _exposed(how: Training, t: Times, exchanges: tuple[PlannedCollectives, ...]) -> tuple[float,
                                                                                          str]:
    """What of dp's exchanges is longer than the arithmetic beside it; and all axes in words."""
    of = {a: sum(e.total_us for e in exchanges if e.axes == (a,)) for a in AXES}
    words = [f"{a} {duration(of[a])}" for a in ("tp", "pp") if of[a]]
    window = 0.0
    if how.overlap:  # stage 3: both passes of all microbatches; else backward of the last
        window = how.microbatches * t.both if how.zero == 3 else t.both * t.backward
    exposed = max(0.0, of["dp"] - window)
    if of["dp"]:
        words.append(f"dp {duration(exposed)} of {duration(of['dp'])}")
    return exposed, ", ".join(words)


def _facts(m: Transformer, how: Training, plan: Planned) -> tuple[tuple[str, str], ...]:
    tokens = how.B * m.T
    rate = tokens / plan.step_us * 1e6
    return (
        ("model", f"{m.count / 1e9:.4g} billion parameters, {m.layers} layers, d={m.d}, "
                  f"{m.heads} heads, ffn {m.ffn}, vocabulary {m.vocab}, T={m.T}"),
        ("step", f"{how.B} sequences, {amount(tokens, 'tokens')} in {how.microbatches} "
                 f"microbatch{'es' * (how.microbatches > 1)}, "
                 f"{amount(m.token_flops(), 'FLOP')} a token"),
        ("rate", f"{rate:,.0f} tokens/s, {rate / plan.mesh.size():,.0f} a rank"),
    )


def _notes(s: ModelShare, how: Training, device: DeviceModel) -> tuple[str, ...]:
    dp = ("dp's exchanges run beside " + ("both passes" if how.zero == 3 else
          "the backward pass of the last microbatch") if how.overlap else "dp's exchanges wait")
    notes = [f"matmuls at {device.matmul_efficiency:g} of the peak of {how.dtype}, attention at "
             f"{ATTENTION_PART:g} of it and half of the scores (causal), memory at "
             f"{device.memory_efficiency:g}",
             f"tp's and pp's exchanges wait for arithmetic and it for them; {dp}",
             "weights and gradients of 2 bytes, AdamW's master and moments of 12",
             "MFU counts 6 N + 12 L d T a token, nothing computed twice"]
    if how.zero:
        notes.append(f"ZeRO stage {how.zero} over dp")
    if how.remat:
        notes.append("layers keep their input alone and compute forward twice")
    return tuple(notes)


__all__ = ["MODELS", "ModelShare", "Training", "Transformer", "layer_activations", "memory_of",
           "model",
           "params_of_rank", "plan_transformer", "split_of"]
