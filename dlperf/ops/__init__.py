"""FLOPs and bytes of operators, and the measured roofs over them."""
