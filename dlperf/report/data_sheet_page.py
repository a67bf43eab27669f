"""A device as a page: what its data sheet says, where from, and the kernels imported for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from dlperf.core.data_sheet import UNMEASURED, DataSheet
from dlperf.core.machine import Machine
from dlperf.core.text import printable
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.report.document import Column, format_table

_LEVELS = ("L1", "L2", "L3")


def data_sheet_page(machine: Machine) -> str:
    """Values of a device with their sources, and its imported kernels with their leave-one-out
    errors.
    """
    sheet, cpu = machine.data_sheet, machine.cpu
    assert sheet is not None
    units = "cores" if sheet.kind == "processor" else "multiprocessors"
    rows = [("n_units", units, f"{cpu.n_cores}")]
    rows += [
        ("flops_per_s", f"peak {dtype}", format_si(rate, "FLOP/s"))
        for dtype, rate in sheet.flops_per_s.items()
    ]
    rows += [
        ("matrix_flops_per_s", f"peak {dtype}, matrix units", format_si(rate, "FLOP/s"))
        for dtype, rate in sheet.matrix_flops_per_s.items()
    ]
    if sheet.sustained_frac < 1.0:
        rows.append(("sustained_frac", "sustained clock", format_percent(sheet.sustained_frac)))
    rows += [
        ("caches_bytes", f"{name} size", format_bytes(size))
        for name, size in zip(_LEVELS, cpu.caches_bytes)
        if size
    ]
    rows += [
        ("caches_bytes_per_s", f"{name} bandwidth", format_si(rate, "B/s"))
        for name, rate in zip(_LEVELS, sheet.caches_bytes_per_s)
        if rate
    ]
    if cpu.memory_bytes:
        rows.append(("memory_bytes", "memory size", format_si(cpu.memory_bytes, "B")))
    rows.append(("dram_bytes_per_s", "memory bandwidth", format_si(sheet.dram_bytes_per_s, "B/s")))
    for name, what, seconds in (
        ("dram_latency_s", "memory latency", sheet.dram_latency_s),
        ("launch_s", "kernel launch", sheet.launch_s),
    ):
        if seconds:
            rows.append((name, what, format_seconds(seconds)))
    cited = list(dict.fromkeys(sheet.sources.get(name, "") for name, _, _ in rows))
    cited = [source for source in cited if source]
    columns = [
        Column("value", tuple(what for _, what, _ in rows), align_left=True),
        Column("", tuple(text for _, _, text in rows)),
        Column("source", tuple(_number(cited, sheet.sources.get(name)) for name, _, _ in rows)),
    ]
    where = f"{machine.path}: " if machine.path else ""
    how = "by its data sheet"
    if machine.mode != UNMEASURED:
        how = f"as measured, {machine.mode}" + ("" if machine.complete else ", unfinished")
    lines = [
        f"{where}{printable(cpu.model)}, {sheet.kind} {how}",
        *(["contractions in float32 use tf32"] if sheet.tf32 else []),
        "",
        format_table(columns, None),
        *(f"[{number}] {printable(source)}" for number, source in enumerate(cited, 1)),
    ]
    if machine.kernels:
        errors = machine.leave_one_out_errors(machine.threads[0])
        families = sorted(Counter(kernel.family for kernel in machine.kernels).items())
        kernels = [
            Column("kernels", tuple(name for name, _ in families), align_left=True),
            Column("points", tuple(f"{n:,}" for _, n in families)),
            Column(
                "leave-one-out error",
                tuple(format_percent(errors.get(name)) for name, _ in families),
            ),
        ]
        lines += ["", format_table(kernels, None)]
    return "\n".join([*lines, *(f"note: {printable(note)}" for note in machine.notes)])


def _number(cited: list[str], source: str | None) -> str:
    """The number of a source in the list of those cited.

    >>> _number(["a data sheet"], "a data sheet")
    '[1]'
    """
    return f"[{cited.index(source) + 1}]" if source else "-"


def data_sheet_to_json(sheet: DataSheet) -> dict[str, Any]:
    """The data sheet as JSON data."""
    return asdict(sheet)
