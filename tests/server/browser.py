"""A headless Chromium, Debian's or any other that is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "the page's tests need Chromium: 'apt-get install chromium' or 'playwright install chromium', "
    "or name one in JAXSERVE_CHROMIUM"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Fails the test in CI where there is none, and skips it elsewhere."""
    with sync_playwright() as playwright:
        named = os.environ.get("JAXSERVE_CHROMIUM")
        found = named or next(filter(None, map(shutil.which, COMMANDS)), playwright.chromium.executable_path)
        if not Path(found).exists():
            if os.environ.get("CI"):
                pytest.fail(MISSING)
            pytest.skip(MISSING)
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # for whom Chromium has no sandbox
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if root else [])]
        with playwright.chromium.launch(executable_path=found, args=arguments) as browser:
            yield browser
