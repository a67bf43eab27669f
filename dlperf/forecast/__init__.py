"""Steps become epochs: data loaders, worker processes, what a script does around its steps."""
