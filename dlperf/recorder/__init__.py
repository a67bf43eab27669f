"""One step under fake tensors becomes a trace; targets name what is recorded."""
