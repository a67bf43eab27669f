"""A trace and a machine become priced items: kernel cost models, framework overhead, page faults."""
