"""On the embedded pair: the output is the target's own, and replay gives the labels that decoding gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import blockpilot as bp
from blockpilot.config import PredictorConfig
from blockpilot.decoding import Trajectory, prompt_key
from blockpilot.learning import BlockSizePredictor, FeatureExtractor
from blockpilot.oracle.record import OracleRecord

NUM_PROMPTS = 50
NEW_TOKENS = 160
NEAR_TIE = 1e-4


class Wandering:
    """Another block size every round."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.count = least, most - least + 1

    def choose(self, prefill: bp.Prefill) -> int:
        return self.least + 2 % self.count

    def update(self, round: bp.Round) -> int:
        return self.least + (round.block_size * 7 + round.acceptance_length) % self.count


@pytest.fixture(scope="module")
def greedy(pair: bp.Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Outputs of ``transformers`` itself, one prompt at a time."""
    outputs = []
    for prompt in prompts[:NUM_PROMPTS]:
        ids = torch.tensor([prompt])
        out = pair.target.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("block_sizes", [range(1, 5), range(5, 10), range(10, 15), range(15, 20)])
def test_greedy_output_is_that_of_transformers(
    pair: bp.Pair, prompts: list[list[int]], greedy: list[list[int]], block_sizes: range
) -> None:
    for prompt, expected in zip(prompts[:NUM_PROMPTS], greedy, strict=True):
        for block_size in block_sizes:
            out = bp.generate(pair, prompt, bp.FixedPolicy(block_size), max_new_tokens=NEW_TOKENS)
            assert out.output_ids == expected, f"block size {block_size}"


def test_sampled_output_depends_on_neither_block_size_nor_policy(pair: bp.Pair, prompts: list[list[int]]) -> None:
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "seed": 3}
    for prompt in prompts[:6]:
        (record,) = bp.oracle.replay(pair, [prompt], [15, 16], **settings)
        oracle = bp.OraclePolicy({prompt_key(prompt): max(record.tau, key=lambda b, tau=record.tau: tau[b])})
        fixed = [bp.FixedPolicy(b) for b in range(1, 20)]
        policies = [*fixed, bp.RandomPolicy(range(13, 20)), oracle, Wandering(1, 19)]
        outputs = [bp.generate(pair, prompt, policy, **settings) for policy in policies]
        assert len({tuple(out.output_ids) for out in outputs}) == 1
        assert len({len(out.acceptance_lengths) for out in outputs}) > 1  # they did decode differently


def labels_of(
    found: Sequence[bp.oracle.Simulation], block_size: int, records: list[OracleRecord]
) -> list[OracleRecord]:
    """Simulations of one block size in the form of labels."""
    return [
        replace(record, acceptance_lengths={block_size: one.acceptance_lengths})
        for record, one in zip(records, found, strict=True)
    ]


def differing_chains(pair: bp.Pair, ours: list[OracleRecord], theirs: list[OracleRecord], near: float) -> int:
    """Chains whose rounds differ; each must start to at a near-tie of the drafter's logits."""
    differing = 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.output_ids == other.output_ids
        for b, lengths in mine.acceptance_lengths.items():
            if lengths != other.acceptance_lengths[b]:
                differing += 1
                gap = _gap_at_first_difference(pair, mine, other, b)
                assert gap < near, f"block size {b}: the drafter's top two logits are {gap} apart"
    return differing


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_is_enumeration_is_simulation(pair: bp.Pair, prompts: list[list[int]], temperature: float) -> None:
    """30 prompts x 7 sizes, round for round; a differing chain must start at a near-tie, and be one of a hundred."""
    chosen, sizes = prompts[:30], list(range(13, 20))
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 1}
    replayed = bp.oracle.replay(pair, chosen, sizes, keep_features=True, **settings)
    enumerated = bp.oracle.enumerate(pair, chosen, sizes, **settings)
    for ours, theirs in zip(replayed, enumerated, strict=True):
        assert ours.logits is not None and theirs.logits is not None
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=0)
    assert differing_chains(pair, replayed, enumerated, NEAR_TIE) <= 0.01 * len(chosen) * len(sizes)
    unknown = [replace(record, acceptance_lengths={}) for record in replayed]  # nothing to look up: all is drafted
    for size in (13, 16, 19):
        simulated = labels_of(bp.oracle.simulate(pair, unknown, bp.FixedPolicy(size)), size, replayed)
        assert differing_chains(pair, simulated, enumerated, NEAR_TIE) <= 0.01 * len(chosen) * len(sizes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_decides_every_round_is_simulated(
    pair: bp.Pair, prompts: list[list[int]], temperature: float
) -> None:
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "seed": 1}
    sizes = list(range(13, 20))
    records = bp.oracle.replay(pair, prompts[:8], sizes, per_round=True, **settings)
    texts = [OracleRecord(r.prompt_ids, r.output_ids, {}, None, None) for r in records]
    found = [bp.oracle.simulate(pair, known, Wandering(13, 19)) for known in (records, texts)]
    for index, prompt in enumerate(prompts[:8]):
        out = bp.generate(pair, prompt, Wandering(13, 19), **settings)
        for simulations in found:
            one = simulations[index]
            assert (one.block_sizes, one.acceptance_lengths) == (out.block_sizes, out.acceptance_lengths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rule_is_simulated_as_it_decodes(pair: bp.Pair, prompts: list[list[int]], temperature: float) -> None:
    settings = {"max_new_tokens": 48, "temperature": temperature, "seed": 1}
    records = bp.oracle.replay(pair, prompts[:12], list(range(14, 19)), **settings)
    cached = [replace(record, logits=None, hidden=None) for record in records]  # as a cache gives them
    rules = [
        bp.EmaPolicy([4, 8, 12, 16], 16),
        bp.EmaPolicy(range(14, 19), 16, update_interval=2),
        bp.ConfidencePolicy(16),
        bp.ConfidencePolicy(12, 0.9),
        bp.PerRoundPolicy(random_predictor(pair, range(14, 19))),
    ]
    for rule in rules:
        found = bp.oracle.simulate(pair, cached, rule)
        used = set()
        for prompt, one, record in zip(prompts[:12], found, records, strict=True):
            out = bp.generate(pair, prompt, rule, **settings)
            assert out.output_ids == record.output_ids
            assert (one.block_sizes, one.acceptance_lengths) == (out.block_sizes, out.acceptance_lengths)
            assert (one.drafted_sizes, one.first_block_size) == (out.drafted_sizes, out.first_block_size)
            used |= set(one.block_sizes)
        assert len(used) > 1, rule


def random_predictor(pair: bp.Pair, block_sizes: Sequence[int]) -> bp.PredictorPolicy:
    """Of no use, but it does not say the same of every place."""
    extractor = FeatureExtractor("hidden", top_k=8, tail_mass=1e-3)
    torch.manual_seed(0)
    predictor = BlockSizePredictor(pair.hidden_size, block_sizes, sparse_input=False, width=32)
    return bp.PredictorPolicy(
        predictor, extractor, PredictorConfig(width=32), pair.identity, pair.vocab_size, pair.hidden_size,
        pair.block_size, 16, torch.empty(0, dtype=torch.int64),
    )  # fmt: skip


def test_half_precision_replays_up_to_near_ties(pair: bp.Pair, prompts: list[list[int]]) -> None:
    """How near is measured: twice what bf16 moves a leading logit, since either of the two may have moved."""
    half = bp.load_pair("tiny", dtype="bfloat16", device="cpu")
    options = {"max_new_tokens": 48, "temperature": 0.0}
    replayed = bp.oracle.replay(half, prompts[:8], [3, 16], **options)
    enumerated = bp.oracle.enumerate(half, prompts[:8], [3, 16], **options)
    # where the target itself parted at a near-tie there is nothing to compare
    same = [i for i in range(8) if replayed[i].output_ids == enumerated[i].output_ids]
    assert len(same) >= 6
    ours, theirs = ([records[i] for i in same] for records in (replayed, enumerated))
    moved = [
        float((top - _block_logits(pair, record, anchor, 16).gather(1, tokens)).abs().max())
        for record in ours
        for anchor in range(len(record.prompt_ids), len(record.prompt_ids) + len(record.output_ids) - 1, 8)
        for top, tokens in [_block_logits(half, record, anchor, 16).topk(2)]
    ]
    differing_chains(half, ours, theirs, 2 * max(moved))


def _gap_at_first_difference(pair: bp.Pair, ours: OracleRecord, theirs: OracleRecord, block_size: int) -> float:
    """Smallest top-2 gap of the drafter's logits that could have decided the first differing round."""
    mine, other = ours.acceptance_lengths[block_size], theirs.acceptance_lengths[block_size]
    index = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    top = _block_logits(pair, ours, len(ours.prompt_ids) + sum(mine[:index]), block_size).topk(2).values
    place = min(mine[index], other[index]) - 1
    return float(top[place, 0] - top[place, 1])


@torch.inference_mode()
def _block_logits(pair: bp.Pair, record: OracleRecord, anchor: int, block_size: int) -> torch.Tensor:
    """fp32 ``[block_size - 1, V]`` of a block drafted alone along a known output."""
    trajectory = _trajectory(pair, record.prompt_ids, record.output_ids)
    first = record.output_ids[anchor - len(record.prompt_ids)]
    block = torch.tensor([[first] + [pair.mask_token_id] * (block_size - 1)])
    context = pair.drafter.allocate(1, anchor)
    pair.drafter.extend(context, trajectory.features[None, :anchor])
    states = pair.drafter(pair.runner.embedding(block), torch.arange(anchor, anchor + block_size)[None], context)
    return pair.runner.head(states[0, 1:]).float()


def _trajectory(pair: bp.Pair, prompt: Sequence[int], output_ids: Sequence[int]) -> Trajectory:
    """Features along an output that is known already."""
    tokens = torch.tensor([[*prompt, *output_ids]])
    with torch.inference_mode():
        out = pair.runner.forward(tokens, pair.runner.new_cache(tokens.shape[1]))
    assert out.features is not None
    return Trajectory(list(prompt), list(output_ids), [], out.logits[0, 0], out.hidden[0, 0], out.features[0])


def test_a_batch_decodes_what_single_prompts_decode(pair: bp.Pair, prompts: list[list[int]]) -> None:
    for temperature in (0.0, 1.0):
        together = bp.generate_batch(pair, prompts[:24], max_new_tokens=NEW_TOKENS, temperature=temperature, seed=5)
        for prompt, trajectory in zip(prompts[:24], together, strict=True):
            alone = bp.generate(
                pair, prompt, bp.FixedPolicy(16), max_new_tokens=NEW_TOKENS, temperature=temperature, seed=5
            )
            assert trajectory.output_ids == alone.output_ids
