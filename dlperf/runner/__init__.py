"""Wraps a training script or loop: watches its steps, reports them, tells how long it takes."""
