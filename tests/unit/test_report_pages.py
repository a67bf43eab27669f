"""The HTML page, the plots, and writing them into a folder."""

from __future__ import annotations

import functools
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import report_cases as cases
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from dlperf.core.errors import DlperfError
from dlperf.core.files import check_writable
from dlperf.core.trace import LOSS
from dlperf.report.comparison import FORMATS, Report, compare, render, reports_to_html, write
from dlperf.report.drawing import own_style
from dlperf.report.plots import figures_of, layers_figure
from dlperf.report.roofline import hierarchy_figure, level_points_of, points_of
from dlperf.report.writing import check_folder, slug

VOID = {"meta", "img", "br", "link", "input", "hr"}
EVIL = "<b>bold</b><script>alert('x')</script>\"&$x_1$" + ".long_name" * 12


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the text and the attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.names: set[str | None] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.names |= {value for name, value in attrs if name == "id"}
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


ODD = {
    "several": lambda: compare([cases.cnn()[0], cases.gemm_table()], cases.cnn_measurement()),
    "null phases": lambda: compare(cases.gemm_table(), cases.cnn_measurement()),
    "one layer, inference": lambda: compare(*cases.single()),
    "60 layers": lambda: compare(*cases.wide(60)),
    "hostile name": lambda: compare(*cases.hostile(EVIL)),
    "glyphs that no font has": lambda: compare(*cases.hostile("層\x1b")),
    "nothing on both sides": lambda: compare(
        cases.cnn()[0], cases.cnn_measurement(without=list(cases.CNN))
    ),
    "five predictors": lambda: compare([cases.cnn()[0]] * 5, cases.cnn_measurement()),
    "cnn": lambda: compare(*cases.cnn()),
}


@functools.cache
def reported(name: str) -> Report:
    """A report of ODD: made once, as its plots are drawn once, which takes seconds."""
    return ODD[name]()


@functools.cache
def hierarchy(name: str) -> Figure:
    """The hierarchical roofline of a report of ODD, drawn once."""
    with own_style():
        figure = hierarchy_figure(reported(name))
    assert figure is not None
    return figure


@pytest.fixture
def report() -> Report:
    return reported("several")


@pytest.mark.slow
def test_page_is_whole_and_needs_nothing_else(report: Report) -> None:
    page = Page(report.to_html())
    assert page.text.count("classifier") >= 3
    for layer in ("Conv2d", "ReLU", "(loss)", "calibrated", "gemm-table"):
        assert layer in page.text
    assert "script" not in page.tags
    assert page.tags.count("img") == 5
    assert all(link.startswith(("data:image/png;base64,", "#case")) for link in page.links)
    words = re.sub(
        r"base64,[A-Za-z0-9+/=]+", "", report.to_html()
    )  # in which any four letters stand now and then
    assert "http" not in words
    assert "url(" not in words


@pytest.mark.slow
def test_page_holds_every_layer_of_a_large_network() -> None:
    html = reported("60 layers").to_html()
    assert all(f'title="{layer.name}"' in html for layer in cases.wide(60)[0].trace.layers)


@pytest.mark.slow
def test_page_escapes_names() -> None:
    page = Page(reported("hostile name").to_html())
    assert "script" not in page.tags
    assert page.tags.count("b") == 1  # the predictor's name in the summary
    assert "alert" in page.text


@pytest.mark.slow
def test_page_of_several_reports(report: Report) -> None:
    page = Page(reports_to_html([report, reported("one layer, inference")]))
    assert "Cases" in page.text
    assert {"#case1", "#case2"} <= set(page.links)
    assert {"case1", "case2"} <= page.names


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_plots_are_drawn(name: str) -> None:
    pngs = reported(name).pngs
    assert list(pngs) == ["layers", "scatter", "roofline", "hierarchy", "time"]
    for png in pngs.values():
        image = Image.open(io.BytesIO(png)).convert("L")
        assert min(image.size) > 150
        shades = image.histogram()
        assert sum(shades[:100]) > 500  # something dark stands on the white


@pytest.mark.slow
def test_bars_of_a_large_network_say_what_they_leave_out() -> None:
    with own_style():
        figure = layers_figure(reported("60 layers"))
    assert "25 longest of 60 layers" in figure.get_suptitle()
    assert "35" in figure.get_suptitle()
    assert len(figure.axes[0].get_yticklabels()) == 25


