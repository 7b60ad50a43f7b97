"""`k3`: the command line that ties the operator's tools together.

Owns the verbs, their grouping and the exit statuses. A verb's module is imported when the verb
runs: `k3 --help` must not wait for torch. Must not know what a verb does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import click

from services.streams import open_streams
from shared.core.errors import EXIT_FAILED, MeshError

EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives and what it does, in one line."""

    section: str
    module: str
    attribute: str
    summary: str


VERBS: Final[Mapping[str, Verb]] = {
    "up": Verb("Run", "services.pod.cli", "up", "Start a pod on this machine until Ctrl-C."),
    "chat": Verb("Run", "services.chat.cli", "chat", "Talk to a pod."),
    "status": Verb("Look", "services.status.cli", "status", "Show nodes, leases and counters."),
    "bench": Verb("Look", "services.bench.cli", "bench", "Measure, and print a table or JSON."),
    "plan": Verb("Plan", "services.planner.cli", "plan", "Say which expert should live where."),
    "simulate": Verb(
        "Plan", "services.simulator.cli", "simulate", "Predict a pod's speed, and what decides it."
    ),
    "trace": Verb("Plan", "services.routing.cli", "trace", "Record and make up routing data."),
    "census": Verb("Prepare", "services.census.cli", "census", "Say what a checkpoint holds."),
    "synth": Verb("Prepare", "services.synth.cli", "synth", "Write a synthetic checkpoint."),
    "bank": Verb(
        "Prepare", "services.banks.cli", "bank", "Plan, build, verify and list bank files."
    ),
    "keys": Verb("Prepare", "services.keys.cli", "keys", "Make keys and admit nodes."),
    "pod": Verb("Prepare", "services.pod.cli", "pod", "Lay out a pod for systemd."),
}


class LazyGroup(click.Group):
    """A group that imports a verb only when it is needed, and lists verbs by section."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of VERBS."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command = getattr(importlib.import_module(verb.module), verb.attribute)
        assert isinstance(command, click.Command), f"{verb.module}.{verb.attribute}"
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a verb; an error of ours is one line and its own exit status."""
        try:
            return super().invoke(ctx)
        except MeshError as error:
            click.echo(f"k3: error[{error.code}]: {error}", err=True)
            ctx.exit(error.exit_status)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Sections with one line per verb, without importing any."""
        for section in dict.fromkeys(verb.section for verb in VERBS.values()):
            rows = [(name, v.summary) for name, v in VERBS.items() if v.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here: k3 up, then in another terminal: k3 chat",
)
@click.version_option(package_name="k3-pod", prog_name="k3")
def k3() -> None:
    """Serve Kimi-K3 from a pod of machines: every expert stays where it sits."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `k3`. Exit status: 0, 1 failed, 2 usage, 78 configuration, 130 interrupted."""
    open_streams()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; errors are one line on stderr."""
    try:
        result = k3.main(arguments, prog_name="k3", standalone_mode=False)
        sys.stdout.flush()  # at exit a full disk would be a trace, and no failure
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output went away (`k3 status | head -1`); python would complain at exit
        sys.stdout = None
        return EXIT_FAILED
    except OSError as error:
        # what a file of ours can suffer is a MeshError: this is the output, or the host itself
        sys.stdout = None
        click.echo(f"k3: error[os_error]: {error}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
