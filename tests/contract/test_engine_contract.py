"""What every engine promises behind the Engine port: one suite over the embedded engine (tiny random weights)
and the simulated one. What of it is about requests by ids holds for a fake SGLang too, and what is about facts
alone for a recorded vLLM as well. `test_engine_doors` compares what each states with the table of kinds."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from engine_adapter.batching import kv_cache
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.engine import EngineFailed
from engine_adapter.simulated.rank import SimulatedRank
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.dynamo_kv import KvChange
from fleet.placement import Placement
from fleet.routings import UNKNOWN, count_pairs
from tests.contract.engine_doors import (
    BLOCK,
    PROMPT,
    SAMPLED,
    SMALL,
    Starter,
    Tried,
    chained,
    held_after,
    recorded,
    starter,
    worked_at,
)
from tests.engine_adapter.vllm.recorded_server import RECORDING


@pytest.fixture(params=["embedded", "simulated"])
def start(request: pytest.FixtureRequest) -> Starter:
    """`async with start(kv_blocks=8) as tried:` a rank that serves until the block ends."""
    return starter(request)


@pytest.fixture
async def tried(start: Starter) -> AsyncIterator[Tried]:
    async with start() as one:
        yield one


@pytest.fixture(params=["embedded", "simulated", "SGLang, a fake"])
async def by_ids(request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    """A rank that takes requests by ids."""
    async with starter(request)() as one:
        yield one


@pytest.fixture(params=["embedded", "simulated", "recorded vLLM", "SGLang, a fake"])
async def worked(request: pytest.FixtureRequest) -> AsyncIterator[Tried]:
    async with worked_at(request) as tried:
        yield tried


async def test_the_first_rank_names_the_weights_that_it_serves(start: Starter) -> None:
    async with start() as tried:
        weights = tried.ranks[0].description.weights_digest
        assert weights is None if isinstance(tried.ranks[0], SimulatedRank) else len(weights) == 32


async def test_requests_share_kv_under_one_salt_only(by_ids: Tried) -> None:
    assert by_ids.engine.description.capabilities.isolates_tenants
    reused = len(PROMPT) // BLOCK * BLOCK
    cached = [
        (await by_ids.ask(salt=salt)).outcome.cached_tokens for salt in ("", "ours", "theirs", "ours", "")
    ]
    assert cached == [0, 0, 0, reused, reused]


async def test_salted_blocks_are_told_under_salted_hashes_which_routers_compute_too(tried: Tried) -> None:
    await tried.ask(salt="ours")
    await tried.idle()
    stored = [
        block
        for change in tried.kv
        if not isinstance(change, str) and change.stored is not None
        for block in change.stored.blocks
    ]
    local = local_hashes(PROMPT, BLOCK, salted_seed("ours"))
    assert [block.tokens_hash for block in stored][: len(local)] == local
    assert [block.block_hash for block in stored][: len(local)] == sequence_hashes(local)
    profiled = [block.block_hash for block in tried.ended[0].blocks]
    assert profiled[: len(local)] == sequence_hashes(local), "signatures are learnt under the salt, too"
    assert not {block.tokens_hash for block in stored} & set(local_hashes(PROMPT, BLOCK))


async def test_an_answer_does_not_depend_on_the_salt_nor_do_the_experts_that_it_activates(
    start: Starter,
) -> None:
    answers, counts = [], []
    for salt in ("", "ours"):
        async with start() as tried:
            answers.append((await tried.ask(salt=salt)).token_ids)
            await tried.idle()
            counts.append(np.asarray(tried.counts).tolist())
    assert answers[0] == answers[1]
    assert counts[0] == counts[1]


async def test_a_collision_of_block_hashes_shares_no_kv(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes are 64 bits without a key: whoever finds two prompts of one hash must not be answered out of the
    other's KV."""
    other = [token % 200 + 1 for token in PROMPT]
    expected = (await tried.ask(other)).token_ids
    monkeypatch.setattr(kv_cache, "chain", lambda parent, local: 1 if parent is None else parent + 1)
    await tried.ask(PROMPT, salt="fresh")
    collided = await tried.ask(other, salt="fresh")
    assert collided.outcome.cached_tokens == 0
    assert collided.token_ids == expected


