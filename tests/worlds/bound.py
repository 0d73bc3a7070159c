"""Every backward of every case: no more communication memory than its plan declares."""

from __future__ import annotations

from typing import Any

from commplan.execute import executor
from commplan.sight.report import BackwardReport


def watch() -> None:
    """From here on a backward of this process raises at its end if it took more."""
    executor.BackwardReport = _checked  # type: ignore[misc, assignment]


def _checked(*args: Any) -> BackwardReport:
    report = BackwardReport(*args)
    assert report.peak_bytes <= report.declared_peak_bytes, (
        f"peak of {report.peak_bytes} bytes, {report.declared_peak_bytes} declared, in backward {report.number}"
    )
    return report
