"""CUDA graphs of a stage, one for each batch size: captured once, replayed for any step that fits.

Our kernels need nothing from the host between replays: the graphs plan from the stage's metadata
where it stands. What plans on the host, FlashInfer, is planned before the capture and again, in
place, before each replay. What was chosen at the capture stays chosen, as a graph cannot change its
mind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tritonattn import dispatch
from tritonattn.backends import GraphPlan
from tritonattn.graph_step import GraphStep
from tritonattn.staging import is_capturing

if TYPE_CHECKING:
    from tritonattn.stage import StageBuffers


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step for one batch size."""

    batch_size: int
    graph: torch.cuda.CUDAGraph
    result: Any  # what the step returned: tensors that each replay fills
    memory_bytes: int  # that the device had less of after the capture
    plan: GraphPlan | None  # to be made anew before each replay
    choices: tuple[dispatch.Choice, ...]
    asked: tuple[str, str]  # for which backend, by whom, outside the step


class StageGraphs:
    """The captured steps of a stage; made by `StageBuffers.capture`."""

    def __init__(
        self,
        stage: StageBuffers,
        step: Callable[[int], Any],
        steps: dict[int, CapturedStep],
        pool: Any,
    ) -> None:
        self.steps = dict(sorted(steps.items()))
        self.pool = pool  # of memory, for another capture to share
        # The graphs read and write what these own.
        self._stage, self._step = stage, step

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Return what each capture took from the device, by batch size."""
        return {size: step.memory_bytes for size, step in self.steps.items()}

    def replay(self, batch_size: int) -> Any:
        """Replay the smallest graph that holds a batch, on the current stream.

        Parameters
        ----------
        batch_size : int
            Requests of the step whose metadata stands in the stage.

        Returns
        -------
        Any
            What the captured function returned, with this step's values.

        Raises
        ------
        ValueError
            If no graph holds so many requests, or another backend is asked for by name than the
            captured one.

        Notes
        -----
        Waits for nothing, unless FlashInfer was captured: its plan is made on the host, from
        lengths that are read from the device.
        """
        step = next((s for size, s in self.steps.items() if size >= batch_size), None)
        if step is None or batch_size < 0:
            sizes = ", ".join(map(str, self.steps))
            raise ValueError(f"no graph holds {batch_size} requests: captured are {sizes}")
        check_choices(step)
        if step.plan is not None:
            step.plan.replan()
        # The replay plans anew: what was planned eagerly on this stage is gone.
        self._stage.claim(self)
        step.graph.replay()
        return step.result


def capture(
    stage: StageBuffers, batch_sizes: Iterable[int], step: Callable[[int], Any], pool: Any = None
) -> StageGraphs:
    """Capture a step for each batch size; see `StageBuffers.capture`."""
    sizes = sorted(set(batch_sizes), reverse=True)
    if stage.device.type != "cuda":
        raise ValueError(f"CUDA graphs need a stage on a GPU, this one is on {stage.device}")
    if is_capturing(stage.device):
        raise ValueError("capture cannot be called inside another capture")
    if not sizes:
        raise ValueError("batch_sizes must name at least one size")
    for size in sizes:
        if size < 1:
            raise ValueError(f"batch sizes must be at least 1, got {size}")
        stage.metadata(size)
    graph_steps = _warm_up(stage.device, sizes, step)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # The largest first: the others find memory in its pool.
    captured = {
        size: _capture_one(stage.device, size, step, pool, graph_steps[size]) for size in sizes
    }
    return StageGraphs(stage, step, captured, pool)


def _warm_up(
    device: torch.device, sizes: list[int], step: Callable[[int], Any]
) -> dict[int, GraphStep]:
    """Compile and load every kernel, and plan what a capture cannot."""
    kept: dict[str, Any] = {}
    graph_steps = {size: GraphStep(kept) for size in sizes}
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for size in sizes:
            with graph_steps[size].run():
                step(size)
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph_steps


def _capture_one(
    device: torch.device,
    size: int,
    step: Callable[[int], Any],
    pool: Any,
    graph_step: GraphStep,
) -> CapturedStep:
    torch.cuda.synchronize(device)
    # The capture would do so, and what it gives back is not what the graph takes.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    graph = torch.cuda.CUDAGraph()
    # A stream of this device: torch's own for captures is of the device that was current first.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with (
        torch.cuda.device(device),
        dispatch.record() as choices,
        graph_step.run(),
        torch.cuda.graph(graph, pool=pool, stream=stream),
    ):
        result = step(size)
    torch.cuda.synchronize(device)
    taken = free - torch.cuda.mem_get_info(device)[0]
    return CapturedStep(
        size, graph, result, taken, graph_step.made, tuple(choices), dispatch.asked()
    )


def check_choices(step: CapturedStep) -> None:
    """Raise if another backend is asked for by name than a step was captured with."""
    asked = dispatch.asked()
    if asked == step.asked or asked[0] == "auto":
        return
    for choice in step.choices:
        # What was asked for inside the step is the step's own.
        if choice.asked == step.asked and choice.backend != asked[0]:
            raise ValueError(
                f"the graph for {step.batch_size} requests was captured with {choice.backend}, now "
                f"{asked[0]} is asked for by {asked[1]}: a graph cannot change its backend, "
                "capture anew"
            )
