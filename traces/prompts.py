"""A request's prompt as token ids, and page keys: chained hashes that name a page and all before it.

New tokens come from a counter-based generator keyed by (seed, request id), so any process can make any prompt.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from traces.errors import TraceError
from traces.table import Trace, TraceRow

Tokens = npt.NDArray[np.int32]
NUM_RESERVED_TOKENS = 8  # ids below are left to special tokens


def random_tokens(seed: int, name: str, count: int, vocab_size: int) -> Tokens:
    """`count` token ids in [8, vocab_size), the same in every process; shape (count,), int32."""
    key = hashlib.blake2b(f"{seed}\x00{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.integers(NUM_RESERVED_TOKENS, vocab_size, size=count, dtype=np.int32)


def page_keys(tokens: Tokens, page_size: int) -> list[bytes]:
    """One 16-byte key per full page of `tokens`: blake2b over the key before and the page's ids (int32, little endian)."""
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * page_size
    keys: list[bytes] = []
    key = b""
    for start in range(0, len(raw) - step + 1, step):
        key = hashlib.blake2b(key + raw[start : start + step], digest_size=16).digest()
        keys.append(key)
    return keys


class PromptBuilder:
    """Makes prompts of one trace. A prompt, once made, stays: what comes after it builds on the same tokens.

    With live history, `note_output` puts the model's own output in the trace's place: shorter, and the rest is filled with
    the trace's tokens; longer, and it is cut.
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int = 0) -> None:
        if vocab_size <= NUM_RESERVED_TOKENS:
            raise TraceError(trace.meta.name, "vocab_size", f"must exceed {NUM_RESERVED_TOKENS}, got {vocab_size}")
        self._rows = {row.request_id: row for row in trace.rows}
        self._roots = trace.roots
        self._vocab_size = vocab_size
        self._seed = seed
        self._prompts: dict[str, Tokens] = {}
        self._outputs: dict[str, Tokens] = {}
        self._num_filled: dict[str, int] = {}

    def prompt(self, request_id: str) -> Tokens:
        """The request's (or root's) prompt, shape (input_tokens,). Raises KeyError for an unknown id."""
        chain: list[str] = []
        name: str | None = request_id
        while name is not None and name not in self._prompts:
            chain.append(name)
            row = self._rows.get(name)
            if row is None and name not in self._roots:
                raise KeyError(name)
            name = row.prefix_id if row is not None and row.keep_tokens else None
        for name in reversed(chain):
            self._prompts[name] = self._make(name)
        return self._prompts[request_id]

    def output(self, request_id: str) -> Tokens:
        """The output that stands in later prompts, shape (output_tokens,): the noted one, or the trace's own."""
        row = self._rows[request_id]
        own = random_tokens(self._seed, f"{request_id}/output", row.output_tokens, self._vocab_size)
        noted = self._outputs.get(request_id)
        if noted is None:
            return own
        return np.concatenate([noted, own[len(noted) :]])[: row.output_tokens]

    def note_output(self, request_id: str, token_ids: Tokens) -> None:
        """The model's own output takes the trace's place in prompts made from now on."""
        row = self._rows[request_id]
        self._outputs[request_id] = token_ids.astype(np.int32)
        self._num_filled[request_id] = max(0, row.output_tokens - len(token_ids))

    def filled_history_tokens(self, request_id: str) -> int:
        """Tokens of the trace that stand in for a shorter live output of the prefix, in this request's prompt."""
        row = self._rows[request_id]
        if row.prefix_id is None or row.prefix_id in self._roots:
            return 0
        kept_output = max(0, row.keep_tokens - self._rows[row.prefix_id].input_tokens)
        noted = len(self._outputs.get(row.prefix_id, ()))
        return max(0, kept_output - noted) if row.prefix_id in self._num_filled else 0

    def _make(self, name: str) -> Tokens:
        if name in self._roots:
            return random_tokens(self._seed, name, self._roots[name].tokens, self._vocab_size)
        row: TraceRow = self._rows[name]
        new = random_tokens(self._seed, name, row.new_tokens, self._vocab_size)
        if not row.keep_tokens or row.prefix_id is None:
            return new
        prefix = self._prompts[row.prefix_id]
        kept = prefix[: row.keep_tokens]
        if row.keep_tokens > len(prefix):
            kept = np.concatenate([prefix, self.output(row.prefix_id)])[: row.keep_tokens]
        return np.concatenate([kept, new])

