"""From composed YAML to checked dataclasses and back; the only module that touches OmegaConf."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from blockpilot.config.checks import require
from blockpilot.config.places import CONF_DIR, preset_names
from blockpilot.errors import UserError, did_you_mean

T = TypeVar("T")


def to_dataclass(config: DictConfig, schema: type[T]) -> T:
    """A composed Hydra config as a checked ``schema`` instance.

    Raises:
        UserError: an unknown key, a value of the wrong type, a missing value or a broken limit.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"not set: {', '.join(missing)}; give a value to each, as in {missing[0]}=VALUE")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), config)
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(_one_line(error)) from error
    assert isinstance(result, schema)
    return result


def _one_line(error: OmegaConfBaseException) -> str:
    key, owner = error.full_key or "config", error.object_type
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(owner):
        place = key[: -len(str(error.key))]
        close = did_you_mean(str(error.key), [field.name for field in dataclasses.fields(owner)], place)
        return f"{key} is not a key{close}"
    return f"{key}: {str(error).splitlines()[0]}"


def compose_command(command: str, overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """What a command's configuration is with these overrides.

    Args:
        command: a file of ``conf/``, such as ``train``.
        overrides: as on the command line, without sweeps.
        with_hydra: whether Hydra's own settings are in it, under ``hydra``.
    """
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(command, list(overrides), return_hydra_config=with_hydra)


def names_of(command: str, presets: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """All keys of a command, with dots, and its groups.

    Args:
        command: a file of ``conf/``, such as ``train``.
        presets: those chosen, by group; which keys there are depends on them. Groups of other commands are ignored.
    """
    config = compose_command(command, with_hydra=True)
    groups = [name for name in config.hydra.runtime.choices if "/" not in name and name != "hydra"]
    chosen = [f"{group}={name}" for group, name in (presets or {}).items() if group in groups]
    if chosen:
        config = compose_command(command, chosen, with_hydra=True)
    content = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    assert isinstance(content, dict)
    return list(_keys(content)), groups


def _keys(content: Mapping[Any, Any], before: str = "") -> Iterator[str]:
    for name, value in content.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{before}{name}.")


def _presets(group: str) -> str:
    """A group's presets as ``--help`` shows them, beside a first column."""
    return textwrap.fill(", ".join(preset_names(group)), 98, subsequent_indent=" " * 16, break_on_hyphens=False)


OmegaConf.register_new_resolver("presets", _presets, replace=True)  # of the help texts in conf/


def to_plain(config: object) -> dict[str, Any]:
    """A config dataclass as nested plain containers, fit for JSON, hyper-parameters and W&B."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return dataclasses.asdict(config)


def to_yaml(config: object) -> str:
    """A config dataclass as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def load_preset(group: str, name: str, schema: type[T]) -> T:
    """One YAML of ``conf/`` as a dataclass.

    Raises:
        UserError: there is no such preset; the message lists those there are.
    """
    names = preset_names(group)
    require(name in names, group, name, "one of " + ", ".join(names))
    loaded = OmegaConf.load(CONF_DIR / group / f"{name}.yaml")
    assert isinstance(loaded, DictConfig)
    return to_dataclass(loaded, schema)
