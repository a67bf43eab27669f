"""dlperf's files: whole or not at all, and never over what somebody else wrote."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.files import (
    MACHINE,
    MEASUREMENT,
    TRACE,
    check_writable,
    read_json,
    schema_of,
    write_json,
    write_text,
)

OURS = '{"schema": "dlperf.machine", "schema_version": 1}'


def no_space(*_args: Any, **_kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("function", ["os.fsync", "os.replace", "tempfile.mkstemp", "os.fdopen"])
def test_the_old_file_stands_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "m.json"
    path.write_text("old")
    monkeypatch.setattr(function, no_space)
    with pytest.raises(WorkFailed, match=r"m\.json: No space left on device; nothing was written"):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        write = staticmethod(no_space)

    path = tmp_path / "m.json"
    path.write_text("old")
    monkeypatch.setattr("os.fdopen", lambda *args, **kwargs: Full(real(*args, **kwargs)))
    with pytest.raises(WorkFailed, match="No space left"):
        write_json(path, {"a": 1})
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    path.write_text("old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "m.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_dev_full() -> None:
    with pytest.raises(WorkFailed, match="/dev/full: No space left on device; nothing was written"):
        write_text("/dev/full", "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null here")
def test_a_device_is_written_not_replaced() -> None:
    check_writable("/dev/null")
    write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_dash_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    check_writable("-")
    write_text("-", "x")
    write_text("-", "y\n")
    assert capsys.readouterr().out == "x\ny\n"


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_a_file_gets_the_users_mode(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "m.json", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m.json").stat().st_mode) == 0o640


def test_what_others_wrote_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(
        ("notes", "[1, 2]", '{"schema": "other"}', '{"a": 1}', '{"schema": 3}', OURS[:-5])
    ):
        path = tmp_path / f"{number}"
        path.write_text(text)
        with pytest.raises(
            DlperfError, match="is no whole file of dlperf; choose another name, or give --force"
        ):
            check_writable(path)
        check_writable(path, force=True)
        assert path.read_text() == text
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    with pytest.raises(DlperfError, match="no whole file of dlperf"):
        check_writable(tmp_path / "bytes")


def test_ours_new_and_empty_ones_are_welcome(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text(OURS)
    (tmp_path / "empty").touch()
    for name in ("ours", "empty", "new"):
        check_writable(tmp_path / name, schema=MACHINE)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("schema", [MACHINE, MEASUREMENT, TRACE])
def test_what_lasts_is_replaced_by_its_like_alone(tmp_path: Path, schema: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"schema": schema, "schema_version": 1}))
    check_writable(path, schema=schema)
    check_writable(path, force=True)
    for other in {MACHINE, MEASUREMENT, TRACE, ""} - {schema}:
        with pytest.raises(DlperfError, match=r"is a .*; choose another name, or give --force"):
            check_writable(path, schema=other)
    path.write_text('{"schema": "dlperf.prediction", "schema_version": 1}')
    check_writable(path, schema=schema)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DlperfError, match="is a folder; name a file"):
        check_writable(tmp_path)
    with pytest.raises(DlperfError, match="is a folder"):
        check_writable(tmp_path, force=True)
    with pytest.raises(DlperfError, match="its folder does not exist; make it first"):
        check_writable(tmp_path / "none" / "m.json")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DlperfError, match="cannot be written; choose another place"):
        check_writable(tmp_path / "m.json")


def test_schemas(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text, schema in (
        (OURS, "dlperf.machine"),
        ('{"schema": "mine"}', None),
        ("{", None),
        ("[]", None),
    ):
        path.write_text(text)
        assert schema_of(path) == schema
    assert schema_of(tmp_path / "none") is None
    assert schema_of(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"schema": "dlperf.machine", "schema_version": 4}',
            "schema_version is 4, this dlperf reads up to 2; update dlperf or make the file again",
        ),
        (
            '{"schema": "dlperf.machine", "schema_version": 1}',
            "schema_version is 1, this dlperf writes 2; make the file again",
        ),
        ('{"schema": "dlperf.machine"}', "schema_version is None; expected a whole number up to 2"),
        (
            '{"schema": "dlperf.machine", "schema_version": 2.0}',
            "schema_version is 2.0; expected a whole number",
        ),
        (
            '{"schema": "dlperf.trace", "schema_version": 2}',
            r"is no dlperf.machine file \(its schema is 'dlperf.trace'\)",
        ),
        ("[1]", r"is no dlperf.machine file \(it names no schema\)"),
        ("{\n\n", r"is truncated or no JSON \(line 3: .*\); make it again"),
    ],
)
def test_reading_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(DlperfError, match=message) as error:
        read_json(path, "dlperf.machine", 2)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_deeply_nested_json_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("[" * 100_000)
    with pytest.raises(DlperfError):
        read_json(path, "dlperf.machine", 1)
    assert schema_of(path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is no dlperf.machine file (nested too deeply)"),
        (
            '{"schema": "dlperf.machine", "schema_version": 1' + "0" * 5000 + "}",
            "is no dlperf.machine file (a number is too long); make it again",
        ),
        (
            '{"schema": "\\ud800\\u001b[2J"}',
            r"is no dlperf.machine file (its schema is '\ud800\x1b[2J')",
        ),
        (
            '{"schema": "dlperf.machine", "schema_version": 1e999}',
            "schema_version is inf; expected a whole number up to 1",
        ),
        (
            '{"schema": "dlperf.machine", "schema_version": 1' + "0" * 4000 + "}",
            f"schema_version is 1{'0' * 59}, this dlperf reads up to 1",
        ),
    ],
)
def test_what_cannot_be_read_is_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(DlperfError) as error:
        read_json(tmp_path / "m.json", "dlperf.machine", 1)
    assert str(error.value).startswith(f"{tmp_path / 'm.json'}: {message}")
    assert len(str(error.value)) < len(str(tmp_path)) + 200


LONG = "m" * 250 + ".json"


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    path = tmp_path / LONG
    check_writable(path)
    write_json(path, {"schema": "dlperf.machine", "schema_version": 1})
    assert [found.name for found in tmp_path.iterdir()] == [LONG]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (LONG + "x", "File name too long"),
        ("n/" * 2100 + "m.json", "File name too long"),
        ("é" * 128, "File name too long"),
        ("a\nb.json", "control character"),
        ("a\0b.json", "control character"),
        ("a\x1b[2Jb.json", "control character"),
    ],
    ids=["name", "path", "bytes", "line break", "NUL", "escape"],
)
def test_a_name_that_no_file_can_have_is_refused_early(tmp_path: Path, name: str, why: str) -> None:
    from dlperf.report.writing import check_folder

    for check in (check_writable, check_folder):
        with pytest.raises(DlperfError, match=why) as refused:
            check(tmp_path / name)
        assert "choose another name" in str(refused.value)
        assert str(refused.value).isprintable()
    assert not list(tmp_path.iterdir())
