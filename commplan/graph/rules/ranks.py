"""CP301 to CP303: ranks. Collectives that meet must be the same, and every rank must get to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.ranks import Collective, Run, World
from commplan.language.source import alternatives
from commplan.language.spec import OpLine


def divergence(world: World) -> Iterator[Violation]:
    """Communicators to which two ranks issue different collectives; the first difference for each pair of lines."""
    known: set[tuple[int, int]] = set()
    for channel, by_rank in world.channels().items():
        (first, expected), *others = by_rank.items()
        for rank, issued in others:
            pairs = enumerate(zip_longest(expected, issued), start=1)
            found = next(((n, a, b) for n, (a, b) in pairs if a is None or b is None or a.content != b.content), None)
            if found is None:
                continue
            number, one, other = found
            lines = [world.line(part) for part in (one, other) if part is not None]
            pair = (id(lines[0]), id(lines[-1]))
            if pair not in known:
                known.add(pair)
                yield _divergent(world, f"number {number} on communicator {channel[0]}", (first, one), (rank, other), lines)


def _divergent(
    world: World,
    where: str,
    one: tuple[int, Collective | None],
    other: tuple[int, Collective | None],
    lines: list[OpLine],
) -> Violation:
    (rank, part), (peer, its_part) = one, other
    if part is None or its_part is None:
        present, absent = (rank, peer) if its_part is None else (peer, rank)
        only = part or its_part
        assert only is not None
        told = f"rank {present} issues {world.name(only)} as {where} and waits for ever: rank {absent} issues no more"
    else:
        mine, theirs = world.name(part), world.name(its_part)
        if part.content.modules == its_part.content.modules:
            mine, theirs = f"{mine}: {_carries(part)}", f"{theirs}: {_carries(its_part)}"
        told = f"rank {rank} issues {mine} as {where}, rank {peer} issues {theirs}"
    return Violation(
        "CP301",
        told,
        lines[0].span,
        f"bring the module tables of ranks {rank} and {peer} in line: the same modules, sizes and orders on both",
        related=(Related(f"what rank {peer} issues is placed here", lines[-1].span),) if lines[0] is not lines[-1] else (),
    )


def _carries(part: Collective) -> str:
    content = part.content
    piece = f", piece {content.piece} of {content.pieces}" if content.pieces > 1 else ""
    return f"{content.size_bytes:,} bytes of {content.dtype}{piece}"


def deadlock(world: World, in_flight: int) -> Iterator[Violation]:
    """Ranks that wait for each other in a circle: as the lanes order ops (CP302), or else with a bound on collectives in
    flight (CP303).
    """
    code, bound = "CP302", ""
    circle = Run(world).deadlock()
    if not circle:
        code, bound = "CP303", f" with at most {in_flight} collective{'s' * (in_flight != 1)} in flight"
        circle = Run(world, in_flight).deadlock()
    if not circle:
        return
    first, *others = circle
    told = f"rank {first.rank} waits in {world.name(first)} for rank "
    told += "".join(f"{part.rank}, which waits in {world.name(part)} for rank " for part in others) + str(first.rank)
    lines = [world.line(part) for part in circle]
    ranks = alternatives([str(rank) for rank in sorted({part.rank for part in circle})], "and")
    yield Violation(
        code,
        f"a deadlock{bound}: {told}",
        lines[0].span,
        f"bring the module tables of ranks {ranks} in line: their modules become complete in different orders"
        + ("" if code == "CP302" else "; or give a larger `--in-flight` if so many can surely be in flight at once"),
        related=tuple(
            Related(f"{world.op(part)} of rank {part.rank} is placed here", line.span)
            for part, line in zip(circle[1:], lines[1:], strict=True)
            if line is not lines[0]
        ),
    )


def check(world: World, in_flight: int) -> Iterator[Violation]:
    """Every finding. Where collectives differ nothing can be said of how they wait for each other."""
    divergent = tuple(divergence(world))
    yield from divergent or deadlock(world, in_flight)


_ONE_LANE = """\
version: 1
name: one_lane
lanes:
  comm: {}
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n, lane: comm}
  - AR_n: {after: RS_n, lane: comm}
root:
  - apply_n: {after: AR_n}
"""

_TWO_LANES = """\
version: 1
name: two_lanes
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
"""

_SAME = "# rank 0: embed (shard), head (replicate)\n# rank 1: embed (shard), head (replicate)\n"
_SWAPPED = "# rank 0: embed (shard), head (replicate)\n# rank 1: head (replicate), embed (shard)\n"

RULES = (
    Rule(
        code="CP301",
        title="Ranks that issue different collectives",
        severity=Severity.ERROR,
        what="Two ranks that share a communicator issue different collectives to it: other modules, another order, other "
        "sizes, or more of them. Module tables of several ranks show it: `commplan check --modules r0.json --modules r1.json`.",
        why="Collectives meet in the order of issue, whatever they carry. Where sizes agree gradients of different modules are "
        "mixed without a word; where they do not, or one rank has more, the job hangs.",
        wrong="# rank 0: embed, head\n# rank 1: head, embed\n" + _TWO_LANES,
        right="# rank 0: embed, head\n# rank 1: embed, head\n" + _TWO_LANES,
    ),
    Rule(
        code="CP302",
        title="Ranks that wait for each other in a circle",
        severity=Severity.ERROR,
        what="Each rank of a circle is in a collective that the next one can start only after its own. Lanes, waits and "
        "dependencies of the plan alone bring it about, however quick the ranks are.",
        why="The job hangs, on every step.",
        wrong=_SWAPPED + _ONE_LANE,
        right=_SAME + _ONE_LANE,
    ),
    Rule(
        code="CP303",
        title="Ranks that wait for each other if few collectives are in flight",
        severity=Severity.ERROR,
        what="Two ranks issue collectives of different communicators in different orders. Lanes let them all be in flight at "
        "once; where only so many can be (`--in-flight`, 1 if not given) the ranks wait for each other in a circle.",
        why="A collective that has begun holds the device, or the thread that issued it, until its peers come. The job hangs "
        "on some machines and under some load, and not on others.",
        wrong=_SWAPPED + _TWO_LANES,
        right=_SAME + _TWO_LANES,
    ),
)
