"""Which experts simulated tokens want, where those are, and what the words are: against plain loops."""

import dataclasses
import io
import itertools
import json
import zipfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.scheduler import SequenceState, Slice
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.dispatch_model import DispatchModel
from engine_adapter.simulated.model.presets import PRESETS, SHAPES, speed_of
from engine_adapter.simulated.model.routing_model import BUCKETS, RoutingModel, aligned, place
from engine_adapter.simulated.model.step_time import StepPlan, plan, seconds, tokens_of_row
from engine_adapter.simulated.model.text import END, VOCABULARY, Script, WordTokenizer
from fleet.dispatch import loads, shares
from fleet.placement import FULL, Placement, Split, linear, with_rows
from fleet.routings import count_pairs
from fleet.timing import EngineSpeed
from tests.fleet.splits import random_table

CONFIG = SimulatedConfig(shape="demo", ranks=4, node_ranks=2, domains=3, domain_blocks=2)
ROUTING = RoutingModel(CONFIG)
TOKENIZER = WordTokenizer()
tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=90)


@given(tokens, st.data())
@settings(max_examples=40)
def test_a_position_wants_the_same_experts_however_its_prompt_is_cut_and_goes_on(prompt, data):
    blocks = identify(prompt, 16)
    rows = ROUTING.rows_of(prompt, 0, blocks)
    assert rows.tolist() == [ROUTING.row(token, at, blocks) for at, token in enumerate(prompt)]
    begin = data.draw(st.integers(0, len(prompt) - 1))
    assert ROUTING.rows_of(prompt[begin:], begin, blocks).tolist() == rows[begin:].tolist()
    shorter = prompt[: begin + 1]
    assert ROUTING.rows_of(shorter, 0, identify(shorter, 16)).tolist() == rows[: begin + 1].tolist()


