"""Every message of the log: frozen, slotted, keyword-only. docs/wire.md is the same table in prose.

Bytes become these types once, in `wire.codec`. Lists that recur in every step (spans) are JSON arrays, all else
JSON objects; unknown fields are ignored, a missing field takes its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NewType

import msgspec

from wire.fleet import Fleet

Lane = Literal["requests", "batch"]
Pool = Literal["gpu", "cpu"]
Ref = NewType("Ref", int)
"""Names a Request within its shard: its offset × 2, plus 1 on the batch lane (`request_ref`)."""

FinishReason = Literal[
    "stop",
    "length",
    "tool_calls",
    "content_filter",
    "cancelled",
    "timeout",
    "expired",
    "refused",
    "moved",
    "error",
]
ChoiceEnd = Literal["stop", "length", "tool_calls", "content_filter"]
CancelReason = Literal["client_gone", "gave_up", "moved"]
EngineState = Literal["loading", "warming", "ready", "draining", "failed"]


def request_ref(lane: Lane, offset: int) -> Ref:
    """The ref of the Request at `offset` of the shard's `lane` topic."""
    return Ref(offset * 2 + (lane == "batch"))


def ref_lane(ref: Ref) -> Lane:
    """The lane a ref points into."""
    return "batch" if ref % 2 else "requests"


def ref_offset(ref: Ref) -> int:
    """The offset, on its lane's topic, of the Request that a ref names."""
    return ref // 2


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Root of all messages. On the wire each is tagged with its class's name (`t`) and the format's version (`v`)."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Root of the values inside messages."""


# ---------------------------------------------------------------- requests


class ReplyTo(Value, frozen=True, kw_only=True):
    """Where frames go: a partition of `replies.<region>` and one life of the process that reads it."""

    region: str
    slot: int
    incarnation: str


class Sampling(Value, frozen=True, kw_only=True):
    """How tokens are drawn. `seed` is always set: the ingress draws a missing one (R8)."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off"""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    """token id as a decimal string → added to its logit"""


class Body(Value, frozen=True, kw_only=True):
    """What the model is asked for. Exactly one of `messages` and `prompt` is set, or neither in a stripped copy."""

    sampling: Sampling
    messages: tuple[dict[str, Any], ...] = ()
    """chat messages, normalised: `role`, `content` (a string or null), `tool_calls`, `tool_call_id`, `name`"""
    prompt: str | tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    """per choice; None = what the context leaves"""
    min_tokens: int = 0
    ignore_eos: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = None
    """none, auto, required, or {"type": "function", "function": {"name": …}}; None = auto where there are tools"""
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    """as OpenAI has it: `type` json_object, or json_schema with `json_schema`; None = text"""
    logprobs: int | None = None
    """None = off, 0 = the chosen token's only, k = also the k most likely"""
    prompt_logprobs: int | None = None
    """the same for the prompt's tokens"""


class Request(Message, frozen=True, kw_only=True):
    """One attempt of a request, on `requests.F` or `batch.F`."""

    request_id: str
    """UUIDv7, the same for every attempt"""
    attempt: int
    """1 for the first"""
    tenant: str
    project: str
    key_id: str
    model: str
    version: str
    body: Body
    reply: ReplyTo
    created_ms: int
    accept_by_ms: int
    """read later than this it ends `expired`, unbilled (R1)"""
    deadline_ms: int
    """unfinished at this time it ends `timeout`"""
    tier: str = "default"
    priority: int = 0
    stream: bool = False
    store: bool = False
    background: bool = False
    """runs on without a reader"""
    prefix_chain: tuple[int, ...] = ()
    residency: str | None = None
    traceparent: str | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """Ends an attempt: client_gone → `cancelled`, billed for what was generated; gave_up → `expired`; moved → `moved`.

    The last two are never billed.
    """

    request_id: str
    attempt: int
    reason: CancelReason
    accept_by_ms: int
    """of the Request it cancels: past it, a Request not read yet expires by itself, so the Cancel can be forgotten"""


class Attach(Message, frozen=True, kw_only=True):
    """Asks the owner to send everything of an attempt from position 0 to `reply`, and what follows too (R7)."""

    request_id: str
    attempt: int
    reply: ReplyTo


# ---------------------------------------------------------------- journal


class Claim(Message, frozen=True, kw_only=True):
    """Starts an epoch: its number is this record's offset (R3)."""

    engine: str
    incarnation: str
    nonce: str
    fingerprint: str
    at_ms: int


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token under the model, before temperature; `top` holds the most likely."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), the most likely first"""


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """A prompt and how likely the model found it."""

    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    """of each token but the first, which nothing comes before"""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one choice: ids at positions first, first + 1, …"""

    ref: Ref
    choice: int
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None
    """one an id, or None when not asked for"""
    end: ChoiceEnd | None = None
    """set on the choice's last span, which may hold no ids"""
    prompt: Scored | None = None
    """on the first span of choice 0, where asked for"""


