"""``dlperf calibrate --device``: measures an accelerator of this machine."""

from __future__ import annotations

import datetime
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlperf.cli.inputs import Answer
from dlperf.core.errors import DlperfError, Interrupted, telling_what_is_kept
from dlperf.core.files import MACHINE, check_writable, device_path, one_writer
from dlperf.core.streams import log, warn
from dlperf.core.text import fit
from dlperf.report.writing import make_folder

if TYPE_CHECKING:
    from dlperf.core.clock import Samples
    from dlperf.core.machine import Machine


def calibrate_device(args: Namespace) -> Answer:
    """A machine file of an accelerator: its roofs, and kernel models of what was timed on it."""
    from dlperf.microbench.device import measure_device
    from dlperf.recorder.accelerator import device_clock, find_accelerator
    from dlperf.report.data_sheet_page import data_sheet_page
    from dlperf.studies.kernel_table import import_table

    device = find_accelerator(args.device)
    path = Path(args.output or args.machine or device_path(args.device))
    if not args.output and not args.machine:
        make_folder(path.parent)
    check_writable(path, args.force, MACHINE)
    name = device_clock(device).name
    log(f"timing kernels of {name}")
    begin = time.monotonic()
    with one_writer(path, "a calibration"):
        with telling_what_is_kept(lambda: f"{path} was not written: no roof was measured yet"):
            found = measure_device(device, args.mode or "full", _known(path, name))
        machine, n_left_out = import_table(found.machine, found.table)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        machine = replace(machine, notes=found.machine.notes, created=created)
        machine.save(path)
    if not found.is_complete:
        raise Interrupted(
            f"{path} keeps {found.n_done} of {found.n_planned} kernels; the same command resumes it"
        )
    for note in found.left_out:
        warn(note)
    if n_left_out:
        warn(f"{n_left_out:,} samples are faster than the roofs allow; they are left out")
    log(f"wrote {path} in {time.monotonic() - begin:.0f} s")
    machine = replace(machine, path=str(path))
    return Answer(fit(data_sheet_page(machine)), machine.to_json(), indent=None)


def _known(path: Path, name: str) -> dict[str, Samples]:
    """Samples by signature of an interrupted calibration of the same device; else none.

    Raises DlperfError for the file of another machine.
    """
    from dlperf.core import host
    from dlperf.core.machine import Machine

    if not path.exists():
        return {}
    machine: Machine = Machine.load(path)
    if machine.data_sheet is None or machine.cpu.model != name:
        raise DlperfError(
            f"{path}: is of {machine.cpu.model}, not of {name}; name another file with -o"
        )
    is_same = machine.versions.get("torch") == host.versions().get("torch")
    if machine.complete or not is_same:
        return {}
    return {kernel.op.signature: kernel.samples for kernel in machine.kernels}
