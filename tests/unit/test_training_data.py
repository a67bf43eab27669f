"""MNIST's files are read exactly, damaged ones are refused by name, generated data is the same
every time.
"""

from __future__ import annotations

import gzip
import struct

import pytest
import torch

from networks.catalog import NETWORKS
from networks.data import (
    DEVIATION,
    MEAN,
    DataError,
    Digits,
    Images,
    Vectors,
    generate,
    generate_images,
    load,
    read_idx,
    read_mnist,
)


def idx(array: torch.Tensor) -> bytes:
    """The IDX bytes of a uint8 tensor, written by hand from the format's description."""
    return (
        bytes((0, 0, 8, array.dim()))
        + struct.pack(f">{array.dim()}I", *array.shape)
        + array.numpy().tobytes()
    )


def write_mnist(folder, n_train=12, n_test=4, suffix=""):
    pack = gzip.compress if suffix == ".gz" else bytes
    sets = {}
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        pixels = torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8)
        labels = torch.arange(n, dtype=torch.uint8) % 10
        (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(pixels)))
        (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))
        sets[prefix] = (pixels, labels)
    return sets


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reading_gives_back_what_was_written(tmp_path, suffix):
    sets = write_mnist(tmp_path, suffix=suffix)
    for prefix, (pixels, labels) in sets.items():
        read = read_mnist(tmp_path, prefix)
        assert torch.equal(read.pixels, pixels)
        assert torch.equal(read.labels, labels.to(torch.int64))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (
            lambda data: data[:-1],
            "is truncated: 12x28x28 elements need 9408 bytes, the file has 9407",
        ),
        (lambda data: data[:16], "is truncated: 12x28x28 elements need 9408 bytes, the file has 0"),
        (lambda data: data[:10], "is truncated in its header"),
        (lambda data: data + b"x", "is too long"),
        (lambda data: b"", "begins with nothing"),
        (lambda data: b"\0\0\x08\x01" + data[4:], "begins with 00 00 08 01"),
        (lambda data: b"\0\0\x0d\x03" + data[4:], "begins with 00 00 0d 03"),  # floats
        (lambda data: b"<html>" + data, "is it the right file"),
        (
            lambda data: data[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1) + data[16:],
            "is truncated",
        ),
        (lambda data: data[:4] + struct.pack(">3I", 0, 28, 28), "holds nothing"),
        (
            lambda data: data[:4] + struct.pack(">3I", 12, 14, 56) + data[16:],
            "14x56; expected 28x28",
        ),
        (
            lambda data: data[:4] + struct.pack(">3I", 11, 28, 28) + data[16:-784],
            "12 labels for the 11 images",
        ),
    ],
)
def test_damaged_images_are_refused(tmp_path, damage, complaint):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=complaint) as error:
        read_mnist(tmp_path, "train")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-5],
        lambda data: data[: len(data) // 2],
        lambda data: b"no gzip",
        lambda data: data[:40] + bytes(20) + data[60:],
    ],
)
def test_damaged_gzip_is_refused(tmp_path, damage):
    write_mnist(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz: is truncated or no gzip file"
    ):
        read_mnist(tmp_path, "train")


def test_a_gzip_of_truncated_data_is_refused(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(torch.zeros(3, dtype=torch.uint8))[:-1]))
    with pytest.raises(DataError, match="is truncated: 3 elements need 3 bytes, the file has 2"):
        read_idx(path, 1)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(DataError, match="nowhere: is no folder"):
        read_mnist(tmp_path / "nowhere", "train")
    with pytest.raises(
        DataError, match=r"has neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte\.gz"
    ):
        read_mnist(tmp_path, "t10k")


def test_impossible_label_is_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(
        idx(torch.tensor([10] * 12, dtype=torch.uint8))
    )
    with pytest.raises(DataError, match="has the label 10"):
        read_mnist(tmp_path, "train")


def test_load_keeps_the_last_images_for_validation(tmp_path):
    pixels, _ = write_mnist(tmp_path, n_train=12)["train"]
    splits = load(tmp_path, NETWORKS["lenet"])
    assert splits.sizes == (10, 2, 4)  # a sixth of 12
    assert [wanted.item() for _, wanted in (splits.validation[i] for i in range(2))] == [
        0,
        1,
    ]  # labels of images 10 and 11
    assert torch.equal(
        splits.validation[1][0], pixels[11:12].to(torch.float32).div(255).sub(MEAN).div(DEVIATION)
    )
    assert load(tmp_path, NETWORKS["mlp"], 3, 4, 0).sizes == (3, 4, 0)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((11, None, None), "has 10 training images beside 2 for validation; --samples 11"),
        ((None, 12, None), "--val-samples 12 leaves none to train on"),
        ((None, None, 5), "has 4 test images; --test-samples 5"),
    ],
)
def test_more_than_there_is_is_refused(tmp_path, sizes, complaint):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=complaint):
        load(tmp_path, NETWORKS["lenet"], *sizes)


@pytest.mark.parametrize("name", ["fc4096", "dlrm-bottom", "dlrm-top"])
def test_networks_of_vectors_refuse_image_files(tmp_path, name):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=f"{name} does not read digits"):
        load(tmp_path, NETWORKS[name])


def test_images_are_scaled_padded_or_flattened():
    images = Images(torch.full((2, 28, 28), 255, dtype=torch.uint8), torch.tensor([4, 7]))
    white, black = (1 - MEAN) / DEVIATION, -MEAN / DEVIATION
    x, wanted = Digits(images, NETWORKS["cnn-small"])[1]
    assert x.shape == (1, 29, 29)
    assert wanted == 7
    torch.testing.assert_close(x[0, :28, :28], torch.full((28, 28), white))
    torch.testing.assert_close(torch.cat([x[0, 28], x[0, :28, 28]]), torch.full((57,), black))
    x, wanted = Digits(images, NETWORKS["mlp"])[0]
    assert x.shape == (784,)
    assert wanted.argmax() == 4
    assert Digits(images, NETWORKS["lenet"])[0][0].shape == (1, 28, 28)


def test_reading_an_image_leaves_it_alone():
    data = Digits(generate_images(3, 1), NETWORKS["lenet"])
    assert torch.equal(data[2][0], data[2][0])


def test_generated_images_repeat_and_differ_between_splits():
    again = generate_images(20, 1)
    assert torch.equal(generate_images(20, 1).pixels, again.pixels)
    assert torch.equal(generate_images(20, 1).labels, again.labels)
    assert not torch.equal(generate_images(20, 2).pixels, again.pixels)
    assert again.pixels.dtype == torch.uint8
    assert again.pixels.shape == (20, 28, 28)


def test_generated_data_has_mnists_size_and_any_other():
    assert generate(NETWORKS["fc4096"]).sizes == (
        50_000,
        10_000,
        10_000,
    )  # 60,000 training images, 10,000 of them for validation; 10,000 test images
    splits = generate(NETWORKS["lenet"], 5, 0, 2)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (5, 0, 2)


def test_generated_vectors_repeat_and_do_not_overlap():
    network = NETWORKS["dlrm-bottom"]
    splits = generate(network, 4, 3, 2)
    assert torch.equal(splits.train[3][0], splits.train[3][0])
    everything = [
        tuple(part[i][0].tolist())
        for part, n in ((splits.train, 4), (splits.validation, 3), (splits.test, 2))
        for i in range(n)
    ]
    assert len(set(everything)) == 9
    x, wanted = splits.test[0]
    assert wanted.shape == (128,)
    torch.testing.assert_close(wanted[13:26], x.clamp(min=0))
    with pytest.raises(IndexError):
        Vectors(2, network)[2]
