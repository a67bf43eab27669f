"""malloc simulated on a trace: page faults and peak memory."""
