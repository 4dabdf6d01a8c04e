"""Engines: whatever serves a request. This package knows nothing of Hydra and nothing of the harness."""
