"""One rank of an engine in a process of its own, and the greedy loop that tests drive a runner with.

`python rank_process.py JOB.json RANK` does what the job says: "generate" writes RANK.npz into the job's
folder, "exchange" steps until it fails and says how. Tests load the functions by `runpy`, so that one process
and several run the same code.
"""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np

from engine_adapter.embedded.calibration.calibrate import measure_prices
from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from engine_adapter.embedded.step_sync import RankGroup, StepHeader, StepSync, StepSyncError
from fleet.placement import Placement, Split, linear


class Sequence:
    """A prompt on its way: its pages lie anywhere, in no order."""

    def __init__(self, prompt, count, free, chunk, start=0, prefix=()):
        self.tokens = list(prompt)
        self.left = count
        self.chunk = chunk
        self.computed = start
        needed = -(-(len(prompt) + count) // PAGE_TOKENS)
        self.pages = list(prefix) + [free.pop() for _ in range(needed - len(prefix))]
        self.logits = []

    def work(self):
        if not self.left:
            return None
        tokens = self.tokens[self.computed : self.computed + self.chunk]
        return SequenceWork(
            tokens, self.computed, self.pages, self.computed + len(tokens) == len(self.tokens)
        )

    def take(self, work, logits):
        self.computed += len(work.tokens)
        if work.needs_logits:
            self.logits.append(logits)
            self.tokens.append(int(logits.argmax()))
            self.left -= 1


def shuffled_pages(count, seed=0):
    """A free list in a random, repeatable order."""
    free = list(range(count))
    random.Random(seed).shuffle(free)
    return free


def run_sequences(runner, sequences, exchange=None):
    """Compute all sequences to their end, batched together; `exchange` tells this step's tokens to the other
    ranks."""
    while True:
        batch = [(sequence, work) for sequence in sequences if (work := sequence.work())]
        tokens = sum(len(work.tokens) for _, work in batch)
        by_rank = exchange(tokens) if exchange else [tokens]
        if not any(by_rank):
            return
        logits = iter(runner.forward([work for _, work in batch], by_rank).logits.numpy())
        for sequence, work in batch:
            sequence.take(work, next(logits) if work.needs_logits else None)


def greedy(runner, prompts, count, chunk=48, exchange=None):
    """Greedy continuations of all prompts: int64 [prompts, count] tokens and fp32 [prompts, count,
    vocabulary] logits behind them."""
    free = shuffled_pages(runner.kv_pages)
    sequences = [Sequence(prompt, count, free, chunk) for prompt in prompts]
    run_sequences(runner, sequences, exchange)
    vocabulary = runner.config.vocabulary
    tokens = np.array([one.tokens[-count:] for one in sequences], np.int64).reshape(-1, count)
    return tokens, np.array([np.stack(one.logits) for one in sequences], np.float32).reshape(
        -1, count, vocabulary
    )


def counting_exchange(step_sync):
    """Headers of steps 0, 1, 2...: own tokens in, everybody's out."""
    step = -1

    def exchange(tokens):
        nonlocal step
        step += 1
        return [header.tokens for header in step_sync.exchange(StepHeader(step=step, tokens=tokens))]

    return exchange


def generate(job, rank, group, folder):
    step_sync = StepSync(folder, rank, group)
    with Checkpoint(Path(job["checkpoint"])) as checkpoint:
        config = checkpoint.config
        if "slots" in job:
            split = Split(*(np.array(part, np.uint16) for part in job["split"])) if job["split"] else None
            placement = Placement(
                np.array(job["slots"]), experts=config.experts, ranks=job["ranks"], split=split
            )
        else:
            placement = linear(layers=config.layers, experts=config.experts, ranks=job["ranks"])
        runner = ModelRunner(
            checkpoint,
            placement,
            rank=rank,
            group=group,
            kv_pages=job["kv_pages"],
            cover=job.get("cover", False),
        )
    tokens, logits = greedy(
        runner, job["prompts"][rank :: job["ranks"]], job["count"], exchange=counting_exchange(step_sync)
    )
    prices = measure_prices(runner).dp
    np.savez(
        folder / f"{rank}.npz",
        tokens=tokens,
        logits=logits,
        dispatch_seconds=prices.dispatch,
        pair_seconds=prices.expert_pair,
    )
    step_sync.exchange(StepHeader(step=10**6))  # nobody leaves while another still needs it
    step_sync.close()
    group.close()


def exchange_until_it_fails(rank, group, folder):
    step_sync = StepSync(folder, rank, group)
    step = 0
    begin = time.monotonic()
    try:
        while True:
            begin = time.monotonic()
            step_sync.exchange(StepHeader(step=step))
            step += 1
            if step == 20:
                (folder / f"{rank}.stepping").touch()
            time.sleep(0.001)
    except StepSyncError as error:
        (folder / f"{rank}.json").write_text(
            json.dumps({"error": type(error).__name__, "seconds": time.monotonic() - begin})
        )


def main(job_path, rank):
    job = json.loads(Path(job_path).read_text())
    folder = Path(job_path).parent
    group = RankGroup(folder, rank, job["ranks"], step_timeout_s=job["step_timeout_s"])
    if job["do"] == "generate":
        generate(job, rank, group, folder)
    else:
        exchange_until_it_fails(rank, group, folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
