"""Bounds that a script checks itself limit the ranges of its knobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script

PARSER = """
import argparse, sys
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default=0.5)
p.add_argument("--hidden-size", type=int, default=64)
args = p.parse_args()
"""


def bounds(folder: Path, code: str) -> dict[str, tuple[float | None, float | None]]:
    (folder / "train.py").write_text(PARSER + code)
    interface = read_interface(find_script([sys.executable, "train.py"], folder))
    assert interface is not None
    return {setting.name: (setting.low, setting.high) for setting in interface.settings}


@pytest.mark.parametrize(
    ("code", "lr", "size"),
    [
        ("assert 0.1 <= args.lr <= 0.9", (0.1, 0.9), (None, None)),
        ("assert args.hidden_size > 15 and args.lr <= 1", (None, 1.0), (16, None)),
        ("if args.hidden_size > 128 or args.hidden_size < 16:\n    p.error('no')", (None, None), (16, 128)),
        ("if not 0.1 <= args.lr <= 0.9:\n    raise ValueError(args.lr)", (0.1, 0.9), (None, None)),
        ("if args.lr >= 1 and args.hidden_size > 128:\n    sys.exit('no')", (None, None), (None, None)),
        ("if 256 < args.hidden_size:\n    sys.exit('no')", (None, None), (None, 256)),
        ("if args.hidden_size > 32:\n    print('large')", (None, None), (None, None)),
        ("def f(args):\n    assert args.lr < 0.1", (None, None), (None, None)),  # not of this lr: its default is larger
    ],
)
def test_checks_after_parsing(tmp_path: Path, code: str, lr: object, size: object) -> None:
    assert bounds(tmp_path, code) == {"lr": lr, "hidden-size": size}
