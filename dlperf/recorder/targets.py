"""What a command works on: a builder, a module, or a trace file, given by name.

Forms: ``FILE.py:CALLABLE``, ``PACKAGE.MODULE:CALLABLE``, the short names of the ``networks``
package of a checkout, and trace files, which :func:`is_trace_file` tells apart.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dlperf.core.errors import DlperfError, WorkFailed, describe
from dlperf.core.files import kind_of, schema_of

CPU_DEVICES = ("cpu", "meta")
CPU_ONLY = (
    "dlperf records, measures and predicts steps on the CPU, none on an accelerator; "
    "leave the model and its inputs on the CPU (recording allocates no memory there)"
)

_NO_CUDA = ("compiled with cuda", "support for cuda", "no cuda gpus", "nvidia driver")
"""What torch says to a builder that asks for a GPU where there is none."""

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
"""Short name of a network to its builder in ``networks.targets``."""
_FORMS = "give FILE.py:CALLABLE, PACKAGE.MODULE:CALLABLE or a trace file"


@dataclass(frozen=True)
class Built:
    """What a step needs. `inputs` is a tuple of positional or a dict of keyword arguments; `loss`
    and `optimizer` are None for inference.
    """

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None = None

    def step(self, inputs: tuple[Any, ...] | dict[str, Any] | None = None) -> None:
        """One training step, or one forward pass where there is no loss, on `inputs` (default: its
        own); what it made is freed at its end.
        """
        inputs = self.inputs if inputs is None else inputs
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        if self.loss is not None and self.optimizer is not None:
            scalar = self.loss(output)
            scalar.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


@dataclass(frozen=True)
class Target:
    """A named network with its batch size. :meth:`build` makes a fresh one."""

    spec: str
    batch_size: int
    inference: bool
    _maker: Callable[[], Any] = field(repr=False)
    _at: Callable[[int], Target] | None = field(default=None, repr=False)
    _change: Callable[[Built], Built] | None = field(default=None, repr=False)

    def at(self, batch_size: int) -> Target:
        """The same target, changes included, at another batch size. Raises DlperfError for a size
        below 1, or where the target was made for one size.
        """
        if self._at is None:
            raise DlperfError(
                f"target {self.spec}: was made for batch size {self.batch_size} alone"
            )
        return replace(self._at(batch_size), _change=self._change)

    def changed(self, change: Callable[[Built], Built]) -> Target:
        """The same target with `change` applied to everything it builds, after the changes that it
        has.
        """
        before = self._change
        return replace(
            self, _change=change if before is None else lambda built: change(before(built))
        )

    def build(self) -> Built:
        """Call the builder and check what it returns.

        Raises DlperfError for a wrong result, WorkFailed where the builder raises.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                made = self._maker()
        except DlperfError:
            raise
        except Exception as error:
            text = f"target {self.spec}: its builder raises {describe(error)}"
            if any(words in str(error).lower() for words in _NO_CUDA):
                raise DlperfError(f"{text}; {CPU_ONLY}") from error
            raise WorkFailed(text) from error
        except SystemExit as error:
            raise WorkFailed(
                f"target {self.spec}: its builder called sys.exit({error.code!r})"
            ) from error
        built = _as_built(self.spec, made, self.inference)
        check_built(f"target {self.spec}", built, self.inference)
        if not self.inference and built.optimizer is None:
            built = Built(built.model, built.inputs, built.loss, default_optimizer(built.model))
        return built if self._change is None else self._change(built)


def is_trace_file(spec: str) -> bool:
    """Whether `spec` names a file in which a trace is saved (rather than a builder)."""
    path = Path(spec)
    if os.path.isfile(path):
        return path.suffix == ".json" or schema_of(path) == "dlperf.trace"
    return spec.endswith(".json")


