"""Measures the links between the ranks it is started on -> a cluster file: ``torchrun
--nproc-per-node 2 -m dlperf.microbench.network -o cluster.json``.
"""
