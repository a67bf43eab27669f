"""``dlperf validate --table``: a machine or device judged by a table of measured kernels."""

from __future__ import annotations

from argparse import Namespace

from dlperf.cli.inputs import Answer, load_machine, naming_unfit_kernels
from dlperf.core.text import fit


def validate_table(args: Namespace) -> Answer:
    """Errors of a machine's predictions of a table's kernels."""
    from dlperf.core.kernel_table import KernelTable
    from dlperf.studies.kernel_table import judge

    machine = load_machine(args, devices=True)
    table = KernelTable.load(args.table)
    with naming_unfit_kernels(machine):
        found = judge(machine, table)
    return Answer(fit(found.to_text()), found.to_json())
