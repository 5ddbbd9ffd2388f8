"""The same training step in PyTorch on several GPUs: DDP or FSDP2, through torch.compile.

GPT-2 of gpt2_step.py in modules, one for each layer, as both need them. Weights and the residual
stream are f32, matmuls and attention bf16; FSDP2 gathers bf16 weights and adds gradients in f32.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tessera import launched
from tessera.bench.models.record import StepModel, weights
from tessera.bench.models.step import OPTIMIZER, RATE
from tessera.bench.torch_models import attend, cross_entropy, heads

HALF = torch.bfloat16
WAYS = ("ddp", "fsdp2")


class Weights(nn.Module):
    """Parameters of one node of the tree."""

    def __init__(self, arrays: dict[str, Any]):
        super().__init__()
        for name, a in arrays.items():
            if isinstance(a, np.ndarray):
                setattr(self, name, nn.Parameter(torch.from_numpy(a).cuda()))

    def linear(self, h: Any, name: str) -> Any:
        w, b = getattr(self, name), getattr(self, name + "_b")
        return F.linear(h.to(HALF), w.to(HALF).t(), b.to(HALF))


def layer_norm(h: Any, gain: Any, bias: Any) -> Any:
    return F.layer_norm(h, h.shape[-1:], gain.float(), bias.float())


class Layer(Weights):
    def __init__(self, arrays: dict[str, Any], m: StepModel):
        super().__init__(arrays)
        self.d, self.heads = m.d, m.heads

    def forward(self, h: Any) -> Any:  # [B, T, d] f32
        a = self.linear(layer_norm(h, self.g1, self.b1), "qkv")
        q, k, v = (heads(t, self.heads) for t in a.split(self.d, -1))
        h = h + self.linear(attend(q, k, v), "out").float()
        a = self.linear(layer_norm(h, self.g2, self.b2), "up")
        return h + self.linear(F.gelu(a, approximate="tanh"), "down").float()


class Gpt2(Weights):
    def __init__(self, m: StepModel):
        arrays = weights(m)
        super().__init__(arrays)
        self.layers = nn.ModuleList([Layer(w, m) for w in arrays["layers"]])

    def forward(self, x: Any, y: Any) -> Any:  # [B, T] tokens, targets: mean cross entropy
        h = F.embedding(x, self.table).float() + self.positions
        for layer in self.layers:
            h = layer(h)
        h = layer_norm(h, self.g, self.b)
        return cross_entropy(h.to(HALF) @ self.table.to(HALF).t(), y)


class SpreadStep:
    """A step on this rank's windows. way: "ddp" or "fsdp2"."""

    def __init__(self, model: StepModel, way: str, batch: tuple[np.ndarray, np.ndarray]):
        rank, ranks = launched.launched_rank(), launched.launched_size()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29531")
        torch.cuda.set_device(launched.launched_local_rank())
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        module: Any = Gpt2(model)
        if way == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32,
                                          cast_forward_inputs=False)
            for layer in module.layers:
                layer.compile()
                fully_shard(layer, mp_policy=policy)
            fully_shard(module, mp_policy=policy)
            self.loss = module
        else:
            module = DistributedDataParallel(module, gradient_as_bucket_view=True)
            self.loss = torch.compile(module)
        named = list(module.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for _, p in named if (p.ndim > 1) == decays],
              "weight_decay": OPTIMIZER.weight_decay if decays else 0.0}
             for decays in (True, False)],
            lr=RATE, eps=OPTIMIZER.eps, betas=(OPTIMIZER.b1, OPTIMIZER.b2), fused=True)
        self.x, self.y = (torch.from_numpy(t).long().cuda() for t in batch)

    def step(self) -> Any:
        """The loss of this rank, on its GPU."""
        self.optimizer.zero_grad()
        value = self.loss(self.x, self.y)
        value.backward()
        self.optimizer.step()
        return value


__all__ = ["WAYS", "SpreadStep"]
