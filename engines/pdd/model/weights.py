"""Where a model's weights come from: seeded random ones, under the names that Llama checkpoints use.

Must never depend on the device or the dtype: every instance makes the same weights for itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.pdd.config import ModelSpec

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

# With a tied embedding, plain small weights repeat their last input for ever: the residual stream is
# the token's own embedding, and its logit wins. Layers louder than the embedding, and queries that
# pick out few keys, give greedy outputs that vary with the prompt (about 105 different tokens in 128).
_EMBEDDING_STD = 0.05
_QUERY_KEY_GAIN = 2.0
_OUTPUT_GAIN = 1.5
_LOGIT_STD = 3.0


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Seeded random weights on the CPU in `spec.dtype`, linear layers as [out, in]. Drawn in float64
    and cast, so that models of two dtypes differ by rounding alone."""
    generator = torch.Generator().manual_seed(spec.seed)
    dtype = DTYPES[spec.dtype]
    weights: dict[str, Tensor] = {}

    def linear(name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        drawn = torch.randn(num_out, num_in, generator=generator, dtype=torch.float64)
        weights[name] = (drawn * (gain / math.sqrt(num_in))).to(dtype)

    hidden = spec.hidden_size
    query_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linear(
        "model.embed_tokens.weight",
        spec.vocab_size,
        hidden,
        gain=_EMBEDDING_STD * math.sqrt(hidden),
    )
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = torch.ones(hidden, dtype=dtype)
        linear(prefix + "self_attn.q_proj.weight", query_width, hidden, _QUERY_KEY_GAIN)
        linear(prefix + "self_attn.k_proj.weight", kv_width, hidden, _QUERY_KEY_GAIN)
        linear(prefix + "self_attn.v_proj.weight", kv_width, hidden)
        linear(prefix + "self_attn.o_proj.weight", hidden, query_width, _OUTPUT_GAIN)
        weights[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden, dtype=dtype)
        linear(prefix + "mlp.gate_proj.weight", spec.intermediate_size, hidden)
        linear(prefix + "mlp.up_proj.weight", spec.intermediate_size, hidden)
        linear(prefix + "mlp.down_proj.weight", hidden, spec.intermediate_size, _OUTPUT_GAIN)
    # The last norm sets how peaked the softmax is: logits with a standard deviation of _LOGIT_STD.
    last_gain = _LOGIT_STD / (_EMBEDDING_STD * math.sqrt(hidden))
    weights["model.norm.weight"] = torch.full((hidden,), last_gain, dtype=torch.float64).to(dtype)
    return weights
