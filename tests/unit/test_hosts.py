"""Hosts of namespaces: the commands that make them, what is known of stale ones, and ranks on
loopback; with root, real ones too.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError
from dlperf.microbench.hosts import namespaces
from dlperf.microbench.hosts.__main__ import main
from dlperf.microbench.hosts.namespaces import Unavailable, hosts, script
from dlperf.microbench.hosts.ranks import RankFailed, loopback_places, places_of, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0


@functools.cache
def can_make_hosts() -> bool:
    try:
        with hosts(2, "1gbit"):
            return True
    except Unavailable:
        return False


namespaces_needed = pytest.mark.skipif(
    "not can_make_hosts()", reason="network namespaces cannot be made here"
)


def namespaces_of(process: int) -> set[int]:
    """The children of a process that are in another network namespace than this one."""
    found = set()
    for path in Path("/proc").iterdir():
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process and os.readlink(path / "ns/net") != os.readlink(
                "/proc/self/ns/net"
            ):
                found.add(int(path.name))
        except (OSError, IndexError, ValueError):  # no process, or one that has just ended
            continue
    return found


def is_gone(process: int) -> bool:
    return (
        not Path(f"/proc/{process}").exists()
        or "Z" in Path(f"/proc/{process}/stat").read_text().split()[2]
    )


def wait_until(true: object, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


# -- without root ----------------------------------------------------------------------------------


def test_every_host_has_a_bucket_in_both_directions() -> None:
    lines = list(script(7, [11, 12, 13], "300mbit"))
    buckets = [line for line in lines if "tc" in line]
    assert len(buckets) == 6
    assert all(
        line[-7:] == ("tbf", "rate", "300000000bit", "burst", "131072b", "latency", "200ms")
        for line in buckets
    )
    assert {line[line.index("dev") + 1] for line in buckets} == {"eth0", "port0", "port1", "port2"}
    # a millisecond of 8 Gbit/s is a megabyte
    assert any("1000000b" in line for line in script(7, [11, 12], "8gbit"))
    assert not [line for line in script(7, [11, 12], None) if "tc" in line]
    # nothing is made outside of the namespaces: every line enters one
    assert all(
        line[:2] == ("nsenter", "--target") and line[2] in ("7", "11", "12", "13") for line in lines
    )


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(Unavailable, match="need root"), hosts(2, None):
        pass
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--ranks", "2", "true"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (
        capsys.readouterr().err
        == "dlperf.microbench.hosts: error: no hosts can be made here: network namespaces need"
        " root\n"
    )


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert namespaces.why_unavailable().startswith("tc is not there")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast", "true"], "--rate"),
        ([], "names no command"),
        (["--ranks", "0", "true"], "--ranks"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_hosts_without_number() -> None:
    with pytest.raises(DlperfError, match="1 to 200"), hosts(0, None):
        pass


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.mark.network
@pytest.mark.process
def test_ranks_find_their_number(tmp_path: Path) -> None:
    run_ranks(
        loopback_places(3),
        shell(
            f'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR on $GLOO_SOCKET_IFNAME" > {tmp_path}/$RANK'
        ),
        limit_s=PATIENCE_S,
    )
    assert [(tmp_path / str(rank)).read_text().split()[:3] for rank in range(3)] == [
        [str(rank), "of", "3"] for rank in range(3)
    ]
    assert (tmp_path / "0").read_text().split()[4] == "127.0.0.1"


@pytest.mark.network
@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            (
                "[ $RANK = 0 ] && exec sleep 60; echo 'error: no such weather' >&2; echo bye >&2;"
                " exit 3"
            ),
            "rank 1 of 2 ended with status 3: error: no such weather",
        ),
        ("[ $RANK = 0 ] && { sleep 0.3; exit 1; }; kill -9 $$", "rank 1 of 2 was ended by SIGKILL"),
        ("[ $RANK = 1 ] && exec sleep 60; exit 0", "rank 1 of 2 did not end within 1 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_others(script: str, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(loopback_places(2), shell(script), limit_s=1.0)
    assert str(failed.value) == words
    assert time.monotonic() - begin < PATIENCE_S


@pytest.mark.network
@pytest.mark.process
def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_ranks(
            loopback_places(2), shell(f"sleep 60 & echo $! > {tmp_path}/$RANK; wait"), limit_s=1.0
        )
    for rank in (0, 1):
        child = int((tmp_path / str(rank)).read_text())
        wait_until(functools.partial(is_gone, child), "a child lives")


# -- with root -------------------------------------------------------------------------------------


@pytest.mark.process
@namespaces_needed
def test_hosts_are_apart_and_removed(tmp_path: Path) -> None:
    with places_of(2, "100mbit", on_loopback=False) as indices:
        run_ranks(
            indices,
            shell(f"(hostname; tc qdisc show dev eth0; ip -o link) > {tmp_path}/$RANK"),
            limit_s=PATIENCE_S,
        )
        assert len(namespaces_of(os.getpid())) == 3  # two hosts and their switch
    assert not namespaces_of(os.getpid())
    for rank in (0, 1):
        host, *rest = (tmp_path / str(rank)).read_text().splitlines()
        assert host == f"host{rank}"
        assert "rate 100Mbit" in rest[0]
        assert [
            line.split(":")[1].strip().split("@")[0]
            for line in rest[1:]
            if "LOOPBACK" in line or "eth0" in line
        ] == ["lo", "eth0"]


@pytest.mark.process
@namespaces_needed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_go_with_the_process_that_made_them(number: signal.Signals, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/$RANK; exec sleep 60"
    command = [sys.executable, "-m", "dlperf.microbench.hosts", "--ranks", "2", *shell(script)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(
            lambda: all(
                (tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text()
                for rank in (0, 1)
            ),
            "the ranks do not start",
        )
        held = namespaces_of(process.pid)
        assert len(held) >= 3
        process.send_signal(number)
        process.wait(PATIENCE_S)
    for holder in held:
        wait_until(functools.partial(is_gone, holder), "namespaces are left")
    for rank in (0, 1):
        own = int((tmp_path / str(rank)).read_text())
        wait_until(functools.partial(is_gone, own), "a rank is left")


@pytest.mark.process
@namespaces_needed
def test_a_failure_while_they_are_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(switch: int, holders: Sequence[int], rate: str | None) -> Iterator[tuple[str, ...]]:
        yield from script(switch, holders, rate)
        yield "nsenter", "--target", str(switch), "--net", "--uts", "ip", "link", "set", "nothing"

    monkeypatch.setattr(namespaces, "script", odd)
    with pytest.raises(Unavailable, match="nothing"), hosts(2, None):
        pass
    assert not namespaces_of(os.getpid())
