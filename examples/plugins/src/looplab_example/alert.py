"""An alert: appends the alarm to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FileAlert:
    """Options: the path of the file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def send(self, alarm: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"{alarm['study']} {alarm.get('run', '-')}: {alarm['text']}\n")
