"""Commands and options as data, and the parser that they make. Nothing heavy is imported."""

from __future__ import annotations

import argparse
import itertools
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dlperf.core.argument_types import count, factor, formats, loader, shape

if TYPE_CHECKING:
    from dlperf.cli.inputs import Answer

UNUSABLE = 2
Problems = Iterable[tuple[object, str]]
"""Conditions of options that exclude one another, and what to say of the first that holds."""
TARGET_HELP = (
    "FILE.py:CALLABLE, MODULE:CALLABLE, a trace file or, in a checkout, a short name such as lenet"
)


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and without abbreviated options (a new option must not
    break an old command).
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """One line that names what is wrong, what is spelled like it, and where help is; exit
        status 2.
        """
        import difflib

        line = " ".join(message.split())
        wrong = re.search(r"(?:unrecognized arguments|invalid choice): '?([^\s'=]+)", line)
        known = [name for action in self._actions for name in _names(action)]
        near = difflib.get_close_matches(wrong[1], known, 1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(UNUSABLE, f"{self.prog}: error: {line}{hint}; {self.prog} --help shows how\n")


def _names(action: argparse.Action) -> Iterable[str]:
    """What a user may write for an argument: its flags, or the commands that it chooses from."""
    is_command = isinstance(action, argparse._SubParsersAction)
    return map(str, action.choices or ()) if is_command else action.option_strings


class Option(NamedTuple):
    """Arguments of ``add_argument``; neighbours that are `exclusive` exclude one another."""

    flags: tuple[str, ...]
    settings: dict[str, Any]
    exclusive: bool = False


class Command(NamedTuple):
    """A command: its options, and the function that does its `work`.

    `check` returns what its options may not be; the first problem that holds ends it. `schema` is
    that of a file that it writes and others read. With ``-o`` a folder is written; without it the
    `folder_answer` goes to stdout. A command with `actions` has no work of its own.
    """

    name: str
    text: str
    options: tuple[Option, ...] = ()
    work: Callable[[Namespace], Answer] | None = None
    check: Callable[[Namespace], Problems] = lambda args: ()
    schema: str = ""
    folder_answer: str = ""
    defaults: Mapping[str, Any] = {}
    usage: str | None = None
    epilog: str | None = None
    actions: tuple[Command, ...] = ()


def add_commands(parser: argparse.ArgumentParser, dest: str, commands: Sequence[Command]) -> None:
    """Add a parser for each command, and for its actions."""
    parsers = parser.add_subparsers(
        dest=dest, metavar=dest.upper(), required=True, parser_class=Parser
    )
    for one in commands:
        own = parsers.add_parser(
            one.name,
            help=one.text,
            description=one.text[0].upper() + one.text[1:] + ".",
            usage=one.usage,
            epilog=one.epilog,
        )
        for is_exclusive, options in itertools.groupby(
            one.options, lambda option: option.exclusive
        ):
            group = own.add_mutually_exclusive_group() if is_exclusive else own
            for option in options:
                group.add_argument(*option.flags, **option.settings)
        own.set_defaults(command_data=one, refuse_usage=own.error, **one.defaults)
        if one.actions:
            add_commands(own, "action", one.actions)


def option(*flags: str, exclusive: bool = False, **settings: Any) -> Option:
    """An option as ``add_argument`` takes it."""
    return Option(flags, settings, exclusive)


def flag(name: str, text: str) -> Option:
    """An option without a value."""
    return option(name, action="store_true", help=text)


def what_if(text: str) -> Option:
    """Factors on resources."""
    return option(
        "--what-if",
        type=factor,
        metavar="NAME=FACTOR",
        nargs="+",
        action="extend",
        default=[],
        help=text,
    )


def output(text: str, metavar: str = "FILE") -> Option:
    """The file or folder to write."""
    return option("-o", "--output", dest="output", metavar=metavar, help=text)


def machine_files(n_files: int | str = "?") -> Option:
    """Machine files without a flag; of at most one ``--machine`` is the other spelling."""
    help_ = "machine file" + (" (default: --machine)" if n_files == "?" else "")
    return option("files", metavar="FILE", nargs=n_files, help=help_)


def common(threads: bool = True, batch_size: bool = True) -> tuple[Option, ...]:
    """The options that nearly every command has."""
    return (
        option(
            "--machine",
            metavar="FILE",
            help="machine file (default: this machine's, in the user's data folder)",
        ),
        *((_BATCH_SIZE,) if batch_size else ()),
        *((_THREADS,) if threads else ()),
        option("--json", metavar="FILE", help="write the answer as JSON; - is stdout"),
        flag(
            "--force",
            "replace what dlperf did not write, and a machine file of another machine or torch",
        ),
        flag("--debug", "show tracebacks"),
    )


DEVICE = option(
    "--device",
    metavar="NAME",
    help="a device of the shelf: v100, a100, a100-sxm, h100, mi300x, epyc-7763, xeon-8380",
)
ACCELERATOR = option(
    "--device",
    metavar="NAME",
    help="run on this accelerator of the machine: cuda, cuda:1 (default: where the target lies)",
)
FORMAT = option(
    "--format",
    type=formats,
    default=None,
    metavar="FORMAT,...",
    help="text, md, html, csv, json (default: text; with -o all of them)",
)
TIMELINE = option(
    "--timeline",
    metavar="FILE.json",
    help="write the step as a timeline that Perfetto and chrome://tracing open",
)
TARGET = option("target", metavar="TARGET", help=TARGET_HELP)
INPUT = option(
    "--input",
    type=shape,
    metavar="3,224,224",
    help="input shape of a bare nn.Module, without the batch",
)
MODEL = (flag("--inference", "one forward pass instead of a training step"), INPUT)
LOADER = option(
    "--loader",
    type=loader,
    metavar="FILE.py:CALLABLE",
    help=(
        "CALLABLE(batch_size, num_workers) -> DataLoader or Dataset, sampled apart (default:"
        " tensors in memory)"
    ),
)
_BATCH_SIZE = option("--batch-size", type=count, metavar="B", help="samples of a step (32)")
_THREADS = option(
    "--threads",
    type=count,
    metavar="T",
    help="threads (default: torch's own number if the machine file holds it, else its nearest)",
)


def given(args: Namespace, names: Sequence[str]) -> str | None:
    """The first of the options that stands on the command line; None where none does."""
    found = (name for name in names if getattr(args, name, None) not in (None, False))
    return next((f"--{name.replace('_', '-')}" for name in found), None)
