"""The readers, in the order in which they are asked: the most specific first."""

from __future__ import annotations

from looplab import plugins
from looplab.onboard.base import Interface, InterfaceReader, Script
from looplab.onboard.knobs import suggest
from looplab.onboard.readers.absl import AbslReader
from looplab.onboard.readers.arguments import ArgparseReader
from looplab.onboard.readers.click import ClickReader
from looplab.onboard.readers.config_file import ConfigFileReader
from looplab.onboard.readers.constants import ConstantsReader
from looplab.onboard.readers.dataclass import DataclassReader
from looplab.onboard.readers.environment import EnvironmentReader
from looplab.onboard.readers.fire import FireReader
from looplab.onboard.readers.global_names import GlobalsReader
from looplab.onboard.readers.hydra import HydraReader
from looplab.onboard.readers.key_value import KeyValueReader
from looplab.onboard.readers.lightning import LightningReader
from looplab.onboard.readers.shell import ShellReader
from looplab.onboard.readers.wandb_config import WandbConfigReader

BUILT_IN: tuple[type[InterfaceReader], ...] = (
    HydraReader,
    LightningReader,
    DataclassReader,
    ClickReader,
    AbslReader,
    FireReader,
    KeyValueReader,
    ConfigFileReader,
    ArgparseReader,
    GlobalsReader,
    ShellReader,
    WandbConfigReader,
    EnvironmentReader,
    ConstantsReader,
)


def read_interface(script: Script) -> Interface | None:
    """Return how a script takes its settings; None if no reader knows."""
    readers: list[InterfaceReader] = [plugins.make("readers", name) for name in plugins.names("readers")]
    readers += [reader() for reader in BUILT_IN]
    first: Interface | None = None
    for reader in readers:
        found = reader.read(script)
        if found is None:
            continue
        if any(suggest(setting).role == "knob" for setting in found.settings):
            return found
        first = first or found  # a script may have flags for its paths, and its hyper-parameters elsewhere
    return first
