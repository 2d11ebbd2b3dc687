"""Make the pictures of README and docs: a terminal session as SVG, the report and the live page as PNG.

    python tools/take_pictures.py FOLDER [--lab LAB]      # `make pictures` writes to docs/

Without --lab, the quickstart is run first. Pictures of pages need chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

LOOPLAB = str(Path(sys.executable).with_name("looplab"))
COLUMNS, ROWS = 110, 60
SHOWN = ["check", "status", "show BEST", "diff 1 BEST"]
"""Commands of the terminal's picture."""
LONGEST = 14
"""Lines of a command's output that are shown."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def printed_on_a_terminal(words: list[str], lab: Path) -> str:
    """Return what a command prints on a terminal, with its colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PWD": str(lab)}
    process = subprocess.Popen([LOOPLAB, *words], cwd=lab, stdout=slave, stderr=slave, stdin=slave, env=env)
    os.close(slave)
    found = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(master, 65_536):
            found += part
    os.close(master)
    if process.wait() != 0:
        raise SystemExit(f"looplab {' '.join(words)}: exit code {process.returncode}\n{found.decode(errors='replace')}")
    return found.decode(errors="replace").replace("\r\n", "\n").replace(str(lab), "~/digits")


def terminal_picture(lab: Path, commands: list[str]) -> str:
    """Return an SVG of the commands and what they print; it needs no font from the network."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in commands:
            console.print(Text.assemble(("$ ", "bold green"), (f"looplab {command}", "bold")))
            lines = printed_on_a_terminal(command.split(), lab).rstrip().split("\n")
            for line in lines[:LONGEST]:
                console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis", crop=True)
            if len(lines) > LONGEST:
                console.print(Text(f"… {len(lines) - LONGEST} more lines", style="dim"))
            console.print()
        svg = console.export_svg(title="looplab")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")


def screenshot(address: str, target: Path, width: int, height: int) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("pictures of pages need chromium (`make browser`)")
    with tempfile.TemporaryDirectory() as profile:
        words = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "--virtual-time-budget=6000", f"--screenshot={target}", address,
        ]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, timeout=180)


def page_picture(lab: Path, target: Path) -> None:
    """Serve the live page as `looplab ui` does, and take its picture."""
    words = [LOOPLAB, "ui", "--lab", str(lab), "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            screenshot(json.loads(server.stdout.readline())["url"], target, 1280, 900)
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lab", type=Path, help="a lab whose study is done (default: the quickstart is run)")
    parser.add_argument(
        "--only", nargs="*", choices=["terminal", "report", "page"], default=["terminal", "report", "page"]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="looplab-pictures-") as scratch:
        lab = options.lab.resolve() if options.lab else Path(scratch) / "digits"
        if options.lab is None:
            subprocess.run([LOOPLAB, "init", "quickstart", str(lab)], check=True)
            subprocess.run([LOOPLAB, "run", "--lab", str(lab)], check=True)
        if "terminal" in options.only:
            (options.folder / "terminal.svg").write_text(terminal_picture(lab, SHOWN), encoding="utf-8")
        if "report" in options.only:
            subprocess.run([LOOPLAB, "report", "--lab", str(lab)], check=True, stdout=subprocess.DEVNULL)
            report = next(lab.glob("outputs/*/report.html"))
            screenshot(report.as_uri(), (options.folder / "report.png").resolve(), 1280, 900)
        if "page" in options.only:
            page_picture(lab, (options.folder / "page.png").resolve())
    print(*(options.folder / name for name in ("terminal.svg", "report.png", "page.png")), sep="\n")


if __name__ == "__main__":
    main()
