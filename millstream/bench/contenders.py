"""Who is compared: published policies, which see everything as it is, and Millstream's own, told by messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from routing.simulator.engine import Rule, first_come
from routing.simulator.fleet import MakeIngress, Seat
from routing.simulator.ingress import Ingress, PeerIngress
from routing.simulator.peers import PEERS
from routing.simulator.peers.oracle import Oracle
from routing.simulator.policy import Policy
from routing.simulator.production import Production
from routing.simulator.slackful import slack_aware

SIGNAL_MS = 500.0
"""As the workers do: `workers.worker.SIGNAL_EVERY_S`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to route, with the engines' scheduling rule it goes with."""

    make: Callable[[], MakeIngress]
    """for one run"""
    rule: Rule = first_come
    signal_ms: float = 0.0
    """where nothing else is said; 0: it sees everything as it is"""


def _peer(policy: Callable[[], Policy]) -> MakeIngress:
    one = policy()
    return lambda seat: _ingress(one, seat)


def _ingress(policy: Policy, seat: Seat) -> Ingress:
    return PeerIngress(policy, seat.engines, seat.indexes)


EARLIER = "earlier design"
OURS, OURS_RULE = "millstream", "millstream + rule"
ALL_TAKEN, ALL_TAKEN_RULE = f"{OURS}, refusing nobody", f"{OURS_RULE}, refusing nobody"
_takes_all = partial(Production, refuses=False)
CONTENDERS: Mapping[str, Contender] = {
    **{name: Contender(make=partial(_peer, policy)) for name, policy in PEERS.items()},
    EARLIER: Contender(make=partial(Production, earlier=True), signal_ms=SIGNAL_MS),
    ALL_TAKEN: Contender(make=_takes_all, signal_ms=SIGNAL_MS),
    ALL_TAKEN_RULE: Contender(make=_takes_all, rule=slack_aware, signal_ms=SIGNAL_MS),
    OURS: Contender(make=Production, signal_ms=SIGNAL_MS),
    OURS_RULE: Contender(make=Production, rule=slack_aware, signal_ms=SIGNAL_MS),
    "oracle": Contender(make=partial(_peer, Oracle)),
    "oracle + rule": Contender(make=partial(_peer, Oracle), rule=slack_aware),
}
"""By name. The rule is `routing.schedule`, the rest of the names say it. Only the earlier design and our own refuse"""
