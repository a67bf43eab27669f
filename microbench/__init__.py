"""Measures one machine and writes what it finds to a machine file."""
