"""The executor that computes: a paged pool holds the truth, a slot per running request is attended over.

A request's pages are copied into its slot once, and new KV goes to both: a decode step that gathers
the pages anew takes 1.0 to 1.4 times as long at batch 8 and 1.9 to 6.8 times at batch 32, where its
copies may each take fresh memory (fp32, one thread, 1-2K of context; benchmarks/kernels.py measures
it). Each sequence has its own slot and attention call: a padded call for a whole batch would save
about 0.3 ms a step at batch 8 x 1K and nothing at 1-2K of mixed lengths, but binds sequences into one
tensor. Pages may be read, cached and sent at any time; a slot is working memory and may vanish
between steps. Must never decide what runs, or who owns a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.pdd.config import ModelSpec, StepTiming
from engines.pdd.executor.base import BatchItem, KVBytes
from engines.pdd.executor.roofline import step_duration_s
from engines.pdd.model.llama import Llama
from engines.pdd.model.weights import random_weights
from engines.pdd.sampling import sample_batch

_MIN_SLOT_TOKENS = 128


class _Slot:
    """One request's KV of [0, length), head-major: [layer, k/v, kv_head, capacity, head_dim]."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.length = 0
        self.layers = [(both, both[:1], both[1:]) for both in kv]

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.kv.nbytes


@dataclass(frozen=True, slots=True)
class _Span:
    """An item's rows [row, row_stop) in the packed step, and what they attend to: positions [0, stop)
    of its slot, under `mask` [tokens, stop] (0 or -inf) where it has more than one token."""

    row: int
    row_stop: int
    slot: _Slot
    start: int
    stop: int
    mask: Tensor | None


