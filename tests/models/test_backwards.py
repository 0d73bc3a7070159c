"""How backward runs: on several losses, twice, in chunks, from within, and by torch.autograd.grad."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.models.comparing import Case, compare, fully_sharded, on_input, seeded, spread
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds


class Chunked(nn.Module):
    """A trunk, and a head that is called for one chunk of the tokens after another."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(models.Tanh() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.in_forward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = block(x)
        x = self.norm(x)
        return sum(self.loss(chunk) for chunk in x.chunk(3)) if self.in_forward else x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).logsumexp(-1).sum()


def head_alone(model: nn.Module, here: Rank) -> nn.Module:
    fully_sharded(*model.b, model.head, model, here=here)
    return model


def norm_and_head(model: nn.Module, here: Rank) -> nn.Module:
    """One group of two modules, of which forward runs the first only."""
    fully_sharded(*model.b, here=here)
    fully_shard([model.norm, model.head], mesh=here.mesh((2, 2)))
    return fully_shard(model, mesh=here.mesh((2, 2)))


def chunks_in_one_backward(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    model.in_forward = True
    loss = model(seeded(rank, number, 6, 4).requires_grad_())
    loss.backward()
    return loss


def one_backward_for_each_chunk(model: nn.Module, rank: int, number: int) -> None:
    """Each chunk's graph is gone before the next; the trunk's backward comes last."""
    hidden = model(seeded(rank, number, 6, 4).requires_grad_())
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(3):
        model.head(chunk).logsumexp(-1).sum().backward()
    hidden.backward(cut.grad)


def chunks_without_sync(model: nn.Module, rank: int, number: int) -> None:
    """The head is reduced once, with its last chunk."""
    hidden = model(seeded(rank, number, 6, 4).requires_grad_())
    cut = hidden.detach().requires_grad_()
    for i, chunk in enumerate(cut.chunk(3)):
        if hasattr(model.head, "set_requires_gradient_sync"):
            model.head.set_requires_gradient_sync(i == 2)
        model.head(chunk).logsumexp(-1).sum().backward()
    hidden.backward(cut.grad)


def retained(model: nn.Module, rank: int, number: int) -> None:
    loss = model(seeded(rank, number, 3, 4).requires_grad_()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def retained_accumulating(model: nn.Module, rank: int, number: int) -> None:
    """The same graph as two microbatches."""
    loss = model(seeded(rank, number, 3, 4).requires_grad_()).pow(2).sum()
    for i in range(2):
        if hasattr(model, "set_requires_all_reduce"):
            parity.set_flags(model, {"all_reduce": i == 1})
        loss.backward(retain_graph=i == 0)


class Heads(nn.Module):
    """Two heads on one trunk; an auxiliary output half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(models.Tanh() for _ in range(3))
        self.one = nn.Linear(4, 2)
        self.other = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.b[1](self.b[0](x))
        return self.one(x), self.other(self.b[2](x))


def shard_heads(model: nn.Module, here: Rank) -> nn.Module:
    fully_sharded(*model.b, model.one, model.other, model, here=here)
    return model


def summed(model: nn.Module, rank: int, number: int) -> None:
    one, other = model(seeded(rank, number, 3, 4).requires_grad_())
    (one.pow(2).sum() + other.sum()).backward()


def at_once(model: nn.Module, rank: int, number: int) -> None:
    one, other = model(seeded(rank, number, 3, 4).requires_grad_())
    torch.autograd.backward([one.sum(), other.pow(2).sum()])


def one_by_one(model: nn.Module, rank: int, number: int) -> None:
    """Each backward reaches some of the units only."""
    one, other = model(seeded(rank, number, 3, 4).requires_grad_())
    one.pow(2).sum().backward(retain_graph=True)
    other.sum().backward()


def one_only(model: nn.Module, rank: int, number: int) -> None:
    """The second head and the block before it get no gradient in odd steps."""
    outputs = model(seeded(rank, number, 3, 4).requires_grad_())
    outputs[number % 2].pow(2).sum().backward()


def input_gradient(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """torch.autograd.grad for the input leaves `.grad` alone; then backward."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    loss = model(x).pow(2).sum()
    before = [p.grad for p in model.parameters()]
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    loss.backward()
    return gradient


def input_gradient_alone(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """An attack on the input, then a step on what it made."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    model((x + gradient.sign()).detach()).sum().backward()
    return gradient


def inputs_only(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """`backward(inputs=...)` asks for the input's gradient, then for all."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    loss = model(x).pow(2).sum()
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return x.grad


def parameter_gradients(model: nn.Module, rank: int, number: int) -> tuple[torch.Tensor, ...]:
    """torch.autograd.grad for parameters that are whole after forward: local gradients, which nothing reduces."""
    loss = model(seeded(rank, number, 3, 4).requires_grad_()).pow(2).sum()
    local_gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return local_gradients


def stays_whole(model: nn.Module, here: Rank) -> nn.Module:
    return models.shard(model, here.mesh((2, 2)), reshard=False)


class Within(torch.autograd.Function):
    """Runs a backward of its own inside of backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            again.sin().backward(grad)
        assert again.grad is not None
        return again.grad


class Nesting(models.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = Within.apply(block(x))
        return self.head(x)


def hooked(model: nn.Module, here: Rank) -> nn.Module:
    """Hooks of modules and of outputs that change gradients on their way."""
    models.shard(model, here.mesh((2, 2)))
    for block in model.b:
        block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    return model


CASES = {
    "chunks in forward": Case(Chunked, chunks_in_one_backward, head_alone),
    "chunks in forward, head in the root": Case(Chunked, chunks_in_one_backward),
    "a backward for each chunk": Case(Chunked, one_backward_for_each_chunk, head_alone),
    "a backward for each chunk, grouped": Case(Chunked, one_backward_for_each_chunk, norm_and_head),
    "chunks without sync": Case(Chunked, chunks_without_sync, head_alone),
    "chunks without sync, grouped": Case(Chunked, chunks_without_sync, norm_and_head),
    "retained graph": Case(models.Net, retained, tolerance=3e-6),
    "retained graph, accumulating": Case(models.Net, retained_accumulating),
    "losses summed": Case(Heads, summed, shard_heads),
    "losses at once": Case(Heads, at_once, shard_heads),
    "losses one by one": Case(Heads, one_by_one, shard_heads),
    "one loss of two": Case(Heads, one_only, shard_heads),
    "gradient of the input": Case(models.Net, input_gradient),
    "gradient of the input alone": Case(models.Net, input_gradient_alone),
    "gradients of parameters": Case(models.Net, parameter_gradients, stays_whole),
    "inputs only": Case(models.Net, inputs_only),
    "backward within backward": Case(Nesting, on_input),
    "hooks that change gradients": Case(models.Net, on_input, hooked, has_reference=False),
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.report("retained graph", "a head called for each chunk")
@pytest.mark.parametrize("name", CASES)
def test_backwards(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)
