"""A measurement whose error the script keeps to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from commplan.bench.stepping import Stepper  # noqa: E402


def test_an_error_that_the_script_catches_is_told_and_ends_the_next_step_too() -> None:
    told: list[BaseException | None] = []
    error = ValueError("the measurement's own")

    def measure(model: object) -> Iterator[None]:
        yield
        raise error

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    stepper = Stepper(measure, told.append)

    def work() -> None:
        # As though the model had been found at the first step.
        stepper._steps, stepper._clock = measure(None), lambda: optimizer
        optimizer.step()
        for _ in range(2):
            with suppress(ValueError):
                optimizer.step()
        with pytest.raises(ValueError, match="the measurement's own"):
            optimizer.step()

    assert not stepper.run(work)
    assert told == [error]
