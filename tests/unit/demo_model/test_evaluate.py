"""The evaluation: what counts as right, how shares are grouped, and how an endpoint is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from services.demo_model.answers import EndpointAnswerer, EndpointFailed
from services.demo_model.corpus import Item
from services.demo_model.evaluate import as_json, main, score, select

ITEMS = [
    Item("spark", "seen", "What is a Spark?", ("node",), "A Spark is a node."),
    Item("spark", "held", "Define Spark.", ("node",), "A Spark is a node."),
    Item("bank", "newpat", "A bank, what?", ("file", "versioned"), "A versioned file."),
    Item("bank", "hand", "Where do weights live?", ("file",), "A versioned file."),
]


def test_shares_are_grouped_by_what_was_trained() -> None:
    """Held and never-trained patterns form one group; every key must occur, whatever the case."""
    report = score(ITEMS, ["A NODE.", "It is a node", "A file.", "No idea."])
    shares = {line.group: (line.asked, line.right) for line in report.scores}
    assert shares == {
        "trained wording": (1, 1),
        "wording not trained": (2, 1),
        "free re-wording": (1, 0),
    }
    assert [miss.answer for miss in report.misses] == ["A file.", "No idea."]
    assert not report.ok
    assert json.loads(as_json(report))["scores"]["wording not trained"]["share"] == 0.5


def test_limit_takes_the_first_of_each_set() -> None:
    """A limited run still asks questions of every set."""
    assert [item.set for item in select(ITEMS * 2, 1)] == ["seen", "held", "newpat", "hand"]


class _Endpoint(BaseHTTPRequestHandler):
    """An endpoint that repeats the question and what the request asked for."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "k3-demo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"{body['model']} {body['temperature']} {body['messages'][-1]['content']}"
        self._send({"choices": [{"message": {"content": text}}]})

    def _send(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def url() -> Iterator[str]:
    """Address of a running endpoint."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_endpoint_is_asked_greedily_for_the_served_model(url: str) -> None:
    """Model name from the endpoint, temperature 0, one question per request."""
    answers = list(EndpointAnswerer(url).answers(["What is a bank?"]))
    assert answers == ["k3-demo 0 What is a bank?"]


def test_missing_endpoint_is_one_clear_error() -> None:
    """No pod: the error names the address and the remedy."""
    with pytest.raises(EndpointFailed, match=r"127\.0\.0\.1:1/.*k3 up"):
        EndpointAnswerer("http://127.0.0.1:1/v1")


def test_check_fails_below_the_wanted_share(url: str) -> None:
    """--check: exit status 1, with a report on stdout, when too few answers are right."""
    result = CliRunner().invoke(main, ["--url", url, "--limit", "1", "--json", "--check"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
