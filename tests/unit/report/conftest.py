"""A small evaluation: four policies on six prompts of two data sets, the last of them without rounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from blockpilot.metrics import DecodedPrompt, PolicySummary, summarize
from blockpilot.report import About, Curves, build_report, summary_rows, write_about, write_curves, write_decisions


@pytest.fixture(scope="session")
def decoded() -> list[DecodedPrompt]:
    """Decodes of ``autoregressive``, ``always-4``, ``pilot <b>`` and ``oracle``; the best block size is 3 or 4."""

    def decode(policy: str, index: int, block_size: int, tokens: int, rounds: int) -> DecodedPrompt:
        if index == 5:
            tokens = rounds = 0
        lengths = tuple(tokens // rounds + (turn < tokens % rounds) for turn in range(rounds))
        return DecodedPrompt(
            policy=policy,
            prompt_id=f"p{index}",
            dataset=("math", "code")[index % 2],
            block_sizes=(block_size,) * rounds,
            first_block_size=block_size,
            acceptance_lengths=lengths,
            output_tokens=1 + tokens,
            decode_seconds=0.1 * rounds,
            policy_seconds=0.001 * rounds,
            prefill_seconds=0.2,
        )

    return [
        decode(policy, index, block_size, 24, 24 if block_size == 1 else 8 + (block_size != best))
        for policy, choices in {
            "autoregressive": (1,) * 6,
            "always-4": (4,) * 6,
            "pilot <b>": (3, 4, 4, 4, 3, 4),
            "oracle": (3, 4, 3, 4, 3, 4),
        }.items()
        for index, (block_size, best) in enumerate(zip(choices, (3, 4, 3, 4, 3, 4), strict=True))
    ]


@pytest.fixture(scope="session")
def summaries(decoded: list[DecodedPrompt]) -> list[PolicySummary]:
    """Their summaries; the best tau is 3 everywhere."""
    best_tau = {f"p{index}": 3.0 for index in range(5)} | {"p5": float("nan")}
    return summarize(
        decoded, baseline="autoregressive", always="always-4", oracle="oracle", best_tau=best_tau, samples=100
    )


SCRIPT = "<script>document.title = 'broken'</script>"


@pytest.fixture(scope="session")
def built(
    tmp_path_factory: pytest.TempPathFactory, decoded: list[DecodedPrompt], summaries: list[PolicySummary]
) -> Path:
    """That evaluation as a run's folder, with labels of one more prompt, and its report; texts hold markup."""
    folder = tmp_path_factory.mktemp("built") / "run"
    (folder / ".hydra").mkdir(parents=True)
    rows = summary_rows(summaries)
    figures = {"val/regret": 0.05, "test/tau": 2.9, "policies": rows, "datasets": {"math": rows, "code & <b>": rows}}
    (folder / "metrics.json").write_text(json.dumps(figures))
    write_decisions(folder / "decisions.parquet", decoded)
    rounds = [[8, 9], [9, 8], [8, 9], [9, 8], [8, 9], [0, 0], [8, 8]]
    write_curves(
        folder / "prompts.parquet",
        Curves(
            prompt_ids=tuple(f"p{index}" for index in range(7)),
            datasets=tuple(("math", "code")[index % 2] for index in range(7)),
            texts=tuple(f"prompt {index} {SCRIPT}" for index in range(7)),
            block_sizes=(3, 4),
            committed_tokens=torch.tensor([[24 * (row[0] > 0)] * 2 for row in rounds]),
            rounds=torch.tensor(rounds),
        ),
    )
    write_about(folder, About("tiny <x>", "a CPU", "pilot <b>", "always-4", 4, None, {"git_commit": "abc"}))
    (folder / "history.jsonl").write_text(
        "".join(
            json.dumps({"epoch": e, "step": e, "train/loss": 2.0 - e, "val/regret": 0.1 / (e + 1)}) + "\n"
            for e in range(2)
        )
    )
    (folder / "config.yaml").write_text(
        f"dataset: {{toy: null}}\nseed: 0\ngeneration: {{temperature: 0.0, max_new_tokens: 24}}\nname: {SCRIPT!r}\n"
    )
    (folder / ".hydra/overrides.yaml").write_text("- seed=0\n- name=<script>\n")
    build_report(folder)
    return folder


@pytest.fixture
def run_folder(built: Path, tmp_path: Path) -> Path:
    """A copy to change, without the report."""
    return Path(shutil.copytree(built, tmp_path / "run", ignore=shutil.ignore_patterns("report.html", "plots")))
