"""Drafters from disk: each published layout against the published implementation, and what is refused."""

from __future__ import annotations

import json
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from blockpilot.decoding import generate
from blockpilot.errors import UserError
from blockpilot.models import DFlashDrafter, DrafterContext, load_pair
from blockpilot.models.pair import load_drafter
from blockpilot.policies import FixedPolicy
from tests.toy import MASK, greedy_by_transformers, make_prompts, make_target, make_tokenizer

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
LAYERS, HIDDEN, VOCAB, WINDOW = 3, 32, 64, 4

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "attention_bias": False, "rope_theta": 20_000.0, "rope_scaling": None,
}  # fmt: skip
MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW,
    "use_sliding_window": True,
}  # fmt: skip
# what the layers of a drafter see
SIGHTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": MIXED,
    "sliding-both-ways": MIXED | {"is_causal": False},
    "causal": {"is_causal": True},
    "causal-sliding": MIXED | {"is_causal": True},
}
TOP = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}


def zlab(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` as z-lab writes it."""
    return DECODER | {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 4,
        "dflash_config": TOP, "dtype": "float32", "model_type": "qwen3", "num_target_layers": 4,
        "tie_word_embeddings": True, "transformers_version": "4.57.1",
    } | changes  # fmt: skip


def speculators(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` as speculators writes it; its decoder without what are a ``Qwen3Config``'s defaults."""
    layer = {key: value for key, value in DECODER.items() if key not in ("rms_norm_eps", "hidden_act")}
    return {
        "architectures": ["DFlashDraftModel"], "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 3], "block_size": 4, "draft_vocab_size": VOCAB, "dtype": "float32",
        "mask_token_id": MASK, "speculators_model_type": "dflash", "speculators_version": "0.5.0",
        "sliding_window_non_causal": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/verifier"}},
        "transformer_layer_config": layer | {"model_type": "qwen3"},
    } | changes  # fmt: skip


DRAFTED = torch.tensor([i for i in range(VOCAB) if i % 5])
VOCABULARY = {"draft_vocab_size": len(DRAFTED)}


def weights(own_head: int | None = None, embeddings: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the published names."""
    heads, kv_heads, size = 32, 16, 8
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)
    }  # fmt: skip
    for i in range(LAYERS):
        of_attention = {
            "q_proj": (heads, HIDDEN), "k_proj": (kv_heads, HIDDEN), "v_proj": (kv_heads, HIDDEN),
            "o_proj": (HIDDEN, heads), "q_norm": (size,), "k_norm": (size,),
        }  # fmt: skip
        of_mlp = {"gate_proj": (48, HIDDEN), "up_proj": (48, HIDDEN), "down_proj": (HIDDEN, 48)}
        shapes |= {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in of_attention.items()}
        shapes |= {f"layers.{i}.mlp.{name}.weight": shape for name, shape in of_mlp.items()}
        shapes |= {f"layers.{i}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {"lm_head.weight": (own_head, HIDDEN)} if own_head else {}
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)} if embeddings else {}
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: one / one.shape[-1] ** 0.5 if one.dim() > 1 else 1 + 0.1 * one for name, one in made.items()}


def with_map() -> dict[str, Tensor]:
    """Weights with a head over the tokens in ``DRAFTED``, and both maps, as speculators saves them."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[DRAFTED] = True
    return weights(len(DRAFTED)) | {"d2t": DRAFTED - torch.arange(len(DRAFTED)), "t2d": mask}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    return message


# ---- against the published implementation, on the same file


def passes(seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """New features and a block, pass by pass: 12 context positions in all, three windows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((7, 5), (1, 4), (4, 6))
    return [tuple(torch.randn(1, n, w, generator=generator) for n, w in zip(each, (2 * HIDDEN, HIDDEN), strict=True))
            for each in sizes]  # type: ignore[misc]  # fmt: skip


@torch.no_grad()
def theirs_cached(model: Any) -> list[Tensor]:
    """As ``dflash_generate`` calls it: new features and a block; then the cache is cut to the context."""
    from dflash import model as reference

    cache, start, states = reference._make_cache(model.config), 0, []
    for features, block in passes():
        end = start + features.shape[1]
        positions = torch.arange(start, end + block.shape[1])[None]
        out = model(position_ids=positions, noise_embedding=block, target_hidden=features, past_key_values=cache,
                    use_cache=True)  # fmt: skip
        states.append(out[:, -block.shape[1] :])
        reference._crop_to(cache, end)
        start = end
    return states


@torch.no_grad()
def theirs_uncached(model: Any) -> list[Tensor]:
    """Every pass with the whole context."""
    context, states = torch.empty(1, 0, 2 * HIDDEN), []
    for features, block in passes():
        context = torch.cat([context, features], dim=1)
        positions = torch.arange(context.shape[1] + block.shape[1])[None]
        states.append(model(position_ids=positions, noise_embedding=block, target_hidden=context))
    return states


@torch.no_grad()
def ours_cached(drafter: DFlashDrafter) -> list[Tensor]:
    context, states = drafter.allocate(1, 20), []
    for features, block in passes():
        drafter.extend(context, features)
        states.append(drafter(block, torch.arange(context.length, context.length + block.shape[1])[None], context))
    return states


@torch.no_grad()
def ours_static(drafter: DFlashDrafter) -> list[Tensor]:
    """In a window wider than what is known: what lies behind the block is hidden by the caller's mask."""
    context, states = drafter.allocate_static(32), []
    for features, block in passes():
        drafter.extend(context, features)
        context.positions = torch.arange(context.length, context.length + block.shape[1])
        seen = torch.arange(32) <= context.positions[-1]
        states.append(drafter(block, context.positions[None], context, seen.expand(block.shape[1], -1)))
        context.positions = None
    return states


@torch.no_grad()
def ours_shared(drafter: DFlashDrafter) -> list[Tensor]:
    """One context under blocks with anchors along it, as replay drafts, the narrow ones padded."""
    features = torch.cat([each for each, _ in passes()], dim=1)
    context = drafter.allocate_shared(1, 12, 9)
    for layer, (keys, values) in enumerate(drafter.project_context(features, torch.arange(12)[None], 12)):
        context.put(layer, 0, keys[0], values[0])
    context.select(torch.zeros(3, dtype=torch.int64), 12)
    anchors, widths = torch.tensor([7, 8, 12]), torch.tensor([5, 4, 6])
    # padded by more than a window: the last place of a narrow block sees nothing
    blocks = torch.zeros(3, 9, HIDDEN)
    for row, (_, block) in enumerate(passes()):
        blocks[row, : widths[row]] = block[0]
    places = torch.arange(9)
    mask = torch.cat([places < widths[:, None], torch.arange(12) < anchors[:, None]], dim=1)[:, None, None]
    out = drafter(blocks, anchors[:, None] + places, context, mask)
    assert out.isfinite().all()
    return [out[row : row + 1, :width] for row, width in enumerate(widths.tolist())]


def ours_in_training(drafter: DFlashDrafter) -> list[Tensor]:
    """All blocks side by side over one context, kept apart by a mask, with gradients."""
    features = torch.cat([each for each, _ in passes()], dim=1)
    projected = drafter.project_context(features, torch.arange(12)[None], 12)
    context = DrafterContext([keys for keys, _ in projected], [values for _, values in projected], length=12)
    widths, anchors = (5, 4, 6), (7, 8, 12)
    of_block = torch.repeat_interleave(torch.arange(3), torch.tensor(widths))
    positions = torch.cat([torch.arange(a, a + w) for a, w in zip(anchors, widths, strict=True)])
    before = torch.arange(12) < torch.tensor(anchors)[of_block, None]
    mask = torch.cat([before, of_block[:, None] == of_block], dim=1)[None, None]
    states = drafter(torch.cat([block for _, block in passes()], dim=1), positions[None], context, mask)
    assert states.requires_grad
    return [each.detach() for each in states.split(widths, dim=1)]


WAYS = (ours_cached, ours_static, ours_shared, ours_in_training)


@pytest.mark.parametrize("keys", ["nested", "top-level"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_a_zlab_checkpoint_gives_what_the_published_implementation_gives(sight: str, keys: str, tmp_path: Path) -> None:
    reference = pytest.importorskip("dflash.model")
    config = zlab(**SIGHTS[sight]) | ({} if keys == "nested" else TOP)
    if keys == "top-level":
        del config["dflash_config"]
    folder = write(tmp_path / "drafter", config, weights())
    theirs = reference.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = DFlashDrafter.from_pretrained(folder)
    cached, uncached = theirs_cached(theirs), theirs_uncached(theirs)
    for way in WAYS:
        for ours, one, other in zip(way(drafter), cached, uncached, strict=True):
            torch.testing.assert_close(ours, one, **CLOSE)
            torch.testing.assert_close(ours, other, **CLOSE)
    assert (drafter.block_size, drafter.mask_token_id, drafter.target_layer_ids) == (4, MASK, [0, 2])


def test_each_sight_matters(tmp_path: Path) -> None:
    """Else the comparisons above would not see a window that is ignored."""
    found = []
    for sight, changes in SIGHTS.items():
        drafter = DFlashDrafter.from_pretrained(write(tmp_path / sight, zlab(**changes), weights()))
        found.append(torch.cat(ours_cached(drafter), dim=1))
    for index, one in enumerate(found):
        assert all((one - other).abs().max() > 1e-2 for other in found[:index])


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("changes", "layer", "as_zlab"),
    [
        ({}, {}, {}),
        ({}, MIXED, MIXED),
        ({"sliding_window_non_causal": True}, MIXED, MIXED | {"is_causal": False}),
        ({"sliding_window_non_causal": None}, MIXED, MIXED | {"is_causal": False}),  # absent
        (VOCABULARY, {}, {}),
        (VOCABULARY, MIXED, MIXED),
    ],
)
def test_a_speculators_checkpoint_gives_what_the_published_implementation_gives(
    kind: str, changes: dict[str, Any], layer: dict[str, Any], as_zlab: dict[str, Any], tmp_path: Path
) -> None:
    reference = pytest.importorskip("dflash.model")
    config = speculators(**changes)
    config = {key: value for key, value in config.items() if value is not None}
    config["transformer_layer_config"] = config["transformer_layer_config"] | layer | {"model_type": kind}
    folder = write(tmp_path / "drafter", config, with_map() if changes == VOCABULARY else weights())
    theirs = reference.DFlashDraftModel(Qwen3Config.from_dict(zlab(**as_zlab))).eval()
    body = {name: one for name, one in load_file(folder / "model.safetensors").items() if name in theirs.state_dict()}
    theirs.load_state_dict(body)
    drafter = DFlashDrafter.from_pretrained(folder)
    for way in WAYS:
        for ours, one, other in zip(way(drafter), theirs_cached(theirs), theirs_uncached(theirs), strict=True):
            torch.testing.assert_close(ours, one, **CLOSE)
            torch.testing.assert_close(ours, other, **CLOSE)


def test_layer_ids_of_speculators_are_places_in_the_list_of_hidden_states(tmp_path: Path) -> None:
    target = make_target()
    pair = load_pair(
        target=target, drafter=write(tmp_path / "drafter", speculators(), weights()), tokenizer=make_tokenizer(),
        device="cpu",
    )  # fmt: skip
    tokens = torch.tensor(make_prompts([9]))
    with torch.no_grad():
        hidden = target(tokens, output_hidden_states=True).hidden_states
        features = pair.runner.forward(tokens, pair.runner.new_cache(9)).features
    assert features is not None
    torch.testing.assert_close(features, torch.cat([hidden[1], hidden[3]], dim=-1), **CLOSE)


# ---- in the engine

CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "z-lab": (zlab(), weights()),
    "z-lab-sliding": (zlab(**SIGHTS["sliding"]), weights()),
    "speculators": (speculators(), weights(VOCAB, embeddings=True)),
    "speculators-draft-vocabulary": (speculators(**VOCABULARY), with_map()),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_output_with_each_layout_is_the_targets_own(kind: str, tmp_path: Path) -> None:
    target, prompt = make_target(), make_prompts([11])[0]
    folder = write(tmp_path / "drafter", *CHECKPOINTS[kind])
    pair = load_pair(target=target, drafter=folder, tokenizer=make_tokenizer(), device="cpu")
    out = generate(pair, prompt, FixedPolicy(5), max_new_tokens=16, stop_token_ids=[])
    assert out.output_ids == greedy_by_transformers(target, prompt, 16)
    assert set(out.block_sizes) == {5}


def test_a_drafters_own_vocabulary_leads_to_the_targets(tmp_path: Path) -> None:
    target = make_target()
    folder = write(tmp_path / "drafter", speculators(**VOCABULARY), with_map())
    pair = load_pair(target=target, drafter=folder, tokenizer=make_tokenizer(), device="cpu")
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    states = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = pair.draft_logits(states)
    torch.testing.assert_close(logits, states @ head.T)
    assert pair.drafter.target_ids(logits.argmax(-1)).tolist() == DRAFTED[(states @ head.T).argmax(-1)].tolist()


def test_a_copy_of_the_targets_embedding_and_head_is_not_kept(tmp_path: Path) -> None:
    target: Any = make_target()
    copies = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "lm_head.weight": target.get_output_embeddings().weight.detach().clone(),
    }
    plain = load_drafter(write(tmp_path / "plain", speculators(), weights()), target)
    copied = load_drafter(write(tmp_path / "copied", speculators(), weights() | copies), target)
    other = load_drafter(write(tmp_path / "other", speculators(), weights(VOCAB, embeddings=True)), target)
    assert copied.state_dict().keys() == plain.state_dict().keys()
    assert copied.config.to_dict() == plain.config.to_dict()
    assert copied.config.num_target_layers == 4  # known by the target alone
    assert other.state_dict().keys() - plain.state_dict().keys() == copies.keys()


def test_weights_for_training_only_are_left_out(tmp_path: Path) -> None:
    extra = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": torch.ones(len(DRAFTED), HIDDEN)}
    drafter = DFlashDrafter.from_pretrained(write(tmp_path / "d", speculators(**VOCABULARY), with_map() | extra))
    assert drafter.state_dict().keys() == (with_map().keys() - {"t2d"})


# ---- saving


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_what_is_saved_is_of_the_zlab_layout(kind: str, tmp_path: Path) -> None:
    reference = pytest.importorskip("dflash.model")
    drafter = load_drafter(write(tmp_path / "first", *CHECKPOINTS[kind]), make_target())
    drafter.save_pretrained(tmp_path / "second")
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"] and written["model_type"] == "qwen3"
    assert written["dflash_config"] == TOP and "auto_map" not in written
    assert (written["block_size"], written["num_target_layers"]) == (4, 4)
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path / "second", dtype=torch.float32).eval()
    again = DFlashDrafter.from_pretrained(tmp_path / "second")
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for first, second, other in zip(ours_cached(drafter), ours_cached(again), theirs_cached(theirs), strict=True):
        # the weights are equal, but where they begin in memory may change the last bit
        torch.testing.assert_close(first, second, **CLOSE)
        torch.testing.assert_close(first, other, **CLOSE)


def test_a_dtype_is_that_of_floating_weights_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "drafter", speculators(**VOCABULARY), with_map())
    drafter = DFlashDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16 and drafter.d2t is not None and drafter.d2t.dtype == torch.int64
    drafter.save_pretrained(tmp_path / "again")
    assert DFlashDrafter.from_pretrained(tmp_path / "again").dtype == torch.bfloat16


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "drafter", zlab(), weights())
    whole = DFlashDrafter.from_pretrained(folder).state_dict()
    names = sorted(whole)
    where = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for part in sorted(set(where.values())):
        save_file({name: whole[name].clone() for name in names if where[name] == part}, folder / part)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    again = DFlashDrafter.from_pretrained(folder).state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in names)
    for wrong in ("../drafter/part-0.safetensors", "part-7.safetensors"):
        index.write_text(json.dumps({"weight_map": where | {names[0]: wrong}}))
        assert wrong in error_of(lambda: DFlashDrafter.from_pretrained(folder))
    index.write_text('{"weight_map": [1]}')
    assert "weight_map" in error_of(lambda: DFlashDrafter.from_pretrained(folder))


