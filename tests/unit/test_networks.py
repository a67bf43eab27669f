"""The networks are those of the papers: counts, shapes, activations, and that they learn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import networks
from networks.catalog import N_CLASSES, NETWORKS, Network
from networks.phi_cnn import ScaledTanh, large, medium, small

PARAMETERS = {
    "mlp": (784 * 50 + 50) + (50 * 10 + 10),  # 39,760
    "lenet": 61_706,  # 156 + 2,416 + 48,120 + 10,164 + 850
    "cnn-small": 6_405,
    "cnn-medium": 76_040,
    "cnn-large": 383_160,
    "fc4096": 4096 * 4096 + 4096,
    "dlrm-bottom": (13 * 512 + 512) + (512 * 256 + 256) + (256 * 128 + 128),
    "dlrm-top": (
        (479 * 1024 + 1024)
        + (1024 * 1024 + 1024)
        + (1024 * 512 + 512)
        + (512 * 256 + 256)
        + (256 + 1)
    ),
}
# forward, convolutions and fully connected layers, 2 FLOP a multiply-add
FLOPS = {
    "mlp": 2 * (784 * 50 + 50 * 10),
    "lenet": 2 * (28 * 28 * 6 * 25 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 84 + 84 * 10),
    "cnn-small": 320_660,
    "cnn-medium": 3_783_640,
    "cnn-large": 45_297_640,
    "fc4096": 2 * 4096 * 4096,
    "dlrm-bottom": 2 * (13 * 512 + 512 * 256 + 256 * 128),
    "dlrm-top": 2 * (479 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256),
}
OUTPUTS = {"fc4096": 4096, "dlrm-bottom": 128, "dlrm-top": 1}

each_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=list(NETWORKS))


def batch(network: Network, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, *network.input_shape)
    return x, network.make_wanted(
        torch.randint(0, N_CLASSES, (size,)) if network.reads_digits else x
    )


@each_network
def test_parameter_count(network):
    assert sum(p.numel() for p in network.build().parameters()) == PARAMETERS[network.name]


@each_network
def test_forward_flops_of_an_image(network):
    with FlopCounterMode(display=False) as counter:
        network.build()(torch.randn(3, *network.input_shape))
    assert counter.get_total_flops() == 3 * FLOPS[network.name]


@each_network
def test_output_shape_and_gradients(network):
    model = network.build()
    x, wanted = batch(network, 3)
    output = model(x)
    assert output.shape == (3, OUTPUTS.get(network.name, 10))
    loss = network.loss(output, wanted)
    assert loss.shape == ()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "network",
    [n for n in NETWORKS.values() if n.name != "cnn-large"],
    ids=[n for n in NETWORKS if n != "cnn-large"],
)
def test_loss_of_a_batch_goes_down(network):
    torch.manual_seed(0)
    model = network.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=network.learning_rate)
    x, wanted = batch(network, 16)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = network.loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.995 * losses[0]


def test_scaled_tanh():
    x = torch.tensor([-1e3, 0.0, 1.0, 1e3])
    # LeCun's constants make it pass through about +-1 at +-1: 1.7159 tanh(2/3) = 1.7159 * 0.582783
    # = 0.99999; it saturates at 1.7159
    torch.testing.assert_close(
        ScaledTanh()(x), torch.tensor([-1.7159, 0.0, 1.0, 1.7159]), atol=2e-5, rtol=0
    )


def test_feature_maps_of_the_phi_networks():
    # height x width x maps after each convolution and pooling: 29 - 4 + 1 = 26, pooled by 2: 13, 13
    # - 5 + 1 = 9, by 3: 3; large 26, 22, 11, 6, 3
    maps = {}
    for name, net in (("small", small()), ("medium", medium()), ("large", large())):
        x, seen = torch.zeros(1, 1, 29, 29), []
        for layer_name, layer in net.named_children():
            x = layer(x)
            if layer_name.startswith(("conv", "pool")):
                seen.append(tuple(x.shape[1:]))
        maps[name] = seen
    assert maps["small"] == [(5, 26, 26), (5, 13, 13), (10, 9, 9), (10, 3, 3)]
    assert maps["medium"] == [(20, 26, 26), (20, 13, 13), (40, 9, 9), (40, 3, 3)]
    assert maps["large"] == [(20, 26, 26), (60, 22, 22), (60, 11, 11), (100, 6, 6), (100, 3, 3)]


def test_right_answers_are_counted():
    mlp, lenet, clicks = NETWORKS["mlp"], NETWORKS["lenet"], NETWORKS["dlrm-top"]
    labels = torch.tensor([3, 1, 9])
    scores = torch.zeros(3, 10)
    scores[0, 3] = scores[1, 2] = scores[2, 9] = 1.0
    assert mlp.count_right(scores, mlp.make_wanted(labels)) == 2
    assert lenet.count_right(scores, lenet.make_wanted(labels)) == 2
    assert (
        clicks.count_right(
            torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [1.0], [1.0]])
        )
        == 2
    )
    assert mlp.make_wanted(labels).tolist()[1] == [0, 1] + 8 * [0]


def test_networks_are_plain_torch():
    imported = set()
    for path in Path(networks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert "torch" in imported
    assert not imported & {"dlperf", "microbench", "torchvision"}
