"""Tokens per second of a byte-level transformer in eager PyTorch, on the CPU or a GPU.

The reference that `examples/train.py` is compared with: same model, same batch, same optimiser,
two threads. Decoder only, pre-norm RMSNorm, rotary positions, causal attention, tied embedding,
AdamW; f32, or products in bf16 by autocast. PyTorch is no dependency of Tessera; run this with any
interpreter that has it:

    python benchmarks/torch_baseline.py --mlp gelu
    python benchmarks/torch_baseline.py --target cuda --dtype bf16 --width 1024
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # one token per byte


@dataclass(frozen=True)
class Model:
    """Extents of the transformer; `mlp` is gelu (hidden 4d, tanh form) or swiglu (hidden 8d/3)."""

    d: int = 256
    layers: int = 4
    heads: int = 4
    mlp: str = "gelu"


def rotary_table(T: int, D: int) -> tuple[Tensor, Tensor]:
    """cos and sin of t * 10000^(-2i/D), each [T, D/2] (Su et al. 2021, arXiv:2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    angle = torch.outer(torch.arange(T, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, pairs (i, i + D/2).   x: [B, H, T, D]   cos, sin: [T, D/2]"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Gelu(nn.Module):
    """W2 gelu_tanh(W1 x), hidden 4d."""

    def __init__(self, d: int):
        super().__init__()
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGlu(nn.Module):
    """W3 (silu(W1 x) * W2 x), hidden 8d/3 rounded up to 32: as many weights as hidden 4d in Gelu.

    Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, d: int):
        super().__init__()
        hidden = -(-8 * d // 3 // 32) * 32
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


MLPS: dict[str, type[nn.Module]] = {"gelu": Gelu, "swiglu": SwiGlu}


class Block(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.norm1 = nn.RMSNorm(model.d, eps=1e-6)
        self.attention = Attention(model.d, model.heads)
        self.norm2 = nn.RMSNorm(model.d, eps=1e-6)
        self.mlp = MLPS[model.mlp](model.d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, model: Model, T: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, model.d)
        nn.init.normal_(self.embed.weight, std=0.02)  # tied: the default std of 1 swamps logits
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.d, eps=1e-6)
        cos, sin = rotary_table(T, model.d // model.heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] int64 -> logits [B, T, 256]"""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embed.weight)


def measure(model: Model, B: int, T: int, warmup: int, steps: int, device: str, dtype: str
            ) -> dict[str, object]:
    """Times `steps` whole training steps (data, forward, backward, AdamW) after `warmup` ones; the
    loss of each is read, so that a GPU is waited for."""
    torch.manual_seed(0)
    net = Transformer(model, T).to(device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-4)
    times_ms: list[float] = []
    loss = torch.zeros(())
    for _ in range(warmup + steps):
        start = time.perf_counter()
        tokens = torch.randint(0, VOCAB, (B, T + 1)).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = net(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(B * T, VOCAB).float(), tokens[:, 1:].reshape(B * T))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        loss.item()
        torch.cuda.synchronize() if device == "cuda" else None
        times_ms.append((time.perf_counter() - start) * 1e3)
    timed = times_ms[warmup:]
    median_ms = statistics.median(timed)
    return {
        "tokens_per_s": round(B * T / median_ms * 1e3, 1),
        "step_ms": round(median_ms, 2),
        "best_step_ms": round(min(timed), 2),
        "worst_step_ms": round(max(timed), 2),
        "loss": round(loss.item(), 4),
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlp", choices=sorted(MLPS), default="gelu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Model(d=args.width, layers=args.layers, heads=max(4, args.width // 128), mlp=args.mlp)
    report = measure(model, args.batch, args.length, args.warmup, args.steps, args.target,
                     args.dtype)
    setting = asdict(model) | {"B": args.batch, "T": args.length, "threads": args.threads}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps(report | setting | versions))


if __name__ == "__main__":
    main()
