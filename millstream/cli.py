"""The `millstream` command. Each verb is a thin shell here; what it does is in a module of its own, imported late."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from billing.errors import LedgerAway
from millstream import arguments
from millstream.errors import FAILED, StackError
from millstream.paths import cache_dir
from millstream.state import DEFAULT_STATE
from wire.errors import BusError, MillstreamError

T = TypeVar("T")
STATE_VARIABLE = "MILLSTREAM_STATE_DIR"
_INTERRUPTED = 130
_PORT = click.IntRange(0, 65535)

_state = click.option(
    "--state",
    "state_dir",
    type=arguments.NamedPath(),
    default=Path(DEFAULT_STATE),
    envvar=STATE_VARIABLE,
    show_default=True,
    show_envvar=True,
    help="Directory of the stack's state.",
)
_json = click.option("--json", "as_json", is_flag=True, help="For programs: JSON instead of text.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="millstream", message="%(version)s")
def cli() -> None:
    """Serve a large language model through a durable log, on this machine.

    Start with `millstream up`, then `millstream chat "Hello"`.
    """


@cli.command(short_help="Start everything.")
@click.option("--detach", "-d", is_flag=True, help="Return when it is ready; `millstream down` stops it.")
@_state
@click.option("--port", type=_PORT, default=8080, show_default=True, help="Port of the API; 0 = any free one.")
@click.option("--kafka-port", type=_PORT, default=9092, show_default=True, help="Port of Kafka.")
@click.option("--clickhouse-port", type=_PORT, default=8123, show_default=True, help="Port of ClickHouse.")
@click.option(
    "--engine",
    "engine_kind",
    type=click.Choice(["torch", "simulated"]),
    default="torch",
    show_default=True,
    help="A real model, or one that only takes time, as a real one would.",
)
@click.option("--model", help="One that `millstream model add` added. [default: SmolLM2-135M-Instruct]")
@click.option("--workers", type=click.IntRange(1, 4), default=1, show_default=True, help="Engines, one process each.")
@click.option("--threads", type=click.IntRange(1), help="Of each engine. [default: the cores, divided]")
@click.option("--background", is_flag=True, hidden=True)
def up(detach: bool, background: bool, **options: Any) -> None:
    """Start Kafka, ClickHouse, the API, a worker and the aggregators; stop them on Ctrl-C.

    The first start fetches Kafka and the model. What a start leaves in the state directory, the next one finds.
    """
    from millstream.wish import Wish

    if options["model"] is not None and options["engine_kind"] != "torch":
        raise click.UsageError("--model needs the engine of a real model; leave --engine out")
    faulthandler.enable()  # a supervisor that crashes must say where
    wish = Wish(environ=dict(os.environ), **options)
    if detach:
        from millstream import detached

        _exit(detached.start(wish, _say, click.echo))
    from millstream import up

    _run(up.run(wish, _say, None if background else click.echo))


@cli.command()
@_state
@click.option("--now", is_flag=True, help="Don't wait for running requests; a restart takes them up again.")
def down(state_dir: Path, now: bool) -> None:
    """Stop the stack and wait until it is gone."""
    from millstream import detached

    click.echo(detached.stop(state_dir, now=now))


@cli.command()
@_state
@_json
def status(state_dir: Path, as_json: bool) -> None:
    """Show processes, engines, queues and backlogs. Exits with 1 when something isn't healthy."""
    from millstream import runfile, status, status_text

    report = _run(status.look(runfile.running(state_dir)))
    click.echo(status.as_json(report) if as_json else status_text.as_text(report))
    _exit(0 if report.healthy else FAILED)


