"""Settings for all tests."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# In continuous integration the same examples every time: a rare one found at random belongs to
# whoever can look into it. Nowhere a deadline: how long an example takes says how busy the machine
# is.
settings.register_profile("own", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "own")

# The machine file of whoever runs the tests is not theirs.
_machine_folder = tempfile.TemporaryDirectory(prefix="dlperf-tests-")
os.environ["DLPERF_MACHINE"] = os.path.join(_machine_folder.name, "machine.json")

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test without a marker of cost as quick."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("process", "network", "slow")):
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def _coverage_is_no_debugger() -> Iterator[None]:
    """Where coverage keeps the counter of instructions out, recordings do not note it."""
    tracer = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        if tracer is not None:
            seen = property(
                lambda own: vars(own).get("seen", False) and sys.gettrace() is not tracer,
                lambda own, value: vars(own).update(seen=value),
            )
            patch.setattr(
                "dlperf.core.instructions.InstructionCounter.is_kept_out", seen, raising=False
            )
        yield


def pytest_collection_finish() -> None:
    """What lives by now lives on: a garbage collection then takes milliseconds, and a measured step
    collects before it starts.
    """
    gc.freeze()


# -- a test without a marker starts no process and uses no network ---------------------------------

_PROCESS_EVENTS = {
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "dlperf_tests.start",
}
_NETWORK_EVENTS = {"socket.bind", "socket.connect"}
_seen: set[str] = set()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _PROCESS_EVENTS:
        _seen.add("process")
    elif event in _NETWORK_EVENTS and isinstance(arguments[1], tuple):  # else a socket in a folder
        _seen.add("network")


sys.addaudithook(_audit)
_start = multiprocessing.process.BaseProcess.start


def _audited_start(process: multiprocessing.process.BaseProcess) -> None:
    """Python reports no event where multiprocessing spawns."""
    sys.audit("dlperf_tests.start")
    _start(process)


multiprocessing.process.BaseProcess.start = _audited_start  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what earlier tests did."""
    _seen.clear()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that starts a process or uses a network and does not say so by its marker."""
    lacking = sorted(_seen - {marker.name for marker in item.iter_markers()})
    if lacking:
        pytest.fail(
            f"needs a marker: {', '.join(f'@pytest.mark.{name}' for name in lacking)}",
            pytrace=False,
        )
