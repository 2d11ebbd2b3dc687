"""`tour.html`: one self-contained page about all versions. It runs no script; untrusted text is escaped."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from looplab.iterate.gates import section
from looplab.iterate.overview import VersionFacts, gates_in_words, text_of, verdict_of
from looplab.iterate.settings import IterateConfig
from looplab.report.bundle import content_hash

PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
MAX_PICTURE = 2 << 20
"""Bytes."""
MAX_PICTURES = 6
"""Per version."""
MAX_TEXT = 400_000
"""Bytes read from a document or script."""
MAX_DIFF = 300
"""Lines of a diff that are shown."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 260, 64, 34, 14
STYLE = """
:root { --back: #f6f7f8; --card: #fff; --line: #e2e5e9; --text: #1c2228; --muted: #626d78; --accent: #c2500a;
  --good: #0a7d5a; --bad: #b3362b; --warn: #8a6100; --dot: #2c6da8; }
@media (prefers-color-scheme: dark) { :root { --back: #12161a; --card: #1a1f25; --line: #2c343c; --text: #e4e9ee;
  --muted: #97a3af; --accent: #ffa45c; --good: #4fcfa4; --bad: #ff8a7c; --warn: #e3b64d; --dot: #6faada; } }
html { background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 20px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px;
  margin: 12px 0; }
h1 { font-size: 21px; } h2 { font-size: 16px; margin: 0 0 6px; } h3 { font-size: 13px; margin: 12px 0 2px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 2px 14px 2px 0; vertical-align: top; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 12px; max-height: 420px; overflow: auto; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; } .muted { color: var(--muted); }
.keep { color: var(--good); } .discard, .void, .crash { color: var(--bad); } .inconclusive { color: var(--warn); }
img { max-width: 100%; border: 1px solid var(--line); margin: 6px 6px 0 0; } svg { max-width: 100%; }
svg text { fill: var(--muted); font-size: 11px; } .axis { stroke: var(--line); }
.dot { fill: var(--dot); stroke: var(--dot); } .best { fill: var(--accent); stroke: var(--accent); }
.add { color: var(--good); } .del { color: var(--bad); }
"""


@dataclass(frozen=True, slots=True)
class ScriptDiff:
    """Diff of a script against the previous version's."""

    added: int
    removed: int
    lines: tuple[str, ...]
    """The first lines of the diff."""


def tour(lab: Path, settings: IterateConfig, versions: Sequence[VersionFacts]) -> str:
    """Return the page as HTML."""
    policy = (
        f"default-src 'none'; style-src '{content_hash(STYLE)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    metric, goal = settings.evaluate.metric, settings.evaluate.goal
    experiments = lab / settings.experiments
    parts = [_chart(versions, metric), _table(versions, metric)]
    existing = sorted(int(path.name[1:]) for path in experiments.glob("v*") if path.name[1:].isdigit())
    for facts in versions:
        before = [number for number in existing if number < facts.version]
        folder = experiments / f"v{facts.version}"
        parts.append(_version(facts, folder, experiments / f"v{before[-1]}" if before else None, settings))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Versions of {escape(lab.name)}</title>\n<style>{STYLE}</style>\n</head>\n<body><main>\n"
        f"<h1>Versions of {escape(lab.name)}</h1>\n"
        f'<p class="muted">{escape(metric)} ({goal}) by the frozen evaluation, with 95 % intervals over its episodes. '
        "What versions report about themselves is shown, but never used.</p>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _chart(versions: Sequence[VersionFacts], metric: str) -> str:
    drawn = [facts for facts in versions if facts.value is not None]
    if not drawn:
        return '<section><p class="muted">Nothing has been measured yet.</p></section>'
    ends = [end for facts in drawn for end in (facts.value, facts.low, facts.high) if end is not None]
    low, high = min(ends), max(ends)
    margin = (high - low or abs(high) or 1.0) * 0.08
    low, high = low - margin, high + margin
    first, last = versions[0].version, versions[-1].version

    def x(version: int) -> float:
        return LEFT + (WIDTH - LEFT - 20) * ((version - first + 0.5) / (last - first + 1))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    marks = []
    for step in range(5):
        value = low + (high - low) * step / 4
        marks.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for facts in versions:
        at = x(facts.version)
        marks.append(f'<text x="{at:.1f}" y="{HEIGHT - 12}" text-anchor="middle">v{facts.version}</text>')
        if facts.value is None:
            marks.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM - 4}" text-anchor="middle">×</text>')
            continue
        kind = "best" if facts.champion else "dot"
        if facts.low is not None and facts.high is not None:
            ends_ = f'y1="{y(facts.low):.1f}" y2="{y(facts.high):.1f}"'
            marks.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" {ends_} stroke-width="2"/>')
        label = escape(f"v{facts.version}: {facts.value:.4g}, {verdict_of(facts)}")
        marks.append(
            f'<circle class="{kind}" cx="{at:.1f}" cy="{y(facts.value):.1f}" r="4"><title>{label}</title></circle>'
        )
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'
    return f"<section><h2>{escape(metric)} by version</h2>{picture}</section>"


