"""Charts that set policies beside each other: tau, regret prompt by prompt, acceptance lengths round by round."""

from __future__ import annotations

from collections import Counter

import torch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockpilot.report.charts.chart import Chart
from blockpilot.report.drawing import BLUE, LOOKS, ON_BLUE, SMALL, TEXT, dress, legend, new_figure
from blockpilot.report.run_files import Run
from blockpilot.report.table import COLUMNS, NO_VALUE, plain, prompts_text

_QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)


def tau_by_policy(run: Run) -> Chart:
    """Tau of every policy with its 95 % interval. Plain autoregressive decoding (tau 1 by definition) is left out."""
    shown = [row for row in run.rows if not plain(row)]
    figure = new_figure(height=1.0 + 0.36 * len(shown))
    axes = figure.subplots()
    for place, row in enumerate(shown[::-1]):
        if row["tau"] is None:
            continue
        ends = (row["tau_low"], row["tau_high"])
        axes.plot(ends, (place, place), color=BLUE, linewidth=6, alpha=0.3, solid_capstyle="butt")
        axes.plot(row["tau"], place, color=BLUE, marker="o", markersize=6)
        axes.annotate(
            f"{row['tau']:.3f}", (row["tau"], place), xytext=(0, 6), textcoords="offset points", ha="center", **SMALL
        )
    axes.set_ylim(-0.6, len(shown) - 0.2)
    dress(axes, x_label="tau with 95% interval (tokens per round)", grid="x")
    axes.set_yticks(range(len(shown)), [row["policy"] for row in shown[::-1]], **TEXT)
    column = next(one for one in COLUMNS if one.key == "tau")
    rows = [(row["policy"], column.cell(row)[0], " ".join(column.cell(row)[1:]) or NO_VALUE) for row in shown]
    return Chart(
        "tau-by-policy", "tau by policy",
        f"Mean tau of each policy as a dot, its 95% interval as a bar; {prompts_text(run.rows)}. Plain decoding has "
        "tau 1 and is left out.",
        figure, ("policy", "tau", "95% interval"), tuple(rows),
    )  # fmt: skip


def regret_distribution(run: Run) -> Chart:
    """How much of the best candidate's tau each policy gives away, as the share of prompts that lose no more."""
    figure = new_figure(height=3.6)
    axes = figure.subplots()
    rows = []
    for index, policy in enumerate(run.choosing):
        losses = run.loss(policy)[run.has_rounds].sort().values
        look = LOOKS[index % len(LOOKS)]
        if len(losses):
            shares = (torch.arange(len(losses)) + 1) / len(losses)
            axes.step(
                losses.tolist(), shares.tolist(), where="post", color=look.colour, linestyle=look.line,
                marker=look.marker, markersize=3, markevery=max(len(losses) // 8, 1), linewidth=1.3, label=policy,
            )  # fmt: skip
            none = float((losses <= 0).double().mean())
            cut = torch.quantile(losses, torch.tensor(_QUANTILES, dtype=losses.dtype)).tolist()
            rows.append((policy, f"{losses.mean():.2%}", f"{none:.0%}", *(f"{value:.2%}" for value in cut)))
    dress(axes, x_label="regret of a prompt (share of the best tau)", y_label="share of prompts up to it")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylim(0, 1.03)
    legend(axes)
    return Chart(
        "regret", "regret, prompt by prompt",
        "For each policy the share of prompts whose regret is no larger than a value: a line further up and to the "
        "left gives away less. A per-round policy can be below 0.",
        figure, ("policy", "mean", "none lost", *(f"{100 * q:.0f}% of prompts up to" for q in _QUANTILES)), tuple(rows),
    )  # fmt: skip


def acceptance_lengths(run: Run) -> Chart:
    """Share of the rounds that committed each number of tokens, for the policy in question and always-B."""
    policies = list(dict.fromkeys((run.about.policy, run.about.always)))
    counts = {p: Counter(length for one in run.by_policy[p] for length in one.acceptance_lengths) for p in policies}
    lengths = range(1, max((length for count in counts.values() for length in count), default=1) + 1)
    figure = new_figure(height=3.2)
    axes = figure.subplots()
    width = 0.8 / len(policies)
    for index, (policy, count) in enumerate(counts.items()):
        shares = [count[length] / max(count.total(), 1) for length in lengths]
        places = [length + (index - (len(policies) - 1) / 2) * width for length in lengths]
        # told apart by hatching as well as by colour
        axes.bar(
            places, shares, width=width, color=LOOKS[index].colour, alpha=0.75, label=policy, hatch=("", "////")[index],
            edgecolor=ON_BLUE if index else "none", linewidth=0,
        )  # fmt: skip
    dress(axes, x_label="acceptance length (tokens committed by a round)", y_label="share of rounds")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    rows = tuple((str(length), *(str(count[length]) for count in counts.values())) for length in lengths)
    rounds = " and ".join(f"{count.total():,} rounds of {policy}" for policy, count in counts.items())
    return Chart(
        "acceptance-lengths", "acceptance lengths",
        f"How many tokens a round committed, the token that every round gives included: {rounds}.",
        figure, ("tokens", *(f"rounds of {policy}" for policy in policies)), rows,
    )  # fmt: skip
