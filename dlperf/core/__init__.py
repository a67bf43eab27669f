"""Data: machine, trace, measurement, cluster, communication; files, units, errors, host."""