def test_the_first_blocks_choose_the_domain_and_the_rest_keeps_it():
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 1000, 160).tolist() for _ in range(60)]
    domains = [
        (ROUTING.rows_of(prompt, 0, identify(prompt, 16)) // BUCKETS).reshape(-1, 16) for prompt in prompts
    ]
    for found in domains:
        assert (found[0] == CONFIG.domains).all()
        assert len(set(found[CONFIG.domain_blocks :].ravel().tolist())) == 1
    assert {int(found[-1, 0]) for found in domains} == set(range(CONFIG.domains))


def test_counts_are_those_of_the_tables():
    by_row = np.random.default_rng(1).integers(0, 4, ROUTING.rows)
    rows = np.repeat(np.arange(ROUTING.rows, dtype=np.int16), by_row)
    assert np.array_equal(ROUTING.counts(by_row), count_pairs(ROUTING.chosen(rows), ROUTING.shape.experts))


def test_engines_of_one_seed_agree_and_of_another_do_not():
    assert np.array_equal(ROUTING.table, RoutingModel(dataclasses.replace(CONFIG, ranks=2)).table)
    assert not np.array_equal(ROUTING.table, RoutingModel(dataclasses.replace(CONFIG, seed=1)).table)


def with_replicas() -> Placement:
    """Six experts of each layer have a second home, on the next rank but one."""
    slots = np.full((4, 4, 10), -1, np.int16)
    slots[:, :, :8] = linear(layers=4, experts=32, ranks=4).expert_of_slot.reshape(4, 4, 8)
    for layer, expert in itertools.product(range(4), (0, 5, 9, 17, 25, 31)):
        rank = (expert // 8 + 2) % 4
        slots[layer, rank, 8 + (slots[layer, rank, 8] >= 0)] = expert
    return Placement(slots.reshape(4, -1), experts=32, ranks=4)


def unevenly() -> Placement:
    """The same, with splits that are not even: ranks keep some of their own, nodes take some of theirs."""
    random, replicated = np.random.default_rng(7), with_replicas()
    even, table = replicated.split, replicated.expert_of_slot
    spill = even.spill.copy()
    for layer, expert in itertools.product(range(4), (0, 5, 9, 17, 25, 31)):
        first, second = np.flatnonzero(table[layer] == expert)
        spill[layer, first] = random.choice([0, 20_000, FULL])
        spill[layer, second] = FULL - spill[layer, first]
    keep, near = (
        np.where(table >= 0, random.choice([0, 30_000, FULL], table.shape), 0).astype(np.uint16)
        for _ in range(2)
    )
    return Placement(table, experts=32, ranks=4, split=Split(keep, spill, near))


PLACEMENTS = {
    "linear": place(ROUTING, CONFIG),
    "aligned": aligned(ROUTING, 4),
    "replicas": with_replicas(),
    "uneven": unevenly(),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@given(sharded=st.sets(st.integers(0, 3)))
@example(sharded=set())
@example(sharded={0, 1, 2, 3})
@settings(max_examples=5, deadline=None)
def test_traffic_is_what_counting_token_by_token_gives(placement, sharded):
    """Each expert of each token goes its own way: all ways that a token's experts may go together, by their
    probability. In sharded layers each token goes to all ranks and back, and each rank reads its part of
    every expert in demand."""
    placement = with_rows(placement, dict.fromkeys(sharded), epoch=0)
    by_row = np.random.default_rng(2).integers(0, 3, (4, ROUTING.rows)) * (np.arange(ROUTING.rows) % 29 == 0)
    node = CONFIG.node_of_rank
    part = np.stack([shares(placement, home, np.array(node)) for home in range(4)])
    ranks, nodes, served = np.zeros(4), np.zeros(4), np.zeros((4, 4))
    reached, local = np.zeros((2, 4, 4))  # [home, layer]
    unread = np.ones(placement.expert_of_slot.shape)
    read_in_parts, states = set(), 0
    for home, row in zip(*np.nonzero(by_row), strict=True):
        tokens = by_row[home, row]
        for layer, experts in enumerate(ROUTING.table[row]):
            if layer in sharded:
                read_in_parts |= {(layer, expert) for expert in experts.tolist()}
                states += 2 * 3 * tokens  # to the other ranks, and from them
                continue
            ways = [
                [
                    slot
                    for slot in np.flatnonzero(placement.expert_of_slot[layer] == expert)
                    if part[home, layer, slot]
                ]
                for expert in experts
            ]
            for slots in itertools.product(*ways):
                chance = tokens * np.prod(part[home, layer, list(slots)])
                to = {slot // placement.slots_per_rank for slot in slots}
                ranks[home] += chance * len(to - {home})
                reached[home, layer] += chance * len(to - {home})
                local[home, layer] += chance * sum(slot // placement.slots_per_rank == home for slot in slots)
                nodes[home] += chance * len({node[rank] for rank in to} - {node[home]})
                for slot in slots:
                    served[layer, slot // placement.slots_per_rank] += chance
            for slot in itertools.chain(*ways):
                unread[layer, slot] *= (1 - part[home, layer, slot]) ** tokens
    routes = DispatchModel(ROUTING, placement, node)
    for home in range(4):
        assert np.stack(routes.sent(home, by_row[home])) == pytest.approx(
            np.stack([reached[home], local[home]]), rel=1e-5
        )
    found = routes.traffic(by_row)
    assert found.remote_ranks == pytest.approx(ranks)
    assert found.remote_nodes == pytest.approx(nodes)
    assert found.served == pytest.approx(served)
    unread[placement.expert_of_slot < 0] = 1
    assert found.distinct_experts == pytest.approx(
        (1 - unread).reshape(4, 4, -1).sum(axis=(0, 2)) + len(read_in_parts) / 4
    )
    assert found.gathered == pytest.approx(states * 192 * 2 / 4)  # 192 values in bfloat16
    demand = np.stack([ROUTING.counts(rows) for rows in by_row])
    assert found.served == pytest.approx(loads(placement, demand, np.array(node)))


def test_tokens_chosen_for_as_a_whole_reach_fewer_ranks_and_cause_the_same_else():
    placement = Placement(random_table(np.random.default_rng(3), 4, 4, 32, 6), experts=32, ranks=4)
    tokens = np.random.default_rng(4).integers(0, 3, (4, ROUTING.rows))
    routes = [DispatchModel(ROUTING, placement, (0, 0, 1, 1), cover=cover) for cover in (False, True)]
    split, cover = (one.traffic(tokens) for one in routes)
    assert (cover.remote_ranks < 0.95 * split.remote_ranks).all()
    for home in range(4):
        (split_reached, split_local), (reached, local) = (one.sent(home, tokens[home]) for one in routes)
        assert reached.sum() == pytest.approx(cover.remote_ranks[home])
        assert (reached <= 1.001 * split_reached).all()
        assert (local >= 0.95 * split_local).all()
    assert (cover.remote_nodes <= 1.02 * split.remote_nodes).all()
    assert cover.served == pytest.approx(split.served)
    sole = linear(layers=4, experts=32, ranks=4)
    split, cover = (
        DispatchModel(ROUTING, sole, (0, 0, 1, 1), cover=cover).traffic(tokens) for cover in (False, True)
    )
    assert cover.remote_ranks.tolist() == split.remote_ranks.tolist()


def test_tokens_chosen_for_as_a_whole_go_to_no_rank_in_sharded_layers():
    whole = Placement(random_table(np.random.default_rng(3), 4, 4, 32, 6), experts=32, ranks=4)
    tokens = np.random.default_rng(4).integers(0, 3, (4, ROUTING.rows))
    before, after = (
        DispatchModel(ROUTING, placement, (0, 0, 1, 1), cover=True).sent(1, tokens[1])
        for placement in (whole, with_rows(whole, {0: None, 2: None}, epoch=1))
    )
    for old, new in zip(before, after, strict=True):
        assert new.tolist() == pytest.approx([0.0, old[1], 0.0, old[3]])


def test_alignment_keeps_domains_at_home_and_ranks_balanced():
    config = SimulatedConfig(shape="demo", ranks=4, domains=4, domain_skew=1.5)
    routing = RoutingModel(config)
    shares, loads = [], []
    for placement in (linear(layers=4, experts=32, ranks=4), aligned(routing, 4)):
        held = placement.replicas_on_rank > 0
        local = [
            np.mean(
                [
                    held[
                        layer, domain, routing.table[domain * BUCKETS : (domain + 1) * BUCKETS, layer]
                    ].mean()
                    for layer in range(4)
                ]
            )
            for domain in range(4)
        ]
        expected = routing.counts(np.ones(routing.rows, np.int64))
        shares.append(np.mean(local))
        loads.append((held * expected[:, None, :]).sum(axis=2).max(axis=1) / expected.sum(axis=1) * 4)
    assert shares[0] < 0.32
    assert shares[1] > shares[0] + 0.1
    assert loads[1].max() < 1.3


def test_a_step_costs_what_its_slices_say():
    prompt, running = list(range(50)), SequenceState(list(range(100, 140)), 9)
    running.blocks = identify(running.tokens, 16)
    running.table.pages = [4, 5, 6]
    begun = SequenceState(prompt, 9, blocks=identify(prompt, 16))
    found = plan([Slice(running, 39, 1, last=True), Slice(begun, 16, 20, last=False)], ROUTING)
    assert (found.prefill_tokens, found.sequences, found.blocks) == (20, 1, 3)
    assert found.prefill_pairs == sum(position + 1 for position in range(16, 36))
    by_row = np.stack([tokens_of_row(found.parts, ROUTING.rows), np.zeros(ROUTING.rows, np.int64)])
    assert by_row.sum() == 21
    speed = EngineSpeed(
        prefill_token=1.0,
        prefill_pair=1e-3,
        step=100.0,
        decode_sequence=7.0,
        decode_block=0.5,
        dispatch=1e-4,
        dispatch_node=1e-5,
        expert_read=1e-6,
        expert_pair=0.01,
        gather_byte=1e-5,
    )
    placement = with_rows(linear(layers=4, experts=32, ranks=2), {3: None}, epoch=0)
    routes = DispatchModel(ROUTING, placement, (0, 1))
    cause = routes.traffic(by_row)
    busy, idle = seconds(speed, [found, StepPlan([], 0, 0.0, 0, 0)], cause)
    waits = 0.01 * sum(float(layer.max() - layer.mean()) for layer in cause.served)
    assert waits > 0
    waits += 1e-5 * 21 * 2 * 192 * 2 / 2  # 21 tokens there and back, to one of two ranks
    experts = 1e-4 * cause.remote_ranks[0] + 1e-5 * cause.remote_nodes[0] + 1e-6 * cause.distinct_experts[0]
    assert busy == pytest.approx(20 + 1e-3 * found.prefill_pairs + 100 + 7 + 1.5 + experts + waits)
    assert idle == pytest.approx(100 + 1e-6 * cause.distinct_experts[1] + waits)


def test_speeds_of_the_presets_are_those_of_the_cost_model():
    speed = speed_of("deepseek-v3", 16)
    assert SHAPES["deepseek-v3"].expert_bytes == pytest.approx(44.04e6, rel=1e-3)
    assert speed.dispatch_node * 50e9 == pytest.approx(7392 + 14336, rel=2e-3)
    assert speed.decode_block == pytest.approx(16 * 70_272 / 2.7e12)
    assert speed.expert_pair == pytest.approx(88.1e6 / 8e14, rel=1e-3)
    assert 0.008 < speed.step < 0.02
    assert 5_000 < 1 / speed.prefill_token < 20_000
    assert all(
        getattr(speed_of(name, 16), field) > 0 for name in PRESETS for field in EngineSpeed.__struct_fields__
    )


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"shape": "gpt"}, "shape must be one of deepseek-v3"),
        ({"ranks": 33}, "ranks must be 1 to 32"),
        ({"max_batch_tokens": 128}, "must exceed max_running"),
        ({"max_context": 1}, "max_context must be a whole number of at least 2"),
        ({"time_scale": 0.0}, "time_scale must be a number above 0, not 0.0"),
        ({"break_share": 1.1}, "break_share must be a number from 0 to 1, not 1.1"),
        ({"dispatch": -1.0}, "dispatch must be a number of at least 0 or unset, not -1.0"),
        ({"placement": "random"}, "must be one of linear, aligned"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        SimulatedConfig(**wrong)


def test_the_context_is_what_fits():
    assert SimulatedConfig().context == 32768
    assert (
        SimulatedConfig(kv_blocks=100).context
        == SimulatedConfig(kv_blocks=100, max_context=4096).context
        == 1600
    )
    assert SimulatedConfig(max_context=500).context == 500


def test_set_speeds_win_and_real_ones_are_scaled():
    config = SimulatedConfig(shape="deepseek-v3", time_scale=0.1, step=0.02)
    assert config.speed.step == 0.02
    assert config.real_speed.step == pytest.approx(0.002)
    assert config.speed.prefill_token == speed_of("deepseek-v3", 16).prefill_token


@given(tokens, st.integers(0, 2**63), st.integers(0, 200))
@settings(max_examples=60)
def test_what_is_said_is_text_that_reads_back_as_it_was_said(prompt, seed, skipped):
    script = Script(TOKENIZER, prompt, seed, 0)
    answer = [script.token(len(prompt) + at) for at in range(skipped, skipped + 30)]
    stream = TOKENIZER.detokenizer()
    text = "".join(map(stream.feed, answer)) + stream.finish()
    assert TOKENIZER.encode(text) == answer
    again = Script(TOKENIZER, list(prompt), seed, 0)
    assert [again.token(len(prompt) + at) for at in range(skipped, skipped + 30)] == answer


def test_another_prompt_or_seed_says_something_else():
    answer = {
        tuple(Script(TOKENIZER, prompt, seed, 0).token(3 + at) for at in range(20))
        for prompt in ([1, 2, 3], [1, 2, 4])
        for seed in (0, 1)
    }
    assert len(answer) == 4


def test_answers_that_end_by_themselves_have_the_mean_length_asked_for():
    def length(number: int) -> int:
        script = Script(TOKENIZER, [number], 0, 50)
        return next(at for at in itertools.count() if script.token(1 + at) == TOKENIZER.end)

    lengths = [length(number) for number in range(400)]
    assert 42 < np.mean(lengths) < 58
    assert min(lengths) >= 1


def test_the_archive_is_what_routers_read():
    with zipfile.ZipFile(io.BytesIO(TOKENIZER.archive)) as files:
        reported = json.loads(files.read("tokenizer_config.json"))
        assert reported["eos_token"] == END
        assert "assistant:" in reported["chat_template"]
        assert len(json.loads(files.read("tokenizer.json"))["model"]["vocab"]) == TOKENIZER.end
    assert WordTokenizer().archive == TOKENIZER.archive
    assert [
        TOKENIZER.piece(token)
        for token in (TOKENIZER.words[0], TOKENIZER.full_stop, TOKENIZER.end, VOCABULARY - 1)
    ] == [" the", ".", "", ""]
