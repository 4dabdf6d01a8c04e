"""Turn a row of logits into a token: greedy, or a draw that (seed, position) alone decides.

Must never keep state between calls: an instance that takes over a request has to draw what the one
before it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating[Any]]

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the stride of splitmix64


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), on arrays of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], num_tokens: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise [len(seeds), num_tokens]; row i depends on (seeds[i], positions[i]) alone.

    Counter-based: element j of a row is output j of splitmix64 started at the row's mixed key.
    """
    seed = np.array([s & _MASK for s in seeds], dtype=np.uint64)
    position = np.array([(p * _STRIDE) & _MASK for p in positions], dtype=np.uint64)
    key = _mix(_mix(seed + np.uint64(_STRIDE)) + position)
    counters = np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(_STRIDE)
    bits = _mix(key[:, None] + counters[None, :]) >> np.uint64(12)
    # 52 bits and a half step keep the uniform strictly inside (0, 1) in float64, so no logarithm meets 0.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def sample_batch(
    logits: Logits, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """One token a row of `logits` [rows, vocab]. Temperature 0: the first largest logit. Above it:
    Gumbel-max, an exact draw from softmax(logits / temperature). Raises ValueError below 0."""
    if min(temperatures, default=0.0) < 0:
        raise ValueError(f"temperature must be at least 0, got {min(temperatures)}")
    tokens = np.argmax(logits, axis=-1)
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if drawn:
        noise = gumbel_noise([seeds[row] for row in drawn], [positions[row] for row in drawn], logits.shape[-1])
        scale = np.array([temperatures[row] for row in drawn])[:, None]
        tokens[drawn] = np.argmax(logits[drawn].astype(np.float64) + scale * noise, axis=-1)
    return [int(token) for token in tokens]


def sample(logits_row: Logits, temperature: float, seed: int, position: int) -> int:
    """The token for one row of logits [vocab]: see `sample_batch`."""
    return sample_batch(logits_row[None, :], [temperature], [seed], [position])[0]
