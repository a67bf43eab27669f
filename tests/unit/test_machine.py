"""Machines as data: files and every way in which they break, questions about threads, costs and
bandwidths.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlperf.core.clock import Samples
from dlperf.core.conversion import shown
from dlperf.core.costs import Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Bandwidth, Cpu, Kernel, KernelModelFit, Machine, default_path
from dlperf.core.state import Reading, State
from dlperf.core.trace import Op, Symbol, TensorSpec

T = TensorSpec.contiguous
KIB, MIB = 2**10, 2**20


def relu(n: int, threads: int = 1, seconds: float = 1e-6) -> Kernel:
    return Kernel(Op("aten.relu.default", (T(n),)), "pointwise", threads, Samples((seconds,)))


def sweep(kernel: str, threads: int, *points: tuple[int, float]) -> tuple[Bandwidth, ...]:
    """(working set, best bytes a second) each, a megabyte moved; the median takes twice as long."""
    return tuple(
        Bandwidth(
            kernel, threads, working_set, 10**6, Samples((2e6 / rate, 1e6 / rate, 3e6 / rate))
        )
        for working_set, rate in points
    )


def full_machine() -> Machine:
    product = Op(
        "aten.mm.default",
        (T(8, 16), TensorSpec((16, 4), (1, 16))),
        (("dtype", Symbol("dtype", "float32")),),
    )
    return Machine(
        Cpu("Some CPU", 4, (32 * KIB, MIB, 32 * MIB), 2**34, ("avx2", "fma"), "Vendor/1/2/3"),
        (relu(64), relu(64, 2, 2e-6), Kernel(product, "gemm", 1, Samples((1e-6, 3e-6, 2e-6), 1))),
        sweep("triad", 1, (16 * KIB, 2e11), (512 * KIB, 1e11), (16 * MIB, 4e10), (128 * MIB, 1e10)),
        (
            Cost(CostKey("fork_join"), 1, Samples((1e-6, 0.0))),
            Cost(CostKey("fork_join"), 4, Samples((5e-6,))),
        ),
        "thorough",
        ("thorough/1/stream",),
        True,
        ("busy",),
        {"torch": "2.13"},
        "2026-01-01T00:00:00+00:00",
        kernel_models=(
            KernelModelFit(
                ("pointwise", "float32"), "pointwise", 1, (3.0, 60.0), 0.25, 0.07, (0.01, 0.2)
            ),
        ),
    )


# -- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found"), [(1, 1), (2, 2), (3, 4), (4, 4), (100, 8), (6, 8), (5, 4)]
)
def test_nearest_threads_go_by_ratio(asked: int, found: int) -> None:
    assert (
        Machine(Cpu("c", 8), (relu(1, 1), relu(1, 2), relu(1, 4), relu(1, 8))).nearest_threads(
            asked
        )
        == found
    )


def test_of_two_thread_counts_as_near_the_lower_counts() -> None:
    assert Machine(Cpu("c", 8), (relu(1, 1), relu(1, 4))).nearest_threads(2) == 1


def test_a_thread_count_without_kernels_is_not_measured() -> None:
    """An interrupted calibration has costs of a second thread count and no kernels of it yet."""
    machine = Machine(
        Cpu("c", 8), (relu(1, 1),), costs=(Cost(CostKey("fork_join"), 2, Samples((1e-6,))),)
    )
    assert machine.threads == (1,)
    assert machine.nearest_threads(2) == 1
    assert replace(machine, kernels=()).threads == (2,)


def test_an_empty_file_says_how_to_fill_it() -> None:
    with pytest.raises(DlperfError, match=r"m\.json: holds no measurements; run dlperf calibrate"):
        Machine(Cpu("c", 8), path="m.json").nearest_threads(1)


def test_exact_ops_are_found_by_signature_and_threads() -> None:
    machine = full_machine()
    assert (
        machine.exact(Op("aten.relu.default", (T(64, storage=5),), layer="anywhere"), 2)
        is machine.kernels[1]
    )
    assert machine.exact(Op("aten.relu.default", (T(65),)), 1) is None
    assert machine.exact(Op("aten.relu.default", (T(64),)), 3) is None


def test_kernel_descriptions() -> None:
    machine = full_machine()
    assert machine.families(1) == ("gemm", "pointwise")
    assert machine.family("pointwise", 2) == (machine.kernels[1],)
    assert machine.family("pointwise", 3) == ()


def test_a_newer_measurement_replaces_the_older() -> None:
    machine = full_machine().with_kernels([relu(64, 1, 9e-6), relu(128)])
    assert len(machine.kernels) == 4
    found = machine.exact(relu(64).op, 1)
    assert found is not None
    assert found.samples.median == 9e-6


def test_a_cost_is_its_least_sample_but_where_it_is_spread_by_nature() -> None:
    samples = Samples((4e-6, 1e-6, 3e-6, 2e-6, 5e-6))
    assert Cost(CostKey("module_call"), 1, samples).value == 1e-6
    assert Cost(CostKey("page_fault"), 1, samples).value == 2e-6  # the second of five
    assert Cost(CostKey("cold_start", "next", 1048576), 1, samples).value == 3e-6  # the third


def test_costs_come_from_the_nearest_threads() -> None:
    machine = full_machine()
    assert machine.cost_value("fork_join", 1) == 0.0  # the least of 1 us and 0
    assert machine.cost_value("fork_join", 3) == 5e-6
    assert machine.cost_value("module_call", 1, default=7.0) == 7.0
    with pytest.raises(DlperfError, match="holds no cost 'module_call'; run dlperf calibrate"):
        machine.cost_value("module_call", 1)


@pytest.mark.parametrize(
    ("n_bytes", "level"),
    [
        (0, "L1"),
        (32 * KIB, "L1"),
        (32 * KIB + 1, "L2"),
        (MIB, "L2"),
        (32 * MIB, "L3"),
        (math.inf, "DRAM"),
    ],
)
def test_levels(n_bytes: float, level: str) -> None:
    assert full_machine().level_of(n_bytes) == level


def test_unknown_caches_hold_nothing() -> None:
    assert Machine(Cpu("c", 1, (0, MIB, 0))).level_of(100) == "L2"
    assert Machine(Cpu("c", 1)).level_of(100) == "DRAM"


def test_bandwidth_by_level() -> None:
    machine = full_machine()
    rates = {level: machine.level_bytes_per_s(level, 1) for level in ("L1", "L2", "L3", "DRAM")}
    assert rates == pytest.approx({"L1": 2e11, "L2": 1e11, "L3": 4e10, "DRAM": 1e10})
    assert machine.level_bytes_per_s("L1", 1, "copy") is None


def test_a_level_that_no_working_set_hit_is_unknown() -> None:
    machine = replace(full_machine(), bandwidths=sweep("triad", 1, (16 * KIB, 2e11)))
    assert machine.level_bytes_per_s("L2", 1) is None
    assert machine.level_bytes_per_s("DRAM", 1) == pytest.approx(2e11)  # the largest there is


def test_stream_takes_the_best_run_of_the_best_kernel() -> None:
    machine = replace(
        full_machine(),
        bandwidths=(
            *sweep("copy", 1, (128 * MIB, 1.2e10)),
            *sweep("triad", 1, (MIB, 9e10), (128 * MIB, 1e10)),
        ),
    )
    assert machine.dram_bytes_per_s(1) == pytest.approx(1.2e10)
    curve = machine.bandwidth_curve("triad", 7)
    assert [point.working_set_bytes for point in curve] == [MIB, 128 * MIB]
    assert curve[0].median_bytes_per_s == pytest.approx(4.5e10)
    with pytest.raises(DlperfError, match="holds no memory bandwidth; run dlperf calibrate"):
        replace(machine, bandwidths=()).dram_bytes_per_s(1)


# -- files -----------------------------------------------------------------------------------------


def test_a_file_gives_back_the_machine(tmp_path: Path) -> None:
    path, machine = tmp_path / "m.json", full_machine()
    machine.save(path)
    assert Machine.load(path) == replace(machine, path=str(path))
    # Samples are written with six digits, so what was read is written again unchanged.
    Machine.load(path).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_what_an_op_belonged_to_is_not_kept(tmp_path: Path) -> None:
    op = Op(
        "aten.relu.default",
        (T(3, storage=2),),
        outputs=(T(3),),
        phase="backward",
        layer="secret",
        node=4,
        grad=True,
    )
    Machine(Cpu("c", 1), (Kernel(op, "exact", 1, Samples((1.0,))),)).save(tmp_path / "m.json")
    assert "secret" not in (tmp_path / "m.json").read_text()
    assert Machine.load(tmp_path / "m.json").exact(op, 1) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema": "dlperf.machine", "schema_version": 1, "kern',
        "[]",
        "null",
        "3",
        '"dlperf.machine"',
    ],
)
def test_what_is_no_machine_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(DlperfError, match=r"m\.json: is "):
        Machine.load(tmp_path / "m.json")


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: float) -> None:
    full_machine().save(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "m.json").write_text(text[: int(cut * len(text))])
    with pytest.raises(DlperfError, match=r"m\.json: is truncated"):
        Machine.load(tmp_path / "m.json")


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x01")
    for name, message in (
        ("none", "there is no such machine file; dlperf calibrate -o"),
        (".", "Is a directory"),
        ("bytes", "not text"),
    ):
        with pytest.raises(DlperfError, match=message):
            Machine.load(tmp_path / name)


ZERO_OR_LESS = [0, -1, -1e-9, math.nan, math.inf, "1", None, True, [1]]
NEGATIVE = [-1, math.nan, math.inf, "1", None, True]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("kernels", 2, "samples_s", 1), ZERO_OR_LESS),
        (("kernels", 2, "threads"), ZERO_OR_LESS),
        (("bandwidths", 3, "samples_s", 0), ZERO_OR_LESS),
        (("bandwidths", 3, "working_set_bytes"), ZERO_OR_LESS),
        (("bandwidths", 3, "moved_bytes"), ZERO_OR_LESS),
        (("bandwidths", 0, "threads"), ZERO_OR_LESS),
        (("costs", 1, "samples", 0), NEGATIVE),
        (("costs", 1, "threads"), ZERO_OR_LESS),
        (("cpu", "n_cores"), ZERO_OR_LESS),
        (("cpu", "memory_bytes"), NEGATIVE),
        (("cpu", "caches_bytes", 2), NEGATIVE),
        (("kernels", 1, "samples_s"), [[], None, 3.0, "x", {}]),
    ],
)
def test_impossible_numbers_are_named(
    tmp_path: Path, path: tuple[Any, ...], values: list[Any]
) -> None:
    file = tmp_path / "m.json"
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
    for value in values:
        data = full_machine().to_json()
        row: Any = data
        for key in path[:-1]:
            row = row[key]
        row[path[-1]] = value
        file.write_text(json.dumps(data))
        with pytest.raises(DlperfError) as error:
            Machine.load(file)
        assert str(error.value).startswith(f"{file}: {where} is {shown(value)}; expected a ")
        assert str(error.value).endswith(". Recalibrate, or edit the file.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(schema_version=6),
            "schema_version is 6, this dlperf reads up to 5",
        ),
        (lambda data: data.update(schema_version=0), "schema_version is 0"),
        (lambda data: data.update(schema_version=True), "schema_version is True"),
        (lambda data: data.update(schema="dlperf.trace"), "is no dlperf.machine file"),
        (lambda data: data["tensors"][0].__setitem__(0, [-64]), r"tensors\[0\]\.shape\[0\] is -64"),
        (
            lambda data: data["kernels"][2]["op"][1].__setitem__(0, {"tensor": 77}),
            r"args\[0\]\['tensor'\] is 77; expected the number of a tensor",
        ),
        (
            lambda data: data["kernels"][2].update(op=["aten.mm.default"]),
            r"kernels\[2\]\.op is .*; expected a list of 3 entries",
        ),
        (
            lambda data: data["kernels"][2].pop("family"),
            r"kernels\[2\]\.family is missing; expected text that is not empty",
        ),
        (lambda data: data.pop("tensors"), "tensors is missing; expected a list"),
        (lambda data: data.update(kernels=5), "kernels is 5; expected a list"),
        (lambda data: data["cpu"].pop("model"), r"cpu\.model is missing; expected text"),
        (
            lambda data: data["cpu"].update(caches_bytes=[]),
            r"cpu.caches_bytes is \[\]; expected a list of 3 entries",
        ),
        (
            lambda data: data["cpu"].update(caches_bytes="a"),
            r"cpu.caches_bytes is 'a'; expected a list of 3 entries",
        ),
        (
            lambda data: data["kernel_models"][0].update(variant=5),
            r"kernel_models\[0\].variant is 5; expected a list of at least 1",
        ),
        (
            lambda data: data["cpu"].update(n_cores=0),
            "cpu.n_cores is 0; expected a whole number of at least 1",
        ),
        (lambda data: data.update(created=5), "created is 5; expected text"),
        (lambda data: data.update(versions="x"), "versions is 'x'; expected an object"),
        (
            lambda data: data["kernels"][2].update(family=[]),
            r"kernels\[2\]\.family is \[\]; expected text that is not empty",
        ),
        (
            lambda data: data["kernels"][2].update(samples_s=[10**400]),
            (
                r"kernels\[2\]\.samples_s\[0\] is 10+\.\.\.; expected a finite number of at most"
                r" 1e\+06"
            ),
        ),
        (
            lambda data: data["kernels"][2].update(samples_s=[5e-324]),
            r"samples_s\[0\] is 5e-324; expected a finite number of at least 1e-15",
        ),
        (
            lambda data: data["costs"].append(data["costs"][0]),
            r"costs\[\d+\] is of the same as costs\[0\]",
        ),
        (
            lambda data: data["kernels"].append(data["kernels"][0]),
            r"kernels\[\d+\] is of the same as kernels\[0\]",
        ),
        (lambda data: data["costs"][1].update(kind=7), r"costs\[1\]\.kind is 7; expected text"),
        (
            lambda data: data["costs"][1].update(samples=[1e308]),
            r"costs\[1\]\.samples\[0\] is 1e\+308; expected a finite number of at most 1e\+06",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Any, message: str) -> None:
    data = full_machine().to_json()
    change(data)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(data))
    with pytest.raises(DlperfError, match=message) as error:
        Machine.load(file)
    assert str(error.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "name",
    [
        key
        for key in full_machine().to_json()
        if not key.startswith("schema") and key not in ("footprints", "co_runs", "data_sheet")
    ],
)
def test_every_missing_field_is_damage(tmp_path: Path, name: str) -> None:
    data = full_machine().to_json()
    del data[name]
    (tmp_path / "m.json").write_text(json.dumps(data))
    with pytest.raises(DlperfError, match=f"{name} is missing; expected "):
        Machine.load(tmp_path / "m.json")


def test_the_default_file_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "mine.json"))
    assert default_path() == tmp_path / "mine.json"
    monkeypatch.delenv("DLPERF_MACHINE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_path() == tmp_path / "dlperf" / "machine.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_path() == Path.home() / ".local" / "share" / "dlperf" / "machine.json"


def test_the_mean_over_the_usual_slowdown_of_the_core() -> None:
    ones = Reading(*(1.0,) * 6)
    taken = tuple(replace(ones, core_s=factor) for factor in (1.0, 1.2, 2.0))
    machine = Machine(Cpu("x", 2), readings=taken, reference=ones)
    assert machine.mean_slowdown == pytest.approx(1.4 / 1.2)
    faster = tuple(replace(ones, core_s=factor) for factor in (1.0, 1.2, 1.2))
    assert replace(machine, readings=faster).mean_slowdown == 1.0
    assert Machine(Cpu("x", 2)).mean_slowdown == 1.0


def test_a_cost_at_a_state_is_slowed_by_what_bounds_it() -> None:
    keys = {
        CostKey("native_call"): "overhead",
        CostKey("page_fault"): "page-faults",
        CostKey("arithmetic", variant="float32"): "compute",
        CostKey("loop_save_byte"): "DRAM",
        CostKey("loader_byte", at=2**20): "L2",
    }
    costs = tuple(Cost(key, 1, Samples((1.0,))) for key in keys)
    machine = Machine(Cpu("x", 2, (2**15, 2**20, 2**25)), costs=costs)
    assert [machine.bound_of(cost) for cost in costs] == [*keys.values()]
    at = State(core=1.1, interpreter=1.2, dram=1.3, page_fault=1.4)
    assert machine.cost_value("page_fault", 1, state=at) == 1.4
    assert machine.cost_value("loop_save_byte", 1, state=at) == 1.3
    assert machine.cost_value("module_call", 1, 7.0, state=at) == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "far"}, r"costs\[0\].kind is 'far'; expected a kind of cost, such as"),
        ({"at": 0}, r"costs\[0\].at is 0; expected a positive number of bytes"),
        ({"at": 2.5}, r"costs\[0\].at"),
        ({"at": 2**53}, r"costs\[0\].at"),
        ({"kind": "module_call", "statistic": "minimum"}, r"at is 64; expected nothing"),
        ({"unit": "s/byte"}, r"unit is 's/byte'; expected 's' for cold_start"),
        ({"statistic": "minimum"}, r"statistic is 'minimum'; expected 'median'"),
    ],
)
def test_a_cost_has_its_kinds_unit_statistic_and_amount(
    changes: dict[str, Any], message: str
) -> None:
    cost = Cost(CostKey("cold_start", "next", 64), 1, Samples((1e-6,)))
    data = Machine(Cpu("c", 8), costs=(cost,)).to_json()
    assert Machine.from_json(data).costs == (cost,)
    data["costs"][0].update(changes)
    with pytest.raises(DlperfError, match=message):
        Machine.from_json(data)


def test_a_file_with_a_former_statistic_keeps_its_samples() -> None:
    cost = Cost(CostKey("cold_start", "next", 64), 1, Samples((1e-6, 2e-6, 9e-6)))
    data = Machine(Cpu("c", 8), costs=(cost,)).to_json()
    data["costs"][0]["statistic"] = "lower quartile"
    (read,) = Machine.from_json(data).costs
    assert read == cost
    assert read.value == 2e-6


def test_unknown_kinds_of_costs_are_refused() -> None:
    with pytest.raises(DlperfError, match="cost 'dispatch' is unknown; known are core_speed"):
        Cost(CostKey("dispatch"), 1, Samples((1e-6,)))
