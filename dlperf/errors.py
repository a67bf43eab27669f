"""The one exception that carries a line meant for the user."""
from __future__ import annotations


class DlperfError(Exception):
    """The input or the usage is unfit; the message names the thing, the value and the way out.

    The command line prints the message as one line and exits with status 2.
    """


class WorkFailed(DlperfError):
    """The input was fine but the work failed: a model that raised, a disk that filled. Exit status 1."""
