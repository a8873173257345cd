"""How much is worked on at once, with errors as torch raises them, and with memory that really runs out."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from blockpilot import oracle
from blockpilot.errors import UserError
from blockpilot.oracle.memory import BatchMemory, within_memory
from tests.toy import make_prompts
from tests.unit.oracle.test_oracle_replay import SIZES, random_pair

CPU = torch.device("cpu")
ERRORS = {
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError,
}  # fmt: skip


def groups(memory: BatchMemory, costs: list[int], batch_size: int, most: int = 10**9, error: str = "gpu") -> list:
    """Groups that were worked off where no more than ``most`` padded positions fit."""
    done: list[list[int]] = []

    def work(members: list[int]) -> None:
        if len(members) * max(costs[i] for i in members) > most or memory.tokens > most:
            raise ERRORS[error]()
        done.append(members)

    memory.work_off(costs, batch_size, work)
    return done


def test_groups_hold_like_costs_within_both_limits() -> None:
    costs = [5, 50, 6, 7, 40, 5]
    assert groups(BatchMemory(20, CPU, 1), costs, 64) == [[0, 5, 2], [3], [4], [1]]
    assert groups(BatchMemory(10**6, CPU, 1), costs, 4) == [[0, 5, 2, 3], [4, 1]]
    assert groups(BatchMemory(None, CPU, 1), costs, 64) == [[0, 5, 2, 3, 4, 1]]
    assert groups(BatchMemory(None, CPU, 1), [], 64) == []
    assert list(BatchMemory(20, CPU, 1).in_order(costs, 64)) == [[0], [1], [2, 3], [4], [5]]
    assert list(BatchMemory(None, CPU, 1).in_order(costs, 4)) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("error", ERRORS)
def test_work_in_one_piece_that_runs_out_of_memory_is_told_with_its_keys(error: str) -> None:
    told = "^out of memory on cpu; expected a smaller batch$"
    with pytest.raises(UserError, match=told), within_memory(CPU, "batch"):
        raise ERRORS[error]()
    with pytest.raises(RuntimeError, match="a bug"), within_memory(CPU, "any"):
        raise RuntimeError("a bug")


@pytest.mark.parametrize("error", ERRORS)
def test_memory_that_runs_out_halves_what_is_tried(error: str, caplog: pytest.LogCaptureFixture) -> None:
    memory = BatchMemory(1000, CPU, 8)
    done = groups(memory, [10] * 16, 64, most=45, error=error)
    assert sorted(i for group in done for i in group) == list(range(16))
    assert max(map(len, done)) == 4 and memory.tokens == 40
    # from what was really tried, 160 positions, not from the 1000 that were allowed
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory on cpu with 160 tokens at once; going on with oracle.max_batch_tokens=80",
        "out of memory on cpu with 80 tokens at once; going on with oracle.max_batch_tokens=40",
    ]


def test_too_little_memory_for_a_single_prompt_is_told() -> None:
    with pytest.raises(
        UserError, match="out of memory on cpu with 10 tokens at once, as few as one prompt and a block"
    ):
        groups(BatchMemory(1000, CPU, 8), [10, 10], 64, most=3)


def test_other_errors_are_not_taken_for_it() -> None:
    def work(members: list[int]) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchMemory(None, CPU, 1).work_off([1], 1, work)


@pytest.mark.parametrize("tokens", [1, 9, 40, 200])
@pytest.mark.parametrize("per_round", [False, True])
def test_the_limit_changes_nothing_but_the_work(tokens: int, per_round: bool) -> None:
    pair, prompts = random_pair(), make_prompts([4, 16, 1, 9], seed=3)
    expected = oracle.replay(pair, prompts, SIZES, max_new_tokens=9)
    limited = oracle.replay(pair, prompts, SIZES, max_new_tokens=9, max_batch_tokens=tokens, per_round=per_round)
    assert [one.acceptance_lengths for one in limited] == [one.acceptance_lengths for one in expected]


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_a_limit_that_is_none_is_refused(tokens: object) -> None:
    with pytest.raises(UserError, match="max_batch_tokens"):
        oracle.replay(random_pair(), [], SIZES, max_batch_tokens=tokens)  # type: ignore[arg-type]


REAL = """
import ctypes, logging, resource, torch
import blockpilot as bp

logging.basicConfig(format="%(message)s")
torch.set_num_threads(1)
pair = bp.load_pair("tiny")
prompts = [pair.encode([f"Count from {i} to {i + 30}."]) for i in range(192)]
sizes = [16]
expected = bp.oracle.replay(pair, prompts, sizes, max_new_tokens=24, batch_size=16)
# what is free inside the process would hide that nothing more is to be had
ctypes.CDLL(None).malloc_trim(0)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = bp.oracle.replay(pair, prompts, sizes, max_new_tokens=24, batch_size=192)
print("equal", [r.acceptance_lengths for r in found] == [r.acceptance_lengths for r in expected])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_memory_that_really_runs_out() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "equal True", done.stderr
    assert "out of memory on cpu" in done.stderr and "going on with oracle.max_batch_tokens=" in done.stderr


HELD = """
import sys, torch
from blockpilot.oracle.memory import give_back

def held() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

torch.ones(31 << 18)                    # its freeing has the C library keep blocks of this size from now on
kept, freed = [], []
for _ in range(100):                    # 4 MiB that are freed between others that stay
    freed.append(torch.ones(1 << 20))
    kept.append(torch.ones(1 << 12))
before = held()
freed.clear()
between = held()
give_back()
print(before, between, held())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_tensors_are_given_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    before, between, after = map(int, done.stdout.split())
    assert before - between < 40, "freed tensors are kept by the C library; this test shows nothing otherwise"
    assert between - after > 300
