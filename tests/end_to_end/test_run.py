"""`dlperf run`: scripts as their users write them, in processes of their own, with and without
dlperf.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import preloaded
import pytest

START = (
    "import sys; from dlperf.runner.wrapping import run_script; from dlperf.core.errors import"
    " DlperfError\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine file that is readable and holds nothing: the run goes on without predictions."""
    from dlperf.core.host import this_cpu
    from dlperf.core.machine import Machine

    path = tmp_path / "machine.json"
    Machine(cpu=this_cpu(), complete=True).save(path)
    return path


@pytest.fixture
def referenced(machine: Path) -> Path:
    """The same with a reference: the machine's state is read around the watched steps."""
    from dlperf.core.machine import Machine
    from dlperf.core.state import Reading

    reference = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)
    replace(Machine.load(machine), reference=reference).save(machine)
    return machine


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def plainly(
    cwd: Path, *command: str, torch_loaded: bool = False
) -> subprocess.CompletedProcess[str]:
    """A process of Python, quicker where torch may be imported already."""
    if torch_loaded:
        return preloaded.run([sys.executable, *command], cwd=cwd, env=environment())
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def watched(
    cwd: Path,
    machine: Path,
    *command: str,
    module: bool = False,
    json_path: str = "found.json",
    torch_loaded: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`dlperf run` of a script. Where it matters that torch is imported late, pass
    `torch_loaded=False`.
    """
    call = (
        START
        + f"sys.exit(run_script({list(command)!r}, module={module}, machine_path={str(machine)!r},"
        f" json_path={json_path!r}, output='report.txt', timeline_path='timeline.json'))"
    )
    return plainly(cwd, "-c", call, torch_loaded=torch_loaded)


def found(cwd: Path) -> dict[str, object]:
    data: dict[str, object] = json.loads((cwd / "found.json").read_text(encoding="utf-8"))
    return data


TRAIN = """
    import argparse, random, sys
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(4 * 36, 3)

        def forward(self, x):
            return self.out(self.drop(self.act(self.norm(self.conv(x))).flatten(1)))

    class Samples(Dataset):
        def __len__(self):
            return 120
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(1, 8, 8, generator=g), i % 3

    def main():
        p = argparse.ArgumentParser()
        p.add_argument("--workers", type=int, default=0)
        p.add_argument("--optimizer", default="Adam")
        p.add_argument("--start")
        p.add_argument("--accumulate", type=int, default=1)
        a = p.parse_args()
        torch.manual_seed(0); random.seed(0); np.random.seed(0)
        model, loss = Net(), nn.CrossEntropyLoss()
        optimizer = getattr(torch.optim, a.optimizer)(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=a.workers, multiprocessing_context=a.start)
        checks = DataLoader(Samples(), batch_size=40)
        for epoch in range(2):
            model.train()
            for i, (x, y) in enumerate(loader):
                output = model(x)
                value = loss(output, y)
                correct = (output.argmax(1) == y).sum().item()
                value.backward()
                if (i + 1) % a.accumulate == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                print(epoch, i, float(value.item()).hex(), correct)
            model.eval()
            with torch.no_grad():
                print("checked", float(sum(loss(model(x), y).item() for x, y in checks)).hex())
        print("random", torch.rand(1).item().hex(), random.random().hex(), float(np.random.rand()).hex())
        for name, tensor in model.state_dict().items():
            print(name, tensor.double().sum().item().hex())
        for state in optimizer.state.values():
            print(sorted((k, float(v.double().sum()).hex()) for k, v in state.items() if hasattr(v, "double")))
        module = nn.modules.module
        of_loader = torch.utils.data.dataloader._BaseDataLoaderIter
        print("hooks", len(module._global_forward_hooks), len(module._global_forward_pre_hooks),
              len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
              [f.__code__.co_filename.count("dlperf") for f in (torch.autograd.backward, of_loader.__next__)],
              all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()))

    if __name__ == "__main__":
        main()
