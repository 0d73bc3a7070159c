"""Runs a plan against a cost model: from event to event, each thing that is under way at the speed it has beside the others.

The rules are the executor's: an op begins when compute has reached the place where it is issued, its waits are over, and the op
before it on its lane has ended.  What is on the compute lane runs there, in the plan's order, and holds it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from commplan.errors import CommplanError
from commplan.graph.timeline import orders
from commplan.ops import COMPUTE_LANE, OpId, Section
from commplan.plan.model import Hook, OpStep, Plan, Step, WaitStep
from commplan.simulate.costs import Costs, OpCost


class DeadlockError(CommplanError):
    """Something waits for what can never begin."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An op, or work of the compute lane, as it ran; seconds from the begin of backward.

    Attributes:
        op: its name; None for compute of a module, and for packing.
        lane: where.
        issued_s: when compute had reached the place where it was issued.
        number: of the step in the plan; -1 for compute of a module.
        module: index into the table, of compute; -1 for others.
    """

    lane: str
    begin_s: float
    end_s: float
    issued_s: float
    number: int = -1
    op: OpId | None = None
    module: int = -1


@dataclass(frozen=True, slots=True)
class Stood:
    """Compute stood still at step `number`, or at the end of root (the number of steps); or (-1) while FSDP2 gathered the
    parameters of `module`, an index into the table.
    """

    number: int
    begin_s: float
    end_s: float
    module: int = -1


@dataclass(frozen=True)
class Simulated:
    """One backward.

    Attributes:
        ops: everything that ran on lanes, in the order in which it ended; applies on the compute lane too.
        compute: compute of modules, and packing.
        waits: when compute stood still.
        reached_s: when compute reached each step, by its number; and last the end of root.
        over_s: when it was over each step, so that it went on; and last the end of backward.
    """

    plan: Plan
    ops: Sequence[Ran]
    compute: Sequence[Ran]
    waits: Sequence[Stood]
    reached_s: Sequence[float]
    over_s: Sequence[float]

    @property
    def duration_s(self) -> float:
        """Seconds from the begin of backward to the end of root."""
        return self.over_s[-1]


@dataclass(slots=True)
class _Work:
    """Something of the compute lane that takes time; `is_wait`: while compute stands still."""

    seconds: float
    number: int
    module: int = -1
    op: OpId | None = None
    is_wait: bool = False


@dataclass(slots=True)
class _Wait:
    ops: tuple[OpId, ...]
    number: int


@dataclass(slots=True)
class _Issue:
    step: OpStep
    number: int


@dataclass(slots=True)
class _Mark:
    """Compute reaches step `number`, or is over it."""

    number: int
    is_over: bool = False


_Item = _Work | _Wait | _Issue | _Mark


@dataclass(slots=True)
class _Queued:
    step: OpStep
    number: int
    cost: OpCost
    issued_s: float


@dataclass(slots=True)
class _Active:
    """What is under way: `phases` are its (seconds left at full speed, link) from now on."""

    lane: str
    begin_s: float
    phases: deque[tuple[float, str]]
    queued: _Queued | None = None
    work: _Work | None = None


@dataclass(slots=True)
class _State:
    now_s: float = 0
    active: dict[str, _Active] = field(default_factory=dict)
    lanes: dict[str, deque[_Queued]] = field(default_factory=dict)
    over: set[OpId] = field(default_factory=set)
    stood_since_s: float | None = None


def simulate(plan: Plan, costs: Costs) -> Simulated:
    """Run one backward of `plan`, the last of its step.

    Raises:
        DeadlockError: an op or compute waits for an op that never begins; names both.
    """
    return _Engine(plan, costs).run()


class _Engine:
    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan = plan
        self._costs = costs
        self._items = deque(_items(plan, costs))
        self._state = _State()
        self._ops: list[Ran] = []
        self._compute: list[Ran] = []
        self._waits: list[Stood] = []
        self._reached_s: list[float] = [0] * (len(plan.steps) + 1)
        self._over_s = list(self._reached_s)

    def run(self) -> Simulated:
        state = self._state
        while True:
            while self._go_on() or self._begin_ops():
                pass
            if not state.active:
                break
            self._advance()
        if self._items or any(state.lanes.values()):
            raise DeadlockError(self._deadlock())
        return Simulated(self._plan, self._ops, self._compute, self._waits, self._reached_s, self._over_s)

    # What takes no time.

    def _go_on(self) -> bool:
        """Let compute reach what is next; whether it got anywhere."""
        state, moved = self._state, False
        while self._items and COMPUTE_LANE not in state.active:
            item = self._items[0]
            if isinstance(item, _Wait):
                if not state.over.issuperset(item.ops):
                    if state.stood_since_s is None:
                        state.stood_since_s = state.now_s
                    return moved
                if state.stood_since_s is not None and state.stood_since_s < state.now_s:
                    self._waits.append(Stood(item.number, state.stood_since_s, state.now_s))
                state.stood_since_s = None
            elif isinstance(item, _Work):
                self._begin(COMPUTE_LANE, [(item.seconds, "")], work=item)
            elif isinstance(item, _Issue):
                queued = _Queued(item.step, item.number, self._costs.ops[item.step.op], state.now_s)
                state.lanes.setdefault(item.step.lane, deque()).append(queued)
            else:
                (self._over_s if item.is_over else self._reached_s)[item.number] = state.now_s
            self._items.popleft()
            moved = True
        return moved

    def _begin_ops(self) -> bool:
        """Begin the first op of each idle lane, if what it waits for is over; whether any began."""
        state, began = self._state, False
        for lane, queue in state.lanes.items():
            if queue and lane not in state.active and state.over.issuperset(queue[0].step.waits):
                queued = queue.popleft()
                self._begin(lane, [(queued.cost.latency_s, ""), (queued.cost.transfer_s, queued.cost.link)], queued=queued)
                began = True
        return began

    def _begin(
        self, lane: str, phases: Sequence[tuple[float, str]], *, queued: _Queued | None = None, work: _Work | None = None
    ) -> None:
        active = _Active(lane, self._state.now_s, deque(phase for phase in phases if phase[0] > 0), queued, work)
        if active.phases:
            self._state.active[lane] = active
        else:
            self._end(active)

    def _end(self, active: _Active) -> None:
        state = self._state
        work = active.work
        if work is not None and work.is_wait:
            self._waits.append(Stood(work.number, active.begin_s, state.now_s, work.module))
        elif work is not None:
            issued_s = active.begin_s if work.op is None else self._reached_s[work.number]
            ran = Ran(COMPUTE_LANE, active.begin_s, state.now_s, issued_s, work.number, work.op, work.module)
            (self._compute if work.op is None else self._ops).append(ran)
            if work.op is not None:
                state.over.add(work.op)
        elif active.queued is not None:
            queued = active.queued
            self._ops.append(Ran(active.lane, active.begin_s, state.now_s, queued.issued_s, queued.number, queued.step.op))
            state.over.add(queued.step.op)

    # What takes time.

    def _advance(self) -> None:
        """Go to the next moment at which something ends or changes its speed."""
        state = self._state
        speeds = self._speeds()
        left_s = {lane: active.phases[0][0] / speeds[lane] for lane, active in state.active.items()}
        step_s = min(left_s.values())
        state.now_s += step_s
        for lane, active in list(state.active.items()):
            seconds, link = active.phases.popleft()
            if left_s[lane] > step_s:
                active.phases.appendleft((seconds - step_s * speeds[lane], link))
            elif not active.phases:
                del state.active[lane]
                self._end(active)

    def _speeds(self) -> Mapping[str, float]:
        """Lane -> how fast what is under way on it goes, 1 being alone."""
        state, costs = self._state, self._costs
        users = Counter(active.phases[0][1] for active in state.active.values() if active.phases[0][1])
        speeds: dict[str, float] = {}
        for lane, active in state.active.items():
            link = active.phases[0][1]
            if active.work is not None and active.work.is_wait:
                speeds[lane] = 1
            elif lane == COMPUTE_LANE:
                longer = sum(costs.slowdown.get(link, 0) for link in users)
                speeds[lane] = 1 / (1 + longer) if longer else 1
            else:
                wanted = users[link] * costs.demand.get(link, 1) if link else 0
                speeds[lane] = 1 / wanted if wanted > 1 else 1
        return speeds

    def _deadlock(self) -> str:
        """What stands still, and for what."""
        state, found = self._state, []
        item = self._items[0] if self._items else None
        if isinstance(item, _Wait):
            found.append(f"compute waits for {_listed(op for op in item.ops if op not in state.over)}")
        for lane, queue in state.lanes.items():
            if queue:
                missing = _listed(op for op in queue[0].step.waits if op not in state.over)
                found.append(f"{queue[0].step.op} on lane {lane!r} waits for {missing}")
        return f"deadlock after {state.now_s} s: {'; '.join(found)}"


def _items(plan: Plan, costs: Costs) -> Iterator[_Item]:
    """What the compute lane does, in order."""
    number = 0
    computed = 0
    need_order = orders(plan.modules)[1]
    place = {module: at for at, module in enumerate(need_order)}
    for hook in plan.hooks:
        needed = _num_needed(hook, place)
        # Backward of a module within another one comes after what the outer one has to do before it.
        for module in need_order[computed:needed]:
            if costs.gather_s and costs.gather_s[module]:
                yield _Work(costs.gather_s[module], -1, module=module, is_wait=True)
            if costs.compute_s[module]:
                yield _Work(costs.compute_s[module], -1, module=module)
        computed = max(computed, needed)
        for step in hook.steps:
            yield _Mark(number)
            yield from _of_step(step, number, costs)
            yield _Mark(number, is_over=True)
            number += 1
    yield _Mark(number)
    yield _Wait(tuple({step.lane: step.op for step in plan.steps if isinstance(step, OpStep)}.values()), number)
    yield _Mark(number, is_over=True)


def _num_needed(hook: Hook, place: Mapping[int, int]) -> int:
    """How many modules, in the order in which they are needed, have had their backward when `hook` opens."""
    if hook.section is Section.ROOT:
        return len(place)
    return place[hook.module] + (hook.section is Section.POST_BACKWARD)


def _of_step(step: Step, number: int, costs: Costs) -> Iterator[_Item]:
    if isinstance(step, WaitStep):
        yield _Wait(step.waits, number)
    elif step.lane == COMPUTE_LANE:
        yield _Wait(step.waits, number)
        yield _Work(costs.ops[step.op].latency_s, number, op=step.op)
    else:
        if costs.ops[step.op].issue_s:
            yield _Work(costs.ops[step.op].issue_s, number)
        yield _Issue(step, number)


def _listed(ops: Iterator[OpId]) -> str:
    return ", ".join(map(str, ops)) or "nothing that is missing"
