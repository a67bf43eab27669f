"""Run a script or a module as ``__main__``, as ``python script.py`` and ``python -m module`` do.
Knows nothing of torch.
"""

from __future__ import annotations

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

_RUNNERS = (
    str(Path(__file__).resolve().parent) + os.sep,
    str(Path(patching.__file__).parents[1] / "profiler" / "probe.py"),
    patching.__file__,
    "<frozen runpy>",
    runpy.__file__,
)
"""Where frames of dlperf under a script come from: this folder, the wrappers, the layer probe."""
INTERRUPTED = 130


def check_script(command: Sequence[str], module: bool) -> None:
    """Raises DlperfError where there is no script to run. A module is looked for only when it is
    run.
    """
    if not command:
        raise DlperfError("run: no script is named; dlperf run SCRIPT.py [ARGUMENTS]")
    if not module and not os.path.isfile(command[0]):
        what = "is a folder" if os.path.isdir(command[0]) else "does not exist"
        raise DlperfError(f"{command[0]}: {what}; name a Python script, or a module with -m")


def run_as_main(command: Sequence[str], module: bool) -> int:
    """Run the script (`module`: the module) ``command[0]`` with the rest as its arguments; gives
    the exit status that Python would.

    ``sys.modules["__main__"]``, ``sys.argv`` and ``sys.path[0]`` are the script's from here on, so
    that classes defined in it can be pickled and worker processes find them. An exception that
    nobody caught is printed with the script's frames alone, through ``sys.excepthook``.
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
        return _exit_status(error)
    except BaseException as error:
        error.__traceback__ = own_frames_removed(error.__traceback__)
        _clean_chain(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def own_frames_removed(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of dlperf and of what started the script."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    kept = None
    for link in reversed(frames):
        if not link.tb_frame.f_code.co_filename.startswith(_RUNNERS):
            kept = types.TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def _clean_chain(error: BaseException) -> None:
    seen = {id(error)}
    following = error.__cause__ or error.__context__
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        following.__traceback__ = own_frames_removed(following.__traceback__)
        following = following.__cause__ or following.__context__
