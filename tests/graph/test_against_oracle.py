"""The compiler against an interpreter that knows only the language."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from commplan import compiler, graph
from commplan.errors import Severity
from commplan.graph.model import Role
from commplan.language import parse
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis, Kind
from tests.oracle import Layout, Wrong, blocked_by, is_right
from tests.random_schedules import schedules

FEW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tables(draw: st.DrawFn) -> ModuleTable:
    """Up to five modules; sometimes some lack an axis or stay gathered."""
    num_modules = draw(st.integers(1, 5))
    uniform = draw(st.integers(0, 2)) > 0
    modules = []
    for n in range(num_modules):
        axes = {Axis.SHARD: 2, Axis.REPLICATE: 2}
        if not uniform:
            axes = draw(st.sampled_from([axes, axes, {Axis.SHARD: 2}, {Axis.REPLICATE: 2}, {}]))
        resharded = uniform or draw(st.booleans())
        parameters = (Parameter(name="w", shape=(4, 4)),)
        modules.append(Module(name=f"m{n}", parameters=parameters, axes=axes, resharded_after_forward=resharded))
    return ModuleTable(modules=tuple(modules))


def layout(text: str, table: ModuleTable) -> Layout:
    def needed(kind: Kind, n: int) -> bool:
        module = table.modules[n]
        return {
            Kind.ALL_GATHER: Axis.SHARD in module.axes and module.resharded_after_forward,
            Kind.REDUCE_SCATTER: Axis.SHARD in module.axes,
            Kind.ALL_REDUCE: Axis.REPLICATE in module.axes,
        }.get(kind, True)

    return Layout(parse(text), len(table), {}, needed, lambda n: table.modules[n].axes)


@given(schedules(), tables())
@FEW
def test_errors_are_found_where_gradients_can_go_wrong_and_nowhere_else(text: str, table: ModuleTable) -> None:
    found = [v for v in compiler.check(text, table) if v.severity is Severity.ERROR]
    right = is_right(layout(text, table))
    event("right" if right else "wrong")
    event(f"{sorted({v.code for v in found})}")
    assert right == (not found), [str(v) for v in found]


@given(schedules(), tables())
@FEW
def test_what_is_ordered_is_what_holding_an_op_back_holds_back(text: str, table: ModuleTable) -> None:
    plain = layout(text, table)
    try:
        items = plain.items()
    except Wrong:
        assume(False)
    made = graph.build(plain.spec, table, {})
    ops = {}
    for number, node in enumerate(made.nodes):
        if node.role in (Role.OP, Role.COMPUTE):
            assert node.op is not None
            op = node.op
            name = f"{op.family}_{op.first}-{op.last}[{op.piece}/{op.pieces}]"
            ops[name if node.role is Role.OP else str(op)] = number
    real = [item.name for item in items if item.kind is not None and not item.left_out]
    assert sorted(real) == sorted(ops)
    assert sorted(real, key=lambda name: made.rank[ops[name]]) == real
    for held in real:
        stuck = blocked_by(items, held)
        for name in real:
            if name != held:
                assert made.clocks.before(ops[held], ops[name]) == (name in stuck), (held, name)
