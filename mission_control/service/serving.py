"""Start a replica of the service from the command line: its store, and the tokens for it."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.service.membership import read_token

PORT = 8790
"""Default port: near Dask's, and not assigned by IANA."""
TOKEN_MIN = 16
"""Fewest letters of a token; shorter ones can be guessed."""
TOKENS = ("operator", "viewer", "cluster")
"""Roles of tokens: operators may change settings, viewers may read, clusters may join."""


def default_folder() -> Path:
    """Return the default folder of a service's state (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mission-control" / "service"


def tokens_in(folder: Path) -> dict[str, str]:
    """Return the tokens in this folder, by role; generate missing ones, and write them there.

    Raises:
        BadInput: The folder cannot be used, or a token is readable by others.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_folder_of_others(folder)
        return {name: _token(folder / f"{name}.token") for name in TOKENS}
    except OSError as error:
        raise BadInput(f"--state {folder} cannot be used ({error.strerror}); choose another folder") from None


def _refuse_folder_of_others(folder: Path) -> None:
    """
    Raises:
        BadInput: Another user could put tokens there, which this service would accept.
    """
    own = folder.stat()
    if own.st_uid not in (os.geteuid(), 0):
        raise BadInput(f"--state {folder} belongs to user {own.st_uid}: choose a folder of your own")
    # A folder of root that everybody may write in is mounted, as Kubernetes does; files in it are checked one by one.
    if own.st_uid == os.geteuid() and own.st_mode & 0o002:
        raise BadInput(f"everybody can write in --state {folder}: chmod 700 {folder}")


def _token(path: Path) -> str:
    if not os.path.lexists(path):
        _generate(path)
    # A file of root is mounted, as Kubernetes does with secrets: its group is that of this process.
    own = path.stat()
    planted = {own.st_uid, path.lstat().st_uid} - {os.geteuid(), 0}
    if planted:
        raise BadInput(f"{path} belongs to user {planted.pop()}: remove it to generate a new one")
    if own.st_mode & (0o077 if own.st_uid == os.geteuid() else 0o037):
        raise BadInput(f"{path} can be read by others: chmod 600 {path}")
    token = read_token(path)
    if len(token) < TOKEN_MIN:
        raise BadInput(f"{path} has fewer than {TOKEN_MIN} letters: remove it to generate a new one")
    return token


def _generate(path: Path) -> None:
    """Write a token, whole or not at all: another replica that starts at the same time would read an empty one."""
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        os.unlink(new)


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
    """Start a replica; return it, and its address for members.

    Args:
        name: Name of the service.
        listen: Address and port, as in ``0.0.0.0:8790``.
        address: Its address for members; by default this host's name, or the address at which it listens.
        store: ``etcd://HOST:PORT,..``; by default a journal in the folder.
        folder: Folder of the tokens and of the journal.
        policy: Policy until an operator sets one.
        certificate: Files of certificate chain and key.
        store_ca: File of the CA of etcd's certificate; enables TLS to etcd.
        store_certificate: Files of chain and key for client authentication at etcd.

    Raises:
        BadInput: An argument is invalid.
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
        raise BadInput(f"--policy: {str(error).removesuffix(', or python:NAME')}") from None
    if policy.startswith("python:"):
        raise BadInput(
            f"--policy {policy}: a policy in Python runs beside one cluster's scheduler, and not in the service"
        )
    settings: dict[str, Any] = {"name": name, "listen": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    settings |= {"policy": policy, "tokens": tokens_in(folder), "store": store or str(folder / "store")}
    if (store_ca or store_certificate) and not str(store).startswith("etcd://"):
        raise BadInput("--store-ca and --store-certificate are for --store etcd://..")
    if certificate is not None:
        settings["certificate"] = read_pair("--certificate", "--key", certificate)
    if store_ca is not None:
        settings["store_ca"] = read_pem("--store-ca", store_ca)
    if store_certificate is not None:
        settings["store_certificate"] = read_pair("--store-certificate", "--store-key", store_certificate)
    scheme = "https" if certificate is not None else "http"
    settings["address"] = address or f"{scheme}://{host if inside else socket.getfqdn()}:{port}"
    try:
        return _native.Service(json.dumps(settings)), settings["address"]
    except ValueError as error:
        files = [*(certificate or ()), *([store_ca] if store_ca else ()), *(store_certificate or ())]
        named = f" (files: {', '.join(map(str, files))})" if "certificate" in str(error) and files else ""
        raise BadInput(f"{error}{named}") from None


def read_pair(of_chain: str, of_key: str, files: tuple[Path, Path]) -> list[str]:
    """Read the files of a certificate chain and its key.

    Raises:
        BadInput: A file is no PEM file; the text names the option and the file.
    """
    return [read_pem(option, path) for option, path in zip((of_chain, of_key), files, strict=True)]


def read_pem(option: str, path: Path) -> str:
    """
    Raises:
        BadInput: The file is no text file; the text names the option and the file.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise BadInput(f"{option} {path} cannot be read ({error.strerror}); name another file") from None
    except UnicodeDecodeError:
        text = ""
    if "-----BEGIN " not in text:
        raise BadInput(f"{option} {path}: this is no PEM file; name one that has '-----BEGIN'")
    return text


def check_store(store: str) -> None:
    """
    Raises:
        BadInput: The store is neither members of etcd nor a folder.
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
        BadInput: The value is no address with a port.
    """
    host, _, port = listen.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        if not 0 < int(port) < 65536:
            raise ValueError
    except ValueError:
        raise BadInput(f"--listen {listen!r}: use ADDRESS:PORT, as in 127.0.0.1:{PORT}") from None
    return host.strip("[]"), int(port)
