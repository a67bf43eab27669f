"""Python processes that begin where torch is imported already, which takes most of a short one.

``run([sys.executable, "-c", code])``, ``run([sys.executable, "-m", module, ...])`` and
``run([sys.executable, script, ...])`` do what `subprocess.run` does with captured output. A process
of this module imports torch once and forks for each call. Everything of dlperf is imported anew.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_servers: dict[tuple[str | None, int], subprocess.Popen[str]] = {}


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The end of a Python process, with what it wrote.

    Raises subprocess.TimeoutExpired.
    """
    assert command[0] == sys.executable
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {
            "arguments": list(command[1:]),
            "cwd": str(cwd),
            "env": dict(env),
            "streams": [str(out), str(err)],
            "timeout_s": timeout,
        }
        server = _server(env.get("OMP_NUM_THREADS"))
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = json.loads(server.stdout.readline())
        streams = [path.read_text(encoding="utf-8") for path in (out, err)]
        if status is None:
            raise subprocess.TimeoutExpired(command, timeout, *streams)
        return subprocess.CompletedProcess(command, status, *streams)


def _server(omp_threads: str | None) -> subprocess.Popen[str]:
    """The process that forks, for a number of threads that OpenMP reads when torch is loaded."""
    key = omp_threads, os.getpid()
    if key not in _servers:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env.pop("OMP_NUM_THREADS", None)
        _servers[key] = server = subprocess.Popen(
            [sys.executable, __file__],
            env=env if omp_threads is None else {**env, "OMP_NUM_THREADS": omp_threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdin is not None
        atexit.register(server.stdin.close)  # which ends it
    return _servers[key]


def _serve() -> None:
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.utils.data  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if child := os.fork():
            print(json.dumps(_status(child, asked["timeout_s"])), file=answers, flush=True)
        else:
            answers.close()
            os._exit(_child(asked))


def _status(child: int, timeout_s: float) -> int | None:
    """How the process ended, as subprocess says it; None if it was killed after the timeout."""
    end = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)


def _child(asked: dict[str, Any]) -> int:
    """Run what was asked in the place of this program; the exit status."""
    for number, name in enumerate(("/dev/null", *asked["streams"])):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND * (number > 0), 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    flag, *arguments = asked["arguments"]
    try:
        status = _ended(lambda: _run(flag, arguments))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return status


def _run(flag: str, arguments: list[str]) -> None:
    sys.path[0] = ""
    if flag == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = ModuleType("__main__")
    if flag == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = [flag, *arguments], str(Path(flag).resolve().parent)
        main.__file__ = flag
        exec(compile(Path(flag).read_bytes(), flag, "exec"), vars(main))


def _ended(program: Any) -> int:
    try:
        program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
