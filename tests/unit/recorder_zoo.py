"""Models of every kind that a recording has to hold for, and a reference: what plain torch
dispatches on real tensors.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class RealOps(TorchDispatchMode):
    """Names and result shapes of all that is dispatched; knows nothing of dlperf."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace not in ("prim", "profiler"):
            leaves = torch.utils._pytree.tree_leaves(result)
            self.ops.append(
                (str(func), tuple(tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor)))
            )
        return result


def real_ops(case: Case, inference: bool = False) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """The second step of a case, on real tensors."""
    model, inputs, loss, optimizer = case()

    def forward() -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    def step() -> None:
        if inference:
            with torch.no_grad():
                forward()
            return
        optimizer.zero_grad()
        loss(forward()).backward()
        optimizer.step()

    if inference:
        model.eval()
    with RealOps():
        step()
    with RealOps() as seen:
        step()
    return seen.ops


Case = Callable[[], tuple[nn.Module, Any, Callable[[Any], torch.Tensor], torch.optim.Optimizer]]
CASES: dict[str, Case] = {}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def mean(output: Any) -> torch.Tensor:
    return output.mean()


def case(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """Register ``make() -> (model, inputs[, loss[, optimizer]])`` under its name."""

    def full() -> Any:
        torch.manual_seed(0)
        model, inputs, *rest = make()
        loss = rest[0] if rest else mean
        return model, inputs, loss, rest[1] if len(rest) > 1 else sgd(model)

    CASES[make.__name__] = full
    return full


class Residual(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(c_out)
        self.act = nn.ReLU(inplace=True)
        self.skip = (
            nn.Conv2d(c_in, c_out, 1, stride) if c_in != c_out or stride != 1 else nn.Identity()
        )

    def forward(self, x):
        return self.act(self.bn(self.conv(x)).add_(self.skip(x)))


@case
def residual():
    return nn.Sequential(
        Residual(3, 8), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    ), (torch.randn(4, 3, 8, 8),)


@case
def inplace_activations():
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.SiLU(inplace=True),
        nn.Dropout(0.3, inplace=True),
    ), (torch.randn(4, 6),)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.shared = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.cat(
            [self.shared(torch.tanh(self.a(x))), self.shared(F.gelu(self.b(x)))], 1
        ) * x.sum(1, keepdim=True)


@case
def branching_with_a_module_used_twice():
    return Branching(), (torch.randn(5, 6),)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, index):
        return self.out(self.emb(index))


@case
def tied_weights():
    return (
        Tied(),
        (torch.randint(0, 11, (3, 4)),),
        lambda y: F.cross_entropy(y.flatten(0, 1), torch.zeros(12, dtype=torch.long)),
    )


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, *, x, scale=1.0, mask=None):
        y = self.net(x) * scale
        return {"logits": y if mask is None else y.masked_fill(mask, 0.0), "hidden": [x, (y, None)]}


@case
def keyword_inputs_and_nested_output():
    return (
        Keyword(),
        {"x": torch.randn(3, 6), "scale": 2.0, "mask": torch.rand(3, 2) > 0.5},
        lambda out: out["logits"].pow(2).sum(),
    )


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: Any = None


Pair = namedtuple("Pair", "first second")


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, pair):
        y = self.net(pair.first + pair.second)
        return Output(y.mean(), y)


@case
def named_tuples_and_dataclasses():
    return Structured(), (Pair(torch.randn(3, 6), torch.randn(3, 6)),), lambda out: out.loss


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return F.layer_norm(F.linear(self.inner(x), self.weight), (6,)).softmax(-1)


@case
def functional_work_outside_leaves():
    return Functional(), (torch.randn(3, 6),), lambda y: y.square().sum()


@case
def a_root_that_is_a_leaf():
    return nn.Linear(5, 2), (torch.randn(3, 5),)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


@case
def multihead_attention():
    return Attention(), (torch.randn(2, 5, 16),)


@case
def transformer_encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (torch.randn(2, 5, 16),)


@case
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 5, 16),)


@case
def transformer():
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (
        torch.randn(2, 5, 16),
        torch.randn(2, 4, 16),
    )


class Sdpa(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case
def scaled_dot_product_attention():
    return Sdpa(), (torch.randn(2, 5, 16),)


@case
def lstm():
    return (
        nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True, dropout=0.1),
        (torch.randn(3, 5, 6),),
        lambda out: out[0].mean(),
    )


@case
def gru():
    return nn.GRU(6, 8, bidirectional=True), (torch.randn(5, 3, 6),), lambda out: out[0].mean()


@case
def rnn():
    return nn.RNN(6, 8), (torch.randn(5, 3, 6),), lambda out: out[0].mean()


@case
def lstm_cell():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)

        def forward(self, x):
            state = None
            for t in range(3):
                state = self.cell(x[t], state)
            return state[0]

    return Loop(), (torch.randn(3, 2, 4),)