async def test_kv_facts_come_in_order_and_conserve_blocks_through_eviction_preemption_and_cancels(
    worked: Tried,
) -> None:
    last = await worked.idle()
    assert len(held_after(worked.kv, worked.engine.description.kv_blocks)) == last.load.used_blocks > 0
    assert any(isinstance(change, KvChange) and change.removed is not None for change in worked.kv)


async def test_what_a_recorded_vllm_computed_is_told_under_the_hashes_that_routers_compute() -> None:
    asked = [one for step in RECORDING["steps"] for one in step["requests"] if one["rank"] == 1]
    async with recorded() as vllm:
        await vllm.play()
        stored = {
            block.block_hash
            for change in vllm.tried.kv
            if not isinstance(change, str) and change.stored is not None
            for block in change.stored.blocks
        }
    assert {one["salt"] for one in asked} == {"", "tenant-a"}
    assert stored == set().union(*map(chained, asked))


async def test_a_recorded_vllm_under_load_says_so() -> None:
    async with recorded() as vllm:
        vllm.server.metrics = RECORDING["loaded"]
        async with asyncio.timeout(10):
            while not (load := vllm.tried.take().load).running:
                await vllm.tried.engine.wait_facts()
        assert 0 < load.decode_blocks <= load.used_blocks


async def test_an_idle_rank_of_any_engine_has_no_load_but_what_it_keeps(worked: Tried) -> None:
    load = (await worked.idle()).load
    assert (load.running, load.waiting, load.prefill_tokens, load.decode_blocks) == (0, 0, 0, 0)


async def test_an_idle_rank_has_no_load_but_what_it_keeps(tried: Tried) -> None:
    await tried.ask()
    load = (await tried.idle()).load
    assert (load.running, load.waiting, load.prefill_tokens, load.decode_blocks) == (0, 0, 0, 0)
    assert load.used_blocks == (len(PROMPT) + 11) // BLOCK


async def test_load_says_what_is_open(tried: Tried) -> None:
    answers = [await tried.submit([1 + one, *PROMPT], 100) for one in range(6)]
    async with asyncio.timeout(5):
        while (load := tried.take().load).running + load.waiting < 6 or not load.running:
            await tried.engine.wait_facts()
    assert load.running <= SMALL["max_running"]
    assert load.running + load.waiting == 6
    assert load.decode_blocks > 0
    for answer in answers:
        answer.cancel()


async def test_a_rank_that_has_decoded_says_how_long_a_step_takes(tried: Tried) -> None:
    assert tried.take().load.step_seconds is None
    await tried.ask(max_tokens=20)
    seconds = (await tried.idle()).load.step_seconds
    assert seconds is not None
    assert 0 < seconds < 1


async def test_facts_are_told_once(worked: Tried) -> None:
    await worked.idle()
    again = worked.take()
    assert (again.kv, again.activations, again.ended, again.ended_lost) == ((), None, (), 0)


async def test_activations_count_every_computed_token_in_every_layer_and_no_cached_one(tried: Tried) -> None:
    shape = tried.engine.description.shape
    outcomes = [(await tried.ask(prompt, 9)).outcome for prompt in (PROMPT, PROMPT, PROMPT[:33], [9, 9, 9])]
    await tried.idle()
    assert all(outcome is not None for outcome in outcomes)
    computed = sum(
        one.prompt_tokens - one.cached_tokens + one.completion_tokens - 1
        for one in outcomes
        if one is not None
    )
    assert tried.tokens == computed
    assert tried.cached == sum(one.cached_tokens for one in outcomes if one is not None) > 0
    assert tried.counts.shape == (shape.layers, shape.experts)
    assert tried.counts.sum(axis=1).tolist() == [computed * shape.top_k] * shape.layers
    used = np.array(
        [count_pairs(one.routed, shape.experts) for one in tried.ended]
    )  # by request, written down apart
    assert np.array_equal(tried.counts, used.sum(axis=0))
    assert used.max() <= computed  # a token's experts are distinct: it goes to each at most once in a layer


