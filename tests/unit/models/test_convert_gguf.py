"""GGUF files: the converted model computes what the file says, appears whole, and tells what it came from."""

from __future__ import annotations

import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.utils import WeakFileLock
from transformers import AutoTokenizer, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from blockpilot.config import CollectConfig, GenerationConfig, OracleConfig
from blockpilot.errors import UserError
from blockpilot.models import convert_gguf as conversion
from blockpilot.models import load_pair
from blockpilot.models.locate import locate
from blockpilot.models.pair import load_target
from blockpilot.oracle.collect import open_cache
from blockpilot.prompts import PromptRow
from tests.toy import make_drafter, make_target

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("1", "2")]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversions go."""
    monkeypatch.setattr(conversion, "ROOT", tmp_path)
    return tmp_path / "data/models"


def small(kind: str = "llama", **extra: Any) -> PreTrainedModel:
    model = make_target(kind, vocab_size=len(TOKENS), hidden_size=64, layers=3, **extra)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order GGUF keeps them for Llama: the two halves of a head take turns."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def halved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path, model: PreTrainedModel, *, quantized: bool = False, pre: str = "gpt-2", extra: str = "", lacks: str = ""
) -> Path:
    """A GGUF file of a model, as llama.cpp lays it out; ``quantized`` rounds its matrices, and the model's own too."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("A Toy")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if extra == "rope.scaling.type":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        if lacks and lacks in name:
            continue
        *owner, leaf = name.split(".")
        block = f"blk.{owner[2]}." if "layers" in owner else ""
        part = PARTS[".".join(owner[3:] if block else owner)]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        heads = heads if config.model_type == "llama" else None
        values = parameter.detach().numpy()
        values = np.ascontiguousarray(values if heads is None else interleaved(values, heads))
        if quantized and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q4_1
            packed = gguf.quants.quantize(values, kind)
            rounded = gguf.quants.dequantize(packed, kind)
            parameter.data.copy_(torch.tensor(rounded if heads is None else halved(rounded, heads)))
            writer.add_tensor(f"{block}{part}.{leaf}", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{block}{part}.{leaf}", values)
    if extra == "rope_freqs":
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def error_of(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        locate(str(file), key="model.target")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("model.target=")
    return message


# ---- what it computes


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
def test_a_converted_model_is_the_one_in_the_file(tmp_path: Path, kind: str, tied: bool, quantized: bool) -> None:
    model = small(kind, tied=tied)
    before = logits(model)
    file = write(tmp_path / "toy.gguf", model, quantized=quantized)
    folder = locate(str(file), key="model.target")
    loaded = load_target(folder, "auto", "sdpa")
    assert torch.equal(logits(model), before) != quantized
    assert {name: tuple(p.shape) for name, p in loaded.named_parameters()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    assert loaded.dtype == torch.float32 and loaded.config.tie_word_embeddings == tied
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps  # 1e-06, not what 32 bits make of it
    assert "Toy" not in (folder / "config.json").read_text()


def test_its_tokenizer_is_the_one_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "toy.gguf", small())
    tokenizer = AutoTokenizer.from_pretrained(locate(str(file), key="model.target"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, len(TOKENS))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello hello"}], return_dict=False)
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "hello", "Ġhello", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello hello"


@pytest.mark.parametrize(("pre", "tokens"), [("gpt-2", ["12"]), ("smollm", ["1", "2"])])
def test_smollm_splits_numbers_into_digits(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    file = write(tmp_path / "toy.gguf", small(), pre=pre)
    tokenizer = AutoTokenizer.from_pretrained(locate(str(file), key="model.target"))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12")) == tokens


def test_a_file_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip leaves it: a folder with the files, one beside it that lists them; its import would fail."""
    package = tmp_path / "site/toy_weights"
    facts = tmp_path / "site/toy_weights-1.2.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    write(package / "toy.gguf", small())
    (package / "__init__.py").write_text("import what_is_not_installed\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.2\n")
    (facts / "RECORD").write_text("toy_weights/__init__.py,,\ntoy_weights/toy.gguf,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = locate("pip://toy-weights@1.2/toy.gguf", key="model.target")
    assert folder == locate(str(package / "toy.gguf"), key="model.target")
    with pytest.raises(UserError, match=r"toy-weights 1\.2 is installed, .* name toy-weights@1\.2$"):
        locate("pip://toy-weights@1.3/toy.gguf", key="model.target")


# ---- what it says it is


def test_quantisation_is_part_of_the_identity_and_the_files_name_is_not(tmp_path: Path) -> None:
    model = small()
    plain, packed = (write(tmp_path / f"{q}.gguf", small(), quantized=q) for q in (False, True))
    drafter = make_drafter(model)
    pairs = [load_pair(target=file, drafter=drafter, device="cpu") for file in (plain, packed)]
    identities = [pair.identity["target"] for pair in pairs]
    assert identities[0] != identities[1]
    assert [text.split(" ")[1] for text in identities] == ["F32", "Q4_1"]
    assert pairs[1].origin is not None and pairs[1].origin.startswith("True.gguf sha256:")
    cache = open_cache(
        tmp_path,
        "toy",
        pairs[1],
        [PromptRow("a", "b", ("hello",))],
        GenerationConfig(),
        OracleConfig(),
        CollectConfig(),
    )
    assert cache.manifest["provenance"]["target"] == pairs[1].origin
    moved = packed.rename(tmp_path / "moved.gguf")
    assert load_pair(target=moved, drafter=drafter, device="cpu").identity == pairs[1].identity


# ---- once, and whole


def test_a_second_run_converts_nothing(tmp_path: Path, models: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "toy.gguf", small())
    with caplog.at_level(logging.INFO, logger=conversion.__name__):
        folders = {locate(str(file), key="model.target") for _ in range(2)}
    assert [record.getMessage() for record in caplog.records] == [f"converting toy.gguf, once: {min(folders)}"]
    assert len(folders) == 1 and min(folders).parent == models
    # other content under the same name
    assert locate(str(write(file, small(seed=5))), key="model.target") not in folders


def test_a_conversion_that_breaks_leaves_nothing(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "toy.gguf", small())

    def full(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_sync", full)
        assert "No space left on device" in error_of(file)
    assert [path.name for path in models.iterdir() if path.suffix != ".lock"] == []
    assert locate(str(file), key="model.target").is_dir()


def test_what_a_killed_conversion_left_is_not_taken(tmp_path: Path, models: Path) -> None:
    file = write(tmp_path / "toy.gguf", small())
    whole = locate(str(file), key="model.target")
    files = {path.name for path in whole.iterdir()}
    partial = whole.rename(whole.with_name(f".{whole.name}.partial"))
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stale.json").write_text("{")
    again = locate(str(file), key="model.target")
    assert {path.name for path in again.iterdir()} == files
    assert not partial.exists() and load_target(again, "auto", "sdpa") is not None


def locate_there(file: str, folder: str) -> None:
    conversion.ROOT = Path(folder)
    locate(file, key="model.target")


def test_a_second_process_waits_for_the_first(tmp_path: Path, models: Path) -> None:
    file = write(tmp_path / "toy.gguf", small())
    folder = locate(str(file), key="model.target")
    away = folder.rename(tmp_path / "away")
    with WeakFileLock(models / f".{folder.name}.lock"):
        other = multiprocessing.get_context("fork").Process(target=locate_there, args=(str(file), str(tmp_path)))
        other.start()
        time.sleep(0.5)
        assert other.is_alive() and not folder.exists()
        away.rename(folder)
        changed = (folder / "model.safetensors").stat().st_mtime_ns
    other.join(60)
    assert other.exitcode == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed


# ---- what it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": "rope_freqs"}, "rotary embedding is scaled (rope_freqs.weight)"),
        ({"extra": "rope.scaling.type"}, "rotary embedding is scaled (llama.rope.scaling.type)"),
        (
            {"lacks": "layers.1.mlp.up_proj"},
            "lacks weights of a LlamaForCausalLM: ['model.layers.1.mlp.up_proj.weight']",
        ),
    ],
    ids=str,
)
def test_what_the_reader_would_pass_over_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    assert message in error_of(write(tmp_path / "toy.gguf", small(), **options))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file(tmp_path: Path, models: Path, share: float) -> None:
    file = write(tmp_path / "toy.gguf", small())
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    message = error_of(file)
    assert "cannot be converted" in message or "is truncated or no GGUF file" in message
    assert share > 0.5 or "is truncated or no GGUF file" in message
    assert [path for path in models.iterdir() if path.is_dir()] == []


def test_without_the_package_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "toy.gguf", small())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install gguf" in error_of(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no such" in error_of(tmp_path / "none.gguf")
