"""The client of command-line tools for the service."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from mission_control.errors import BadInput, EnvironmentFailed
from mission_control.printable import printable
from mission_control.service.membership import CA, SERVICE, TOKEN, TOKEN_FILE, check_address, read_token

ANSWER_S = 10.0
"""Timeout of a request in seconds: a change waits for the store, whose timeout is 3 s."""
LOOK_S = 3.0
"""Timeout of a status request, which waits for nothing, in seconds."""

KEYS = {"address", "role", "epoch", "revision", "policy", "problems", "clusters", "jobs", "drained"}
"""Keys of a status."""


def refusal(status: int, answer: dict[str, Any]) -> str:
    """Explain to users why there is no answer."""
    if status == 401:
        return "the token does not belong to this service"
    return str(answer.get("error") or f"this is no service of Mission Control (status {status})")


def trusted() -> ssl.SSLContext:
    """Return a context that trusts the CA of ``MISSION_SERVICE_CA``, or those of the system.

    Raises:
        BadInput: The file of the CA cannot be read; the text names it.
    """
    file = os.environ.get(CA)
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        why = error.strerror if error.errno and not isinstance(error, ssl.SSLError) else "no certificate in it"
        raise BadInput(f"{CA}={file} cannot be read ({why}); name the file of a CA, PEM") from None


class Asking:
    """The service, by one or more of its replicas.

    Args:
        service: ``https://HOST:PORT``, several with commas; by default the value of ``MISSION_SERVICE``.
        token_file: File with the operator's or the viewer's token; by default from the environment.

    Raises:
        BadInput: There is no address, or no token.
    """

    def __init__(self, service: str | None = None, token_file: Path | None = None):
        given = service or os.environ.get(SERVICE, "")
        self.addresses = [word.strip().rstrip("/") for word in given.split(",") if word.strip()]
        if not self.addresses:
            raise BadInput(f"no service: give --service https://HOST:PORT, or set {SERVICE}")
        for address in self.addresses:
            check_address(address, os.environ)
        path = token_file or os.environ.get(TOKEN_FILE)
        self.token = read_token(Path(path)) if path else os.environ.get(TOKEN, "").strip()
        self.leader: str | None = None
        """The replica that led at the last request."""
        if not self.token:
            raise BadInput(f"no token: give --token-file PATH (operator.token or viewer.token), or set {TOKEN_FILE}")

    def statuses(self) -> dict[str, dict[str, Any] | str]:
        """Return the status of each replica, by its address; a text instead: why there is none.

        A replica that is stopped or cut off costs no more than :data:`LOOK_S`.
        """
        found: dict[str, dict[str, Any] | str] = {}
        for address in self.addresses:
            try:
                status, answer = self._ask(address, "GET", "/v1/status", None, LOOK_S)
            except (OSError, http.client.HTTPException) as error:
                found[address] = f"does not answer: {error}"
                continue
            if not isinstance(answer, dict):
                answer = {}
            found[address] = answer if status == 200 and answer.keys() >= KEYS else refusal(status, answer)
        return found

    def look(self, path: str, **query: Any) -> Any:
        """Return the leader's answer to ``GET path``.

        Raises:
            BadInput: The service refuses; the text has its reason.
            EnvironmentFailed: No replica leads or answers.
        """
        asked = f"{path}?{urlencode(query)}" if query else path
        why = "no replica answers"
        for addresses in ([self.leader] if self.leader else [], None):
            # The last leader may not lead any more.
            for address in self._leaders() if addresses is None else addresses:
                try:
                    status, answer = self._ask(address, "GET", asked, None)
                except (OSError, http.client.HTTPException) as error:
                    why = f"{address} does not answer: {error}"
                    continue
                if status != 200:
                    raise BadInput(f"{address}: {refusal(status, answer if isinstance(answer, dict) else {})}")
                if not isinstance(answer, dict) or answer.get("leads", answer.get("role") == "leader"):
                    return answer
                why = (
                    f"{address} does not lead, so it does not know; give --service all replicas, or the one that leads"
                )
            self.leader = None
        raise EnvironmentFailed(f"the service does not answer: {why}")

    def transfers(self, most: int, **query: Any) -> dict[str, Any]:
        """Return active transfers: the numbers ``active`` and ``found``, and the first ``rows`` of the found ones.

        Args:
            most: Largest number of rows.
            query: ``q`` (words), ``cluster``, ``job``, ``sort``.
        """
        page: dict[str, Any] = self.look("/v1/transfers", most=most, **query)
        return page

    def change(self, asked: dict[str, Any]) -> None:
        """Send a change to the leader.

        Raises:
            BadInput: The service refuses; the text has its reason.
            EnvironmentFailed: No replica leads or answers, or the outcome of the change is unknown; the text has the
                reason.
        """
        why = "no replica answers"
        for address in self._leaders():
            try:
                status, answer = self._ask(address, "POST", "/v1/ask", asked)
            except (OSError, http.client.HTTPException) as error:
                why = f"{address} does not answer: {error}"
                continue
            if status == 200:
                return
            if status in (503, 504):
                # If it does not lead, try another one. If the outcome is unknown, stop: another request could change it
                # twice.
                why = refusal(status, answer if isinstance(answer, dict) else {})
                if status == 503:
                    continue
                break
            raise BadInput(f"{address}: {refusal(status, answer if isinstance(answer, dict) else {})}")
        raise EnvironmentFailed(f"not changed, as far as is known: {why}")

    def _leaders(self) -> list[str]:
        """Return the addresses, the leader's first, if it is known."""
        for status in self.statuses().values():
            if isinstance(status, dict) and status["role"] == "leader":
                # The token is only sent to addresses that the user gave.
                leader = status["address"]
                self.leader = leader if leader in self.addresses else None
                return sorted(self.addresses, key=lambda address: address != leader)
        return self.addresses

    def _ask(self, address: str, method: str, path: str, body: Any, within_s: float = ANSWER_S) -> tuple[int, Any]:
        parts = urlsplit(address)
        assert parts.hostname is not None
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=within_s, context=trusted())
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=within_s)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            return answer.status, printable(json.loads(answer.read() or b"{}"))
        except ValueError as error:
            raise http.client.HTTPException(f"this is no service of Mission Control: {error}") from None
        finally:
            connection.close()
