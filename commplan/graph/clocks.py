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
        start: node -> how many nodes of each lane are over when it starts.
        on_lane: for each lane, its nodes in order.
    """

    lanes: Mapping[str, int]
    lane: Sequence[int]
    position: Sequence[int]
    start: Sequence[Sequence[int]]
    on_lane: Sequence[Sequence[int]]

    def end(self, node: int) -> Sequence[int]:
        """How many nodes of each lane are over when `node` is."""
        if self.lane[node] < 0:
            return self.start[node]
        clock = list(self.start[node])
        clock[self.lane[node]] = self.position[node]
        return clock

    def before(self, first: int, second: int) -> bool:
        """Whether `first`, a node with a lane, is always over before `second` starts."""
        return self.start[second][self.lane[first]] >= self.position[first]


def make_clocks(
    order: Iterable[int], lane_of: Sequence[str], predecessors: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]
) -> Clocks:
    """The clocks of nodes 0..len(lane_of)-1. `order` lists each after its predecessors; "" is no lane."""
    lanes: dict[str, int] = {}
    for name in lane_of:
        if name and name not in lanes:
            lanes[name] = len(lanes)
    num_nodes = len(lane_of)
    zero = [0] * len(lanes)
    lane = [lanes.get(name, -1) for name in lane_of]
    position = [0] * num_nodes
    start: list[Sequence[int]] = [zero] * num_nodes
    ends: list[Sequence[int]] = [zero] * num_nodes
    on_lane: list[list[int]] = [[] for _ in lanes]
    for node in order:
        clock: list[int] = zero
        for predecessor in predecessors[node]:
            clock = list(map(max, clock, ends[predecessor]))
        start[node] = ends[node] = clock
        own = lane[node]
        if own >= 0:
            on_lane[own].append(node)
            position[node] = len(on_lane[own])
            ends[node] = [*clock[:own], position[node], *clock[own + 1 :]]
    return Clocks(lanes, lane, position, start, on_lane)
