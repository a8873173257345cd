"""What loggers are left with by real runs, read back from their files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from urllib.request import url2pathname

import pytest
import yaml

from blockpilot.report import read_decisions
from tests.wandb_file import LoggedRun, read_run

from .conftest import Finished

Run = Callable[..., Finished]


def test_every_job_of_a_sweep_is_a_complete_wandb_run(run: Run, tmp_path: Path) -> None:
    sweep = tmp_path / "a sweep"
    done = run(
        "train.py", "-m", "predictor.k=1,2", "logger.tags=[first,tiny]", f"hydra.sweep.dir={sweep}",
        f"cache_dir={tmp_path / 'label cache'}", environment=[("WANDB_SILENT", "false")],
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "anonymous" not in done.output
    jobs = [read_run(sweep / job) for job in ("0", "1")]
    assert jobs[0].run.run_id != jobs[1].run.run_id
    for job, folder in zip(jobs, (sweep / "0", sweep / "1"), strict=True):
        assert job.run.run_group == f"{tmp_path.name}-a sweep"
        assert (job.run.job_type, list(job.run.tags)) == ("train", ["tiny", "first"])
        assert job.exit_code == 0
        config = {key: value for key, value in job.config.items() if key != "_wandb"}
        assert config == yaml.safe_load((folder / "config.yaml").read_text()) and "${" not in json.dumps(config)
        figures_are_there(job, folder)
        tables_and_images_are_there(job, folder)
        artifacts_are_references(job, folder)
    assert [job.config["predictor"]["k"] for job in jobs] == [1, 2]


def figures_are_there(job: LoggedRun, folder: Path) -> None:
    """The history of the epochs and, at the last step, of test and evaluation; summaries as they were defined."""
    assert [row["_step"] for row in job.history] == list(range(len(job.history)))
    steps = [row["trainer/global_step"] for row in job.history]
    assert steps[0] == 0 and steps == sorted(steps) == [0, 0, 1, 1] + [2] * (len(steps) - 4)
    epochs = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for key in ("train/loss", "val/regret", "val/tau", "val/loss"):
        logged = [row[key] for row in job.history if key in row]
        assert logged == pytest.approx([row[key] for row in epochs])
    metrics = json.loads((folder / "metrics.json").read_text())
    final = {key: value for key, value in metrics.items() if key.startswith(("test/", "eval/")) and value is not None}
    (row,) = [row for row in job.history if "eval/tau" in row]
    assert final.items() <= row.items() and {"test/regret_always", "eval/tau_gain_low"} <= final.keys()
    assert final.items() <= job.summary.items()
    assert job.summary["val/regret"] == {"min": pytest.approx(metrics["val/regret"])}
    assert job.summary["val/tau"] == {"max": pytest.approx(max(row["val/tau"] for row in epochs))}
    assert job.metrics["val/regret"].summary.min and job.metrics["val/tau"].summary.max
    assert {job.metrics[key].step_metric for key in ("*", "val/regret", "val/tau")} == {"trainer/global_step"}


def tables_and_images_are_there(job: LoggedRun, folder: Path) -> None:
    table = job.table("decisions")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    decisions = read_decisions(folder / "decisions.parquet")
    assert len(rows) == len(decisions) == 18
    for row, one in zip(rows, decisions, strict=True):
        assert (row["policy"], row["prompt_id"], row["dataset"]) == (one.policy, one.prompt_id, one.dataset)
        assert (row["first_block_size"], row["output_tokens"]) == (one.first_block_size, one.output_tokens)
        for name in ("block_sizes", "acceptance_lengths", "drafted_sizes"):
            assert tuple(map(int, row[name].split())) == getattr(one, name)
        for name in ("decode_seconds", "policy_seconds", "prefill_seconds"):
            assert row[name] == pytest.approx(getattr(one, name))
        assert row["rounds"] == len(one.acceptance_lengths)
        assert row["tau"] == pytest.approx(sum(one.acceptance_lengths) / row["rounds"])
    table = job.table("policies")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    written = json.loads((folder / "metrics.json").read_text())["policies"]
    assert [row.pop("dataset") for row in rows] == ["all"] * len(written)
    assert [{**row, "choices": json.loads(row["choices"])} for row in rows] == [
        {key: pytest.approx(value) if isinstance(value, float) else value for key, value in row.items()}
        for row in written
    ]
    charts = {path.stem for path in (folder / "plots").glob("*.png")}
    assert {key for row in job.history for key in row if key.startswith("figures/")} == {f"figures/{c}" for c in charts}
    for chart in charts:
        (image,) = (job.folder / "media/images/figures").glob(f"{chart}_*.png")
        assert image.read_bytes() == (folder / f"plots/{chart}.png").read_bytes()


def artifacts_are_references(job: LoggedRun, folder: Path) -> None:
    own = {name: one for name, one in job.artifacts.items() if one.type in ("policy", "labels")}
    assert sorted(one.type for one in own.values()) == ["labels", "labels", "policy"]
    files = [entry for one in own.values() for entry in one.manifest.contents]
    assert all(entry.ref.startswith("file://") and not entry.local_path for entry in files)
    places = [Path(url2pathname(entry.ref.removeprefix("file://"))) for entry in files]
    assert [path.stat().st_size for path in places] == [entry.size for entry in files]
    assert sorted(path.name for path in places) == ["config.json", *["manifest.json"] * 2, "model.safetensors"]
    policy = job.metadata(f"policy-{job.run.run_id}")
    assert policy == json.loads((folder / "policy/config.json").read_text())
    for name, one in own.items():
        if one.type == "labels":
            assert job.metadata(name)["key"]["pair.drafter"] == policy["pair"]["drafter"]


def test_tensorboard_has_figures_charts_and_the_table(run: Run, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    simulated = ("evaluation.method=simulate", "evaluation.policies=[]", "logger=tensorboard")
    done = run("train.py", *simulated)
    assert done.code == 0, done.output
    before = {path: path.read_bytes() for path in (folder / "tensorboard").iterdir()}
    metrics = json.loads((folder / "metrics.json").read_text())
    again = run("evaluate.py", *simulated, "policy=fixed", "policy.block_size=15", f"hydra.run.dir={folder}")
    assert again.code == 0, again.output
    assert {path: path.read_bytes() for path in (folder / "tensorboard").iterdir()} == before

    trained, evaluated = (
        accumulator.EventAccumulator(str(folder / name)).Reload() for name in ("tensorboard", "tensorboard-2")
    )
    epochs = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for key in ("train/loss", "val/regret"):
        events = trained.Scalars(key)
        assert [event.step for event in events] == [0, 1]
        assert [event.value for event in events] == pytest.approx([row[key] for row in epochs])
    for key in ("test/regret_always", "eval/tau"):
        (event,) = trained.Scalars(key)
        assert (event.step, event.value) == (2, pytest.approx(metrics[key]))
    assert "test/regret" not in evaluated.Tags()["scalars"]
    (event,) = evaluated.Scalars("eval/tau_always")
    assert math.isfinite(event.value)
    assert set(trained.Tags()["images"]) >= {"figures/tau-by-policy", "figures/training"}
    text = trained.Tensors("policies/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| dataset | policy |") and "| all | predictor |" in text
    config = trained.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(config.removeprefix("```yaml").removesuffix("```"))["logger"]["kind"] == "tensorboard"
