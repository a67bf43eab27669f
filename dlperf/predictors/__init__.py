"""Priced items of a trace on a machine: kernel cost model, framework overhead, page faults."""
