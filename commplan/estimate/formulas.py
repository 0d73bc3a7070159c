"""What a decoder computes in backward, and what collectives take, by formulas from the literature.

Sources, by the names under which profiles cite them:
    [kaplan]  Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361, section 2.1: a forward is 2 FLOPs for
              each parameter of a matrix and token, a backward twice as many.
    [palm]    Chowdhery et al., PaLM, arXiv:2204.02311, appendix B: attention adds 12 * layers * width * sequence for each
              token to forward and backward, a third of it in forward; what a causal mask leaves out is counted.
    [megatron] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
              arXiv:2104.04473, section 5.1: a forward that is run again for backward adds as much as a forward.
    [nccl]    NCCL tests, doc/PERFORMANCE.md: a rank sends (n - 1) / n of the tensor in a reduce-scatter or an all-gather, twice
              as much in an all-reduce.
    [ring]    Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009: n - 1 steps, twice
              as many in an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from commplan.language.modules import Parameter
from commplan.language.presets import ModelPreset
from commplan.ops import Kind

SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kaplan": "Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361, section 2.1",
        "palm": "Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, arXiv:2204.02311, appendix B",
        "megatron": "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, "
        "arXiv:2104.04473, section 5.1",
        "nccl": "NCCL tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md",
        "ring": "Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69, 2009",
    }
)

FORWARD: Final = 2
"""FLOPs of a forward for each parameter of a matrix and token."""

BACKWARD: Final = 4
"""FLOPs of a backward: for the gradient of the input, and for that of the parameter."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step of one rank.

    Attributes:
        sequence: tokens of a row.
        micro_batch: rows of one backward.
        recomputes: layers run their forward again in backward.
    """

    sequence: int
    micro_batch: int = 1
    recomputes: bool = False

    @property
    def tokens(self) -> int:
        """Of one backward."""
        return self.sequence * self.micro_batch


def layer_parameters(model: ModelPreset, layer: int, dtype: str) -> tuple[Parameter, ...]:
    """Parameters of a layer, as Llama names them."""
    width, ffn = model.hidden.value, model.ffn.value
    kv_width = width // model.heads.value * model.kv_heads.value
    shapes = {
        "attention.wq": (width, width),
        "attention.wk": (kv_width, width),
        "attention.wv": (kv_width, width),
        "attention.wo": (width, width),
        "feed_forward.w1": (ffn, width),
        "feed_forward.w2": (width, ffn),
        "feed_forward.w3": (ffn, width),
        "attention_norm": (width,),
        "ffn_norm": (width,),
    }
    return tuple(Parameter(name=f"layers.{layer}.{name}.weight", shape=shape, dtype=dtype) for name, shape in shapes.items())


def layer_backward_flops(model: ModelPreset, work: Work) -> int:
    """Backward of one layer [kaplan, palm], and a forward before it where it is run again [megatron]."""
    matrices = sum(p.numel for p in layer_parameters(model, 0, "bfloat16") if len(p.shape) == 2)
    # Two products of a sequence with a sequence, scores and their use, over the width of all heads.
    attention = 2 * work.sequence * model.hidden.value
    each = BACKWARD + (FORWARD if work.recomputes else 0)
    return each * (matrices + attention) * work.tokens


def head_backward_flops(model: ModelPreset, work: Work) -> int:
    """Backward of the output projection [kaplan]; nobody runs its forward again."""
    return BACKWARD * model.hidden.value * model.vocabulary.value * work.tokens


def sent_part(kind: Kind, num_ranks: int) -> float:
    """What part of the tensor each rank sends [nccl]."""
    once = (num_ranks - 1) / num_ranks
    return 2 * once if kind is Kind.ALL_REDUCE else once


def num_steps(kind: Kind, num_members: int) -> int:
    """Steps of a ring one after another [ring]."""
    return (2 if kind is Kind.ALL_REDUCE else 1) * (num_members - 1)
