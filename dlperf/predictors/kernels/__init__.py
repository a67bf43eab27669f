"""Kernel variant and features of every operator, one registered function each."""
