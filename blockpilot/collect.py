"""Fill the label cache alone: ``python -m blockpilot.collect``; several writers with ``collect.num_shards``."""

import hydra
from omegaconf import DictConfig

from blockpilot.config import CONF_DIR, CollectRunConfig
from blockpilot.runs.launch import launch, run_job


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="collect")
def main(config: DictConfig) -> None:
    """One job."""
    from blockpilot.runs.collect import collect

    run_job(config, CollectRunConfig, collect)


if __name__ == "__main__":
    launch(main, "collect")
