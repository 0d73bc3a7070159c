"""The state of the backward that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from commplan.execute.gathering import Gathers
from commplan.execute.instance import Instance
from commplan.execute.lanes import Token
from commplan.ops import OpId


@dataclass(slots=True)
class Backward:
    """What the executor knows of one backward.

    Attributes:
        number: of this backward, from 1; those without a reduction count.
        is_last: of its step, so that every op runs.
        gathers: the all-gathers of the plan.
        cursor: position of the next hook to open.
        arrived: modules whose gradients were complete in time, whether they are reduced now or kept.
        live: module -> its reduction, once its gradients are complete in time.
        late: modules whose hook had opened before; reduced in root.
        extra: reductions of modules that were reduced already in this backward.
        tokens: the end of each op that was issued.
        record: what this rank did, in words that must be equal on every rank.
        previous_bytes: module -> bytes of the partial sum that earlier backwards left.
        held: module -> bytes of gradients that were not packed when its hook was over or, where they came before it could
            open, when they came; and the step that was next then. Of late modules none.
        kept: module -> bytes of gradients that are left to a later backward, and the step that was next when they were there.
        irregular_bytes: memory that no plan can foresee: late modules and extra reductions.
        ranks_of: the ranks of each collective's process group, by the op's name.
    """

    begin_s: float
    previous_bytes: dict[int, int]
    number: int
    is_last: bool
    gathers: Gathers
    cursor: int = 0
    is_collecting: bool = False
    arrived: set[int] = field(default_factory=set)
    live: dict[int, Instance] = field(default_factory=dict)
    late: dict[int, Instance] = field(default_factory=dict)
    extra: list[tuple[int, Instance]] = field(default_factory=list)
    tokens: dict[OpId, Token] = field(default_factory=dict)
    record: list[str] = field(default_factory=list)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    irregular_bytes: int = 0
    ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def instances(self) -> list[Instance]:
        """Every reduction of this backward, each once."""
        late = [i for module, i in self.late.items() if self.live.get(module) is not i]
        return [*self.live.values(), *late, *(i for _, i in self.extra)]
