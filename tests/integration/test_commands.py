"""The commands as a user runs them: what they leave behind, and the one line they answer to a mistake."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import blockpilot as bp
from blockpilot.decoding import LatencyProfile
from blockpilot.report import read_decisions

from .conftest import QUICK_COLLECT, ROOT, Finished

Run = Callable[..., Finished]
ROWS = ["autoregressive", "always-16", "best_fixed", "random", "predictor", "oracle"]


def test_train_then_evaluate(run: Run, tmp_path: Path) -> None:
    done = run("train.py", "evaluation.every_n_epochs=1")
    assert done.code == 0, done.output
    folder = tmp_path / "run"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [row["policy"] for row in metrics["policies"]] == ROWS
    for row in metrics["policies"]:
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert row["speedup"] > 0 and row["tau_pooled"] >= 1
    assert metrics["eval/label_agreement"] == 1
    assert {"eval/tau", "eval/tau_pooled", "eval/speedup", "eval/regret", "eval/tau_always", "test/regret"} <= set(
        metrics
    )
    for name in ("report.html", "plots/regret.png", "prompts.parquet", "run.json", "history.jsonl", "config.yaml",
                 "train.log", "policy/config.json", "policy/model.safetensors"):  # fmt: skip
        assert (folder / name).stat().st_size > 0
    assert list((folder / "checkpoints").glob("*.ckpt"))
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    decisions = read_decisions(folder / "decisions.parquet")
    assert len(decisions) == 3 * len(ROWS)
    for row in ROWS:
        assert row in done.output
    assert str(folder / "report.html") in done.output.replace("\n", "")
    policy = bp.load_policy(folder / "policy", bp.load_pair("tiny"))
    assert policy.block_sizes == (14, 15, 16, 17, 18)

    again = run("evaluate.py", f"policy.path={folder / 'policy'}", f"hydra.run.dir={tmp_path / 'again'}",
                "evaluation.num_prompts=2", "logger=csv")  # fmt: skip
    assert again.code == 0, again.output
    assert "labels of tiny-test: all there" in again.output  # the test labels were there already
    table = json.loads((tmp_path / "again/metrics.json").read_text())["policies"]
    assert [row["policy"] for row in table] == ROWS
    assert not (tmp_path / "again/wandb").exists() and list((tmp_path / "again").rglob("metrics.csv"))

    seen = run("evaluate.py", f"policy.path={folder / 'policy'}", "dataset=jsonl",
               "dataset.jsonl.train.path=data/prompts/tiny_train.jsonl", "dataset.jsonl.train.limit=20",
               "generation.max_new_tokens=40", f"hydra.run.dir={tmp_path / 'seen'}", quick=False)  # fmt: skip
    assert seen.code == 2 and "the policy was trained on all" in seen.output


def test_every_rule_is_a_row_of_training_and_a_policy_of_evaluation(run: Run, tmp_path: Path) -> None:
    rows = "evaluation.policies=[best_fixed,random,ema,confidence,per_round,oracle]"
    done = run("train.py", "evaluation.method=simulate", rows, "logger=none")
    assert done.code == 0, done.output
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    names = [
        "autoregressive",
        "always-16",
        "best_fixed",
        "random",
        "ema",
        "confidence",
        "per_round",
        "predictor",
        "oracle",
    ]
    assert [row["policy"] for row in metrics["policies"]] == names
    assert all(row["num_prompts"] == 8 and row["speedup"] is None for row in metrics["policies"])
    assert metrics["eval/label_agreement"] == 1 and "eval/tau" in metrics and "eval/speedup" not in metrics

    tau = {row["policy"]: row["tau"] for row in metrics["policies"]}
    folder = f"policy.path={tmp_path / 'run/policy'}"
    for policy, method, more in (("per_round", "decode", [folder]), ("best_fixed", "simulate", [])):
        out = tmp_path / policy
        done = run("evaluate.py", f"policy={policy}", f"evaluation.method={method}", *more, "logger=none",
                   "evaluation.policies=[confidence]", f"hydra.run.dir={out}")  # fmt: skip
        assert done.code == 0, done.output
        again = json.loads((out / "metrics.json").read_text())
        assert [row["policy"] for row in again["policies"]] == ["autoregressive", "always-16", "confidence", policy]
        assert again["eval/tau"] == pytest.approx(again["policies"][-1]["tau"])
        # the same test prompts, decoded or simulated
        assert again["policies"][2]["tau"] == tau["confidence"]
        assert policy == "best_fixed" or again["eval/tau"] == tau["per_round"]
    decisions = {
        (one.policy, one.block_sizes != one.drafted_sizes) for one in read_decisions(out / "decisions.parquet")
    }
    assert ("confidence", True) in decisions and ("best_fixed", True) not in decisions


def test_a_profile_gives_evaluation_a_regret_in_speed(run: Run, tmp_path: Path) -> None:
    latency = tmp_path / "latency"
    done = run("-m", "blockpilot.profile", "model=tiny", "profile.block_sizes=[15,16]", "profile.contexts=[64]",
               "profile.repeats=2", "profile.warmup=1", f"latency_dir={latency}", quick=False)  # fmt: skip
    assert done.code == 0, done.output
    [path] = latency.glob("*.json")
    profile = LatencyProfile.load(path)
    assert (profile.model, profile.block_sizes, profile.contexts, profile.repeats) == ("tiny", (15, 16), (64,), 2)
    assert LatencyProfile.load(tmp_path / "run/latency.json") == profile
    for png in (path.with_suffix(".png"), tmp_path / "run/latency.png"):
        assert png.read_bytes().startswith(b"\x89PNG")
    assert "16 (B)" in done.output and str(path) in done.output.replace("\n", "")

    evaluation = ["evaluate.py", "policy=fixed", "policy.block_size=15", f"evaluation.latency_dir={latency}",
                  "evaluation.num_prompts=2", "logger=none", f"hydra.run.dir={tmp_path / 'evaluation'}"]  # fmt: skip
    lacking = run(*evaluation, "oracle.radius=1")
    assert lacking.code == 2 and "Traceback" not in lacking.output
    assert "block size 17 is not in the latency profile of tiny" in lacking.output

    done = run(*evaluation, "oracle.radius=0")
    assert done.code == 0, done.output
    assert "costs of rounds by latency profile" in done.output and "(speed)" in done.output
    metrics = json.loads((tmp_path / "evaluation/metrics.json").read_text())
    rows = {row["policy"]: row for row in metrics["policies"]}
    assert metrics["eval/regret_speed"] == rows["fixed-15"]["regret_speed"]
    assert metrics["eval/regret_speed_always"] == rows["always-16"]["regret_speed"] == 0  # there is no other candidate
    assert rows["autoregressive"]["regret_speed"] is None
    assert (metrics["eval/best_fixed_speed"], metrics["eval/oracle_speedup_over_always"]) == (16, 1)
    assert "regret (speed)" in (tmp_path / "evaluation/report.html").read_text()

    # training for speed: a profile in which 17 costs what 16 costs
    tables = ("draft_seconds", "verify_seconds", "round_seconds", "round_seconds_low", "round_seconds_high",
              "acceptance_length")  # fmt: skip
    wide = {name: tuple((*row, row[-1]) for row in getattr(profile, name)) for name in tables}
    dataclasses.replace(profile, block_sizes=(15, 16, 17), **wide).save(tmp_path / "wide.json")  # type: ignore[arg-type]
    training = ["train.py", "objective=speed", "predictor.k=1", "evaluation.method=simulate", "logger=none",
                f"hydra.run.dir={tmp_path / 'training'}"]  # fmt: skip
    without = run(*training, f"evaluation.latency_dir={tmp_path / 'nowhere'}")
    assert without.code == 2 and "objective=speed needs a latency profile" in without.output
    done = run(*training, f"evaluation.latency_profile={tmp_path / 'wide.json'}")
    assert done.code == 0, done.output
    metrics = json.loads((tmp_path / "training/metrics.json").read_text())
    assert {"val/regret_speed", "test/regret_speed", "test/regret_speed_always", "eval/regret_speed"} <= set(metrics)
    assert json.loads((tmp_path / "training/policy/config.json").read_text())["objective"] == "speed"
    dearer = {**wide, "round_seconds": tuple((*row[:-1], 2 * row[-1]) for row in wide["round_seconds"])}
    dataclasses.replace(profile, block_sizes=(15, 16, 17), **dearer).save(tmp_path / "other.json")  # type: ignore[arg-type]
    other = run(*training, f"evaluation.latency_profile={tmp_path / 'other.json'}", "trainer.resume=true")
    assert other.code == 2 and "was made with labels=[" in other.output


def test_the_profile_command_hides_no_module_of_python() -> None:
    code = "import blockpilot.profile, cProfile, profile, torch.profiler; print(profile.__file__); cProfile.run('1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "blockpilot" not in done.stdout.splitlines()[0]


def test_a_multirun_is_three_runs_three_wandb_folders_and_one_cache(run: Run, tmp_path: Path) -> None:
    done = run("train.py", "-m", "predictor.k=1,2,4", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    # k = 4 is beyond the labels: its job says so, the others are not lost
    assert done.code == 2
    assert "predictor.k=4 is not allowed" in done.output and "raise oracle.radius" in done.output
    assert "Traceback" not in done.output
    for job, k in (("0", 1), ("1", 2)):
        config = json.loads((tmp_path / "sweep" / job / "policy/config.json").read_text())
        assert config["block_sizes"] == list(range(16 - k, 16 + k + 1))
        assert len(list((tmp_path / "sweep" / job / "wandb").glob("offline-run-*"))) == 1
    assert not (tmp_path / "sweep/2/wandb").exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py", "predictor.k=-1"], ["predictor.k=-1", "at least 0"]),
        (["train.py", "predictor.k=5"], ["predictor.k=5", "oracle.radius=3", "raise oracle.radius"]),
        (["train.py", "device=cuda:7"], ["device='cuda:7'"]),
        (["evaluate.py", "policy=fixed", "policy.block_size=0"], ["policy.block_size=0", "1 or more"]),
        (["evaluate.py", "policy.path=nowhere"], ["nowhere", "config.json"]),
        (["train.py", "dataset=jsonl"], ["dataset.jsonl.train.path"]),
        (["train.py", "dataset=jsonl", "dataset.jsonl.train.path=no.jsonl"], ["no.jsonl"]),
        (["train.py", "drafter.path=README.md"], ["drafter.path", "README.md"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(run: Run, arguments: list[str], words: list[str]) -> None:
    done = run(*arguments, quick=False)
    assert done.code != 0
    assert "Traceback" not in done.output, done.output
    for word in words:
        assert word in done.output, done.output


def test_a_model_that_is_not_here_is_told_in_seconds(run: Run, tmp_path: Path) -> None:
    offline = [("HF_HOME", str(tmp_path / "hub")), ("HF_ENDPOINT", "http://127.0.0.1:9")]
    done = run("train.py", "model=qwen3-8b", "predictor.k=3", quick=False, environment=offline)
    assert done.code == 2 and "Traceback" not in done.output
    assert "Qwen/Qwen3-8B" in done.output and "model.target=/path/to/folder" in done.output
    assert done.seconds < 60


def test_a_malformed_prompt_file_names_its_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "a", "turns": ["one"]}\n{"id": "b", "turns": []}\n')
    done = run("train.py", "dataset=jsonl", f"dataset.jsonl.train.path={path}", quick=False)
    assert done.code == 2 and f"{path}, line 2: turns must be a non-empty list" in done.output


def test_an_interrupted_collection_goes_on_and_gives_the_same_rows(run: Run, tmp_path: Path) -> None:
    arguments = ["-m", "blockpilot.collect", "collect.shard_size=4", *QUICK_COLLECT]
    folders = {name: tmp_path / name for name in ("whole", "broken")}

    def command(name: str) -> list[str]:
        return [sys.executable, *arguments, f"cache_dir={folders[name]}", f"hydra.run.dir={tmp_path / 'run'}"]

    subprocess.run(command("whole"), cwd=ROOT, check=True, capture_output=True, timeout=280)
    process = subprocess.Popen(command("broken"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(folders["broken"].rglob("shard-*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list(folders["broken"].rglob("shard-*.parquet"))) < 8
    # two writers share what is left
    writers = [
        subprocess.Popen([*command("broken"), "collect.num_shards=2", f"collect.shard_index={i}"], cwd=ROOT,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(2)
    ]  # fmt: skip
    assert [writer.wait(timeout=280) for writer in writers] == [0, 0]
    shards = {name: sorted(folder.rglob("shard-*.parquet")) for name, folder in folders.items()}
    assert len(shards["whole"]) == len(shards["broken"]) == 8
    for ours, theirs in zip(shards["whole"], shards["broken"], strict=True):
        assert ours.name == theirs.name
        assert (
            pq.read_table(ours)
            .replace_schema_metadata(None)
            .equals(pq.read_table(theirs).replace_schema_metadata(None))
        )