"""


@functools.cache
def trained_alone() -> str:
    """What TRAIN prints without dlperf: run once for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "train.py", TRAIN)
        return plainly(Path(folder), "train.py", torch_loaded=True).stdout


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "2"),
        ("--optimizer", "SGD", "--accumulate", "2"),
        ("--workers", "1", "--start", "spawn"),
    ],
)
def test_training_is_the_same_to_the_bit(
    tmp_path: Path, referenced: Path, arguments: tuple[str, ...]
) -> None:
    write(tmp_path / "train.py", TRAIN)
    alone, with_us = (
        plainly(tmp_path, "train.py", *arguments, torch_loaded="spawn" not in arguments),
        watched(tmp_path, referenced, "train.py", *arguments),
    )
    assert alone.returncode == with_us.returncode == 0, with_us.stderr
    assert with_us.stdout == alone.stdout
    assert "hooks 0 0 0 [0, 0] True" in alone.stdout
    data = found(tmp_path)
    assert data["model"] == "Net"
    assert data["batch_size"] == 4
    assert data["passes_per_step"] == (2 if "--accumulate" in arguments else 1)
    layers = {row["layer"] for row in data["measurement"]["layers"]}  # type: ignore[index]
    assert layers == {"Net", "conv", "norm", "act", "drop", "out", "(loss)"}
    assert len(data["measurement"]["states"]) == 1  # type: ignore[index]
    forecast = data["forecast"]
    # 120 samples in batches of 4 are 30 batches; accumulating two makes 15 steps
    assert forecast["steps"] == (15 if "--accumulate" in arguments else 30)  # type: ignore[index]
    assert len(forecast["measured_s"]) == 2  # type: ignore[index]
    assert "Net" in (tmp_path / "report.txt").read_text(encoding="utf-8")
    timeline = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))
    names = [e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "process_name"]
    assert names == ["train.py, batch size 4: measured"]


@pytest.mark.process
def test_module_form_and_its_own_names(tmp_path: Path, machine: Path) -> None:
    """A package with relative imports, and modules called as dlperf's own are."""
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "part.py", "value = 7\n")
    write(tmp_path / "networks" / "__init__.py", "mine = 'networks of the script'\n")
    write(tmp_path / "microbench.py", "mine = 'microbench of the script'\n")
    text = """
        import sys
        from .part import value
        import networks, microbench
        print(__name__, __package__, __spec__.name, sys.argv[1:], sys.argv[0].endswith("train.py"), value, networks.mine, microbench.mine)
        sys.exit(5)
    """
    write(tmp_path / "package" / "train.py", text)
    alone, with_us = (
        plainly(tmp_path, "-m", "package.train", "-m", "--x"),
        watched(tmp_path, machine, "package.train", "-m", "--x", module=True, torch_loaded=False),
    )
    assert (alone.returncode, alone.stdout) == (with_us.returncode, with_us.stdout)
    assert alone.returncode == 5
    assert with_us.stderr == ""  # a script that failed before any training gets no line on it
    missing = watched(tmp_path, machine, "package.nowhere", module=True)
    assert missing.returncode == plainly(tmp_path, "-m", "package.nowhere").returncode == 1
    assert "No module named package.nowhere" in missing.stderr


@pytest.mark.process
def test_script_sees_its_own_world(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "folder" / "beside.py", "value = 3\n")
    text = """
        import os, pickle, sys
        from beside import value
        class Mine: pass
        import __main__
        print(__main__.Mine is Mine, pickle.loads(pickle.dumps(Mine())).__class__ is Mine, __file__, __name__, sys.argv, sys.path[0], value)
        print("torch" in sys.modules, "numpy" in sys.modules, os.getcwd())
    """
    write(tmp_path / "folder" / "script.py", text)
    alone, with_us = (
        plainly(tmp_path, "folder/script.py", "a", "-o", "b"),
        watched(tmp_path, machine, "folder/script.py", "a", "-o", "b", torch_loaded=False),
    )
    assert with_us.stdout == alone.stdout
    assert "False False" in alone.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("sys.exit(None)", 0),
        ("raise ValueError('mine')", 1),
        ("1 +", 1),
        ("", 0),
        ("os._exit(9)", 9),
    ],
)
def test_exit_status_and_messages(tmp_path: Path, machine: Path, ending: str, status: int) -> None:
    write(tmp_path / "script.py", f"import os, sys\ndef end():\n    {ending or 'pass'}\nend()\n")
    alone, with_us = plainly(tmp_path, "script.py"), watched(tmp_path, machine, "script.py")
    assert with_us.returncode == alone.returncode == status
    own = "".join(
        line for line in with_us.stderr.splitlines(keepends=True) if not line.startswith("dlperf:")
    )
    # Python names the script by its full path in tracebacks of a main script
    assert own.replace(str(tmp_path) + os.sep, "") == alone.stderr.replace(
        str(tmp_path) + os.sep, ""
    )