# ---- refused


def drop(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "missing": (drop("fc.weight", "norm.weight"), ("2 missing keys: fc.weight, norm.weight",)),
    "unexpected": (lambda w: w.update(a=torch.ones(1), b=torch.ones(1)), ("2 unexpected keys: a, b",)),
    "shape": (lambda w: w.update({"fc.weight": torch.ones(3, 3)}), ("fc.weight [3, 3] instead of [32, 64]",)),
    "kind": (
        lambda w: w.update({"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}),
        ("norm.weight [32] of whole numbers instead of [32]",),
    ),
    "many": (
        lambda w: w.update({f"x{i:02}": torch.ones(1) for i in range(20)}),
        ("20 unexpected keys: x00, x01", "x07 and 12 more"),
    ),
    "all at once": (
        lambda w: (w.pop("norm.weight"), w.update({"y": torch.ones(1), "fc.weight": torch.ones(2, 2)})),
        ("1 missing keys: norm.weight", "1 unexpected keys: y", "1 keys of another shape or kind: fc.weight"),
    ),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_listed(case: str, tmp_path: Path) -> None:
    tensors = weights()
    change, texts = WRONG_WEIGHTS[case]
    change(tensors)
    message = error_of(lambda: DFlashDrafter.from_pretrained(write(tmp_path / "drafter", zlab(), tensors)))
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor(float("nan")), None),
        (torch.tensor(float("-inf")), torch.float32),
        (torch.tensor(float("nan")).to(torch.float8_e4m3fn), None),
        (torch.tensor(1e200, dtype=torch.float64), torch.float32),
        (torch.tensor(1e6, dtype=torch.bfloat16), torch.float16),
    ],
    ids=str,
)
def test_weights_that_are_no_numbers_in_their_dtype(stored: Tensor, dtype: torch.dtype | None, tmp_path: Path) -> None:
    tensors = weights() | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN, dtype=stored.dtype)}
    folder = write(tmp_path / "drafter", zlab(), tensors)
    assert DFlashDrafter.from_pretrained(folder, dtype=dtype).block_size == 4
    tensors["fc.weight"].view(-1)[77] = stored
    message = error_of(lambda: DFlashDrafter.from_pretrained(write(folder, zlab(), tensors), dtype=dtype))
    assert f"NaN or infinite values: fc.weight ({dtype or stored.dtype}); expected finite numbers" in message


