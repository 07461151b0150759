"""A replica of the service as a person starts it: where it keeps what it must not lose, and the tokens for it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.service.membership import read_token

PORT = 8790
"""Near Dask's own, and nobody's (IANA has none for it)."""
TOKEN_MIN = 16
"""Letters: fewer can be guessed."""
TOKENS = ("operator", "viewer", "cluster")
"""May change things; may look; lets a cluster join."""


def default_folder() -> Path:
    """Return where the state of a service lies if nothing is said (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mission-control" / "service"


def tokens_in(folder: Path) -> dict[str, str]:
    """Return the tokens in this folder, by what they allow; those that are missing are drawn, and written there.

    Raises:
        BadInput: The folder cannot be used, or a token is readable by others.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {name: _token(folder / f"{name}.token") for name in TOKENS}
    except OSError as error:
        raise BadInput(f"tokens of the service: {error}") from None


def _token(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # One that is another user's is mounted, as Kubernetes does with secrets: its group is this process's.
        own = path.stat()
        if own.st_mode & (0o077 if own.st_uid == os.geteuid() else 0o037):
            raise BadInput(f"{path} can be read by others: chmod 600 {path}") from None
        token = read_token(path)
        if len(token) < TOKEN_MIN:
            raise BadInput(f"{path} has less than {TOKEN_MIN} letters: remove it, and a new one is drawn") from None
        return token
    with open(descriptor, "w") as file:
        token = secrets.token_urlsafe(32)
        file.write(f"{token}\n")
    return token


def start(
    *,
    name: str,
    listen: str,
    address: str | None,
    store: str | None,
    folder: Path,
    policy: str,
    certificate: tuple[Path, Path] | None,
    store_ca: Path | None = None,
    store_certificate: tuple[Path, Path] | None = None,
) -> tuple[_native.Service, str]:
    """Start a replica; return it, and where members find it.

    Args:
        name: Of the service.
        listen: As in ``0.0.0.0:8790``.
        address: Where members find it; by default this host's name, or the address at which it listens.
        store: ``etcd://HOST:PORT,..``; by default a journal in the folder.
        folder: Of the tokens, and of the journal.
        policy: Where nobody has said one.
        certificate: Chain and key.
        store_ca: Vouches for etcd, which is spoken with by TLS then.
        store_certificate: Chain and key that are shown to etcd.

    Raises:
        BadInput: One of them cannot be used.
    """
    host, port = parse_listen(listen)
    if not name.strip() or not name.isprintable():
        raise BadInput("--name: use a name that can be printed")
    if store is not None:
        check_store(store)
    if address is not None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"--address {address!r}: use https://HOST:PORT")
    inside = ipaddress.ip_address(host).is_loopback
    if certificate is None and not inside:
        raise BadInput(
            f"--listen {listen} without a certificate would show tokens to the network: give --certificate and --key, "
            f"or --listen 127.0.0.1:{port}"
        )
    try:
        _native.weights(policy, "[]", 10)
    except ValueError as error:
        raise BadInput(f"--policy: {error}") from None
    if policy.startswith("python:"):
        raise BadInput(
            f"--policy {policy}: a policy in Python runs beside one cluster's scheduler, and not in the service"
        )
    settings: dict[str, Any] = {"name": name, "listen": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    settings |= {"policy": policy, "tokens": tokens_in(folder), "store": store or str(folder / "store")}
    if (store_ca or store_certificate) and not str(store).startswith("etcd://"):
        raise BadInput("--store-ca and --store-certificate are for --store etcd://..")
    if certificate is not None:
        settings["certificate"] = [read_pem("--certificate, --key", path) for path in certificate]
    if store_ca is not None:
        settings["store_ca"] = read_pem("--store-ca", store_ca)
    if store_certificate is not None:
        settings["store_certificate"] = [read_pem("--store-certificate", path) for path in store_certificate]
    scheme = "https" if certificate is not None else "http"
    settings["address"] = address or f"{scheme}://{host if inside else socket.getfqdn()}:{port}"
    try:
        return _native.Service(json.dumps(settings)), settings["address"]
    except ValueError as error:
        raise BadInput(str(error)) from None


def read_pem(option: str, path: Path) -> str:
    """
    Raises:
        BadInput: It is no text file; the line names the option and the file.
    """
    try:
        return path.read_text()
    except OSError as error:
        raise BadInput(f"{option}: {error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{option}: {path} is no PEM file") from None


def check_store(store: str) -> None:
    """
    Raises:
        BadInput: It is neither members of etcd nor a folder.
    """
    if store.startswith("etcd://"):
        members = store.removeprefix("etcd://").split(",")
        if not all(re.fullmatch(r"\S+:[0-9]{1,5}", member) for member in members):
            raise BadInput(f"--store {store!r}: use etcd://HOST:PORT, several with commas")
    elif re.match(r"\w+:/", store):
        raise BadInput(f"--store {store!r}: use etcd://HOST:PORT,.. or a folder")


def parse_listen(listen: str) -> tuple[str, int]:
    """
    Raises:
        BadInput: It is no address and port.
    """
    host, _, port = listen.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        if not 0 < int(port) < 65536:
            raise ValueError
    except ValueError:
        raise BadInput(f"--listen {listen!r}: use ADDRESS:PORT, as in 127.0.0.1:{PORT}") from None
    return host.strip("[]"), int(port)
