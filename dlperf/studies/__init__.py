"""How right predictions are: accuracy studies, the self-test, the papers' tables and kernels."""
