"""A stand-in for a W&B server: answers the GraphQL queries of the client from the runs of a test."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef" * 2 + "01234567"
"""The one key that is let in."""


@dataclass
class ServedRun:
    """A run on the server."""

    id: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Its history; each row has its `_step`."""
    exported: int = 0
    """How many of its first rows the server also offers as a Parquet file."""
    summary: dict[str, Any] = field(default_factory=dict)
    state: str = "finished"
    created: str = "2026-01-01T00:00:00Z"

    def node(self) -> dict[str, Any]:
        """The run as the API tells it; what the query did not ask for does no harm."""
        last = max((row["_step"] for row in self.rows), default=-1)
        config = {name: {"value": value, "desc": None} for name, value in self.config.items()}
        config["_wandb"] = {"value": {"cli_version": "0.31.0", "t": {}}, "desc": None}
        return {
            "projectId": "7",
            "id": base64.b64encode(f"Run:v1:{self.id}".encode()).decode(),
            "name": self.id,
            "displayName": f"name-of-{self.id}",
            "state": self.state,
            "config": json.dumps(config),
            "summaryMetrics": json.dumps(self.summary),
            "systemMetrics": "{}",
            "createdAt": self.created,
            "heartbeatAt": self.created,
            "historyLineCount": len(self.rows),
            "historyKeys": {"lastStep": last, "sets": [], "keys": {}} if self.rows else None,
            "tags": [],
            "sweepName": None,
            "group": None,
            "jobType": None,
            "commit": None,
            "readOnly": False,
            "description": None,
            "notes": None,
            "user": {"name": "somebody", "username": "somebody"},
        }


class StandIn:
    """The server, on a port of its own, for as long as the `with` lasts."""

    def __init__(self, runs: list[ServedRun], entity: str = "team", project: str = "proj") -> None:
        self.runs = runs
        self.place = {"entity": entity, "project": project}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """The name and the variables of each query."""
        self.strange: list[str] = []
        """Queries and addresses that this server does not know."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "query Viewer": self._viewer,
            "query GetDefaultEntity": self._viewer,
            "query Runs(": self._list,
            "query Run(": self._run,
            "query RunHistoryKeys(": self._run,
            "query RunParquetHistory ": lambda asked: self._of_run(asked, asked["runName"], self._parquet),
            "query HistoryPage ": lambda asked: self._of_run(asked, asked["run"], lambda run: self._page(run, asked)),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def count(self, name: str) -> int:
        return sum(asked.startswith(name) for asked, _ in self.asked)

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # -- what it answers

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        for start, answer in self._answers.items():
            if start in query:
                self.asked.append((start.removeprefix("query ").strip(" ("), variables))
                return {"data": answer(variables)}
        self.strange.append(query)
        return {"errors": [{"message": f"this server does not know {query.split('(')[0].strip()}"}], "data": None}

    def _viewer(self, asked: dict[str, Any]) -> Any:
        return {
            "viewer": {
                "id": "VXNlcjox",
                "entity": self.place["entity"],
                "username": "somebody",
                "email": "somebody@example.org",
                "flags": "{}",
                "teams": {"edges": [{"node": {"name": self.place["entity"]}}]},
            }
        }

    def _is_here(self, asked: dict[str, Any]) -> bool:
        return all(asked[name] == value for name, value in self.place.items())

    def _list(self, asked: dict[str, Any]) -> Any:
        if not self._is_here(asked):
            return {"project": None}
        runs = sorted(self.runs, key=lambda run: run.created, reverse=asked["order"] == "-created_at")
        first = int(asked["cursor"] or 0)
        end = first + asked["perPage"]
        edges = [{"node": run.node(), "cursor": str(first + n)} for n, run in enumerate(runs[first:end], 1)]
        page = {"endCursor": edges[-1]["cursor"] if edges else None, "hasNextPage": end < len(runs)}
        listed = {"edges": edges, "pageInfo": page}
        return {"project": {"internalId": "7", "runCount": len(runs), "readOnly": False, "runs": listed}}

    def _of_run(self, asked: dict[str, Any], run_id: str, tell: Callable[[ServedRun], Any]) -> Any:
        if not self._is_here(asked):
            return {"project": None}
        found = [run for run in self.runs if run.id == run_id]
        return {"project": {"run": tell(found[0]) if found else None}}

    def _run(self, asked: dict[str, Any]) -> Any:
        return self._of_run(asked, asked["name"], ServedRun.node)

    def _parquet(self, run: ServedRun) -> Any:
        urls = [f"{self.url}/exported/{run.id}.parquet"] if run.exported else []
        newer = [{"_step": row["_step"]} for row in run.rows[run.exported :]]
        return {"parquetHistory": {"parquetUrls": urls, "liveData": newer}}

    def exported(self, path: str) -> bytes | None:
        """The file at this address."""
        import io

        import pyarrow as pa
        from pyarrow import parquet

        for run in self.runs:
            if run.exported and path == f"/exported/{run.id}.parquet":
                content = io.BytesIO()
                parquet.write_table(pa.Table.from_pylist(run.rows[: run.exported]), content)
                return content.getvalue()
        return None

    def _page(self, run: ServedRun, asked: dict[str, Any]) -> Any:
        rows = [row for row in run.rows if asked["minStep"] <= row["_step"] < asked["maxStep"]]
        return {"history": [json.dumps(row) for row in rows[: asked["pageSize"]]]}

    # -- HTTP

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self
        wanted = "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if self.headers["Authorization"] != wanted:
                    self._send(401, {"errors": [{"message": "invalid API key"}]})
                elif self.path != "/graphql":
                    server.strange.append(self.path)
                    self._send(404, {})
                else:
                    asked = json.loads(body)
                    self._send(200, server.answer(asked["query"], asked.get("variables") or {}))

            def do_GET(self) -> None:
                content = server.exported(self.path)
                if content is None:
                    server.strange.append(self.path)
                    self._send(404, {})
                else:
                    self._send(200, content)

            def _send(self, code: int, data: Any) -> None:
                content = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
