"""The hierarchical roofline of profiled GPU kernels: table, files, plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.text import csv_text, printable
from dlperf.core.units import format_percent, format_seconds, format_si
from dlperf.core.version import VERSION
from dlperf.ops.gpu_kernels import (
    LEVELS,
    PRECISIONS,
    TENSOR,
    KernelWork,
    Placement,
    placement,
)
from dlperf.ops.roofs import Roofs
from dlperf.profiler.gpu_kernels import VOLTA_FLOPS, GpuKernel, GpuProfile
from dlperf.report import html
from dlperf.report.document import (
    FILE_WIDTH,
    Block,
    Column,
    Heading,
    Image,
    Paragraph,
    Table,
    shorten,
    to_markdown,
    to_text,
)
from dlperf.report.drawing import (
    PointLabel,
    empty,
    label_lines,
    label_points,
    new_figure,
    plain,
    rate_axes,
    to_pngs,
)
from dlperf.report.roofline import (
    LEVEL_COLORS,
    LEVEL_SIZES,
    LEVEL_STYLES,
    Line,
    Point,
    draw_levels,
    draw_roofs,
    text_handles,
)
from dlperf.report.writing import write_files

SCHEMA, SCHEMA_VERSION = "dlperf.kernel-roofline", 1
SUFFIXES = {"text": "txt", "md": "md", "html": "html", "csv": "csv", "json": "json"}
MAX_KERNELS = 20
"""Kernels that the plot shows: those that take longest."""
_PLOT = "roofline"
_CAPTION = (
    "Hierarchical roofline (Yang, Kurth, Williams 2019): every kernel at the rate it reached, once"
    " per level of the memory at its FLOP per byte moved there. Gaps between its dots are reuse in"
    " the caches."
)
_COUNTED = (
    "FLOPs are those of CUDA cores (add + mul + 2 fma) and tensor cores together; sums over the"
    " launches of a kernel. A dash stands for what the file does not tell."
)
_MOST_MISSING = 6


@dataclass(frozen=True, repr=False)
class GpuRoofline(Displayed, by="dlperf.report.gpu_roofline"):
    """Profiled kernels under the roofs of a device. `roofs` are empty where none are known;
    `source` names where they are from.
    """

    profile: GpuProfile
    roofs: Roofs
    source: str = ""

    @property
    def has_roofs(self) -> bool:
        """Whether there is a bandwidth and a peak to draw."""
        return bool(self.roofs.bandwidths and self.roofs.ceilings)

    def place(self, work: KernelWork) -> Placement | None:
        """The place of a kernel under the roofs; None without them."""
        return placement(work, self.roofs) if self.has_roofs else None

    def to_json(self) -> dict[str, Any]:
        """All that is known as JSON; ``null`` where the file does not tell."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "versions": {"dlperf": VERSION},
            "file": self.profile.file,
            "device": self.profile.device or None,
            "compute_capability": self.profile.capability,
            "tensor_flops_assumed": self.profile.is_assumed,
            "uncounted": self.uncounted,
            "roofs": self._roofs_to_json(),
            "kernels": [self._row(kernel) for kernel in self.profile.kernels],
        }

    @property
    def uncounted(self) -> list[str]:
        """Kinds of FLOPs that nobody profiled in the whole file; they are in no sum."""
        kinds = [p for p in PRECISIONS if p not in self.profile.precisions]
        return kinds + ["tensor"] * (not self.profile.kernels[0].work.has_tensor)

    def to_csv(self) -> str:
        """A row for each kernel, with the fields of the JSON."""
        rows = [self._row(kernel) for kernel in self.profile.kernels]
        for row in rows:
            row["missing"] = " ".join(row["missing"])
        return csv_text(list(rows[0]), rows)

    def _roofs_to_json(self) -> dict[str, Any] | None:
        if not self.has_roofs:
            return None
        return {
            "source": self.source,
            "bandwidths": [
                {"level": roof.level, "bytes_per_s": roof.bytes_per_s}
                for roof in self.roofs.bandwidths
            ],
            "peaks": [
                {
                    "dtype": ceiling.dtype,
                    "fma_flops_per_s": ceiling.fma_flops_per_s,
                    "other_flops_per_s": ceiling.other_flops_per_s,
                }
                for ceiling in self.roofs.ceilings
            ],
        }

    def _row(self, kernel: GpuKernel) -> dict[str, Any]:
        work = kernel.work
        place = self.place(work)
        return {
            "kernel": kernel.kernel,
            "name": kernel.name,
            "launches": kernel.launches,
            "time_s": work.time_s,
            "flops": _whole(work.flops),
            "tensor_flops": _whole(work.tensor_flops),
            **{f"{p}_flops": _whole(work.flops_of(p)) for p in PRECISIONS},
            "fma_frac": work.fma_frac,
            **{f"{level.lower()}_bytes": _whole(work.level_bytes[level]) for level in LEVELS[::-1]},
            "flops_per_s": work.flops_per_s,
            **{f"{level.lower()}_intensity": work.intensity(level) for level in LEVELS[::-1]},
            "bound": place and place.bound,
            "attainable_flops_per_s": place and place.attainable_flops_per_s,
            "reached_frac": _reached(work, place),
            "missing": list(kernel.missing),
        }


