"""LightningCLI: the whole config is a YAML file, which `--print_config` writes."""

from __future__ import annotations

import ast

from looplab.onboard.base import Interface, Script
from looplab.onboard.introspect import ask
from looplab.onboard.readers.hydra import settings_in
from looplab.onboard.source import call_name, calls, constant, keyword

SUBCOMMANDS = ("fit", "validate", "test", "predict")


class LightningReader:
    """A script that makes a `LightningCLI`."""

    name = "LightningCLI"

    def read(self, script: Script) -> Interface | None:
        names = {"LightningCLI", "CLI", *_own_classes(script)}
        found = [call for tree in script.modules for call in calls(tree, *names)]
        if not found or not {"lightning", "pytorch_lightning"} & script.imports:
            return None
        runs = constant(keyword(found[0], "run")) is not False
        words = [word for word in script.arguments if word in SUBCOMMANDS] or (["fit"] if runs else [])
        rest = [word for word in script.arguments if word not in SUBCOMMANDS]
        config, problem = ask(script, [*words, *rest, "--print_config"])
        if config is None:
            return Interface(
                self.name, (), (*script.prefix, *words, *rest), notes=(f"`--print_config` failed: {problem}",)
            )
        base = {key: value for key, value in config.items() if value is not None}
        command = (*script.prefix, *words, "--config", "{config}")
        rendering = {"as": "file", "format": "yaml"}
        return Interface(self.name, tuple(settings_in(base)), command, rendering, base=base)


def _own_classes(script: Script) -> set[str]:
    """Return the classes of the project that are derived from `LightningCLI`."""
    return {
        node.name
        for tree in script.modules
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(call_name(base).endswith("LightningCLI") for base in node.bases)
    }
