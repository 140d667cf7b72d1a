"""The engine protocol: what the scheduler, the simulated engine and the torch engine agree on. No torch here.

An engine runs sequences and knows nothing of the log. `workers.engine.host` runs one in a process of its own; the
messages between the two processes are the types below, as msgpack.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from wire.messages import ChoiceEnd, Logprob, Ref, Sampling, Scored, StepCost


class Key(msgspec.Struct, frozen=True, array_like=True):
    """Names a sequence in an engine. The epoch tells a request that was claimed again from its earlier life."""

    shard: int
    epoch: int
    ref: Ref


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the text of each choice is bound to."""

    text: str
    """in llguidance's dialect of Lark"""
    calls: bool = False
    """the text may hold tool calls (`wire.calls`): stop strings end text, not calls, and what ends by itself with a
    call ends as `tool_calls`"""
    lazy: bool = False
    """it holds only from `wire.calls.OPENING` on, wherever that is written; before it anything goes"""


class Restored(msgspec.Struct, frozen=True, array_like=True):
    """What a choice had already when its engine died."""

    ids: tuple[int, ...]
    end: ChoiceEnd | None = None
    """set: the choice is complete and is not run again"""


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A request as an engine runs it."""

    key: Key
    prompt: tuple[int, ...]
    """token ids; at least one"""
    max_tokens: int
    """per choice, at least 1; prompt and choice together fit the context"""
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """as `logprobs`, of the prompt's tokens; told once, by the first emission of choice 0"""
    restored: tuple[Restored, ...] = ()
    """by choice; empty for a new request. The run goes on as if it had never stopped (R8)"""
    alone: bool = False
    """an engine died with it: run nothing beside it, so that a second death names the culprit (R4)"""
    batch: bool = False
    """of the batch lane: admitted after every interactive one, and makes room for them"""
    tenant: str = ""
    """whose it is: what was computed of one tenant's prompts serves that tenant alone"""
    links: tuple[tuple[int, int], ...] = ()
    """(link of its prefix chain, tokens of the prompt that hold all the link's text), for `prefixes`"""


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice."""

    key: Key
    choice: int
    first: int
    """position of ids[0]. A restored choice emits nothing for its restored ids"""
    ids: tuple[int, ...]
    """an end-of-sequence token is not among them"""
    text: str
    """text these ids released; on the choice's last emission also what was held back, cut before a stop string"""
    logprobs: tuple[Logprob, ...] | None = None
    end: ChoiceEnd | None = None
    error: str | None = None
    """the request can't go on (it alone); for people, without content of the request"""
    cached_tokens: int | None = None
    """on the first emission of a request: prompt tokens that weren't computed, as the cache had them; None = none, or
    said before"""
    prompt: Scored | None = None
    """with the first tokens of choice 0, where asked for"""


class Prefixes(msgspec.Struct, frozen=True, array_like=True):
    """Links of prefix chains whose whole text came into an engine's prefix cache, or left it."""

    added: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How full an engine is."""

    running: int
    waiting: int
    waiting_tokens: int
    """of prompts, still to be computed"""
    slots: int
    kv_used_tokens: int
    kv_total_tokens: int
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    step: StepCost | None = None


class Engine(Protocol):
    """Runs sequences together, one step at a time."""

    @property
    def fingerprint(self) -> str:
        """The numerics class, shown as OpenAI's `system_fingerprint`: same fingerprint and seed, same tokens (R8)."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Take a sequence on; it starts when a slot is free."""
        ...

    def cancel(self, key: Key) -> None:
        """Forget a sequence; its slot is free before the next step, and nothing of it is emitted any more."""
        ...

    def drop(self, shard: int, epoch: int) -> None:
        """Forget every sequence of an epoch, as `cancel` does."""
        ...

    def admit(self) -> Seq[Key]:
        """Start what there is room for. If anything starts, all requests that now run; else none.

        `step` would do the same: apart from it, so that it can be told who runs before a step that may be the last.
        """
        ...

    def step(self) -> Seq[Emission]:
        """Run one step. Empty when there was nothing to do, or only prefill was done."""
        ...

    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    def load(self) -> Load: ...

    def prefixes(self) -> Prefixes | None:
        """What changed in the prefix cache since the last call; None if it keeps nothing."""
        ...
