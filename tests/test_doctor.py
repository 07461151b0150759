"""`mission doctor` says what is wrong, and what to do."""

from __future__ import annotations

import datetime
import json

import dask
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from distributed import Client, LocalCluster

from mission_control import doctor
from tests.conftest import mission

FIRST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def certificate(folder, days: int) -> dict[str, str]:
    """Make a certificate that expires in a number of days, for Dask's configuration."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, hours=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FIRST)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    prefix = "distributed.comm.tls"
    settings = {f"{prefix}.ca-file": str(folder / "cert.pem")}
    for role in ("scheduler", "worker", "client"):
        settings |= {f"{prefix}.{role}.cert": str(folder / "cert.pem"), f"{prefix}.{role}.key": str(folder / "key.pem")}
    return settings


def test_a_machine_that_runs_the_tests_has_what_is_needed():
    done = mission("doctor", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (0, True), done.stdout
    found = {finding["what"]: finding for finding in answer["findings"]}
    assert found["distributed"]["state"] == found["mission://"]["state"] == "ok"


@pytest.mark.parametrize(
    ("days", "state", "says"), ((400, "ok", "400 days left"), (3, "warn", "3 days left"), (-5, "fail", "ended"))
)
def test_certificates_are_looked_at(days, state, says, tmp_path):
    with dask.config.set(certificate(tmp_path, days)):
        found = list(doctor.certificates())
    assert [finding.state for finding in found] == [state] * 3
    assert all(says in finding.found for finding in found)
    assert all(bool(finding.do) == (state != "ok") for finding in found)


def test_a_key_of_another_certificate_is_found(tmp_path):
    settings = certificate(tmp_path, 100)
    other = tmp_path / "other"
    other.mkdir()
    certificate(other, 100)
    (tmp_path / "key.pem").write_bytes((other / "key.pem").read_bytes())
    with dask.config.set(settings):
        found = list(doctor.certificates())
    assert {finding.state for finding in found} == {"fail"}
    assert "the key of this certificate" in found[0].do


def test_what_the_environment_names_and_is_not_there_is_found(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("short")
    monkeypatch.setenv("MISSION_HOST_TOKEN_FILE", str(token))
    (found,) = doctor.host_token({"MISSION_HOST_TOKEN_FILE": str(token)})
    assert found.state == "fail" and "16 bytes" in found.found
    (found,) = doctor.service({"MISSION_SERVICE": "http://127.0.0.1:9", "MISSION_SERVICE_TOKEN": "secret"})
    assert found.state == "fail" and "mission serve" in found.do
    (found,) = doctor.service({"MISSION_SERVICE": "nonsense"})
    assert found.state == "fail" and "https://HOST:PORT" in found.found


def test_a_cluster_is_looked_at():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        address = cluster.scheduler_address
        done = mission("doctor", "--scheduler", address)
        assert done.returncode == 3 and "--preload mission_control.dask" in done.stdout, done.stdout
        import mission_control

        mission_control.install(client)
        done = mission("doctor", "--scheduler", address, "--json")
        found = {
            finding["what"]: finding for finding in json.loads(done.stdout)["findings"] if finding["of"] == "cluster"
        }
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["data planes"]["found"] == "2 of 2 workers"
    assert found["data ports"]["state"] == found["distributed"]["state"] == "ok"


def test_a_scheduler_that_is_not_there_is_a_missing_prerequisite():
    done = mission("doctor", "--scheduler", "tcp://127.0.0.1:9")
    assert done.returncode == 3 and done.stderr.startswith("mission: no scheduler answers")
