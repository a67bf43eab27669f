"""Where rank 0 listens for the other ranks' findings when no launcher has a store for them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore

from dlperf.runner import rendezvous
from dlperf.runner.rendezvous import Rendezvous, World

pytestmark = pytest.mark.network


def listeners(port: int) -> list[str]:
    """Addresses, as /proc has them, at which something listens on this port."""
    found = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            address, number = row.split()[1].split(":")
            if row.split()[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads listeners in /proc")
@pytest.mark.parametrize("master", [None, "", "127.0.0.1", "localhost"])
def test_ranks_of_one_computer_meet_on_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], master: str | None
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    theirs = HashStore()
    first, second = Rendezvous(World(0, 2)), Rendezvous(World(1, 2))
    first._agree(theirs)
    second._agree(theirs)
    assert first._address == second._address
    assert first._address is not None
    assert listeners(first._address[1]) == ["0100007F"]
    second.give({"rank": 1})
    assert first.collect(10.0) == {1: {"rank": 1}}
    assert capsys.readouterr().err == ""


def test_a_wider_listener_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "_is_loopback", lambda address: False)
    rank = Rendezvous(World(0, 2))
    rank._agree(HashStore())
    assert rank._address is not None
    where = f"127.0.0.1:{rank._address[1]}"
    assert capsys.readouterr().err.startswith(f"dlperf: listens on {where} until the run ends")


def test_a_host_that_is_not_this_one() -> None:
    with rendezvous._listen("192.0.2.1") as listener:  # an address for documentation, nobody's
        assert listener.getsockname()[0] == "0.0.0.0"
        assert not rendezvous._is_loopback("0.0.0.0")
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5):
            pass
