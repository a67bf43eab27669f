"""Programs that ``torch.export.save`` wrote, as models with the layers that they were made from."""

from __future__ import annotations

import os
import warnings
import zipfile
from typing import Any, NamedTuple

import torch
from torch import nn

from dlperf.core.errors import DlperfError, one_line


class Program(NamedTuple):
    """A model and its inputs, positional or by keyword."""

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]


def load_program(path: str) -> Program:
    """The program in a ``.pt2`` file, with the inputs that it was exported with.

    Its modules have the names and the types of those it was made from. Raises DlperfError for a
    file that is missing or holds no exported program.
    """
    if not os.path.isfile(path):
        raise DlperfError(f"target {path}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise DlperfError(
            f"target {path}: holds no exported program; write it with torch.export.save"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.load(path)
            model = torch.export.unflatten(exported)
    except Exception as error:
        raise DlperfError(
            f"target {path}: holds no exported program that this torch reads ({one_line(error)});"
            " write it with torch.export.save"
        ) from error
    args, kwargs = exported.example_inputs or ((), {})
    if args and kwargs:
        raise DlperfError(
            f"target {path}: was exported with positional and keyword inputs; export it with one"
            " kind"
        )
    kinds = {
        name: str(kind).rpartition(".")[2]
        for node in exported.graph.nodes
        for name, kind in (node.meta.get("nn_module_stack") or {}).values()
    }
    for name, module in model.named_modules():
        if kind := kinds.get(name):
            module.__class__ = type(kind, (type(module),), {})
    return Program(model, kwargs if kwargs and not args else tuple(args))
