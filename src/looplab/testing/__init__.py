"""Contract tests for plug-ins: subclass one in a test file, and run pytest.

    from looplab.testing import SourceContract

    class TestTsv(SourceContract):
        def open_source(self, path):
            return TsvSource(path)

        def encode(self, rows):
            ...

`docs/extend.md` lists what each contract asks for. Needs pytest and hypothesis: `pip install 'looplab[testing]'`.
"""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in ("agents", "executors", "proposers", "readers", "samplers", "sources", "watching")
    )
)

from looplab.testing.agents import AgentContract  # noqa: E402
from looplab.testing.executors import ExecutorContract  # noqa: E402
from looplab.testing.proposers import ProposerContract  # noqa: E402
from looplab.testing.readers import ReaderContract  # noqa: E402
from looplab.testing.samplers import SamplerContract  # noqa: E402
from looplab.testing.sources import SourceContract  # noqa: E402
from looplab.testing.watching import AlertContract, ConditionContract  # noqa: E402

__all__ = [
    "AgentContract", "AlertContract", "ConditionContract", "ExecutorContract", "ProposerContract", "ReaderContract",
    "SamplerContract", "SourceContract",
]  # fmt: skip
