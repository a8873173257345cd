"""Measure what rounds cost on this device: ``python -m blockpilot.profile model=tiny``."""

import hydra
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, ProfileRunConfig
from blockpilot.runs.launch import launch, run_job


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="profile")
def main(config: DictConfig) -> None:
    """One job."""
    from blockpilot.runs.profile import profile

    run_job(config, ProfileRunConfig, profile)


if __name__ == "__main__":
    launch(main, "profile")
