"""What the model of the search predicts along each knob, as JSON: the live page runs this in a separate process.

    python -m looplab.cli.slices LAB STUDY

Fitting the model needs numpy and scipy, which would triple the memory of a server that is open all day.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from looplab.cli.labs import find_study, open_for_reading, open_lab
from looplab.decide.history import History
from looplab.errors import LabError
from looplab.ledger.view import StudyView
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions, agent_search
from looplab.runs.folder import study_folder
from looplab.untrusted import dump_json


def belief_slices(folder: Path, name: str) -> dict[str, Any]:
    """Return the slices of a study under `belief`; None if there is no model yet.

    Raises:
        LabError: The study cannot be read, or its search cannot be made.
    """
    lab = open_lab(folder)
    study, ledger = find_study(lab, name), open_for_reading(lab)
    setup = check_study(lab, study, RunOptions(informal=True))
    record = StudyView(ledger, study.name)
    history = History(record, study_folder(lab.folder, study.name), setup.conditions, study.objective)
    search = agent_search(setup, history)
    return {"belief": None if search is None else search.belief_slices(record)}


def main() -> None:
    folder, name = sys.argv[1:]
    try:
        found = belief_slices(Path(folder), name)
    except LabError as error:
        found = {"error": str(error)}
    sys.stdout.write(dump_json(found))


if __name__ == "__main__":
    main()
