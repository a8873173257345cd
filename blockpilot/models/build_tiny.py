"""Builds the embedded pair from nothing: ``python -m blockpilot.models.build_tiny``.

An entry like ``train.py``: nothing imports it. Every stage leaves its result in the work folder and is
skipped when the result is there, so an interrupted build goes on where it stopped (the two training
stages from their last checkpoint). Stages: tokenizer, prompts, target, answers, drafter, card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from blockpilot.drafter_training.objective import NO_TOKEN, TextBatch, dflash_loss
from blockpilot.metrics import best_choice
from blockpilot.models.drafter import DFlashDrafter
from blockpilot.models.pair import load_pair
from blockpilot.models.tiny_corpus import Conversation, conversations
from blockpilot.oracle import OracleRecord, candidate_block_sizes, replay

log = logging.getLogger("build_tiny")

ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(__file__).resolve().parent / "tiny"

VOCABULARY = 2048
MAX_POSITIONS = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Batch = TypeVar("Batch")
START, END, PAD, MASK = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result; written into the model card."""

    seed: int = 0
    target_steps: int = 2600
    target_tokens_per_step: int = 6144
    target_learning_rate: float = 3e-3
    answers: int = 12_000
    sampled_share: float = 0.3
    answer_tokens: int = 160
    drafter_steps: int = 3000
    drafter_batch: int = 24
    drafter_anchors: int = 10
    drafter_learning_rate: float = 2e-3
    loss_decay: float = 7.0
    train_prompts: int = 1600
    test_prompts: int = 320


# ---------------------------------------------------------------- tokenizer and prompts


