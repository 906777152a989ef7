"""A step that is on its way into a CUDA graph, and what it plans outside of that graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tritonattn.backends import GraphPlan


class GraphStep:
    """What the runs of one step have in common: those that warm its graph up, and its capture.

    A replay makes the host's plan before the graph, so there can be one, for metadata that the step
    does not write itself.

    Parameters
    ----------
    kept : dict
        Memory of backends for plans without a stage, shared by the sizes of a step.
    """

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept
        self.made: GraphPlan | None = None
        self._key: Any = None
        self.can_plan = True  # on the host, in this run

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the step inside a `with` block."""
        self.can_plan = True
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def metadata_is_written(self) -> None:
        """Say that a replay would plan for what stood there before."""
        self.can_plan = False

    def take(self, key: Any, make: Callable[[], GraphPlan | None]) -> GraphPlan | None:
        """Return the plan that an earlier run made for the same call, or make it.

        None if the backend needs none.
        """
        plan = self.made if self.made is not None and key == self._key else make()
        if plan is not None:
            self._key, self.made, self.can_plan = key, plan, False
        return plan


_current: ContextVar[GraphStep | None] = ContextVar("tritonattn_graph_step", default=None)


def current() -> GraphStep | None:
    """Return the step that a call is part of, if it is on its way into a graph."""
    return _current.get()
