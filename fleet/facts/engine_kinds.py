"""Kinds of engines: what Roost knows of each, can do with each, and does where it cannot. Pure.

The single source of docs/engines.md, of the abilities in `roost status`, and of what the engine contract
tests expect of each engine. The table says what a kind can have; an engine's join states what it has.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from fleet.facts.engines import EngineJoined

EngineKind = Literal["embedded", "simulated", "vllm", "sglang", "dynamo", "openai"]
Support = Literal["yes", "depends", "no"]
"""depends: on how the engine is set up; the note says on what"""


class Ability(NamedTuple):
    """Something that Roost knows of an engine, or can do with it."""

    label: str
    """for `roost status`"""
    meaning: str
    without: str
    """what Roost does with an engine that lacks it"""
    stated: Callable[[EngineJoined], bool | None]
    """whether the join states it; None: it is of no concern, as the choice of a rank with one rank"""


class Entry(NamedTuple):
    """Cell of the table."""

    support: Support
    note: str = ""


class KindRecord(NamedTuple):
    """Column of the table."""

    title: str
    command: str
    """that adds an engine of this kind"""
    seen: str
    """what this was run with"""
    abilities: Mapping[str, Entry]
    untested: bool = False
    """it was never run with the real engine; `roost status` says so"""


def _has_choice_of_rank(joined: EngineJoined) -> bool | None:
    return None if len(joined.urls) == 1 else bool(joined.rank_header) or len(set(joined.urls)) > 1


def _keeps_salts_apart(joined: EngineJoined) -> bool:
    return joined.capabilities.isolates_tenants


ABILITIES: Mapping[str, Ability] = {
    "kv": Ability(
        "exact KV",
        "which blocks of KV each rank caches, by KV events",
        "cached prefixes are estimated from the requests that were sent there",
        lambda joined: joined.capabilities.kv_events,
    ),
    "load": Ability(
        "load",
        "running and waiting requests, and outstanding work, by rank",
        "load is what this fleet's routers have sent there and not seen finished",
        lambda joined: joined.capabilities.load,
    ),
    "experts": Ability(
        "experts",
        "which experts its requests activate",
        "decisions have no expert terms for it, and nothing is learnt from it",
        lambda joined: joined.capabilities.experts,
    ),
    "rank": Ability(
        "choice of rank",
        "send a request to a chosen data-parallel rank",
        "the engine is one target, and its own balancer chooses the rank",
        _has_choice_of_rank,
    ),
    "continuation": Ability(
        "continuation",
        "continue a broken stream elsewhere, from the ids of prompt and answer",
        "a stream that breaks after its first token ends with an error; before it, another engine answers",
        lambda joined: joined.capabilities.token_ids or joined.capabilities.returns_ids,
    ),
    "fields": Ability(
        "more fields",
        "pass request fields that Roost does not read, such as grammars and penalties",
        "such a request goes to another engine, or is refused with the name of the field",
        lambda joined: joined.capabilities.passes_fields or not joined.capabilities.token_ids,
    ),
    "tenants": Ability(
        "tenants apart",
        "keep the KV of tenants apart (`cache_salt`)",
        "tenants share its KV cache, and `roost status` says so",
        _keeps_salts_apart,
    ),
    "migration": Ability(
        "migration",
        "change the placement of its experts while it serves",
        "plans are made only as a file for its next start, from its recorded load",
        lambda joined: joined.placement is not None,
    ),
    "shares": Ability(
        "shares",
        "choose the shares in which replicas serve an expert",
        "plans count with the engine's own rule, usually even shares",
        lambda joined: joined.placement is not None and not joined.rearranges,
    ),
    "layout": Ability(
        "layouts",
        "change between expert and tensor parallelism while it serves",
        "it keeps the layout that it was started with",
        lambda joined: not joined.unshardable or not joined.tp_refusal,
    ),
}

_YES, _NO = Entry("yes"), Entry("no")
KINDS: Mapping[EngineKind, KindRecord] = {
    "embedded": KindRecord(
        "embedded",
        "`roost worker --model FOLDER`",
        "real: each test run computes with it",
        {
            "kv": _YES,
            "load": _YES,
            "experts": _YES,
            "rank": _YES,
            "continuation": _YES,
            "fields": _NO,
            "tenants": _YES,
            "migration": _YES,
            "shares": _YES,
            "layout": Entry("depends", "on one machine, where experts and heads divide by the ranks"),
        },
    ),
    "simulated": KindRecord(
        "simulated",
        "`roost worker --engine simulated`",
        "a model of time, without weights",
        {
            "kv": _YES,
            "load": _YES,
            "experts": _YES,
            "rank": _YES,
            "continuation": _YES,
            "fields": _NO,
            "tenants": _YES,
            "migration": _YES,
            "shares": _YES,
            "layout": Entry("depends", "layers can be sharded where its shape divides; its attention stays"),
        },
    ),
    "vllm": KindRecord(
        "vLLM",
        "`roost worker --engine vllm`",
        "vLLM 0.32 on processors, two ranks; not on GPUs",
        {
            "kv": Entry("depends", "on `--kv-events-config`, and on a tokenizer that the agent can read"),
            "load": _YES,
            "experts": Entry("depends", "on the plugin in its workers"),
            "rank": _YES,
            "continuation": Entry("yes", "one choice of plain text"),
            "fields": _YES,
            "tenants": _YES,
            "migration": Entry("depends", "on the plugin; vLLM's own EPLB moves the weights"),
            "shares": Entry("no", "vLLM takes copies by the row of the token in the step"),
            "layout": _NO,
        },
    ),
    "sglang": KindRecord(
        "SGLang",
        "`roost worker --engine sglang`",
        "never run with SGLang: written from the source of 0.5.23, tested with messages made from it",
        {
            "kv": Entry("depends", "on `--kv-events-config`, and on pages of 16 tokens or more"),
            "load": _YES,
            "experts": Entry(
                "depends", "on `--enable-return-routed-experts`, or on files of its recorder on this host"
            ),
            "rank": _YES,
            "continuation": Entry("yes", "greedy answers are exact; random numbers begin anew"),
            "fields": Entry("yes", "those of sampling, with grammars; for tools, `--engine openai`"),
            "tenants": _YES,
            "migration": Entry(
                "no", "by a file for its next start; a launcher that stages maps live was never run"
            ),
            "shares": _NO,
            "layout": _NO,
        },
        untested=True,
    ),
    "dynamo": KindRecord(
        "Dynamo workers",
        "`roost router --dynamo NAMESPACE`",
        "Dynamo 1.6.1 and its mocker on processors",
        {
            "kv": Entry("depends", "on workers that publish KV events"),
            "load": Entry("depends", "on workers that publish `kv_metrics`: blocks, but no queue"),
            "experts": Entry(
                "depends",
                "on workers that return `routed_experts`, asked for on a share; those of a fleet report them",
            ),
            "rank": _YES,
            "continuation": Entry("depends", "on a frontend with `--migration-limit 0`"),
            "fields": Entry("yes", "the preprocessed request is passed unchanged"),
            "tenants": Entry("depends", "on the worker's engine"),
            "migration": Entry("no", "a vLLM worker with the plugin is a vLLM to its agent"),
            "shares": _NO,
            "layout": _NO,
        },
    ),
    "openai": KindRecord(
        "OpenAI-compatible",
        "`roost worker --engine openai`, or `[backends.NAME]`",
        "vLLM 0.32 and servers of the tests",
        {
            "kv": _NO,
            "load": _NO,
            "experts": Entry("no", "but answers that name them are learnt from, if its shape is stated"),
            "rank": _NO,
            "continuation": Entry("depends", "on servers that return token ids, as vLLM does"),
            "fields": Entry("yes", "the body passes unchanged"),
            "tenants": Entry("depends", "on the server; `isolates_tenants` says so"),
            "migration": _NO,
            "shares": _NO,
            "layout": _NO,
        },
    ),
}


def stated_abilities(joined: EngineJoined) -> dict[str, bool | None]:
    """Return what an engine states in its join, by name of the ability; None: it is of no concern."""
    return {name: ability.stated(joined) for name, ability in ABILITIES.items()}


def contradictions(joined: EngineJoined) -> dict[str, str]:
    """Return the abilities in which an engine's join differs from the table: name and both statements.

    Empty for a kind that this version does not know.
    """
    record = KINDS.get(joined.engine_kind)  # type: ignore[call-overload]
    if record is None:
        return {}
    found = {}
    for name, stated in stated_abilities(joined).items():
        support = record.abilities[name].support
        if stated is not None and support != "depends" and stated != (support == "yes"):
            found[name] = f"the table says {support}, the engine {'yes' if stated else 'no'}"
    return found
