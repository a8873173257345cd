"""The embedded pair is what its card says: sizes, keys, prompts, and the floor of its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import blockpilot as bp
from blockpilot.metrics import best_choice

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "blockpilot/models/tiny"


def test_what_ships(pair: bp.Pair) -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md", ".jinja"}
    assert isinstance(pair.tokenizer, PreTrainedTokenizerFast) and isinstance(pair.target, Qwen3ForCausalLM)
    assert 1000 <= len(pair.tokenizer) <= 4096
    assert pair.tokenizer.chat_template and pair.tokenizer.pad_token and pair.tokenizer.mask_token
    assert 1e6 <= sum(p.numel() for p in pair.target.parameters()) <= 6e6


def test_drafter_configuration_is_that_of_published_checkpoints(pair: bp.Pair) -> None:
    config = json.loads((ASSETS / "drafter/config.json").read_text())
    assert config["block_size"] == pair.block_size == 16
    assert config["num_target_layers"] == pair.target.config.num_hidden_layers
    assert config["dflash_config"]["mask_token_id"] == pair.tokenizer.mask_token_id == pair.mask_token_id
    assert len(set(config["dflash_config"]["target_layer_ids"])) >= 3
    assert config["num_hidden_layers"] >= 2


def test_prompts_are_enough_and_apart() -> None:
    read = {
        split: [json.loads(line) for line in (ROOT / f"data/prompts/tiny_{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    assert len(read["train"]) >= 1500 and len(read["test"]) >= 300
    for rows in read.values():
        assert all(row["id"] and row["dataset"] == "tiny" and row["turns"] for row in rows)
        assert len({tuple(row["turns"]) for row in rows}) == len(rows)
    turns = {split: {turn for row in rows for turn in row["turns"]} for split, rows in read.items()}
    assert not turns["train"] & turns["test"]


def test_floor_of_the_figures(pair: bp.Pair, prompts: list[list[int]]) -> None:
    """T = 0, 160 new tokens, and the card states the very figures that come out here."""
    sizes = [14, 15, 16, 17, 18]
    records = bp.oracle.replay(pair, prompts, sizes, max_new_tokens=160)
    tau = torch.tensor([[record.tau[b] for b in sizes] for record in records], dtype=torch.float64)
    always, oracle = float(tau[:, 2].mean()), float(tau.amax(dim=1).mean())
    assert 4 <= always <= 9
    assert oracle >= 1.03 * always
    shares = torch.bincount(best_choice(tau), minlength=5) / len(tau)
    assert int((shares >= 0.05).sum()) >= 4
    card = (ASSETS / "README.md").read_text()
    stated = re.search(r"always-16 tau \| ([\d.]+)", card)
    assert stated and abs(float(stated[1]) - always) < 0.02
