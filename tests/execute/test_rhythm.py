"""What is held back between two hooks, and for how long: against a clock that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from commplan.execute import rhythm as tested
from commplan.execute.rhythm import FORGIVEN, SHORT_S, STRIKES, Rhythm


class Switch:
    """Whether lanes hold back."""

    def __init__(self) -> None:
        self.is_on = False

    def hold_back(self) -> None:
        self.is_on = True

    def hand_over(self) -> None:
        self.is_on = False


class Hooks:
    """Hooks of backwards, by the time between them; says for each module whether its ops were held back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 0.0
        monkeypatch.setattr(tested, "perf_counter", lambda: self._now_s)
        self.lanes: Any = Switch()
        self.rhythm = Rhythm(self.lanes)

    def backward(self, gaps_s: Sequence[float]) -> list[bool]:
        held = []
        for module, gap_s in enumerate(gaps_s):
            held.append(self.after_compute(module))
            self._now_s += gap_s
            self.rhythm.hand_over()
            assert not self.lanes.is_on
        return held

    def after_compute(self, module: int) -> bool:
        self.rhythm.enter(module)
        is_held: bool = self.lanes.is_on
        self._now_s += 10.0
        self.rhythm.leave(module)
        assert self.lanes.is_on == is_held
        return is_held


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    return Hooks(monkeypatch)


def test_what_was_short_in_the_backward_before_is_held_back(hooks: Hooks) -> None:
    short, long = 0.9 * SHORT_S, 1.1 * SHORT_S
    assert hooks.backward([short, long, short]) == [False, False, False]
    assert hooks.backward([short, short, long]) == [True, False, True]
    assert hooks.backward([short, short, short]) == [True, True, False]


def test_compute_begins_with_nothing_held_back_however_often_it_is_told(hooks: Hooks) -> None:
    hooks.backward([0.0])
    assert hooks.after_compute(0)
    for _ in range(2):
        hooks.rhythm.hand_over()
        assert not hooks.lanes.is_on
    assert hooks.after_compute(0)


@pytest.mark.parametrize("other", ["module", "end"])
def test_another_hook_ends_it_and_it_is_not_held_back_again(hooks: Hooks, other: str) -> None:
    hooks.backward([0.0, 0.0])
    assert hooks.after_compute(0)
    if other == "module":
        hooks.rhythm.enter(7)
        assert not hooks.lanes.is_on
        hooks.rhythm.leave(7)
    hooks.rhythm.break_off()
    assert not hooks.lanes.is_on
    assert hooks.backward([0.0, 0.0]) == [False, True]
    assert hooks.backward([0.0, 0.0]) == [True, True]


@pytest.mark.parametrize("in_row", [1, 2, 7])
def test_where_soon_and_late_take_turns_little_is_late(hooks: Hooks, in_row: int) -> None:
    """As in steps of two kinds, or with a module that is used twice in one backward."""
    num_late = 0
    for turn in range(4 * FORGIVEN):
        gap_s = 0.0 if turn % (in_row + 1) < in_row else 500 * SHORT_S
        (is_held,) = hooks.backward([gap_s])
        num_late += is_held and gap_s > 0
    assert num_late == STRIKES


def test_a_machine_that_is_busy_now_and_then_is_forgiven(hooks: Hooks) -> None:
    for _ in range(3 * STRIKES):
        hooks.backward([2 * SHORT_S])
        for turn in range(FORGIVEN):
            assert hooks.backward([0.0]) == [turn > 0]


def test_one_that_was_given_up_is_trusted_again(hooks: Hooks) -> None:
    for _ in range(STRIKES):
        hooks.backward([2 * SHORT_S])
    held = [hooks.backward([0.0])[0] for _ in range(FORGIVEN + 1)]
    assert held == [False] * FORGIVEN + [True]


@pytest.mark.parametrize("next_hook", ["hand_over", "break_off"])
def test_a_hook_that_raised_leaves_nothing_held_back(hooks: Hooks, next_hook: str) -> None:
    hooks.backward([0.0])
    hooks.rhythm.enter(0)
    assert hooks.lanes.is_on
    getattr(hooks.rhythm, next_hook)()
    assert not hooks.lanes.is_on


def test_a_framework_that_tells_of_no_hook_before_compute_has_nothing_held_back(hooks: Hooks) -> None:
    for _ in range(2):
        assert not any(hooks.after_compute(module) for module in range(3))
        hooks.rhythm.break_off()
