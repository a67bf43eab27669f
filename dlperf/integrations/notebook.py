"""``%%dlperf_profile`` in Jupyter and IPython, after ``%load_ext dlperf``."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from dlperf.core.errors import DlperfError, check_count, one_line
from dlperf.core.streams import log
from dlperf.runner.wrapping import profile


@magics_class
class DlperfMagics(Magics):  # type: ignore[misc]
    """The magics of dlperf."""

    @magic_arguments()
    @argument("model", nargs="+", help="expression for the nn.Module that the cell trains")
    @argument("--machine", metavar="FILE", help="machine file (default: this machine's)")
    @argument("--threads", type=int, metavar="T", help="torch's threads inside of the cell")
    @argument("--as", dest="name", metavar="NAME", help="variable that keeps the profile")
    @cell_magic
    def dlperf_profile(self, line: str, cell: str) -> None:
        """Watch the training loop in the cell; then show predicted beside actual times.

        It is what `with dlperf.profile(MODEL)` around the cell does. A cell that raises shows its
        error and no report.
        """
        import torch

        given, shell = parse_argstring(self.dlperf_profile, line), self.shell
        before = torch.get_num_threads()
        threads = before if given.threads is None else given.threads
        try:
            check_count("--threads", threads)
            if given.name is not None and not given.name.isidentifier():
                raise DlperfError(f"--as {given.name}: is no name of a variable")
            model = _evaluated(shell, " ".join(given.model))
            watched = profile(model, given.machine and given.machine.strip("\"'"))
        except DlperfError as error:
            raise UsageError(f"%%dlperf_profile: {error}") from error
        if given.name:
            shell.user_ns[given.name] = watched
        outer = shell.displayhook.exec_result
        torch.set_num_threads(threads)
        try:
            with watched:
                result = shell.run_cell(cell)
        finally:
            torch.set_num_threads(before)
        if result.success:
            _show(watched)
        elif outer is not None:  # its error is on the page already; the notebook stops here
            outer.error_in_exec = result.error_before_exec or result.error_in_exec


def _evaluated(shell: Any, expression: str) -> Any:
    try:
        return shell.ev(expression)
    except Exception as error:
        way_out = "name the nn.Module that the cell trains"
        raise DlperfError(f"{expression}: {one_line(error)}; {way_out}") from error


def _show(watched: profile) -> None:
    """The page as HTML, and as text where that is not shown."""
    try:
        data = {"text/plain": str(watched), "text/html": watched._repr_html_()}
    except Exception as error:  # a report that fails is no failure of the training
        log(f"the report failed: {one_line(error)}")
    else:
        display(data, raw=True)
