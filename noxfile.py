"""The quick tests with the oldest and the newest supported Python, torch and other packages: `nox`.

`nox -l` lists the sessions, `nox -s 'tests-3.10(oldest)'` runs one of them; what follows ``--``
goes to pytest.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

PYTHONS = ("3.10", "3.13")


def lower_bounds() -> list[str]:
    """The oldest release series of each dependency that pyproject.toml allows."""
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return [f"{name}=={least}.*" for name, least in re.findall(r'"(\w+)>=([\d.]+)', listed)]


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["oldest", "newest"], ids=["oldest", "newest"])
def tests(session: nox.Session, versions: str) -> None:
    """Run the quick tests. Python's newest release takes the oldest torch alone: the oldest numpy
    has no build for it.
    """
    pins = lower_bounds() if versions == "oldest" else []
    if session.python != PYTHONS[0]:
        pins = [pin for pin in pins if pin.startswith("torch==")]
    session.install("--editable", ".[test]", *pins)
    session.run("python", "-c", "import numpy, torch; print(torch.__version__, numpy.__version__)")
    session.run(
        *("python", "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"),
        *("-m", "quick", *session.posargs),
    )