@cli.command()
@click.argument("text")
@_state
@click.option("--model", help="[default: the one the stack serves]")
@click.option("--system", help="A system message to go first.")
@click.option("--max-tokens", type=arguments.COUNT, help="At most so many tokens of answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), callback=arguments.number)
@click.option("--seed", type=click.IntRange(-(2**63), 2**64 - 1), help="The same seed gives the same answer.")
@click.option("--key", callback=arguments.key, help="[default: the development key]")
@click.option("--usage", is_flag=True, help="Show the tokens used, on stderr.")
def chat(text: str, state_dir: Path, **options: Any) -> None:
    """Ask the model; the answer streams to stdout. TEXT `-` reads the question from stdin."""
    from millstream import chat

    question = arguments.stdin_or(text)
    chat.ask(state_dir, chat.Question(text=question, **options), sys.stdout, sys.stderr)


@cli.command(short_help="Show what a tenant owes for a month.")
@_state
@click.option("--tenant", default="dev", show_default=True)
@click.option("--month", callback=arguments.month, metavar="YYYY-MM", help="In UTC. [default: this month]")
@_json
def bill(state_dir: Path, tenant: str, month: str | None, as_json: bool) -> None:
    """Show what a tenant owes for a month, to the nano-dollar."""
    from millstream import ledger

    click.echo(ledger.bill(state_dir, tenant, month, as_json=as_json))


@cli.command()
@click.argument("query")
@_state
@click.option("--format", "fmt", default="PrettyCompact", show_default=True, help="Any output format of ClickHouse.")
@click.option("--write", is_flag=True, help="Allow statements that change something.")
def sql(query: str, state_dir: Path, fmt: str, write: bool) -> None:
    """Ask the ledger's ClickHouse. QUERY `-` reads the query from stdin."""
    from millstream import ledger

    ledger.sql(state_dir, arguments.stdin_or(query), fmt, write=write, out=sys.stdout.buffer)


@cli.command(short_help="Compare the journals with the ledger.")
@_state
@_json
def verify(state_dir: Path, as_json: bool) -> None:
    """Compare the journals' tokens with the ledger's, request by request. Exits with 1 where they differ."""
    from millstream import ledger

    report = _run(ledger.verify(state_dir))
    click.echo(ledger.verdict_json(report) if as_json else ledger.verdict_text(report))
    _exit(0 if report.content else FAILED)


@cli.command(short_help="Show why requests went where they went.")
@click.argument("request_id", required=False)
@_state
@click.option("--last", "last_s", callback=arguments.duration_s, metavar="TIME", help="30s, 5m or 1h. [default: 5m]")
@_json
def choices(request_id: str | None, state_dir: Path, last_s: int | None, as_json: bool) -> None:
    """Make the routing choices of the last minutes again, with all that the log knew, and compare.

    With a REQUEST_ID (an answer's header x-request-id), show what there was to choose from for that one. The log keeps
    an hour of this.
    """
    from millstream import choices, choices_text

    if request_id is not None:
        if last_s is not None:
            raise click.UsageError("--last needs no REQUEST_ID, and a REQUEST_ID no --last; leave one out")
        decisions = _run(choices.about(state_dir, request_id, _say))
        click.echo((choices_text.decisions_json if as_json else choices_text.decisions_text)(decisions))
    else:
        last_s = last_s or choices.LAST_S
        found = _run(choices.lately(state_dir, last_s, _say))
        click.echo(choices_text.summary_json(found) if as_json else choices_text.summary_text(found, last_s))


@cli.group()
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command("create")
@_state
@click.option("--tenant", default="dev", show_default=True, callback=arguments.label, help="Who pays.")
@click.option("--project", default="default", show_default=True, callback=arguments.label)
@click.option("--name", default="", callback=arguments.label, help="To tell keys apart.")
@click.option("--requests-per-minute", type=arguments.COUNT)
@click.option("--tokens-per-minute", type=arguments.COUNT)
@click.option("--concurrent", type=arguments.COUNT, help="Requests at once.")
@click.option("--model", "models", multiple=True, help="Only this model; may be given several times.")
def create_key(state_dir: Path, **options: Any) -> None:
    """Make a key and print it: it is stored nowhere, and can't be shown again."""
    from millstream import keyring

    click.echo(_run(keyring.create(state_dir, **options)))


@keys.command("list")
@_state
@_json
def list_keys(state_dir: Path, as_json: bool) -> None:
    """Show every key's id, owner and limits, never the key."""
    from millstream import keyring

    found = _run(keyring.every(state_dir))
    click.echo(keyring.as_json(found) if as_json else keyring.as_text(found))


@keys.command("revoke")
@click.argument("key_id")
@_state
def revoke_key(key_id: str, state_dir: Path) -> None:
    """Make a key void. KEY_ID is in `millstream keys list`; the key itself will do."""
    from millstream import keyring

    click.echo(_run(keyring.revoke(state_dir, key_id)))


@cli.group()
def model() -> None:
    """Add models of your own, list and remove them. `millstream up --model NAME` serves one."""


@model.command("add")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="What clients call it. [default: the file's or directory's name]")
def add_model(path: Path, name: str | None) -> None:
    """Convert and check a model, once. PATH is a GGUF file, or a directory as Hugging Face has it."""
    from millstream import added

    made = added.add(cache_dir(), path, name, _say)
    click.echo(f"added {made.name}; serve it with `millstream up --model {made.name}`")


@model.command("list")
@_json
def list_models(as_json: bool) -> None:
    """Show the models that were added."""
    from millstream import added

    found = added.every(cache_dir())
    click.echo(added.as_json(found) if as_json else added.as_text(found))


@model.command("remove")
@click.argument("name")
def remove_model(name: str) -> None:
    """Delete a model that was added. What it was made from stays where it is."""
    from millstream import added

    added.remove(cache_dir(), name)
    click.echo(f"removed {name}")


@cli.group()
def bench() -> None:
    """Measure on this machine. Starts stacks of its own; nothing else should run."""


