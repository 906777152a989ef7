"""The classes that vLLM 0.25 takes an attention backend for.

One plan a step: `MetadataBuilder.build` describes it, the first layer that runs launches it, inside
the CUDA graph where there is one. So a replay plans from what stands in vLLM's own tensors then,
and nothing is copied, waited for or planned on the host. The cache is FlashInfer's, 5-D; its
dimensions are NHD to us, whatever vLLM's layout makes their strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import (
    get_kv_cache_layout,
    get_num_attention_heads_from_layers,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tritonattn import dispatch
from tritonattn.attention import paged_attention, plan_attention
from tritonattn.block_ops import reshape_and_cache
from tritonattn.buffers import PipelineBuffers
from tritonattn.plan import AttentionPlan
from tritonattn.spec import Q_DTYPES, is_head_dim

# Ways to speculate without a draft model.
_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")
# vLLM shows what comes from below its own logger.
_log = init_logger(f"vllm.{__name__}")


class TritonAttnBackend(AttentionBackend):
    """What vLLM asks before it takes the backend: its classes, its cache, what it supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(Q_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the only name that vLLM has for a backend from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonAttnImpl]:
        """Return the class of a layer."""
        return TritonAttnImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttnMetadataBuilder]:
        """Return the class that describes steps."""
        return TritonAttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Return that pages may have any number of tokens."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return FlashInfer's combined shape."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of the dimensions in memory; pages are outermost, as for FlashInfer."""
        hnd = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 2, 4, 0, 3, 5) if hnd else (1, 0, 2, 3, 4, 5)
        return (0, 1, 3, 2, 4) if hnd else (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether the kernels take the head size."""
        return is_head_dim(head_size)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the GPU has what the kernels use."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any, **more: Any
    ) -> str | None:
        """Return what speaks against a combination of things that are supported."""
        cache_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(
            str(kv_cache_dtype)
        )
        if cache_dtype in (None, dtype):
            return None
        return f"a {kv_cache_dtype} cache for a model of {dtype} not supported"


@dataclass  # neither frozen nor slotted: vLLM sets attributes of its own
class TritonAttnMetadata(AttentionMetadata):
    """What the layers of a step share."""

    plan: AttentionPlan


class TritonAttnMetadataBuilder(AttentionMetadataBuilder[TritonAttnMetadata]):
    """Describes a step for the layers of one cache group, which share one stage of buffers."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check_cache_and_speculation(kv_cache_spec, vllm_config)
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        buffers = PipelineBuffers.allocate(
            num_stages=1,
            max_batch_size=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_pages_per_request=1,  # of a table in the stage: steps are planned from vLLM's own
            num_qo_heads=heads or model.get_num_attention_heads(vllm_config.parallel_config),
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_dim=kv_cache_spec.head_size,
            page_size=kv_cache_spec.block_size,
            dtype=kv_cache_spec.dtype,
            device=device,
        )
        self._stage = buffers.stage(0)
        asked, by = dispatch.asked()
        # Never by a policy: its choice might plan on the host, and wait there.
        self._backend = "triton" if asked == "auto" else asked
        _log.info(
            "tritonattn serves %d layers, pages of %d tokens, backend %s%s, %.1f MiB of buffers",
            len(layer_names), kv_cache_spec.block_size, self._backend, by and f" ({by})",
            buffers.nbytes / 2**20,
        )  # fmt: skip

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return that all graphs hold the layers; none do if the backend plans on the host."""
        ours = dispatch.asked()[0] in ("auto", "triton")
        return AttentionCGSupport.ALWAYS if ours else AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttnMetadata:
        """Describe a step."""
        return self._describe(common_attn_metadata, common_attn_metadata.max_query_len)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttnMetadata:
        """Describe what a graph is captured for: steps of these sizes."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        # In a graph of any mixture the queries of a replay may be longer than the capture's.
        mixed = mode.mixed_mode() == CUDAGraphMode.FULL
        return self._describe(
            common_attn_metadata, None if mixed else common_attn_metadata.max_query_len
        )

    def _describe(self, step: CommonAttentionMetadata, max_q_len: int | None) -> TritonAttnMetadata:
        if step.causal is not True:
            raise NotImplementedError("tritonattn serves causal attention only")
        batch = step.num_reqs
        plan = plan_attention(
            qo_indptr=step.query_start_loc[: batch + 1],
            seq_lens=step.seq_lens[:batch],
            block_table=step.block_table_tensor[:batch],
            page_size=self.kv_cache_spec.block_size,
            max_q_len=max_q_len,
            buffers=self._stage,
            backend=self._backend,
        )
        return TritonAttnMetadata(plan)


class TritonAttnImpl(AttentionImpl[TritonAttnMetadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **features: Any,
    ) -> None:
        # vLLM asks `supports_*` for some of these, and about others nobody.
        asked = {
            "alibi_slopes": alibi_slopes is not None,
            "sliding_window": sliding_window is not None,
            "logits_soft_cap": bool(logits_soft_cap),
            f"attn_type {attn_type}": attn_type != AttentionType.DECODER,
            **{name: not _is_neutral(value) for name, value in features.items()},
        }
        _refuse(asked)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; `key` and `value` are in the cache already.

        Parameters
        ----------
        query, output : Tensor, shape [rows, num_heads, head_size]
            Rows past the step's tokens are padding and stay as they are.
        kv_cache : Tensor, shape [num_blocks, 2, block_size, num_kv_heads, head_size]
        attn_metadata : TritonAttnMetadata, optional
            None in the run that measures memory: the output is zeroed.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tritonattn does not quantise its output")
        if attn_metadata is None:
            paged_attention(query, None, out=output)
        else:
            plan = attn_metadata.plan
            paged_attention(query, kv_cache, plan=plan, sm_scale=self.scale, out=output)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of the step; slots of -1 are padding."""
        reshape_and_cache(key, value, kv_cache, slot_mapping)


def _is_neutral(value: object) -> bool:
    """Return whether an argument that only some models have asks for nothing."""
    return value is None or value is False or (isinstance(value, int) and value == -1)


def _refuse(asked: dict[str, bool]) -> None:
    """Raise if something is asked for; names what."""
    refused = ", ".join(name for name, wanted in asked.items() if wanted)
    if refused:
        raise NotImplementedError(
            f"tritonattn does not support {refused} yet: choose another --attention-backend"
        )


def _check_cache_and_speculation(kv_cache_spec: Any, vllm_config: VllmConfig) -> None:
    """Raise for what vLLM asks no `supports_*` about and a layer cannot see."""
    asked = {
        f"a cache of {type(kv_cache_spec).__name__}": type(kv_cache_spec) is not FullAttentionSpec,
        "attention in chunks": getattr(kv_cache_spec, "attention_chunk_size", None) is not None,
    }
    # A draft model is given the metadata of the model it drafts for, whose plan is made by then.
    speculation = vllm_config.speculative_config
    if speculation is not None:
        asked[f"speculation by {speculation.method}"] = speculation.method not in _DRAFTLESS
    _refuse(asked)
