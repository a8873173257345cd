"""Train a drafter for a target: ``python -m blockpilot.train_drafter model=smollm2-135m``."""

import hydra
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, TrainDrafterConfig
from blockpilot.runs.launch import launch, run_job


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train_drafter")
def main(config: DictConfig) -> None:
    """One job."""
    from blockpilot.runs.train_drafter import train_drafter

    run_job(config, TrainDrafterConfig, train_drafter)


if __name__ == "__main__":
    launch(main, "train_drafter")