@case
def embeddings():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.bag = (
                nn.Embedding(20, 8, padding_idx=0),
                nn.EmbeddingBag(20, 8, mode="sum"),
            )

        def forward(self, index, offsets):
            return self.emb(index).mean(1) + self.bag(index.flatten(), offsets)

    return Bags(), (torch.randint(0, 20, (3, 4)), torch.tensor([0, 4, 8]))


@case
def convolutions():
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1),
        nn.ConvTranspose1d(8, 4, 3),
        nn.Unflatten(2, (2, 5)),
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.Unflatten(3, (5, 2)),
        nn.Conv3d(4, 4, 3, padding=1),
    ), (torch.randn(2, 4, 8),)


@case
def norms_and_pools():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, momentum=None),
        nn.GroupNorm(2, 8),
        nn.InstanceNorm2d(8, affine=True),
        nn.MaxPool2d(2),
        nn.LayerNorm(7),
        nn.Dropout2d(0.2),
        nn.AvgPool2d(2),
        nn.LocalResponseNorm(2),
        nn.Softplus(),
    ), (torch.randn(2, 3, 16, 16),)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cube = nn.Module()
        self.cube.forward = Cube.apply

    def forward(self, x):
        return self.cube(self.fc(x))


@case
def custom_autograd_function():
    return Custom(), (torch.randn(3, 4),)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@case
def checkpointing():
    return Checkpointed(False), (torch.randn(3, 6),)


@case
def reentrant_checkpointing():
    return Checkpointed(True), (torch.randn(3, 6),)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(F.relu(self.a(x))).float()


@case
def autocast_bf16():
    return Autocast(), (torch.randn(3, 6),)


@case
def weight_norm():
    from torch.nn.utils.parametrizations import orthogonal, weight_norm

    return nn.Sequential(
        weight_norm(nn.Linear(6, 6)), nn.ReLU(), orthogonal(nn.Linear(6, 4, bias=False))
    ), (torch.randn(3, 6),)


@case
def old_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6))), (torch.randn(3, 6),)


@case
def spectral_norm():
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.spectral_norm(nn.Linear(6, 6)),
    ), (torch.randn(3, 6),)


class Mutating(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.n_calls, self.history, self.cache, self.table = 0, [], {}, {"deep": {"list": []}}
        self.running = torch.zeros(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n_calls += 1
        self.history.append(x.mean().detach())
        self.cache["last"] = x
        self.table["deep"]["list"].append(self.n_calls)
        self.steps += 1
        self.running = self.running * 0.9 + x.detach().mean(0)
        self.latest = x
        return self.fc(x) - self.running


@case
def a_model_that_changes_itself():
    return Mutating(), (torch.randn(3, 4),)


@case
def forward_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    model[0].weight.register_hook(lambda grad: grad * 2)
    return model, (torch.randn(3, 4),)


@case
def frozen_and_unused_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x))

    return Partly(), (torch.randn(3, 4),)


@case
def an_optimizer_that_steps_in_the_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model[0].parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    return model, (torch.randn(3, 4),), mean, sgd(model[1])


@case
def complex_numbers():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)

    return Fourier(), (torch.randn(4, 4),)


@case
def a_loss_with_parameters():
    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(torch.randn(4))

        def forward(self, y):
            return (y - self.centre).square().mean()

    model, loss = nn.Linear(4, 4), Margin()
    return (
        model,
        (torch.randn(3, 4),),
        loss,
        torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1),
    )


@case
def a_penalty_on_captured_parameters():
    model = nn.Linear(4, 4)
    parameters = list(model.parameters())
    return (
        model,
        (torch.randn(3, 4),),
        lambda y: y.mean() + sum(p.square().sum() for p in parameters),
    )


@case
def gradients_in_the_forward():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    return Energy(), (torch.randn(4, 3),), lambda f: f.square().mean()


# Below: what fake tensors cannot do.


@case
def boolean_indexing():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            return y[x > 0]

    return Masked(), (torch.randn(3, 4),)


@case
def branch_on_data():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.bn(self.fc(x))
            return y.tanh() if x.sum() > -1e9 else y

    return Branch(), (torch.randn(3, 4),)


@case
def packed_sequences():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True))[0].data

    return Packed(), (torch.randn(2, 3, 4),)


@case
def through_numpy():
    class Numpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) * float(x.detach().numpy().max())

    return Numpy(), (torch.randn(2, 4),)


@case
def sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(20, 4, sparse=True)

        def forward(self, index):
            return self.emb(index)

    model = Sparse()
    return model, (torch.tensor([1, 3, 3, 7]),), mean, torch.optim.SparseAdam(model.parameters())


@case
def lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    return model, (torch.randn(3, 5),)


FALL_BACK = {
    "boolean_indexing",
    "branch_on_data",
    "packed_sequences",
    "through_numpy",
    "lazy_modules",
    "sparse_gradients",
}
