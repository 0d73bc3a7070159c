"""Several ranks at once, against an interpreter that runs them side by side and knows nothing of the compiler's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from commplan import CommplanError, compiler
from commplan.errors import Severity
from commplan.language import library, parse
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis, Kind
from tests.oracle import Item, Layout, Wrong
from tests.random_schedules import schedules

MESHES = {"both": {Axis.SHARD: 2, Axis.REPLICATE: 2}, "shard": {Axis.SHARD: 2}, "replicate": {Axis.REPLICATE: 2}}
AXIS = {Kind.REDUCE_SCATTER: Axis.SHARD, Kind.ALL_REDUCE: Axis.REPLICATE}
Rank = Sequence[tuple[str, str]]
"""Modules of a rank, in order: a name and the key of its mesh."""


def table(rank: Rank) -> ModuleTable:
    parameters = (Parameter(name="w", shape=(8, 8)),)
    return ModuleTable(modules=tuple(Module(name=name, parameters=parameters, axes=MESHES[mesh]) for name, mesh in rank))


def layout(text: str, rank: Rank) -> Layout:
    def needed(kind: Kind, n: int) -> bool:
        return kind not in AXIS or AXIS[kind] in MESHES[rank[n][1]]

    return Layout(parse(text), len(rank), {}, needed, lambda n: rank[n][1])


@dataclass
class Side:
    """One rank: its items, what of them has started and is over, and the collectives among them."""

    items: list[Item]
    rank: Rank
    peers: Callable[[Axis, str], tuple[int, ...]]

    def __post_init__(self) -> None:
        self.over: set[int] = set()
        self.started: set[int] = set()
        self.collectives = [i for i, item in enumerate(self.items) if item.communicator and not item.left_out]

    def channel(self, number: int) -> tuple[object, ...]:
        item = self.items[number]
        mesh = self.rank[item.modules[0]][1]
        assert item.kind is not None
        return item.communicator, mesh, self.peers(AXIS[item.kind], mesh)

    def content(self, number: int) -> tuple[object, ...]:
        item = self.items[number]
        return item.kind, tuple(self.rank[n][0] for n in item.modules), item.piece, item.pieces

    def may_start(self, number: int, in_flight: int | None) -> bool:
        """By the words of the language: hook and compute, lane, communicator, dependencies; and by what is in flight."""
        item = self.items[number]
        by_name = {other.name: i for i, other in enumerate(self.items)}
        for i, other in enumerate(self.items[:number]):
            same = other.lane in ("compute", item.lane) or (other.communicator and other.communicator == item.communicator)
            if same and i not in self.over:
                return False
        if any(by_name[name] not in self.over for name in item.deps):
            return False
        if in_flight is None or number not in self.collectives:
            return True
        earlier = self.collectives[: self.collectives.index(number)]
        return len([i for i in earlier if i not in self.over]) < in_flight


def ends(sides: list[Side], in_flight: int | None) -> bool:
    """Whether backward ends if everything starts that can."""
    moved = True
    while moved:
        moved = False
        for side in sides:
            for number in range(len(side.items)):
                if number not in side.started and side.may_start(number, in_flight):
                    side.started.add(number)
                    moved = True
                    if number not in side.collectives:
                        side.over.add(number)
        for side in sides:
            for number in side.collectives:
                if number in side.over or number not in side.started:
                    continue
                channel = side.channel(number)
                turn = [i for i in side.collectives if side.channel(i) == channel].index(number)
                met = []
                for peer in channel[2]:  # type: ignore[attr-defined]
                    there = [i for i in sides[peer].collectives if sides[peer].channel(i) == channel]
                    met.append((sides[peer], there[turn]))
                if all(i in peer.started for peer, i in met):
                    moved = True
                    for peer, i in met:
                        peer.over.add(i)
    return all(len(side.over) == len(side.items) for side in sides)


def alike(sides: list[Side]) -> bool:
    """Whether every two ranks bring the same collectives to the communicators that they share."""
    channels = {side.channel(i) for side in sides for i in side.collectives}
    for channel in channels:
        peers = channel[2]
        brought = [
            [sides[peer].content(i) for i in sides[peer].collectives if sides[peer].channel(i) == channel]
            for peer in peers  # type: ignore[attr-defined]
        ]
        if any(other != brought[0] for other in brought):
            return False
    return True


def sides_of(text: str, ranks: Sequence[Rank], peers: Callable[[int], Callable[[Axis, str], tuple[int, ...]]]) -> list[Side]:
    try:
        return [Side(layout(text, rank).items(), rank, peers(r)) for r, rank in enumerate(ranks)]
    except Wrong:
        assume(False)
        raise


def together(num_ranks: int) -> Callable[[int], Callable[[Axis, str], tuple[int, ...]]]:
    """Ranks that share every group."""
    return lambda rank: lambda axis, mesh: tuple(range(num_ranks))


def on_a_square(rank: int) -> Callable[[Axis, str], tuple[int, ...]]:
    """Ranks 0, 1 and 2, 3 share the shard axis; 0, 2 and 1, 3 the replicate axis."""
    row, column = divmod(rank, 2)
    return lambda axis, mesh: (2 * row, 2 * row + 1) if axis is Axis.SHARD else (column, column + 2)


ONE_LANE = """\
version: 1
name: one_lane
lanes: {comm: {}}
post_backward:
  - RS_n: {after: compute_n, lane: comm}
  - AR_n: {after: RS_n, lane: comm}
