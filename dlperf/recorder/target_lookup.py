"""Look-up of a target's object: in a file, a module, or the networks of a checkout."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dlperf.core.errors import DlperfError, describe
from dlperf.core.files import kind_of, schema_of

SHORT_NAMES = {
    "mlp": "mlp",
    "lenet": "lenet",
    "cnn-small": "cnn_small",
    "cnn-medium": "cnn_medium",
    "cnn-large": "cnn_large",
    "fc4096": "fc4096",
    "dlrm-bottom": "dlrm_bottom",
    "dlrm-top": "dlrm_top",
}
"""Short names of networks, and their builders in ``networks.targets``."""
_FORMS = "give FILE.py:CALLABLE, PACKAGE.MODULE:CALLABLE or a trace file"


def find_object(spec: str) -> Any:
    """The object that a spec names.

    Raises DlperfError, with the way out, where there is none.
    """
    if spec in SHORT_NAMES:
        folders = _checkout()
        if not folders:
            raise DlperfError(
                f"target {spec}: is a network of a dlperf checkout, and there is none here; run it"
                f" there, or {_FORMS}"
            )
        with _importable(spec, *folders):
            networks = importlib.import_module("networks.targets")
        return _attribute(spec, networks, SHORT_NAMES[spec])
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        near = difflib.get_close_matches(spec, SHORT_NAMES, 1)
        schema = schema_of(spec)
        if schema is not None and schema != "dlperf.trace":
            raise DlperfError(f"target {spec}: is {kind_of(schema)}, no target; {_FORMS}")
        if spec.endswith(".py") or os.path.isfile(spec):
            raise DlperfError(f"target {spec}: names no builder; say which, as in {spec}:build")
        hint = f"did you mean {near[0]}? Or " if near else ""
        raise DlperfError(f"target {spec}: is not known; {hint}{_FORMS}")
    if where.endswith(".py") or os.sep in where:
        module = _import_file(spec, Path(where))
    else:
        module = _import_module(spec, where)
    return _attribute(spec, module, _decoded(name))


def _decoded(name: str) -> str:
    """A name from the command line in UTF-8, the encoding of sources, whatever the locale's."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(name).decode("utf-8")
    return name


def _attribute(spec: str, module: ModuleType, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        names = [
            known
            for known in vars(module)
            if not known.startswith("_") and callable(getattr(module, known, None))
        ]
        near = difflib.get_close_matches(name, names, 3) or names[:8]
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "it defines nothing that can be called"
        )
        where = getattr(module, "__file__", None) or module.__name__
        builder, at, size = name.rpartition("@")
        if at and builder in names and size.isdigit():
            hint = f"give the batch size with --batch-size {size}"
        raise DlperfError(f"target {spec}: {where} has no {name!r}; {hint}") from None


@contextlib.contextmanager
def _importable(spec: str, *folders: Path) -> Iterator[None]:
    """The folders precede the import path; an error of an import becomes one line.

    Builders may import when they are called: afterwards the folders follow the import path.
    """
    before = list(sys.path)
    added = [text for folder in folders if (text := str(folder)) not in sys.path[:1]]
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except DlperfError:
        raise
    except SystemExit as error:
        raise DlperfError(
            f"target {spec}: calls sys.exit({error.code!r}) while it is imported; put its main"
            " program under if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise DlperfError(f"target {spec}: does not import: {describe(error)}") from error
    finally:
        sys.path[:] = before + [text for text in added if text not in before]


def _import_file(spec: str, path: Path) -> ModuleType:
    """Import a file under its stem; under a name of its own where the stem is taken."""
    if not os.path.isfile(path):
        raise DlperfError(
            f"target {spec}: there is no file {path}"
            + ("; it is a folder" if os.path.isdir(path) else f"; {_FORMS}")
        )
    path = path.resolve()
    folder = path.parent
    name = path.stem
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = f"{name}_{hashlib.sha1(os.fsencode(path)).hexdigest()[:12]}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise DlperfError(f"target {spec}: {path.name} is no Python file; {_FORMS}")
    with _importable(spec, Path.cwd(), folder):
        _forget_siblings(folder)
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    return module


def _forget_siblings(folder: Path) -> None:
    """A file imports the files beside it, not another target's files of the same names."""
    for path in folder.iterdir() if folder.is_dir() else ():
        is_package = (path / "__init__.py").is_file()
        stem = path.stem if path.suffix == ".py" else path.name if is_package else ""
        origin = getattr(sys.modules.get(stem), "__file__", None)
        if (
            origin is None
            or folder in Path(origin).resolve().parents
            or stem in (*sys.stdlib_module_names, "dlperf", "torch", "numpy")
            or "site-packages" in origin
        ):
            continue
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{stem}.")]:
            del sys.modules[name]


def _import_module(spec: str, where: str) -> ModuleType:
    if not all(part.isidentifier() for part in where.split(".")):
        raise DlperfError(
            f"target {spec}: {where!r} is neither a file nor a module's name; {_FORMS}"
        )
    with _importable(spec, Path.cwd(), *_checkout()):
        _forget_siblings(Path.cwd())
        return importlib.import_module(where)


def _checkout() -> tuple[Path, ...]:
    """The folder with a checkout's ``networks``, this one or the package's; empty without one."""
    folders = (Path.cwd(), Path(__file__).resolve().parents[2])
    return tuple(folder for folder in folders if (folder / "networks" / "targets.py").is_file())[:1]


def checkout_folder() -> Path:
    """The folder of the checkout. Raises DlperfError where there is none."""
    for folder in _checkout():
        return folder
    raise DlperfError(f"the networks of a dlperf checkout are not here; name targets: {_FORMS}")


def checkout_targets() -> tuple[str, ...]:
    """Every network of the checkout: short names, then ``networks.further:NAME``.

    Raises DlperfError where there is no checkout.
    """
    with _importable("networks.further", checkout_folder()):
        further = importlib.import_module("networks.further")
    return (*SHORT_NAMES, *(f"networks.further:{name}" for name in further.NAMES))