@pytest.mark.process
def test_a_script_may_close_stdout(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "script.py", "import sys\nsys.stdout.close()\n")
    got = watched(tmp_path, machine, "script.py", torch_loaded=False)
    assert (got.returncode, got.stderr.count("\n")) == (0, 1), got.stderr
    assert "never imported torch" in got.stderr


LOOP = """
    import sys, os, torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range({n}):
        optimizer.zero_grad()
        {inside}
        nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2)).backward()
        optimizer.step()
    print("done")
"""


@pytest.mark.process
@pytest.mark.parametrize("at", [4, 8, 15])
def test_an_exception_in_any_phase_is_the_scripts_own(
    tmp_path: Path, machine: Path, at: int
) -> None:
    write(
        tmp_path / "script.py",
        textwrap.dedent(LOOP).format(n=60, inside=f"if step == {at}: model(torch.randn(3, 5))"),
    )
    alone, with_us = (
        plainly(tmp_path, "script.py", torch_loaded=True),
        watched(tmp_path, machine, "script.py"),
    )
    assert with_us.returncode == alone.returncode == 1
    assert "dlperf" not in "".join(
        line for line in with_us.stderr.splitlines() if not line.startswith("dlperf:")
    ).replace("found.json", "")
    assert alone.stderr.strip().splitlines()[-1] in with_us.stderr


def started(cwd: Path, call: str, until: str) -> subprocess.Popen[str]:
    """A process of Python code that has written the line `until`."""
    process = subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{until}\n"
    return process


@pytest.mark.process
def test_interrupt_reaches_the_script(tmp_path: Path, machine: Path) -> None:
    text = """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("seen", flush=True)
            raise
    """
    write(tmp_path / "script.py", text)
    call = START + f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r}))"
    process = started(tmp_path, call, until="ready")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "seen\n"
    assert process.returncode == 130
    assert "KeyboardInterrupt" in err


