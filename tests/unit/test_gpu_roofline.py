"""The roofline of profiled kernels: command, tables, files, plot."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dlperf.cli.main import main
from dlperf.core.errors import DlperfError
from dlperf.ops.roofs import Ceiling, Roof, Roofs
from dlperf.profiler.gpu_kernels import load
from dlperf.report.drawing import own_style
from dlperf.report.gpu_roofline import GpuRoofline, figure, render, write
from dlperf.report.writing import is_ours

PROFILES = Path(__file__).parents[1] / "golden" / "frozen" / "profiles"
A100 = Roofs(
    (Roof("L1", 19.4e12, ""), Roof("L2", 5.1e12, ""), Roof("DRAM", 1.555e12, "")),
    (
        Ceiling("tensor float16", 312e12, 312e12, ""),
        Ceiling("float16", 78e12, 39e12, ""),
        Ceiling("float32", 19.5e12, 9.75e12, ""),
        Ceiling("float64", 9.7e12, 4.85e12, ""),
    ),
)
"""Peaks of NVIDIA's data sheet; bandwidths of the caches are round numbers."""
FIELDS = ("launches", "time_s", "flops", "tensor_flops", "dram_bytes", "l2_bytes", "l1_bytes")


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    path = tmp_path / "attention.csv"
    path.write_bytes(gzip.decompress((PROFILES / "attention.csv.gz").read_bytes()))
    return path


