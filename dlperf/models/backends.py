"""One question for all collectives: how long does this kind take over this backend?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import signature

from dlperf.core.errors import DlperfError
from dlperf.models import collectives, gloo, nccl
from dlperf.models.arguments import Checked, Quantity, formula

KINDS = nccl.KINDS
"""all_reduce, reduce_scatter, all_gather, broadcast."""

TEXTBOOK: dict[tuple[str, str], Callable[..., Quantity]] = {
    ("all_reduce", "ring"): collectives.ring_all_reduce_s,
    ("all_reduce", "recursive_doubling"): collectives.recursive_doubling_all_reduce_s,
    ("all_reduce", "rabenseifner"): collectives.rabenseifner_all_reduce_s,
    ("all_reduce", "binomial_tree"): collectives.binomial_all_reduce_s,
    ("all_reduce", "double_binary_tree"): collectives.double_binary_tree_all_reduce_s,
    ("reduce_scatter", "ring"): collectives.ring_reduce_scatter_s,
    ("reduce_scatter", "recursive_halving"): collectives.recursive_halving_reduce_scatter_s,
    ("all_gather", "ring"): collectives.ring_all_gather_s,
    ("all_gather", "recursive_doubling"): collectives.recursive_doubling_all_gather_s,
    ("all_gather", "bruck"): collectives.bruck_all_gather_s,
    ("broadcast", "binomial_tree"): collectives.binomial_broadcast_s,
    ("broadcast", "scatter_all_gather"): collectives.scatter_all_gather_broadcast_s,
    ("broadcast", "double_binary_tree"): collectives.double_binary_tree_broadcast_s,
}
"""The textbook's models by kind and algorithm; of each kind the first is the one taken where none
is named.
"""

GLOO: dict[tuple[str, str], Callable[..., Quantity]] = {
    ("all_reduce", "ring"): gloo.all_reduce_s,
    ("all_reduce", "bcube"): gloo.bcube_all_reduce_s,
    ("reduce_scatter", "ring"): gloo.reduce_scatter_s,
    ("all_gather", "ring"): gloo.all_gather_s,
    ("broadcast", "binomial_tree"): gloo.broadcast_s,
}
"""gloo's models; the first of each kind is what torch runs."""

_MODELS = {"gloo": GLOO, "textbook": TEXTBOOK}
BACKENDS = ("gloo", "nccl", "textbook")


@dataclass(frozen=True, slots=True)
class LinkParameters(Checked):
    """One link and the sum: alpha = `latency_s`, beta = `s_per_byte`, gamma = `reduce_s_per_byte`,
    gloo's handshake. Raises DlperfError for negative values.
    """

    latency_s: float
    s_per_byte: float
    reduce_s_per_byte: float = 0.0
    handshake_s: float = 0.0


def algorithms(kind: str, backend: str) -> tuple[str, ...]:
    """The algorithms of a kind that a backend has, the one taken by default first (NCCL: its tuner
    chooses). Raises DlperfError for unknown names.

    >>> algorithms("all_reduce", "gloo"), algorithms("broadcast", "textbook")
    (('ring', 'bcube'), ('binomial_tree', 'scatter_all_gather', 'double_binary_tree'))
    """
    for name, value, known in (("collective", kind, KINDS), ("backend", backend, BACKENDS)):
        if value not in known:
            raise DlperfError(f"{name} {value!r} is unknown; known are {', '.join(known)}")
    if backend == "nccl":
        return tuple(reversed(nccl.ALGORITHMS)) if kind == "all_reduce" else ("ring",)
    return tuple(algorithm for of, algorithm in _MODELS[backend] if of == kind)


@formula()
def collective_s(
    kind: str,
    n_bytes: Quantity,
    n_ranks: Quantity,
    link: LinkParameters,
    backend: str = "gloo",
    algorithm: str | None = None,
    item_bytes: Quantity = 4,
) -> Quantity:
    """Time of a collective in seconds over gloo, or by a textbook algorithm, from the parameters of
    a link.

    `n_bytes` is the whole vector. Models, sources and validity: :mod:`dlperf.models.gloo`,
    :mod:`dlperf.models.collectives`. gamma enters where there is a sum, the handshake and
    `item_bytes` where gloo has them. NCCL's times come from its own tables:
    :func:`dlperf.models.nccl.collective_s`. Raises DlperfError for unknown names, NCCL, or
    arguments out of range.

    >>> link = LinkParameters(latency_s=1.0, s_per_byte=0.01)
    >>> collective_s("all_reduce", 400, [1, 2], link, "textbook").tolist()
    [0.0, 6.0]
    """
    known = algorithms(kind, backend)
    if backend == "nccl":
        raise DlperfError(
            "backend 'nccl' knows its links by name, not by latency and bandwidth; use"
            " dlperf.models.nccl.collective_s with an NcclSystem"
        )
    algorithm = known[0] if algorithm is None else algorithm
    if algorithm not in known:
        raise DlperfError(f"{backend} has no {kind} by {algorithm!r}; it has {', '.join(known)}")
    model = _MODELS[backend][kind, algorithm]
    parameters = {**asdict(link), "item_bytes": item_bytes}
    own = {name: parameters[name] for name in signature(model).parameters if name in parameters}
    return model(n_bytes, n_ranks, **own)