class TorchExecutor:
    """An Executor over a seeded random model.

    Slots take at most as many bytes as the pool, or what one step needs if that is more. The least
    recently run give way, and are copied from their pages again when they next run. A slot counts as
    current when it ends where an item starts, so `release` a request whose pages were taken away.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        max_seqs: int,
        timing: StepTiming,
        device: str = "auto",
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._spec, self._timing = spec, timing
        self._page_size, self._max_seqs = page_size, max_seqs
        self._model = Llama(random_weights(spec), spec, self._device)
        self._num_rows = spec.num_layers * 2
        self._row_bytes = spec.num_kv_heads * spec.head_dim * spec.bytes_per_element
        num_positions = num_pages * page_size
        shape = (spec.num_layers, 2, num_positions, spec.num_kv_heads, spec.head_dim)
        self._pool_rows: npt.NDArray[Any] | None = None
        if self._device.type == "cpu":
            # From numpy, since its zeros cost no memory until a page is first written.
            backing = np.zeros((self._num_rows, num_positions, self._row_bytes), dtype=np.uint8)
            self._pool = torch.from_numpy(backing).view(self._model.dtype).view(shape)
            self._pool_rows = self._as_rows(backing)
        else:
            self._pool = torch.zeros(shape, dtype=self._model.dtype, device=self._device)
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # least recently run first

    @property
    def pool_bytes(self) -> int:
        """Bytes that all pages take when written."""
        return self._pool.nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that the slots kept now take."""
        return sum(slot.num_bytes for slot in self._slots.values())

    @torch.inference_mode()
    def run(self, items: Sequence[BatchItem]) -> list[int | None]:
        """See Executor.run. Raises ValueError, before anything is computed, on an item without tokens
        or beyond its page table or the model's context, on a request that comes twice, and on more
        than max_seqs items."""
        if not items:
            return []
        self._check(items)
        spans = self._prepare(items)
        token_ids = np.concatenate([np.asarray(item.token_ids, dtype=np.int64) for item in items])
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        num_heads, num_kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        written: list[Tensor] = []

        def attend(layer: int, queries: Tensor, new_kv: Tensor) -> Tensor:
            written.append(new_kv)
            by_head = new_kv.permute(1, 2, 0, 3)  # [k/v, kv_head, token, head_dim]
            outputs = []
            for span in spans:
                both, keys, values = span.slot.layers[layer]
                both[:, :, span.start : span.stop] = by_head[:, :, span.row : span.row_stop]
                keys, values = keys[:, :, : span.stop], values[:, :, : span.stop]
                rows = queries[span.row : span.row_stop]
                if span.mask is None:
                    # The query heads of one KV head become query rows: its keys are then read once.
                    folded = rows.reshape(1, num_kv_heads, num_heads // num_kv_heads, -1)
                    attended = F.scaled_dot_product_attention(folded, keys, values)
                    outputs.append(attended.view(1, num_heads, -1))
                else:
                    attended = F.scaled_dot_product_attention(
                        rows.transpose(0, 1)[None], keys, values, span.mask, enable_gqa=True
                    )
                    outputs.append(attended[0].transpose(0, 1))
            return torch.cat(outputs)

        hidden = self._model.forward(self._on_device(token_ids), self._on_device(positions), attend)
        at = np.concatenate(
            [self._pool_index(item.pages, item.start, span.stop) for item, span in zip(items, spans, strict=True)]
        )
        new_kv = torch.stack(written).transpose(1, 2)  # [layer, k/v, token, kv_head, head_dim]
        self._pool.index_copy_(2, self._on_device(at), new_kv)
        # Only now: after a step that failed half way, a slot's length still says what is sound in it.
        for span in spans:
            span.slot.length = span.stop
        return self._sample(items, spans, hidden)

    def duration_s(self, items: Sequence[BatchItem]) -> float:
        """See `step_duration_s`."""
        return step_duration_s(self._timing, items)

    @torch.inference_mode()
    def read_kv(self, pages: Sequence[int], start: int, stop: int) -> KVBytes:
        """See Executor.read_kv; 1-D uint8, kv_bytes_per_token * (stop - start) long."""
        at = self._pool_index(pages, start, stop)
        if self._pool_rows is not None:
            return np.take(self._pool_rows, at, axis=1).view(np.uint8).reshape(-1)
        chosen = self._pool.index_select(2, self._on_device(at)).cpu()
        return chosen.view(torch.uint8).numpy().reshape(-1)

    @torch.inference_mode()
    def write_kv(self, pages: Sequence[int], start: int, stop: int, payload: KVBytes | None) -> None:
        """See Executor.write_kv; `payload` is only read, and need not be writable."""
        at = self._pool_index(pages, start, stop)
        expected = len(at) * self._num_rows * self._row_bytes
        if payload is None or payload.nbytes != expected:
            raise ValueError(
                f"KV of positions [{start}, {stop}) takes {expected} bytes, got "
                f"{'none' if payload is None else payload.nbytes}: both ends of a transfer must "
                "run the same model in the same dtype"
            )
        shaped = payload.reshape(self._num_rows, len(at), self._row_bytes)
        if self._pool_rows is not None:
            self._pool_rows[:, at] = self._as_rows(np.ascontiguousarray(shaped))
            return
        on_host = torch.from_numpy(shaped.copy()).view(self._model.dtype)
        values = on_host.view(*self._pool.shape[:2], len(at), *self._pool.shape[3:])
        self._pool.index_copy_(2, self._on_device(at), values.to(self._device))

    def release(self, request_id: str) -> None:
        """Drop the request's slot, if it has one."""
        self._slots.pop(request_id, None)

    def _check(self, items: Sequence[BatchItem]) -> None:
        if len(items) > self._max_seqs:
            raise ValueError(f"a step of {len(items)} items exceeds max_seqs={self._max_seqs}")
        if len({item.request_id for item in items}) < len(items):
            raise ValueError("a request comes twice in one step")
        for item in items:
            stop = item.start + item.num_tokens
            limit = min(len(item.pages) * self._page_size, self._spec.max_context)
            if item.num_tokens < 1 or item.start < 0 or stop > limit:
                raise ValueError(
                    f"request {item.request_id}: positions [{item.start}, {stop}) do not fit into "
                    f"{len(item.pages)} pages of {self._page_size} and a context of "
                    f"{self._spec.max_context} tokens"
                )

    def _prepare(self, items: Sequence[BatchItem]) -> list[_Span]:
        """A slot with the KV of [0, start) and room up to stop for every item."""
        for item in items:
            if item.request_id in self._slots:
                self._slots.move_to_end(item.request_id)
        spans: list[_Span] = []
        row = 0
        running = {item.request_id for item in items}
        for item in items:
            num_tokens, stop = item.num_tokens, item.start + item.num_tokens
            slot = self._slot_for(item.request_id, stop, running)
            if slot.length != item.start:
                self._load(slot, item)
            mask = None
            if num_tokens > 1:
                mask = self._causal_mask(item.start, stop)
            spans.append(_Span(row, row + num_tokens, slot, item.start, stop, mask))
            row += num_tokens
        return spans

    def _slot_for(self, request_id: str, num_tokens: int, running: set[str]) -> _Slot:
        """The request's slot, made or grown to hold `num_tokens`. Makes room first, at the cost of
        those not `running`."""
        old = self._slots.get(request_id)
        if old is not None and old.capacity >= num_tokens:
            return old
        spec = self._spec
        capacity = min(max(_MIN_SLOT_TOKENS, 1 << (num_tokens - 1).bit_length()), spec.max_context)
        budget_bytes = self.pool_bytes - capacity * spec.kv_bytes_per_token
        used_bytes = self.slot_bytes
        num_after = self._max_seqs if old is not None else self._max_seqs - 1
        for victim in [name for name in self._slots if name not in running]:
            if used_bytes <= budget_bytes and len(self._slots) <= num_after:
                break
            used_bytes -= self._slots.pop(victim).num_bytes
        shape = (spec.num_layers, 2, spec.num_kv_heads, capacity, spec.head_dim)
        slot = _Slot(torch.empty(shape, dtype=self._model.dtype, device=self._device))
        if old is not None:
            slot.kv[:, :, :, : old.length] = old.kv[:, :, :, : old.length]
            slot.length = old.length
        self._slots[request_id] = slot
        return slot

    def _causal_mask(self, start: int, stop: int) -> Tensor:
        """[stop - start, stop]: -inf where a key stands after its query, else 0."""
        shape = (stop - start, stop)
        barred = torch.full(shape, -torch.inf, dtype=self._model.dtype, device=self._device)
        return barred.triu_(start + 1)

    def _load(self, slot: _Slot, item: BatchItem) -> None:
        """Copy the pages of [0, item.start) into the slot: a radix hit, KV that came over a link, or a
        slot that gave way."""
        at = self._on_device(self._pool_index(item.pages, 0, item.start))
        slot.kv[:, :, :, : item.start] = self._pool.index_select(2, at).transpose(2, 3)
        slot.length = item.start

    def _sample(self, items: Sequence[BatchItem], spans: Sequence[_Span], hidden: Tensor) -> list[int | None]:
        sampled = [i for i, item in enumerate(items) if item.is_sampled]
        tokens: list[int | None] = [None] * len(items)
        if sampled:
            last_rows = self._on_device(np.array([spans[i].row_stop - 1 for i in sampled]))
            logits = self._model.logits(hidden[last_rows]).cpu().numpy()
            drawn = sample_batch(
                logits,
                [items[i].temperature for i in sampled],
                [items[i].seed for i in sampled],
                [spans[i].stop for i in sampled],
            )
            for i, token in zip(sampled, drawn, strict=True):
                tokens[i] = token
        return tokens

    def _pool_index(self, pages: Sequence[int], start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where positions [start, stop) lie in the pool. Raises ValueError beyond the page table."""
        if not 0 <= start <= stop <= len(pages) * self._page_size:
            raise ValueError(f"positions [{start}, {stop}) lie outside {len(pages)} pages of {self._page_size}")
        first = start // self._page_size
        last = -(-stop // self._page_size)
        table = np.asarray(pages[first:last], dtype=np.int64) * self._page_size
        at = (table[:, None] + np.arange(self._page_size)).reshape(-1)
        skipped = first * self._page_size
        return at[start - skipped : stop - skipped]

    def _as_rows(self, raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """[layer and k/v, token] of one opaque element each, which numpy copies whole."""
        return raw.view(np.dtype((np.void, self._row_bytes)))[..., 0]

    def _on_device(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
