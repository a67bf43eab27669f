"""``dlperf machine new`` and ``import``: devices from data sheets, and from measured kernels."""

from __future__ import annotations

import datetime
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dlperf.cli.inputs import Answer, check_file, load_machine
from dlperf.cli.options import DEVICE, Command, Problems, common, flag, option, output
from dlperf.core.argument_types import amount, amounts, count, positive
from dlperf.core.errors import refuse
from dlperf.core.files import MACHINE
from dlperf.core.streams import log, warn
from dlperf.core.text import fit

if TYPE_CHECKING:
    from dlperf.core.machine import Machine

_LEVELS = ("L1", "L2", "L3")
_LEAST = {
    "flops": (1e9, "float32=19.5T", "FLOP/s"),
    "tensor_cores": (1e9, "float16=312T", "FLOP/s"),
    "memory_bandwidth": (1e8, "1935G", "bytes/s"),
    "memory": (1e6, "80G", "bytes"),
    "cache": (1e3, "L2=40Mi", "bytes"),
    "cache_bandwidth": (1e9, "L2=5.4T", "bytes/s"),
    "base_clock": (1e6, "1065M", "Hz"),
    "boost_clock": (1e6, "1410M", "Hz"),
}
"""Options of data sheets: less than any device has, an example, and the unit."""
_LONGEST_START_S = 1e-2
"""Longer than any device takes to start a kernel."""

_DOUBTFUL_SLOWNESS = 30.0
"""Median over the data sheet's time beyond which a table's unit or device may be wrong."""


def check_new(args: Namespace) -> Problems:
    """Options that a data sheet cannot do without."""
    check_file(args)  # without a file the page is all
    needed = [
        name for name in ("name", "units", "flops", "memory_bandwidth") if not vars(args)[name]
    ]
    missing = "" if args.device or not needed else f"--{needed[0].replace('_', '-')}"
    clocks = (args.base_clock, args.boost_clock)
    few = next(_implausible(args), "")
    return (
        (few, few),
        *(
            (set(pairs or ()) - set(_LEVELS), f"--{name}: its names are L1, L2 and L3")
            for name, pairs in (("cache", args.cache), ("cache-bandwidth", args.cache_bandwidth))
        ),
        (missing, f"{missing} is missing; a data sheet needs it, --device NAME brings it along"),
        (
            None in clocks and clocks != (None, None),
            "--base-clock and --boost-clock belong together; give both or none",
        ),
        (
            None not in clocks and clocks[0] > clocks[1],
            f"--base-clock {args.base_clock:g} is above --boost-clock {args.boost_clock:g}"
            if None not in clocks
            else "",
        ),
    )


def _implausible(args: Namespace) -> Iterator[str]:
    """Options whose values no device has, where a prefix of the unit may be missing."""
    for name, (least, example, unit) in _LEAST.items():
        given = vars(args)[name]
        amounts = given.values() if isinstance(given, dict) else [given]
        if any(found is not None and found < least for found in amounts):
            flag = name.replace("_", "-")
            yield f"--{flag}: less than {least:g} {unit}; is a prefix missing, as in {example}?"
    for name in ("launch", "latency"):
        found = vars(args)[name]
        if found is not None and found > _LONGEST_START_S:
            yield f"--{name} {found:g}: is in seconds, and no device takes as many; try {found}e-6"


