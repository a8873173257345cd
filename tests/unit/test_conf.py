"""Every YAML under conf/ composes into the command it is for and passes the typed configuration."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from blockpilot.config import (
    CONF_DIR,
    ROOT,
    CollectRunConfig,
    DatasetConfig,
    DrafterConfig,
    EvaluateConfig,
    ModelConfig,
    ProfileRunConfig,
    PromptSource,
    TrainConfig,
    TrainDrafterConfig,
    compose_command,
    load_preset,
    preset_names,
    to_dataclass,
)
from blockpilot.errors import UserError
from blockpilot.prompts import load_prompts

SCHEMAS: dict[str, type[CollectRunConfig] | type[ProfileRunConfig] | type[TrainDrafterConfig]] = {
    "collect": CollectRunConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "profile": ProfileRunConfig,
    "train_drafter": TrainDrafterConfig,
}
WITH_DATA = ("collect", "train", "evaluate")
SHARED = {"model", "drafter", "dataset", "hydra"}
GROUPS = {
    "collect": SHARED,
    "train": SHARED | {"predictor", "preprocess", "objective", "trainer", "logger", "sweep"},
    "evaluate": SHARED | {"policy", "logger"},
    "profile": SHARED - {"dataset"},
    "train_drafter": (SHARED - {"drafter"}) | {"drafter_training", "logger"},
}
# an optional extra brings what these are made of
EXTRAS = {("sweep", "optuna"): ("hydra_plugins.hydra_optuna_sweeper", "needs the extra optuna")}
# what a preset leaves to the user
REQUIRED = {
    ("model", "local"): ["model.target=/some/folder", "drafter.path=/some/folder"],
    ("drafter", "local"): ["drafter.path=/some/folder"],
    ("dataset", "jsonl"): ["dataset.jsonl.train.path=prompts.jsonl"],
    ("dataset", "txt"): ["dataset.txt.train.path=prompts.txt"],
}
FILE_DATASETS = ("tiny", "tiny-prose", "tiny-tasks", "jsonl", "txt")
MATHS = ("gsm8k", "math500", "aime24", "aime25")
CODE = ("humaneval", "mbpp", "livecodebench", "swe-bench-lite")
HUB_DATASETS = (*MATHS, *CODE, "mt-bench", "alpaca", "sharegpt")


def composed(command: str, *overrides: str, hydra: bool = False) -> DictConfig:
    return compose_command(command, overrides, with_hydra=hydra)


def configured(command: str, *overrides: str) -> Any:
    return to_dataclass(composed(command, *overrides), SCHEMAS[command])


def presets() -> list[tuple[str, str, str]]:
    """(command, group, preset) of every file in every folder of conf/."""
    folders = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
    return [
        (command, group, name)
        for command, group in itertools.product(SCHEMAS, folders)
        if group in GROUPS[command]
        for name in preset_names(group)
    ]


def test_no_file_is_left_untested() -> None:
    files = {path.relative_to(CONF_DIR).with_suffix("").as_posix() for path in CONF_DIR.rglob("*.yaml")}
    tested = set(SCHEMAS) | {f"{group}/{name}" for _, group, name in presets()}
    # what dataset means for a model when nobody says; reached by choosing the model
    tested |= {f"dataset/default/{name}" for name in preset_names("model")}
    # and what a predictor needs less of for a small model
    tested |= {f"{group}/{name}" for group in ("predictor/fit", "drafter_training/fit") for name in preset_names(group)}
    assert files == tested


@pytest.mark.parametrize(("command", "group", "name"), presets())
def test_preset_composes_and_validates(command: str, group: str, name: str) -> None:
    if (group, name) in EXTRAS:
        module, reason = EXTRAS[group, name]
        pytest.importorskip(module, reason=reason)
    choice = f"+{group}={name}" if group == "sweep" else f"{group}={name}"
    required = [key for key in REQUIRED.get((group, name), []) if key.split(".")[0] in composed(command)]
    config = configured(command, choice, *required)
    if group in ("model", "drafter", "policy", "objective"):
        assert getattr(config, group).name == name
    if group in ("preprocess", "logger"):
        assert getattr(config, group).kind == name
    if group == "dataset" and name != "mix":
        assert list(config.dataset) == [name]


@pytest.mark.parametrize(("group", "name"), REQUIRED)
def test_what_a_preset_leaves_open_is_an_error_naming_the_key(group: str, name: str) -> None:
    key = REQUIRED[group, name][0].split("=")[0]
    assert key in OmegaConf.missing_keys(composed("train", f"{group}={name}"))
    if group in ("model", "drafter"):
        with pytest.raises(UserError, match=key):
            configured("train", f"{group}={name}")
    if group == "dataset":
        with pytest.raises(UserError, match=key):
            load_prompts(name, configured("train", f"{group}={name}").dataset[name].train)


@pytest.mark.parametrize("name", preset_names("model"))
def test_model_and_drafter_presets_load_by_themselves(name: str) -> None:
    if name == "local":
        with pytest.raises(UserError, match="target"):
            load_preset("model", name, ModelConfig)
    else:
        assert load_preset("model", name, ModelConfig).name == name
        assert load_preset("drafter", name, DrafterConfig).name == name


def test_the_defaults_are_the_embedded_pair() -> None:
    config = configured("train")
    assert (config.model.target, config.drafter.path) == ("pkg://tiny/target", "pkg://tiny/drafter")
    assert list(config.dataset) == ["tiny"]
    assert (config.predictor.k, config.oracle.radius, config.preprocess.kind) == (2, 3, "probs")
    assert (config.logger.kind, config.logger.mode) == ("wandb", None)


@pytest.mark.parametrize("command", SCHEMAS)
def test_yaml_says_what_the_types_say(command: str) -> None:
    """A value left out of the YAML, or one that differs from the documented default, is a second truth."""
    config = configured(command)
    required = {name: getattr(config, name) for name in ("model", "drafter", "dataset") if name in composed(command)}
    defaults = SCHEMAS[command](**required)
    if isinstance(defaults, TrainConfig):  # the one value that follows the model
        assert config.predictor.width == 256
        defaults.predictor.width = 256
    assert config == defaults
    raw = OmegaConf.to_container(composed(command), throw_on_missing=False)
    assert isinstance(raw, dict)
    assert set(raw) == set(SCHEMAS[command].__dataclass_fields__)


@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        ([], 256),
        (["model=smollm2-135m"], 256),
        (["model=qwen3-8b"], 2048),
        (["predictor.width=512"], 512),
        (["model=tiny", "predictor=mlp"], 256),
    ],
)
def test_the_predictors_width_follows_the_model_unless_told(overrides: list[str], width: int) -> None:
    assert configured("train", *overrides).predictor.width == width


@pytest.mark.parametrize("name", preset_names("drafter_training/fit"))
def test_the_drafter_that_is_trained_follows_the_model(name: str) -> None:
    assert configured("train_drafter", f"model={name}").drafter_training != configured("train_drafter").drafter_training


# --- the drafter and the data set follow the model


@pytest.mark.parametrize("command", WITH_DATA)
@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-8b", "llama3.1-8b-instruct"])
def test_drafter_and_dataset_follow_the_model(command: str, model: str) -> None:
    config = configured(command, f"model={model}")
    assert config.model.name == config.drafter.name == model
    assert config.drafter.path.startswith("z-lab/")
    assert list(config.dataset) == ["gsm8k"]


def test_the_drafter_follows_the_model_to_be_profiled() -> None:
    config = configured("profile", "model=qwen3-8b", "profile.block_sizes=[1,...,4,16]")
    assert config.model.name == config.drafter.name == "qwen3-8b"
    assert config.profile.block_sizes == [1, 2, 3, 4, 16]


def test_profiles_are_stored_where_evaluation_looks() -> None:
    assert configured("profile").latency_dir == configured("train").evaluation.latency_dir


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("profile.block_sizes=[]", "profile.block_sizes=[]"),
        ("profile.block_sizes=[0,4]", "profile.block_sizes=[0, 4]"),
        ("profile.contexts=[0]", "profile.contexts=[0]"),
        ("profile.contexts=[a]", "profile.contexts"),
        ("profile.repeats=0", "profile.repeats=0"),
        ("profile.warmup=-1", "profile.warmup=-1"),
        ("device=gpu", "device='gpu'"),
    ],
)
def test_bad_values_of_a_profile_name_key_and_value(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        configured("profile", override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_drafter_and_dataset_can_be_overridden() -> None:
    config = configured("train", "model=qwen3-8b", "drafter=qwen3-4b", "dataset=mbpp", "predictor.k=3")
    assert (config.model.name, config.drafter.name, list(config.dataset)) == ("qwen3-8b", "qwen3-4b", ["mbpp"])
    assert config.predictor.k == 3


@pytest.mark.parametrize("group", ["model", "drafter", "dataset", "preprocess", "logger"])
def test_unknown_preset_lists_the_known(group: str) -> None:
    with pytest.raises(MissingConfigException) as caught:
        composed("train", f"{group}=nope")
    assert f"Could not find '{group}/nope'" in str(caught.value)
    assert all(f"\t{name}" in str(caught.value) for name in preset_names(group))


# --- data sets


def test_all_data_sets_are_there() -> None:
    assert set(preset_names("dataset")) == {*FILE_DATASETS, *HUB_DATASETS, "mix"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("dataset=gsm8k", ["gsm8k"]),
        ("dataset=[gsm8k]", ["gsm8k"]),
        ("dataset=[gsm8k,mbpp]", ["gsm8k", "mbpp"]),
        ("dataset=[mbpp,tiny,mt-bench]", ["mbpp", "tiny", "mt-bench"]),
        ("dataset=mix", ["gsm8k", "mbpp", "humaneval", "mt-bench"]),
        ("dataset=[mix,alpaca]", ["gsm8k", "mbpp", "humaneval", "mt-bench", "alpaca"]),
    ],
)
@pytest.mark.parametrize("command", WITH_DATA)
def test_one_data_set_or_several(command: str, choice: str, names: list[str]) -> None:
    assert list(configured(command, choice).dataset) == names


def test_data_set_values_can_be_overridden() -> None:
    config = configured(
        "train",
        "dataset=[jsonl,mt-bench]",
        "dataset.jsonl.train.path=a.jsonl",
        "dataset.jsonl.test={kind:jsonl,path:b.jsonl}",
        "dataset.mt-bench.train.limit=5",
    )
    assert config.dataset["jsonl"] == DatasetConfig(
        PromptSource("jsonl", path="a.jsonl"), PromptSource("jsonl", path="b.jsonl")
    )
    assert config.dataset["mt-bench"].train.limit == 5


@pytest.mark.parametrize("name", HUB_DATASETS)
def test_hub_presets_are_complete(name: str) -> None:
    data = configured("train", f"dataset={name}").dataset[name]
    for source in filter(None, (data.train, data.test)):
        assert source.kind == "hub"
        assert source.repo.count("/") == 1
        assert source.split
        assert source.field
        columns = dict.fromkeys(("starter_code", "input", "repo"), "COLUMN")
        filled = source.template.format(prompt="PROMPT", **columns)
        assert filled.count("PROMPT") == 1
        assert filled.endswith("within \\boxed{}.") == (name in MATHS)
    if data.test is not None:
        assert (data.train.subset, data.train.split) != (data.test.subset, data.test.split)


@pytest.mark.parametrize("name", [*FILE_DATASETS, *HUB_DATASETS])
def test_every_key_of_a_source_can_be_overridden(name: str) -> None:
    """Hydra refuses an override of a key that is not in the YAML."""
    keys = ["template", "limit", *(["path"] if name in FILE_DATASETS else ["repo", "subset", "split", "field"])]
    values = {key: f"dataset.{name}.train.{key}={5 if key == 'limit' else 'x'}" for key in keys}
    source = configured("train", f"dataset={name}", *values.values()).dataset[name].train
    assert [getattr(source, key) for key in keys] == [5 if key == "limit" else "x" for key in keys]
    if name != "txt":  # which has no columns
        only = f"dataset.{name}.train.only={{category:[hard]}}"
        kept = configured("train", f"dataset={name}", *values.values(), only).dataset[name].train
        assert kept.only == {"category": ["hard"]}


# --- presets that set more than their own group


@pytest.mark.parametrize(("kind", "logits", "hidden"), [("logits", True, False), ("hidden", False, True)])
def test_preprocess_makes_the_cache_keep_what_it_reads(kind: str, logits: bool, hidden: bool) -> None:
    config = configured("train", f"preprocess={kind}")
    assert (config.oracle.store_logits, config.oracle.store_hidden) == (logits, hidden)
    with pytest.raises(UserError, match=r"needs oracle\.store"):
        configured("train", f"preprocess={kind}", "oracle.store_logits=false", "oracle.store_hidden=false")


@pytest.mark.parametrize(
    ("name", "swept", "count"),
    [
        ("radius", {"predictor.k": "1,2,3"}, 9),
        ("depth", {"predictor.depth": "1,2,3,4"}, 12),
        ("width", {"predictor.width": "256,512,1024,2048,4096"}, 15),
        ("preprocess", {"preprocess": "probs,logits,log_probs,topk,stats,hidden"}, 18),
        ("loss", {"predictor.loss": "ce,soft,regret"}, 9),
    ],
)
def test_sweep_has_its_points_with_three_seeds_each_and_all_validate(
    name: str, swept: dict[str, str], count: int
) -> None:
    hydra = composed("train", f"+sweep={name}", hydra=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    params = OmegaConf.to_container(hydra.sweeper.params)
    expected = {**swept, "seed": "0,1,2"}
    assert params == expected
    jobs = list(itertools.product(*([f"{key}={one}" for one in values.split(",")] for key, values in expected.items())))
    assert len(jobs) == count
    configs = [configured("train", f"+sweep={name}", *job) for job in jobs]
    assert len({config.seed for config in configs}) == 3
    # so that one cache serves the whole sweep
    for part in ("oracle", "generation", "dataset", "model", "drafter", "cache_dir"):
        assert all(getattr(config, part) == getattr(configs[0], part) for config in configs)


def test_the_search_looks_for_what_the_types_allow() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra optuna")
    hydra = composed("train", "+sweep=optuna", hydra=True).hydra
    assert hydra.mode.name == "MULTIRUN" and hydra.sweeper._target_.endswith(".OptunaSweeper")
    assert hydra.sweeper.direction == "minimize" and hydra.sweeper.sampler._target_ == "optuna.samplers.TPESampler"
    assert configured("train", "+sweep=optuna").optimized_metric == "eval/regret"
    for key, value in hydra.sweeper.params.items():
        kind, _, inner = value.removeprefix("tag(log,").rstrip(")").partition("(")
        assert kind in ("choice", "interval"), value
        for one in inner.split(","):
            configured("train", "+sweep=optuna", f"{key}={one}")


def test_hydra_settings() -> None:
    hydra = composed("train", hydra=True).hydra
    raw = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(raw, dict)
    assert raw["run"]["dir"] == "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"
    assert raw["sweep"]["dir"].startswith("outputs/multirun/")
    assert hydra.job.chdir is False
    assert hydra.job_logging.formatters.console.format == "%(message)s"
    # job.num exists in a multirun only: nothing outside its sub-folder may ask for it
    using = [path.name for path in CONF_DIR.rglob("*.yaml") if "hydra:job.num" in path.read_text()]
    assert using == []


@pytest.mark.parametrize(
    ("launcher", "plugin", "settings"),
    [
        ("submitit_slurm", "submitit", {"partition": "gpu", "gpus_per_node": 1, "timeout_min": 240, "mem_gb": 64}),
        ("submitit_local", "submitit", {"gpus_per_node": 4, "timeout_min": 1440}),
        ("joblib", "joblib", {"n_jobs": 4}),
    ],
)
@pytest.mark.parametrize("command", SCHEMAS)
def test_launchers_compose_with_their_settings(command: str, launcher: str, plugin: str, settings: dict) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason="needs the extras cluster and joblib")
    overrides = [f"hydra/launcher={launcher}", *(f"hydra.launcher.{key}={value}" for key, value in settings.items())]
    hydra = composed(command, *overrides, hydra=True).hydra
    assert launcher.split("_")[-1] in hydra.launcher._target_.lower()
    assert settings.items() <= OmegaConf.to_container(hydra.launcher, resolve=False).items()  # type: ignore[union-attr]
    # the other settings of this project stand
    assert hydra.callbacks.failed_jobs._target_ == "blockpilot.runs.launch.FailedJobs"
    assert OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"] == "${hydra.job.num}"  # type: ignore[index]


def test_a_gpu_for_each_writer() -> None:
    writers = [
        configured("collect", "collect.num_shards=4", f"collect.shard_index={i}", "device=cuda:${collect.shard_index}")
        for i in range(4)
    ]
    assert [writer.device for writer in writers] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


APP = """
import hydra
@hydra.main(config_path={conf!r}, config_name="train", version_base="1.3")
def main(config):
    print("k", config.predictor.k, "in", hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
main()
"""


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        (["predictor.k=1"], ["outputs/*/*"]),
        (["-m", "predictor.k=1,2"], ["outputs/multirun/*/*/0", "outputs/multirun/*/*/1"]),
        (["+sweep=radius"], [f"outputs/multirun/*/*/{job}" for job in range(9)]),
    ],
)
def test_run_and_multirun_folders(tmp_path: Path, arguments: list[str], folders: list[str]) -> None:
    (tmp_path / "app.py").write_text(APP.format(conf=str(CONF_DIR)))
    done = subprocess.run(
        [sys.executable, "app.py", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("k ") == len(folders)
    for pattern in folders:
        [folder] = tmp_path.glob(pattern)
        assert (folder / ".hydra" / "config.yaml").is_file()
        assert (folder / "app.log").is_file()


# --- what the types refuse


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("predictor.k=-1", "predictor.k=-1"),
        ("predictor.k=4", "raise oracle.radius"),
        ("predictor.k=two", "predictor.k"),
        ("generation.top_p=0", "generation.top_p=0"),
        ("collect.shard_index=1", "collect.shard_index=1"),
        ("dataset.tiny.train.kind=csv", "dataset source kind='csv'"),
        ("dataset.tiny.train.limit=0", "limit=0"),
        ("+predictor.depht=3", "depht"),
        ("device=gpu", "device='gpu'"),
        ("dataset=[]", "dataset"),
    ],
)
def test_bad_values_name_key_and_value(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        configured("train", override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_typos_in_overrides_are_refused() -> None:
    with pytest.raises(ConfigCompositionException, match=r"predictor\.depht"):
        composed("train", "predictor.depht=3")


def test_conf_is_where_the_entries_look() -> None:
    assert CONF_DIR == ROOT / "conf"
    assert (ROOT / "pyproject.toml").is_file()
