"""Circles of ops: found as brute force finds them, cut as little as possible, in linear work."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan import compiler
from commplan.graph.cycles import MAX_VISITS, Cutter

MAX_NODES = 7


@st.composite
def graphs(draw: st.DrawFn) -> list[set[int]]:
    """Node -> its predecessors."""
    num_nodes = draw(st.integers(1, MAX_NODES))
    node = st.integers(0, num_nodes - 1)
    return draw(st.lists(st.sets(node, max_size=3), min_size=num_nodes, max_size=num_nodes))


def cutter(predecessors: list[set[int]], labels: list[int] | None = None, *, origin: int | None = None) -> Cutter:
    """One that has cut every circle; each edge comes from a place of its own, or all from `origin`."""
    numbered = [{first: 100 * first + node if origin is None else origin for first in p} for node, p in enumerate(predecessors)]
    made = Cutter(numbered, labels or list(range(len(predecessors))))
    made.cut(range(len(predecessors)))
    return made


def digraph(predecessors: list[set[int]]) -> nx.DiGraph[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(predecessors)))
    graph.add_edges_from((first, node) for node, before in enumerate(predecessors) for first in before)
    return graph


def turned(cycle: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The cycle from its smallest member."""
    at = cycle.index(min(cycle))
    return (*cycle[at:], *cycle[:at])


@given(graphs())
def test_what_is_found_is_a_cycle_and_every_circle_is_found(predecessors: list[set[int]]) -> None:
    whole = digraph(predecessors)
    every = {turned(cycle) for cycle in nx.simple_cycles(whole)}
    found = [turned(cycle) for cycle in cutter(predecessors).cycles]
    assert set(found) <= every
    assert len(set(found)) == len(found)
    for component in nx.strongly_connected_components(whole):
        inside = [set(cycle) for cycle in every if set(cycle) <= component]
        assert bool(inside) == any(set(cycle) <= component for cycle in found)


@given(graphs())
def test_cycles_through_the_first_node_of_a_circle_are_the_shortest_by_each_edge(predecessors: list[set[int]]) -> None:
    whole = digraph(predecessors)
    found = [tuple(cycle) for cycle in cutter(predecessors).cycles]
    for component in nx.strongly_connected_components(whole):
        start = min(component)
        by_end = {cycle[-1]: len(cycle) for cycle in found if cycle[0] == start}
        lengths = nx.single_source_shortest_path_length(whole.subgraph(component), start)
        assert by_end == {end: lengths[end] + 1 for end in whole.predecessors(start) if end in component}


@given(graphs())
def test_only_edges_of_circles_are_cut(predecessors: list[set[int]]) -> None:
    whole = digraph(predecessors)
    on_a_cycle = {(a, b) for cycle in nx.simple_cycles(whole) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)}
    left = {(first, node) for node, before in enumerate(cutter(predecessors).predecessors) for first in before}
    assert left == set(whole.edges) - on_a_cycle


def test_a_ring_of_many_nodes_takes_linear_work() -> None:
    num_nodes = 20_000
    made = cutter([{(node - 1) % num_nodes} for node in range(num_nodes)])
    assert made.cycles == [tuple(range(num_nodes))]
    assert made.visits == 2 * num_nodes


def test_pieces_around_one_node_take_linear_work() -> None:
    """As of `RS_n: {after: RS_*, chunks: 20000}`: a node that waits for all pieces, each of which waits for it and the last."""
    num_nodes = 20_000
    around = [set(range(1, num_nodes)), *({0, node - 1} for node in range(1, num_nodes))]
    made = cutter(around, [0] + [1] * (num_nodes - 1), origin=0)
    assert made.cycles == [(0, 1)]
    assert made.visits < 10 * num_nodes


@pytest.mark.parametrize("num_circles", [1, 10_000])
def test_circles_of_the_same_lines_are_searched_once(num_circles: int) -> None:
    predecessors = [{node ^ 1} for node in range(2 * num_circles)]
    made = cutter(predecessors, [node % 2 for node in range(2 * num_circles)], origin=0)
    assert made.cycles == [(0, 1)]
    assert made.visits == 4


def test_work_is_bounded_where_everything_waits_for_everything() -> None:
    num_nodes = 300
    made = cutter([set(range(num_nodes)) - {node} for node in range(num_nodes)])
    assert made.cycles
    assert made.visits <= MAX_VISITS + num_nodes**2
    assert not any(made.predecessors)


def test_pieces_of_one_op_are_told_once() -> None:
    text = "version: 1\nname: t\npost_backward:\n  - RS_n: {after: [compute_n, AR_n], chunks: 512}\n"
    text += "  - AR_n: {after: RS_n, chunks: 512}\nroot:\n  - apply_n: {after: AR_n}\n"
    assert [violation.code for violation in compiler.check(text, 3)] == ["CP101"]