@pytest.mark.process
def test_a_script_without_torch_gets_one_line(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "script.py", "print(1)")
    call = START + f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r}))"
    got = plainly(tmp_path, "-c", call)
    assert (got.returncode, got.stdout) == (0, "1\n")
    assert got.stderr == "dlperf: no training was found: the script never imported torch\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nprint(torch.ones(1))", "no training was found"),
        (LOOP.format(n=4, inside="pass"), "too early"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(
    tmp_path: Path, machine: Path, text: str, said: str
) -> None:
    write(tmp_path / "script.py", text)
    alone = plainly(tmp_path, "script.py", torch_loaded=True)
    with_us = watched(tmp_path, machine, "script.py")
    assert (
        (with_us.returncode, with_us.stdout)
        == (alone.returncode, alone.stdout)
        == (0, alone.stdout)
    )
    (line,) = with_us.stderr.splitlines()
    assert line.startswith("dlperf: ")
    assert said in line
    assert not (tmp_path / "found.json").exists()


@pytest.mark.process
def test_several_models_are_watched_together(tmp_path: Path, machine: Path) -> None:
    text = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Maker(nn.Sequential): pass
        class Critic(nn.Sequential): pass
        maker, critic = Maker(nn.Linear(4, 64), nn.Linear(64, 6)), Critic(nn.Linear(6, 1))
        of_maker, of_critic = (torch.optim.Adam(m.parameters()) for m in (maker, critic))
        for _ in range(40):
            of_critic.zero_grad()
            (critic(maker(torch.randn(8, 4)).detach()).mean() - critic(torch.randn(8, 6)).mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic(maker(torch.randn(8, 4))).mean()).backward()
            of_maker.step()
        print([p.sum().item().hex() for p in (*maker.parameters(), *critic.parameters())])
    """
    write(tmp_path / "script.py", text)
    alone, with_us = (
        plainly(tmp_path, "script.py", torch_loaded=True),
        watched(tmp_path, machine, "script.py"),
    )
    assert with_us.stdout == alone.stdout
    data = found(tmp_path)
    assert data["model"] == "Maker and Critic"
    assert "2 models are trained together: Maker, Critic" in data["notes"]  # type: ignore[operator]
    assert [row["layer"] for row in data["measurement"]["layers"]] == [  # type: ignore[index]
        "Maker",
        "Maker.0",
        "Maker.1",
        "Critic",
        "Critic.0",
        "(loss)",
    ]


@pytest.mark.process
@pytest.mark.parametrize("name", ["_root_enter", "_keep", "_backward_ended", "_finish"])
def test_our_own_failure_never_reaches_the_script(tmp_path: Path, machine: Path, name: str) -> None:
    write(tmp_path / "script.py", LOOP.format(n=40, inside="pass"))
    call = (
        START + "import dlperf.runner.watcher as w\n"
        "def broken(self, *_): raise ZeroDivisionError('ours')\n"
        f"w.Watcher.{name} = broken\n"
        f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r}))"
    )
    got = preloaded.run([sys.executable, "-c", call], cwd=tmp_path, env=environment())
    assert (got.returncode, got.stdout) == (0, "done\n")
    assert got.stderr == "dlperf: watching failed and was given up: ZeroDivisionError: ours\n"


@pytest.mark.process
def test_the_run_is_forecast_while_it_goes_on(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "train.py", TRAIN)
    with_us = watched(tmp_path, machine, "train.py")
    assert with_us.stdout == trained_alone()
    line = next(line for line in with_us.stderr.splitlines() if "epoch 1 of 2" in line)
    assert line.startswith(
        "dlperf: Net, epoch 1 of 2: step 19 of 30, "
    )  # 120 samples in batches of 4; the loop is over range(2)
    assert "predicted for evaluation" in line
    forecast = found(tmp_path)["forecast"]
    assert isinstance(forecast, dict)
    assert (forecast["after_steps"], forecast["n_epochs"], forecast["n_epochs_from_user"]) == (
        19,
        2,
        False,
    )
    assert forecast["low_s"] <= forecast["epoch_s"] <= forecast["high_s"]
    assert forecast["epoch_measured_s"] == forecast["measured_s"][0]
    assert forecast["error_frac"] == pytest.approx(
        forecast["epoch_s"] / forecast["measured_s"][0] - 1
    )
    assert forecast["training"]["measured_s"] == pytest.approx(sum(forecast["measured_s"]))
    assert len(forecast["history"]) >= 1
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "live forecast after 19 steps: epoch " in report
    assert "all 2 epochs" in report


@pytest.mark.process
@pytest.mark.parametrize(
    "broken",
    [
        "live_eta.LiveEta._eta",
        "live_eta.rate_of",
        "live_eta.enclosing_loops",
        "stderr_line.StderrLine.show",
    ],
)
def test_a_failing_forecast_stops_neither_script_nor_report(
    tmp_path: Path, machine: Path, broken: str
) -> None:
    write(tmp_path / "train.py", TRAIN)
    call = (
        START + "from dlperf.runner import live_eta, stderr_line\ndef fail(*_): raise"
        f" ZeroDivisionError('ours')\n{broken} = fail\nsys.exit(run_script(['train.py'],"
        f" machine_path={str(machine)!r}, json_path='found.json', output='report.txt'))"
    )
    got = plainly(tmp_path, "-c", call, torch_loaded=True)
    assert (got.returncode, got.stdout) == (0, trained_alone()), got.stderr
    data = found(tmp_path)
    assert any("live forecast failed" in note and "ours" in note for note in data["notes"])  # type: ignore[attr-defined]
    assert len(data["forecast"]["measured_s"]) == 2  # type: ignore[index]


@pytest.mark.process
@pytest.mark.parametrize("n_epochs", [1, 2])
def test_an_epoch_that_a_counter_ends_is_as_long_in_both_forecasts(
    tmp_path: Path, machine: Path, n_epochs: int
) -> None:
    script = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(80, 4), batch_size=2)
        for epoch in range({n}):
            for i, x in enumerate(loader):
                optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
                if i == 24: break
    """
    write(tmp_path / "train.py", script.format(n=n_epochs))
    with_us = watched(tmp_path, machine, "train.py")
    assert "step 19 of 25" in with_us.stderr
    forecast = found(tmp_path)["forecast"]
    assert isinstance(forecast, dict)
    assert forecast["steps"] == 25
    assert len(forecast["measured_s"]) == n_epochs
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "epoch of 25 steps" in report
    assert "no epoch was finished" not in report


@pytest.mark.process
@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise KeyboardInterrupt", 130), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1)],
)
def test_a_run_that_ends_early_keeps_report_and_forecast(
    tmp_path: Path, machine: Path, ending: str, status: int
) -> None:
    write(
        tmp_path / "train.py",
        TRAIN.replace("print(epoch, i,", f"exec({ending!r}) if i == 25 else print(epoch, i,"),
    )
    with_us = watched(tmp_path, machine, "train.py")
    assert with_us.returncode == status, with_us.stderr
    forecast = found(tmp_path)["forecast"]
    assert isinstance(forecast, dict)
    assert forecast["after_steps"] == 19
    assert (forecast["epoch_measured_s"], forecast["error_frac"]) == (None, None)
    assert "it was not finished" in (tmp_path / "report.txt").read_text(encoding="utf-8")


