"""A headless Chromium of this machine, driven with Playwright; none is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowserError(RuntimeError):
    """There is none; the message says what to install."""


@contextmanager
def browser() -> Iterator[Any]:
    """A started browser (`playwright.sync_api.Browser`), ended with the context.

    Raises:
        NoBrowserError: no Chromium is on PATH, or Playwright is not installed.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise NoBrowserError("no Chromium is on PATH (Debian: apt-get install --no-install-recommends chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise NoBrowserError("Playwright is not installed (pip install playwright)") from error
    with sync_playwright() as driver:
        # Root may not use Chromium's sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=path, args=arguments, timeout=120_000)
        try:
            yield started
        finally:
            started.close()
