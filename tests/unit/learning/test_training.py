"""Real fits on a small table: something is learned, the same each time, and it survives a checkpoint."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from blockpilot.errors import UserError
from blockpilot.learning import FeatureExtractor, cross_entropy_loss
from blockpilot.learning.callbacks import LAST, DecodingEvaluation, early_stopping_and_checkpoints
from blockpilot.learning.datamodule import LabelDataModule, split_table
from blockpilot.learning.module import BlockSizeModule
from blockpilot.metrics import best_fixed, regret_per_prompt
from blockpilot.oracle.table import LabelTable

TableMaker = Callable[..., LabelTable]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _module(kind: str = "probs", seed: int = 0, loss: str = "ce", **predictor: Any) -> BlockSizeModule:
    torch.manual_seed(seed)
    return BlockSizeModule(
        block_sizes=[14, 15, 16, 17, 18],
        always_block_size=16,
        vocab_size=40,
        hidden_size=6,
        preprocess={"kind": kind, "top_k": 8, "tail_mass": 1e-3},
        predictor={"width": 64, "loss": loss, **predictor},
        trainer={"learning_rate": 5e-3, "weight_decay": 0.01},
    )


def _data(table: LabelTable, kind: str = "probs", seed: int = 0) -> LabelDataModule:
    extractor = FeatureExtractor(kind, top_k=8, tail_mass=1e-3)
    test, rest = split_table(table, (0.2,), "test")
    return LabelDataModule(lambda: None, lambda: (rest, test), extractor, table.block_sizes, batch_size=32, seed=seed)


def _trainer(
    folder: Path, max_epochs: int, callbacks: list[Callback] | None = None, **kwargs: Any
) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        default_root_dir=folder,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"logger": False, "enable_checkpointing": bool(callbacks), **kwargs},
    )


@pytest.mark.parametrize("kind", ["probs", "log_probs", "logits", "topk", "stats", "hidden"])
def test_every_kind_learns_what_best_fixed_cannot(kind: str, make_table: TableMaker, tmp_path: Path) -> None:
    module, data = _module(kind), _data(make_table(400), kind)
    trainer = _trainer(tmp_path, max_epochs=20)
    trainer.fit(module, data)
    (figures,) = trainer.test(module, data, verbose=False)
    table = data.test_table
    fixed = torch.full((len(table),), best_fixed(data.train_table.tau))
    fixed_regret = regret_per_prompt(table.tau, fixed).mean().item()
    assert fixed_regret > 0.08  # the table leaves something to learn
    assert figures["test/regret"] < 0.4 * fixed_regret
    assert figures["test/tau"] > figures["test/tau_always"]
    assert figures["test/headroom_captured"] > 0.6


@pytest.mark.parametrize("loss", ["soft", "regret"])
def test_the_other_losses_learn_too(loss: str, make_table: TableMaker, tmp_path: Path) -> None:
    module, data = _module(loss=loss), _data(make_table(400))
    trainer = _trainer(tmp_path, max_epochs=20)
    trainer.fit(module, data)
    (figures,) = trainer.test(module, data, verbose=False)
    assert figures["test/headroom_captured"] > 0.6


def test_speed_is_learned_where_rounds_cost_more_the_larger_they_are(make_table: TableMaker, tmp_path: Path) -> None:
    """Costs that turn the order of sizes round: the best in speed is the smallest for everyone, whatever tau says."""
    table = make_table(300)
    costs = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    test, rest = split_table(table, (0.2,), "test")
    data = LabelDataModule(
        lambda: None, lambda: (rest, test), FeatureExtractor("probs"), table.block_sizes, batch_size=32,
        round_seconds=lambda part: costs.expand(len(part), -1),
    )  # fmt: skip
    torch.manual_seed(0)
    module = BlockSizeModule(
        list(table.block_sizes), 16, 40, objective="speed", predictor={"width": 64, "loss": "regret", "min_gain": 0.0},
        trainer={"learning_rate": 5e-3},
    )  # fmt: skip
    trainer = _trainer(tmp_path, 10, early_stopping_and_checkpoints(50, tmp_path, "val/regret_speed"))
    trainer.fit(module, data)
    batch = data.batch("validation")
    tau = batch.committed_tokens / batch.rounds
    torch.testing.assert_close(batch.utility("speed"), tau / costs)
    chosen = module.choose(batch.features)
    assert set(chosen.tolist()) == {14}
    logged = trainer.callback_metrics
    assert logged["val/regret_speed"] == 0 and logged["val/accuracy_speed"] == 1 and logged["val/regret"] > 0.1
    always = torch.full_like(chosen, 2)
    gained = (regret_per_prompt(batch.utility("speed"), always).mean() > 0.5).item()
    assert gained and logged["val/headroom_captured_speed"] == pytest.approx(1)


def test_logged_figures_are_those_of_the_choices(make_table: TableMaker, tmp_path: Path) -> None:
    module, data = _module(), _data(make_table(300))
    trainer = _trainer(tmp_path, max_epochs=2)
    trainer.fit(module, data)
    logged = trainer.callback_metrics
    table = data.validation_table
    chosen = module.choose(module.extractor.from_table(table))
    columns = torch.tensor([table.block_sizes.index(b) for b in chosen.tolist()])
    tau = table.tau.gather(1, columns[:, None]).squeeze(1)
    assert logged["val/tau"].item() == pytest.approx(tau.mean().item())
    assert logged["val/tau_pooled"].item() == pytest.approx(tau.mean().item())  # equal rounds everywhere
    assert logged["val/regret"].item() == pytest.approx(regret_per_prompt(table.tau, columns).mean().item())
    assert logged["val/accuracy"].item() == pytest.approx((tau == 6).double().mean().item())
    assert logged["val/tau_always"].item() == pytest.approx(table.tau[:, 2].mean().item())
    headroom = (tau - table.tau[:, 2]).mean() / (6 - table.tau[:, 2]).mean()
    assert logged["val/headroom_captured"].item() == pytest.approx(headroom.item())
    scores = module.eval()(module.extractor.from_table(table))
    assert len(table) % 32 != 0  # the last batch is smaller and must weigh less
    assert logged["val/loss"].item() == pytest.approx(cross_entropy_loss(scores, table.tau).mean().item())
    assert "train/loss" in logged


def test_prompts_without_rounds_change_nothing(make_table: TableMaker, tmp_path: Path) -> None:
    """Rows without rounds in a batch leave its loss and figures as they are; a batch of only such rows is harmless."""
    module, data = _module(dropout=0.0), _data(make_table(100))
    data.setup()
    (batch,) = [data._datasets["test"][list(range(10))]]
    silent = torch.zeros(10, dtype=torch.bool)
    silent[::3] = True
    rounds = batch.rounds.masked_fill(silent[:, None], 0)
    mixed = dataclasses.replace(batch, rounds=rounds, committed_tokens=batch.committed_tokens * (rounds > 0))
    module.log = lambda *_, **__: None  # type: ignore[method-assign]  # no trainer here
    kept = batch.select((~silent).nonzero().squeeze(1))
    torch.testing.assert_close(module.training_step(mixed), module.training_step(kept))
    none = mixed.select(silent.nonzero().squeeze(1))
    loss = module.training_step(none)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_one_seed_gives_one_result(make_table: TableMaker, tmp_path: Path) -> None:
    def weights(seed: int, evaluate: bool = False) -> torch.Tensor:
        module = _module(seed=seed)
        noisy = DecodingEvaluation(lambda _: {"eval/tau": torch.rand(1).item()}, every_n_epochs=1)
        trainer = _trainer(tmp_path, 3, [noisy] if evaluate else None, enable_checkpointing=False)
        trainer.fit(module, _data(make_table(200)))
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert torch.equal(weights(0), weights(0, evaluate=True))  # evaluation draws no number that training would
    assert not torch.equal(weights(0), weights(1))


def test_checkpoint_of_the_best_epoch_loads_without_pickled_classes(make_table: TableMaker, tmp_path: Path) -> None:
    module, data = _module("stats", depth=3, k=2), _data(make_table(300), "stats")
    callbacks = early_stopping_and_checkpoints(50, tmp_path / "checkpoints", "val/regret")
    trainer = _trainer(tmp_path, 12, callbacks)
    trainer.fit(module, data)
    checkpoint = callbacks[1]
    assert isinstance(checkpoint, ModelCheckpoint)
    path, last = sorted((tmp_path / "checkpoints").rglob("*.ckpt"))
    assert last.name == LAST
    assert str(path) == checkpoint.best_model_path
    assert "=" not in path.name and path.parent == tmp_path / "checkpoints"

    loaded = BlockSizeModule.load_from_checkpoint(path, weights_only=True)
    assert dict(loaded.hparams) == dict(module.hparams)
    (figures,) = _trainer(tmp_path, 1).validate(loaded, data, verbose=False)
    assert checkpoint.best_model_score is not None
    assert figures["val/regret"] == pytest.approx(checkpoint.best_model_score.item())
    best = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, best[name]) for name, value in loaded.state_dict().items())


def test_training_resumes_from_a_checkpoint(make_table: TableMaker, tmp_path: Path) -> None:
    data = _data(make_table(200))
    trainer = _trainer(tmp_path, 2)
    trainer.fit(_module(), data)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = _trainer(tmp_path, 4)
    resumed.fit(_module(seed=1), data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert resumed.current_epoch == 4 and resumed.global_step == 2 * trainer.global_step


def test_early_stopping_happens(make_table: TableMaker, tmp_path: Path) -> None:
    callbacks = early_stopping_and_checkpoints(2, tmp_path, "val/regret")
    trainer = _trainer(tmp_path, 200, callbacks)
    trainer.fit(_module(), _data(make_table(200)))
    stopping = callbacks[0]
    assert isinstance(stopping, EarlyStopping)
    assert 0 < stopping.stopped_epoch < 150


class _Recorder:
    """Stands in for decoding: notes when it ran and in which state it found the module."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool, int]] = []

    def __call__(self, module: BlockSizeModule) -> dict[str, float]:
        training = any(part.training for part in module.modules())
        self.calls.append((training, torch.is_grad_enabled(), module.global_step))
        return {"eval/tau": float(len(self.calls))}


