"""Explains a step, and compares changes and configurations that would make it faster."""