async def test_an_ended_request_is_named_by_its_decision_and_shows_what_each_token_used(tried: Tried) -> None:
    shape = tried.engine.description.shape
    await tried.ask(decision="first")
    reused = (await tried.ask(decision="second")).outcome
    await tried.ask([3, 4, 5], max_tokens=1)
    await tried.idle()
    assert [one.decision for one in tried.ended] == ["first", "second", ""]
    assert reused is not None
    for one, cached in zip(tried.ended[:2], (0, reused.cached_tokens), strict=True):
        table = one.routed
        assert one.prompt_tokens == len(PROMPT)
        assert table.shape == (len(PROMPT) + 11, shape.layers, shape.top_k)
        assert (table[:cached] == UNKNOWN).all()
        assert ((table[cached:] >= 0) & (table[cached:] < shape.experts)).all()
        assert all(len(set(row)) == shape.top_k for row in table[cached:].reshape(-1, shape.top_k).tolist())
        assert [block.block_hash for block in one.blocks][:3] == sequence_hashes(local_hashes(PROMPT, BLOCK))
        assert one.nbytes > 0
    counted = sum(
        np.bincount(one.routed[one.routed != UNKNOWN].ravel(), minlength=shape.experts) for one in tried.ended
    )
    assert counted.tolist() == tried.counts.sum(axis=0).tolist()


async def test_equal_prefixes_use_equal_experts(start: Starter) -> None:
    tables = []
    for tail in ([1, 2, 3], [200]):
        async with start() as tried:
            await tried.ask([*PROMPT, *tail], max_tokens=1)
            await tried.idle()
            tables.append(tried.ended[0].routed[: len(PROMPT)])
    assert np.array_equal(*tables)


async def test_a_cancelled_request_frees_everything_running_or_waiting(tried: Tried) -> None:
    answers = [await tried.submit([1 + one, *PROMPT], 150) for one in range(8)]
    await anext(answers[0])
    for answer in answers:
        answer.cancel()
        answer.cancel()
    load = (await tried.idle()).load
    assert (load.running, load.waiting, load.prefill_tokens, load.decode_blocks) == (0, 0, 0, 0)
    assert answers[0].outcome is not None
    assert answers[0].outcome.reason == "cancelled"
    assert len((await tried.ask()).token_ids) == 12


async def test_overload_is_refused_and_over_when_somebody_leaves(tried: Tried) -> None:
    open_ones = [await tried.submit(PROMPT, 150) for _ in range(SMALL["max_running"] + SMALL["max_waiting"])]
    with pytest.raises(Overloaded, match="max_waiting"):
        await tried.submit()
    for answer in open_ones:
        answer.cancel()
    await tried.idle()
    assert len((await tried.ask()).token_ids) == 12


