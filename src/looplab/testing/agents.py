"""The contract of agent adapters: see `looplab.agents.base`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.agents.base import AgentAdapter, AgentSpec, End, Request
from looplab.testing.sources import INHERITED

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class AgentContract:
    """What every adapter guarantees. Subclasses define `make_adapter`, and `stream` if the agent prints JSON lines."""

    spec: dict[str, Any] = {}  # noqa: RUF012 (subclasses replace it)
    """Settings that the agent needs, as in the lab file."""
    stream: tuple[str, ...] = ()
    """The lines of one successful call."""

    def make_adapter(self) -> AgentAdapter:
        """Return the adapter."""
        raise NotImplementedError

    def _spec(self, **more: Any) -> AgentSpec:
        return AgentSpec("under-test", **{**self.spec, **more})

    def test_it_is_an_adapter_with_a_program(self) -> None:
        adapter = self.make_adapter()
        assert isinstance(adapter, AgentAdapter)
        assert adapter.find_program(self._spec())
        adapter.check(self._spec())

    def test_the_command_line_is_a_list_of_texts(self, tmp_path: Path) -> None:
        adapter = self.make_adapter()
        prompt_file = tmp_path / "prompt.md" if adapter.wants_prompt_file(self._spec()) else None
        for request in (Request(prompt_file=prompt_file), Request(resume="id-1", prompt_file=prompt_file)):
            argv = adapter.argv(self._spec(), request)
            assert isinstance(argv, list)
            assert all(isinstance(part, str) and "\0" not in part for part in argv)

    def test_the_model_and_further_arguments_reach_the_command_line(self) -> None:
        argv = self.make_adapter().argv(self._spec(extra_args=("--further", "argument")), Request())
        assert [part for part in argv if part in ("--further", "argument")] == ["--further", "argument"]

    @settings(max_examples=100, deadline=None, suppress_health_check=INHERITED)
    @given(record=st.dictionaries(st.text() | st.sampled_from(["type", "msg", "message", "usage"]), JSON, max_size=6))
    def test_no_line_makes_it_fail(self, record: dict[str, Any]) -> None:
        assert isinstance(self.make_adapter().events(record), list)

    def test_the_stream_of_a_call_ends_well(self) -> None:
        adapter = self.make_adapter()
        events = [event for line in self.stream for event in adapter.events(json.loads(line))]
        if not adapter.prints_text:
            ends = [event for event in events if isinstance(event, End)]
            assert [end.ok for end in ends] == [True], "`stream` must be one successful call"
