"""The verb `k3 status`."""

from __future__ import annotations

import click
import msgspec

from services.pod.endpoint import open_client, token_option, url_option
from services.streams import table_console

_ANSWER_S = 10.0
_PIPE_COLUMNS = 160


@click.command(epilog="Example: k3 status --json")
@url_option
@token_option
@click.option("--json", "as_json", is_flag=True, help="Print the pod's own JSON object.")
def status(*, url: str, token: str | None, as_json: bool) -> int:
    """Show nodes, leases and counters of a pod.

    Exit status: 0 when the pod is ready, 1 when it is not or does not answer.
    """

    from services.status.client import fetch_status
    from services.status.table import headline, losses, node_table, parse

    with open_client(url, token, idle_s=_ANSWER_S) as client:
        answer = fetch_status(client)
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
        return 0 if answer.get("ready") is True else 1
    pod = parse(answer, url=url)
    console = table_console(_PIPE_COLUMNS)
    for line in (*headline(pod), ""):
        console.print(line, markup=False)
    console.print(node_table(pod))
    for line in losses(pod):
        console.print(line, markup=False)
    return 0 if pod.ready else 1
