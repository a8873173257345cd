"""What one prefill distribution can tell about the best block size: label noise, families, and twins.

Reads the labels of training and test prompts and prints, for the test prompts, the headroom over always-B that is
captured by knowing only

- the best single size of the training prompts,
- each prompt's family (a column of the prompt files), so its family's best size among the training prompts,
- the prefill, through kernel ridge regression of the utility curve on one input, its penalty chosen by cross-validation
  on the training prompts: a learner without a training loop, to tell what the data allow from what the MLP makes of it,

and what the best size of a prompt is worth to its *twin*: the training prompt with the nearest distribution (total
variation). Twins differ only in what the distribution does not say.

    python -m blockpilot.collect oracle.store_logits=true oracle.store_hidden=true
    python benchmarks/knowable.py TRAIN_CACHE TEST_CACHE --prompts data/prompts/tiny_*.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.learning.losses import has_rounds
from blockpilot.metrics import bootstrap_interval, headroom_captured, regret_per_prompt
from blockpilot.oracle import LabelCache, LabelTable

PENALTIES = [10.0**power for power in range(0, 7)]
FOLDS = 5


def load(folder: Path, trained: int, radius: int) -> LabelTable:
    """Prompts with rounds, candidates within the radius."""
    table = LabelCache.existing(folder).load().restrict(range(trained - radius, trained + radius + 1))
    return table.select(has_rounds(table.rounds).nonzero()[:, 0])


def inputs(table: LabelTable) -> dict[str, Tensor]:
    """Dense inputs of each prompt, float64 ``[N, F]``."""
    assert table.logits is not None and table.hidden is not None, "collect with oracle.store_logits and store_hidden"
    log_probs = table.logits.double().log_softmax(dim=-1)
    return {"probs": log_probs.exp(), "log_probs": log_probs, "hidden": table.hidden.double()}


def ridge(train_NF: Tensor, gains_NK: Tensor, other_MF: Tensor, penalty: float) -> Tensor:
    """Predicted gains ``[M, K]`` of kernel ridge regression on standardised inputs."""
    deviation, mean = torch.std_mean(train_NF, dim=0)
    train_NF, other_MF = ((rows - mean) / (deviation + 1e-6) for rows in (train_NF, other_MF))
    offset_K = gains_NK.mean(dim=0)
    kernel_NN = train_NF @ train_NF.T
    kernel_NN.diagonal().add_(penalty)
    weights_NK = torch.linalg.solve(kernel_NN, gains_NK - offset_K)
    return other_MF @ (train_NF.T @ weights_NK) + offset_K


def cross_validated(train_NF: Tensor, tau_NK: Tensor, gains_NK: Tensor) -> float:
    """The penalty whose choices have the lowest regret on left-out folds."""
    fold_N = torch.arange(len(train_NF)) % FOLDS
    regrets = []
    for penalty in PENALTIES:
        choice_N = torch.zeros(len(train_NF), dtype=torch.int64)
        for fold in range(FOLDS):
            out = fold_N == fold
            choice_N[out] = ridge(train_NF[~out], gains_NK[~out], train_NF[out], penalty).argmax(dim=1)
        regrets.append(float(regret_per_prompt(tau_NK, choice_N).mean()))
    return PENALTIES[regrets.index(min(regrets))]


def line(name: str, tau_NK: Tensor, choice_N: Tensor, always: int) -> str:
    """Regret and headroom captured with its 95 % bootstrap interval over prompts."""
    own_N = tau_NK.gather(1, choice_N[:, None])[:, 0]
    curves = own_N, tau_NK[:, always], tau_NK.amax(dim=1)
    low, high = bootstrap_interval(headroom_captured, *curves)
    regret = float(regret_per_prompt(tau_NK, choice_N).mean())
    return f"{name:<44} {regret:7.2%} {float(headroom_captured(*curves)):8.0%} [{low:.0%}, {high:.0%}]"


def families(paths: list[Path], column: str) -> dict[str, str]:
    """Family by prompt id."""
    rows = [json.loads(text) for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    return {str(row["id"]): str(row[column]) for row in rows}


def family_choice(train: LabelTable, test: LabelTable, family_of: Mapping[str, str], default: int) -> Tensor:
    """Column of the best size of each test prompt's family among the training prompts."""
    of_train, of_test = ([family_of[i.split("#")[0]] for i in table.prompt_ids] for table in (train, test))
    best = {}
    for family in set(of_train):
        members = [row for row, own in enumerate(of_train) if own == family]
        best[family] = int(train.tau[members].mean(dim=0).argmax())
    return torch.tensor([best.get(family, default) for family in of_test])


