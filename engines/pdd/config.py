"""Everything that the PDD engine is told, as plain dataclasses. Built once at the edge, sent to workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engines.wan.link import LinkSpec
from traces.errors import UserError

Role = Literal["P", "RLD", "MD", "MIXED"]
ExecutorKind = Literal["paced", "unpaced", "roofline"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-style transformer (RMSNorm, RoPE, GQA, SwiGLU, tied embeddings). Lengths in tokens, widths in
    elements."""

    name: str = "tiny-1m"
    vocab_size: int = 1024
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 352
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    max_context: int = 16_384
    dtype: str = "float32"  # float32 | float64 | bfloat16
    seed: int = 0

    @property
    def bytes_per_element(self) -> int:
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV a token leaves: layers x (k, v) x kv heads x head width x element size."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The modelled duration of one fused step, in seconds: base_s + max(compute, memory).

    compute = prefill_token_s * T + attention_s * sum(n_i * (start_i + n_i / 2)) over items of more than one token, T
    tokens in all; memory = weights_s (every step reads the weights once) + kv_read_s * sum of starts of the items of
    one token. The form is the roofline's: an extend of some tokens hides under the weights, a small chunk costs as
    much as they do.
    """

    base_s: float = 0.002
    prefill_token_s: float = 1.0e-4
    attention_s: float = 0.0
    weights_s: float = 0.018
    kv_read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance. `max_step_tokens` bounds the tokens of a fused step, `prefill_chunk_tokens` one prompt's part of
    it."""

    name: str
    role: Role
    site: str
    num_pages: int = 4096
    max_batch_seqs: int = 32
    prefill_chunk_tokens: int = 256
    max_step_tokens: int = 512
    timing: StepTiming = field(default_factory=StepTiming)


@dataclass(frozen=True, slots=True)
class DeciderSpec:
    """When the relay is taken: the expected time until MD holds the prompt exceeds `relay_threshold_s` and some RLD
    holds fewer than `relay_max_seqs` requests and has the pages."""

    relay_threshold_s: float = 0.05
    relay_max_seqs: int = 16


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The whole engine: who stands where, over which links, computing what. Workers listen on `base_port` + i; 0 lets
    the system choose."""

    policy: str
    instances: tuple[InstanceSpec, ...]
    line: LinkSpec
    local: LinkSpec
    model: ModelSpec = field(default_factory=ModelSpec)
    decider: DeciderSpec = field(default_factory=DeciderSpec)
    page_size: int = 16
    executor: ExecutorKind = "paced"
    first_token: Literal["decode", "prefill"] = "decode"
    drc: bool = True
    kv_frame_tokens: int = 128
    base_port: int = 0
    device: str = "auto"
    worker_nice: int = 5

    def __post_init__(self) -> None:
        for key, value in (("engine.kv_frame_tokens", self.kv_frame_tokens), ("cluster.page_size", self.page_size)):
            _at_least_one(key, value)
        for spec in self.instances:
            for key in ("num_pages", "max_batch_seqs", "prefill_chunk_tokens", "max_step_tokens"):
                _at_least_one(f"cluster.instances ({spec.name}).{key}", getattr(spec, key))
        names = [spec.name for spec in self.instances]
        if len(set(names)) != len(names):
            raise UserError(f"engine.instances: names must differ, got {names}")


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{key}: must be at least 1, got {value}")
