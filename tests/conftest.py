"""Settings for all tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# In continuous integration the same examples every time: a rare one found at random belongs to
# whoever can look into it. Nowhere a deadline: how long an example takes says how busy the machine
# is.
settings.register_profile("own", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "own")

# The search for doctests would import every conftest.py under the same name.
collect_ignore_glob = ["*conftest.py"]

# nohup and a background job of a shell ignore Ctrl-C, and children inherit that; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--renew", action="store_true", help="write frozen results and the output of examples anew"
    )


@pytest.fixture(scope="session")
def renew(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--renew", default=False))
