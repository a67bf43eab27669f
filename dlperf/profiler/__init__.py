"""One step on real tensors becomes a measurement: step profiler, peak memory, loader samples."""
