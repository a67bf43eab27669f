"""Cardwell's seven parallel algorithms (2019, section 2.5) on torch.distributed, to measure the
roofline with communication on the ranks at hand.

``torchrun --nproc-per-node 2 -m dlperf.studies.cardwell_kernels -o DIR``:
`algorithms.py` are the algorithms and the wire that they talk through, `study.py` measures the
three rates and times everything, `findings.py` holds it as data, compares the rooflines and writes
it.
"""
