"""What learning and choosing cost: ``python benchmarks/learning.py [--rows step ...]``; prints one table.

``step`` and ``choose`` compare the sparse first layer with the same network on dense rows: ``nn.Linear`` and torch's
fused AdamW. Both sides are in one process and take turns; a ratio is that of one turn, and the table gives the median
over turns, quartiles in brackets. The dense rows of a step are written out before its clock starts. Peak memory is that
of a process of its own which trains three steps, Python and torch included. Losses must be equal to 1e-4.

Rows are made up. A prompt holds each token with a probability of its own, ``nonzeros`` tokens on average:

* ``shared``: ``1 - exp(-c rank^-s)``, s chosen so that 64 prompts of 2,000 tokens hold 7,404 distinct ones, as the
  first 64 GSM8K test prompts do for SmolLM2-135M-Instruct (vocabulary 49,152, tail mass 1e-3);
* ``disjoint``: the same for all tokens, the worst case: 64 prompts hold more than half of a vocabulary of 151,936.

``overhead`` is the embedded pair's: seconds of ``choose`` on real prefills over those and a real generation, for every
``preprocess.kind``. ``scale`` trains through the data module, the Lightning module and the trainer.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from shared import machine, quartiles, seconds, status_mib, tiny_prompts
from torch import Tensor, nn

import blockpilot as bp
from blockpilot.config import PredictorConfig
from blockpilot.learning import BlockSizePredictor, FeatureExtractor, Features
from blockpilot.learning.datamodule import LabelDataModule
from blockpilot.learning.module import BlockSizeModule
from blockpilot.learning.optimizer import LazyAdamW
from blockpilot.oracle.table import Distributions, LabelTable, TokenLists

BATCH, DEPTH, BLOCK_SIZES = 64, 2, (14, 15, 16, 17, 18)
DISTINCT = 7404
"""Tokens that 64 prompts of ``shared`` hold, at 2,000 a prompt."""
LOGIT_SCALE = 2.5
"""Standard deviation of the made-up logits."""
KEPT_OF = 1.38
"""Tokens that a made-up row holds for each one that is kept at a tail mass of 1e-3."""
KINDS = ("probs", "log_probs", "logits", "topk", "stats", "hidden")
TOLERANCE = 1e-4
"""Of losses and scores."""
STEPS_FOR_PEAK = 3


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    figure: str
    goal: str = ""
    reached: bool = True
    ours: str = ""
    other: str = ""

    def __str__(self) -> str:
        reached = ("yes" if self.reached else "no") if self.goal else ""
        return f"| {self.what} | {self.goal} | {self.figure} | {reached} | {self.ours} | {self.other} |"


def spread(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """Median and quartiles."""
    median, low, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return f"{median}{unit} ({low} to {high})"


# --- made-up rows


@functools.cache
def shares(shape: str, vocab_size: int, nonzeros: int) -> Tensor:
    """float32 ``[V]``: the probability that a prompt holds a token."""
    if shape == "disjoint":
        return torch.full((vocab_size,), nonzeros / vocab_size)
    wanted = DISTINCT * nonzeros / 2000  # fewer tokens a prompt, fewer distinct ones
    rank = torch.arange(1, vocab_size + 1, dtype=torch.float64)

    def falling(exponent: float) -> Tensor:
        weights = rank**-exponent
        scale = bisect(lambda c: float(-torch.expm1(-(10**c) * weights).sum()), -5, 30, nonzeros)
        return -torch.expm1(-(10**scale) * weights)

    exponent = bisect(lambda s: -float((1 - (1 - falling(s)) ** BATCH).sum()), 0.0, 8.0, -wanted)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    return falling(exponent)[order].float()


def bisect(rising: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where a rising function has a value."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return low


def made_up_rows(count: int, share_V: Tensor, generator: torch.Generator) -> Distributions:
    """Distributions over the tokens that each prompt happens to hold, a softmax of normal logits."""
    lengths, ids, probs = [torch.zeros(1, dtype=torch.int64)], [], []
    for start in range(0, count, BATCH):
        held = torch.rand(min(BATCH, count - start), len(share_V), generator=generator) < share_V
        row, token = held.nonzero(as_tuple=True)
        weights = (LOGIT_SCALE * torch.randn(len(row), generator=generator)).exp()
        totals = torch.zeros(len(held)).index_add_(0, row, weights)
        order = (row.double() - weights.double() / (1 + weights.max())).argsort()  # by row, then falling
        lengths.append(held.sum(dim=1))
        ids.append(token[order].int())
        probs.append((weights / totals[row])[order])
    return Distributions(torch.cat(lengths).cumsum(0), torch.cat(ids), torch.cat(probs), len(share_V))


def batches(shape: str, args: argparse.Namespace) -> Iterator[tuple[Features, Tensor]]:
    """Batches without end: features and best columns."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = made_up_rows(BATCH, shares(shape, args.vocab_size, args.nonzeros), generator)
        best = torch.randint(len(BLOCK_SIZES), (BATCH,), generator=generator)
        yield Features(rows.probs, rows.offsets, rows.token_ids), best


