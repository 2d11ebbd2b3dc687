"""The page of the API runs as a script, block after block, as in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/api.md"


def test_the_page_of_the_api_runs_as_a_script(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks) + "\nprint(len(study.runs), len(frame))\n")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # what the engine froze would be reported as leaked by libraries, at the exit
    runs, rows = map(int, done.stdout.splitlines()[-1].split())
    assert runs == 16
    assert rows >= 12
