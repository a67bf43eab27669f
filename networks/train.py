"""Train one of the networks: an ordinary training script.

    python networks/train.py --net lenet --epochs 3 --data ~/mnist
    torchrun --nproc-per-node 2 networks/train.py --net lenet        (data parallel; --batch-size is
    each process's)

Exit status: 0 done, 1 the training diverged, 2 unusable options or data, 130 on Ctrl-C.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import math
    import os
    import signal
    import time
    from collections.abc import Callable
    from dataclasses import dataclass
    from pathlib import Path
    from types import TracebackType
    from typing import NoReturn

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

    if (
        not __package__
    ):  # run as a file: its folder is importable, the package that it belongs to is not
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from networks.catalog import NETWORKS, Network
    from networks.data import DataError, Sample, Splits, generate, load
except KeyboardInterrupt:  # importing torch takes seconds
    sys.exit(130)

MOST_SAMPLES = 1_000_000

OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
    "momentum": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
    "adam": lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr),
    "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
}


class Diverged(Exception):
    """The loss is no number any more."""


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclass
class Tally:
    """Sums over the samples of a pass."""

    loss: float = 0.0
    right: int = 0
    n: int = 0

    def over(self, group: dist.ProcessGroup | None) -> Tally:
        """The sums over the processes of `group`."""
        if group is None:
            return self
        sums = torch.tensor([self.loss, self.right, self.n], dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        return Tally(*sums.tolist())

    def describe(self, network: Network) -> str:
        """Mean loss and, for a classifier, its accuracy."""
        accuracy = f" accuracy {100 * self.right / self.n:.2f} %" if network.count_right else ""
        return f"loss {self.loss / self.n:.4f}{accuracy}"


def whole(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """A parser of whole numbers from `smallest` to `largest`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value <= largest:
            limit = f" to {largest:,}" if largest < math.inf else " up"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {smallest}{limit}")
        return value

    return parse


def positive(text: str) -> float:
    """A positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="train",
        description=(
            "Train one of the networks on MNIST's files, or on generated data of the same shape."
        ),
    )
    add_training_options(parser)
    parser.add_argument(
        "--loader-workers",
        type=whole(0, 1024),
        default=0,
        metavar="W",
        help="processes that load the data (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, 4096),
        metavar="T",
        help="threads inside each operation (default: torch's own number)",
    )
    return parser.parse_args(argv)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, how, and on what."""
    parser.add_argument(
        "--net", choices=list(NETWORKS), default="mlp", help="which network (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=whole(1), default=1, metavar="N")
    parser.add_argument(
        "--batch-size",
        type=whole(1, MOST_SAMPLES),
        default=32,
        metavar="B",
        help="of each process (default: %(default)s)",
    )
    parser.add_argument(
        "--lr",
        type=positive,
        metavar="RATE",
        help="learning rate (default: one that suits the network and the optimizer)",
    )
    parser.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="sgd", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=(
            "folder with MNIST's four IDX files, plain or .gz; only for the networks that read"
            " digits"
        ),
    )
    parser.add_argument(
        "--samples",
        type=whole(1, MOST_SAMPLES),
        metavar="N",
        help="to train on (default: all; 50,000 generated ones)",
    )
    parser.add_argument(
        "--val-samples",
        type=whole(0, MOST_SAMPLES),
        metavar="N",
        help=(
            "to validate with, 0 for none (default: a sixth of the training file; 10,000 generated"
            " ones)"
        ),
    )
    parser.add_argument(
        "--test-samples",
        type=whole(0, MOST_SAMPLES),
        metavar="N",
        help="to test with, 0 for none (default: all; 10,000 generated ones)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, 2**63 - 1),
        default=0,
        help="of the weights and of the order of the samples (default: %(default)s)",
    )