# --- a training step


class Side:
    """A network and its optimizer: the sparse first layer, or ``nn.Linear`` on dense rows."""

    def __init__(self, sparse: bool, args: argparse.Namespace):
        torch.manual_seed(0)
        self.net = network(sparse, args.vocab_size, args.width)
        kind: Any = LazyAdamW if sparse else functools.partial(torch.optim.AdamW, fused=True)
        self.optimizer = kind(self.net.parameters(), lr=1e-3, weight_decay=0.01)

    def loss(self, features: Features, best: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(features), best)

    def step(self, features: Features, best: Tensor) -> float:
        """One step; the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss(features, best)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class PlainLinear(nn.Linear):
    """``nn.Linear`` on dense features as they come; ours would standardise them first."""

    def forward(self, input: Features) -> Tensor:
        return super().forward(input.values)


def network(sparse: bool, vocab_size: int, width: int) -> BlockSizePredictor:
    net = BlockSizePredictor(
        vocab_size if sparse else 1, BLOCK_SIZES, sparse_input=sparse, depth=DEPTH, width=width, dropout=0.0
    )
    if not sparse:
        net.first = PlainLinear(vocab_size, width)  # type: ignore[assignment]
    return net


def both(args: argparse.Namespace) -> tuple[Side, Side]:
    """The two sides, with the same weights."""
    sparse, dense = Side(True, args), Side(False, args)
    copy_weights(sparse.net, dense.net)
    return sparse, dense


@torch.no_grad()
def copy_weights(sparse: BlockSizePredictor, dense: BlockSizePredictor) -> None:
    weight_WV, bias = sparse.first.on_raw_inputs()
    dense.first.weight.copy_(weight_WV)
    dense.first.bias.copy_(bias)
    dense.hidden.load_state_dict(sparse.hidden.state_dict())
    dense.head.load_state_dict(sparse.head.state_dict())


def written_out(features: Features, vocab_size: int) -> Features:
    return Features(features.dense(vocab_size))


def step(shape: str, args: argparse.Namespace) -> Iterator[Line]:
    """Seconds of a training step, the loss after the first one, and peak memory.

    Raises:
        RuntimeError: the losses differ.
    """
    sparse, dense = both(args)
    supply = batches(shape, args)
    features, best = next(supply)
    assert features.token_ids is not None
    held = f"{len(features.token_ids) / BATCH:,.0f} tokens a prompt, {len(features.token_ids.unique()):,} distinct"
    rows = written_out(features, args.vocab_size)
    before = [sparse.step(features, best), dense.step(rows, best)]
    with torch.no_grad():
        after = [sparse.loss(features, best).item(), dense.loss(rows, best).item()]
    del rows
    gap = max(abs(mine - theirs) for mine, theirs in (before, after))
    if gap > TOLERANCE:
        raise RuntimeError(f"losses differ: {before} before a step, {after} after it")
    fast, slow = [], []
    for _ in range(args.repeats):
        features, best = next(supply)
        rows = written_out(features, args.vocab_size)
        fast.append(seconds(functools.partial(sparse.step, features, best)))
        slow.append(seconds(functools.partial(dense.step, rows, best)))
        del rows
    del sparse, dense
    ratios = [theirs / mine for mine, theirs in zip(fast, slow, strict=True)]
    goal = shape == "shared"
    sides = [f"{1e3 * statistics.median(values):,.0f} ms" for values in (fast, slow)]
    yield Line(f"step, {shape} ({held})", spread(ratios, "x", 1), ">= 10x" if goal else "",
               statistics.median(ratios) >= 10, *sides)  # fmt: skip
    yield Line(f"step, {shape}: loss after it", f"{gap:.1e} apart", "<= 1e-4", True,
               *(f"{first:.4f} -> {then:.4f}" for first, then in zip(before, after, strict=True)))  # fmt: skip
    mine, theirs = (in_own_process(peak_of_steps, sparse, shape, args) for sparse in (True, False))
    yield Line(f"step, {shape}: peak memory", f"{mine / theirs:.2f}x", "<= 0.5x" if goal else "",
               mine <= theirs / 2, f"{mine:,.0f} MiB", f"{theirs:,.0f} MiB")  # fmt: skip


def peak_of_steps(sparse: bool, shape: str, args: argparse.Namespace) -> float:
    """Peak memory of this process, in MiB, after three steps of one side."""
    torch.set_num_threads(args.threads)
    side, supply = Side(sparse, args), batches(shape, args)
    for _ in range(STEPS_FOR_PEAK):
        features, best = next(supply)
        side.step(features if sparse else written_out(features, args.vocab_size), best)
    return status_mib("VmHWM")


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def twenty_steps(args: argparse.Namespace) -> Iterator[Line]:
    """How far apart the two optimizers come to be: rows that a batch does not hold stand still in one of them."""
    small = argparse.Namespace(**vars(args) | {"vocab_size": 10_000, "width": 256, "nonzeros": 200})
    for shape in ("shared", "disjoint"):
        sparse, dense = both(small)
        supply, losses = batches(shape, small), []
        for _ in range(20):
            features, best = next(supply)
            losses.append((sparse.step(features, best), dense.step(written_out(features, 10_000), best)))
        gaps = [abs(mine - theirs) for mine, theirs in losses]
        yield Line(f"20 steps on new batches, {shape}, 200 of 10,000 tokens, width 256: loss of the last",
                   f"{gaps[-1]:.1e} apart (at most {max(gaps):.1e})", ours=f"{losses[-1][0]:.4f}",
                   other=f"{losses[-1][1]:.4f}")  # fmt: skip


# --- choosing


def choose(args: argparse.Namespace) -> Iterator[Line]:
    """One prompt, from its logits to a block size, for a wide distribution and for one that is nearly certain."""
    torch.manual_seed(0)
    sparse, dense = (network(kind, args.vocab_size, args.width).eval() for kind in (True, False))
    copy_weights(sparse, dense)
    for nonzeros in (args.nonzeros, args.nonzeros // 20):
        yield choose_among(nonzeros, sparse, dense, args)


def choose_among(
    nonzeros: int, sparse: BlockSizePredictor, dense: BlockSizePredictor, args: argparse.Namespace
) -> Line:
    """The policy against a softmax and the network on the dense row.

    Raises:
        RuntimeError: scores of the same truncated distribution differ.
    """
    policy = policy_of(sparse, FeatureExtractor("probs"), args.vocab_size, hidden_size=1)
    generator = torch.Generator().manual_seed(0)
    share = shares("shared", args.vocab_size, round(KEPT_OF * nonzeros))
    fast, slow, counts = [], [], []
    for index in range(5 * args.repeats + 1):
        logits = made_up_logits(share, generator)
        prefill = bp.Prefill(index, 100, logits, torch.zeros(1))
        features = policy.extractor.from_logits(logits)
        with torch.no_grad():
            mine, theirs = sparse(features), dense(written_out(features, args.vocab_size))
        if not torch.allclose(mine, theirs, rtol=0, atol=TOLERANCE):
            raise RuntimeError(f"scores differ: {mine.tolist()} and {theirs.tolist()}")
        counts.append(len(features.values))
        fast.append(seconds(functools.partial(policy.choose, prefill)))
        slow.append(seconds(lambda logits=logits: dense.choose(Features(logits.softmax(dim=-1)[None]))))
    fast, slow = fast[1:], slow[1:]
    ratios = [theirs / mine for mine, theirs in zip(fast, slow, strict=True)]
    return Line(f"choose ({statistics.mean(counts):,.0f} tokens a prompt at tail mass 1e-3)", spread(ratios, "x", 1),
                ">= 20x", statistics.median(ratios) >= 20,
                *(f"{1e3 * statistics.median(values):.2f} ms" for values in (fast, slow)))  # fmt: skip


def made_up_logits(share_V: Tensor, generator: torch.Generator) -> Tensor:
    """``[V]``: of which about as many tokens are kept at a tail mass of 1e-3 as a made-up row has."""
    row = made_up_rows(1, share_V, generator)
    probs = torch.full_like(share_V, 1e-4 / len(share_V))
    probs[row.token_ids.long()] = row.probs
    return probs.log()


def policy_of(
    predictor: BlockSizePredictor, extractor: FeatureExtractor, vocab_size: int, hidden_size: int
) -> bp.PredictorPolicy:
    return bp.PredictorPolicy(
        predictor, extractor, PredictorConfig(), {}, vocab_size, hidden_size, 16, 16, torch.empty(0, dtype=torch.int64)
    )


class Watching:
    """Decodes at b = 16 and keeps the prefill."""

    def choose(self, prefill: bp.Prefill) -> int:
        self.prefill = prefill
        return 16


def overhead(args: argparse.Namespace) -> Iterator[Line]:
    """The paper's overhead table, for the embedded pair."""
    pair = bp.load_pair("tiny", device="cpu")
    watching, prefills, generations = Watching(), [], []
    for repeat in range(2):  # the first round warms up
        for prompt in tiny_prompts(pair, args.prompts):
            out = bp.generate(pair, prompt, watching, max_new_tokens=args.max_new_tokens)
            if repeat:
                prefills.append(watching.prefill)
                generations.append(out.prefill_seconds + out.decode_seconds)
    for width in (2048, 256):
        for kind in KINDS:
            yield overhead_of(kind, width, pair, prefills, statistics.mean(generations), args)