def wrong_map(**changes: Any) -> dict[str, Tensor]:
    return with_map() | {name: torch.tensor(value) for name, value in changes.items()}


ROWS = len(DRAFTED)
WRONG_VOCABULARIES: dict[str, tuple[dict[str, Tensor], tuple[str, ...]]] = {
    "no map": ({k: v for k, v in with_map().items() if k != "d2t"}, ("missing keys: d2t",)),
    "no head": ({k: v for k, v in with_map().items() if k != "lm_head.weight"}, ("missing keys: lm_head.weight",)),
    "out of it": (wrong_map(d2t=[14] * ROWS), ("d2t", "out of the vocabulary of 64", "draft id + d2t[draft id]")),
    "twice": (wrong_map(d2t=[5, 4] + [2] * (ROWS - 2)), ("d2t", "to one that another")),
    "of fractions": (wrong_map(d2t=[0.5] * ROWS), ("d2t", "whole numbers")),
    "too short": (
        {k: v for k, v in wrong_map(d2t=[0] * (ROWS - 1)).items() if k != "t2d"},
        ("d2t", f"[{ROWS - 1}]", f"[{ROWS}]"),
    ),
    "two opinions": (wrong_map(t2d=[True] * ROWS + [False] * (VOCAB - ROWS)), ("t2d and d2t",)),
}