root:
  - apply_n: {after: AR_n}
"""
RIGHT = [ONE_LANE, *(library.find(name).read_text() for name in ("blocking", "overlapped_allreduce", "pipelined_allreduce"))]
TEXTS = st.sampled_from(RIGHT) | schedules(gathers=False)
MODULES = st.lists(st.sampled_from([*MESHES, *["shard", "replicate"] * 3]), min_size=1, max_size=4)


def codes(text: str, ranks: Sequence[Rank], in_flight: int) -> set[str]:
    found = compiler.check_ranks(text, map(table, ranks), in_flight=in_flight)
    errors = [violation for violation in found if violation.severity is Severity.ERROR]
    assume(not any(violation.code < "CP300" for violation in errors))
    return {violation.code for violation in errors}


def expected(sides: Callable[[], list[Side]], in_flight: int) -> set[str]:
    if not alike(sides()):
        return {"CP301"}
    if not ends(sides(), None):
        return {"CP302"}
    return set() if ends(sides(), in_flight) else {"CP303"}


FEW = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@given(TEXTS, MODULES, st.data(), st.integers(1, 2))
@FEW
def test_three_ranks_that_share_their_groups(text: str, meshes: list[str], data: st.DataObject, in_flight: int) -> None:
    modules = [(f"m{i}", mesh) for i, mesh in enumerate(meshes)]
    ranks = [data.draw(st.permutations(modules)) for _ in range(3)]
    found = codes(text, ranks, in_flight)
    event(str(found))
    assert found == expected(lambda: sides_of(text, ranks, together(3)), in_flight)


@given(TEXTS, MODULES, st.data(), st.integers(1, 2))
@FEW
def test_four_ranks_on_a_mesh(text: str, meshes: list[str], data: st.DataObject, in_flight: int) -> None:
    modules = [*((f"m{i}", mesh) for i, mesh in enumerate(meshes)), ("last", "both")]
    orders = [data.draw(st.permutations(modules)) for _ in range(2)]
    ranks = [data.draw(st.sampled_from(orders)) for _ in range(4)]
    found = codes(text, ranks, in_flight)
    event(str(found))
    assert found == expected(lambda: sides_of(text, ranks, on_a_square), in_flight)


# The cases of torchrec#4149 and nccl#574: ranks A issue RS and then AR, ranks B AR and then RS.

A: Rank = (("embed", "shard"), ("head", "replicate"))
B: Rank = (("head", "replicate"), ("embed", "shard"))


@pytest.mark.parametrize("ranks", [(A, B), (B, A), (A, A, B), (B, A, B)])
def test_a_deadlock_names_both_ops(ranks: Sequence[Rank]) -> None:
    for text in (ONE_LANE, library.find("overlapped_allreduce").read_text()):
        (found,) = [v for v in compiler.check_ranks(text, map(table, ranks)) if v.severity is Severity.ERROR]
        assert "deadlock" in found.message
        assert "RS_0 (embed)" in found.message
        assert "AR_0 (head)" in found.message
        assert found.hint


@pytest.mark.parametrize("name", library.names())
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_equal_ranks_are_right(name: str, num_ranks: int) -> None:
    mixed = table((("a", "both"), ("b", "shard"), ("c", "replicate"), ("d", "both")))
    found = compiler.check_ranks(name, [mixed] * num_ranks)
    assert not any(violation.severity is Severity.ERROR for violation in found)


def test_one_frozen_parameter_more_is_a_difference() -> None:
    def two(*, frozen: bool) -> ModuleTable:
        parameters = [Parameter(name=name, shape=(8, 8), requires_grad=not (frozen and name == "b")) for name in "ab"]
        return ModuleTable(modules=tuple(Module(name=f"m{i}", parameters=tuple(parameters), axes=MESHES["both"]) for i in "01"))

    found = compiler.check_ranks("eager_apply", [two(frozen=False), two(frozen=True)])
    assert {violation.code for violation in found} == {"CP301"}
    assert "512 bytes" in found[0].message
    assert "256 bytes" in found[0].message


def test_what_one_rank_alone_breaks_is_found_too() -> None:
    text = library.find("eager_apply").read_text().replace("AR_n: {after: RS_n}", "AR_n")
    assert {violation.code for violation in compiler.check_ranks(text, [table(A), table((("a", "both"),))])} == {"CP201"}


def test_no_ranks_and_nothing_in_flight_are_refused() -> None:
    with pytest.raises(CommplanError, match="module table"):
        compiler.check_ranks("blocking", [])
    with pytest.raises(CommplanError, match="in flight"):
        compiler.check_ranks("blocking", [2, 2], in_flight=0)
