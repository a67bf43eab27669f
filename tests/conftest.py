"""Settings for all tests."""
from __future__ import annotations

import os

from hypothesis import settings

# In continuous integration the same examples every time: a rare one found at random belongs to whoever can look into it.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
