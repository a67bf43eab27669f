"""Random networks: the same for a seed, nobody's, of all layers that are promised."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from dlperf.core.trace import Trace
from dlperf.recorder.recording import record
from dlperf.recorder.targets import Built
from dlperf.studies.random_layers import Attention, Residual, SkipConnection
from dlperf.studies.random_networks import KINDS, draw, kind_of

N_SEEDS, N_TRAINED = 47, 20
"""Networks drawn, as many as it takes to meet every layer, and how many of them train and are
recorded.
"""
LAYERS = (
    *("Linear", "BatchNorm1d", "LayerNorm", "Dropout", Residual.__name__, SkipConnection.__name__),
    *("Conv1d", "Conv2d", "ConvTranspose2d", "Upsample", "BatchNorm2d", "GroupNorm"),
    *("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "depthwise", "grouped", "strided"),
    *("conv of 1", "conv of 3", "conv of 5", "conv of 7"),
    *("eager", "fused", "causal", "split", "TransformerEncoderLayer", "LSTM", "GRU", "Embedding"),
    *("ReLU", "GELU", "SiLU", "Tanh", "LeakyReLU", "ReLU6", "ELU", "Hardswish", "Sigmoid"),
    *("SGD", "Adam", "AdamW", "RMSprop"),
)
SIZES = [2530699, 18945, 99264, 23301, 17120, 77236]
"""Parameters of the first networks: another machine draws the same."""


def recorded(built: Built) -> Trace:
    return record(built.model, built.inputs, loss=built.loss, optimizer=built.optimizer)


def check(built: Built) -> None:
    """The network trains and is recorded under fake tensors, none of it left out."""
    before = [parameter.detach().clone() for parameter in built.model.parameters()]
    built.step()
    after = list(built.model.parameters())
    assert any(not torch.equal(one, other) for one, other in zip(before, after))
    assert all(parameter.isfinite().all() for parameter in after)
    trace = recorded(built)
    assert trace.notes == ()
    assert {call.phase for call in trace.ops} >= {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(("seed", "size"), list(enumerate(SIZES)))
def test_a_network_is_the_same_for_the_same_seed(seed: int, size: int) -> None:
    one = draw(seed)
    assert sum(p.numel() for p in one.model.parameters()) == size
    ours, optimizer = copy.deepcopy(one.model.state_dict()), repr(one.optimizer)
    inputs, trace = one.inputs[0].clone(), recorded(one)
    check(one)
    same = draw(seed)  # after another one has trained
    assert repr(same.model) == repr(one.model)
    theirs = same.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(inputs, same.inputs[0])
    assert optimizer == repr(same.optimizer)
    assert trace.to_json() == recorded(same).to_json()


def test_a_kind_is_a_seeds() -> None:
    kinds = [kind_of(seed) for seed in range(90)]
    assert Counter(kinds) == dict(zip(KINDS, (30, 30, 20, 10)))
    for three in itertools.pairwise(range(0, 90, 3)):
        assert len({kind_of(seed) for seed in range(*three)}) == 3
    assert all(kind_of(seed) == kind_of(seed + 9) for seed in range(81))


@pytest.mark.slow
def test_networks_of_many_seeds_have_all_layers_train_and_are_recorded() -> None:
    found = Counter[str]()
    drawn = set()
    for seed in range(N_SEEDS):
        built = draw(seed)
        if len(SIZES) <= seed < N_TRAINED:  # the first ones train above
            check(built)
        drawn.add(repr(built.model))
        found[type(built.optimizer).__name__] += 1
        for module in built.model.modules():
            found[type(module).__name__] += 1
            if isinstance(module, nn.Conv2d):
                groups = "depthwise" if 1 < module.groups == module.in_channels else "grouped"
                found[groups if module.groups > 1 else f"conv of {module.kernel_size[0]}"] += 1
                found["strided"] += module.stride[0] > 1
            if isinstance(module, Attention):
                found["eager" if module.options.is_eager else "fused"] += 1
                found["causal"] += module.options.is_causal
                found["split"] += module.options.is_split
    assert len(drawn) == N_SEEDS
    lacking = {*LAYERS} - {name for name, count in found.items() if count}
    assert not lacking
