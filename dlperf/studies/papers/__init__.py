"""Tables of published papers, recomputed."""
