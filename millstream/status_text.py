"""How `millstream status` looks to people."""

from __future__ import annotations

from millstream.status import Report
from millstream.table import table

_UNITS = ("B", "kB", "MB", "GB", "TB")


def as_text(report: Report) -> str:
    """Processes, engines, queues, storage: a table each."""
    word = "healthy" if report.healthy else "NOT healthy"
    head = f"{word}, {report.state} for {duration(report.uptime_s)}: {report.model} at {report.base_url}"
    storage = ", ".join(f"{name} {size(count)}" for name, count in report.storage_bytes.items())
    lag = "unknown" if report.ledger_lag is None else f"{report.ledger_lag} usage records behind"
    queues = "\n".join(f"queue   {queue.records} waiting in {queue.name}" for queue in report.queues)
    parts = [
        head,
        _processes(report),
        _engines(report),
        _routing(report),
        "\n".join(filter(None, (queues, f"ledger  {lag}"))),
    ]
    return "\n\n".join(filter(None, (*parts, f"storage {storage}")))


def _processes(report: Report) -> str:
    rows = [
        (one.name, one.health, one.pid, duration(one.uptime_s), one.restarts, one.why or "") for one in report.processes
    ]
    return table(("process", "health", "pid", "up", "restarts", ""), rows)


def _engines(report: Report) -> str:
    if not report.engines:
        return "no engine has signalled in the last seconds"
    rows = [
        (
            one.name,
            one.state,
            ",".join(map(str, one.shards)) or None,
            one.running,
            one.queued,
            one.slots,
            None if one.weight is None else f"{one.weight:.2f}",
            one.restarts,
            f"{one.age_ms / 1000:.1f} s ago",
        )
        for one in report.engines
    ]
    return table(("engine", "state", "shards", "running", "queued", "slots", "weight", "restarts", "signal"), rows)


def _routing(report: Report) -> str:
    rows = [
        (
            one.model,
            None if one.demand_per_s is None else f"{one.demand_per_s:.1f}/s",
            f"{one.refused_per_s:.1f}/s",
            None if one.regret_ms is None else f"{one.regret_ms:.0f} ms",
            None if one.swing is None else f"{one.swing:.0%}",
            one.why,
        )
        for one in report.routing
    ]
    return table(("routing", "demand", "refused", "regret", "swing", ""), rows) if rows else ""


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6_000:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: int) -> str:
    """Bytes in the unit that leaves up to four digits."""
    amount, power = float(count), 0
    while amount >= 10_000 and power < len(_UNITS) - 1:
        amount, power = amount / 1000, power + 1
    return f"{amount:.0f} {_UNITS[power]}"
