"""torch is accepted only as it was released and tested; what differs between releases."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import commplan
from commplan.errors import AttachError
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2 import torch_releases as releases
from tests.worlds import features, parity
from tests.worlds.world import Rank, Worlds

ROOT = Path(__file__).resolve().parents[2]
FN = parity.PROBLEMS["FN"]


# As released.


def module(folder: Path, name: str, source: str) -> types.ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    made = types.ModuleType(name)
    exec(compile(source, str(path), "exec"), vars(made))
    return made


HOOK = '''
def hook(a, b=[]):
    """Says."""
    # Why.
    return a + 1
'''


@pytest.fixture
def digest(tmp_path: Path) -> Callable[[str], str]:
    count = iter(range(99))

    def of(source: str) -> str:
        made = module(tmp_path, f"made_{next(count)}", source)
        with patch.dict(sys.modules, {"made": made}):
            return releases.fingerprint({"made": ("hook",)})

    return of


def test_layout_comments_and_docstrings_do_not_count(digest: Callable[[str], str]) -> None:
    other = "def hook(a,\n        b=[]):\n    'Other words.'\n    return (a\n            + 1)\n"
    assert digest(HOOK) == digest(other) == digest(HOOK.replace('    """Says."""\n', ""))


@pytest.mark.parametrize(
    ("old", "new"), [("a + 1", "a + 2"), ("a + 1", "b + 1"), ("b=[]", "b=()"), ("def hook", "def other"), ("+", "-")]
)
def test_everything_that_runs_counts(digest: Callable[[str], str], old: str, new: str) -> None:
    assert digest(HOOK) != digest(HOOK.replace(old, new))


def test_a_property_counts_as_the_function_that_it_calls(digest: Callable[[str], str]) -> None:
    head = "class A:\n    @property\n    def hook(self):\n        return self.{}\n\nhook = A.hook\n"
    assert digest(head.format("a")) != digest(head.format("b"))


def test_this_torch_is_as_released() -> None:
    assert releases.RELEASES[".".join(map(str, releases.release()))] == releases.fingerprint()
    releases.require_known_torch()


def test_each_release_has_its_own_fingerprint() -> None:
    assert len(set(releases.RELEASES.values())) == len(releases.RELEASES)


def test_a_wrapper_that_says_what_it_wraps_is_accepted() -> None:
    original = _fsdp_param_group.FSDPParamGroup.post_backward

    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return original(*args)

    with patch.object(_fsdp_param_group.FSDPParamGroup, "post_backward", wrapped):
        releases.require_known_torch()


def refusal() -> str:
    with pytest.raises(AttachError) as caught:
        releases.require_known_torch()
    message = str(caught.value)
    assert torch.__version__ in message
    assert all(release in message for release in releases.RELEASES)
    return message


def short_digest(function: Any) -> str:
    return hashlib.sha256(releases._source(function).encode()).hexdigest()[:16]


# What torch-npu's `fully_shard` does: it wraps methods of all parameter groups, and does not say what it wraps.


def skipping_post_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, module: nn.Module, args: Any, output: Any) -> Any:
        if getattr(self, "_skip_post_forward", False):
            return output
        output = inner(self, module, args, output)
        self._skip_post_forward = True
        return output

    return wrapper


def unskipping_post_backward(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any) -> None:
        self._skip_post_forward = False
        inner(self)

    return wrapper


@contextmanager
def vendor() -> Iterator[list[str]]:
    """FSDP2 as a vendor wraps it; the wrappers' fingerprints."""
    group = _fsdp_param_group.FSDPParamGroup
    wrappers = [skipping_post_forward(group.post_forward), unskipping_post_backward(group.post_backward)]
    with patch.object(group, "post_forward", wrappers[0]), patch.object(group, "post_backward", wrappers[1]):
        yield [short_digest(wrapper) for wrapper in wrappers]


def test_a_vendors_wrapper_is_refused_unless_it_is_known() -> None:
    right = releases.fingerprint()
    with vendor() as known:
        assert "fingerprint" in refusal()
        with patch.object(releases, "WRAPPERS", dict.fromkeys(known[:1])):
            assert "fingerprint" in refusal()
        with patch.object(releases, "WRAPPERS", dict.fromkeys(known)):
            assert releases.fingerprint() == right
            releases.require_known_torch()


