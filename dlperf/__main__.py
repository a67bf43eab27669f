"""``python -m dlperf``."""

from __future__ import annotations

import sys

from dlperf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