def test_roofline_numbers() -> None:
    report = compare(*cases.cnn())
    roofs = report.predictions[0].roofs
    peaks = {ceiling.dtype: ceiling.fma_flops_per_s for ceiling in roofs.ceilings}
    assert peaks == pytest.approx({"float32": 80e9, "float64": 40e9})
    bandwidths = {roof.level: roof.bytes_per_s for roof in roofs.bandwidths}
    assert bandwidths == pytest.approx({"L1": 200e9, "L2": 100e9, "L3": 40e9, "DRAM": 10e9})
    points, n_without = points_of(report)
    # features.0: 2 x 32 x 64 x 128 FLOP in 250 us; operands 4 x (32 x 128 + 128 x 64 + 32 x 64)
    # bytes
    conv = next(
        point for point in points if point.layer == "features.0" and point.phase == "forward"
    )
    assert conv.flops_per_s == pytest.approx(2 * 32 * 64 * 128 / 250e-6)
    assert conv.intensities["operands"] == pytest.approx(
        2 * 32 * 64 * 128 / (4 * (32 * 128 + 128 * 64 + 32 * 64))
    )
    assert len(points) + n_without == 8


@pytest.mark.slow
def test_hierarchical_roofline_draws_each_level_at_the_layers_height() -> None:
    report = compare(*cases.cnn())
    dots = {dots.layer: dots for dots in level_points_of(report, "forward")}
    assert list(dots) == ["features.0", "classifier", "features.1", LOSS]  # 250, 110, 50, 20 us
    conv = dots["features.0"]
    assert conv.flops_per_s == pytest.approx(2 * 32 * 64 * 128 / 250e-6)
    # storages unknown: all operands come from DRAM once, where the tile of half an L2 holds a whole
    # one; the registers need more
    once = 4 * (32 * 128 + 128 * 64 + 32 * 64)
    assert conv.intensities["DRAM"] == pytest.approx(2 * 32 * 64 * 128 / once)
    assert conv.intensities["L1"] < conv.intensities["DRAM"]
    axes = hierarchy("cnn").axes[0]
    heights = [
        line.get_ydata()[0]
        for line in axes.lines
        if line.get_marker() == "o" and len(line.get_xdata()) == 1
    ]
    assert sorted(heights) == pytest.approx(
        sorted(d.flops_per_s for d in dots.values() for _ in range(4))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "60 layers"])
def test_texts_of_the_hierarchical_roofline_keep_clear_of_each_other(name: str) -> None:
    figure = hierarchy(name)
    figure.draw_without_rendering()
    texts = [text for ax in figure.axes for text in ax.texts] + [
        text for text in figure.legends[0].get_texts() if text.get_text().strip()
    ]
    boxes = [
        Text.get_window_extent(text) for text in texts
    ]  # the text alone, not the line from it to its roof
    frame = figure.bbox
    for index, box in enumerate(boxes):
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1, texts[index].get_text()
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1, texts[index].get_text()
        for other in range(index):
            assert not box.overlaps(boxes[other]), (
                texts[index].get_text(),
                texts[other].get_text(),
            )
    assert not any("child" in text.get_text() for text in texts)


@pytest.mark.slow
def test_page_and_files_hold_the_bytes_of_every_level() -> None:
    report = reported("cnn")
    html = report.to_html()
    assert "Bytes by level of the memory" in html
    assert "Bytes by level of the memory" in report.to_markdown()
    row = report.frame.set_index("layer").loc["features.1"]
    # relu on 4096 float32, read and written; its backward reads two and writes one: 20 bytes an
    # element
    assert [row[f"{level}_bytes"] for level in ("L1", "L2", "L3", "DRAM")] == [20 * 4096] * 4
    data = report.to_json()["hierarchy"]
    assert [entry["level"] for entry in data["levels"]] == ["L1", "L2", "L3", "DRAM"]
    assert {entry["dtype"]: entry["other_source"] for entry in data["ceilings"]} == {
        "float32": "half of FMA",
        "float64": "half of FMA",
    }
    assert (
        sum(entry["L1_bytes"] for entry in data["layers"] if entry["layer"] == "features.1")
        == 20 * 4096
    )


@pytest.mark.slow
def test_no_roofline_without_roofs() -> None:
    for machine in (
        cases.machine(with_gemm=False),
        cases.machine(with_bandwidth=False),
        cases.machine(with_gemm=False, with_bandwidth=False),
    ):
        report = compare(
            cases.prediction(cases.cnn_trace(), cases.cnn_items(), on=machine),
            cases.cnn_measurement(),
        )
        assert list(figures_of(report)) == ["layers", "scatter", "time"]


@pytest.mark.slow
def test_the_users_matplotlib_is_left_alone() -> None:
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        pngs = compare(*cases.cnn()).pngs
        assert dict(matplotlib.rcParams) == before
    theirs, ours = (
        Image.open(io.BytesIO(drawn["time"])).tobytes() for drawn in (pngs, reported("cnn").pngs)
    )
    assert theirs == ours


