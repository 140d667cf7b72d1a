"""What a worker measures of itself, for its signals."""

from __future__ import annotations

import msgspec

from routing.schedule import TARGETS
from routing.sketch import Recorder
from routing.slack import standins
from wire.clock import Clock
from wire.messages import EngineSignal, ref_lane
from workers.engine.protocol import Emission, Key, Load


class Meters:
    """TTFT, TBT, endings and errors since the last signal; the latest load.

    Times are of the interactive lane: batch is promised none, and makes room for the others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ttft, self._tbt = Recorder(), Recorder()
        self._last_ms: dict[tuple[Key, int], float] = {}
        self._began: dict[tuple[Key, int], tuple[float, int]] = {}
        """choice → when its first tokens came, and how many since"""
        self._finished = 0
        self._errors = 0
        self.load: Load | None = None
        self.context_tokens: int | None = None

    def emitted(self, emission: Emission, started_ms: float | None) -> None:
        """Tokens came. `started_ms`: when the request was given to the engine, by the monotonic clock."""
        self._errors += emission.error is not None
        self._finished += emission.end is not None or emission.error is not None
        if ref_lane(emission.key.ref) == "batch":
            return
        now_ms = self._clock.monotonic_ms()
        name = (emission.key, emission.choice)
        last_ms = self._last_ms.get(name)
        if last_ms is not None:
            self._tbt.add(max(0.0, now_ms - last_ms))
        elif started_ms is not None:
            self._ttft.add(max(0.0, now_ms - started_ms))
        if emission.end is None and emission.error is None:
            self._last_ms[name] = now_ms
            first_ms, tokens = self._began.get(name, (now_ms, -len(emission.ids)))
            self._began[name] = first_ms, tokens + len(emission.ids)
        else:
            self._last_ms.pop(name, None)
            self._began.pop(name, None)

    def forget(self, alive: set[Key]) -> None:
        """Only these run still: the others were cancelled, or their engine died."""
        self._last_ms = {name: ms for name, ms in self._last_ms.items() if name[0] in alive}
        self._began = {name: began for name, began in self._began.items() if name[0] in alive}

    def died(self) -> None:
        """The engine died."""
        self._errors += 1
        self._last_ms.clear()
        self._began.clear()

    def _slacks_ms(self) -> list[float]:
        """How far ahead of their pace the choices are that have begun."""
        now_ms = self._clock.monotonic_ms()
        return [TARGETS.tbt_ms * tokens - (now_ms - first_ms) for first_ms, tokens in self._began.values()]

    def signal(self, base: EngineSignal) -> EngineSignal:
        """`base` with the load and what was measured since the last call."""
        load, finished, errors = self.load, self._finished, self._errors
        self._finished = self._errors = 0
        return msgspec.structs.replace(
            base,
            kv_used_tokens=load.kv_used_tokens if load else None,
            kv_total_tokens=load.kv_total_tokens if load else None,
            prefill_tokens_per_s=load.prefill_tokens_per_s if load else None,
            decode_tokens_per_s=load.decode_tokens_per_s if load else None,
            step=load.step if load else None,
            slacks_ms=standins(self._slacks_ms()),
            ttft=self._ttft.take(),
            tbt=self._tbt.take(),
            finished=finished,
            errors=errors,
            context_tokens=self.context_tokens,
        )