class Begin(Message, frozen=True, kw_only=True):
    """The owner took a Request on. Holds all of it, so that the journal alone is the state (R5)."""

    epoch: int
    ref: Ref
    request: Request
    """without its body's messages and prompt when it was refused or expired"""
    prompt_tokens: int
    cached_tokens: int = 0
    """0 as it is written today: what the cache has of a prompt is known when its turn comes (`Tokens.cached`)"""
    at_ms: int


class Tokens(Message, frozen=True, kw_only=True):
    """All tokens of one engine step."""

    epoch: int
    spans: tuple[Span, ...]
    at_ms: int
    cached: tuple[tuple[Ref, int], ...] = ()
    """(ref, prompt tokens that the engine's cache had) of the requests that this is the first record of, if it had any.
    Fixed by that: a new owner that computes the prompt again counts nothing anew (R2)"""


class Refusal(Value, frozen=True, kw_only=True):
    """Why a request is not taken on, as the client is told."""

    status: int
    """HTTP status to answer with"""
    code: str | None
    message: str
    """for people; nothing of the request's content"""
    param: str | None = None
    retry_after_s: int | None = None
    elsewhere: bool = False
    """another fleet might take it"""


class Finish(Message, frozen=True, kw_only=True):
    """The one ending of an attempt (R4)."""

    epoch: int
    ref: Ref
    reason: FinishReason
    ends: tuple[ChoiceEnd | None, ...]
    """by choice; None where a choice was cut off"""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """over all choices"""
    at_ms: int
    error: str | None = None
    """for people, without content of the request"""
    refusal: Refusal | None = None
    """set when `reason` is refused"""


class Carry(Message, frozen=True, kw_only=True):
    """An unfinished request, or one whose Usage isn't acknowledged, written again whole (R5)."""

    epoch: int
    begin: Begin
    """as it was first written, with its old epoch"""
    begin_offset: int
    """where in the journal it was first written"""
    spans: tuple[Span, ...]
    """all tokens so far, one span a choice"""
    crashes: int
    at_ms: int
    cached_tokens: int | None = None
    """as `spans` have fixed it; None: as in `begin`"""
    first_token_ms: int | None = None
    finish: Finish | None = None
    finish_offset: int | None = None
    """where in the journal `finish` was first written"""


class Crash(Message, frozen=True, kw_only=True):
    """The engine died while it ran these requests; the third death ends a request (R4)."""

    epoch: int
    refs: tuple[Ref, ...]
    at_ms: int


# ---------------------------------------------------------------- replies


