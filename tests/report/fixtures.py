"""What the tests of reports and of the live page share: studies to look at, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.report import browser as chromium
from tests.report import making as studies


@pytest.fixture
def making() -> ModuleType:
    return studies


@pytest.fixture
def maker(tmp_path: Path) -> Any:
    """A study without runs."""
    return studies.make(tmp_path / "lab")


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """A study with a judge and a held-out metric, without runs."""
    return studies.make(tmp_path / "judged", studies.JUDGED)


@contextmanager
def open_browser(profile: Path, kind: type[Any] = chromium.Browser) -> Iterator[Any]:
    """A browser, or a skipped test where there is none."""
    program = chromium.find_chromium()
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    opened = kind(program, profile)
    yield opened
    opened.close()
