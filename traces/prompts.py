"""A request's prompt as token ids, and page keys: chained hashes that name a page and all before it.

New tokens come from a counter-based generator keyed by (seed, request id): any process can make any prompt. Nothing
here knows text, a tokenizer or a cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from traces.errors import TraceError
from traces.table import Trace

Tokens = npt.NDArray[np.int32]
NUM_RESERVED_TOKENS = 8  # ids below are left to special tokens
MAX_MEMO_TOKENS = 64 * 2**20


def random_tokens(seed: int, name: str, count: int, vocab_size: int) -> Tokens:
    """`count` token ids in [8, vocab_size); shape (count,). The same in every process; the first ones do not depend on
    `count`. Philox's raw words, since numpy keeps these the same from version to version."""
    key = hashlib.blake2b(f"{seed}\x00{name}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw((count + 1) // 2)
    words = np.asarray(raw, dtype="<u8").view("<u4")[:count].astype(np.uint64)
    span = np.uint64(vocab_size - NUM_RESERVED_TOKENS)
    return (((words * span) >> np.uint64(32)) + np.uint64(NUM_RESERVED_TOKENS)).astype(np.int32)


def page_keys(tokens: Tokens, page_size: int) -> list[bytes]:
    """One 16-byte key per full page of `tokens`: blake2b of the key before and its ids (int32, little endian)."""
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

    With live history, `note_output` puts the model's own output in the trace's place: shorter, and the rest is filled
    with the trace's tokens; longer, and it is cut. An output that already stands in a prompt stays as it was there.
    Without `note_output` history is as recorded.

    Prompts are remembered up to `max_memo_tokens`, oldest use forgotten first, and made again when asked for.
    Raises TraceError for a vocabulary without room.
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int = 0, *, max_memo_tokens: int = MAX_MEMO_TOKENS) -> None:
        if vocab_size <= NUM_RESERVED_TOKENS:
            raise TraceError(trace.meta.name, "vocab_size", f"must exceed {NUM_RESERVED_TOKENS}, got {vocab_size}")
        self._rows = {row.request_id: row for row in trace.rows}
        self._roots = trace.roots
        self._vocab_size = vocab_size
        self._seed = seed
        self._memo: OrderedDict[str, Tokens] = OrderedDict()
        self._memo_tokens = 0
        self._max_memo_tokens = max_memo_tokens
        self._noted: dict[str, Tokens] = {}
        self._in_use: set[str] = set()  # requests whose output stands in a prompt: it may not change any more

    def prompt(self, request_id: str) -> Tokens:
        """The prompt of a request or root, shape (input_tokens,). Raises KeyError for an unknown id.

        The array is shared by later prompts: do not write into it.
        """
        chain: list[str] = []
        name: str | None = request_id
        while name is not None and name not in self._memo:
            chain.append(name)
            name = self._prefix_of(name)
        made = None if name is None else self._remembered(name)
        for link in reversed(chain):
            made = self._make(link, made)
            self._remember(link, made)
        assert made is not None
        return made

    def output(self, request_id: str) -> Tokens:
        """The output that stands in later prompts, shape (output_tokens,): the noted one, or the trace's own."""
        row = self._rows[request_id]
        noted = self._noted.get(request_id)
        if noted is not None and len(noted) == row.output_tokens:
            return noted
        own = random_tokens(self._seed, f"output\x00{request_id}", row.output_tokens, self._vocab_size)
        return own if noted is None else np.concatenate([noted, own[len(noted) :]])

    def note_output(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The model's own output takes the trace's place in prompts made from now on. A root has no output."""
        if request_id not in self._roots and request_id not in self._in_use:
            limit = self._rows[request_id].output_tokens
            self._noted[request_id] = np.array(token_ids[:limit], dtype=np.int32)

    def filled_history_tokens(self, request_id: str) -> int:
        """Tokens of the trace in this request's prompt that stand in for a live output of its prefix that was shorter.

        No cache can hold them before this prompt is computed (but for a second request upon the same prefix).
        """
        row = self._rows.get(request_id)
        if row is None or row.prefix_id is None or row.prefix_id not in self._noted:
            return 0
        kept_output = row.keep_tokens - self._rows[row.prefix_id].input_tokens
        return max(0, kept_output - len(self._noted[row.prefix_id]))

    def _prefix_of(self, name: str) -> str | None:
        if name in self._roots:
            return None
        row = self._rows[name]
        return row.prefix_id if row.keep_tokens else None

    def _make(self, name: str, prefix: Tokens | None) -> Tokens:
        if name in self._roots:
            return random_tokens(self._seed, f"root\x00{name}", self._roots[name].tokens, self._vocab_size)
        row = self._rows[name]
        new = random_tokens(self._seed, f"new\x00{name}", row.new_tokens, self._vocab_size)
        if prefix is None or row.prefix_id is None:
            return new
        if row.keep_tokens <= len(prefix):
            return np.concatenate([prefix[: row.keep_tokens], new])
        self._in_use.add(row.prefix_id)
        return np.concatenate([prefix, self.output(row.prefix_id)[: row.keep_tokens - len(prefix)], new])

    def _remembered(self, name: str) -> Tokens:
        self._memo.move_to_end(name)
        return self._memo[name]

    def _remember(self, name: str, tokens: Tokens) -> None:
        self._memo[name] = tokens
        self._memo_tokens += len(tokens)
        while self._memo_tokens > self._max_memo_tokens and len(self._memo) > 1:
            self._memo_tokens -= len(self._memo.popitem(last=False)[1])
