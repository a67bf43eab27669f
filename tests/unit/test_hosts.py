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
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError
from dlperf.microbench.hosts import namespaces
from dlperf.microbench.hosts.__main__ import main
from dlperf.microbench.hosts.namespaces import FOLDER, Hosts, Unavailable, stale_sets
from dlperf.microbench.hosts.ranks import RankFailed, loopback_places, places_of, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0


@functools.cache
def can_make_hosts() -> bool:
    try:
        with Hosts(2, "1gbit"):
            return True
    except Unavailable:
        return False


namespaces_needed = pytest.mark.skipif(
    "not can_make_hosts()", reason="network namespaces cannot be made here"
)


def names_by(process: int) -> set[str]:
    """Names in the folder that a process made; another test may make its own beside this one."""
    return (
        {
            path.name
            for path in FOLDER.iterdir()
            if path.name.startswith("dlperf-") and f"-{process}-" in path.name
        }
        if FOLDER.exists()
        else set()
    )


def wait_until(true: object, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


# -- without root ----------------------------------------------------------------------------------


def test_every_host_has_a_bucket_in_both_directions() -> None:
    lines = list(Hosts(3, "300mbit").script())
    buckets = [line for line in lines if line[0] == "tc"]
    assert len(buckets) == 6
    assert all(
        line[-7:] == ("tbf", "rate", "300000000bit", "burst", "131072b", "latency", "200ms")
        for line in buckets
    )
    assert {line[line.index("dev") + 1] for line in buckets} == {"eth0", "port0", "port1", "port2"}
    # a millisecond of 8 Gbit/s is a megabyte
    assert any("1000000b" in line for line in Hosts(2, "8gbit").script())
    assert not [line for line in Hosts(2, None).script() if line[0] == "tc"]
    # nothing is made outside of the namespaces: every line adds one or names the one it works in
    assert all(line[1] == "-n" or line[1:3] == ("netns", "add") for line in lines)


def test_names_of_other_processes_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    begin = namespaces._begin_of(os.getpid())
    gone = (  # this number, but another process that had it before
        f"dlperf-{here}-{os.getpid()}-{int(begin) + 1}-0-0"
    )
    for name in (
        gone,
        f"dlperf-{here}-{os.getpid()}-{begin}-0-0",
        f"dlperf-{here + 1}-{os.getpid()}-1-0-0",
        "dlperf-mine",
        "blue",
    ):
        (tmp_path / name).touch()
    assert stale_sets(tmp_path) == {os.getpid(): [gone]}
    called = []
    monkeypatch.setattr(namespaces, "_call", lambda *words: called.append(words))
    said: list[str] = []
    namespaces.remove_stale(said.append, tmp_path)
    assert called == [("ip", "netns", "del", gone)]
    assert gone in said[0]
    assert stale_sets(tmp_path / "nowhere") == {}


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(Unavailable, match="need root"), Hosts(2, None):
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
    with pytest.raises(DlperfError, match="1 to 200"):
        Hosts(0, None)


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
        wait_until(
            lambda child=child: (
                not Path(f"/proc/{child}").exists()
                or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]
            ),
            "a child lives",
        )


# -- with root -------------------------------------------------------------------------------------


@pytest.mark.process
@namespaces_needed
def test_hosts_are_apart_and_removed(tmp_path: Path) -> None:
    with places_of(2, "100mbit", on_loopback=False) as places:
        run_ranks(
            places,
            shell(f"(hostname; tc qdisc show dev eth0; ip -o link) > {tmp_path}/$RANK"),
            limit_s=PATIENCE_S,
        )
        assert len(names_by(os.getpid())) == 3  # two hosts and their switch
    assert not names_by(os.getpid())
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
        assert names_by(process.pid)
        process.send_signal(number)
        process.wait(PATIENCE_S)
    wait_until(lambda: not names_by(process.pid), "namespaces are left")
    for rank in (0, 1):
        own = int((tmp_path / str(rank)).read_text())
        wait_until(
            lambda own=own: (
                not Path(f"/proc/{own}").exists()
                or "Z" in Path(f"/proc/{own}/stat").read_text().split()[2]
            ),
            "a rank is left",
        )


@pytest.mark.process
@namespaces_needed
def test_a_failure_while_they_are_made_leaves_nothing() -> None:
    class Odd(Hosts):
        def script(self):  # type: ignore[no-untyped-def]
            yield from super().script()
            yield "ip", "-n", self.switch, "link", "set", "nothing", "up"

    with pytest.raises(Unavailable, match="nothing"), Odd(2, None):
        pass
    assert not names_by(os.getpid())
