"""An authority of certificates for development and for closed networks. Needs the package `cryptography`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from octavo.service.private import write_private
from octavo.service.tls import PARTS

_CA_DAYS: Final = 3650
# A clock that is behind ours shall take what we made.
_BACKDATED: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate that signs others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, name: str = "Octavo development authority") -> Self:
        """Return a new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), _named(name), key, timedelta(days=_CA_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return that of a folder.

        Raises:
            OSError: a file cannot be read.
            ValueError: it is not what `save` wrote.
        """
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of the authority is of another kind than those made here")  # noqa: TRY004
        return cls(certificate, key)

    def save(self, folder: Path) -> None:
        """Write `ca.pem` and `ca-key.pem`."""
        _write(folder, "ca", self.certificate, self.key)

    def issue_all(self, folder: Path, hosts: Iterable[str], valid: timedelta) -> None:
        """Write one for each part, the services' for these hosts."""
        for part in PARTS:
            self.issue(folder, part, () if part == "client" else hosts, valid)

    def issue(self, folder: Path, name: str, hosts: Iterable[str], valid: timedelta) -> None:
        """Write `NAME.pem` and `NAME-key.pem`: a certificate of this name and these hosts, for both ends.

        A negative time makes one that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general(one) for one in dict.fromkeys((name, *hosts))]
        ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = self.key.public_key()
        certificate = (
            _builder(_named(name), self.certificate.subject, key, valid)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        _write(folder, name, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + valid
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write the key first: who follows the files takes them in once both are there."""
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(folder / f"{name}-key.pem", secret)
    write_private(folder / f"{name}.pem", certificate.public_bytes(pem))
    (folder / f"{name}.pem").chmod(0o644)
