"""torch's scaled_dot_product_attention over K and V that lie side by side.

Pages are gathered before the time starts, so these bound what a paged kernel may reach; they are no
peers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tritonattn.perf.providers import CEILING, Call, Layer, Prepared, Provider, register
from tritonattn.perf.steps import Step

_UNIFORM_KINDS = frozenset({"decode", "prefill", "speculative"})


def _refusal(step: Step) -> str | None:
    if min(step.q_lens) != max(step.q_lens) or min(step.kv_lens) != max(step.kv_lens):
        return "scaled_dot_product_attention takes one length for all requests"
    if step.case.features:
        return f"scaled_dot_product_attention has no {step.case.features}"
    return None


def _cudnn_refusal(step: Step) -> str | None:
    if step.device.type != "cuda":
        return "cuDNN needs CUDA tensors"
    if step.case.causal and 1 < step.max_q_len < step.max_kv_len:
        return "through torch, cuDNN's causal mask is top-left: wrong for fewer queries than keys"
    return _refusal(step)


def _gathered(step: Step, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as contiguous [batch, heads, tokens, head_dim]."""
    k, v = layer.kv_cache[step.block_table.long()].unbind(2)  # [batch, pages, ...]
    if step.kv_layout == "HND":
        k, v = k.transpose(2, 3), v.transpose(2, 3)
    tokens = slice(0, step.max_kv_len)
    k, v = (x.flatten(1, 2)[:, tokens].transpose(1, 2).contiguous() for x in (k, v))
    q = layer.q.view(step.batch_size, step.max_q_len, *layer.q.shape[1:])
    return q.transpose(1, 2).contiguous(), k, v


def _mask(step: Step) -> dict[str, Any]:
    if not step.case.causal or step.max_q_len == 1:
        return {}
    if step.max_q_len == step.max_kv_len:
        return {"is_causal": True}
    return {"attn_mask": causal_lower_right(step.max_q_len, step.max_kv_len)}


def _prepare(step: Step, backends: list[SDPBackend]) -> Prepared:
    options = _mask(step) | {"scale": step.sm_scale, "enable_gqa": True}

    def bind(layer: Layer) -> Call:
        q, k, v = _gathered(step, layer)

        def call() -> list[Tensor]:
            with sdpa_kernel(backends):
                out = scaled_dot_product_attention(q, k, v, **options)
            return [out.transpose(1, 2)]

        return call

    return Prepared(bind)


_ANY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
register(Provider("sdpa", CEILING, _UNIFORM_KINDS, partial(_prepare, backends=_ANY), _refusal))
register(
    Provider("sdpa-cudnn", CEILING, _UNIFORM_KINDS,
             partial(_prepare, backends=[SDPBackend.CUDNN_ATTENTION]), _cudnn_refusal)
)  # fmt: skip
