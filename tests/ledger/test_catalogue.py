"""The catalogue of events is complete, is what is recorded, and is documented."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import looplab
from looplab.ledger import catalogue
from looplab.ledger.ledger import Ledger, link
from looplab.ledger.roles import Origin, Role

sys.path.insert(0, str(Path(__file__).parent))
import event_page

ROOT = Path(looplab.__file__).parent


def test_the_page_about_events_is_generated_from_the_catalogue() -> None:
    assert event_page.PAGE.read_text() == event_page.render(), "run `python tests/ledger/event_page.py`"


def test_every_kind_has_a_class_a_meaning_and_a_place_in_the_page() -> None:
    page = event_page.PAGE.read_text()
    for kind, cls in catalogue.CATALOGUE.items():
        assert cls.kind == kind
        assert cls.__doc__
        assert f"### {kind}\n" in page
    assert set(catalogue.CATALOGUE.values()) == {cls for name, cls in vars(catalogue).items() if name.endswith("Event")}


def test_no_module_appends_events_past_the_catalogue() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr == "append_event" and file.name != "ledger.py")
            or (node.func.attr == "record" and node.args and isinstance(node.args[0], ast.Constant))
        )
    ]
    assert wrong == []


def test_kinds_that_are_read_are_in_the_catalogue() -> None:
    for name in ("ledger/view.py", "ledger/replay.py", "ledger/audit.py", "ledger/schema.py"):
        text = (ROOT / name).read_text()
        read = re.findall(r"kind ?= ?'([^']+)'", text)
        read += [kind for group in re.findall(r"kind IN \(([^)]+)\)", text) for kind in re.findall(r"'([^']+)'", group)]
        read += [
            kind for case in re.findall(r"^ +case (\".*):$", text, re.M) for kind in re.findall(r'"([^"]+)"', case)
        ]
        assert set(read) <= set(catalogue.CATALOGUE), name


def test_an_event_has_its_required_fields_and_those_optional_ones_that_have_a_value(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    with ledger.write():
        ledger.record(catalogue.AlarmEvent(text="look", keys=["x"]), "s", "0001-a")
        ledger.record(catalogue.BestEvent(objective=None), "s", when=5.0)
        ledger.record(catalogue.ToldEvent(), "s")
    events = list(ledger.events())
    assert [event.data for event in events] == [{"text": "look", "keys": ["x"]}, {"objective": None}, {}]
    assert [(event.kind, event.run) for event in events] == [("alarm", "0001-a"), ("best", None), ("told", None)]
    assert events[1].at == 5.0
    assert ledger.first_broken_link() is None


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(TypeError):
        catalogue.BestEvent()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        catalogue.ToldEvent(by="me")  # type: ignore[call-arg]


def test_secrets_are_hidden_unless_the_kind_is_known_to_have_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    secret = "ghp_" + "a1B2c3D4e5" * 4
    with ledger.write():
        ledger.record(catalogue.SaidEvent(text=f"use {secret}"), "s")
    (event,) = ledger.events()
    assert secret not in json.dumps(event.data)


def test_roles_and_origins_are_recorded_as_their_texts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    event = catalogue.PlannedEvent(
        n=1, round=1, proposal=None, proposer=Origin.JUDGE, parent=None, base="b", config="c", role=Role.CONTROL,
        reason="", devices=1, point="c", seed=None, plan="p",
    )  # fmt: skip
    with ledger.write():
        ledger.record(event, "s", "0001-a", when=1.0)
    row = ledger.rows("SELECT * FROM events")[0]
    data = (
        '{"base":"b","config":"c","devices":1,"n":1,"parent":null,"plan":"p","point":"c","proposal":null,'
        '"proposer":"judge","reason":"","role":"control","round":1,"seed":null}'
    )
    assert row["data"] == data
    assert row["hash"] == link("0" * 64, 1, 1.0, "planned", "s", "0001-a", data)


def test_an_origin_is_known_by_the_name_in_the_column() -> None:
    assert Origin.of("watch") is Origin.WATCH
    assert Origin.of("search") is Origin.PROPOSER
    assert [origin for origin in Origin if origin.is_person] == [Origin.QUEUE, Origin.PERSON]
