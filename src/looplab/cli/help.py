"""The help page: commands in groups, each with an example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    import typer

GROUPS = {
    "Set up": {
        "init": "looplab init train.py --objective val_loss",
        "try": "looplab try --set epochs=1",
        "objective": "looplab objective val_loss --min",
        "demo": "looplab demo",
        "check": "looplab check",
        "doctor": "looplab doctor",
        "recipe": "looplab recipe esm",
        "fetch-config": "looplab fetch-config --entity team --project robot --run 3f8a1c",
    },
    "Run": {
        "run": "looplab run --rounds 3 --gpus 0,1",
        "plan": "looplab plan --commands",
        "resume": "looplab resume --detach",
        "attach": "looplab attach",
        "stop": "looplab stop --drain",
        "submit": "looplab submit -- python train.py --lr 0.1",
        "probe": "looplab probe --exec",
    },
    "Steer": {
        "propose": "looplab propose --change train.lr@mul=0.5 --reason 'the loss is noisy'",
        "edit": "looplab edit configs/base.json --change train.lr@set=0.01",
        "pause": "looplab pause",
        "veto": "looplab veto 12 --why 'the evaluation was broken'",
        "import": "looplab import old_runs --map val_loss=val/loss",
    },
    "Look": {
        "ui": "looplab ui --port 8000",
        "status": "looplab status",
        "top": "looplab top --since 8h",
        "show": "looplab show BEST",
        "logs": "looplab logs LATEST --follow",
        "diff": "looplab diff 3 BEST",
        "compare": "looplab compare 3 7 BEST --html compare.html",
        "report": "looplab report",
        "query": "looplab query 'SELECT id, objective FROM runs ORDER BY objective LIMIT 5'",
        "export": "looplab export --parquet tables",
        "analyze": "looplab analyze offline --outputs-root outputs",
    },
    "Judge and reproduce": {
        "reproduce": "looplab reproduce BEST",
        "remeasure": "looplab remeasure",
    },
    "Record": {
        "verify": "looplab verify",
        "anchor": "looplab anchor --file anchors.txt",
        "reindex": "looplab reindex",
        "restore": "looplab restore",
    },
    "Pipelines": {
        "stage": "looplab stage --config configs/esm.yaml mine select",
        "suite": "looplab suite --config suites/main.yaml --slots 2",
        "case": "looplab case --config configs/esm.yaml --example-ids 0,6",
    },
    "Agents": {
        "autopilot": "looplab autopilot --runs 10",
        "say": "looplab say 'keep the batch size'",
        "agent-log": "looplab agent-log --only commands",
        "iterate": "looplab iterate 2 4",
        "tour": "looplab tour",
    },
}
"""Group → command → an example."""
EXAMPLES = {command: example for group in GROUPS.values() for command, example in group.items()}


class GroupedCommands(TyperGroup):
    """A group of commands whose help lists them by `GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(name, self.commands[name]) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), command.get_short_help_str(formatter.width)) for name, command in rows]
                )


def add_examples(app: typer.Typer) -> None:
    """Put the example of each command below its help."""
    for info in app.registered_commands:
        info.epilog = f"Example: {EXAMPLES[_name_of(info)]}"


def keep_only(app: typer.Typer, name: str) -> None:
    """Drop all commands but this one, if there is one of this name: building the parsers of all takes longer than most
    commands."""
    app.registered_commands = [info for info in app.registered_commands if _name_of(info) == name] or (
        app.registered_commands
    )


def _name_of(info: Any) -> str:
    return info.name or (info.callback.__name__ if info.callback else "")