@pytest.mark.parametrize("case", WRONG_VOCABULARIES)
def test_a_draft_vocabulary_that_leads_nowhere(case: str, tmp_path: Path) -> None:
    tensors, texts = WRONG_VOCABULARIES[case]
    folder = write(tmp_path / "drafter", speculators(**VOCABULARY), tensors)
    message = error_of(lambda: DFlashDrafter.from_pretrained(folder))
    assert all(text in message for text in texts), message


WRONG_CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (zlab(hidden_size="wide"), ("hidden_size", "'wide'", "int")),
    (zlab(hidden_size=-8), ("hidden_size=-8", "at least 1")),
    (zlab(num_attention_heads=3), ("num_attention_heads=3", "num_key_value_heads=2")),
    (zlab(block_size="16"), ("block_size='16'", "whole number")),
    (zlab(block_size=[16]), ("block_size=[16]", "whole number")),
    (zlab(block_size=1), ("block_size=1;", "2 to 32767")),
    (zlab(block_size=10**9), ("block_size=1000000000", "2 to 32767")),
    (zlab(rope_theta=0), ("rope_theta=0", "above 0")),
    (zlab(rope_theta=None), ("rope_theta=None", "above 0")),
    (zlab(num_target_layers="x", dflash_config={"mask_token_id": 4}), ("num_target_layers='x'", "whole number")),
    (zlab(dflash_config=[4]), ("dflash_config=[4]", "keys and values")),
    (zlab(dflash_config=TOP | {"mask_token_id": "<mask>"}), ("mask_token_id='<mask>'", "whole number")),
    (zlab(dflash_config=TOP | {"target_layer_ids": 3}), ("target_layer_ids=3", "list of whole numbers")),
    (zlab(dflash_config=TOP | {"target_layer_ids": [1, 2.5]}), ("target_layer_ids[1]=2.5", "whole number")),
    (zlab(layer_types=["full_attention"]), ("layer_types",)),
    (zlab(layer_types=["strange"] * LAYERS), ("layer_types", "strange", "full_attention")),
    (zlab(layer_types="full_attention"), ("layer_types='full_attention'", "list")),
    (zlab(**MIXED | {"use_sliding_window": False}), ("sliding_attention", "no window", "use_sliding_window")),
    (zlab(is_causal="yes"), ("is_causal='yes'", "true, false")),
    (zlab(**MIXED | {"sliding_window": 0}), ("sliding_window=0", "at least 1")),
    (zlab(**MIXED | {"sliding_window": "long"}), ("sliding_window", "'long'")),
    (zlab(rope_parameters={"rope_type": "strange", "rope_theta": 1.0}), ("rope_type='strange'", "yarn")),
    (zlab(draft_vocab_size="few"), ("draft_vocab_size='few'", "whole number")),
    (zlab(draft_vocab_size=10), ("missing keys: d2t, lm_head.weight",)),
    (speculators(speculators_model_type="eagle3"), ("speculators_model_type='eagle3'", "dflash")),
    (speculators(projector_type="domino"), ("projector_type='domino'", "'dflash'")),
    (speculators(sliding_window_non_causal="no"), ("sliding_window_non_causal='no'", "true or false")),
    (speculators(sample_from_anchor=True), ("sample_from_anchor=True", "False")),
    (speculators(target_hidden_size=64), ("target_hidden_size=64", "32")),
    (speculators(aux_hidden_state_layer_ids=None), ("aux_hidden_state_layer_ids",)),
    (speculators(aux_hidden_state_layer_ids=[0, 2]), ("aux_hidden_state_layer_ids=[0, 2]", "from 1")),
    (speculators(aux_hidden_state_layer_ids="1,3"), ("aux_hidden_state_layer_ids[0]='1'", "whole number")),
    (speculators(mask_token_id=None), ("no 'mask_token_id'",)),
    (speculators(draft_vocab_size="32k"), ("draft_vocab_size='32k'", "whole number")),
    (speculators(transformer_layer_config=None), ("transformer_layer_config=None", "keys and values")),
    (speculators(transformer_layer_config={"model_type": "gpt2"}), ("model_type='gpt2'", "qwen3, llama")),
    (speculators(transformer_layer_config=DECODER | {"hidden_size": "wide"}), ("hidden_size", "'wide'")),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
     ("architectures=['LlamaForCausalLM']", "model_type='llama'", "z-lab", "speculators", "DFlashDraftModel")),
    ({"hidden_size": 8}, ("only keys ['hidden_size']", "z-lab", "speculators")),
    ({}, ("only keys []", "z-lab", "speculators")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "texts"), WRONG_CONFIGS, ids=lambda value: "-".join(value)[:40] * isinstance(value, tuple)
)
def test_a_config_that_cannot_be_used(config: dict[str, Any], texts: tuple[str, ...], tmp_path: Path) -> None:
    message = error_of(lambda: DFlashDrafter.from_pretrained(write(tmp_path / "drafter", config, weights())))
    assert all(text in message for text in texts), message


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_a_config_that_is_no_json_object(text: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "drafter", zlab(), weights())
    (folder / "config.json").write_bytes(text)
    assert "config.json" in error_of(lambda: DFlashDrafter.from_pretrained(folder))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_of_weights(share: float, tmp_path: Path) -> None:
    file = write(tmp_path / "drafter", zlab(), weights()) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert "model.safetensors is truncated" in error_of(lambda: DFlashDrafter.from_pretrained(file.parent))