def ignore_interrupts(_worker: int) -> None:
    """Leave Ctrl-C to the main process, which ends its loading workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = sys.excepthook

    def report_unless_hung_up(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """What a thread of the worker fails with, but for a main process that is interrupted while
        it fetches a batch.
        """
        if not issubclass(kind, (EOFError, ConnectionError)):
            report(kind, error, trace)

    sys.excepthook = report_unless_hung_up


def make_loader(
    dataset: Dataset[Sample],
    args: argparse.Namespace,
    *,
    sampler: DistributedSampler[Sample] | None = None,
    shuffle: bool = False,
) -> DataLoader[Sample]:
    """Batches of `dataset`."""
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=shuffle,
        sampler=sampler,
        num_workers=args.loader_workers,
        persistent_workers=args.loader_workers > 0,
        worker_init_fn=ignore_interrupts,
    )


def train(
    model: nn.Module, loader: DataLoader[Sample], network: Network, optimizer: torch.optim.Optimizer
) -> Tally:
    """One epoch."""
    model.train()
    tally = Tally()
    for inputs, wanted in loader:
        optimizer.zero_grad()
        output = model(inputs)
        try:
            loss = network.loss(output, wanted)
        except (
            RuntimeError
        ) as error:  # binary cross-entropy refuses NaN before it can show in the loss
            if output.isnan().any():
                raise Diverged from error
            raise
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        add(tally, loss.item(), output, wanted, network)
        if not math.isfinite(tally.loss):
            raise Diverged
    return tally


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Sample], network: Network) -> Tally:
    """A pass without training."""
    model.eval()
    tally = Tally()
    for inputs, wanted in loader:
        output = model(inputs)
        add(tally, network.loss(output, wanted).item(), output, wanted, network)
    return tally


def add(
    tally: Tally, loss: float, output: torch.Tensor, wanted: torch.Tensor, network: Network
) -> None:
    """Count a batch."""
    n = len(wanted)
    tally.loss += loss * n
    tally.n += n
    if network.count_right is not None:
        tally.right += int(network.count_right(output, wanted))


def learning_rate(args: argparse.Namespace, network: Network) -> float:
    """The one asked for, or one that suits the network and the optimizer."""
    suits: float = (
        1e-3
        if args.optimizer.startswith("adam")
        else network.learning_rate * (0.1 if args.optimizer == "momentum" else 1)
    )
    return args.lr or suits


def run(
    args: argparse.Namespace, network: Network, splits: Splits, rank: int, n_ranks: int
) -> None:
    """Train, validate after each epoch, test at the end; the first process prints."""
    say: Callable[[str], None] = (
        (lambda line: print(line, flush=True)) if rank == 0 else (lambda line: None)
    )
    sampler: DistributedSampler[Sample] | None = None
    validation, test = splits.validation, splits.test
    module = network.build()
    model: nn.Module = module
    group: dist.ProcessGroup | None = None
    if n_ranks > 1:
        sampler = DistributedSampler(splits.train, seed=args.seed % 2**32)
        # every sample exactly once, which a DistributedSampler, making the shares equal, does not
        # give
        validation, test = (
            Subset(samples, range(rank, n, n_ranks))
            for samples, n in zip((validation, test), splits.sizes[1:])
        )
        model = DistributedDataParallel(module)
        # A group of its own for the sums, since destroy_process_group ends its threads. Those of
        # DDP's group may outlive it, and one that still held a tensor which Python has seen would
        # abort the process at its exit ("terminate called without an active exception").
        group = dist.new_group()
    lr = learning_rate(args, network)
    optimizer = OPTIMIZERS[args.optimizer](model, lr)
    train_loader = make_loader(splits.train, args, sampler=sampler, shuffle=sampler is None)
    validation_loader, test_loader = make_loader(validation, args), make_loader(test, args)

    n_train, n_validation, n_test = splits.sizes
    n_parameters = sum(p.numel() for p in module.parameters())
    say(
        f"{network.name}: {n_parameters:,} parameters; {n_train:,} training, {n_validation:,}"
        f" validation, {n_test:,} test samples {splits.source}"
    )
    say(
        f"{args.optimizer}, learning rate {lr:g}, batch size {args.batch_size}, threads"
        f" {torch.get_num_threads()}, processes {n_ranks}"
    )
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        if sampler is not None:
            sampler.set_epoch(epoch)
        line = (
            f"epoch {epoch}/{args.epochs}  train"
            f" {train(model, train_loader, network, optimizer).over(group).describe(network)}"
        )
        if n_validation:
            line += (
                "  validation"
                f" {evaluate(module, validation_loader, network).over(group).describe(network)}"
            )
        say(f"{line}  {time.perf_counter() - begin:.2f} s")
    if n_test:
        say(f"test {evaluate(module, test_loader, network).over(group).describe(network)}")


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    args = parse_arguments(argv)
    network = NETWORKS[args.net]
    rank, n_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    wanted = (args.samples, args.val_samples, args.test_samples)
    try:
        splits = (
            generate(network, *wanted) if args.data is None else load(args.data, network, *wanted)
        )
        if splits.sizes[0] < n_ranks:
            raise DataError(
                f"{splits.sizes[0]} training samples are too few for {n_ranks} processes; give more"
                " --samples"
            )
    except DataError as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if n_ranks > 1:
        dist.init_process_group("gloo")
    try:
        run(args, network, splits, rank, n_ranks)
    except Diverged:
        print(
            f"train: error: the loss of {network.name} is no finite number any more; choose a"
            " smaller --lr",
            file=sys.stderr,
        )
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