async def test_more_sequences_than_pages_are_all_answered_in_turn(start: Starter) -> None:
    async with start(kv_blocks=6, max_context=96, max_waiting=16) as tried:
        prompts = [[1 + one] * (5 + 9 * one) for one in range(5)]
        alone = [await tried.ask(prompt, 50) for prompt in prompts]
        # Twice, and long: a fast engine may be done with one before the next one comes.
        together = await asyncio.gather(*(tried.ask(prompt, 50) for prompt in 2 * prompts))
    assert [one.token_ids for one in together] == [one.token_ids for one in 2 * alone]
    assert sum(one.outcome.preemptions for one in together if one.outcome is not None) > 0


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(prompt=[], max_tokens=1),
        GenerationRequest(prompt=[1], max_tokens=0),
        GenerationRequest(prompt=[1] * 200, max_tokens=100),
        GenerationRequest(prompt=[-1], max_tokens=1),
        GenerationRequest(prompt=[1 << 40], max_tokens=1),
        GenerationRequest(prompt=[1, 2], max_tokens=1, emitted=2),
    ],
)
async def test_a_request_out_of_bounds_is_a_value_error_and_leaves_nothing(
    by_ids: Tried, request_: GenerationRequest
) -> None:
    with pytest.raises(ValueError, match="request"):
        await by_ids.engine.submit(request_)
    assert (await by_ids.idle()).load.waiting == 0


async def test_a_failed_engine_ends_what_is_open_and_refuses_the_rest(tried: Tried) -> None:
    answer = await tried.submit(PROMPT, 150)
    await anext(answer)
    tried.fail()
    with pytest.raises(EngineFailed):
        await answer.rest()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(tried.run, 5)
    with pytest.raises(EngineFailed):
        await tried.submit()
    assert isinstance(tried.engine.failure, EngineFailed)


async def test_a_cancelled_run_leaves_no_request_open(tried: Tried) -> None:
    answers = [await tried.submit([1 + one, *PROMPT], 150) for one in range(6)]
    await anext(answers[0])
    tried.run.cancel()
    for answer in answers:
        with pytest.raises(EngineFailed, match="is stopping"):
            await answer.rest()
    with pytest.raises(asyncio.CancelledError):
        await tried.run
    with pytest.raises(EngineFailed):
        await tried.submit()


async def test_a_repeated_prompt_is_found_in_the_cache(by_ids: Tried) -> None:
    first, second = [(await by_ids.ask()).outcome for _ in range(2)]
    assert first is not None
    assert second is not None
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
async def test_a_continuation_goes_on_with_exactly_the_same_tokens_and_text(
    by_ids: Tried, sampling: Sampling
) -> None:
    if sampling is SAMPLED and by_ids.engine.description.kind == "sglang":
        pytest.skip("SGLang's random numbers begin anew, as the table of kinds says")
    whole = await by_ids.ask(max_tokens=24, sampling=sampling)
    for emitted in (1, 7, 23):
        rest = await by_ids.ask(
            [*PROMPT, *whole.token_ids[:emitted]], 24 - emitted, emitted=emitted, sampling=sampling
        )
        assert rest.token_ids == whole.token_ids[emitted:]
        assert whole.text.endswith(rest.text)
        assert rest.outcome is not None
        assert rest.outcome.prompt_tokens == len(PROMPT)


async def test_the_placement_is_that_of_the_model_on_all_ranks_and_no_handover_is_under_way(
    tried: Tried,
) -> None:
    about, placement = tried.engine.description, tried.engine.placement
    assert (placement.layers, placement.experts, placement.ranks, placement.epoch) == (
        about.shape.layers,
        about.shape.experts,
        about.ranks,
        0,
    )
    assert tried.engine.handover_seconds == 0
    assert placement.attention == "dp"


# Handovers


async def adopt_next(tried: Tried) -> None:
    """Every rank goes over to an epoch in which two experts of its layer 0 have changed slots, one of them
    through a free cell."""
    now = tried.engine.placement
    per = now.slots_per_rank
    table = now.expert_of_slot.copy()
    for rank in range(now.ranks):
        table[0, [rank * per, rank * per + 1]] = table[0, [rank * per + 1, rank * per]]
    placement = Placement(table, experts=now.experts, ranks=now.ranks, epoch=now.epoch + 1)
    adoptions = []
    for rank in tried.ranks:
        memory, cells = rank.experts.memory, rank.experts.cells.copy()
        free = next(cell for cell in range(memory.cells) if cell not in cells)
        memory.cell(free)[:] = memory.cell(int(cells[0, 1]))
        cells[0, :2] = free, cells[0, 0]
        adoptions.append(await rank.experts.prepare(placement, cells))
        assert rank.placement == now
    await asyncio.gather(
        *(rank.experts.adopt(adoption) for rank, adoption in zip(tried.ranks, adoptions, strict=True))
    )
    for rank, adoption in zip(tried.ranks, adoptions, strict=True):
        assert rank.placement == adoption.placement == placement
        assert rank.experts.cells[0, 0] in range(memory.cells)