def build_tokenizer(work: Path, recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on the corpus."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[PAD, START, END, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = itertools.islice(conversations(recipe.seed, "build"), 20_000)
        tokenizer.train_from_iterator((t for c in texts for t in (*c.turns, *c.answers, "user\nassistant\n")), trainer)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END,
            pad_token=PAD,
            mask_token=MASK,
            model_max_length=MAX_POSITIONS,
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return cast(int, tokenizer.convert_tokens_to_ids(token))


def write_prompts(folder: Path, recipe: Recipe) -> None:
    """``tiny_train.jsonl`` and ``tiny_test.jsonl``; their prompts are in no other split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", recipe.train_prompts), ("test", recipe.test_prompts)):
        rows = itertools.islice(conversations(recipe.seed, split), count)
        lines = [
            json.dumps({"id": f"tiny-{split}-{i}", "dataset": "tiny", "turns": list(c.turns), "category": c.family})
            for i, c in enumerate(rows)
        ]
        (folder / f"tiny_{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _encode(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation and, per token, whether the assistant wrote it."""
    ids: list[int] = []
    written: list[bool] = []
    for turn, answer in zip(conversation.turns, conversation.answers, strict=True):
        asked = tokenizer.encode(f"{START}user\n{turn}{END}\n{START}assistant\n", add_special_tokens=False)
        said = tokenizer.encode(f"{answer}{END}", add_special_tokens=False)
        gap = tokenizer.encode("\n", add_special_tokens=False)
        ids += asked + said + gap
        written += [False] * len(asked) + [True] * len(said) + [False] * len(gap)
    return ids[: -len(gap)], written[: -len(gap)]


# ---------------------------------------------------------------- training loop shared by target and drafter


def _train(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    state: Callable[[], dict[str, Tensor]],
    load: Callable[[dict[str, Tensor]], object],
    batches: Callable[[int], Iterator[Batch]],
    loss_of: Callable[[Batch], Tensor],
    steps: int,
    learning_rate: float,
    checkpoint: Path,
) -> None:
    """AdamW with warm-up and cosine decay; a checkpoint every 200 steps, from which it goes on."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    warmup = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1.0, (s + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps)))),
    )
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        load(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    began, recent = time.perf_counter(), []
    for step, batch in zip(range(first, steps), batches(first), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 100 == 0:
            mean = sum(recent[-100:]) / len(recent[-100:])
            log.info("%s step %d/%d loss %.4f, %.0f s", name, step + 1, steps, mean, time.perf_counter() - began)
        if (step + 1) % 200 == 0 or step + 1 == steps:
            saved = {"model": state(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save(saved | {"step": step + 1}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)


def _by_length(lengths: Sequence[int], tokens_per_batch: int, rng: random.Random) -> Iterator[list[int]]:
    """Index batches of similar length with about ``tokens_per_batch`` padded tokens; one pass in random order."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], rng.random()))
    batches: list[list[int]] = [[]]
    for index in order:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > tokens_per_batch:
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    yield from batches


# ---------------------------------------------------------------- target


def build_target(work: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Trains the target on the corpus answers (loss on assistant tokens only)."""
    folder = work / "target"
    if (folder / "model.safetensors").exists():
        return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_id(tokenizer, END),
        pad_token_id=_id(tokenizer, PAD),
    )
    model = Qwen3ForCausalLM(config)
    model.train()
    documents = conversations(recipe.seed + 1, "build")

    def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for chunk in itertools.count():
            pool = [_encode(tokenizer, c) for c in itertools.islice(documents, 4000)]
            for indices in _by_length(
                [len(ids) for ids, _ in pool], recipe.target_tokens_per_step, random.Random(f"{recipe.seed}/{chunk}")
            ):
                done += 1
                if done > first:
                    yield _padded([pool[i] for i in indices], _id(tokenizer, PAD))

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = batch
        logits = model(ids).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)

    _train(
        "target", list(model.parameters()), model.state_dict, model.load_state_dict, batches, loss_of,
        recipe.target_steps, recipe.target_learning_rate, work / "target.pt",
    )  # fmt: skip
    model.eval().generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return model


def _padded(rows: Sequence[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    for i, (ids, written) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.where(torch.tensor(written), torch.tensor(ids), -100)
    return tokens, labels


# ---------------------------------------------------------------- answers of the target


@torch.inference_mode()
def write_answers(
    work: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, target: Qwen3ForCausalLM
) -> list[tuple[list[int], int]]:
    """The target's own answers to build prompts: ``(all token ids, number of prompt tokens)``, some drawn at T = 1."""
    path = work / "answers.jsonl"
    if not path.exists():
        torch.manual_seed(recipe.seed)
        prompts = []
        for c in itertools.islice(conversations(recipe.seed + 2, "build"), recipe.answers):
            # the corpus answers the earlier turns: good enough a context, and cheaper
            ids, _ = _encode(tokenizer, Conversation(c.family, c.turns, (*c.answers[:-1], "")))
            prompts.append(ids[:-1])
        began, rows = time.perf_counter(), []
        sampled = int(len(prompts) * recipe.sampled_share)
        for part, do_sample in ((prompts[:sampled], True), (prompts[sampled:], False)):
            part = sorted(part, key=len)
            for start in range(0, len(part), 192):
                rows += _generate(target, tokenizer, part[start : start + 192], recipe.answer_tokens, do_sample)
                log.info("answers %d/%d, %.0f s", len(rows), len(prompts), time.perf_counter() - began)
        path.with_suffix(".tmp").write_text("\n".join(json.dumps(row) for row in rows))
        os.replace(path.with_suffix(".tmp"), path)
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def _generate(
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    do_sample: bool,
) -> list[tuple[list[int], int]]:
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    out = cast(Any, target).generate(**batch, max_new_tokens=max_new_tokens, do_sample=do_sample, top_k=0, top_p=1.0)
    rows = []
    for prompt, tokens in zip(prompts, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
        rows.append((prompt + tokens, len(prompt)))
    return rows


# ---------------------------------------------------------------- drafter


def build_drafter(
    work: Path,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    target: Qwen3ForCausalLM,
    answers: Sequence[tuple[list[int], int]],
) -> DFlashDrafter:
    """Trains the drafter with the DFlash objective on the target's answers."""
    folder = work / "drafter"
    if (folder / "model.safetensors").exists():
        return DFlashDrafter.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(recipe.seed)
    dflash: dict[str, Any] = {
        "block_size": 16,
        "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": _id(tokenizer, MASK), "target_layer_ids": [1, 3, 4]},
    }
    config = Qwen3Config(
        architectures=["DFlashDraftModel"],
        vocab_size=target.config.vocab_size,
        hidden_size=target.config.hidden_size,
        intermediate_size=target.config.intermediate_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **dflash,
    )
    drafter = DFlashDrafter(config)
    drafter.train()
    target.requires_grad_(False)

    def batches(first: int) -> Iterator[list[tuple[list[int], int]]]:
        lengths = [len(ids) for ids, _ in answers]
        tokens = recipe.drafter_batch * sum(lengths) // len(lengths)
        done = 0
        for epoch in itertools.count():
            for indices in _by_length(lengths, tokens, random.Random(f"{recipe.seed}/{epoch}")):
                done += 1
                if done > first:
                    yield [answers[i] for i in indices]

    _train(
        "drafter", list(drafter.parameters()), drafter.state_dict, drafter.load_state_dict, batches,
        lambda batch: drafter_loss(drafter, target, batch, recipe.drafter_anchors, recipe.loss_decay),
        recipe.drafter_steps, recipe.drafter_learning_rate, work / "drafter.pt",
    )  # fmt: skip
    drafter.eval().save_pretrained(folder)
    return drafter


def drafter_loss(
    drafter: DFlashDrafter,
    target: Qwen3ForCausalLM,
    rows: Sequence[tuple[list[int], int]],
    num_anchors: int,
    decay: float,
) -> Tensor:
    """The DFlash objective on ``(token ids, number of prompt tokens)`` rows, ``num_anchors`` blocks each."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width + drafter.block_size), NO_TOKEN)
    for i, (ids, _) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        hidden = target.model(tokens[:, :width].clamp(min=0), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i + 1] for i in drafter.target_layer_ids], dim=-1)
    prompts, lengths = torch.tensor([n for _, n in rows]), torch.tensor([len(ids) for ids, _ in rows])
    spans = (lengths - 1 - prompts).clamp(min=1)[:, None]
    anchors = prompts[:, None] + (torch.rand(len(rows), num_anchors) * spans).long()
    batch = TextBatch(tokens, prompts, lengths, features)
    return dflash_loss(
        drafter, target.get_input_embeddings(), target.lm_head.weight, batch, anchors, decay=decay
    ).loss  # fmt: skip


# ---------------------------------------------------------------- card


def write_card(folder: Path, prompts: Path, recipe: Recipe, seconds: dict[str, float]) -> None:
    """``README.md`` beside the weights: how the pair was made, and what it measures on the test prompts.

    Args:
        folder: the finished pair.
        prompts: folder of the prompt files.
        recipe: what was built.
        seconds: wall-clock time of each stage.
    """
    pair = load_pair(
        target=folder / "target", drafter=folder / "drafter", tokenizer=folder / "tokenizer", dtype="float32"
    )
    lines = (prompts / "tiny_test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if len(row["turns"]) == 1]
    block_sizes = candidate_block_sizes(pair.block_size, 2)
    records = replay(
        pair, [pair.encode(row["turns"]) for row in rows], block_sizes, max_new_tokens=recipe.answer_tokens
    )
    tau_NK = torch.tensor([[record.tau[b] for b in block_sizes] for record in records], dtype=torch.float64)
    parameters = {name: sum(p.numel() for p in getattr(pair, name).parameters()) for name in ("target", "drafter")}
    text = _CARD.format(
        target_parameters=parameters["target"],
        drafter_parameters=parameters["drafter"],
        layers=pair.drafter.config.num_hidden_layers,
        taps=", ".join(map(str, pair.drafter.target_layer_ids)),
        trained=pair.block_size,
        vocabulary=pair.vocab_size,
        recipe="\n".join(f"| {name} | {value} |" for name, value in asdict(recipe).items()),
        seconds="\n".join(f"| {name} | {value / 60:.1f} |" for name, value in seconds.items()),
        total=sum(seconds.values()) / 60,
        prompts=len(rows),
        tokens=recipe.answer_tokens,
        figures=_card_figures(tau_NK, block_sizes, pair.block_size),
        families=_card_families(tau_NK, block_sizes, pair.block_size, rows, records),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _card_figures(tau_NK: Tensor, block_sizes: Sequence[int], trained: int) -> str:
    best = best_choice(tau_NK)
    always, oracle = tau_NK[:, block_sizes.index(trained)].mean(), tau_NK.amax(dim=1).mean()
    lines = [
        f"| always-{trained} tau | {always:.3f} |",
        f"| oracle tau over {{{block_sizes[0]}..{block_sizes[-1]}}} | {oracle:.3f} (+{oracle / always - 1:.1%}) |",
    ]
    several = (tau_NK == tau_NK.amax(dim=1, keepdim=True)).sum(dim=1) > 1
    lines.append(f"| share of prompts with several best sizes | {several.double().mean():.1%} |")
    for column, b in enumerate(block_sizes):
        lines.append(f"| tau of always-{b} | {tau_NK[:, column].mean():.3f} |")
        lines.append(f"| share of prompts with best size {b} | {(best == column).double().mean():.1%} |")
    return "\n".join(lines)


def _card_families(
    tau_NK: Tensor, block_sizes: Sequence[int], trained: int, rows: Sequence[dict], records: Sequence[OracleRecord]
) -> str:
    lines = []
    for family in sorted({row["category"] for row in rows}):
        members = torch.tensor([row["category"] == family for row in rows])
        means = tau_NK[members].mean(dim=0)
        tokens = [len(r.output_ids) for r, inside in zip(records, members.tolist(), strict=True) if inside]
        favourite = block_sizes[int(means.argmax())]
        lines.append(
            f"| {family} | {len(tokens)} | {sum(tokens) / len(tokens):.0f} "
            f"| {means[block_sizes.index(trained)]:.2f} | {favourite} ({means.max():.2f}) |"
        )
    return "\n".join(lines)


_CARD = """# The embedded pair `tiny`

A small target and its DFlash drafter, made to exercise this framework on a CPU in minutes. It is not useful for
anything else: the target is far too small to compute or copy reliably.

- **tokenizer**: byte-level BPE, {vocabulary} entries, single digits, a chat template.
- **target**: `Qwen3ForCausalLM`, {target_parameters:,} parameters, fp32, trained on generated conversations
  (`blockpilot/models/tiny_corpus.py`), loss on the answers only.
- **drafter**: DFlash, {layers} layers, {drafter_parameters:,} parameters, B = {trained}, taps target layers {taps}.
  Trained on the target's own answers to other prompts than those that ship: random anchors, masked blocks, attention in
  both directions within a block, context strictly before the anchor, cross-entropy weighted by exp(-(k - 1) / decay).

`python -m blockpilot.models.build_tiny` rebuilds all of it from nothing and writes this page.

## Recipe

| setting | value |
| --- | --- |
{recipe}

## Build time

| stage | minutes |
| --- | --- |
{seconds}

{total:.0f} minutes in all, on two cores.

## Measured

On the {prompts} single-turn test prompts at T = 0, {tokens} new tokens, labels by replay. Of several best sizes the
smallest counts.

| figure | value |
| --- | --- |
{figures}

| family | prompts | mean output tokens | always-{trained} tau | best fixed size (its tau) |
| --- | --- | --- | --- | --- |
{families}
"""


# ---------------------------------------------------------------- entry


def main() -> None:
    """Runs every stage and copies the finished pair to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "build_tiny", help="stages and checkpoints")
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the finished pair goes")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "prompts", help="where the prompt files go")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    recipe = Recipe()
    args.work.mkdir(parents=True, exist_ok=True)
    with _timed(args.work, "tokenizer and prompts"):
        tokenizer = build_tokenizer(args.work, recipe)
        write_prompts(args.prompts, recipe)
    with _timed(args.work, "target"):
        target = build_target(args.work, recipe, tokenizer)
    with _timed(args.work, "answers"):
        answers = write_answers(args.work, recipe, tokenizer, target)
    with _timed(args.work, "drafter"):
        build_drafter(args.work, recipe, tokenizer, target, answers)
    for part in ("tokenizer", "target", "drafter"):
        shutil.copytree(args.work / part, args.out / part, dirs_exist_ok=True)
    write_card(args.out, args.prompts, recipe, json.loads((args.work / "seconds.json").read_text()))


@contextmanager
def _timed(work: Path, stage: str) -> Iterator[None]:
    """Adds the stage's wall-clock time to ``seconds.json``, over interruptions too."""
    began = time.perf_counter()
    try:
        yield
    finally:
        path = work / "seconds.json"
        seconds = json.loads(path.read_text()) if path.exists() else {}
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began
        path.write_text(json.dumps(seconds, indent=2))


if __name__ == "__main__":
    main()
