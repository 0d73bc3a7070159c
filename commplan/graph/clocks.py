"""Happens-before in linear time: one clock per lane instead of a closure over all pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """What is known to be over when a node starts.

    A lane runs one node at a time, so "the first p nodes of lane l are over" is one number; a node's knowledge is a vector
    of them, the join of its predecessors' vectors.

    Attributes:
        lanes: lane name -> its place in a vector.
        lane: node -> the place of its lane, -1 for a node without one.
        position: node -> its number on its lane, from 1 (0 for a node without one).
        end: node -> how many nodes of each lane are over when it is.
        on_lane: for each lane, its nodes in order.
    """

    lanes: Mapping[str, int]
    lane: Sequence[int]
    position: Sequence[int]
    end: Sequence[tuple[int, ...]]
    on_lane: Sequence[Sequence[int]]

    def start(self, node: int) -> tuple[int, ...]:
        """How many nodes of each lane are over when `node` starts: as at its end, itself apart."""
        own, clock = self.lane[node], self.end[node]
        return clock if own < 0 else (*clock[:own], self.position[node] - 1, *clock[own + 1 :])

    def before(self, first: int, second: int) -> bool:
        """Whether `first`, a node with a lane, is always over before `second`, another node, starts."""
        lane = self.lane[first]
        if lane == self.lane[second]:
            return self.position[first] < self.position[second]
        return self.end[second][lane] >= self.position[first]


def make_clocks(
    order: Iterable[int], lane_of: Sequence[str], predecessors: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]
) -> Clocks:
    """The clocks of nodes 0..len(lane_of)-1.

    `order` lists each after its predecessors, and the node before it on its lane is one of these or follows from them;
    "" is no lane.
    """
    lanes: dict[str, int] = {}
    for name in lane_of:
        if name and name not in lanes:
            lanes[name] = len(lanes)
    zero = (0,) * len(lanes)
    lane = [lanes.get(name, -1) for name in lane_of]
    position = [0] * len(lane_of)
    ends = [zero] * len(lane_of)
    on_lane: list[list[int]] = [[] for _ in lanes]
    for node in order:
        clock = zero
        for predecessor in predecessors[node]:
            end = ends[predecessor]
            clock = end if clock is zero else tuple(map(max, clock, end))
        own = lane[node]
        if own >= 0:
            on_lane[own].append(node)
            position[node] = len(on_lane[own])
            clock = (*clock[:own], position[node], *clock[own + 1 :])
        ends[node] = clock
    return Clocks(lanes, lane, position, ends, on_lane)
