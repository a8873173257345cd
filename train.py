"""Collect labels, train the block-size predictor, evaluate it by real decoding: ``python train.py``."""

import hydra
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, TrainConfig
from blockpilot.runs.launch import launch, optimized, run_job


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(config: DictConfig) -> float | None:
    """One job; its result is for a sweeper that searches."""
    from blockpilot.runs.train import train

    return run_job(config, TrainConfig, optimized(train))


if __name__ == "__main__":
    launch(main, "train")
