"""Imports point one way, and reading the configuration stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import blockpilot

PACKAGE = Path(blockpilot.__file__).parent

# a module imports only from its own part and from parts on lines above it (config and errors share one)
RANK = {
    "config": 0,
    "errors": 0,
    "models": 1,
    "prompts": 2,
    "decoding": 3,
    "metrics": 4,
    "oracle": 5,
    "learning": 6,
    "drafter_training": 7,
    "policies": 8,
    "report": 9,
    "runs": 10,
}
# modules that are run or imported from outside: they may import anything, and nothing may import them
ENTRIES = {
    "blockpilot.models.build_tiny",
    "blockpilot.cache",
    "blockpilot.collect",
    "blockpilot.dashboard",
    "blockpilot.profile",
    "blockpilot.train_drafter",
}
CONFIGURATION = ("omegaconf", "hydra")


def module_name(path: Path, package: Path) -> str:
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, name: str) -> set[str]:
    """Full names of all that the file imports, wherever in it: modules, and names as ``module.name``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = package[: len(package) - node.level + 1] + base
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def complaint(name: str, other: str) -> str | None:
    """What is wrong with module ``name`` importing ``other``, if anything."""
    rank = RANK[name.split(".")[1]]
    root, *parts = other.split(".")
    if root in ("omegaconf", "hydra"):
        return (
            "belongs to blockpilot.config.compose"
            if rank < RANK["runs"] and name != "blockpilot.config.compose"
            else None
        )
    if root != "blockpilot":
        return None
    if not parts or any(f"{other}.".startswith(f"{entry}.") for entry in ENTRIES):
        return "is an entry"
    if parts[0] not in RANK:
        return "comes from blockpilot/__init__.py"
    return "is above it in the order" if RANK[parts[0]] > rank else None


def violations(package: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name = module_name(path, package)
        if name == "blockpilot" or name in ENTRIES:
            continue
        if name.split(".")[1] not in RANK:
            found.append(f"{name} has no place in the order")
            continue
        for other in sorted(imported(path, name)):
            reason = complaint(name, other)
            if reason:
                found.append(f"{name} imports {other}, which {reason}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("models/pair.py", "from blockpilot.oracle.table import LabelTable", "above it in the order"),
        ("models/pair.py", "def f():\n    import blockpilot.runs.train", "above it in the order"),
        ("models/pair.py", "from blockpilot import oracle", "above it in the order"),
        ("models/pair.py", "from ..oracle import table", "above it in the order"),
        ("models/__init__.py", "from ..oracle import table", "above it in the order"),
        ("errors.py", "from blockpilot.models import pair", "above it in the order"),
        ("runs/train.py", "from blockpilot.collect import main", "is an entry"),
        ("runs/train.py", "from blockpilot import profile", "is an entry"),
        ("runs/train.py", "from blockpilot.models.build_tiny import build", "is an entry"),
        ("runs/train.py", "import blockpilot as bp", "is an entry"),
        ("runs/train.py", "from blockpilot import load_pair", "from blockpilot/__init__.py"),
        ("learning/module.py", "from omegaconf import OmegaConf", "belongs to blockpilot.config.compose"),
        ("learning/module.py", "def f():\n    import hydra.utils", "belongs to blockpilot.config.compose"),
        ("misc.py", "", "no place in the order"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, text: str, expected: str) -> None:
    path = tmp_path / "blockpilot" / module
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = violations(tmp_path / "blockpilot")
    assert found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("runs/train.py", "from hydra.core.hydra_config import HydraConfig\nfrom blockpilot.report import tables"),
        ("config/compose.py", "from omegaconf import OmegaConf\nfrom blockpilot.errors import UserError"),
        ("models/pair.py", "from . import drafter\nfrom .drafter import X\nfrom blockpilot.models import target"),
        ("models/build_tiny.py", "from blockpilot.runs import train"),
        ("__init__.py", "from blockpilot.decoding.engine import generate"),
    ],
)
def test_a_right_import_is_not(tmp_path: Path, module: str, text: str) -> None:
    path = tmp_path / "blockpilot" / module
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert violations(tmp_path / "blockpilot") == []


@pytest.mark.parametrize("module", ["blockpilot", "blockpilot.config"])
def test_configuration_loads_no_heavy_library(module: str) -> None:
    heavy = {"transformers", "lightning", "wandb", "datasets", "matplotlib"}
    code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == []


def test_decoding_loads_nothing_that_only_training_needs() -> None:
    code = (
        "import sys, blockpilot as bp; bp.FixedPolicy(4), bp.generate, bp.load_pair, bp.custom_generate;"
        "print([n for n in ('lightning', 'torchmetrics', 'pyarrow', 'wandb', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
