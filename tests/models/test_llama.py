"""A Llama of Hugging Face, unmodified: small, of random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.comparing import WORKERS, Case, Variant, accumulated, adamw, clip_then_step, compare, spread
from tests.worlds import parity
from tests.worlds.world import Rank, Worlds

LIBRARY: list[Variant] = [(name, params, parity.LAZY) for name, params in parity.LIBRARY]


def llama(**kwargs: Any) -> nn.Module:
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **kwargs,
    )
    return LlamaForCausalLM(config).train()


def shard(model: nn.Module, here: Rank, *, checkpointing: dict[str, Any] | None = None, **kwargs: Any) -> nn.Module:
    """As the recipes have it: each layer, then the model."""
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    for layer in model.model.layers:
        fully_shard(layer, mesh=here.mesh((2, 2)), **kwargs)
    return fully_shard(model, mesh=here.mesh((2, 2)), **kwargs)


def shard_all(model: nn.Module, here: Rank) -> nn.Module:
    """Embedding and head as units of their own."""
    for unit in (model.model.embed_tokens, model.lm_head):
        fully_shard(unit, mesh=here.mesh((2, 2)))
    return shard(model, here)


def tokens(rank: int, number: int) -> torch.Tensor:
    return torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(100 * rank + number))


def on_text(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    ids = tokens(rank, number)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

CASES = {
    "layers": Case(llama, on_text, shard, adamw, clip_then_step),
    "layers, embedding and head": Case(llama, on_text, shard_all, adamw, clip_then_step),
    "tied": Case(partial(llama, tie_word_embeddings=True), on_text, shard, adamw, clip_then_step),
    "accumulated": Case(llama, partial(accumulated, backward=on_text), shard, adamw, clip_then_step),
    "bf16": Case(llama, on_text, partial(shard, mp_policy=BF16), adamw, clip_then_step, has_reference=False),
    "checkpointed": Case(llama, on_text, partial(shard, checkpointing={"use_reentrant": False}), adamw, clip_then_step),
    "checkpointed, reentrant": Case(
        llama, on_text, partial(shard, checkpointing={"use_reentrant": True}), adamw, clip_then_step
    ),
}


def run(here: Rank, name: str) -> None:
    # One of them meets the whole library.
    compare(here, CASES[name], [WORKERS, *LIBRARY] if name == "layers" else spread(name))


@pytest.mark.parametrize("name", CASES)
def test_llama(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)