def _whole(value: float | None) -> int | None:
    """A count; units with a prefix come rounded."""
    return None if value is None else round(value)


def _reached(work: KernelWork, place: Placement | None) -> float | None:
    return place.least_s / work.time_s if place is not None and work.time_s else None


# -- page ------------------------------------------------------------------------------------------


def one_line(found: GpuRoofline) -> str:
    """The file, its kernels and their time."""
    total = format_seconds(found.profile.total.time_s)
    name = printable(found.profile.file)
    return f"<GpuRoofline {name}: {_plural(len(found.profile.kernels), 'kernel')}, {total}>"


def page(found: GpuRoofline, images: Sequence[Image] = ()) -> list[Block]:
    """The kernels in a table, what they all make, notes."""
    return [
        Heading(_title(found), 1),
        Paragraph(_roof_lines(found)),
        Table(_columns(found)),
        Paragraph((_COUNTED,)),
        *images,
        Paragraph(tuple(f"note: {note}" for note in notes(found))),
    ]


def _title(found: GpuRoofline) -> str:
    profile = found.profile
    launches = sum(kernel.launches for kernel in profile.kernels)
    device = f" on {profile.device}" if profile.device else ""
    kernels = _plural(len(profile.kernels), "kernel")
    name = printable(Path(profile.file).name)
    return f"{name}: {kernels}, {_plural(launches, 'launch', 'es')}{device}"


def _plural(n: int, noun: str, ending: str = "s") -> str:
    return f"{n} {noun}{ending * (n != 1)}"


def _roof_lines(found: GpuRoofline) -> tuple[str, ...]:
    if not found.has_roofs:
        return ("roofs: none in the file; --machine gives those of a device",)
    levels = [f"{r.level} {format_si(r.bytes_per_s, 'B/s')}" for r in found.roofs.bandwidths]
    peaks = [f"{c.dtype} {format_si(c.fma_flops_per_s, 'FLOP/s')}" for c in found.roofs.ceilings]
    return (f"roofs of {found.source}: {', '.join(levels + peaks)}",)


def _columns(found: GpuRoofline) -> tuple[Column, ...]:
    """A row for each kernel, and one for all."""
    profile = found.profile
    total = profile.total
    works = [*(kernel.work for kernel in profile.kernels), total]
    names = [kernel.name for kernel in profile.kernels]
    launches = [kernel.launches for kernel in profile.kernels]

    def cells(text: Callable[[KernelWork], str]) -> tuple[str, ...]:
        return tuple(map(text, works))

    def share(work: KernelWork) -> str:
        known = work.time_s is not None and total.time_s
        return format_percent(work.time_s / total.time_s) if known else "-"  # type: ignore[operator]

    def intensities(level: str) -> Column:
        found = [work.intensity(level) for work in works]
        texts = tuple("-" if value is None else f"{value:.3g}" for value in found)
        return Column(level, texts, "FLOP per byte")

    def moved(level: str) -> Column:
        texts = cells(lambda work: format_si(work.level_bytes[level], "B"))
        return Column(level, texts, "bytes", rank=5)

    columns = [
        Column("kernel", (*names, "all"), align_left=True),
        Column("launches", tuple(map(str, (*launches, sum(launches)))), rank=2),
        Column("time", cells(lambda work: format_seconds(work.time_s))),
        Column("share", cells(share), rank=1),
        Column("FLOP", cells(lambda work: format_si(work.flops, "").strip())),
        Column("tensor", cells(lambda work: format_si(work.tensor_flops, "").strip()), rank=3),
        Column("FMA", cells(lambda work: format_percent(work.fma_frac)), rank=4),
        Column("FLOP/s", cells(lambda work: format_si(work.flops_per_s, "").strip())),
        *(intensities(level) for level in LEVELS),
        *(moved(level) for level in LEVELS),
    ]
    if found.has_roofs:
        places = [found.place(work) for work in works[:-1]]
        bounds = [place.bound if place else "-" for place in places]
        reached = [format_percent(_reached(w, place)) for w, place in zip(works, places)]
        columns.append(Column("bound", (*bounds, ""), align_left=True))
        columns.append(Column("of roof", (*reached, "")))
    return tuple(columns)


def notes(found: GpuRoofline) -> list[str]:
    """What a reader has to know of the numbers."""
    profile = found.profile
    found_notes = []
    if profile.is_assumed:
        found_notes.append(
            "the file does not tell the device: a tensor-core instruction counts"
            f" {VOLTA_FLOPS} FLOP as on the V100; on later devices it is more, and on the A100 the"
            " counter has other instructions, too. --machine names the device, --tensor-flops the"
            " FLOP of an instruction"
        )
    if found.uncounted:
        found_notes.append(f"not profiled, and in no sum: FLOPs of {', '.join(found.uncounted)}")
    idle = [kernel for kernel in profile.kernels if kernel.work.flops == 0]
    if idle:
        names = ", ".join(kernel.name for kernel in idle[:_MOST_MISSING])
        more = f" and {len(idle) - _MOST_MISSING} more" if len(idle) > _MOST_MISSING else ""
        found_notes.append(f"without FLOPs, and so without dots in the plot: {names}{more}")
    missing: dict[tuple[str, ...], list[str]] = {}
    for kernel in profile.kernels:
        if kernel.missing:
            missing.setdefault(kernel.missing, []).append(kernel.name)
    for metrics, kernels in missing.items():
        who = "all kernels" if len(kernels) == len(profile.kernels) else ", ".join(kernels)
        shown = ", ".join(metrics[:_MOST_MISSING])
        more = f" and {len(metrics) - _MOST_MISSING} more" if len(metrics) > _MOST_MISSING else ""
        found_notes.append(f"missing of {who}: {shown}{more}")
    return found_notes


# -- files -----------------------------------------------------------------------------------------


def render(found: GpuRoofline, format: str, png: bytes = b"", width: int | None = None) -> str:
    """The table as ``text``, ``md``, ``html``, ``csv`` or ``json``.

    Text is as wide as the terminal; with a `width` its tables are whole. With a `png` Markdown
    links to the plot and HTML contains it. Raises DlperfError for an unknown format.
    """
    images = [Image(_PLOT, png, _CAPTION, f"{_PLOT}.png")] if png else []
    match format:
        case "text":
            return to_text(page(found), width, width is not None).rstrip("\n")
        case "md":
            return to_markdown("roofline", page(found, images))
        case "html":
            return html.to_html("roofline", page(found, images))
        case "csv":
            return found.to_csv()
        case "json":
            return json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n"
    raise DlperfError(f"format {format!r} is unknown; known are {', '.join(SUFFIXES)}")


def write(
    found: GpuRoofline, folder: str | Path, formats: Sequence[str], force: bool = False
) -> list[Path]:
    """Write ``roofline.txt``, ``.md``, ``.html``, ``.csv``, ``.json`` as asked, and
    ``roofline.png``; the files in that order.

    Raises DlperfError for a folder that cannot be made or contains foreign files (unless `force`).
    """
    pngs = to_pngs({_PLOT: lambda: figure(found)}, "dlperf roofline")
    (png,) = pngs.values()
    files: dict[str, str | bytes] = {
        f"{_PLOT}.{SUFFIXES[format]}": render(found, format, png, FILE_WIDTH)
        for format in dict.fromkeys(formats)
    }
    if "text" in formats:
        files[f"{_PLOT}.txt"] = f"dlperf roofline\n\n{files[f'{_PLOT}.txt']!s}\n"
    return write_files(folder, {**files, **pngs}, force)


