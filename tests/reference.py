"""The P3O optimizer step in plain PyTorch, on one process: what the Megatron runtime is compared with. Not a test.

Written from the equations (arXiv:2605.12380, Eq. 7, 11, 12) and from Qwen3's published architecture, and shares no code
with the runtime: no Megatron, no transformers, no padding, no batches. One sample at a time, one weight per name of the
Hugging Face checkpoint.

Shapes: s tokens of a sample, d hidden width, n heads, g key/value groups, h head width, v vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """One sample: prompt and response, and what the rollout recorded of each response token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    behavior: tuple[float, ...]
    advantage: float


@dataclass(frozen=True)
class AdamSettings:
    """Adam with decoupled weight decay on matrices, gradients clipped by their global norm. Cosine after a warm-up."""

    lr: float
    steps: int
    warmup: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Step:
    """``loss`` and ``grad_norm`` before the update; ``ess`` of the whole step."""

    loss: float
    ess: float
    grad_norm: float


class Qwen3:
    """Qwen3 from a Hugging Face directory, dense, tied embeddings."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        loaded = load_file(directory / "model.safetensors")
        self.weights = {name: weight.to(dtype).requires_grad_() for name, weight in loaded.items()}
        assert self.config["tie_word_embeddings"]

    def log_probs(self, text: Text) -> Tensor:
        """Log-prob of every response token: [response]."""
        ids = torch.tensor(text.prompt + text.response)
        embedding = self.weights["model.embed_tokens.weight"]
        hidden = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = self._layer(hidden, f"model.layers.{layer}.")
        logits = self._norm(hidden, "model.norm.weight") @ embedding.T
        first = len(text.prompt) - 1
        scores = torch.log_softmax(logits[first:-1], dim=-1)
        return scores.gather(1, ids[len(text.prompt) :, None])[:, 0]

    def _layer(self, hidden: Tensor, prefix: str) -> Tensor:
        """[s, d] -> [s, d]."""
        w, c = self.weights, self.config
        s, h = hidden.shape[0], c["head_dim"]
        x = self._norm(hidden, prefix + "input_layernorm.weight")
        q, k, v = ((x @ w[f"{prefix}self_attn.{side}_proj.weight"].T).view(s, -1, h).transpose(0, 1) for side in "qkv")
        q = self._rotate(self._norm(q, prefix + "self_attn.q_norm.weight"))
        k = self._rotate(self._norm(k, prefix + "self_attn.k_norm.weight"))
        shared = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(h)
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v
        hidden = hidden + mixed.transpose(0, 1).reshape(s, -1) @ w[prefix + "self_attn.o_proj.weight"].T
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate, up = (x @ w[f"{prefix}mlp.{side}_proj.weight"].T for side in ("gate", "up"))
        return hidden + (torch.nn.functional.silu(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary positions on [n, s, h]: the halves of a head are the two coordinates."""
        s, h = x.shape[1], x.shape[2]
        theta = self.config["rope_parameters"]["rope_theta"]
        frequency = theta ** (-torch.arange(0, h, 2, dtype=torch.float64) / h)
        angle = (torch.arange(s, dtype=torch.float64)[:, None] * frequency).to(x.dtype)
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., : h // 2], x[..., h // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Trainer:
    """P3O with one ESS per optimizer step."""

    def __init__(self, model: Qwen3, settings: AdamSettings) -> None:
        self.model, self.settings = model, settings
        self.first = {name: torch.zeros_like(weight) for name, weight in model.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in model.weights.items()}
        self.done = 0

    def step(self, texts: Sequence[Text]) -> Step:
        """One optimizer step on ``texts``."""
        with torch.no_grad():
            ratios = [(self.model.log_probs(t) - _behavior(t, self.model)).double().exp() for t in texts]
        r = torch.cat(ratios)
        tokens = len(r)
        ess = min(float(r.sum() ** 2 / (tokens * ((r * r).sum() + 1e-8))), 1.0)
        loss = 0.0
        for text in texts:
            total = self._token_losses(text, ess).sum() / tokens
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
        return Step(loss, ess, self._update())

    def _token_losses(self, text: Text, ess: float) -> Tensor:
        """- sg(min(r, e)) p A + (1 - e) (l + exp(-l) - 1), per response token. |l| stays below the clamp of 10."""
        p = self.model.log_probs(text)
        log_ratio = p - _behavior(text, self.model)
        weight = log_ratio.detach().exp().clamp(max=ess)
        kl = log_ratio + torch.exp(-log_ratio) - 1.0
        return -weight * p * text.advantage + (1.0 - ess) * kl

    def _update(self) -> float:
        """Adam; returns the gradient's norm and clears it."""
        s = self.settings
        gradients = {name: weight.grad for name, weight in self.model.weights.items() if weight.grad is not None}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        scale = min(1.0, s.clip / (norm + 1e-6)) if s.clip > 0 else 1.0
        rate = s.rate(self.done)
        self.done += 1
        with torch.no_grad():
            for name, gradient in gradients.items():
                weight, m, v = self.model.weights[name], self.first[name], self.second[name]
                g = gradient * scale
                m.mul_(s.beta1).add_(g, alpha=1.0 - s.beta1)
                v.mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
                if weight.dim() > 1:
                    weight.mul_(1.0 - rate * s.weight_decay)
                mean, root = m / (1.0 - s.beta1**self.done), (v / (1.0 - s.beta2**self.done)).sqrt()
                weight.sub_(rate * mean / (root + s.eps))
                weight.grad = None
        return norm


def _behavior(text: Text, model: Qwen3) -> Tensor:
    return torch.tensor(text.behavior, dtype=next(iter(model.weights.values())).dtype)
