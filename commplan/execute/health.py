"""Whether an executor can go on: what failed, what comparing ranks found, and where this rank is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from commplan.errors import DivergenceError, ExecutionError
from commplan.execute.control import Check
from commplan.execute.lanes import Lanes
from commplan.execute.lookout import Lookout, Place


class Health:
    """The first failure is final.

    Args:
        lookout: tells in errors where other ranks are.

    Attributes:
        where: in which backward this rank is, in words.
        host_wait: what the host waits for outside of the lanes, and since when (`time.perf_counter` seconds).
    """

    def __init__(self, lanes: Lanes, lookout: Lookout | None) -> None:
        self._lanes = lanes
        self._lookout = lookout
        self._checks: list[Check] = []
        self._failure: ExecutionError | None = None
        self._failing = _Failing(self)
        self.where = "after backward 0"
        self.host_wait: tuple[str, float] | None = None

    def watch(self) -> None:
        """Let other ranks know where this one is, from here on."""
        if self._lookout is not None:
            self._lookout.watch(self.place, self._lanes.fail)

    @property
    def failure(self) -> ExecutionError | None:
        """Why nothing can run any more, if so."""
        failure = self._failure or self._lanes.failure
        return failure if failure is None or isinstance(failure, ExecutionError) else ExecutionError(str(failure))

    @property
    def is_suspicious(self) -> bool:
        """Whether something failed, or the outcome of a rank check was not looked at."""
        return bool(self._checks) or self.failure is not None

    def raise_failure(self) -> None:
        """Raise if an earlier backward failed: nothing can run any more."""
        if (failure := self.failure) is not None:
            raise ExecutionError(
                f"an earlier backward failed ({failure}); its gradients are lost: end this job, or detach and attach again"
            ) from failure

    def fail(self, error: ExecutionError) -> ExecutionError:
        """Nothing can run any more because of `error`; what to raise instead, which says where the other ranks are."""
        if self._failure is None:
            can_tell = self._lookout is not None and not isinstance(error, DivergenceError)
            self._failure = self._lookout.explain(error) if can_tell and self._lookout is not None else error
            self._lanes.fail(self._failure)
        return self._failure

    def failing(self) -> AbstractContextManager[None]:
        """Inside, an ExecutionError is the end of this executor."""
        return self._failing

    def expect(self, check: Check) -> None:
        """Look at the outcome of `check` later."""
        self._checks.append(check)

    def settle(self, *, waits: bool) -> None:
        """Raise what comparing ranks has found since backward returned, where it did not wait for that.

        Args:
            waits: until the outcome is known.
        """
        while self._checks and (waits or self._checks[0].is_over):
            self._checks.pop(0).wait()

    def place(self) -> Place:
        """Where this rank is. May be called by any thread."""
        host_wait = self.host_wait
        return Place(self.where, (*self._lanes.in_flight(), *([host_wait] if host_wait is not None else [])))


class _Failing:
    """See `Health.failing`; a class, since it is entered several times for each module."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, ExecutionError) and (failure := self._health.fail(error)) is not error:
            raise failure from error
