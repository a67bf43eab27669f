"""The CSV of Nsight Compute: both pages, any order, units, and what cannot be read."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError
from dlperf.core.text import csv_rows
from dlperf.profiler.ncu_table import Launch, read, unit_factor

PROFILES = Path(__file__).parents[1] / "golden" / "frozen" / "profiles"
LONG = ("ID", "Process ID", "Kernel Name", "CC", "Section Name", "Metric Name", "Metric Unit")
LONG = (*LONG, "Metric Value")


def quoted(*cells: object) -> str:
    return ",".join('"' + str(cell).replace('"', '""') + '"' for cell in cells)


def long_page(*rows: tuple[object, ...], titles: tuple[str, ...] = LONG) -> str:
    """A row is ID, kernel, metric, unit, value."""
    lines = [quoted(*titles)]
    for number, kernel, metric, unit, value in rows:
        cells = dict(zip(LONG, (number, 7, kernel, "8.0", "Raw", metric, unit, value)))
        lines.append(quoted(*(cells[title] for title in titles)))
    return "\n".join(lines) + "\n"


@pytest.fixture
def attention() -> str:
    return gzip.decompress((PROFILES / "attention.csv.gz").read_bytes()).decode()


def launches(tmp_path: Path, text: str | bytes) -> tuple[Launch, ...]:
    path = tmp_path / "ncu.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path).launches


def refusal(tmp_path: Path, text: str | bytes, name: str = "ncu.csv") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DlperfError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def as_raw(text: str) -> str:
    """The same launches on the raw page."""
    rows = [cells for _, cells in csv_rows(text[text.index('"ID"') :])]
    titles, rows = rows[0], rows[1:]
    at = {title: index for index, title in enumerate(titles)}
    metrics = list(dict.fromkeys(row[at["Metric Name"]] for row in rows))
    units = {row[at["Metric Name"]]: row[at["Metric Unit"]] for row in rows}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = (row[at["ID"]], row[at["Kernel Name"]])
        found.setdefault(key, {})[row[at["Metric Name"]]] = row[at["Metric Value"]]
    lines = [quoted("ID", "Kernel Name", *metrics), quoted("", "", *(units[m] for m in metrics))]
    lines += [quoted(*key, *(own[m] for m in metrics)) for key, own in found.items()]
    return "\n".join(["==PROF== Connected to process 1", *lines]) + "\n"


def test_the_long_page(tmp_path: Path, attention: str) -> None:
    found = launches(tmp_path, attention)
    # 8 launches were put into the excerpt, two of each of these kernels
    assert len(found) == 8
    assert [launch.kernel for launch in found].count("ampere_sgemm_32x32_sliced1x4_tn") == 2
    assert found[0].metrics["dram__bytes.sum"] == 303360  # "303,360" in the file
    assert found[0].capability is None


def test_both_pages_say_the_same(tmp_path: Path, attention: str) -> None:
    assert launches(tmp_path, as_raw(attention)) == launches(tmp_path, attention)


def test_rows_and_columns_have_any_order(tmp_path: Path, attention: str) -> None:
    wanted = {(one.kernel, *sorted(one.metrics.items())) for one in launches(tmp_path, attention)}
    rows = [cells for _, cells in csv_rows(attention[attention.index('"ID"') :])]
    rows = [cells + [""] * (len(rows[0]) - len(cells)) for cells in rows]
    columns = list(range(len(rows[0])))
    shuffler = random.Random(5)
    for _ in range(3):
        shuffler.shuffle(columns)
        body = rows[1:]
        shuffler.shuffle(body)
        text = "\n".join(quoted(*(row[c] for c in columns)) for row in [rows[0], *body]) + "\n"
        found = launches(tmp_path, text)
        assert {(one.kernel, *sorted(one.metrics.items())) for one in found} == wanted


def test_lines_of_the_profiler_and_the_program_are_left_out(tmp_path: Path) -> None:
    text = long_page((0, "k", "dram__bytes.sum", "byte", "1,024"))
    head, body = text.split("\n", 1)
    noisy = f"epoch 1, loss 2\n==PROF== Connected\n\n{head}\n==WARNING== x, y\nepoch 2\n{body}"
    found = launches(tmp_path, noisy + "==PROF== Disconnected from process 3\n")
    assert found == (Launch("k", {"dram__bytes.sum": 1024.0}, 8.0),)
    assert launches(tmp_path, b"\xef\xbb\xbf" + text.encode()) == found
    assert launches(tmp_path, text.replace("\n", "\r\n")) == found
    assert len(launches(tmp_path, text + text)) == 2  # two runs in one file
    assert len(launches(tmp_path, text + body.replace('"7"', '"8"'))) == 2  # two processes


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("", 1.0),
        ("byte", 1.0),
        ("Kbyte", 1e3),
        ("Mbyte", 1e6),
        ("Gbyte", 1e9),
        ("MB", 1e6),
        ("second", 1.0),
        ("msecond", 1e-3),
        ("usecond", 1e-6),
        ("us", 1e-6),
        ("nsecond", 1e-9),
        ("ns", 1e-9),
        ("cycle/nsecond", 1e9),
        ("cycle/second", 1.0),
        ("Gbyte/second", 1e9),
        ("byte/ns", 1e9),
        ("Ghz", 1e9),
        ("inst/cycle", 1.0),
        ("sector", 1.0),
        ("%", 1e-2),
        ("parsec", None),
    ],
)
def test_units(unit: str, factor: float | None) -> None:
    assert unit_factor(unit) == factor


def test_what_has_no_value_is_missing_and_not_zero(tmp_path: Path) -> None:
    rows = [(0, "k", f"m{n}__x.sum", "inst", value) for n, value in enumerate(("n/a", "", "0"))]
    ((launch),) = launches(tmp_path, long_page(*rows))
    assert launch.metrics == {"m2__x.sum": 0.0}


def test_a_file_cut_in_a_row_is_refused(tmp_path: Path, attention: str) -> None:
    lines = attention.splitlines(keepends=True)
    start = len("".join(lines[:6]))
    ends = {len("".join(lines[:n])) for n in range(len(lines) + 1)}
    for end in range(start, len(attention) - 5, 997):
        if end not in ends and end + 1 not in ends:
            assert "cut" in refusal(tmp_path, attention[:end]), end
    in_a_name = attention.index("splitKreduce_kernel", start) + 9
    assert "quotation marks do not match" in refusal(tmp_path, attention[:in_a_name])


def test_a_raw_page_cut_in_a_row_is_refused(tmp_path: Path, attention: str) -> None:
    text = as_raw(attention)
    first = text.index("ampere")
    for end in range(first, len(text) - 2, 211):
        if text[end - 1] != "\n" and text[end] != "\n":
            assert "cut" in refusal(tmp_path, text[:end]), end


def test_a_last_kernel_without_the_end_of_its_metrics_is_a_cut(
    tmp_path: Path, attention: str
) -> None:
    lines = attention.splitlines(keepends=True)
    whole = "".join(lines[:-5])
    assert "its last kernel has 11 of the 16 metrics" in refusal(tmp_path, whole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        (long_page(), "but no kernel"),
        ('"ID","Process ID","Process Na', "is cut in the titles"),
        ("dlperf\n1,2,3\n", "has no table of ncu --csv"),
        ('{"schema": "dlperf.trace"}', "has no table of ncu --csv"),
        ("a\0b,ID,Kernel Name\n", "is binary"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\xfa", "is no text in UTF-8"),
        (long_page((0, "k", "m__x.sum", "", 1)).encode("utf-16"), "is UTF-16"),
        (long_page().replace(",", ";"), "semicolons"),
        ("==12== NVPROF is profiling process 12\n==12== Profiling result:\n", "is of nvprof"),
        ('"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"\n', "is of nvprof"),
        ("Time (%),Total Time (ns),Instances,Avg (ns),Name\n1,2,3,4,k\n", "is of Nsight Systems"),
        ("Start (ns),Duration (ns),CorrId,Name\n", "is of Nsight Systems"),
        (
            '"Process ID","Kernel Name","Invocations","Metric Name","Average"\n',
            "is a summary",
        ),
        (long_page((0, "k", "m__x.sum", "byte", "12,5")), "decimal comma"),
        (long_page((0, "k", "any.pct", "%", "0,123")), "decimal comma"),
        (long_page((0, "k", "m__x.sum", "byte", "1.234,5")), "decimal comma"),
        (long_page((0, "k", "m__x.sum", "byte", "27.595.520")), "decimal comma"),
        (long_page((0, "k", "m__x.sum", "byte", "many")), "m__x.sum is 'many', no number"),
        (long_page((0, "k", "m__x.sum", "byte", "-3")), "no number"),
        (long_page((0, "k", "m__x.sum", "byte", "1e999")), "no number"),
        (long_page((0, "k", "m__x.sum", "parsec", "3")), "has the unit 'parsec'"),
        ("ID,Kernel Name,Metric Name,Metric Unit\n0,k,m__x.sum,byte\n", "no column 'Metric Value'"),
        ("ID,ID,Kernel Name,dram__bytes.sum\n", "has the column 'ID' twice"),
        ('ID,Kernel Name,dram__bytes.sum\n"0","k","5"\n', "holds no units"),
        ("ID,Kernel Name,dram__bytes.sum\n,,byte\n0,k\n1,k,2\n", "has 2 of 3 columns"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    assert words in refusal(tmp_path, text)


def test_files_that_are_no_csv(tmp_path: Path) -> None:
    assert "is a report of Nsight Compute" in refusal(tmp_path, "NVR", "profile.ncu-rep")
    with pytest.raises(DlperfError, match="No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(DlperfError, match="directory"):
        read(tmp_path)