@bench.command("pipeline")
@click.option("--requests", "count", type=click.IntRange(20), default=400, show_default=True, help="Pairs to measure.")
@click.option("--output", type=arguments.NamedPath(dir_okay=False), help="Write the figures here, as JSON.")
@_json
def bench_pipeline(count: int, output: Path | None, as_json: bool) -> None:
    """What HTTP and the log add to the time to first token, next to a bare trip through the same broker."""
    from millstream.bench import pipeline
    from millstream.bench.output import insist_file, keep

    if output is not None:
        insist_file(output)
    result = _run(pipeline.measure(count, _say))
    shown = pipeline.as_json(result) if as_json else pipeline.as_text(result)
    keep(shown, output, lambda place: place.write_text(pipeline.as_json(result) + "\n"))


@bench.command("routing")
@click.option("--section", "sections", multiple=True, help="Only this part; may be repeated. [default: all]")
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be repeated. [default: all]")
@click.option("--quick", is_flag=True, help="Only the beginning of each trace.")
@click.option("--peers", is_flag=True, help="Run the real router of ai-dynamo, too, in an environment of its own.")
@click.option("--output", type=arguments.NamedPath(file_okay=False), help="Write figures and charts here.")
@click.option("--list", "only_list", is_flag=True, help="Only say which sections and policies there are.")
@_json
def bench_routing(
    sections: tuple[str, ...],
    policies: tuple[str, ...],
    quick: bool,
    peers: bool,
    output: Path | None,
    only_list: bool,
    as_json: bool,
) -> None:
    """Compare ways to route in virtual time, on traces of real traffic. Starts no stack."""
    from millstream.bench import routing
    from millstream.bench.output import insist_directory, keep

    if only_list:
        there = routing.what_there_is()
        click.echo(routing.listed_as_json(there) if as_json else routing.listed_as_text(there))
        return
    asked = routing.asked(sections, policies)
    if output is not None:
        insist_directory(output, routing.FILES)
    found = routing.measure(asked, quick=quick, peers=peers, say=_say)
    shown = routing.as_json(found) if as_json else routing.as_text(found)
    keep(shown, output, lambda place: routing.write(found, place))


@bench.command("engine")
@click.option(
    "--peers", is_flag=True, help="Run llama.cpp, OpenVINO GenAI, vLLM and transformers, too, in their environments."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="A figure is their median.")
@click.option("--quick", is_flag=True, help="Shorter answers.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--output", type=arguments.NamedPath(file_okay=False), help="Write figures, table and chart here.")
@_json
def bench_engine(peers: bool, rounds: int, quick: bool, threads: int, output: Path | None, as_json: bool) -> None:
    """Decoding and prefill of the engine alone, in each numerics class. Starts no stack."""
    from millstream.bench import engine, engine_setting
    from millstream.bench.output import insist_directory, keep

    if output is not None:
        insist_directory(output, engine.FILES)
    setting = engine_setting.prepare(peers=peers, say=_say)
    figures = engine.measure(setting, threads=threads, rounds=rounds, quick=quick, say=_say)
    shown = engine.as_json(figures) if as_json else engine.as_text(figures)
    keep(shown, output, lambda place: engine.write(figures, place))


@cli.command(short_help="Account for ten thousand requests.")
@click.option("--requests", "count", type=click.IntRange(100), default=10_000, show_default=True)
@click.option("--at-once", type=click.IntRange(1), default=64, show_default=True)
@_json
def soak(count: int, at_once: int, as_json: bool) -> None:
    """Send many requests through a stack of its own and account for every one. Exits with 1 on any difference."""
    from millstream.bench import soak

    result = _run(soak.run(count, at_once, _say))
    click.echo(soak.as_json(result) if as_json else soak.as_text(result))
    _exit(0 if result.good else FAILED)


def main() -> None:
    """Entry point: a mistake is answered with one sentence and an exit code, never with a traceback."""
    warnings = logging.StreamHandler()
    warnings.addFilter(_is_for_people)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[warnings])
    try:
        arguments.insist_utf8(sys.argv[1:])
        cli(standalone_mode=False)
    except click.ClickException as exc:
        exc.show()
        _exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _exit(_INTERRUPTED)
    except (BusError, LedgerAway) as exc:
        click.echo(f"millstream: {exc}; see `millstream status`", err=True)
        _exit(FAILED)
    except MillstreamError as exc:
        click.echo(f"millstream: {exc}", err=True)
        _exit(exc.exit_code if isinstance(exc, StackError) else FAILED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more while flushing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(FAILED)


def _is_for_people(record: logging.LogRecord) -> bool:
    """What the log's clients warn of, the command finds out and says in its own words."""
    return record.name.partition(".")[0] not in ("aiokafka", "wire") or record.levelno >= logging.CRITICAL


def _say(line: str) -> None:
    click.echo(line, err=True)


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _exit(code: int) -> NoReturn:
    sys.exit(code)
