"""From composed YAML to checked dataclasses and back; the only module that touches OmegaConf."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from blockpilot.config.checks import require
from blockpilot.config.places import CONF_DIR, preset_names
from blockpilot.errors import UserError

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
        key = getattr(error, "full_key", None) or "config"
        raise UserError(f"{key}: {str(error).splitlines()[0]}") from error
    assert isinstance(result, schema)
    return result


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
