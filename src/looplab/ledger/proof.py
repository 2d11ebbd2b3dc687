"""Compare the anchors of a ledger with its chain, and locate rewritten events."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from looplab.config.lab import AnchorConfig
from looplab.errors import LabError
from looplab.ledger.anchors import NOTES, TIMEOUT_S, Anchor, file_of, parse_anchors, signer_of
from looplab.ledger.backup import read_hashes
from looplab.ledger.catalogue import AnchoredEvent
from looplab.ledger.journal import Link
from looplab.ledger.ledger import Ledger
from looplab.ledger.replay import Discrepancy
from looplab.runs.git import git

SQLITE = b"SQLite format 3\0"
NO_ANCHOR = "no anchor: detects accidental damage and careless edits, not a deliberate rewrite"
HASH = re.compile(r"(?:([1-9][0-9]*):)?([0-9a-f]{12,64})")


@dataclass(slots=True)
class Proof:
    """The result of the comparison."""

    events: int
    """Number of events in the ledger."""
    anchors: int = 0
    """Number of events with a matching anchor."""
    up_to: int = 0
    """Last event with a matching anchor, which fixes all before it; 0: none."""
    findings: list[Discrepancy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if not self.anchors:
            return NO_ANCHOR
        later = "; later events are protected only against accidental change" if self.up_to < self.events else ""
        return f"compared with {self.anchors} anchor{'s' * (self.anchors > 1)} up to event {self.up_to}{later}"


def prove(
    ledger: Ledger,
    lab: Path,
    configs: Sequence[AnchorConfig],
    against: Sequence[str] = (),
    *,
    ledger_id: str | None = None,
    allowed: Path | None = None,
) -> Proof:
    """Compare the ledger with anchors; the chain itself must have been checked before (`audit`).

    Args:
        ledger: The ledger.
        lab: The lab.
        configs: The anchor settings of the lab file.
        against: Sources of anchors as given on the command line; empty: those of the lab file.
        ledger_id: Id of the expected ledger, if there are anchors of several. None: all anchors in `against` must be of
            this ledger; otherwise anyone who can append to them could rewrite the ledger under a new id.
        allowed: Allowed-signers file; only anchors with a valid signature count. None: signatures are not checked.

    Raises:
        LabError: A source cannot be read or has no anchors, or there is no such file of allowed signers.
    """
    if allowed is not None and not allowed.is_file():
        raise LabError("there is no such file of allowed signers", file=allowed)
    proof = Proof(ledger.head()[0])
    id_ = ledger.id()
    if ledger_id not in (None, id_):
        proof.findings.append(
            Discrepancy("anchor", "ledger", f"its id is {id_}, not {ledger_id}: the ledger was replaced")
        )
    sources = {given: read_anchors(given, lab) for given in against} or _configured(ledger, lab, configs, proof)
    anchors: dict[tuple[int | None, str], Anchor] = {}
    for name, found in sources.items():
        own = [anchor for anchor in found if anchor.ledger in (None, ledger_id or id_)]
        others = {anchor.ledger: anchor for anchor in found if anchor not in own}
        if others and ledger_id is None:
            last = "; ".join(f"{one.ledger} up to event {one.seq} on {one.at}" for one in others.values())
            why = f"there are anchors of another ledger than this one ({id_}): {last}"
            if against or not own:
                why += ". It was replaced, or they are of another lab: then choose with --ledger-id"
                proof.findings.append(Discrepancy("anchor", name, why))
            else:
                proof.notes.append(f"{name}: {why}; they were not compared")
        for anchor in own if allowed is None else _signed(own, allowed, proof):
            anchors[anchor.seq, anchor.hash] = anchor
    if allowed is not None and not anchors and not proof.findings:
        proof.findings.append(Discrepancy("anchor", str(allowed), "no anchor is signed"))
    if allowed is None and any(anchor.signature for anchor in anchors.values()):
        proof.notes.append("signatures were not checked; --allowed-signers FILE checks them")
    _compare(ledger, list(anchors.values()), proof)
    return proof


def read_anchors(given: str, lab: Path) -> list[Anchor]:
    """Read the anchors of one `--against` argument; at least one.

    Raises:
        LabError: The argument is invalid, or contains no anchor.
    """
    match = HASH.fullmatch(given.strip().lower())
    if match:
        return [Anchor(int(match[1]) if match[1] else None, match[2])]
    if given == "git" or given.startswith("git:"):
        found = _read_notes(lab, given.removeprefix("git").removeprefix(":") or NOTES)
    elif given.startswith("looplab-anchor"):
        found = parse_anchors(given)
    else:
        try:
            found = _read_file(Path(given).expanduser())
        except (OSError, sqlite3.DatabaseError) as error:
            raise LabError(
                f"cannot read {given!r}: {getattr(error, 'strerror', None) or error}",
                hint="give a hash of 12 to 64 hex digits, NUMBER:HASH, an anchor line, a file of them, a copy of the "
                "journal or of the ledger, or git",
            ) from None
    if not found:
        raise LabError(f"there is no anchor in {given!r}", hint="an anchor is a line that `looplab anchor` prints")
    return found


def _read_file(path: Path) -> list[Anchor]:
    """Return the anchors in a file; in a copy of the ledger or its journal, every event is an anchor."""
    with path.open("rb") as file:
        if file.read(len(SQLITE)) == SQLITE:
            return [Anchor(seq, digest) for seq, digest in read_hashes(path).items()]
    data = path.read_bytes()
    events = [link for line in data.splitlines() if (link := Link.parse(line)) is not None]
    return [Anchor(link.seq, link.hash) for link in events] or parse_anchors(data.decode(errors="replace"))


def _read_notes(lab: Path, ref: str) -> list[Anchor]:
    """Return all anchors that were ever in the notes, including those only in their history."""
    commit = git(lab, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", ok=True)
    if not commit:
        return []
    quiet = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-show-signature", "--no-relative")
    history = git(
        lab,
        "-c",
        "log.showRoot=true",
        "log",
        "-p",
        "-U0",
        "--text",
        "--format=",
        *quiet,
        commit,
        "--",
        timeout=TIMEOUT_S,
    )
    return parse_anchors(history)


def _configured(ledger: Ledger, lab: Path, configs: Sequence[AnchorConfig], proof: Proof) -> dict[str, list[Anchor]]:
    """Return the anchors at the targets of the lab file; those that the chain mentions must be present."""
    # Before the anchors: a running engine publishes first, then records.
    rows = ledger.rows("SELECT data FROM events WHERE kind=?", (AnchoredEvent.kind,))
    recorded = [orjson.loads(row["data"]) for row in rows]
    sources: dict[str, list[Anchor]] = {}
    for config in configs:
        if config.git:
            sources["git"] = _read_notes(lab, NOTES)
        path = file_of(lab, config)
        if path is not None:
            name = f"file {path}"
            try:
                sources[name] = parse_anchors(path.read_text(errors="replace"))
            except OSError as error:
                sources[name] = []
                proof.notes.append(f"{name} cannot be read: {error.strerror}")
    for name, found in sources.items():
        present = {(anchor.seq, anchor.hash) for anchor in found}
        missing = [one for one in recorded if name in one["where"] and (one["seq"], one["hash"]) not in present]
        if missing:
            fetch = f"; fetch the notes with `git fetch origin {NOTES}:{NOTES}`" if name == "git" else ""
            why = f"{len(missing)} anchor(s) in the chain are missing here, the first of event {missing[0]['seq']}"
            proof.findings.append(Discrepancy("anchor", name, why + fetch))
    return sources


def _signed(anchors: Sequence[Anchor], allowed: Path, proof: Proof) -> list[Anchor]:
    """Return the anchors with a valid signature of an allowed signer."""
    good = []
    unsigned = 0
    for anchor in anchors:
        if anchor.signature is None:
            unsigned += 1
            continue
        try:
            signer_of(anchor, allowed)
            good.append(anchor)
        except LabError as error:
            why = f"the anchor of {anchor.at} is not signed by an allowed signer: {error}"
            proof.findings.append(Discrepancy("anchor", f"event {anchor.seq}", why))
    if unsigned:
        proof.notes.append(f"{unsigned} anchor(s) without a signature were not counted")
    return good


def _compare(ledger: Ledger, anchors: Sequence[Anchor], proof: Proof) -> None:
    good: set[int] = set()
    bad: list[tuple[int, Anchor]] = []
    for anchor in anchors:
        if anchor.seq is None:
            row = ledger.one("SELECT seq FROM events WHERE substr(hash, 1, ?)=?", (len(anchor.hash), anchor.hash))
            if row is not None:
                good.add(row["seq"])
            else:
                why = "no event has this hash: the ledger was rewritten or cut off before it, or is another one"
                proof.findings.append(Discrepancy("anchor", anchor.hash, why))
            continue
        digest = ledger.hash_of(anchor.seq)
        if digest is not None and digest.startswith(anchor.hash):
            good.add(anchor.seq)
        else:
            bad.append((anchor.seq, anchor))
    proof.anchors, proof.up_to = len(good), max(good, default=0)
    if bad:
        proof.findings.append(_first_rewritten(bad, good, proof.events))


def _first_rewritten(bad: Sequence[tuple[int, Anchor]], good: Collection[int], events: int) -> Discrepancy:
    """Locate the rewrite as closely as the anchors allow: after the last match, up to the first mismatch. Later anchors
    may match again, if the lab continued to publish after the rewrite."""
    seq, first = min(bad, key=lambda one: one[0])
    when = f"anchored on {first.at}" if first.at else f"known by the hash {first.hash[:16]}"
    before = max((n for n in good if n < seq), default=0)
    last = f"the last anchor before it that matches is event {before}" if before else "no anchor before it matches"
    if seq > events:
        why = f"the end is cut off: event {seq} was {when}, the ledger ends at event {events}"
        return Discrepancy("anchor", f"event {seq}", f"{why}; {last}, so {before + 1}–{seq} are missing or rewritten")
    why = f"event {seq} is not the one that was {when}; {last}, so "
    why += "it is the first that was rewritten" if before == seq - 1 else f"the rewriting lies in {before + 1}–{seq}"
    return Discrepancy("anchor", f"event {seq}", why)
