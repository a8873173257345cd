"""The summaries that W&B is told of are those that the page of metric keys has."""

from __future__ import annotations

import re

from blockpilot.report.metric_keys import SUMMARIES, summary_key
from tests.metric_page import ROW, documented, sections


def test_the_page_says_the_summary_of_every_key() -> None:
    rows = {summary.strip(): first for first, summary in ROW.findall(sections()["Summaries"])}
    listed = {key: summary for summary in ("min", "max") for key in re.findall("`([^`]+)`", rows[summary])}
    assert listed == SUMMARIES
    assert rows["last"] == "every other key"
    assert listed.keys() <= documented()
    assert (summary_key("val/regret"), summary_key("eval/tau")) == ("val/regret.min", "eval/tau")