def overhead_of(
    kind: str, width: int, pair: bp.Pair, prefills: Sequence[bp.Prefill], generation: float, args: argparse.Namespace
) -> Line:
    """One line of it: seconds, share, weights and activations."""
    extractor = FeatureExtractor(kind)
    torch.manual_seed(0)
    predictor = BlockSizePredictor(
        extractor.input_size(pair.vocab_size, pair.hidden_size), BLOCK_SIZES,
        sparse_input=extractor.is_sparse, depth=DEPTH, width=width,
    ).eval()  # fmt: skip
    policy = policy_of(predictor, extractor, pair.vocab_size, pair.hidden_size)
    taken = [
        statistics.mean(seconds(functools.partial(policy.choose, prefill)) for prefill in prefills)
        for _ in range(args.repeats + 1)
    ][1:]
    shares_of = [100 * one / (one + generation) for one in taken]
    activations = max(activation_bytes(policy, prefill) for prefill in prefills)
    weights = [bytes_of(predictor.parameters()), bytes_of(weights_at(args.vocab_size, kind, width))]
    return Line(
        f"overhead, {kind}, width {width}: share of a generation of {1e3 * generation:.0f} ms", spread(shares_of, " %"),
        ours=f"{1e3 * statistics.median(taken):.3f} ms per prompt",
        other=f"weights {weights[0] / 2**20:.1f} MiB ({weights[1] / 2**20:,.1f} at V = {args.vocab_size:,}), "
        f"activations {activations / 2**10:.1f} KiB",
    )  # fmt: skip


