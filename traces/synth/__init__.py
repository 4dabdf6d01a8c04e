"""Generators of synthetic traces: coding agents of January and February (agents.py)."""

from traces.synth.agents import MONTHS, Month, generate

__all__ = ["MONTHS", "Month", "generate"]