def test_plot_writes_files(report: Report, tmp_path: Path) -> None:
    files = report.plot(tmp_path / "new" / "folder", "lenet-")
    assert [path.name for path in files] == [
        "lenet-layers.png",
        "lenet-scatter.png",
        "lenet-roofline.png",
        "lenet-hierarchy.png",
        "lenet-time.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


@pytest.mark.slow
def test_write_and_write_again(report: Report, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    reports = [report, report, compare(*cases.hostile("../../etc/pass wd"))]
    files = write(reports, folder)
    assert [path.name for path in files[:5]] == [
        "report.txt",
        "report.md",
        "report.html",
        "report.csv",
        "report.json",
    ]
    assert files[5].name == "timeline.json"
    assert len(files) == 6 + 3 * 5
    assert {path.parent for path in files} == {folder}
    assert len(set(files)) == len(files)
    assert json.loads((folder / "report.json").read_text())["schema"] == "dlperf.reports"
    links = (folder / "report.md").read_text()
    assert all(path.name in links for path in files[6:])
    assert sorted(folder.iterdir()) == sorted(files)  # nothing temporary stays
    assert write(reports, folder) == files  # its own files may be replaced


@pytest.mark.parametrize("foreign", ["notes.txt", "report.html", "data.json", "photo.png", "sub/"])
def test_foreign_files_are_safe(report: Report, tmp_path: Path, foreign: str) -> None:
    path = tmp_path / foreign
    if foreign.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    with pytest.raises(DlperfError, match=r"did not write.*--force"):
        write([report], tmp_path, ["csv"])
    assert not (tmp_path / "report.csv").exists()
    write([report], tmp_path, ["csv"], force=True)
    assert (tmp_path / "report.csv").exists()
    assert path.is_dir() or path.read_text() == "mine"


@pytest.mark.slow
def test_every_plot_names_its_circumstances(report: Report) -> None:
    figures = figures_of(report)
    assert set(figures) == {"layers", "scatter", "roofline", "hierarchy", "time"}
    for name, figure in figures.items():
        titles = " ".join([figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)])
        for part in ("nets.py:cnn", "batch size 32", "1 thread\n", "Made-up CPU"):
            assert part in titles, name


def test_folders_that_cannot_be(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DlperfError, match="is a file"):
        check_folder(file)
    with pytest.raises(DlperfError, match="cannot be made"):
        check_folder(file / "below")
    with pytest.raises(DlperfError, match="cannot be made"):
        check_folder(file / "far" / "below")
    with pytest.raises(DlperfError, match=r"cannot be made \(File name too long\)"):
        check_folder(tmp_path / ("x" * 300))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "below")
    with pytest.raises(DlperfError, match="cannot be written"):
        check_folder(link)
    (tmp_path / "reports" / "other").mkdir(parents=True)
    with pytest.raises(DlperfError, match="contains other"):
        check_folder(tmp_path / "reports")  # an empty folder is nobody's
    (tmp_path / "reports" / "other" / "report.txt").write_text("dlperf report\n")
    check_folder(tmp_path / "reports")  # a folder of another report
    (tmp_path / "reports" / "other" / "diary.txt").write_text("dear diary\n")
    with pytest.raises(DlperfError, match="contains other"):
        check_folder(tmp_path / "reports")
    check_folder(tmp_path / "new" / "folder")  # which is only made when there is something to write
    assert not (tmp_path / "new").exists()
    with pytest.raises(DlperfError, match="unknown"):
        write([report], tmp_path / "out", ["pdf"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(DlperfError, match="nothing to report"):
        render([], "text")


@pytest.mark.skipif(
    not Path("/proc/self").exists(),
    reason="needs a folder that nobody can write to, whoever runs this",
)
def test_a_folder_that_refuses_although_its_permissions_do_not_say_so() -> None:
    for index in ("/proc/self/fdinfo", "/proc/dlperf"):
        with pytest.raises(DlperfError, match=r"cannot be (made|written)"):
            check_folder(index)
    with pytest.raises(DlperfError, match="cannot be written"):
        check_writable("/proc/self/report.json")


@pytest.mark.slow
def test_every_file_says_where_it_comes_from(tmp_path: Path) -> None:
    report = compare(
        *cases.cnn(), command="dlperf report nets.py:cnn", created="2020-01-02T03:04:05+00:00"
    )
    for path in write([report], tmp_path, FORMATS):
        data = path.read_bytes()
        marks = (b"Made-up CPU", b"2020-01-02T03:04:05", b"dlperf report nets.py:cnn")
        for mark in (
            marks[:1] if path.name == "timeline.json" else marks
        ):  # it depends on data alone
            assert mark in data or mark.replace(b"_", b"\\_") in data, (path, mark)


def test_slug() -> None:
    assert "/" not in slug("../../x")
    assert slug("...") == "report"
    assert len(slug("x" * 500)) == 80
