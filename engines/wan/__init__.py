"""The line between sites: one model (link.py), two bodies: timed delays on virtual time, and a shaping TCP proxy (gateway.py)."""