# ---- nothing of a checkpoint runs


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    return {"target": tmp_path / "target", "drafter": write(tmp_path / "drafter", zlab(), weights())}


def load(folders: dict[str, Path]) -> Any:
    return load_pair(target=folders["target"], drafter=folders["drafter"], device="cpu")


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_not_opened(part: str, name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    file = folders[part] / name
    file.write_bytes(pickle.dumps(Trap(mark)))
    load(folders)  # beside safetensors it is just a file
    (folders[part] / "model.safetensors").unlink()
    message = error_of(lambda: load(folders))
    assert name in message and "safetensors" in message
    assert message.startswith({"target": "model.target=", "drafter": "drafter.path="}[part])
    assert not mark.exists()
    pickle.loads(file.read_bytes())
    assert mark.exists()  # it would have


CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nfrom transformers import {base}\nclass Mine({base}): pass\n"


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_folder_does_not_run(part: str, known: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for module, base in (("modeling", "PreTrainedModel"), ("configuring", "PreTrainedConfig"), ("tok", "Trie")):
        (folders[part] / f"{module}.py").write_text(
            CODE.format(mark=str(mark), base=base).replace("Trie", "BertTokenizer")
        )
    (folders[part] / "custom_generate").mkdir()
    (folders[part] / "custom_generate" / "generate.py").write_text(CODE.format(mark=str(mark), base="GenerationMixin"))
    file = folders[part] / "config.json"
    config = json.loads(file.read_text()) | {
        "auto_map": {
            "AutoConfig": "configuring.Mine", "AutoModel": "modeling.Mine", "AutoModelForCausalLM": "modeling.Mine",
            "AutoTokenizer": ["tok.Mine", None],
        }
    }  # fmt: skip
    if not known:  # nothing but the folder's own code knows this one
        config |= {"model_type": "unheard_of", "architectures": ["Mine"]}
    file.write_text(json.dumps(config))
    if known:
        load(folders)
    else:
        error_of(lambda: load(folders))
    assert not mark.exists()
    runpy.run_path(str(folders[part] / "modeling.py"))
    assert mark.exists()  # it would have
