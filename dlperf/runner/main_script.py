"""Runs a script or module as ``__main__``, like ``python script.py`` and ``python -m module``."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from dlperf.core import patching
from dlperf.core.errors import DlperfError

_OPERATORS = os.path.join("torch", "_ops.py")
_RUNNERS = (
    str(Path(__file__).resolve().parent) + os.sep,
    *(str(Path(patching.__file__).parents[1] / room) + os.sep for room in ("profiler", "recorder")),
    patching.__file__,
    "<frozen runpy>",
    runpy.__file__,
)
"""Where frames of dlperf under a script come from: this folder, the wrappers, the layer probe."""
INTERRUPTED = 130


def check_script(command: Sequence[str], module: bool) -> None:
    """Raise DlperfError where there is no such script or module; of a module in a package, no such
    package.
    """
    if not command:
        raise DlperfError("run: no script is named; dlperf run SCRIPT.py [ARGUMENTS]")
    if not module and not os.path.isfile(command[0]):
        what = "is a folder" if os.path.isdir(command[0]) else "does not exist"
        raise DlperfError(f"{command[0]}: {what}; name a Python script, or a module with -m")
    if module and not _is_importable(command[0].partition(".")[0]):
        raise DlperfError(f"{command[0]}: there is no such module here or in sys.path")


def _is_importable(name: str) -> bool:
    """Whether there is a module of this name, of no package, in this folder or installed."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # Python says why
        return True
    finally:
        del sys.path[0]


def run_as_main(command: Sequence[str], module: bool) -> int:
    """Run the script (`module`: the module) ``command[0]``; returns Python's exit status.

    The rest of `command` are its arguments. ``sys.modules["__main__"]``, ``sys.argv`` and
    ``sys.path[0]`` are the script's from here on: its classes can be pickled, and worker processes
    find them. An uncaught exception is printed through ``sys.excepthook``, without dlperf's frames.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if module:
        sys.path[:1] = [os.getcwd()]
        sys.argv = ["-m", *command[1:]]
        return _status(lambda: runpy._run_module_as_main(command[0]))  # type: ignore[attr-defined]
    path = command[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [os.path.dirname(os.path.realpath(path))]
    sys.argv = list(command)
    path = os.path.abspath(path)
    main.__file__ = path
    main.__spec__ = None
    main.__dict__["__cached__"] = None
    main.__loader__ = SourceFileLoader("__main__", path)

    def run() -> None:
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return _status(run)


def _status(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        chain: dict[int, BaseException] = {}
        link: BaseException | None = error
        while link is not None and id(link) not in chain:
            chain[id(link)] = link
            link.__traceback__ = own_frames_removed(link.__traceback__)
            link = link.__cause__ or link.__context__
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def own_frames_removed(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of dlperf, of what it calls an operator with, and runpy."""
    kept, links, is_own = None, [], False
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        is_own = name.startswith(_RUNNERS) or (is_own and name.endswith(_OPERATORS))
        links += [] if is_own else [traceback]
        traceback = traceback.tb_next
    for link in reversed(links):
        kept = types.TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept
