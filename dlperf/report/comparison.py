"""Reports: predictions beside a measurement, in every format and as files in a folder."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_type, refuse
from dlperf.core.files import write_bytes
from dlperf.core.measurement import Measurement
from dlperf.core.text import counted
from dlperf.forecast.prediction import Prediction
from dlperf.report.document import FILE_WIDTH, Image, to_markdown, to_text
from dlperf.report.step_comparison import (
    StepComparison,
    report_to_json,
    reports_to_csv,
    reports_to_json,
)
from dlperf.report.step_pages import MAX_LINES, overview_page, report_page
from dlperf.report.timeline import timeline
from dlperf.report.writing import check_folder, make_folder, slug, write_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = {"text": "txt", "md": "md", "html": "html", "csv": "csv", "json": "json"}
FORMATS = tuple(SUFFIXES)


@dataclass(frozen=True, repr=False)
class Report(Displayed, StepComparison, by="dlperf.report.summaries"):
    """One measured step beside the predictions of one or several predictors."""

    def to_text(
        self, width: int | None = None, max_lines: int | None = MAX_LINES, all_columns: bool = False
    ) -> str:
        """Plain text, at most `width` columns wide (default: the terminal's, 120 where there is
        none). Layer tables beyond `max_lines` lines are folded (None: never).

        Columns that do not fit are named below their table. With `all_columns` tables are as wide
        as their cells.
        """
        return to_text(report_page(self, max_lines=max_lines, is_brief=True), width, all_columns)

    def to_markdown(self, images: Sequence[str] = ()) -> str:
        """Markdown with every layer; `images` are links to the plots, if they lie beside it."""
        plots = [Image(Path(link).stem, link=link) for link in images]
        return to_markdown(f"report, {self.created}", report_page(self, plots))

    def to_csv(self) -> str:
        """The frame as CSV, with target, batch size, threads, machine, versions and date in every
        row.
        """
        return reports_to_csv([self])

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data (schema ``dlperf.report``); null where unknown."""
        return report_to_json(self)

    def to_html(self) -> str:
        """One self-contained HTML page, plots included."""
        return reports_to_html([self])

    def figures(self) -> dict[str, Figure]:
        """The plots by name, as matplotlib figures: ``layers``, ``scatter``, ``roofline``,
        ``hierarchy``, ``time``.

        The two rooflines are left out where the machine file lacks bandwidths or peaks.
        """
        from dlperf.report.plots import figures_of  # matplotlib, which takes a while to import

        return figures_of(self)

    @cached_property
    def pngs(self) -> dict[str, bytes]:
        """The plots by name as PNG, drawn once."""
        from dlperf.report.plots import pngs_of

        return pngs_of(self)

    def plot(self, folder: str | Path = ".", prefix: str = "") -> list[Path]:
        """Write the plots as PNG into `folder` (made if missing), ``PREFIXlayers.png`` and so on;
        see :meth:`figures`.

        Raises DlperfError if the folder cannot be made, WorkFailed if the disk refuses.
        """
        folder = make_folder(folder)
        written = {folder / f"{prefix}{name}.png": png for name, png in self.pngs.items()}
        for path, png in written.items():
            write_bytes(path, png)
        return list(written)


def compare(
    prediction: Prediction | Sequence[Prediction],
    measurement: Measurement,
    *,
    command: str = "",
    created: str | None = None,
    blind: Sequence[Prediction] = (),
) -> Report:
    """Put one or several predictions of a step beside its measurement.

    `created` defaults to now. `blind` are the same predictions without the state that the machine
    had during the measurement, for the predictions that are for it. Raises DlperfError for an
    argument of another type, without any prediction, and where the steps differ: in batch size, in
    thread count, training and inference.
    Another target's name is a warning in the report.
    """
    predictions = tuple(prediction) if isinstance(prediction, (list, tuple)) else (prediction,)
    if not predictions:
        raise DlperfError("compare: no prediction given; pass one, or several in a list")
    for p in predictions:
        check_type("compare", "prediction", p, Prediction, "dlperf.predict makes one")
    refuse(
        (
            len(blind) not in (0, len(predictions)),
            f"compare: {len(blind)} blind predictions for {len(predictions)}; give one for each",
        )
    )
    way_out = "dlperf.measure makes one, Measurement.load(path) reads one"
    check_type("compare", "measurement", measurement, Measurement, way_out)
    kinds = {True: "inference", False: "training"}
    warnings = []
    for p in predictions:
        sizes = p.trace.batch_size, measurement.batch_size
        sides = kinds[p.trace.inference], kinds[measurement.inference]
        refuse(
            (
                sizes[0] != sizes[1],
                (
                    f"compare: the prediction is for batch size {sizes[0]}, the measurement for"
                    f" {sizes[1]}; give both the same"
                ),
            ),
            (
                sides[0] != sides[1],
                (
                    f"compare: the prediction is of {sides[0]}, the measurement of {sides[1]}; give"
                    " both the same"
                ),
            ),
            (
                p.threads != measurement.threads,
                (
                    f"compare: the prediction is for {counted(p.threads, 'thread')}, the"
                    f" measurement was taken with {measurement.threads}; give dlperf.predict or"
                    " dlperf.measure the other's threads"
                ),
            ),
        )
        target = measurement.target
        if p.trace.target and target and p.trace.target != target:
            warnings.append(f"predicted target {p.trace.target}, measured {target}")
    predictors: list[str] = []
    for p in predictions:
        n_before = sum(
            other == p.predictor or other.startswith(f"{p.predictor} #") for other in predictors
        )
        predictors.append(p.predictor if not n_before else f"{p.predictor} #{n_before + 1}")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Report(
        predictions,
        measurement,
        tuple(predictors),
        tuple(dict.fromkeys(warnings)),
        command,
        now if created is None else created,
        blind=tuple(one.step for one in blind),
    )


