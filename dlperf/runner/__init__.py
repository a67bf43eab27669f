"""Wraps a training script or loop: watches its steps, reports on them, shows an ETA."""
