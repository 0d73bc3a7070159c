"""A headless Chromium for the tests of pages. Without one they are skipped, unless COMMPLAN_NEEDS_BROWSER is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_run.chromium import NoBrowserError
from demo_run.chromium import browser as start

from tests.picture.asking import frame, write_report

VIEWPORT = {"width": 1200, "height": 900}

Open = Callable[..., Any]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            started = stack.enter_context(start())
        except NoBrowserError as error:
            if os.environ.get("COMMPLAN_NEEDS_BROWSER"):
                pytest.fail(f"COMMPLAN_NEEDS_BROWSER is set, but {error}")
            pytest.skip(f"needs a browser: {error}")
        yield started


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file in a window of its own; in the end nothing may have been asked of a network, nor any fault logged."""
    contexts: list[Any] = []
    asked: list[str] = []
    faults: list[str] = []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": VIEWPORT, "reduced_motion": "reduce", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            frame(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # How slow it is to read canvases is about tests, which do.
    assert [fault for fault in faults if "getImageData" not in fault] == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in asked) == len(contexts)
