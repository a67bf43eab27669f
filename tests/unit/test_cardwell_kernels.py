"""The seven algorithms on 1 to 6 ranks against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra as scipy_dijkstra
from scipy.sparse.csgraph import minimum_spanning_tree
from thread_wire import ThreadWire, on_ranks

from dlperf.studies.cardwell_kernels import algorithms
from dlperf.studies.cardwell_kernels.algorithms import share

RANKS = pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 6])


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@RANKS
def test_summa(n_ranks: int) -> None:
    n = 24
    a, b, c = random(n, n), random(n, n, seed=1), random(n, n, seed=2)

    def own(wire: ThreadWire) -> tuple[slice, slice, np.ndarray]:
        grid = algorithms.make_grid(wire)
        rows = slice(grid.row * n // grid.n_rows, (grid.row + 1) * n // grid.n_rows)
        columns = slice(grid.column * n // grid.n_columns, (grid.column + 1) * n // grid.n_columns)
        blocks = [torch.tensor(m[rows, columns]) for m in (a, b, c)]
        return rows, columns, algorithms.summa(grid, *blocks, alpha=2.0, beta=-1.0).numpy()

    whole = np.empty((n, n))
    for rows, columns, block in on_ranks(n_ranks, own):
        whole[rows, columns] = block
    assert np.allclose(whole, 2 * a @ b - c)


@RANKS
def test_dgemv_and_ddot(n_ranks: int) -> None:
    n = 24
    a, x, y = random(n, n), random(n, seed=1), random(n, seed=2)

    def own(wire: ThreadWire) -> tuple[np.ndarray, float]:
        mine = share(n, wire.rank, n_ranks)
        parts = [torch.tensor(values[mine.start : mine.stop]) for values in (a, x, y)]
        product = algorithms.ddot(wire, parts[1], parts[2])
        return algorithms.dgemv(wire, *parts, alpha=3.0, beta=0.5).numpy(), product

    found = on_ranks(n_ranks, own)
    assert np.allclose(np.concatenate([part for part, _ in found]), 3 * a @ x + 0.5 * y)
    assert [product for _, product in found] == pytest.approx([x @ y] * n_ranks)


@pytest.mark.parametrize(("n", "n_ranks"), [(64, 1), (64, 2), (2**9, 4), (144, 3), (144, 6)])
def test_fft(n: int, n_ranks: int) -> None:
    x = random(n) + 1j * random(n, seed=1)

    def own(wire: ThreadWire) -> np.ndarray:
        mine = share(n, wire.rank, n_ranks)
        return algorithms.fft(
            wire, torch.tensor(x[mine.start : mine.stop]), algorithms.twiddles(wire, n)
        ).numpy()

    by_k1 = np.concatenate(on_ranks(n_ranks, own))  # [k1, k2] holds X[k1 + N1 k2]
    assert np.allclose(by_k1.T.ravel(), np.fft.fft(x))


def test_a_transform_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="a transform of 30 cannot be shared by 4 ranks"):
        algorithms.fft_shape(30, 4)


@RANKS
@pytest.mark.parametrize("n_sweeps", [1, 4, 7])
def test_stencil(n_ranks: int, n_sweeps: int) -> None:
    n = 17
    start = random(n, n)
    expected = start.copy()
    for _ in range(n_sweeps):
        expected[1:-1, 1:-1] = (
            expected[:-2, 1:-1] + expected[2:, 1:-1] + expected[1:-1, :-2] + expected[1:-1, 2:]
        ) / 4

    def own(wire: ThreadWire) -> np.ndarray:
        mine = share(n - 2, wire.rank, n_ranks)
        values = torch.tensor(start[mine.start : mine.stop + 2])
        return algorithms.stencil(wire, values, values.clone(), n_sweeps)[1:-1].numpy()

    assert np.allclose(np.concatenate(on_ranks(n_ranks, own)), expected[1:-1])


def random_graph(n_vertices: int, n_edges: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.integers(0, n_vertices, (n_edges, 2)), generator.integers(1, most, n_edges)


@RANKS
@pytest.mark.parametrize(
    ("n_vertices", "n_edges", "most"),
    [(60, 400, 10**6), (60, 400, 3), (40, 30, 100)],
    ids=["distinct", "ties", "forest"],
)
def test_boruvka(n_ranks: int, n_vertices: int, n_edges: int, most: int) -> None:
    ends, weights = random_graph(n_vertices, n_edges, most)
    lightest = np.zeros((n_vertices, n_vertices))
    for (a, b), weight in zip(ends, weights):
        a, b = min(a, b), max(a, b)
        if a != b and (not lightest[a, b] or weight < lightest[a, b]):
            lightest[a, b] = weight
    tree = minimum_spanning_tree(csr_matrix(lightest))

    def own(wire: ThreadWire) -> algorithms.Forest:
        mine = share(n_edges, wire.rank, n_ranks)
        return algorithms.boruvka(
            wire,
            n_vertices,
            torch.tensor(ends[mine.start : mine.stop]),
            torch.tensor(weights[mine.start : mine.stop]),
            mine.start,
        )

    for forest in on_ranks(n_ranks, own):
        assert (forest.weight, forest.n_edges) == (int(tree.sum()), tree.nnz)
        assert forest.n_rounds <= np.ceil(np.log2(n_vertices))


@RANKS
@pytest.mark.parametrize("density", [0.3, 0.03], ids=["dense", "unreachable"])
def test_dijkstra(n_ranks: int, density: float) -> None:
    n, source = 41, 5
    generator = np.random.default_rng(4)
    lengths = np.where(
        generator.random((n, n)) < density, generator.random((n, n)) + 0.1, np.inf
    )  # [to, from]
    expected = scipy_dijkstra(csr_matrix(np.where(np.isinf(lengths), 0, lengths).T), indices=source)
    assert np.isinf(expected).any() == (density < 0.1)

    def own(wire: ThreadWire) -> np.ndarray:
        mine = share(n, wire.rank, n_ranks)
        return algorithms.dijkstra(
            wire, torch.tensor(lengths[mine.start : mine.stop]), source, n
        ).numpy()

    for found in on_ranks(n_ranks, own):
        assert np.allclose(found, expected)


def test_more_ranks_than_vertices() -> None:
    lengths = torch.tensor([[torch.inf, 1.0], [2.0, torch.inf]], dtype=torch.float64)
    found = on_ranks(
        4,
        lambda wire: algorithms.dijkstra(
            wire, lengths[share(2, wire.rank, 4).start : share(2, wire.rank, 4).stop], 0, 2
        ).tolist(),
    )
    assert found == [[0.0, 2.0]] * 4
