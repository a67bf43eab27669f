"""Training data: MNIST from its IDX files, or generated data of the same shape."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from networks.catalog import N_CLASSES, Network

SIZE = 28
"""Height and width of MNIST's images, in pixels."""
N_TRAIN, N_VALIDATION, N_TEST = 50_000, 10_000, 10_000
"""MNIST's 60,000 training images, the last 10,000 of them kept for validation, and its 10,000 test
images.
"""
MEAN, DEVIATION = 0.1307, 0.3081
"""Of MNIST's training pixels, scaled to 0..1."""

_PORTION = 2**22
"""Vectors lie so far apart, by number, from one portion to the next: three times a million fit
between. A generator takes 32 bits of its seed.
"""

Sample = tuple[Tensor, Tensor]


class DataError(Exception):
    """Data that cannot be used; the message names the file or folder, what is wrong with it, and
    the way out.
    """


def read_idx(path: Path, n_dimensions: int) -> Tensor:
    """The bytes of an IDX file (plain, or gzip if its name ends in ``.gz``) as a uint8 tensor.

    The format: two zero bytes, a type (8 = unsigned byte), the number of dimensions, their sizes as
    big-endian 32-bit integers, then the elements in row-major order.

    Raises DataError where the file cannot be read, is no such file, or is shorter or longer than
    its sizes say.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: is truncated or no gzip file ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    header = 4 + 4 * n_dimensions
    magic = bytes((0, 0, 8, n_dimensions))
    if data[:4] != magic:
        raise DataError(
            f"{path}: begins with {data[:4].hex(' ') or 'nothing'}, not with IDX's"
            f" {magic.hex(' ')}; is it the right file, unpacked?"
        )
    if len(data) < header:
        raise DataError(
            f"{path}: is truncated in its header ({len(data)} of {header} bytes); fetch it again"
        )
    sizes = struct.unpack(f">{n_dimensions}I", data[4:header])
    expected, found = math.prod(sizes), len(data) - header
    if found != expected:
        what = "is truncated" if found < expected else "is too long"
        raise DataError(
            f"{path}: {what}: {'x'.join(map(str, sizes))} elements need {expected} bytes, the file"
            f" has {found}; fetch it again"
        )
    if not expected:
        raise DataError(f"{path}: holds nothing (sizes {'x'.join(map(str, sizes))})")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).reshape(sizes)


@dataclass(frozen=True)
class Images:
    """Grey images, uint8 (n, 28, 28), and their classes 0..9, int64 (n,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> Images:
        return Images(self.pixels[part], self.labels[part])


def read_mnist(folder: Path, prefix: str) -> Images:
    """The images and labels of ``PREFIX-images-idx3-ubyte`` and ``PREFIX-labels-idx1-ubyte``, each
    plain or with ``.gz``.

    `prefix` is ``train`` or ``t10k``. Raises DataError where a file is missing or damaged or the
    two do not fit each other.
    """
    images_path, labels_path = (
        _find(folder, f"{prefix}-images-idx3-ubyte"),
        _find(folder, f"{prefix}-labels-idx1-ubyte"),
    )
    pixels, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if pixels.shape[1:] != (SIZE, SIZE):
        raise DataError(
            f"{images_path}: its images are {pixels.shape[1]}x{pixels.shape[2]}; expected"
            f" {SIZE}x{SIZE}"
        )
    if len(pixels) != len(labels):
        raise DataError(
            f"{labels_path}: has {len(labels)} labels for the {len(pixels)} images of"
            f" {images_path.name}; take both files from one source"
        )
    if labels.max() >= N_CLASSES:
        raise DataError(
            f"{labels_path}: has the label {int(labels.max())}; expected 0..{N_CLASSES - 1}"
        )
    return Images(pixels, labels.to(torch.int64))


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    if not folder.is_dir():
        raise DataError(
            f"{folder}: is no folder; --data wants the one that holds MNIST's IDX files"
        )
    raise DataError(
        f"{folder}: has neither {name} nor {name}.gz; --data wants the folder that holds MNIST's"
        " IDX files"
    )


def generate_images(n: int, seed: int) -> Images:
    """`n` images that a network can learn to tell apart: each class has a pattern of its own, under
    noise.

    The same `n` and `seed` always give the same images; the patterns do not depend on either.
    """
    cells = torch.randint(
        0,
        128,
        (N_CLASSES, SIZE // 4, SIZE // 4),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    patterns = cells.repeat_interleave(4, 1).repeat_interleave(4, 2)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, N_CLASSES, (n,), generator=generator)
    pixels = torch.randint(0, 128, (n, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    return Images(pixels.add_(patterns[labels]), labels)


class Digits(Dataset[Sample]):
    """Images as a network wants them: scaled, padded on the right and below by zeros or flattened,
    as its input shape asks.

    An item is ``(float32 image, wanted)``.
    """

    def __init__(self, images: Images, network: Network) -> None:
        pixels = images.pixels
        if len(network.input_shape) == 3:
            more = network.input_shape[-1] - SIZE
            pixels = F.pad(pixels, (0, more, 0, more))
        self.pixels = pixels.reshape(len(images), *network.input_shape)
        self.wanted = network.make_wanted(images.labels)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Sample:
        return (
            self.pixels[index].to(torch.float32).div_(255).sub_(MEAN).div_(DEVIATION),
            self.wanted[index],
        )


class Vectors(Dataset[Sample]):
    """Normally distributed inputs, each made when it is asked for, and the function of them that
    the network is to learn.

    Sample `i` is the same whenever it is drawn; `first` sets apart the samples of several data
    sets.
    """

    def __init__(self, n: int, network: Network, first: int = 0) -> None:
        self.n, self.network, self.first = n, network, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.n:
            raise IndexError(f"sample {index} of {self.n}")
        x = torch.randn(
            self.network.input_shape, generator=torch.Generator().manual_seed(self.first + index)
        )
        return x, self.network.make_wanted(x)


@dataclass(frozen=True)
class Splits:
    """Data to train on, to validate with after each epoch, and to test with at the end; the last
    two may be empty.
    """

    train: Dataset[Sample]
    validation: Dataset[Sample]
    test: Dataset[Sample]
    sizes: tuple[int, int, int]
    source: str


def generated_sizes(
    n_train: int | None = None, n_validation: int | None = None, n_test: int | None = None
) -> tuple[int, int, int]:
    """How many samples are generated to train, validate and test with: as many as asked for, by
    default as MNIST has.
    """
    return (
        N_TRAIN if n_train is None else n_train,
        N_VALIDATION if n_validation is None else n_validation,
        N_TEST if n_test is None else n_test,
    )


def generate(
    network: Network,
    n_train: int | None = None,
    n_validation: int | None = None,
    n_test: int | None = None,
    portion: int = 0,
) -> Splits:
    """Generated data for any network, by default as much as MNIST has. Every `portion`, 0 and up,
    is other data of the same kind.
    """
    sizes = generated_sizes(n_train, n_validation, n_test)
    train: Dataset[Sample]
    validation: Dataset[Sample]
    test: Dataset[Sample]
    if network.reads_digits:
        train, validation, test = (
            Digits(generate_images(n, seed), network)
            for seed, n in enumerate(sizes, 1 + len(sizes) * portion)
        )
    else:
        begin = portion * _PORTION
        train, validation, test = (
            Vectors(n, network, first)
            for n, first in zip(sizes, (begin, begin + sizes[0], begin + sizes[0] + sizes[1]))
        )
    return Splits(train, validation, test, sizes, "generated")


def load(
    folder: Path,
    network: Network,
    n_train: int | None = None,
    n_validation: int | None = None,
    n_test: int | None = None,
) -> Splits:
    """MNIST from `folder`: the last `n_validation` training images (by default a sixth) are kept
    for validation.

    `n_train` and `n_test` take the first ones of what is there, by default all. Raises DataError
    for damaged files, for a network that does not read digits, and where more is asked for than
    there is.
    """
    if not network.reads_digits:
        shape = "x".join(map(str, network.input_shape))
        raise DataError(
            f"--data {folder}: {network.name} does not read digits but vectors of {shape} numbers;"
            " leave --data out and they are generated"
        )
    training, test = read_mnist(folder, "train"), read_mnist(folder, "t10k")
    kept = len(training) // 6 if n_validation is None else n_validation
    left = len(training) - kept
    if left < 1:
        raise DataError(
            f"{folder}: has {len(training)} training images; --val-samples {kept} leaves none to"
            " train on"
        )
    _check_enough(
        folder, "--samples", n_train, left, f"training images beside {kept} for validation"
    )
    _check_enough(folder, "--test-samples", n_test, len(test), "test images")
    training, validation, test = training[:left][:n_train], training[left:], test[:n_test]
    sizes = (len(training), len(validation), len(test))
    return Splits(
        Digits(training, network),
        Digits(validation, network),
        Digits(test, network),
        sizes,
        f"from {folder}",
    )


def _check_enough(folder: Path, option: str, wanted: int | None, there: int, what: str) -> None:
    if wanted is not None and wanted > there:
        raise DataError(f"{folder}: has {there} {what}; {option} {wanted} asks for more")
