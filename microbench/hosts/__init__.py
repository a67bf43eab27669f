"""Several hosts on one computer: a command once for each rank, every rank on a host of its own
behind a link of a given rate.

``python -m dlperf.microbench.hosts --rate 1gbit --ranks 2 COMMAND ...`` from a shell;
:func:`dlperf.microbench.hosts.namespaces.hosts` and
:func:`dlperf.microbench.hosts.ranks.run_ranks` from Python.
"""