# -- plot ------------------------------------------------------------------------------------------


def _points(found: GpuRoofline) -> list[Point]:
    """The kernels that can be drawn, those that take longest first."""
    points = []
    for kernel in found.profile.kernels:
        work = kernel.work
        intensities = {level: x for level in LEVELS if (x := work.intensity(level))}
        if work.flops_per_s and work.time_s and intensities:
            points.append(Point(kernel.name, "", work.flops_per_s, work.time_s, intensities))
    return points


def figure(found: GpuRoofline) -> Figure:
    """The kernels that take longest: each at the rate it reached, once per level of the memory at
    its intensity there (Yang, Kurth, Williams 2019), under the roofs where they are known.
    """
    every_point = _points(found)
    points = every_point[:MAX_KERNELS]
    canvas = new_figure(10.6, 6.0)
    ax = canvas.subplots()
    lines = _lines(found)
    if found.has_roofs:
        draw_roofs(ax, points, found.roofs, lines, (3, 3, 2.5, 1.7), LEVEL_COLORS)
    elif points:
        xs = [x for point in points for x in point.intensities.values()]
        ys = [point.flops_per_s for point in points]
        rate_axes(ax, (min(xs) / 3, max(xs) * 3), (min(ys) / 2.5, max(ys) * 2.5))
    for point in points:
        draw_levels(ax, point)
    if not points:
        empty(ax, "no kernel has FLOPs, bytes and a time to draw")
    ax.set(
        xlabel="arithmetic intensity (FLOP per byte that the level moves)", ylabel="rate (FLOP/s)"
    )
    title = shorten(_title(found), 90)
    more = f"\nthe {len(points)} longest of {len(every_point)} kernels with FLOPs"
    canvas.suptitle(plain(title, 90) + more * (len(every_point) > len(points)), fontsize=10.5)
    rates = {roof.level: roof.bytes_per_s for roof in found.roofs.bandwidths}
    handles = [
        ax.plot(
            [],
            [],
            color=LEVEL_COLORS[level],
            linestyle=LEVEL_STYLES[level] if level in rates else "",
            marker="o",
            markersize=LEVEL_SIZES[level],
            label=f"{level}  {format_si(rates[level], 'B/s')}" if level in rates else level,
        )[0]
        for level in LEVELS
    ]
    names = [f"{n}:  {plain(point.layer, 34)}" for n, point in enumerate(points, 1)]
    handles += text_handles(ax, [" ", *names])
    canvas.legend(handles=handles, loc="outside right upper", handlelength=2.6)
    label_lines(ax, [(line.flops_per_s, line.text) for line in lines] if found.has_roofs else [])
    dots = [(x, point.flops_per_s) for point in points for x in point.intensities.values()]
    labels = [
        PointLabel(min(point.intensities.values()), point.flops_per_s, str(n), True)
        for n, point in enumerate(points, 1)
    ]
    label_points(ax, labels, dots)
    return canvas


def _lines(found: GpuRoofline) -> list[Line]:
    """The peaks, the highest first, those of the same height in one; for precisions of the CUDA
    cores that the kernels use, also the peak without multiply-adds.
    """
    profile = found.profile
    used = {d for p, d in PRECISIONS.items() if any(k.work.flops_of(p) for k in profile.kernels)}
    heights: dict[tuple[float, str], list[str]] = {}
    for ceiling in sorted(found.roofs.ceilings, key=lambda one: one.dtype.startswith(TENSOR)):
        heights.setdefault((ceiling.fma_flops_per_s, ""), []).append(ceiling.dtype)
        if ceiling.dtype in used and ceiling.other_flops_per_s < ceiling.fma_flops_per_s:
            heights.setdefault((ceiling.other_flops_per_s, " no FMA"), []).append(ceiling.dtype)
    lines = []
    for (height, what), dtypes in heights.items():
        first, *others = dtypes
        is_tensor = first.startswith(TENSOR)
        names = [first, *(dtype.removeprefix(TENSOR) if is_tensor else dtype for dtype in others)]
        text = f"{', '.join(names)}{what}  {format_si(height, 'FLOP/s')}"
        lines.append(Line(height, text, (0, (5, 2)) if what else "solid", 1.0 if what else 1.6))
    return sorted(lines, key=lambda line: -line.flops_per_s)