@pytest.fixture
def without_l1(attention: Path) -> Path:
    """A profile whose softmax lacks a counter."""
    lines = attention.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ("softmax" in line and "l1tex__t_bytes.sum" in line)]
    assert len(kept) == len(lines) - 1
    attention.write_text("".join(kept))
    return attention


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    assert main(["roofline", *map(str, words), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_json(attention: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, attention)
    assert (found["schema"], found["schema_version"]) == ("dlperf.kernel-roofline", 1)
    assert (found["roofs"], found["compute_capability"]) == (None, None)
    assert found["tensor_flops_assumed"]
    kernels = found["kernels"]
    assert isinstance(kernels, list)
    gemm = next(k for k in kernels if k["kernel"] == "ampere_sgemm_128x128_tn")
    assert gemm["name"] == "gemm 128x128 tn"
    # FLOPs: 262,144 others and 2 x 8,388,608 FMA of float; cells of its one launch
    assert {name: gemm[name] for name in FIELDS[2:]} == {
        "flops": 262144 + 2 * 8388608,
        "tensor_flops": 0,
        "dram_bytes": 82176,
        "l2_bytes": 532992,
        "l1_bytes": 112640,
    }
    assert gemm["dram_intensity"] == pytest.approx(17039360 / 82176)
    assert (gemm["bound"], gemm["missing"]) == (None, [])
    assert [k["launches"] for k in kernels if "splitK" in k["kernel"]] == [2]
    times = [k["time_s"] for k in kernels]
    assert times == sorted(times, reverse=True)


def test_what_is_missing_is_null_and_named(
    without_l1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = answer(capsys, without_l1)["kernels"]
    assert isinstance(kernels, list)
    softmax = next(k for k in kernels if "softmax" in k["kernel"])
    assert (softmax["l1_bytes"], softmax["l1_intensity"]) == (None, None)
    assert softmax["missing"] == ["l1tex__t_bytes.sum"]
    assert softmax["dram_bytes"] == 25728
    assert main(["roofline", str(without_l1)]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("softmax"))
    assert " - " in line
    assert "note: missing of softmax forward: l1tex__t_bytes.sum" in text


def test_flops_of_a_tensor_instruction(attention: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual, given = (
        answer(capsys, attention, *words)["kernels"] for words in ((), ("--tensor-flops", "1024"))
    )
    assert isinstance(usual, list)
    assert isinstance(given, list)
    assert any(k["tensor_flops"] for k in usual)
    by_kernel = {k["kernel"]: k["tensor_flops"] for k in given}
    assert all(by_kernel[k["kernel"]] == 2 * k["tensor_flops"] for k in usual)


def test_formats(attention: Path) -> None:
    found = GpuRoofline(load(attention), A100, "a device")
    rows = list(csv.DictReader(render(found, "csv").splitlines()))
    data = json.loads(render(found, "json"))
    assert [row["kernel"] for row in rows] == [k["kernel"] for k in data["kernels"]]
    assert [int(row["flops"]) for row in rows] == [k["flops"] for k in data["kernels"]]
    for form in ("text", "md", "html"):
        text = render(found, form)
        assert "gemm 128x128 tn" in text
        assert "a device" in text
    assert "| gemm 128x128 tn |" in render(found, "md")
    assert repr(found).startswith("<GpuRoofline ")
    assert "gemm 128x128 tn" in str(found)
    with pytest.raises(DlperfError, match="format 'pdf' is unknown"):
        render(found, "pdf")


def test_bounds_under_the_roofs_of_a_device(attention: Path) -> None:
    found = GpuRoofline(load(attention), A100, "a device")
    rows = {row["name"]: row for row in found.to_json()["kernels"]}
    gemm = rows["gemm 128x128 tn"]
    # 8,388,608 FMA and 262,144 others; L2 moves 533 kB in 0.10 us
    least_s = 2 * 8388608 / 19.5e12 + 262144 / 9.75e12
    assert gemm["bound"] == "compute"
    assert gemm["reached_frac"] == pytest.approx(least_s / gemm["time_s"])
    assert rows["elementwise: mul"]["bound"] in ("L2", "DRAM")


def test_roofs_of_a_device_of_the_shelf(
    attention: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, attention, "--machine", "a100")
    assert not found["tensor_flops_assumed"]
    assert found["compute_capability"] == 8.0
    roofs, kernels = found["roofs"], found["kernels"]
    assert isinstance(roofs, dict)
    assert isinstance(kernels, list)
    peaks = {peak["dtype"]: peak["fma_flops_per_s"] for peak in roofs["peaks"]}
    # NVIDIA's data sheet: 312 TFLOP/s of tensor cores, 19.5 TFLOP/s of CUDA cores
    assert (peaks["tensor float16"], peaks["float32"]) == (312e12, 19.5e12)
    assert {k["bound"] for k in kernels} <= {"compute", "L1", "L2", "DRAM"}
    gemm = next(k for k in kernels if k["kernel"] == "ampere_sgemm_128x128_tn")
    least_s = 2 * 8388608 / 19.5e12 + 262144 / 9.75e12
    assert gemm["attainable_flops_per_s"] == pytest.approx(gemm["flops"] / least_s)


def test_a_processor_is_no_gpu(attention: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", str(attention), "--machine", "epyc-7763"]) == 2
    told = capsys.readouterr().err
    assert "AMD EPYC 7763: is no GPU; --machine takes" in told
    assert told.count("\n") == 1


def test_a_profile_of_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text("ID,Kernel Name,CC,dram__bytes.sum\n,,,byte\n0,k,7.0,100\n")
    assert main(["roofline", str(path), "--machine", "a100"]) == 0
    assert "is of a device of compute capability 7.0, and NVIDIA A100" in capsys.readouterr().err


@pytest.mark.slow
def test_files(attention: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["roofline", str(attention), "-o", str(folder)]) == 0
    suffixes = ("txt", "md", "html", "csv", "json", "png")
    assert {path.name for path in folder.iterdir()} == {f"roofline.{end}" for end in suffixes}
    assert all(is_ours(path) for path in folder.iterdir())
    assert "roofline.png" in (folder / "roofline.md").read_text()
    assert "data:image/png;base64," in (folder / "roofline.html").read_text()
    capsys.readouterr()
    assert main(["roofline", str(attention), "-o", str(folder), "--format", "md"]) == 0
    (folder / "foreign.txt").write_text("mine")
    assert main(["roofline", str(attention), "-o", str(folder)]) == 2
    assert "foreign.txt" in capsys.readouterr().err


def dots(drawn: Figure) -> int:
    """Marks of kernels at a level."""
    (ax,) = drawn.axes
    return sum(line.get_marker() == "o" and len(line.get_xdata()) == 1 for line in ax.lines)


@pytest.mark.slow
@pytest.mark.parametrize("roofs", [A100, Roofs((), ())], ids=["roofs", "no roofs"])
def test_every_kernel_has_a_dot_for_each_level(without_l1: Path, roofs: Roofs) -> None:
    found = GpuRoofline(load(without_l1), roofs, "a device")
    with own_style():
        drawn = figure(found)
    # six kernels with FLOPs at three levels, but softmax at two
    with_flops = [k for k in found.profile.kernels if k.work.flops]
    assert dots(drawn) == 3 * len(with_flops) - 1


@pytest.mark.slow
def test_a_plot_without_anything_to_draw(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text("ID,Kernel Name,dram__bytes.sum\n,,byte\n0,k,100\n")
    files = write(GpuRoofline(load(path), Roofs((), ())), tmp_path / "out", ("text",))
    assert [file.name for file in files] == ["roofline.txt", "roofline.png"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory"),
        ("", "is empty"),
        ("loss,accuracy\n1,2\n", "has no table of ncu --csv"),
    ],
)
def test_unusable_profiles_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "ncu.csv"
    if text is not None:
        path.write_text(text)
    assert main(["roofline", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"dlperf roofline: error: {path}: ")
    assert words in told.err
    assert told.err.count("\n") == 1