def resolve(
    spec: str,
    batch_size: int = 32,
    *,
    inference: bool = False,
    input_shape: tuple[int, ...] | None = None,
) -> Target:
    """The target that `spec` names.

    `input_shape` is the shape of one sample for a target that is an nn.Module class or instance
    (the batch size is put in front; float32). Raises DlperfError naming the target and the way out
    where it cannot be had.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DlperfError(f"batch size is {batch_size}; it must be at least 1")
    if input_shape is not None and (not input_shape or any(n < 1 for n in input_shape)):
        raise DlperfError(
            f"input shape is {','.join(map(str, input_shape))}; give positive sizes such as"
            " 3,224,224"
        )
    found = _find(spec)

    def at(size: int) -> Target:
        return resolve(spec, size, inference=inference, input_shape=input_shape)

    if isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module)):
        if input_shape is None:
            raise DlperfError(
                f"target {spec}: is a module; say what goes in with --input, for example --input"
                " 3,224,224 (the batch size is put in front)"
            )
        return Target(
            spec,
            batch_size,
            inference,
            _module_maker(spec, found, batch_size, input_shape, inference),
            at,
        )
    if input_shape is not None:
        raise DlperfError(
            f"target {spec}: is no module but a {type(found).__name__}, which makes its own inputs;"
            " leave --input out"
        )
    if not callable(found):
        raise DlperfError(
            f"target {spec}: is a {type(found).__name__}, which cannot be called; name a function"
            " of the batch size, or an nn.Module"
        )
    _check_arguments(spec, found, (batch_size,), "CALLABLE(batch_size)")
    return Target(spec, batch_size, inference, lambda: found(batch_size), at)


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD(lr=0.01) over all parameters: what a target that names no optimizer is trained with."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def mean_of_output(output: Any) -> torch.Tensor:
    """The mean of the first floating tensor in a nested output: the loss of a target that names
    none.
    """
    from dlperf.recorder.op_recorder import tensors_of

    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise DlperfError(
        f"the output ({type(output).__name__}) holds no floating-point tensor to make a loss of;"
        " give a loss"
    )


def first_batch_size(inputs: tuple[Any, ...] | dict[str, Any]) -> int:
    """First dimension of the first input tensor that has one; 1 if none does."""
    from dlperf.recorder.op_recorder import tensors_of

    return next(
        (max(1, int(tensor.shape[0])) for tensor in tensors_of(inputs) if tensor.dim() > 0), 1
    )


def check_device(name: str, model: nn.Module, inputs: Any) -> None:
    """Raise DlperfError for a model or inputs on an accelerator, naming what can be done."""
    from dlperf.recorder.op_recorder import tensors_of

    for tensor in (*model.parameters(), *model.buffers(), *tensors_of(inputs)):
        if tensor.device.type not in CPU_DEVICES:
            raise DlperfError(f"{name}: lies on {tensor.device}; {CPU_ONLY}")


def check_built(name: str, built: Built, inference: bool) -> None:
    """Raise DlperfError if what a step is made of has the wrong types or nothing in it can be
    trained.
    """
    if not isinstance(built.model, nn.Module):
        raise DlperfError(f"{name}: the model is {_kind(built.model)}; expected an nn.Module")
    if not isinstance(built.inputs, (tuple, dict)):
        raise DlperfError(
            f"{name}: the inputs are {_kind(built.inputs)}; expected a tuple of positional or a"
            " dict of keyword arguments"
        )
    if isinstance(built.inputs, dict) and not all(isinstance(key, str) for key in built.inputs):
        raise DlperfError(f"{name}: the inputs' keys must be the names of the model's arguments")
    check_device(name, built.model, built.inputs)
    if inference:
        return
    if not callable(built.loss):
        raise DlperfError(
            f"{name}: the loss is {_kind(built.loss)}; expected a function from the model's output"
            " to a scalar tensor"
        )
    parameters = list(built.model.parameters())
    if not parameters:
        raise DlperfError(
            f"{name}: the model has no parameters to train; only inference can be predicted"
            " (--inference, inference=True)"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        what = f"none of the model's {len(parameters)} parameters requires grad"
        raise DlperfError(
            f"{name}: {what}; only inference can be predicted (--inference, inference=True)"
        )
    if built.optimizer is None:
        return
    if not isinstance(built.optimizer, torch.optim.Optimizer):
        raise DlperfError(
            f"{name}: the optimizer is {_kind(built.optimizer)}; expected a torch.optim.Optimizer"
        )
    own = set(map(id, parameters))
    if not any(
        id(parameter) in own
        for group in built.optimizer.param_groups
        for parameter in group["params"]
    ):
        raise DlperfError(
            f"{name}: the optimizer {type(built.optimizer).__name__} holds none of the model's"
            " parameters; make it from model.parameters()"
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return (
        f"the class {value.__name__}"
        if isinstance(value, type)
        else "None"
        if value is None
        else f"of type {type(value).__name__}"
    )


def _as_built(spec: str, made: Any, inference: bool) -> Built:
    what = "expected (model, inputs, loss) or (model, inputs, loss, optimizer)"
    if not isinstance(made, (tuple, list)):
        raise DlperfError(f"target {spec}: returned {_kind(made)}; {what}")
    if len(made) not in (3, 4) and not (inference and len(made) == 2):
        raise DlperfError(
            f"target {spec}: returned {len(made)} value{'s' * (len(made) != 1)}; {what}"
        )
    model, inputs, loss, optimizer = (*made, None, None)[:4]
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    elif isinstance(inputs, Mapping) and not isinstance(inputs, dict):
        inputs = dict(inputs)
    return Built(model, inputs, None if inference else loss, None if inference else optimizer)


def _module_maker(
    spec: str,
    module: nn.Module | type[nn.Module],
    batch_size: int,
    shape: tuple[int, ...],
    inference: bool,
) -> Callable[[], Any]:
    if isinstance(module, type):
        _check_arguments(spec, module, (), f"{module.__name__}()")

    def make() -> Any:
        model = module() if isinstance(module, type) else module
        return model, (torch.randn(batch_size, *shape),), None if inference else mean_of_output

    return make


def _check_arguments(
    spec: str, found: Callable[..., Any], arguments: tuple[Any, ...], call: str
) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # a builtin says nothing about its arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise DlperfError(
            f"target {spec}: is called as {call}, but takes {signature} ({error}); wrap it in a"
            " function that fits"
        ) from None


def find_callable(spec: str, arguments: tuple[Any, ...], call: str) -> Callable[..., Any]:
    """The function that ``FILE.py:CALLABLE`` or ``PACKAGE.MODULE:CALLABLE`` names, which takes
    `arguments` (`call` says it in words).

    Raises DlperfError where there is none, or it takes others.
    """
    found = _find(spec)
    if not callable(found):
        raise DlperfError(
            f"target {spec}: is a {type(found).__name__}, which cannot be called; name a function"
            f" {call}"
        )
    _check_arguments(spec, found, arguments, call)
    return found  # type: ignore[no-any-return]


# -- finding ---------------------------------------------------------------------------------------


def _find(spec: str) -> Any:
    """The object that a spec names."""
    if spec in SHORT_NAMES:
        return _attribute(spec, _networks_targets(spec), SHORT_NAMES[spec])
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
    """A name from the command line as sources have it, where the locale's encoding is not theirs."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(name).decode("utf-8")
    return name


