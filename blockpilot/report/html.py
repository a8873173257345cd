"""One self-contained HTML page per run: figures inline, nothing fetched, light or dark as the reader prefers.

Knows markup; every number comes ready from summaries and figures.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from blockpilot.metrics import PolicySummary
from blockpilot.report.plots import BLUE, INK, RULE
from blockpilot.report.table import COLUMNS, REGRET_SPEED, columns, has_speed, prompts_text, summary_cells

_MEANINGS = (
    ("block size", "positions verified per round, anchor included: mean over a prompt's rounds, then over prompts"),
    ("tau", "tokens committed per round: mean over a prompt's rounds, then over prompts. Higher is better"),
    ("tau gain", "difference in tau to always using the trained block size, relative to the latter's tau"),
    (
        "speedup",
        "seconds per output token of autoregressive decoding over those of this policy. Prefill is in neither; "
        "the policy's own time is included",
    ),
    (
        "speed gain",
        "difference in measured tokens per second to always using the trained block size, relative to the latter's; "
        "the policy's own time is included",
    ),
    (
        "accuracy",
        "share of the prompts on which the policy reaches the tau of the best candidate; where several are best, each "
        "is right",
    ),
    ("regret", "share of the best candidate's tau that the policy gives away, mean over prompts. 0% is perfect"),
    (
        REGRET_SPEED,
        "regret in tokens per second instead of tau: tau divided by the seconds a round of that size costs on the "
        "device of the latency profile. The policy's own time is not in it",
    ),
    (
        "headroom captured",
        "how much of the way from always using the trained block size (0%) to the best candidate for every prompt "
        "(100%) the policy covers. Below 0% the trained block size alone does better",
    ),
)
"""(heading, meaning) of the columns of ``summary_cells``."""
assert tuple(name for name, _ in _MEANINGS) == COLUMNS

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #24292f; --soft: #57606a; --rule: #d0d7de; --panel: #f6f8fa;
  --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --rule: #3a424c; --panel: #161b22;
    --blue: #3b94d1; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .75rem 1.5rem; margin: 0; }
dt { color: var(--soft); font-size: .85rem; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
thead th { color: var(--soft); font-size: .85rem; font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--page); }
tbody th { font-weight: 600; }
small { display: block; color: var(--soft); font-size: .8rem; }
.meanings { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1rem; font-size: .9rem; }
.meanings dd { margin: 0; }
.note { font-size: .9rem; }
.figures { columns: 26rem 2; column-gap: 2.5rem; }
figure { margin: 0 0 2rem; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: .5rem; }
svg { display: block; width: 100%; max-width: 33rem; height: auto; color: var(--ink); }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: .4rem; padding: .75rem 1rem;
  overflow-x: auto; font-size: .85rem; line-height: 1.45; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  th, td { padding: .4rem .5rem; }
  .meanings { grid-template-columns: 1fr; gap: 0; }
  .meanings dd { margin-bottom: .5rem; }
}
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    summaries: Sequence[PolicySummary],
    figures: Mapping[str, Figure],
    config_yaml: str,
    facts: Mapping[str, str],
    datasets: Mapping[str, Sequence[PolicySummary]] | None = None,
) -> None:
    """Writes the page, replacing a file that is there.

    Args:
        path: the HTML file.
        title: heading of the page.
        summaries: rows of the table.
        figures: caption -> figure, in reading order.
        config_yaml: the resolved configuration, shown folded.
        facts: label -> value, shown at the top: model, device, data sets, seed.
        datasets: data set -> rows of a table of its own.
    """
    fact_list = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    drawings = "".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>{_svg(figure, caption, f'f{index}-')}</figure>\n"
        for index, (caption, figure) in enumerate(figures.items())
    )
    shown = columns(has_speed(summaries))
    meanings = "".join(
        f"<dt>{escape(heading)}</dt><dd>{escape(meaning)}.</dd>\n" for heading, meaning in _MEANINGS if heading in shown
    )
    sections = "".join(f"{_section(f'Policies on {name}', rows)}\n" for name, rows in (datasets or {}).items())
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<dl class="facts">{fact_list}</dl>
{_section("Policies", summaries)}
<h2>What the columns mean</h2>
<dl class="meanings">
{meanings}</dl>
<p class="note">Brackets hold 95% bootstrap intervals over prompts, the same resampled prompts for all policies. A gain
is a paired comparison: it can be firm even where the intervals of tau overlap. "Better" and "worse" say that its
interval has 0 on one side only, "not distinguishable" that it does not; among twenty policies that make no difference,
about one would be called better or worse by chance. A prompt whose output ended with the prefill token has no rounds
and so no tau: it is in no figure made of tau.</p>
{sections}<h2>Figures</h2>
<div class="figures">
{drawings}</div>
<h2>Configuration</h2>
<details><summary>Resolved configuration of this run</summary><pre>{escape(config_yaml)}</pre></details>
</main>
</body>
</html>
"""
    Path(path).write_text(page, encoding="utf-8")


def _section(title: str, summaries: Sequence[PolicySummary]) -> str:
    """A headed table that scrolls by itself on a narrow page."""
    return (
        f"<h2>{escape(title)}</h2>\n<p>{prompts_text(summaries)}</p>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{_table(summaries)}</div>'
    )


def _table(summaries: Sequence[PolicySummary]) -> str:
    shown = columns(has_speed(summaries))
    headings = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("policy", *shown))
    rows = []
    for one in summaries:
        cells = "".join(
            f"<td>{escape(figure)}{''.join(f'<small>{escape(remark)}</small>' for remark in remarks)}</td>"
            for figure, *remarks in map(summary_cells(one).__getitem__, shown)
        )
        rows.append(f'<tr><th scope="row">{escape(one.policy)}</th>{cells}</tr>\n')
    return f"<table><thead><tr>{headings}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table>"


def _svg(figure: Figure, caption: str, prefix: str) -> str:
    """A figure as an inline SVG element that follows the page's colours.

    Ids get ``prefix``: matplotlib numbers its elements from 1 in every figure, and a page needs them unique.
    """
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "blockpilot"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    svg = svg.replace(INK, "currentColor").replace(RULE, "var(--rule)").replace(BLUE, "var(--blue)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
