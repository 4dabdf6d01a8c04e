"""p-md or p-rld-md, from what MD lacks, the line's load and RLD's. A pure function of what the router knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engines.pdd.config import DeciderSpec
from engines.wan.link import LinkSpec

Pipeline = Literal["p-md", "p-rld-md"]


@dataclass(slots=True)
class LineView:
    """The line as the router sees it: transfers that were begun and whose MD is not ready. Sizes in bytes."""

    spec: LinkSpec
    outstanding: dict[str, int] = field(default_factory=dict)

    def expected_transfer_s(self, nbytes: int) -> float:
        """When `nbytes` more would have arrived: the queue for a lane, then the bytes at the flow's fair share, and
        half a round trip.

        All lanes taken means that bytes worth the shortest waiting transfer must leave first: outstanding / rate is
        an upper bound of that wait, and the bound is used.
        """
        num_active = len(self.outstanding)
        delay_s = self.spec.rtt_s / 2
        shares = [
            rate
            for rate in (
                self.spec.flow_rate_bps,
                None if self.spec.rate_bps is None else self.spec.rate_bps / (min(num_active, self.spec.lanes - 1) + 1),
            )
            if rate is not None
        ]
        if shares:
            delay_s += nbytes * 8 / min(shares)
        if num_active >= self.spec.lanes and self.spec.rate_bps is not None:
            delay_s += sum(self.outstanding.values()) * 8 / self.spec.rate_bps
        return delay_s


def decide(spec: DeciderSpec, line: LineView, uncached_bytes: int, num_relayed: int) -> Pipeline:
    """Relay when MD would hold the prompt later than the threshold after P and an RLD with fewer than
    `relay_max_seqs` requests exists (`num_relayed`: the least loaded one's). Never waits for a full RLD."""
    if num_relayed >= spec.relay_max_seqs:
        return "p-md"
    return "p-rld-md" if line.expected_transfer_s(uncached_bytes) > spec.relay_threshold_s else "p-md"