def _attribute(spec: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = [
                known
                for known in vars(module)
                if not known.startswith("_") and callable(getattr(module, known, None))
            ]
            near = difflib.get_close_matches(name, names, 3) or names[:8]
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else "; it defines nothing that can be called"
            )
            raise DlperfError(
                f"target {spec}: {getattr(module, '__file__', None) or module.__name__} has no"
                f" {name!r}{hint}"
            ) from None
    return found


@contextlib.contextmanager
def _importable(spec: str, *folders: Path) -> Iterator[None]:
    """The folders in front of the import path; what an import raises becomes one line; the path
    comes back as it was.
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
        # Builders may import lazily when they are called, so the folders stay importable, behind
        # all that was there.
        sys.path[:] = before + [text for text in added if text not in before]


def _import_file(spec: str, path: Path) -> ModuleType:
    """Run a file as a module of its own, under its stem and, where that is taken by another file,
    only for itself.
    """
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
    with _importable(spec, Path.cwd(), folder), _own_neighbours(folder):
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    return module


@contextlib.contextmanager
def _own_neighbours(folder: Path) -> Iterator[None]:
    """A file's imports find the files beside it, even where another target's file of the same name
    was imported before.
    """
    hidden: dict[str, ModuleType] = {}
    for neighbour in folder.iterdir() if folder.is_dir() else ():
        stem = (
            neighbour.stem
            if neighbour.suffix == ".py"
            else neighbour.name
            if (neighbour / "__init__.py").is_file()
            else ""
        )
        known = sys.modules.get(stem) if stem else None
        origin = getattr(known, "__file__", None)
        if known is None or origin is None or folder in Path(origin).resolve().parents:
            continue
        if (
            stem in sys.stdlib_module_names
            or "site-packages" in origin
            or stem in ("dlperf", "microbench", "torch", "numpy")
        ):
            continue
        for full in [full for full in sys.modules if full == stem or full.startswith(stem + ".")]:
            hidden[full] = sys.modules.pop(full)
    yield
    # The newest stay: a builder that imports lazily is the one that was just loaded.


def _import_module(spec: str, where: str) -> ModuleType:
    if not all(part.isidentifier() for part in where.split(".")):
        raise DlperfError(
            f"target {spec}: {where!r} is neither a file nor a module's name; {_FORMS}"
        )
    with _importable(spec, Path.cwd(), *_checkout()), _own_neighbours(Path.cwd()):
        return importlib.import_module(where)


def _checkout() -> tuple[Path, ...]:
    """The folder whose ``networks`` are a dlperf checkout's: the working directory or the one
    beside this package; nothing where there is none.
    """
    folders = (Path.cwd(), Path(__file__).resolve().parents[2])
    return tuple(folder for folder in folders if (folder / "networks" / "targets.py").is_file())[:1]


def _networks_targets(spec: str) -> ModuleType:
    """``networks.targets`` of the checkout."""
    folders = _checkout()
    if not folders:
        raise DlperfError(
            f"target {spec}: is a network of a dlperf checkout, and there is none here; run it"
            f" there, or {_FORMS}"
        )
    with _importable(spec, *folders):
        return importlib.import_module("networks.targets")


def checkout_folder() -> Path:
    """The folder of the checkout. Raises DlperfError where there is none."""
    folders = _checkout()
    if not folders:
        raise DlperfError(f"the networks of a dlperf checkout are not here; name targets: {_FORMS}")
    return folders[0]


def checkout_targets() -> tuple[str, ...]:
    """Every network of the checkout: the short names, then those written to validate predictions on
    (``networks.further:NAME``).

    Raises DlperfError where there is no checkout.
    """
    with _importable("networks.further", checkout_folder()):
        further = importlib.import_module("networks.further")
    return (*SHORT_NAMES, *(f"networks.further:{name}" for name in further.NAMES))
