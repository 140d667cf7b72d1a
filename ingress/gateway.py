"""What the HTTP endpoints need of the rest: who asks, what there is, whether calls are taken, and how to send one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.datastructures import Headers

from ingress.answer import Answer
from ingress.call import PRIORITIES, Call
from ingress.catalogue import find, targets, version_of, visible
from ingress.credentials import Authenticator
from ingress.endings import shutting_down
from ingress.errors import ApiError, unavailable
from ingress.limits import Limiter, Permit
from ingress.metrics import Metrics
from ingress.relay import Relay, Run
from routing.prefix import prefix_chain
from wire.clock import Clock
from wire.ids import uuid7
from wire.messages import Credential, Model, ReplyTo, Request
from wire.settings import Settings

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


class Models(Protocol):
    """What is needed of `wire.follow.Follower`."""

    @property
    def items(self) -> Mapping[str, Model]: ...

    @property
    def caught_up(self) -> bool: ...


class Gateway:
    """One process's answers to: may this call come in, and where does it go?"""

    def __init__(
        self,
        *,
        settings: Settings,
        authenticator: Authenticator,
        models: Models,
        relay: Relay,
        reply: ReplyTo,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.relay = relay
        self.draining = False
        self.reading = False
        """whether frames can come back: nothing is sent before"""
        self._authenticator = authenticator
        self._models = models
        self._reply = reply
        self._clock = clock
        self._limiter = Limiter()
        self._regions = settings.open_to(reply.region)

    def authenticate(self, headers: Headers) -> Credential:
        """Who asks. ApiError 401 or 503."""
        return self._authenticator.authenticate(headers.get("authorization"))

    def models(self, credential: Credential) -> list[Model]:
        """What this key may use. ApiError 503 while the catalogue isn't known yet."""
        self._check_catalogue()
        return visible(self._models.items.values(), credential)

    def model(self, name: str, credential: Credential) -> Model:
        """The model of a name. ApiError 404, or 503 while the catalogue isn't known yet."""
        self._check_catalogue()
        return find(self._models.items, name, credential)

    def _check_catalogue(self) -> None:
        if not self._models.caught_up:
            raise unavailable("The catalogue isn't loaded yet; try again.")

    def check_open(self) -> None:
        """ApiError 503 while no further call can be taken."""
        if self.draining:
            raise shutting_down()
        if not self.reading:
            raise unavailable("The service is starting; try again.")
        if self.relay.open >= self.settings.max_open_streams:
            raise unavailable("Too many calls are open; try again.", code="overloaded")

    def admit(self, credential: Credential, model: Model) -> Permit:
        """A permit under the key's and the model's limits. ApiError 429."""
        who = {f"key {credential.key_id}": credential.limits, f"model {model.name}": model.limits}
        return self._limiter.admit(who, self._clock.monotonic_ms())

    def forget_idle(self) -> None:
        """Housekeeping, now and then."""
        self._limiter.forget_idle(self._clock.monotonic_ms())

    def fields(self, call: Call, request_id: str) -> dict[str, Any]:
        """What all of an answer's objects share."""
        prefix = "chatcmpl" if call.endpoint == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{request_id}",
            "created": self._clock.now_ms() // 1_000,
            "model": call.model,
        }

    def launch(
        self, call: Call, model: Model, credential: Credential, request_id: str, headers: Headers, answer: Answer
    ) -> list[Run]:
        """Send the call's requests, all or none. ApiError if one can't be sent; the others are given up then."""
        runs: list[Run] = []
        try:
            for index, request in enumerate(self._requests(call, model, credential, request_id, headers)):
                version = next(v for v in model.versions if v.version == request.version)
                candidates = targets(model, version, self._regions)
                runs.append(self.relay.launch(request, candidates, answer, index))
        except ApiError:
            for run in runs:
                run.give_up()
            raise
        return runs

    def _requests(
        self, call: Call, model: Model, credential: Credential, request_id: str, headers: Headers
    ) -> Sequence[Request]:
        now_ms = self._clock.now_ms()
        version = version_of(model, request_id)
        traceparent = headers.get("traceparent", "")
        return [
            Request(
                request_id=request_id if index == 0 else uuid7(now_ms),
                attempt=1,
                tenant=credential.tenant,
                project=credential.project,
                key_id=credential.key_id,
                model=model.name,
                version=version.version,
                tier=call.tier,
                priority=PRIORITIES[call.tier],
                body=body,
                reply=self._reply,
                created_ms=now_ms,
                # Every attempt may wait for as long as the client does; one that is left sooner gets a Cancel.
                accept_by_ms=now_ms + self.settings.accept_timeout_ms,
                deadline_ms=now_ms + self.settings.request_timeout_ms,
                stream=call.stream,
                residency=self._reply.region if self._reply.region in self.settings.residency else None,
                prefix_chain=prefix_chain(credential.tenant, model.name, body.messages, body.prompt),
                traceparent=traceparent if _TRACEPARENT.match(traceparent) else None,
            )
            for index, body in enumerate(call.bodies)
        ]