def twins(train: LabelTable, test: LabelTable) -> tuple[Tensor, Tensor]:
    """Nearest training prompt of each test prompt by total variation, and the distance."""
    ours, theirs = inputs(test)["probs"], inputs(train)["probs"]
    distance_N, nearest_N = [], []
    for row in ours:
        distance = (theirs - row).abs().sum(dim=1) / 2
        distance_N.append(distance.min())
        nearest_N.append(distance.argmin())
    return torch.stack(nearest_N), torch.stack(distance_N)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--trained", type=int, default=16, help="B")
    parser.add_argument("--radius", type=int, default=3, help="k")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL files with the family of each id")
    parser.add_argument("--family", default="category", help="their column")
    options = parser.parse_args()
    train, test = (load(folder, options.trained, options.radius) for folder in (options.train, options.test))
    always, tau_NK = options.radius, test.tau
    best_NK = tau_NK == tau_NK.amax(dim=1, keepdim=True)
    oracle_gain = float(tau_NK.amax(dim=1).mean() / tau_NK[:, always].mean() - 1)
    print(f"{len(train)} training and {len(test)} test prompts with rounds, k = {options.radius}")
    print(f"oracle over always-{options.trained}: {oracle_gain:+.1%} tau; B is a best size of "
          f"{float(best_NK[:, always].double().mean()):.0%} of the test prompts, several are best of "
          f"{float((best_NK.sum(dim=1) > 1).double().mean()):.0%}")  # fmt: skip
    print(f"{'what is known':<44} {'regret':>7} {'headroom captured':>18}")
    fixed = int(train.tau.mean(dim=0).argmax())
    print(line("nothing: always-B", tau_NK, torch.full((len(test),), always), always))
    print(
        line(
            f"best single size of training ({train.block_sizes[fixed]})",
            tau_NK,
            torch.full((len(test),), fixed),
            always,
        )
    )
    if options.prompts:
        known = families(options.prompts, options.family)
        choice_N = family_choice(train, test, known, fixed)
        sizes = {known[i.split("#")[0]]: train.block_sizes[c] for i, c in zip(test.prompt_ids, choice_N, strict=True)}
        counts = Counter(known[i.split("#")[0]] for i in test.prompt_ids)
        print("best size in training (test prompts):", ", ".join(f"{f} {b} ({counts[f]})" for f, b in sizes.items()))
        print(line(f"the family ({options.family})", tau_NK, choice_N, always))
    gains_NK = train.tau - train.tau[:, always, None]
    for name, train_NF in inputs(train).items():
        penalty = cross_validated(train_NF, train.tau, gains_NK)
        choice_N = ridge(train_NF, gains_NK, inputs(test)[name], penalty).argmax(dim=1)
        print(line(f"{name}, kernel ridge (penalty {penalty:g})", tau_NK, choice_N, always))
    nearest_N, distance_N = twins(train, test)
    close = (distance_N < 0.01).nonzero()[:, 0]
    print(f"twins: {len(close)} test prompts have a training prompt within 0.01 total variation")
    if len(close):
        borrowed = train.tau[nearest_N[close]].argmax(dim=1)
        print(line("  the best size of the twin, these prompts", tau_NK[close], borrowed, always))
        print(line("  best single size, these prompts", tau_NK[close], torch.full((len(close),), fixed), always))


if __name__ == "__main__":
    main()