class Accepted(Value, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Begin is in the journal: the request will have an ending."""

    request_id: str
    attempt: int
    epoch: int
    fleet: Fleet
    shard: int
    ref: Ref
    prompt_tokens: int
    cached_tokens: int
    fingerprint: str


class Refused(Value, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The owner won't run it. `elsewhere`: another fleet might."""

    request_id: str
    attempt: int
    epoch: int
    status: int
    """HTTP status to answer with"""
    code: str | None
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    elsewhere: bool = False


class TokenLogprob(Value, frozen=True, kw_only=True):
    """A token's logprob as OpenAI shows it."""

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Delta(Value, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Tokens `first …` of a choice and the text they released; a stop's prefix or half a character is held back."""

    request_id: str
    attempt: int
    epoch: int
    choice: int
    first: int
    """0 in the first Delta of an epoch and in an answer to Attach: then `text` is all text so far"""
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    end: ChoiceEnd | None = None
    prompt: tuple[TokenLogprob, ...] | None = None
    """with the first tokens of choice 0, where asked for: the prompt's; the logprob of the very first means nothing"""


class End(Value, frozen=True, kw_only=True, tag_field="t", tag=True):
    """The Finish, for the reader. `tokens` by choice shows whether all Deltas came."""

    request_id: str
    attempt: int
    epoch: int
    reason: FinishReason
    ends: tuple[ChoiceEnd | None, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str | None = None


Entry = Accepted | Refused | Delta | End


class Frames(Message, frozen=True, kw_only=True):
    """What one step has for one reader, on `replies.<region>`, partition = slot."""

    slot: int
    incarnation: str
    entries: tuple[Entry, ...]


# ---------------------------------------------------------------- usage


class Usage(Value, frozen=True, kw_only=True):
    """What an attempt used: a pure fold of its journal, the same bytes whenever it is sent again (R2)."""

    request_id: str
    attempt: int
    tenant: str
    project: str
    key_id: str
    model: str
    version: str
    tier: str
    lane: Lane
    fleet: Fleet
    shard: int
    ref: Ref
    begin_offset: int
    finish_offset: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    created_ms: int
    begun_ms: int
    first_token_ms: int | None
    finished_ms: int


class Usages(Message, frozen=True, kw_only=True):
    """Usage of one tenant, several at once: one Kafka record costs as much as ten."""

    entries: tuple[Usage, ...]


# ---------------------------------------------------------------- signals, weights, placement


class Sketch(Value, frozen=True, kw_only=True):
    """A histogram with borders that grow by a constant factor, so that sketches add up: `routing.sketch` reads it."""

    counts: dict[str, int] = {}
    """bucket index as a decimal string → observations; bucket i holds values in (γ^(i−1), γ^i] ms"""
    total: int = 0
    sum_ms: float = 0.0


class StepCost(Value, frozen=True, kw_only=True):
    """How long an engine's steps take, in ms, as it has measured: with x prompt tokens, at most `piece_tokens`,
    decode_ms + prefill_fixed_ms + prefill_token_ms · x + prefill_square_ms · x²."""

    prefill_fixed_ms: float
    prefill_token_ms: float
    prefill_square_ms: float = 0.0
    piece_tokens: int = 8_192
    decode_ms: float
    """of a step without a prompt, as full as the engine is now"""
    decode_token_ms: float = 0.0
    """what one more token in its cache adds to that"""


class EngineSignal(Message, frozen=True, kw_only=True):
    """One engine's state, a few times a second. None is unknown, which is not zero."""

    engine: str
    incarnation: str
    fleet: Fleet
    shards: tuple[int, ...]
    """owned; the primary first"""
    state: EngineState
    model: str
    fingerprint: str | None
    at_ms: int
    queued_requests: int
    queued_tokens: int
    """of prompts, that must still be computed"""
    running: int
    slots: int
    """sequences it runs at once"""
    kv_used_tokens: int | None = None
    kv_total_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    step: StepCost | None = None
    slacks_ms: tuple[int, ...] | None = None
    """how far ahead of their pace its choices are, ascending; each stands for an equal share of them"""
    ttft: Sketch = Sketch()
    """since the last signal, of the interactive lane"""
    tbt: Sketch = Sketch()
    finished: int = 0
    """since the last signal"""
    errors: int = 0
    """endings in error and engine deaths since the last signal"""
    restarts: int = 0
    """of the engine by its worker, in this incarnation"""
    context_tokens: int | None = None
    features: tuple[str, ...] | None = None
    """what it can do beyond plain text; None: all there is"""
    prefixes_added: tuple[int, ...] = ()
    prefixes_evicted: tuple[int, ...] = ()
    prefixes_full: bool = False


class DemandSignal(Message, frozen=True, kw_only=True):
    """What one ingress sees for one model, each second; also the proof that this incarnation lives (R4)."""

    ingress: str
    slot: int
    incarnation: str
    region: str
    model: str
    """"" in the one that only proves life"""
    at_ms: int
    requests_per_s: float | None = None
    """all that came, refused ones too"""
    refused_per_s: float = 0.0
    """of these: answered with 503 at once, so sent to no engine"""
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    priorities: dict[str, float] = {}
    """requests a second by priority, as a decimal string; refused ones too"""
    accept: Sketch = Sketch()
    """produce → Accepted"""
    failures: int = 0
    open_streams: int = 0


Signal = EngineSignal | DemandSignal


class Dispatch(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt an ingress just sent, and why there: enough to make the choice again (`routing.replay`).

    The candidates aren't in it: they are what signals and snapshot name of the fleet's model, version and numerics.
    """

    model: str = ""
    fleet: Fleet
    shard: int
    prompt_tokens_estimate: int
    prefix_chain: tuple[int, ...] = ()
    request_id: str = ""
    """"" of an ingress that doesn't say why"""
    attempt: int = 1
    at_ms: int | None = None
    """when it was chosen"""
    reason: str = ""
    loss: float = 0.0
    """expected there, in requests"""
    cached_tokens: int = 0
    """of the prompt, thought to be cached there"""
    snapshot_version: int | None = None
    """of the Snapshot that was followed; None: there was none"""
    waited_ms: int = 0
    """since the request came in"""
    residency: str | None = None
    features: tuple[str, ...] = ()
    """that the engine had to have, in order"""
    tried: tuple[tuple[Fleet, int], ...] = ()
    """shards of the attempts before it, in order: none of them was to be chosen"""


class Dispatches(Message, frozen=True, kw_only=True):
    """What an ingress sent over a few milliseconds, for its siblings of the region."""

    ingress: str
    incarnation: str
    at_ms: int
    sent: tuple[Dispatch, ...]


class Route(Value, frozen=True, kw_only=True):
    """A share of a model's traffic."""

    fleet: Fleet
    shard: int
    engine: str
    weight: float
    """finite, non-negative; all of a snapshot's sum to 1"""
    queued_requests: int | None = None
    free_slots: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    capacity: float | None = None
    """requests a second, as they are now"""
    penalty: float = 0.0


class Snapshot(Message, frozen=True, kw_only=True):
    """Routing weights of one model for one ingress region. An empty `routes` says that no engine is ready."""

    model: str
    region: str
    version: int
    """offset on `signals` that it saw; higher is newer"""
    created_ms: int
    routes: tuple[Route, ...]
    fallback: float = 0.0
    """fraction that goes to the CPU pool"""
    shed: dict[str, float] = {}
    """priority as a decimal string → fraction to refuse"""
    demand: float | None = None
    """requests a second that come in the region, refused ones too"""
    refused_per_s: float = 0.0
    """of these: that its ingresses refuse"""
    shadow_prices: dict[str, float] = {}
    ttft: Sketch = Sketch()
    tbt: Sketch = Sketch()
    queued_requests: int = 0
    error_rate: float = 0.0
    why: str = ""
    regret_ms: float | None = None
    """by how much longer a request took lately than if the model's engines had shared the load best; None: too few"""
    swing: float | None = None
    """how the engines' shares varied over two minutes, next to an even share; None: not yet known"""


class Placement(Message, frozen=True, kw_only=True):
    """Which model an engine shall run."""

    engine: str
    model: str
    version: str
    pool: Pool
    wanted: Literal["running", "drained"]


# ---------------------------------------------------------------- leases, intents, batches


class Ask(Message, frozen=True, kw_only=True):
    """An ingress asks for a piece of a tenant's budget."""

    tenant: str
    ingress: str
    nanodollars: int
    at_ms: int


class Grant(Message, frozen=True, kw_only=True):
    """Control lends a piece of a tenant's budget until `expires_ms`."""

    tenant: str
    ingress: str
    nanodollars: int
    expires_ms: int


class Intent(Message, frozen=True, kw_only=True):
    """An Idempotency-Key is in use for this body."""

    tenant: str
    key: str
    request_id: str
    body_digest: str
    at_ms: int


class Located(Message, frozen=True, kw_only=True):
    """Where the request of an Idempotency-Key went."""

    tenant: str
    key: str
    request_id: str
    fleet: Fleet
    shard: int
    ref: Ref


class BatchState(Message, frozen=True, kw_only=True):
    """A batch job's state and progress."""

    batch_id: str
    tenant: str
    status: str
    total: int
    completed: int
    failed: int
    at_ms: int


# ---------------------------------------------------------------- credentials, catalogue, dead


class Limits(Value, frozen=True, kw_only=True):
    """What a key may do; None = unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    models: tuple[str, ...] = ()
    """empty = all"""


class Credential(Message, frozen=True, kw_only=True):
    """A key as the log knows it: never the key, only its HMAC."""

    key_id: str
    hmac: str
    """hex HMAC-SHA256 of the whole key under the installation's secret"""
    tenant: Annotated[str, msgspec.Meta(min_length=1)]
    """who pays: what nobody pays for is not served"""
    project: str
    name: str
    created_ms: int
    revoked_ms: int | None = None
    limits: Limits = Limits()


class ModelVersion(Value, frozen=True, kw_only=True):
    """A version of a model and where it may run."""

    version: str
    numerics: str
    pools: tuple[Pool, ...]
    regions: tuple[str, ...]
    share: float = 1.0
    """of the traffic; the shares of a model's versions sum to 1"""
    shards: int = 1


class Model(Message, frozen=True, kw_only=True):
    """A model of the catalogue."""

    name: str
    """public; may hold `/`"""
    slug: str
    """[a-z0-9-]+, for topic names"""
    owned_by: str
    created_ms: int
    context_tokens: int
    max_n: int = 8
    versions: tuple[ModelVersion, ...] = ()
    limits: Limits = Limits()


class Dead(Message, frozen=True, kw_only=True):
    """A record that could not be decoded. No content of it, only where it stands and why."""

    topic: str
    partition: int
    offset: int
    why: str
    reader: str
    at_ms: int


Journal = Claim | Begin | Tokens | Finish | Carry | Crash
Inbound = Request | Cancel | Attach