def test_what_is_inside_a_vendors_wrapper_counts() -> None:
    def replaced(self: Any, *args: Any) -> None:
        pass

    with patch.object(_fsdp_param_group.FSDPParamGroup, "post_backward", replaced), vendor() as known:  # noqa: SIM117
        with patch.object(releases, "WRAPPERS", dict.fromkeys(known)):
            assert "fingerprint" in refusal()


def under_a_vendor(here: Rank) -> None:
    def run(schedule: str | None) -> tuple[list[Any], list[Any]]:
        model = parity.build(FN, here, (2, 2), {"reshard": True})
        attachment = commplan.attach(model, schedule) if schedule else None
        grads = list(parity.train(model, FN, here.rank, [parity.PLAIN, parity.NO_SYNC, parity.PLAIN]))
        output = model(FN.batch(here.rank, 9))
        groups = [g for _, state in private.states(model) for g in private.groups(state)]
        sharded = [(str(g._sharded_state), g._skip_post_forward) for g in groups]
        FN.loss(output, here.rank).backward()
        if attachment:
            attachment.detach()
        return grads, sharded

    with vendor() as known, patch.object(releases, "WRAPPERS", dict.fromkeys(known)):
        stock, stock_sharded = run(None)
        for schedule in ("delayed_allreduce", "bucketed_pipeline_depth2"):
            grads, sharded = run(schedule)
            assert sharded == stock_sharded
            for mine, theirs in zip(grads, stock, strict=True):
                parity.assert_equal(mine, theirs, schedule)


def test_attached_on_top_of_a_vendors_wrappers(worlds: Worlds) -> None:
    worlds.of(4).run(under_a_vendor)


def test_a_vendors_replacement_is_refused_unless_it_is_known() -> None:
    def replaced(*args: Any) -> None:
        pass

    right, original = releases.fingerprint(), short_digest(dist.distributed_c10d._new_process_group_helper)
    this = ".".join(map(str, releases.release()))
    with patch.object(dist.distributed_c10d, "_new_process_group_helper", replaced):
        assert "fingerprint" in refusal()
        with patch.object(releases, "REPLACEMENTS", {short_digest(replaced): {"2.99": original}}):
            assert "fingerprint" in refusal()
        with patch.object(releases, "REPLACEMENTS", {short_digest(replaced): {this: original}}):
            assert releases.fingerprint() == right
            releases.require_known_torch()


def test_vendors_replace_what_this_torch_has() -> None:
    this = ".".join(map(str, releases.release()))
    replaced = {known[this] for known in releases.REPLACEMENTS.values() if this in known}
    assert replaced <= {short_digest(dist.distributed_c10d._new_process_group_helper)}


def test_a_function_that_somebody_replaced_is_refused() -> None:
    def replaced(self: Any, *args: Any) -> None:
        pass

    with patch.object(_fsdp_param_group.FSDPParamGroup, "post_backward", replaced):
        assert "fingerprint" in refusal()
    with patch.object(_fsdp_param_group.FSDPParamGroup, "post_backward", len):
        assert "no function of Python" in refusal()
    releases.require_known_torch()


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0a0+git", "1.13.1", "unknown", ""])
def test_another_release_is_refused_though_its_functions_are_the_same(version: str) -> None:
    with patch.object(torch, "__version__", version):
        refusal()


@pytest.mark.parametrize("suffix", ["", "+cpu", ".post7", "a0+git1234567"])
def test_builds_of_a_known_release_are_accepted(suffix: str) -> None:
    major, minor = releases.release()
    with patch.object(torch, "__version__", f"{major}.{minor}.5{suffix}"):
        releases.require_known_torch()


def test_a_torch_without_source_is_refused() -> None:
    releases._source_of.cache_clear()
    with patch.object(releases.inspect, "getsource", side_effect=OSError("could not get source code")):
        assert "source" in refusal()


