"""Settings of malloc that a user puts into the environment."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dlperf.predictors.allocator.simulation import POLICIES


@dataclass(frozen=True)
class AllocatorSetting:
    """A setting: its name, the environment variables that bring it about (``{...}`` stands for a
    library).
    """

    name: str
    settings: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables; a library goes by its name, which the loader looks for."""
        return dict(
            word.replace("{", "").replace("}", "").split("=", 1) for word in self.settings.split()
        )

    @property
    def missing(self) -> str:
        """Why this process could not be started under it here, "" if it could."""
        if platform.libc_ver()[0] != "glibc":
            return "takes Linux with glibc"
        library = re.search(r"\{lib(\w+)\.so[.\d]*\}", self.settings)
        return (
            f"takes lib{library.group(1)}, which is not installed"
            if library and ctypes.util.find_library(library.group(1)) is None
            else ""
        )


ALLOCATORS = tuple(
    AllocatorSetting(policy.name, policy.settings)
    for policy in POLICIES.values()
    if policy.name != "default"
)
_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "GLIBC_TUNABLES",
    "THP_MEM_ALLOC_ENABLE",
)


def malloc_of(name: str) -> AllocatorSetting:
    """The setting called `name`."""
    return next(malloc for malloc in ALLOCATORS if malloc.name == name)


def settings_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of an environment that change how memory is had; a process under the default
    has none of them.
    """
    preloaded = ("LD_PRELOAD",) if "malloc" in environment.get("LD_PRELOAD", "") else ()
    return (*(name for name in _VARIABLES if name in environment), *preloaded)


def environment_under(malloc: str | None) -> dict[str, str]:
    """This process's environment, with the setting's variables (None: the default's, which are
    none).
    """
    ours = settings_in(os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment if malloc is None else {**environment, **malloc_of(malloc).environment}
