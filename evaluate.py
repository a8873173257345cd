"""A policy beside the standard ones, by real decoding: ``python evaluate.py``, of the newest trained policy."""

import hydra
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, EvaluateConfig
from blockpilot.runs.launch import launch, run_job


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="evaluate")
def main(config: DictConfig) -> None:
    """One job."""
    from blockpilot.runs.evaluate import evaluate

    run_job(config, EvaluateConfig, evaluate)


if __name__ == "__main__":
    launch(main, "evaluate")