def test_a_torch_without_fsdp2_is_refused_by_name() -> None:
    program = """
import sys
sys.modules["torch.distributed.fsdp._fully_shard"] = None
import commplan, torch
try:
    commplan.attach(torch.nn.Linear(1, 1), "blocking")
except commplan.AttachError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"torch {torch.__version__} has no FSDP2" in done.stdout


# What differs between releases, as far as this one can show it.


def test_one_group_where_a_state_can_have_no_more() -> None:
    assert releases.param_groups(types.SimpleNamespace(_fsdp_param_group="group")) == ["group"]
    assert releases.param_groups(types.SimpleNamespace(_fsdp_param_group=None)) == []


def test_inputs_are_found_alike_without_the_function_of_fsdp2() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1)
    arguments = ((a, [b, {"x": a}]), {"y": (b, a), "z": None})
    common = pytest.importorskip("torch.distributed.fsdp._common_utils")
    names = ["collect_grad_tensors"] if hasattr(common, "collect_grad_tensors") else []
    with_it = list(releases.grad_tensors(*arguments))
    for name in names:
        with patch.object(common, name):
            delattr(common, name)
            without = list(releases.grad_tensors(*arguments))
        assert [id(t) for t in with_it] == [id(t) for t in without]
    assert [id(t) for t in with_it] == [id(a)] * 3


def test_hooks_in_backward_are_kept_from_type_checks() -> None:
    depth, seen = [0], {}

    @contextmanager
    def guard() -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    with patch.object(dist, "_spmd_no_typecheck", guard, create=True):
        for name in ("pre_forward", "post_forward", *private.HOOKS_IN_BACKWARD):
            private.as_hook(name, lambda name=name: seen.update({name: depth[0]}))()
    in_backward = {"pre_backward": 1, "post_backward": 1, "_root_post_backward_final_callback": 1}
    assert seen == {"pre_forward": 0, "post_forward": 0, **in_backward}


class Boom(Exception):
    pass


def traces(model: nn.Module) -> list[Any]:
    """What an iteration leaves in FSDP2."""
    found: list[Any] = []
    for _, state in private.states(model):
        found.append((state._training_state, len(state._modules_to_run_forward)))
        shared = state._comm_ctx
        found.append((shared.all_gather_state, len(shared.post_forward_order), state._state_ctx.iter_forward_root))
        found.append((shared.__dict__.get("reduce_scatter_states"), shared.__dict__.get("reduce_scatter_state")))
        found.append(state._state_ctx.post_backward_final_callback_queued)
        for group in private.groups(state):
            names = ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output")
            found.append([vars(group)[name] for name in (*names, "_reshard_after_forward_event", "_training_state")])
            found.append((list(group._post_forward_indices), group._sharded_state))
    return found


def failed(here: Rank, where: str) -> nn.Module:
    """A model with a partial sum in some groups, whose last iteration raised."""
    model = parity.build(FN, here, (2, 2), {})
    parity.set_flags(model, {"all_reduce": False})
    FN.loss(model(FN.batch(here.rank, 0)), here.rank).backward()

    def boom(*_: Any) -> None:
        raise Boom

    def boom_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(boom)

    handle = model.b[1].register_forward_hook(boom if where == "forward" else boom_in_backward)  # type: ignore[index,union-attr]
    with pytest.raises(Boom):
        FN.loss(model(FN.batch(here.rank, 1)), here.rank).backward()
    handle.remove()
    return model


def resets_alike(here: Rank, where: str, by_hand: bool) -> list[str]:
    model = failed(here, where)
    (root,) = [state for name, state in private.states(model) if not name]
    with patch.object(releases, "resets_iterations", lambda: not by_hand):
        private.reset_iteration(root)
    left = [repr(trace) for trace in traces(model)]
    model.zero_grad()
    expected = parity.train(parity.build(FN, here, (2, 2), {}), FN, here.rank, [parity.NO_ALL_REDUCE])
    for grads, right in zip(parity.train(model, FN, here.rank, [parity.NO_ALL_REDUCE]), expected, strict=True):
        parity.assert_equal(grads, right, f"after an exception in {where}")
    return left


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_iteration_that_raised_is_forgotten(worlds: Worlds, where: str) -> None:
    worlds.of(4).run(resets_alike, where=where, by_hand=True)


@features.reset_of_iterations
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_by_hand_as_fsdp2_does(worlds: Worlds, where: str) -> None:
    world = worlds.of(4)
    assert world.run(resets_alike, where=where, by_hand=True) == world.run(resets_alike, where=where, by_hand=False)
