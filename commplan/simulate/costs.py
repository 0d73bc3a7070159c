"""What ops and compute cost: seconds alone, and how they slow each other down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commplan.ops import OpId


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op by itself, in seconds.

    Attributes:
        issue_s: what the compute lane does for it when it is issued, packing.
        latency_s: what it takes on its lane whatever else runs.
        transfer_s: what it takes besides, while `link` is its own.
        link: what it moves its bytes over; "" if it moves none.
    """

    issue_s: float = 0
    latency_s: float = 0
    transfer_s: float = 0
    link: str = ""


@dataclass(frozen=True)
class Costs:
    """A cost model, for one plan.

    Attributes:
        compute_s: backward of each module, by its index in the table.
        gather_s: likewise, what FSDP2 holds compute for before it, to gather the module's parameters by itself; empty: nothing.
        ops: every op of the plan; on the compute lane only `latency_s` counts.
        demand: link -> the part of it that one transfer fills, 0 < part <= 1; links that are not named are filled.  Transfers
            that want more of a link than there is get equal parts.
        slowdown: link -> seconds that a second of compute takes longer while a transfer is under way on it.
        compute_jitter: how much compute of a module differs from one time to the next: standard deviation over mean.
        jitter: link -> likewise, of ops that use it.
        gather_link: the link that `gather_s` is spent on.

    Jitter is what `commplan.simulate.drawn` draws from; by itself a simulation takes every figure as it is.
    """

    compute_s: Sequence[float]
    ops: Mapping[OpId, OpCost]
    demand: Mapping[str, float] = field(default_factory=dict)
    slowdown: Mapping[str, float] = field(default_factory=dict)
    gather_s: Sequence[float] = ()
    compute_jitter: float = 0
    jitter: Mapping[str, float] = field(default_factory=dict)
    gather_link: str = ""