@pytest.mark.parametrize(
    ("every_n_epochs", "at_end", "expected_epochs"),
    [(0, True, [5]), (0, False, []), (2, True, [2, 4, 5]), (2, False, [2, 4]), (5, True, [5])],
)
def test_decoding_evaluation_runs_when_due_and_never_twice(
    every_n_epochs: int, at_end: bool, expected_epochs: list[int], make_table: TableMaker, tmp_path: Path
) -> None:
    recorder, module, data = _Recorder(), _module(), _data(make_table(200))
    callback = DecodingEvaluation(recorder, every_n_epochs, at_end)
    logger = CSVLogger(tmp_path, name="log")
    trainer = _trainer(tmp_path, 5, [callback], logger=logger, enable_checkpointing=False)
    trainer.fit(module, data)
    steps_per_epoch = trainer.global_step // 5
    steps = [epoch * steps_per_epoch for epoch in expected_epochs]
    assert recorder.calls == [(False, False, step) for step in steps]
    assert list(callback.results) == steps
    assert all(part.training for part in module.modules())
    # logged where the same weights' validation figures are
    validated = list(_logged(Path(logger.log_dir), "val/regret"))
    expected = {validated[epoch - 1]: i + 1.0 for i, epoch in enumerate(expected_epochs)}
    assert _logged(Path(logger.log_dir), "eval/tau") == expected


def test_decoding_evaluation_keeps_out_of_validate_and_starts_anew(make_table: TableMaker, tmp_path: Path) -> None:
    recorder, module, data = _Recorder(), _module(), _data(make_table(200))
    callback = DecodingEvaluation(recorder, every_n_epochs=1)
    for _ in range(2):
        trainer = _trainer(tmp_path, 1, [callback], enable_checkpointing=False)
        trainer.fit(module, data)
        assert trainer.callback_metrics["eval/tau"] == len(recorder.calls)
    trainer.validate(module, data, verbose=False)
    assert len(recorder.calls) == 2


def _logged(folder: Path, key: str) -> dict[int, float]:
    with open(folder / "metrics.csv") as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row.get(key)}


def test_always_block_size_must_be_a_candidate() -> None:
    with pytest.raises(UserError, match="always_block_size=12"):
        BlockSizeModule(block_sizes=[14, 15, 16], always_block_size=12, vocab_size=40)


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"predictor\.depth=0"):
        BlockSizeModule([16], 16, 40, predictor={"depth": 0})