@pytest.mark.process
def test_epochs_said_by_the_user_and_a_loader_without_length(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "train.py", TRAIN.replace("range(2)", "iter([0, 1])"))
    endless = """
        import itertools, torch
        from torch import nn
        from torch.utils.data import DataLoader, IterableDataset
        class Stream(IterableDataset):
            def __iter__(self):
                return (torch.ones(4) for _ in itertools.count())
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, x in enumerate(DataLoader(Stream(), batch_size=2)):
            optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
            if i == 40 and model: break
        print("done")
    """
    write(tmp_path / "stream.py", endless)
    command = [
        sys.executable,
        "-m",
        "dlperf",
        "run",
        "--machine",
        str(machine),
        "--json",
        "found.json",
        "-o",
        "report.html",
    ]
    environment_with_us = {**environment(), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return preloaded.run([*command, *arguments], cwd=tmp_path, env=environment_with_us)

    got = run("stream.py")
    assert (got.returncode, got.stdout) == (0, "done\n"), got.stderr
    assert "steps/s" in got.stderr
    assert "the loader has no length" in got.stderr
    assert got.stderr.endswith(f"dlperf: wrote {tmp_path / 'report.html'}\n")
    got = run("--epochs", "2", "train.py")  # a report of ours is replaced
    assert got.returncode == 0, got.stderr
    assert "epoch 1 of 2: step 19 of 30" in got.stderr
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.process
def test_other_ranks_only_run(tmp_path: Path, machine: Path) -> None:
    write(tmp_path / "script.py", LOOP.format(n=40, inside="pass"))
    call = START + f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r}))"
    env = {**environment(), "RANK": "1"}
    got = preloaded.run([sys.executable, "-c", call], cwd=tmp_path, env=env)
    assert (got.stdout, got.stderr) == ("done\n", "")


@pytest.mark.process
def test_under_torchrun_the_first_rank_reports_the_inner_model(
    tmp_path: Path, machine: Path
) -> None:
    text = """
        import torch
        import torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        class Net(nn.Sequential): pass
        model = nn.parallel.DistributedDataParallel(Net(nn.Linear(4, 8), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2)).backward()
            optimizer.step()
        dist.destroy_process_group()
    """
    write(tmp_path / "script.py", text)
    call = (
        START + f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r},"
        " json_path='found.json'))"
    )
    write(tmp_path / "start.py", call)
    got = plainly(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "start.py"
    )
    assert got.returncode == 0, got.stderr
    data = found(tmp_path)
    assert data["model"] == "Net"
    assert {row["layer"] for row in data["measurement"]["layers"]} == {"Net", "0", "1", "(loss)"}  # type: ignore[index]


def test_a_missing_script_is_unusable_input(tmp_path: Path) -> None:
    from dlperf.core.errors import DlperfError
    from dlperf.runner.wrapping import run_script

    with pytest.raises(DlperfError, match=r"nowhere\.py: does not exist"):
        run_script([str(tmp_path / "nowhere.py")])
    with pytest.raises(DlperfError, match="is a folder"):
        run_script([str(tmp_path)])
    write(tmp_path / "s.py", "")
    with pytest.raises(DlperfError, match="absent"):
        run_script([str(tmp_path / "s.py")], machine_path=tmp_path / "absent.json")


@pytest.mark.process
def test_sigterm_ends_the_script_after_the_report(tmp_path: Path, machine: Path) -> None:
    text = """
        import time
        import torch
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in range(10**6):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                if step == 60:
                    print("trained", flush=True)
                if step > 60:
                    time.sleep(0.01)
        finally:
            print("no SIGTERM runs this", flush=True)
    """
    write(tmp_path / "script.py", text)
    call = START + (
        f"sys.exit(run_script(['script.py'], machine_path={str(machine)!r}, json_path='found.json',"
        " output='report.txt'))"
    )
    process = started(tmp_path, call, until="trained")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGTERM  # as without dlperf
    assert out == ""
    assert "ended by SIGTERM: reporting on the steps that were seen" in err
    assert found(tmp_path)["schema"] == "dlperf.run"
    assert "measured" in (tmp_path / "report.txt").read_text(encoding="utf-8")