def plots_of(report: Report) -> list[Image]:
    """The report's plots with their captions, for HTML."""
    from dlperf.report.plots import CAPTIONS

    return [Image(name, png, CAPTIONS[name]) for name, png in report.pngs.items()]


def reports_to_html(reports: Sequence[Report]) -> str:
    """One page of all reports: an overview of the cases, then each one's layers and plots."""
    from dlperf.report.html import to_html

    page = overview_page(reports)
    for number, report in enumerate(reports, 1):
        page += report_page(report, plots_of(report), f"case{number}")
    return to_html(", ".join(dict.fromkeys(report.target for report in reports)), page)


def render(
    reports: Sequence[Report],
    format: str,
    images: Sequence[Sequence[str]] = (),
    width: int | None = None,
) -> str:
    """All reports as one document: ``text``, ``md``, ``html``, ``csv`` or ``json``.

    Text is as wide as the terminal; with a `width` its tables are whole, and only prose is as wide.
    `images` are the links to each report's plots, for Markdown. Raises DlperfError for an unknown
    format or no report.
    """
    if not reports:
        raise DlperfError("report: there is nothing to report; name a target or a measurement")
    match format:
        case "text":
            max_lines = MAX_LINES if width is None else None
            return "\n\n".join(r.to_text(width, max_lines, width is not None) for r in reports)
        case "md":
            links = [*images, *((),) * len(reports)]
            return "\n".join(r.to_markdown(own) for r, own in zip(reports, links))
        case "html":
            return reports_to_html(reports)
        case "csv":
            return reports_to_csv(reports)
        case "json":
            return json.dumps(reports_to_json(reports), indent=1, allow_nan=False) + "\n"
    raise _unknown(format)


def _unknown(format: str) -> DlperfError:
    return DlperfError(f"report format {format!r} is unknown; known are {', '.join(FORMATS)}")


def write(
    reports: Sequence[Report],
    folder: str | Path,
    formats: Sequence[str] = FORMATS,
    force: bool = False,
) -> list[Path]:
    """Write ``report.txt``, ``.md``, ``.html``, ``.csv``, ``.json`` as asked, and every report's
    plots as PNG; the files in that order. ``timeline.json`` comes with ``report.json``, behind it.

    The folder is made if missing. Files of an earlier report are replaced; nothing else is touched.

    Raises DlperfError for an unknown format, a folder that cannot be made or contains foreign files
    (unless `force`); WorkFailed if the disk refuses.
    """
    for format in formats:
        if format not in FORMATS:
            raise _unknown(format)
    check_folder(folder, force)  # before the plots are drawn, which takes seconds
    plots = [
        {f"{name}-{plot}.png": png for plot, png in report.pngs.items()}
        for report, name in zip(reports, _names(reports))
    ]
    files: dict[str, str | bytes] = {
        f"report.{SUFFIXES[format]}": render(reports, format, [*map(list, plots)], FILE_WIDTH)
        for format in dict.fromkeys(formats)
    }
    if "json" in formats:
        cases = timeline((report.predictions, report.measurement) for report in reports)
        files["timeline.json"] = json.dumps(cases, allow_nan=False)
    if "text" in formats:
        files["report.txt"] = f"dlperf report\n\n{files['report.txt']!s}"
    for own in plots:
        files |= own
    return write_files(folder, files, force)


def _names(reports: Sequence[Report]) -> list[str]:
    """A name for each report's files: target, batch size and threads, with a number where it is not
    the first of that name.
    """
    names: dict[str, None] = {}
    for report in reports:
        target = slug(report.target.rsplit("/", 1)[-1])
        name = f"{target}-b{report.batch_size}-t{report.measurement.threads}"
        name += "-inference" if report.inference else ""
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        names[next(one for one in itertools.chain([name], numbered) if one not in names)] = None
    return list(names)
