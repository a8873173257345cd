"""What README and docs say can be typed: every block runs here, or says why not; every command's configuration holds.

A block of ``bash`` or ``python`` under ``<!-- not run: REASON -->`` is not run. All others are, page by page with the
tutorial first, in one folder, on few prompts. Of commands that are not run, options and configuration are checked.
Other languages (``text``, ``yaml``) are for reading.
"""

from __future__ import annotations

import ast
import csv
import importlib
import itertools
import json
import logging
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

import blockpilot as bp
from blockpilot.config import compose_command, names_of, preset_names, to_dataclass
from blockpilot.config.reference import COMMANDS
from blockpilot.runs.launch import launch

from .conftest import QUICK, QUICK_COLLECT, ROOT

FIRST = "docs/tutorial.md"
PAGES = [FIRST, "README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = list(dict.fromkeys(PAGES))
MARK = re.compile(r"<!-- not run: (\S.*) -->")
ENTRIES = {
    "python train.py": ("train", "train"),
    "python evaluate.py": ("evaluate", "evaluate"),
    "python -m blockpilot.collect": ("collect", "blockpilot.collect"),
    "python -m blockpilot.profile": ("profile", "blockpilot.profile"),
    "python -m blockpilot.train_drafter": ("train_drafter", "blockpilot.train_drafter"),
}
"""Hydra's commands: their configuration and the module with the entry."""
SCHEMAS = {ENTRIES[name][0]: schema for name, schema in COMMANDS.items()}
PROGRAMS = {"pip", "git", "cd", ".", "make", "python3", "wandb", "tensorboard"}
"""What a block may start besides python."""
FEW = {
    "train": [*QUICK, "evaluation.bootstrap_samples=20", "logger=csv"],
    "evaluate": [*QUICK_COLLECT, "evaluation.bootstrap_samples=20", "logger=csv"],
    "collect": QUICK_COLLECT,
    "profile": ["profile.contexts=[64]", "profile.repeats=1", "profile.warmup=1"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    language: str
    text: str
    reason: str | None
    """Why it is not run."""

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command line."""
        joined = self.text.replace("\\\n", " ").splitlines()
        chained = [part for line in joined for part in re.split(r"\s&&\s", line)]
        split = [shlex.split(line, comments=True) for line in chained]
        variables = re.compile("[A-Z_]+=")  # of the environment, before a program
        return [list(itertools.dropwhile(variables.match, words)) for words in split if words]


def blocks(page: str) -> list[Block]:
    found, lines = [], (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = MARK.fullmatch(lines[start - 1]) if start else None
        text = "\n".join(lines[start + 1 : number])
        found.append(Block(f"{page}:{start + 1}", lines[start][3:], text, mark and mark[1]))
        start = None
    assert start is None, f"{page} has a block without an end"
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def entry(words: list[str]) -> tuple[str, list[str]] | None:
    """The key of ``ENTRIES`` and the arguments of a command line; None for other programs."""
    for name in ENTRIES:
        head = name.split()
        if words[: len(head)] == head:
            return name, words[len(head) :]
    return None


def test_blocks_are_of_a_known_kind() -> None:
    assert len(ALL) > 20 and sum(block.reason is None for block in ALL) >= 8
    for block in ALL:
        assert block.language in ("bash", "python", "text", "yaml"), block.place
        if block.language == "python":
            ast.parse(block.text)
        for words in block.commands if block.language == "bash" else []:
            assert words[0] == "python" or words[0] in PROGRAMS, f"{block.place}: {words}"
            assert block.reason or words[0] == "python", f"{block.place}: {words[0]} is not run by this test"


# --- the configuration of every command


def jobs(arguments: list[str]) -> Iterator[list[str]]:
    """The overrides of one job of a sweep after another, so that every swept value is in one of them."""
    overrides = OverridesParser.create().parse_overrides([one for one in arguments if one != "-m"])
    values = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [one.input_line or ""]
        for one in overrides
    ]
    for place, own in enumerate(values):
        for value in own:
            yield [value if other == place else first[0] for other, first in enumerate(values)]
    if not values:
        yield []


def hydra_commands() -> list[tuple[str, str, list[str]]]:
    found = [(block, entry(words)) for block in ALL if block.language == "bash" for words in block.commands]
    return [(block.place, *command) for block, command in found if command is not None]


@pytest.mark.parametrize(("place", "name", "arguments"), hydra_commands())
def test_a_command_composes_and_validates(place: str, name: str, arguments: list[str]) -> None:
    command, _ = ENTRIES[name]
    if "+sweep=optuna" in arguments:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")
    tried = {tuple(job) for job in jobs(arguments)}
    for job in sorted(tried):
        if any(one.startswith(("hydra/launcher", "+sweep")) for one in job):
            compose_command(command, job, with_hydra=True)  # its own settings compose as well
        own = [one for one in job if not one.startswith(("hydra/launcher", "hydra.launcher"))]
        assert isinstance(to_dataclass(compose_command(command, own), SCHEMAS[command]), SCHEMAS[command])


def test_other_commands_are_there_with_their_options() -> None:
    checked = 0
    for block in ALL:
        for words in block.commands if block.language == "bash" else []:
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), block.place
            if words[0] != "python" or entry(words) is not None:
                continue
            script = words[2].replace(".", "/") if words[1] == "-m" else words[1]
            files = [ROOT / script, ROOT / f"{script}.py", ROOT / script / "__main__.py"]
            (file,) = [one for one in files if one.is_file()]
            source = file.read_text(encoding="utf-8")
            for option in (one for one in words[2:] if one.startswith("--")):
                assert f'"{option}"' in source, f"{block.place}: {option}"
                checked += 1
    assert checked > 5


# --- run


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all blocks that are not marked have run, a page after the other."""
    folder = tmp_path_factory.mktemp("docs")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for page in PAGES:
            names: dict[str, object] = {}
            for block in blocks(page):
                if block.reason is None and block.language == "bash":
                    for words in block.commands:
                        run_command(words, block.place, folder, patch)
                if block.reason is None and block.language == "python":
                    exec(compile(block.text, block.place, "exec"), names)
    root.handlers[:], root.level = handlers, level
    HydraConfig.instance().cfg = None
    yield folder


def run_command(words: list[str], place: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The command in this process, on few prompts, with caches in ``folder``."""
    own = entry(words)
    if own is None:
        assert words[:2] == ["python", "-m"], place
        module = importlib.import_module(words[2])
        module = importlib.import_module(f"{words[2]}.__main__") if hasattr(module, "__path__") else module
        assert module.main(words[3:]) == 0, place
        return
    command, module = ENTRIES[own[0]]
    caches = [f"latency_dir={folder}/data/latency"] if command == "profile" else [f"cache_dir={folder}/data/cache"]
    if command in ("train", "evaluate"):
        caches.append(f"evaluation.latency_dir={folder}/data/latency")
    patch.setattr("sys.argv", [own[0].split()[-1], *own[1], *FEW[command], *caches])
    try:
        launch(importlib.import_module(module).main, command)
    except SystemExit as end:
        raise AssertionError(f"{place}: {' '.join(words)} ended with {end.code}") from end


def test_the_blocks_that_are_not_marked_run(ran: Path) -> None:
    assert (ran / "outputs/first/policy/config.json").is_file() and (ran / "outputs/second/metrics.json").is_file()
    newest = [path.read_text() for path in (ran / "outputs").rglob("evaluate.log")]
    assert any("taking the newest run of tiny" in text and "outputs/first/policy" in text for text in newest)


# --- what the pages list


def listed(section: str) -> list[str]:
    """Keys in the first column of the tables of a section of docs/metrics.md."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = page.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    return [key for row in rows if row.startswith("| `") for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_metric_keys_are_those_that_runs_leave(ran: Path) -> None:
    # decoded, simulated (on all prompts, so that there is headroom to capture), with a latency profile
    runs = [ran / f"outputs/{name}" for name in ("first", "second", "fast")]
    files = [json.loads((folder / "metrics.json").read_text()) for folder in runs]
    left = {key for content in files for key in content} - {"policies", "datasets"}
    for folder in runs:
        (table,) = (folder / "csv").glob("metrics.csv")
        left |= set(next(csv.reader(table.open())))
    documented = [*listed("Training"), *listed("Evaluation")]
    assert len(documented) == len(set(documented))
    assert left == set(documented)
    rows = {key for content in files for row in content["policies"] for key in row}
    assert rows == set(listed("Rows of the table"))


def test_the_python_page_has_the_public_names() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: blockpilot\.(\S+)$", page, re.MULTILINE))
    assert {name for name in shown if not name.startswith("oracle.")} == set(bp.__all__) - {"oracle"}
    assert all(hasattr(bp.oracle, name.removeprefix("oracle.")) for name in shown if name.startswith("oracle."))


def test_the_page_of_keys_names_every_preset() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    groups = {group for command in SCHEMAS for group in names_of(command)[1]} | {"sweep"}
    for group in sorted(groups - {"drafter_training"}):
        (row,) = [line for line in page.splitlines() if re.match(rf"\| .*`{group}`.* \| `", line)]
        assert set(preset_names(group)) <= set(re.findall("`([^`]+)`", row)), group


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
