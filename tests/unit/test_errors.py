"""What user code raises, told with its place and its cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError, Interrupted, telling_what_is_kept
from dlperf.recorder import recording, targets

SOURCES = {
    "import foo_missing": (
        "does not import: ModuleNotFoundError: No module named 'foo_missing' ({file}:1)"
    ),
    "x = 1\n1 / 0": "does not import: ZeroDivisionError: division by zero ({file}:2)",
    "x = 1\ny = (": "does not import: SyntaxError: '(' was never closed ({file}:2)",
    "try:\n    import foo_missing\nexcept ImportError as e:\n    raise RuntimeError('install foo') from e": (
        "does not import: RuntimeError: install foo, caused by"
        " ModuleNotFoundError: No module named 'foo_missing' ({file}:4)"
    ),
    "def net(n):\n    return int('weather')": (
        "its builder raises ValueError: invalid literal for int() with base 10: 'weather'"
        " ({file}:2)"
    ),
    "import json\n\n\ndef net(n):\n    return json.loads('{')": (
        "its builder raises JSONDecodeError: Expecting property name enclosed in double quotes:"
        " line 1 column 2 (char 1) ({file}:5)"
    ),
    "import torch\n\n\nclass N(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x[0])[7, 7]\n\n\ndef net(n):\n    return N(8, 4), (torch.zeros(n, 8),), torch.sum": (
        "the model's forward raises IndexError: too many indices for tensor of dimension 1"
        " ({file}:6)"
    ),
}


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_the_line_of_user_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    path = tmp_path / "mynet.py"
    path.write_text(source + "\n")
    for folder, shown in ((tmp_path, "mynet.py"), (Path("/"), str(path))):
        monkeypatch.chdir(folder)
        if folder == Path("/"):
            shown = str(path).lstrip("/")
        with pytest.raises(DlperfError) as raised:
            recording.record_target(targets.resolve(f"{path}:net", 4))
        assert str(raised.value).endswith(SOURCES[source].format(file=shown))


def test_a_file_that_the_target_imports(tmp_path: Path, dlperf_line: Callable[[str], str]) -> None:
    (tmp_path / "inner_part.py").write_text("\n\nimport foo_missing\n")
    (tmp_path / "outer_part.py").write_text("import inner_part\n")
    line = dlperf_line(f"{tmp_path}/outer_part.py:net")
    assert line.endswith(f"No module named 'foo_missing' ({tmp_path}/inner_part.py:3)")


@pytest.fixture
def dlperf_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    def line(spec: str) -> str:
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        with pytest.raises(DlperfError) as raised:
            targets.resolve(spec)
        return str(raised.value)

    return line


def broken_pipe_after_ctrl_c() -> None:
    """What a pipe to a child says that is closed while Ctrl-C is on its way out."""
    try:
        raise KeyboardInterrupt
    finally:
        raise BrokenPipeError


def a_module_that_was_interrupted() -> None:
    """As a compiled module's import tells of Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except BaseException as error:
        raise ImportError("numpy was not imported") from error


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ended", [ctrl_c, broken_pipe_after_ctrl_c, a_module_that_was_interrupted])
def test_an_interrupt_tells_what_is_kept_whatever_became_of_it(ended: Callable[[], None]) -> None:
    with pytest.raises(Interrupted, match=r"^3 groups$"), telling_what_is_kept(lambda: "3 groups"):
        ended()


def test_what_is_kept_is_told_by_the_one_who_knows_best() -> None:
    with (
        pytest.raises(Interrupted, match=r"^everything$"),
        telling_what_is_kept(lambda: "nothing"),
        telling_what_is_kept(lambda: "everything"),
    ):
        broken_pipe_after_ctrl_c()


def test_another_error_is_no_interrupt() -> None:
    with pytest.raises(BrokenPipeError), telling_what_is_kept(lambda: "nothing"):
        raise BrokenPipeError