def activation_bytes(policy: bp.PredictorPolicy, prefill: bp.Prefill) -> int:
    """Bytes of the features and of every layer's output, for one prompt."""
    outputs: list[Tensor] = []
    predictor = policy.predictor
    layers = (predictor.first, *predictor.hidden, predictor.head)
    hooks = [layer.register_forward_hook(lambda *given: outputs.append(given[-1])) for layer in layers]
    features = policy.extractor.from_logits(prefill.logits, prefill.hidden)
    predictor.choose(features)
    for hook in hooks:
        hook.remove()
    held = (features.values, features.offsets, features.token_ids)
    return bytes_of([tensor for tensor in (*held, *outputs) if tensor is not None])


def weights_at(vocab_size: int, kind: str, width: int) -> Iterator[Tensor]:
    extractor = FeatureExtractor(kind)
    with torch.device("meta"):
        # a hidden size beside that vocabulary: Qwen3-8B's
        yield from BlockSizePredictor(
            extractor.input_size(vocab_size, 4096), BLOCK_SIZES, sparse_input=extractor.is_sparse, depth=DEPTH,
            width=width,
        ).parameters()  # fmt: skip


def bytes_of(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- many prompts


class StepClock(lightning.Callback):
    """Seconds of each optimizer step, batch loading included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *given: Any) -> None:
        self.ends.append(time.perf_counter())


def scale(args: argparse.Namespace) -> Iterator[Line]:
    """20,000 prompts at batch 256, for a bounded number of steps, in a process of its own."""
    rates, filled, peak, touched, prompts = in_own_process(train_at_scale, args)
    what = f"scale: {prompts:,} prompts x {args.nonzeros:,} tokens, batch 256, {len(rates)} steps"
    yield Line(f"{what}: speed", spread(rates, " steps/s"))
    yield Line(f"{what}: peak memory", f"{peak:,.0f} MiB", ours=f"{filled:,.0f} MiB before the first step",
               other=f"{touched:,} of {args.vocab_size:,} tokens touched")  # fmt: skip


def train_at_scale(args: argparse.Namespace) -> tuple[list[float], float, float, int, int]:
    """Steps per second, MiB resident before the first step, peak MiB, tokens touched, training prompts."""
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    share, generator = shares("shared", args.vocab_size, args.nonzeros), torch.Generator().manual_seed(0)
    tables = [made_up_table(count, name, share, generator) for count, name in ((args.scale_prompts, "a"), (64, "b"))]
    del share
    data = LabelDataModule(
        lambda: None, lambda: (tables.pop(0), tables.pop(0)), FeatureExtractor("probs"), BLOCK_SIZES, batch_size=256,
        validation_share=0.01,
    )  # fmt: skip
    data.setup()
    module = BlockSizeModule(
        list(BLOCK_SIZES), 16, args.vocab_size, preprocess={"kind": "probs"}, predictor={"width": args.width}
    )
    filled, clock = status_mib("VmRSS"), StepClock()
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=args.steps + 1, max_epochs=-1, limit_val_batches=0, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    rates = [1 / (end - start) for start, end in itertools.pairwise(clock.ends)]
    (optimizer,) = trainer.optimizers
    touched = max(state.get("touched", 0) for state in optimizer.state.values())
    return rates, filled, status_mib("VmHWM"), touched, len(data.train_table)


def made_up_table(count: int, prefix: str, share_V: Tensor, generator: torch.Generator) -> LabelTable:
    """Labels that say nothing, distributions as of everywhere here."""
    return LabelTable(
        prompt_ids=tuple(f"{prefix}{index}" for index in range(count)),
        datasets=("made up",) * count,
        prompt_keys=torch.randint(2**62, (count,), generator=generator),
        prompts=TokenLists(torch.arange(count + 1), torch.zeros(count, dtype=torch.int32)),
        block_sizes=BLOCK_SIZES,
        committed_tokens=torch.randint(40, 80, (count, len(BLOCK_SIZES)), generator=generator),
        rounds=torch.full((count, len(BLOCK_SIZES)), 10),
        distributions=made_up_rows(count, share_V, generator),
    )


# --- the table

ROWS: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "step": functools.partial(step, "shared"),
    "step-disjoint": functools.partial(step, "disjoint"),
    "steps": twenty_steps,
    "choose": choose,
    "overhead": overhead,
    "scale": scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="WORD",
                        help=f"out of: {', '.join(ROWS)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--nonzeros", type=int, default=2000, help="tokens a prompt, on average")
    parser.add_argument("--width", type=int, default=2048, help="of all rows but overhead, which has 2048 and 256")
    parser.add_argument("--prompts", type=int, default=8, help="of the embedded pair, for overhead")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="for overhead")
    parser.add_argument("--scale-prompts", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=20, help="of scale, after one that does not count")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = f"V = {args.vocab_size:,}, width {args.width}, depth {DEPTH}, batch {BATCH}"
    print(f"{machine(('torch', 'lightning'))}; {shape}, {args.repeats} turns\n", flush=True)
    print("| what | goal | figure | reached | ours | other |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.rows:
        for line in ROWS[name](args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
