"""The training step of tp_step.py in PyTorch: DTensor's tensor parallelism, through torch.compile.

Sequences are split between the matmuls, vocabularies for embedding and loss, as torchtitan does it;
each layer is compiled. "async_tp" is the same with collectives in parts beside their matmuls.
Weights and the residual stream are f32, matmuls, attention and what ranks send bf16.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tessera import launched
from tessera.bench.models.llama import BASE
from tessera.bench.models.record import StepModel, weights
from tessera.bench.models.step import OPTIMIZER, RATE
from tessera.bench.torch_models import attend, heads, rotary, rotary_table

HALF = torch.bfloat16
WAYS = ("dtensor", "async_tp")


class Linear(nn.Linear):
    """x w of a weight that is given as [inputs, outputs]."""

    def __init__(self, w: np.ndarray, device: str):
        super().__init__(*w.shape, bias=False, device="meta")
        self.weight = nn.Parameter(torch.from_numpy(w).to(device).t().contiguous())

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight.to(HALF))


class Norm(nn.RMSNorm):
    def __init__(self, gain: np.ndarray, device: str):
        super().__init__(len(gain), eps=1e-6, device="meta")
        self.weight = nn.Parameter(torch.from_numpy(gain).to(device))

    def forward(self, x: Any) -> Any:
        return super().forward(x).to(HALF)


class Attention(nn.Module):
    def __init__(self, p: dict, m: StepModel, device: str):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(p[n], device) for n in ("q", "k", "v", "out"))
        self.width = m.d // m.heads
        for name, t in zip(("cos", "sin"), rotary_table(m.T, self.width, BASE, device),
                           strict=True):
            self.register_buffer(name, t)

    def forward(self, x: Any) -> Any:
        q, k, v = (heads(t, t.shape[-1] // self.width) for t in (self.q(x), self.k(x), self.v(x)))
        table = (self.cos, self.sin)
        return self.out(attend(rotary(q, table), rotary(k, table), v))


class FeedForward(nn.Module):
    def __init__(self, p: dict, device: str):
        super().__init__()
        self.gate, self.up, self.down = (Linear(p[n], device) for n in ("gate", "up", "down"))

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, p: dict, m: StepModel, device: str):
        super().__init__()
        self.norm1, self.attention = Norm(p["norm1"], device), Attention(p, m, device)
        self.norm2, self.feed_forward = Norm(p["norm2"], device), FeedForward(p, device)

    def forward(self, x: Any) -> Any:  # this rank's rows of [B, T, d], f32
        x = x + self.attention(self.norm1(x)).float()
        return x + self.feed_forward(self.norm2(x)).float()


class Llama(nn.Module):
    def __init__(self, m: StepModel, device: str):
        super().__init__()
        p = weights(m)
        self.embedding = nn.Embedding(m.vocabulary, m.d, device="meta")
        self.embedding.weight = nn.Parameter(torch.from_numpy(p["table"]).to(device))
        self.layers = nn.ModuleList([Layer(w, m, device) for w in p["layers"]])
        self.norm, self.head = Norm(p["norm"], device), Linear(p["table"].T, device)

    def forward(self, x: Any) -> Any:  # [B, T] tokens: logits, split by vocabulary
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


IN_LAYER = {
    "norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(
        use_local_output=True),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),),
                                    desired_input_layouts=(Replicate(),)),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),),
                                       desired_input_layouts=(Replicate(),)),
    **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
    **{f"feed_forward.{n}": ColwiseParallel() for n in ("gate", "up")},
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}


def spread(module: Llama, mesh: Any) -> None:
    """Its weights over the ranks, one vocabulary for both ends."""
    parallelize_module(module, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                                use_local_output=False)})
    for layer in module.layers:
        parallelize_module(layer, mesh, IN_LAYER)
    module.head.weight = module.embedding.weight


def mean_loss(logits: Any, y: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(0, 1))


class SplitStep:
    """A step of all ranks on the same windows. way: one of WAYS"""

    def __init__(self, model: StepModel, way: str, batch: tuple[np.ndarray, np.ndarray],
                 device: str = "cuda"):
        rank, ranks = launched.launched_rank(), launched.launched_size()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29532")
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if device == "cuda":
            torch.cuda.set_device(launched.launched_local_rank())
            dist.init_process_group("nccl", device_id=torch.device(
                "cuda", torch.cuda.current_device()))
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
        module: Any = Llama(model, device)
        spread(module, mesh)
        if way == "async_tp":
            import torch._inductor.config as inductor
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            inductor._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh.get_group().group_name)
        for layer in module.layers:
            layer.compile(fullgraph=True)
        self.module, self.loss = module, torch.compile(mean_loss)
        named = list(module.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for _, p in named if (p.ndim > 1) == decays],
              "weight_decay": OPTIMIZER.weight_decay if decays else 0.0}
             for decays in (True, False)],
            lr=RATE, eps=OPTIMIZER.eps, betas=(OPTIMIZER.b1, OPTIMIZER.b2), fused=True)
        self.x, self.y = (torch.from_numpy(t).long().to(device) for t in batch)

    def step(self) -> Any:
        """The loss, the same on every rank."""
        self.optimizer.zero_grad()
        logits = self.module(self.x)
        with loss_parallel():
            value = self.loss(logits, self.y)
            value.backward()
        self.optimizer.step()
        return value.full_tensor() if isinstance(value, DTensor) else value


__all__ = ["WAYS", "SplitStep"]
