"""The plan of a step: its metadata, and the work that its layers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from tritonattn import graph_step
from tritonattn.backends import Workspace, get_backend
from tritonattn.layout import PagedKVCache, PageTable
from tritonattn.spec import AttentionSpec
from tritonattn.stage import StageBuffers


class AttentionPlan:
    """The metadata of one step and the work that its layers share; made by `plan_attention`.

    A backend's part is made at most once, on the stream that is current then: by `plan_attention`
    when it knows the geometry of the layers, otherwise by the first layer. For replay in a CUDA
    graph it must happen inside the capture; what a backend cannot plan there is planned before, by
    the calls that warm the capture up.
    """

    def __init__(
        self,
        qo_indptr: Tensor,
        table: PageTable,
        *,
        causal: bool,
        max_q_len: int | None,
        max_kv_len: int | None,
        backend: str = "auto",
        workspace: Workspace | None = None,
        stage: StageBuffers | None = None,
    ) -> None:
        self.qo_indptr = qo_indptr
        self.table = table
        self.causal = causal
        self.max_q_len = max_q_len
        self.max_kv_len = max_kv_len
        self.backend = backend
        self._workspace = workspace or Workspace()
        self.stage = stage
        self._made: tuple[AttentionSpec, str, Any] | None = None

    def spec(self, q: Tensor, cache: PagedKVCache, features: tuple[str, ...]) -> AttentionSpec:
        """Describe a layer's call under this plan."""
        total_q = q.size(0)
        return AttentionSpec(
            device=q.device,
            q_dtype=q.dtype,
            kv_dtype=cache.dtype,
            num_qo_heads=q.size(1),
            num_kv_heads=cache.num_kv_heads,
            head_dim_qk=cache.head_dim_qk,
            head_dim_vo=cache.head_dim_vo,
            page_size=cache.page_size,
            batch_size=self.table.batch_size,
            total_q=total_q,
            max_q_len=total_q if self.max_q_len is None else min(self.max_q_len, total_q),
            max_kv_len=self.table.max_kv_len if self.max_kv_len is None else self.max_kv_len,
            is_csr=self.table.is_csr,
            causal=self.causal,
            features=features,
        )

    def planned_by(self, spec: AttentionSpec) -> str | None:
        """Return the backend that has planned such a layer, if one has."""
        if self._made is None or self._made[0] != spec:
            return None
        return self._made[1]

    def state(self, spec: AttentionSpec, backend: str) -> Any:
        """Return the backend's part, making it at the first call."""
        if self._made is None:
            self._made = (spec, backend, self._make(spec, backend))
        elif self._made[:2] != (spec, backend):
            raise ValueError(
                "one plan serves layers of one geometry on one backend: it was made for "
                f"{self._made[1]} with {self._made[0]}, this call is for {backend} with {spec}"
            )
        elif self.stage is not None:
            self.stage.check_owner(self)
        return self._made[2]

    def _make(self, spec: AttentionSpec, name: str) -> Any:
        backend, workspace = get_backend(name), self._workspace
        if self.stage is not None:
            workspace = self.stage.claim(self)
        step = graph_step.current()
        if step is None:
            return backend.plan(spec, self.table, self.qo_indptr, workspace)
        if self.stage is None:
            workspace = replace(workspace, kept=step.kept)
        arguments = (spec, self.table, self.qo_indptr, workspace)
        # By what a replay will read: the same call in the warm-up and in the capture.
        addresses = (self.qo_indptr.data_ptr(), *self.table.addresses())
        planned = step.take((spec, name, addresses), lambda: backend.plan_for_graph(*arguments))
        return backend.plan(*arguments) if planned is None else planned.state

    def check_same_step(
        self, *, causal: bool, stage: StageBuffers | None, **metadata: Tensor | int | None
    ) -> None:
        """Refuse metadata beside a plan that was made from other metadata."""
        table = self.table
        if stage is not None and stage is not self.stage:
            raise ValueError("buffers are not those of the plan: leave them out, or plan with them")
        planned: dict[str, Tensor | int | None] = {
            "qo_indptr": self.qo_indptr,
            "seq_lens": table.lengths,
            "block_table": None if table.is_csr else table.page_ids,
            "indptr": table.indptr,
            "indices": table.page_ids if table.is_csr else None,
            "max_q_len": self.max_q_len,
            "max_kv_len": self.max_kv_len,
        }
        for name, given in metadata.items():
            if given is not None and not _same(given, planned[name]):
                raise ValueError(
                    f"{name} is not what the plan was made from: leave it out, or plan the step "
                    "from it"
                )
        if causal != self.causal:
            raise ValueError(f"the plan was made with causal={self.causal}, got causal={causal}")


def _same(given: Tensor | int, planned: Tensor | int | None) -> bool:
    if isinstance(given, Tensor) and isinstance(planned, Tensor):
        return (
            given.data_ptr() == planned.data_ptr()
            and given.shape == planned.shape
            and given.stride() == planned.stride()
        )
    return not isinstance(given, Tensor) and not isinstance(planned, Tensor) and given == planned
