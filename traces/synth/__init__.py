"""Generators of synthetic traces: coding agents of January and February (agents.py; figures in months.py)."""

from traces.synth.agents import MAX_SESSION_S, generate
from traces.synth.months import MONTHS, TARGET_BINS, Month

__all__ = ["MAX_SESSION_S", "MONTHS", "TARGET_BINS", "Month", "generate"]