async def test_the_cells_of_a_rank_are_more_than_its_slots_and_each_slot_is_in_one_of_its_own(
    tried: Tried,
) -> None:
    memory, placement = tried.engine.experts.memory, tried.engine.placement
    cells = tried.engine.experts.cells
    assert cells.shape == (placement.layers, placement.slots_per_rank)
    assert len(set(cells.ravel().tolist())) == cells.size <= memory.cells - placement.slots_per_rank
    assert memory.cell(0).shape == (memory.cell_bytes,)
    assert memory.cell(1).ctypes.data == memory.base + memory.cell_bytes
    ends = [tensor.offset + tensor.bytes for tensor in memory.tensors]
    assert all(tensor.offset >= end for tensor, end in zip(memory.tensors, [0, *ends], strict=False))
    assert ends[-1] <= memory.cell_bytes


async def test_ranks_go_over_to_another_epoch_while_they_serve_and_not_one_token_changes(
    tried: Tried,
) -> None:
    before = await tried.ask(max_tokens=60)
    answer = await tried.submit(max_tokens=60)
    await anext(answer)
    await adopt_next(tried)
    await adopt_next(tried)
    assert tried.engine.placement.epoch == 2
    rest = await answer.rest()
    assert rest.token_ids == before.token_ids[-len(rest.token_ids) :]
    assert (await tried.ask(max_tokens=60)).token_ids == before.token_ids


async def test_where_tokens_were_sent_is_told_once_per_epoch_and_adds_up_to_what_was_computed(
    tried: Tried,
) -> None:
    placement, top_k = tried.engine.placement, tried.engine.description.shape.top_k
    answer = await tried.submit(max_tokens=60)
    await anext(answer)
    await adopt_next(tried)
    await answer.rest()
    await tried.idle()
    sent = tried.sent
    assert [one.epoch for one in sent] == sorted(one.epoch for one in sent)
    assert {one.epoch for one in sent} <= {0, 1}
    assert sum(one.tokens for one in sent) == tried.tokens == len(PROMPT) + 59
    for one in sent:
        assert one.pairs == top_k * one.tokens
        assert {len(column) for column in (one.remote_ranks, one.local, one.served, one.balance)} == {
            placement.layers
        }
        assert (one.balance <= one.steps + 1e-9).all()
        assert (one.local + one.remote_ranks <= one.pairs * (1 + 1e-6)).all()
        assert (one.served >= one.local * (1 - 1e-6)).all()
        if placement.ranks == 1:
            assert (one.remote_ranks == 0).all()
            assert (one.local == one.pairs).all()
        assert one.step_seconds > 0
    assert tried.take().sent == ()


async def test_a_sleeping_engine_goes_over_at_once(tried: Tried) -> None:
    async with asyncio.timeout(5):
        await adopt_next(tried)
    assert tried.engine.placement.epoch == 1
    assert len((await tried.ask()).token_ids) == 12


async def test_an_engine_that_fails_ends_what_waits_for_its_next_epoch(tried: Tried) -> None:
    placement = tried.engine.placement
    following = Placement(placement.expert_of_slot, experts=placement.experts, ranks=placement.ranks, epoch=1)
    adoption = await tried.engine.experts.prepare(following, tried.engine.experts.cells)
    tried.run.cancel()
    await asyncio.wait([tried.run])
    with pytest.raises(EngineFailed):
        await tried.engine.experts.adopt(adoption)
