"""Old names of lab-file keys, accepted until the next release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    ("launch", "linger"): "cleanup_timeout",
    ("judge", "floor"): "baseline_seeds",
    ("judge", "most"): "max_replicates",
}
"""(section, old key) → new key."""


def rename_keys(study: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, str], str]]:
    """Return a study's block with the new names, and the old names that it had.

    An old name next to its new name is kept and rejected later as an unknown key.
    """
    renamed = dict(study)
    found = {}
    for (section, old), new in RENAMED.items():
        block = renamed.get(section)
        if isinstance(block, dict) and old in block and new not in block:
            renamed[section] = {new if key == old else key: value for key, value in block.items()}
            found[section, old] = new
    return renamed, found