def _table(versions: Sequence[VersionFacts], metric: str) -> str:
    rows = []
    for facts in versions:
        verdict = verdict_of(facts)
        cells = [f"v{facts.version}{' (champion)' if facts.champion else ''}", facts.state, str(facts.attempts),
                 number_with_interval(facts), gates_in_words(facts)]  # fmt: skip
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr>{row}<td class="{escape(verdict)}">{escape(verdict)}</td></tr>')
    head = "".join(f"<th>{escape(name)}</th>" for name in ("version", "state", "attempts", metric, "gates", "verdict"))
    return f"<section><table><tr>{head}</tr>{''.join(rows)}</table></section>"


def number_with_interval(facts: VersionFacts) -> str:
    if facts.value is None:
        return "-"
    if facts.low is None or facts.high is None:
        return f"{facts.value:.4g}"
    return f"{facts.value:.4g} [{facts.low:.4g}, {facts.high:.4g}]"


def _version(facts: VersionFacts, folder: Path, before: Path | None, settings: IterateConfig) -> str:
    name = f"v{facts.version}"
    verdict = verdict_of(facts)
    shown = "" if verdict == "-" else f' <span class="{escape(verdict)}">{escape(verdict)}</span>'
    parts = [f'<h2 id="{name}">{name}{shown}</h2>']
    reason = str(facts.ruling.get("why") or facts.why)
    where = " ".join(filter(None, (facts.branch, facts.commit[:10])))
    parts.append(f'<p>{escape(reason)} <span class="muted">{escape(where)}</span></p>')
    if facts.reasons:
        parts.append(f"<h3>Findings of the gates</h3><pre>{escape(chr(10).join(facts.reasons))}</pre>")
    change = compare(before / "train.py", folder / "train.py") if before is not None and folder.is_dir() else None
    if change is not None and before is not None:
        parts.append(_change(change, before.name))
    for headings in settings.sections[-1:]:
        if body := section(text_of(folder / f"dev_{name}.md", MAX_TEXT), headings):
            parts.append(f'<h3>{escape(headings[0])}</h3><div class="text">{escape(body)}</div>')
    parts.extend(_pictures(folder))
    return f"<section>{''.join(parts)}</section>"


def compare(old: Path, new: Path) -> ScriptDiff | None:
    """Return the diff of two scripts; None if one is missing."""
    if not old.is_file() or not new.is_file():
        return None
    before, after = (text_of(path, MAX_TEXT).splitlines() for path in (old, new))
    diff = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
    return ScriptDiff(added, removed, tuple(diff[:MAX_DIFF]))


def _change(change: ScriptDiff, before: str) -> str:
    kinds = {"+": "add", "-": "del"}
    lines = (
        f'<span class="{kinds[line[0]]}">{escape(line)}</span>' if line[:1] in kinds else escape(line)
        for line in change.lines
    )
    summary = f"train.py against {escape(before)}: +{change.added} −{change.removed} lines"
    return f"<h3>What changed</h3><details><summary>{summary}</summary><pre>{chr(10).join(lines)}</pre></details>"


def _pictures(folder: Path) -> list[str]:
    """Return plots and animations as inline images."""
    found = [path for name in ("plots", "media") for path in sorted((folder / "artifacts" / name).rglob("*"))]
    shown: list[str] = []
    for path in found:
        kind = PICTURES.get(path.suffix.lower())
        inside = not path.is_symlink() and path.is_file() and path.resolve().is_relative_to(folder.resolve())
        if kind and inside and path.stat().st_size < MAX_PICTURE and len(shown) < MAX_PICTURES:
            data = base64.b64encode(path.read_bytes()).decode()
            name = escape(str(path.relative_to(folder)), quote=True)
            shown.append(f'<img alt="{name}" title="{name}" src="data:{kind};base64,{data}">')
    return shown
