"""What a decoder computes and what collectives send, counted otherwise: product by product, by torch, and in a ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.estimate import MODELS, find_model, preset_names
from commplan.estimate.formulas import Work, head_backward_flops, layer_backward_flops, layer_parameters, num_steps, sent_part
from commplan.language.presets import ModelPreset
from commplan.ops import Kind

ALL_PARAMETERS = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}
"""As the model cards round them, to 8.03 B and 70.6 B."""


def model(layers: int, width: int, ffn: int, heads: int, kv_heads: int, vocabulary: int) -> ModelPreset:
    sizes = {"layers": layers, "hidden": width, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "vocabulary": vocabulary}
    figures = {name: {"value": value, "source": "test"} for name, value in sizes.items()}
    return ModelPreset.model_validate({"name": "small", "sources": {"test": "this test"}, **figures})


SMALL = st.builds(
    lambda head, kv, group, ffn: model(1, head * kv * group, ffn, kv * group, kv, 11),
    head=st.integers(1, 8),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    ffn=st.integers(1, 20),
)


@pytest.mark.parametrize("name", sorted(ALL_PARAMETERS))
def test_parameters_add_up(name: str) -> None:
    found = find_model(name)
    of_layers = sum(p.numel for layer in range(found.layers.value) for p in layer_parameters(found, layer, "float32"))
    beside = 2 * found.vocabulary.value * found.hidden.value + found.hidden.value
    assert of_layers + beside == ALL_PARAMETERS[name]
    assert preset_names(MODELS) == tuple(sorted(ALL_PARAMETERS))


def products(of: ModelPreset, rows: int, sequence: int) -> Iterator[tuple[int, int, int]]:
    """The matrix products of a layer's forward, (m, k) times (k, n), written out."""
    width, heads, kv_heads, tokens = of.hidden.value, of.heads.value, of.kv_heads.value, rows * sequence
    head = width // heads
    yield tokens, width, heads * head
    yield tokens, width, kv_heads * head
    yield tokens, width, kv_heads * head
    for _ in range(rows * heads):
        yield sequence, head, sequence
        yield sequence, sequence, head
    yield tokens, heads * head, width
    yield tokens, width, of.ffn.value
    yield tokens, width, of.ffn.value
    yield tokens, of.ffn.value, width


@given(SMALL, st.integers(1, 3), st.integers(1, 9))
def test_backward_of_a_layer_is_that_of_its_products(of: ModelPreset, rows: int, sequence: int) -> None:
    """Backward of A B is two products as large: of the gradient with B, and with A."""
    forward = sum(2 * m * k * n for m, k, n in products(of, rows, sequence))
    backward = sum(2 * m * n * k + 2 * k * m * n for m, k, n in products(of, rows, sequence))
    assert layer_backward_flops(of, Work(sequence, rows)) == backward
    assert layer_backward_flops(of, Work(sequence, rows, recomputes=True)) == backward + forward


def test_torch_counts_the_same() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    of = model(3, 32, 48, 4, 2, 40)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        attn_implementation="eager",
    )
    llama = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(40, (2, 10))
    logits = llama(tokens).logits
    with FlopCounterMode(display=False) as counted:
        logits.sum().backward()
    work = Work(10, 2)
    assert counted.get_total_flops() == 3 * layer_backward_flops(of, work) + head_backward_flops(of, work)
    own = sum(p.numel for layer in range(3) for p in layer_parameters(of, layer, "float32")) + 2 * 40 * 32 + 32
    assert own == sum(p.numel() for p in llama.parameters())


def ring_reduce_scatter(num_ranks: int) -> tuple[int, int]:
    """Steps, and parts of 1 / n that rank 0 sends, until each rank has one part of all."""
    held = [[{rank} for _ in range(num_ranks)] for rank in range(num_ranks)]
    steps = 0
    while not all(len(held[rank][(rank + 1) % num_ranks]) == num_ranks for rank in range(num_ranks)):
        sent = [held[rank][(rank - steps) % num_ranks] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            to, part = (rank + 1) % num_ranks, (rank - steps) % num_ranks
            held[to][part] = held[to][part] | sent[rank]
        steps += 1
    return steps, steps


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_ring_sends_what_the_formula_says(num_ranks: int) -> None:
    steps, parts = ring_reduce_scatter(num_ranks)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        assert num_steps(kind, num_ranks) == steps
        assert sent_part(kind, num_ranks) == pytest.approx(parts / num_ranks)
    # Then what was reduced goes around once more.
    assert num_steps(Kind.ALL_REDUCE, num_ranks) == 2 * steps
    assert sent_part(Kind.ALL_REDUCE, num_ranks) == pytest.approx(2 * parts / num_ranks)
