"""The DFlash objective: what a block sees, which places count, and how much."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from blockpilot.drafter_training.objective import NO_TOKEN, TextBatch, block_states, dflash_loss, draw_anchors
from tests.toy import make_pair

PROMPTS, LENGTHS = (5, 9, 7), (20, 12, 30)


@pytest.fixture(scope="module")
def pair():
    return make_pair(block_size=4)


@pytest.fixture(scope="module")
def batch(pair) -> TextBatch:
    """Three texts of made-up tokens with the target's features, padded."""
    generator = torch.Generator().manual_seed(0)
    width, size = max(LENGTHS), pair.block_size
    tokens = torch.full((3, width + size), NO_TOKEN)
    features = []
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = torch.randint(8, 60, (length,), generator=generator)
        cache = pair.runner.new_cache(length)
        out = pair.runner.forward(tokens[row : row + 1, : length - 1], cache)
        features.append(F.pad(out.features[0], (0, 0, 0, width - length)))
    return TextBatch(tokens, torch.tensor(PROMPTS), torch.tensor(LENGTHS), torch.stack(features).detach())


def test_side_by_side_blocks_are_the_blocks_of_decoding(pair, batch):
    anchors = torch.tensor([[5, 12, 18], [9, 10, 10], [7, 20, 28]])
    states, positions = block_states(pair.drafter, pair.runner.embedding, batch, anchors)
    for row in range(3):
        for column, anchor in enumerate(anchors[row].tolist()):
            context = pair.drafter.allocate(1, 64)
            pair.drafter.extend(context, batch.features_RTF[row : row + 1, :anchor])
            block = torch.full((1, 4), pair.mask_token_id)
            block[0, 0] = batch.tokens_RT[row, anchor]
            alone = pair.drafter(pair.runner.embed(block), anchor + torch.arange(4)[None], context)
            torch.testing.assert_close(states[row, column], alone[0, 1:], rtol=1e-5, atol=1e-5)
            assert positions[row, column].tolist() == [anchor + 1, anchor + 2, anchor + 3]


def test_the_loss_is_the_weighted_mean_of_the_places_that_have_a_token(pair, batch):
    anchors = torch.tensor([[5, 18], [10, 9], [7, 28]])
    head, decay = pair.runner.head.weight, 2.0
    found = dflash_loss(pair.drafter, pair.runner.embedding, head, batch, anchors, decay=decay)
    states, positions = block_states(pair.drafter, pair.runner.embedding, batch, anchors)
    losses, weights, right = [], [], [[], [], []]
    for row in range(3):
        for column in range(2):
            for place in range(3):
                at = int(positions[row, column, place])
                if at >= LENGTHS[row]:
                    continue
                logits = head @ states[row, column, place]
                label = int(batch.tokens_RT[row, at])
                losses.append(-logits.log_softmax(dim=0)[label])
                weights.append(torch.tensor(-place / decay).exp())
                right[place].append(int(logits.argmax()) == label)
    assert len(losses) < 18, "some places must be behind the end, or nothing is tested"
    mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    torch.testing.assert_close(found.loss, mean)
    assert found.counted_S.tolist() == [len(place) for place in right]
    assert found.right_S.tolist() == [sum(place) for place in right]


def test_occurring_tokens_are_all_that_the_loss_compares(pair, batch):
    anchors = torch.tensor([[5], [9], [7]])
    head = pair.runner.head.weight
    found = dflash_loss(pair.drafter, pair.runner.embedding, head, batch, anchors, decay=3.0, occurring_only=True).loss
    _, positions = block_states(pair.drafter, pair.runner.embedding, batch, anchors)
    labels = batch.tokens_RT.gather(1, positions.flatten(1))
    rest = torch.ones(len(head), dtype=torch.bool)
    rest[labels[labels != NO_TOKEN]] = False
    # tokens that do not occur are as good as impossible
    states, _ = block_states(pair.drafter, pair.runner.embedding, batch, anchors)
    logits = (states @ head.T).flatten(0, 2).masked_fill(rest, -torch.inf)
    known = labels.flatten() != NO_TOKEN
    losses = F.cross_entropy(logits[known], labels.flatten()[known], reduction="none")
    weights = torch.exp(-torch.arange(3) / 3.0).repeat(3)[known]
    torch.testing.assert_close(found, (losses * weights).sum() / weights.sum())


