"""Traces: what was asked, and when. This package imports nothing of ours."""
