"""Make the pictures of README and docs: a recorded terminal session as SVG, the report and the live page as PNG.

    python tools/take_pictures.py FOLDER [--lab LAB]      # `make pictures` writes to docs/

Without --lab, the quickstart is run first. Pictures of pages need chromium. The recording shows the lines of the
session one after the other where CSS animations are drawn, as browsers do also for images, and all of them elsewhere.
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
SHOWN = ["check", "run", "show BEST", "diff 1 BEST"]
"""Commands of the recording."""
LONGEST = 14
"""Lines of a command's output that are shown."""
LAST = {"run": 19}
"""Lines of its end that are shown, too: what came out of it."""
TYPING_S, OUTPUT_S, PAUSE_S = 0.8, 0.06, 1.5
"""Seconds of the recording: until a command is typed, from one line of its output to the next, after the last."""
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
    return without_places(found.decode(errors="replace").replace("\r\n", "\n"), lab)


def terminal_picture(lab: Path, commands: list[str], printed: dict[str, str] | None = None) -> str:
    """Return an SVG of the commands and what they print; it needs no font from the network.

    Args:
        printed: what commands printed before; the others are run now.
    """
    times: list[float] = []
    now = 0.0
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in commands:
            now += TYPING_S
            times.append(now)
            console.print(Text.assemble(("$ ", "bold green"), (f"looplab {command}", "bold")))
            text = (printed or {}).get(command) or printed_on_a_terminal(command.split(), lab)
            for line in shortened(text.rstrip().split("\n"), LAST.get(command, 0)):
                now += OUTPUT_S
                times.append(now)
                console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
            console.print()
            times.append(now)
            now += PAUSE_S
        svg = console.export_svg(title="looplab")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    return one_line_after_the_other(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), times)


def shortened(lines: list[str], last: int) -> list[Text]:
    """Return the first lines, and the last ones if they are asked for, with the number of those in between."""
    shown = [Text.from_ansi(line) for line in lines]
    if len(lines) <= LONGEST + last:
        return shown
    left_out = Text(f"… {len(lines) - LONGEST - last} more lines", style="dim")
    return [*shown[:LONGEST], left_out, *(shown[-last:] if last else [])]


def one_line_after_the_other(svg: str, times: list[float]) -> str:
    """Return the SVG with an animation: each line appears at its time."""

    def animated(match: re.Match[str]) -> str:
        return f'{match[0]} style="animation: appear 1ms linear {times[min(int(match[1]), len(times) - 1)]:.2f}s both"'

    svg = re.sub(r'clip-path="url\(#[\w-]+-line-(\d+)\)"', animated, svg)
    rules = "@keyframes appear { from { opacity: 0 } to { opacity: 1 } }\n    "
    rules += "@media (prefers-reduced-motion: reduce) { text { animation: none !important } }\n    "
    return svg.replace("<style>", f"<style>\n    {rules}", 1)


def commit(lab: Path) -> None:
    """Put the lab in git, as most are."""
    who = ["-c", "user.name=looplab", "-c", "user.email=looplab@localhost"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "The first lab"]):
        subprocess.run(["git", *words], cwd=lab, check=True)


def printed_in_a_pipe(words: list[str], lab: Path) -> str:
    done = subprocess.run([LOOPLAB, *words], cwd=lab, stdout=subprocess.PIPE, text=True, check=True)
    return without_places(done.stdout, lab)


def without_places(text: str, lab: Path) -> str:
    """Replace the paths of this machine."""
    return text.replace(str(lab), "~/digits").replace(sys.executable, "python")


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
            commit(lab)
        printed = {"run": printed_in_a_pipe(["run"], lab)}
        if "terminal" in options.only:
            (options.folder / "terminal.svg").write_text(terminal_picture(lab, SHOWN, printed), encoding="utf-8")
        if "report" in options.only:
            subprocess.run([LOOPLAB, "report", "--lab", str(lab)], check=True, stdout=subprocess.DEVNULL)
            report = next(lab.glob("outputs/*/report.html"))
            screenshot(report.as_uri(), (options.folder / "report.png").resolve(), 1280, 900)
        if "page" in options.only:
            page_picture(lab, (options.folder / "page.png").resolve())
    print(*(options.folder / name for name in ("terminal.svg", "report.png", "page.png")), sep="\n")


if __name__ == "__main__":
    main()
