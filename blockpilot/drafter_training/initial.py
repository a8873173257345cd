"""An untrained drafter for a target: its configuration and its first weights.

Knows the layers of Llama, Qwen2 and Qwen3; nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config

from blockpilot.errors import UserError
from blockpilot.models.drafter import DFlashDrafter
from blockpilot.models.target import decoder_layers


def new_drafter(
    target: PreTrainedModel, *, block_size: int, num_layers: int, target_layer_ids: Sequence[int], mask_token_id: int
) -> DFlashDrafter:
    """A drafter with the target's widths and rotary embedding, and random weights."""
    config = target.config.get_text_config()
    depth = len(decoder_layers(target))
    heads = config.num_attention_heads
    dflash: dict[str, Any] = {
        "block_size": block_size,
        "num_target_layers": depth,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
    }
    rope = getattr(config, "rope_parameters", None)
    drafter = Qwen3Config(
        architectures=["DFlashDraftModel"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=rope,
        tie_word_embeddings=True,
        **dflash,
    )
    return DFlashDrafter(drafter)


@torch.no_grad()
def copy_last_layers(drafter: DFlashDrafter, target: PreTrainedModel) -> None:
    """First weights from the target's last layers, so that the drafter starts from what reads and writes its states.

    Each drafter layer gets the projections of one of the target's last layers, its input norm folded into them, because
    a context enters a drafter layer without that norm. The fused context starts as the last tapped layer's output.
    A target without head norms (Llama, Qwen2) lends their usual length: the root mean square that its projections give
    states of unit length, the same for all heads.

    Raises:
        UserError: the target's layers have other parts.
    """
    layers = list(decoder_layers(target))[-len(drafter.layers) :]
    if len(layers) < len(drafter.layers) or not all(_has_parts(layer) for layer in layers):
        raise UserError(
            f"drafter_training.initial='target' is not allowed with {type(target).__name__}; its layers lack q_proj, "
            "k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj, or are fewer: expected random"
        )
    for ours, theirs in zip(drafter.layers, layers, strict=True):
        _copy_layer(ours, theirs)
    final = cast(nn.Module, cast(Any, target.get_decoder()).norm)
    drafter.norm.weight.copy_(cast(Tensor, final.weight))
    size = drafter.config.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -size:] += torch.eye(size)


def _has_parts(layer: nn.Module) -> bool:
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = dict(layer.named_modules())
    return all(isinstance(names.get(part), nn.Linear) for part in parts)


def _copy_layer(ours: Any, theirs: Any) -> None:
    scale = theirs.input_layernorm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(ours.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight * scale)
    ours.input_layernorm.weight.fill_(1.0)
    ours.self_attn.o_proj.weight.copy_(theirs.self_attn.o_proj.weight)
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        lent = getattr(theirs.self_attn, norm, None)
        weight = getattr(ours.self_attn, projection).weight
        usual = weight.square().sum(dim=1).mean().sqrt()
        getattr(ours.self_attn, norm).weight.copy_(
            usual.expand(ours.self_attn.head_dim) if lent is None else lent.weight
        )
    ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(ours.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight)
