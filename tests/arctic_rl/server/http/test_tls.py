"""A server that speaks HTTPS, with certificates made here."""

import datetime
import ipaddress
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from integrations.arctic_rl.backends import http_connection
from integrations.arctic_rl.backends.contract import STEPS, write_model
from integrations.arctic_rl.client import ClientConfig, create_arctic_rl_client
from integrations.arctic_rl.errors import ArcticError, ConfigError
from integrations.arctic_rl.server.http.serve import uvicorn_config
from integrations.arctic_rl.server.http.settings import HttpSettings
from tests.arctic_rl.server.http.serving import serving


def write_certificate(folder: Path, address: str, *, days: int = 1) -> dict[str, str]:
    """A certificate that its own key signed, for one address, as settings of a server."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "arctic-rl test")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {"tls_certificate": folder / "certificate.pem", "tls_key": folder / "key.pem"}
    files["tls_certificate"].write_bytes(certificate.public_bytes(pem))
    files["tls_key"].write_bytes(private)
    return {setting: str(file) for setting, file in files.items()}


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_server_over_https_serves_those_who_trust_its_certificate(tmp_path, monkeypatch, loop):
    files = write_certificate(tmp_path / "tls", "127.0.0.1")
    other = write_certificate(tmp_path / "other", "127.0.0.1")
    model = write_model(tmp_path / "model")
    with serving(storage_root=str(tmp_path), **files) as url:
        assert url.startswith("https://")
        assert httpx.get(
            f"{url}/healthz", verify=ssl.create_default_context(cafile=files["tls_certificate"])
        ).is_success

        def connect(address: str) -> float:
            backend = create_arctic_rl_client(ClientConfig(model_path=str(model), server_url=address))
            try:
                loop.run(backend.initialize(STEPS))
                return loop.run(backend.weight_norm("policy"))
            finally:
                loop.run(backend.destroy())

        monkeypatch.setenv(http_connection.CA_VARIABLE, files["tls_certificate"])
        assert connect(url) > 0
        with pytest.raises(ConfigError, match="ARCTIC_RL_CA_FILE") as caught:
            connect(url.replace("127.0.0.1", "localhost"))
        assert "not valid for 'localhost'" in one_line(caught)
        monkeypatch.setattr("integrations.arctic_rl.backends.http.FIRST_PAUSE_S", 0.01)
        with pytest.raises(ArcticError, match="wants https://") as caught:
            connect(url.replace("https", "http"))
        one_line(caught)

        for untrusting in (other["tls_certificate"], None):
            if untrusting is None:
                monkeypatch.delenv(http_connection.CA_VARIABLE)
            else:
                monkeypatch.setenv(http_connection.CA_VARIABLE, untrusting)
            with pytest.raises(ConfigError, match=r"not trusted here .*: set ARCTIC_RL_CA_FILE") as caught:
                connect(url)
            one_line(caught)
        for file in (str(tmp_path / "none.pem"), files["tls_key"]):
            monkeypatch.setenv(http_connection.CA_VARIABLE, file)
            with pytest.raises(ConfigError, match="holds no certificate that can be read") as caught:
                connect(url)
            assert file in one_line(caught)


def test_a_certificate_that_has_expired_is_one_clear_line(tmp_path, monkeypatch, loop):
    files = write_certificate(tmp_path / "tls", "127.0.0.1", days=-1)
    monkeypatch.setenv(http_connection.CA_VARIABLE, files["tls_certificate"])
    with serving(storage_root=str(tmp_path), **files) as url:
        backend = create_arctic_rl_client(ClientConfig(model_path="none", server_url=url))
        with pytest.raises(ConfigError, match="certificate has expired") as caught:
            loop.run(backend.initialize(STEPS))
        one_line(caught)
        loop.run(backend.destroy())


def test_a_server_whose_tls_files_do_not_fit_does_not_start(tmp_path):
    files, other = (write_certificate(tmp_path / name, "127.0.0.1") for name in ("tls", "other"))
    empty = tmp_path / "empty.pem"
    empty.touch()
    for changes in ({"tls_key": other["tls_key"]}, {"tls_certificate": str(empty)}, {"tls_key": str(empty)}):
        with pytest.raises(ArcticError, match=r"tls_certificate=.* and tls_key=.* cannot be used") as caught:
            uvicorn_config(HttpSettings(**{**files, **changes}))
        one_line(caught)