def new(args: Namespace) -> Answer:
    """A machine file from a data sheet."""
    from dlperf.core import shelf
    from dlperf.core.conversion import convert, shown
    from dlperf.core.data_sheet import DataSheet
    from dlperf.core.machine_entries import Cpu
    from dlperf.core.operators import ITEM_BYTES
    from dlperf.report.data_sheet_page import data_sheet_page

    base = shelf.device(args.device) if args.device else None
    cpu: dict[str, Any] = {} if base is None else dict(vars(base.cpu))
    sheet: dict[str, Any] = {"kind": "accelerator"}
    sheet |= {} if base is None or base.data_sheet is None else dict(vars(base.data_sheet))
    caches = list(cpu.get("caches_bytes", (0, 0, 0)))
    rates = list(sheet.get("caches_bytes_per_s", (0.0, 0.0, 0.0)))
    for found, given in ((caches, args.cache), (rates, args.cache_bandwidth)):
        for name, value in (given or {}).items():
            found[_LEVELS.index(name)] = value
    clocks = None if args.base_clock is None else args.base_clock / args.boost_clock
    changes = {
        "kind": args.kind,
        "flops_per_s": args.flops,
        "matrix_flops_per_s": args.tensor_cores,
        "dram_bytes_per_s": args.memory_bandwidth,
        "caches_bytes_per_s": tuple(rates) if args.cache_bandwidth else None,
        "sustained_frac": clocks,
        "launch_s": args.launch,
        "dram_latency_s": args.latency,
        "tf32": args.tf32 or None,
    }
    of_cpu = {
        "model": args.name,
        "n_cores": args.units,
        "memory_bytes": None if args.memory is None else round(args.memory),
        "caches_bytes": tuple(map(round, caches)) if args.cache else None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    names = {"model": "name", "n_cores": "n_units"}
    stated = [*given, *(names.get(name, name) for name, value in of_cpu.items() if value)]
    sources = dict(sheet.get("sources", {})) | dict.fromkeys(stated, args.source)
    cpu |= {name: value for name, value in of_cpu.items() if value is not None}
    made = convert(sheet | given | {"sources": sources}, DataSheet)
    refuse(
        *(
            (
                name not in (*ITEM_BYTES, *also),
                (
                    f"--{flag}: {shown(name)} is no dtype; write for example float32, float16 or"
                    f" {last}"
                ),
            )
            for flag, also, last, peaks in (
                ("flops", (), "bfloat16", args.flops),
                ("tensor-cores", ("tf32",), "tf32", args.tensor_cores),
            )
            for name in peaks or ()
        ),
        (
            made.tf32 and "tf32" not in made.matrix_flops_per_s,
            "--tf32 needs the peak of tf32; give it with --tensor-cores tf32=156T",
        ),
    )
    machine = shelf.data_sheet_machine(Cpu(**cpu), made)
    return _write(args, machine, fit(data_sheet_page(machine)))


def _write(args: Namespace, machine: Machine, text: str) -> Answer:
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = replace(machine, created=created)
    if args.output is not None:
        machine.save(args.output)
        log(f"wrote {args.output}")
    elif args.json is None:
        log("nothing was written; -o FILE writes the machine file")
    return Answer(text, machine.to_json(), indent=None)


def check_import(args: Namespace) -> Problems:
    """A table is of one device."""
    check_file(args)  # without a file the page is all
    return (
        (
            bool(args.device) == bool(args.machine),
            "whose kernels are these? give one of --device NAME and --machine FILE of a device",
        ),
    )


def import_kernels(args: Namespace) -> Answer:
    """Kernel models of a device from tables of measured kernels."""
    from dlperf.core.kernel_table import KernelTable
    from dlperf.report.data_sheet_page import data_sheet_page
    from dlperf.studies.kernel_table import import_table, slowness

    machine = load_machine(args, devices=True)
    tables = [KernelTable.load(path) for path in args.tables]
    for table in tables:
        machine, n_left_out = import_table(machine, table)
        if n_left_out:
            warn(
                f"{table.path}: {n_left_out:,} of {len(table.rows):,} rows are faster than"
                f" {machine.cpu.model} can be; they are left out"
            )
        if (times := slowness(machine, table)) > _DOUBTFUL_SLOWNESS:
            warn(
                f"{table.path}: its kernels take {times:,.0f} times as long as by the data sheet of"
                f" {machine.cpu.model}; is the time in the unit of its column, and the device"
                " right?"
            )
    return _write(args, machine, fit(data_sheet_page(machine)))


NEW = Command(
    "new",
    "a machine from a data sheet",
    options=(
        DEVICE,
        option("--name", metavar="TEXT", help="name of the device"),
        option("--kind", choices=("accelerator", "processor"), help="what it is (accelerator)"),
        option("--units", type=count, metavar="N", help="multiprocessors, compute units or cores"),
        option(
            "--flops",
            type=amounts,
            metavar="float32=19.5T,...",
            help="peak by dtype without tensor cores, FLOP/s",
        ),
        option(
            "--tensor-cores",
            type=amounts,
            metavar="float16=312T,...",
            help="peak of matrix units by dtype (also tf32), FLOP/s, without sparsity",
        ),
        option("--memory-bandwidth", type=amount, metavar="1935G", help="of the memory, bytes/s"),
        option("--memory", type=amount, metavar="80G", help="bytes of memory"),
        option("--cache", type=amounts, metavar="L2=40Mi,...", help="bytes of L1 (a unit), L2, L3"),
        option(
            "--cache-bandwidth",
            type=amounts,
            metavar="L2=5.4T,...",
            help="bytes/s of L1, L2, L3, all units together",
        ),
        option("--base-clock", type=amount, metavar="1065M", help="clock that it sustains, Hz"),
        option("--boost-clock", type=amount, metavar="1410M", help="clock of the peaks, Hz"),
        option(
            "--launch",
            type=positive,
            metavar="2.6e-6",
            help="seconds of an empty kernel in a stream",
        ),
        option(
            "--latency", type=positive, metavar="4e-7", help="seconds of a load from the memory"
        ),
        flag("--tf32", "contractions in float32 use the tensor cores' tf32"),
        option(
            "--source",
            metavar="TEXT",
            default="the command line",
            help="where the given values are from, such as the data sheet's URL",
        ),
        output("machine file to write"),
        *common(threads=False, batch_size=False),
    ),
    work=new,
    check=check_new,
    schema=MACHINE,
)
IMPORT = Command(
    "import",
    "kernel models of a device from tables of measured kernels",
    options=(
        option("tables", metavar="TABLE.csv", nargs="+", help="a row for each kernel"),
        DEVICE,
        output("machine file to write"),
        *common(threads=False, batch_size=False),
    ),
    work=import_kernels,
    check=check_import,
    schema=MACHINE,
)
