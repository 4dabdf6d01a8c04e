"""A Llama-style transformer (RMSNorm, RoPE, grouped queries, SwiGLU, tied embedding), twice.

`Llama` runs the tokens of several sequences in one pass and leaves attention to its caller, who
holds the KV. It must never know of pages, slots or requests. `plain_generate` is the reference; it
shares no code with `Llama`, so that tests compare two writings of one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.pdd.config import ModelSpec
from engines.pdd.sampling import sample

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [N, heads, D], new keys and values [N, 2, kv_heads, D]) -> outputs [N, heads, D].
Queries and keys have been through RoPE; N counts the packed tokens."""


class Llama:
    """Weights on one device, laid out for speed: queries, keys and values in one matrix, gate and up
    in another."""

    def __init__(self, weights: Mapping[str, Tensor], spec: ModelSpec, device: torch.device) -> None:
        def on_device(*names: str) -> Tensor:
            return torch.cat([weights[name] for name in names]).to(device)

        self.spec = spec
        self.dtype = weights["model.embed_tokens.weight"].dtype
        self._embedding = on_device("model.embed_tokens.weight")
        # Logits in at least float32: in bfloat16 the largest two often tie, and the tie would decide the token.
        self._head = self._embedding.to(torch.promote_types(self.dtype, torch.float32))
        self._last_norm = on_device("model.norm.weight")
        self._layers = []
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self._layers.append(
                (
                    on_device(prefix + "input_layernorm.weight"),
                    on_device(*(f"{attention}{name}_proj.weight" for name in "qkv")),
                    on_device(attention + "o_proj.weight"),
                    on_device(prefix + "post_attention_layernorm.weight"),
                    on_device(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                    on_device(mlp + "down_proj.weight"),
                )
            )
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        angles = torch.outer(torch.arange(spec.max_context, dtype=torch.float64), spec.rope_theta**-half)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device, self.dtype)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(device, self.dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [N, hidden] of `token_ids` [N] at `positions` [N], packed in any order."""
        spec = self.spec
        num_tokens, head_dim = token_ids.shape[0], spec.head_dim
        num_rotated = spec.num_heads + spec.num_kv_heads
        cos, sin = self._cos[positions].unsqueeze(1), self._signed_sin[positions].unsqueeze(1)
        hidden = self._embedding[token_ids]
        for layer, (norm_in, qkv, out, norm_mlp, gate_up, down) in enumerate(self._layers):
            projected = F.linear(self._norm(hidden, norm_in), qkv).view(num_tokens, -1, head_dim)
            rotated, values = projected[:, :num_rotated], projected[:, num_rotated:]
            rotated = torch.addcmul(rotated * cos, rotated.roll(head_dim // 2, dims=-1), sin)
            queries, keys = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
            attended = attend(layer, queries, torch.stack((keys, values), dim=1))
            hidden = hidden + F.linear(attended.reshape(num_tokens, -1), out)
            gate, up = F.linear(self._norm(hidden, norm_mlp), gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        return self._norm(hidden, self._last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of hidden states [N, hidden], in float32 or wider."""
        return F.linear(hidden.to(self._head.dtype), self._head)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self.spec.hidden_size,), weight, self.spec.rms_eps)


@torch.inference_mode()
def plain_generate(
    weights: Mapping[str, Tensor],
    spec: ModelSpec,
    prompt: Sequence[int],
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """`num_tokens` tokens after `prompt`, the whole sequence run anew for each: no cache, no batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = plain_logits(weights, spec, ids)[-1]
        ids.append(sample(logits.double().numpy(), temperature, seed, position=len(ids)))
    return ids[len(prompt) :]


def plain_logits(weights: Mapping[str, Tensor], spec: ModelSpec, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of all `ids` in the weights' dtype, head by head as papers write it."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.rms_eps).sqrt() * weights[name]

    def rope(x: Tensor) -> Tensor:  # [tokens, D]; dimension i turns with dimension i + D / 2
        half = spec.head_dim // 2
        rates = spec.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(ids), dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x[:, :half], x[:, half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[list(ids)]
    is_future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm.weight")
        q, k, v = (
            (x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).split(spec.head_dim, dim=-1) for name in "qkv"
        )
        heads = []
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = rope(q[head]) @ rope(k[shared]).T / spec.head_dim**0.5
            heads.append(scores.masked_fill(is_future, float("-inf")).softmax(-1) @ v[shared])
        hidden = hidden + torch.cat(heads, -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        x = norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = x @ weights[prefix + "mlp.gate_proj.weight"].T
        up = x @ weights[prefix + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ weights[prefix + "mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ embedding.T