def _with_soft_labels(batch: TextBatch, ids: torch.Tensor, probs: torch.Tensor) -> TextBatch:
    return TextBatch(batch.tokens_RT, batch.prompt_lengths_R, batch.lengths_R, batch.features_RTF, ids, probs)


@pytest.mark.parametrize("occurring_only", [False, True])
def test_soft_labels_that_are_certain_of_the_text_give_the_loss_of_the_text(pair, batch, occurring_only):
    ids = torch.stack([batch.tokens_RT.clamp(min=0), torch.full_like(batch.tokens_RT, 33)], dim=2)
    certain = _with_soft_labels(batch, ids, torch.tensor([1.0, 0.0]).expand(*batch.tokens_RT.shape, 2))
    anchors = torch.tensor([[5], [9], [7]])
    args = (pair.drafter, pair.runner.embedding, pair.runner.head.weight)
    plain = dflash_loss(*args, certain, anchors, decay=4.0, occurring_only=False)
    soft = dflash_loss(*args, certain, anchors, decay=4.0, soft_weight=1.0, occurring_only=occurring_only)
    if not occurring_only:
        torch.testing.assert_close(soft.loss, plain.loss)
    else:
        assert soft.loss < plain.loss, "fewer tokens to compare with"


def test_soft_labels_are_renormalised_cross_entropy(pair, batch):
    ids = torch.tensor([40, 41]).expand(*batch.tokens_RT.shape, 2)
    soft = _with_soft_labels(batch, ids, torch.tensor([0.6, 0.2]).expand(*batch.tokens_RT.shape, 2))
    anchors = torch.tensor([[5], [9], [7]])
    args = (pair.drafter, pair.runner.embedding, pair.runner.head.weight)
    half = dflash_loss(*args, soft, anchors, decay=4.0, soft_weight=0.5).loss
    plain = dflash_loss(*args, soft, anchors, decay=4.0).loss
    states, positions = block_states(*args[:2], batch, anchors)
    known = batch.tokens_RT.gather(1, positions.flatten(1)).flatten() != NO_TOKEN
    log_probs = (states @ args[2].T).log_softmax(dim=-1).flatten(0, 2)[known]
    losses = -(0.75 * log_probs[:, 40] + 0.25 * log_probs[:, 41])
    weights = torch.exp(-torch.arange(3) / 4.0).repeat(3)[known]
    torch.testing.assert_close(half, (plain + (losses * weights).sum() / weights.sum()) / 2)


def test_gradients_reach_every_weight_of_the_drafter_and_none_of_the_target(pair, batch):
    pair.drafter.zero_grad()
    anchors = torch.tensor([[5, 9], [9, 10], [7, 20]])
    head = pair.runner.head.weight.detach()
    with torch.enable_grad():
        dflash_loss(pair.drafter, pair.runner.embedding, head, batch, anchors, decay=4.0).loss.backward()
    without = [name for name, p in pair.drafter.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert without == []
    pair.drafter.zero_grad()


def test_anchors_are_answer_tokens_with_a_successor_and_none_comes_twice():
    generator = torch.Generator().manual_seed(1)
    prompts, lengths = torch.tensor([4, 10, 6]), torch.tensor([40, 13, 7])
    seen: list[set[int]] = [set(), set(), set()]
    for _ in range(40):
        anchors, valid = draw_anchors(prompts, lengths, 8, generator)
        for row in range(3):
            drawn = anchors[row][valid[row]].tolist()
            assert len(set(drawn)) == len(drawn)
            seen[row].update(drawn)
    assert seen[0] == set(range(4, 39))
    assert seen[1] == {10, 11}
    assert seen[2] == set(), "an answer of one token has no block"


def test_an_anchor_that_does_not_count_changes_nothing(pair, batch):
    args = (pair.drafter, pair.runner.embedding, pair.runner.head.weight, batch)
    alone = dflash_loss(*args, torch.tensor([[5], [9], [7]]), decay=4.0)
    beside = torch.tensor([[5, 6], [9, 9], [7, 20]])
    both = dflash_loss(*args, beside, torch.tensor([[True, False]] * 3), decay=4.0)
    torch.testing.assert_close(alone.loss, both.loss)
    assert alone.counted_S.tolist() == both.counted_S.tolist()
