"""The fp64 oracle as a backend: right and slow, any device, reads metadata on the host."""

from __future__ import annotations

from torch import Tensor

from tritonattn.backends import AttentionCall, Workspace, WorkspaceBytes, missing_features
from tritonattn.layout import PageTable
from tritonattn.reference import attention
from tritonattn.spec import AttentionSpec


class ReferenceBackend:
    """Plain torch in fp64."""

    name = "reference"
    caveat = "; reads metadata on the host"

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the oracle cannot take the call, or None."""
        return missing_features(spec, self.name)

    def graph_refusal(self, spec: AttentionSpec, replans: bool) -> str | None:
        """Return that it goes by what it reads on the host."""
        return "the reference backend reads metadata on the host, which a CUDA graph cannot"

    def workspace_bytes(self, spec: AttentionSpec) -> WorkspaceBytes:
        """Return 0: torch allocates."""
        return WorkspaceBytes(0, 0)

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> None:
        """Nothing is shared between layers."""

    def plan_for_graph(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> None:
        """Nothing is shared between layers."""

    def run(self, call: AttentionCall, state: None) -> None:
        """Compute request by request; no gradient, as the kernels have none."""
        attention.paged_attention(
            call.q.detach(),
            call.cache,
            call.table,
            call.qo_indptr,
            call.out,
            call.lse,
            causal=call.spec.causal,
            sm_scale=call.sm_scale,
            lse_base=call.lse_base,
        )


BACKEND = ReferenceBackend()
