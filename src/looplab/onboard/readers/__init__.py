"""The readers, in the order in which they are asked: the most specific first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from looplab import plugins
from looplab.onboard.base import Interface, InterfaceReader, Script, ScriptSetting
from looplab.onboard.checks import within_checks
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.absl import AbslReader
from looplab.onboard.readers.arguments import ArgparseReader
from looplab.onboard.readers.click import ClickReader
from looplab.onboard.readers.config_file import ConfigFileReader, FixedFileReader
from looplab.onboard.readers.constants import ConstantsReader
from looplab.onboard.readers.dataclass import DataclassReader
from looplab.onboard.readers.environment import EnvironmentReader
from looplab.onboard.readers.fire import FireReader
from looplab.onboard.readers.getopt import GetoptReader
from looplab.onboard.readers.gin import GinReader
from looplab.onboard.readers.global_names import GlobalsReader
from looplab.onboard.readers.help_text import HelpTextReader
from looplab.onboard.readers.hydra import HydraReader
from looplab.onboard.readers.key_value import KeyValueReader
from looplab.onboard.readers.lightning import LightningReader
from looplab.onboard.readers.makefile import MakefileReader
from looplab.onboard.readers.pydantic_settings import PydanticSettingsReader
from looplab.onboard.readers.python_config import PythonConfigReader
from looplab.onboard.readers.shell import ShellReader
from looplab.onboard.readers.shell_options import ShellOptionsReader
from looplab.onboard.readers.wandb_config import WandbConfigReader

BUILT_IN: tuple[type[InterfaceReader], ...] = (
    HydraReader,
    LightningReader,
    DataclassReader,
    PydanticSettingsReader,
    GinReader,
    ClickReader,
    AbslReader,
    FireReader,
    KeyValueReader,
    PythonConfigReader,
    ConfigFileReader,
    ArgparseReader,
    GetoptReader,
    GlobalsReader,
    ShellOptionsReader,
    ShellReader,
    MakefileReader,
    WandbConfigReader,
    EnvironmentReader,
    FixedFileReader,
    ConstantsReader,
    HelpTextReader,
)


def read_interface(script: Script, wanted: Collection[str] = ()) -> Interface | None:
    """Return how a script takes its settings; None if no reader knows.

    The readers of plug-ins are asked first, then looplab's own. The first that finds a hyper-parameter counts: a script
    may have flags for its paths, and its hyper-parameters elsewhere.

    Args:
        wanted: Names of hyper-parameters that are known, with underscores; empty: they are guessed.
    """
    notes: list[str] = []
    for name in plugins.names("readers"):
        try:
            plugin: InterfaceReader = plugins.make("readers", name)
            found = plugin.read(script)
        except Exception as error:  # noqa: BLE001 (a plug-in may raise anything)
            notes.append(f"the reader {name} failed: {type(error).__name__}: {error}")
            continue
        if found is not None:
            return replace(found, notes=(*found.notes, *notes))
    first: Interface | None = None
    for reader in BUILT_IN:
        found = reader().read(script)
        if found is not None and any(_is_hyper_parameter(setting, wanted) for setting in found.settings):
            return within_checks(script, replace(found, notes=(*found.notes, *notes)))
        first = first or found
    return None if first is None else within_checks(script, first)


def _is_hyper_parameter(setting: ScriptSetting, wanted: Collection[str]) -> bool:
    return setting.name.replace("-", "_") in wanted if wanted else suggest(setting).role == "knob"
