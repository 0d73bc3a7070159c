"""What ops cost under a profile: by their bytes, however they are fused, cut and cast."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

import commplan
from commplan.errors import CommplanError
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.profiles import Profile
from commplan.ops import Axis, Kind
from commplan.plan.model import OpStep, Plan
from commplan.simulate import costs, simulate

SHARD, REPLICATE = 4, 2
HEAD = "version: 1\nname: mine\nsummary: One of mine.\n"


def table(*numels: int) -> ModuleTable:
    axes = {Axis.SHARD: SHARD, Axis.REPLICATE: REPLICATE}
    return ModuleTable(
        modules=tuple(
            Module(name=f"m{n}", parameters=(Parameter(name="p", shape=(numel,)),), axes=axes) for n, numel in enumerate(numels)
        )
    )


def profile(**changes: object) -> Profile:
    # A byte a second: seconds are bytes.
    byte = {"bytes_per_s": 1}
    data = {
        "name": "bytes",
        "compute_s": {"default": 0},
        "axes": {
            "shard": {"link": "a", "all_gather": byte, "reduce_scatter": byte},
            "replicate": {"link": "b", "all_reduce": byte},
        },
    }
    return Profile.model_validate(data | changes)


def seconds_by_kind(plan: Plan, of: Profile) -> dict[Kind, list[float]]:
    priced = costs(plan, of)
    found: dict[Kind, list[float]] = {}
    for step in plan.steps:
        if isinstance(step, OpStep):
            found.setdefault(step.kind, []).append(priced.ops[step.op].transfer_s)
    return found


def test_bytes_are_those_of_the_whole_tensor_on_one_rank() -> None:
    # 10 elements are padded to 12: 48 bytes go into the reduce-scatter, 12 are reduced, 48 come out of the all-gather.
    found = seconds_by_kind(commplan.compile("prefetch_overlap", table(10, 16)), profile())
    assert found[Kind.REDUCE_SCATTER] == [48, 64]
    assert found[Kind.ALL_REDUCE] == [12, 16]
    assert found[Kind.ALL_GATHER] == [48, 64]
    assert found[Kind.APPLY] == [0, 0]


ROOT = "root: [apply_n: {after: AR_n}]\n"
PIECES = f"{HEAD}post_backward: [RS_n: {{after: compute_n, chunks: 3}}, AR_n: {{after: RS_n, chunks: 2}}]\n{ROOT}"
FUSE = "fuse: {modules: 3}"
BUCKET = f"{HEAD}post_backward: [RS_n: {{after: compute_n, {FUSE}}}, AR_n: {{after: RS_n, {FUSE}}}]\n{ROOT}"
NARROW = f"{HEAD}post_backward: [RS_n: {{after: compute_n, dtype: bf16}}, AR_n: {{after: RS_n}}]\n{ROOT}"


@pytest.mark.parametrize("text", [PIECES, BUCKET])
def test_pieces_and_buckets_move_the_same_bytes(text: str) -> None:
    modules = table(10, 16, 40, 7)
    whole = seconds_by_kind(commplan.compile("overlapped_allreduce", modules), profile())
    found = seconds_by_kind(commplan.compile(text, modules), profile())
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
        assert sum(found[kind]) == sum(whole[kind])
        assert len(found[kind]) != len(whole[kind])


def test_half_as_wide_takes_half_as_long() -> None:
    found = seconds_by_kind(commplan.compile(NARROW, table(16)), profile())
    assert found[Kind.REDUCE_SCATTER] == [32]
    assert found[Kind.ALL_REDUCE] == [16]


def test_a_cut_op_pays_its_latency_for_each_piece_and_packs_once() -> None:
    byte = {"bytes_per_s": 1, "latency_s": 100}
    of = profile(
        axes={"shard": {"link": "a", "reduce_scatter": byte}, "replicate": {"link": "b", "all_reduce": byte}},
        host={"issue_s": 1000, "pack_bytes_per_s": 64},
    )
    plan = commplan.compile(PIECES, table(16))
    priced = costs(plan, of).ops
    ops = [priced[step.op] for step in plan.steps if isinstance(step, OpStep) and step.kind is Kind.REDUCE_SCATTER]
    assert [op.latency_s for op in ops] == [100] * 3
    assert [op.issue_s for op in ops] == [1001, 1000, 1000]


COPIED = {
    # Shards of 24 and 40 bytes that two reduce-scatters made: into a bucket and back.
    "RS_n: {after: compute_n}\n  - AR_n: {after: RS_n, fuse: {modules: 2}}": {"AR_0-1": 128},
    # Those of one reduce-scatter lie side by side.
    "RS_n: {after: compute_n, fuse: {modules: 2}}\n  - AR_n: {after: RS_n, fuse: {modules: 2}}": {},
    # Each piece has a part of each.
    "RS_n: {after: compute_n, fuse: {modules: 2}, chunks: 2}\n  - AR_n: {after: RS_n, fuse: {modules: 2}, chunks: 2}": {
        "RS_0-1[0/2]": 32,
        "RS_0-1[1/2]": 32,
        "AR_0-1[0/2]": 64,
        "AR_0-1[1/2]": 64,
    },
    # Half as many bytes are sent, and as many as ever are written in the end.
    "RS_n: {after: compute_n, dtype: bf16}\n  - AR_n: {after: RS_n}": {"RS_0": 24, "RS_1": 40},
    "RS_n: {after: compute_n}\n  - AR_n: {after: RS_n, dtype: bf16}": {"AR_0": 48, "AR_1": 80},
    "RS_n: {after: compute_n, chunks: 2}\n  - AR_n: {after: RS_n, chunks: 2}": {},
}


@pytest.mark.parametrize(("hook", "copied_bytes"), COPIED.items())
def test_what_does_not_lie_as_it_is_sent_is_copied_on_its_lane(hook: str, copied_bytes: dict[str, int]) -> None:
    text = f"{HEAD}post_backward:\n  - {hook}\nroot: [apply_n: {{after: AR_n}}]\n"
    found = costs(commplan.compile(text, table(24, 40)), profile(host={"pack_bytes_per_s": 1}))
    assert {str(op): cost.latency_s for op, cost in found.ops.items() if cost.latency_s} == copied_bytes


def module_of(*shapes: tuple[int, ...]) -> Module:
    parameters = tuple(Parameter(name=f"p{n}", shape=shape) for n, shape in enumerate(shapes))
    return Module(name="m", parameters=parameters, axes={Axis.SHARD: 4, Axis.REPLICATE: 2})


@pytest.mark.parametrize(
    ("module", "packs_lone", "reduce_issue_s", "gather_issue_s", "compute_s"),
    [
        (module_of((8,), (4,)), True, 48, 12, 48),
        (module_of((8,), (4,)), False, 48, 12, 48),
        (module_of((8,)), True, 32, 0, 0),
        (module_of((8,)), False, 0, 0, 0),
        # The all-gather brings the padding along; what is sent in another dtype is cast to it before.
        (module_of((7,)), False, 32, 0, 0),
        (module_of((8,)).model_copy(update={"gather_dtype": "bfloat16"}), False, 32, 4, 0),
    ],
)
def test_a_lone_parameter_is_copied_where_it_does_not_lie_as_it_is_sent(
    module: Module, packs_lone: bool, reduce_issue_s: float, gather_issue_s: float, compute_s: float
) -> None:
    """A byte a second; all-gathers send a quarter."""
    host = {"pack_bytes_per_s": 1, "unpack_bytes_per_s": 1, "packs_lone": packs_lone}
    plan = commplan.compile("prefetch_overlap", ModuleTable(modules=(module,)))
    found = costs(plan, profile(host=host))
    issue_s = {op.family: cost.issue_s for op, cost in found.ops.items()}
    assert issue_s == {"AG": gather_issue_s, "RS": reduce_issue_s, "AR": 0, "apply": 0}
    assert list(found.compute_s) == [compute_s]


def test_measured_points_are_joined_by_straight_lines() -> None:
    of = profile(
        axes={"replicate": {"link": "b", "all_reduce": {"points": [[0, 2], [16, 10], [32, 12]]}}, "shard": {"link": "a"}}
    )
    transfer = of.transfer(Axis.REPLICATE, Kind.ALL_REDUCE)
    assert [sum(transfer.seconds(size)) for size in (0, 8, 16, 24, 32, 64)] == [2, 6, 10, 11, 12, 16]
    assert {transfer.seconds(size)[0] for size in (0, 8, 64)} == {2}


def test_the_first_line_goes_on_to_nothing_and_what_is_left_there_is_latency() -> None:
    points = [[16, 10], [32, 18]]
    of = profile(axes={"replicate": {"link": "b", "all_reduce": {"points": points}}, "shard": {"link": "a"}})
    assert of.transfer(Axis.REPLICATE, Kind.ALL_REDUCE).seconds(8) == (2, 4)
    known = profile(axes={"replicate": {"link": "b", "all_reduce": {"points": points, "latency_s": 0}}, "shard": {"link": "a"}})
    assert known.transfer(Axis.REPLICATE, Kind.ALL_REDUCE).seconds(8) == (0, 6)


def test_over_one_rank_nothing_is_sent() -> None:
    modules = ModuleTable(
        modules=tuple(
            Module(name=f"m{n}", parameters=(Parameter(name="p", shape=(8,)),), axes={Axis.SHARD: 1, Axis.REPLICATE: 1})
            for n in range(2)
        )
    )
    plan = commplan.compile("blocking", modules)
    assert simulate(plan, costs(plan, profile(fsdp2_gathers="blocking"))).duration_s == 0


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(CommplanError, match=r"has a module 'm7', which the model has not: .*m1"):
        costs(commplan.compile("blocking", table(16, 16)), profile(compute_s={"default": 1, "modules": {"m7": 7}}))


@pytest.mark.parametrize(("how", "gather_s"), [("blocking", 64), ("prefetched", 0)])
def test_parameters_that_fsdp2_gathers_hold_compute_on_a_cpu(how: str, gather_s: float) -> None:
    plan = commplan.compile("overlapped_allreduce", table(16, 16))
    of = costs(plan, profile(fsdp2_gathers=how, compute_s={"default": 5}, host={"unpack_bytes_per_s": 32}))
    assert list(of.compute_s) == [5 + 2] * 2
    assert list(of.gather_s) == [gather_s] * 2
    host = {"unpack_bytes_per_s": 32, "fsdp2_copy_bytes_per_s": 16}
    assert list(costs(plan, profile(fsdp2_gathers=how, compute_s={"default": 5}, host=host)).compute_s) == [5 + 4] * 2


def test_parameters_that_the_plan_gathers_do_not() -> None:
    modules = (module_of((8,), (8,)), module_of((8,), (8,)).model_copy(update={"name": "other"}))
    plan = commplan.compile("prefetch_overlap", ModuleTable(modules=modules))
    of = profile(fsdp2_gathers="blocking", host={"unpack_bytes_per_s": 32, "fsdp2_copy_bytes_per_s": 16})
    assert list(costs(plan, of).compute_s) == [2, 2]
    assert list(costs(plan, of).gather_s) == [0, 0]


def test_modules_may_differ() -> None:
    plan = commplan.compile("blocking", table(16, 16, 16))
    assert list(costs(plan, profile(compute_s={"default": 1, "modules": {"m1": 7}})).compute_s) == [1, 7, 1]


def test_a_plan_takes_as_long_as_its_bytes() -> None:
    modules = table(16, 16)
    found = simulate(commplan.compile("blocking", modules), costs(commplan.compile("blocking", modules), profile()))
    assert found.duration_s == 2 * (64 + 16)
    assert Counter(ran.lane for ran in found.ops) == {"shard": 2, "replicate": 2, "compute": 2}
    assert Fraction(found.duration_s) == 160


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"axes": {"shard": {"link": "a", "reduce_scatter": {"bytes_per_s": 1}}}}, "axes.replicate.all_reduce"),
        ({"axes": {"shard": {"link": "a"}, "replicate": {"link": "b"}}}, "axes.shard.reduce_scatter"),
        ({"compute_s": {"modules": {"m0": 1}}}, "module 'm1'.*compute_s.default"),
    ],
)
def test_what_a_profile_does_not_say_is_asked_for(changes: dict[str, object], asked: str) -> None:
    with pytest.raises(CommplanError, match=asked):
        costs(commplan.compile("blocking", table(16, 16)), profile(**changes))
