"""A real blob store on this machine: Azurite, the emulator of Azure's blobs.

It keeps its data in a folder, so that it can be killed and come back with them. It serves blobs alone: Spark's ABFS
driver reaches it as a store without a hierarchical namespace.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import ipaddress
import json
import re
import ssl
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.hdfs import hadoop_version
from tests.servers.process import Server, fetch, fetched, free_port, get, require_program
from tests.servers.proxy import Proxy

# The newest that runs on Node.js 20.
VERSION = "3.35.0"
ACCOUNT = "devstoreaccount1"
# No secret: the key of every emulator of Azure's storage, as Microsoft's documentation prints it.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

TRUST_PASSWORD = "no-secret"

_NODE = "install Node.js 20 or later: Azurite, the emulator of Azure's blobs, runs on it"
_SAVE_SECONDS = 30


class BlobAccount:
    """What a client must know of an account: where it is, and its key."""

    account = ACCOUNT
    key = KEY

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}/{self.account}"
        self.connection_string = (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};"
            f"BlobEndpoint={self.endpoint};"
        )

    def new_container(self) -> str:
        """The name of a container that did not exist before."""
        from azure.storage.blob import ContainerClient

        name = f"test-{uuid.uuid4().hex}"
        with ContainerClient.from_connection_string(self.connection_string, name) as container:
            container.create_container()
        return name

    def sas(self, container: str, *, permission: str = "racwdl", valid_seconds: float = 3600) -> str:
        """A token that allows `permission` on a container; it has expired where `valid_seconds` is negative."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        return generate_container_sas(
            self.account,
            container,
            self.key,
            permission=ContainerSasPermissions.from_string(permission),
            expiry=dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=valid_seconds),
        )

    def url(self, container: str) -> str:
        """The container as Spark's ABFS driver takes it; it asks for the `dfs` host also where it speaks to blobs."""
        return f"abfs://{container}@{self.account}.dfs.core.windows.net"

    def spark_confs(self) -> dict[str, str]:
        """What a Spark session needs to reach it with its own ABFS driver, which is fetched when Spark starts."""
        return {
            "spark.jars.packages": f"org.apache.hadoop:hadoop-azure:{hadoop_version()}",
            # It is in pyspark's jars already.
            "spark.jars.excludes": "org.apache.hadoop:hadoop-common",
            "spark.hadoop.fs.azure.account.hns.enabled": "false",
            "spark.hadoop.fs.azure.fns.account.service.type": "BLOB",
            "spark.hadoop.fs.azure.abfs.endpoint": f"127.0.0.1:{self.port}",
            "spark.hadoop.fs.azure.always.use.https": "false",
            # The other library wants TLS.
            "spark.hadoop.fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
            "spark.hadoop.fs.azure.account.auth.type": "SharedKey",
            "spark.hadoop.fs.azure.account.key": self.key,
            f"spark.hadoop.fs.azure.account.key.{self.account}.blob.core.windows.net": self.key,
        }


class Azurite(BlobAccount):
    """The emulator, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(free_port())
        self.logs = folder
        self._data = folder / "data"
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self._data)]
        # The clients speak newer versions of the protocol than it knows of.
        options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        self.process = Server(
            "Azurite",
            [*_command(), *arguments, *options],
            log=folder / "azurite.log",
            is_ready=lambda: get(self.port, "/") is not None,
        )

    def start(self) -> None:
        """Start it, again if it has been started before, and return once it answers."""
        self.process.start()

    def stop(self) -> None:
        """Let it end in order."""
        self.process.stop()

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does; what it has confirmed is there when it starts again."""
        self._wait_until_saved()
        self.process.kill()

    @contextmanager
    def killed(self) -> Iterator[None]:
        """It was killed before this block, and runs again after it, with its data and on its port."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    def _wait_until_saved(self) -> None:
        """Return once all that it has confirmed is on disk, as it always is with Azure.

        Azurite writes its two indexes every five seconds only: wait until a blob of ours is in both.
        """
        from azure.storage.blob import BlobClient

        name = uuid.uuid4().hex
        with BlobClient.from_connection_string(self.connection_string, self.new_container(), name) as blob:
            blob.upload_blob(b"saved")
        deadline = time.monotonic() + _SAVE_SECONDS
        while not self._has_saved(name):
            assert time.monotonic() < deadline, f"Azurite has not written its indexes within {_SAVE_SECONDS} s"
            time.sleep(0.1)

    def _has_saved(self, name: str) -> bool:
        blobs = _documents(self._data / "__azurite_db_blob__.json", "$BLOBS_COLLECTION$")
        extents = _documents(self._data / "__azurite_db_blob_extent__.json", "$EXTENTS_COLLECTION$")
        sizes = {extent["id"]: extent["size"] for extent in extents}
        places = [blob["persistency"] for blob in blobs if blob["name"] == name]
        return any(sizes.get(place["id"], 0) >= place["offset"] + place["count"] for place in places)


class SecureAzurite(BlobAccount):
    """The emulator over TLS: there it takes tokens, of which it checks the issuer, the audience and the end.

    It does not check who signed them, nor what their bearer may do.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(free_port())
        folder.mkdir()
        self.certificate, self._log = folder / "certificate.pem", folder / "azurite.log"
        self.trust_store = folder / "trusted.p12"
        """The certificate as Java takes it, with `TRUST_PASSWORD`."""
        _write_certificate(self.certificate, folder / "key.pem", self.trust_store)
        self.host = f"127.0.0.1:{self.port}/{self.account}"
        self.connection_string = self.connection_string.replace("http", "https")
        tls = ["--oauth", "basic", "--cert", str(self.certificate), "--key", str(folder / "key.pem")]
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(folder / "data")]
        # Without --silent, so that it writes each request down.
        options = ["--skipApiVersionCheck", "--disableTelemetry"]
        self.process = Server(
            "Azurite over TLS",
            [*_command(), *place, *tls, *options],
            log=self._log,
            is_ready=self._answers,
        )

    def client(self, container: str) -> Any:
        from azure.storage.blob import ContainerClient

        return ContainerClient.from_connection_string(
            self.connection_string, container, connection_verify=str(self.certificate)
        )

    def new_container(self) -> str:
        with self.client(f"test-{uuid.uuid4().hex}") as container:
            container.create_container()
            return str(container.container_name)

    def files(self, container: str) -> list[str]:
        with self.client(container) as client:
            return sorted(blob.name for blob in client.list_blobs())

    def data_requests(self) -> int:
        return len(re.findall(r'"GET /\S+\.parquet', self._log.read_text()))

    def _answers(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=2, context=context)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/")
            return bool(connection.getresponse().read() is not None)
        return False


class SlowAzurite(BlobAccount):
    """The same account behind a proxy that delays, counts, fails and hangs as told."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy.port)
        self.proxy = proxy


@contextmanager
def start_azurite(folder: Path) -> Iterator[Azurite]:
    """A blob store with nothing in it, which ends with the block."""
    azurite = Azurite(folder)
    try:
        azurite.start()
        yield azurite
    finally:
        azurite.process.kill()


@contextmanager
def start_secure_azurite(folder: Path) -> Iterator[SecureAzurite]:
    """The same over TLS, with tokens; it ends with the block."""
    account = SecureAzurite(folder)
    try:
        account.process.start()
        yield account
    finally:
        account.process.kill()


def _documents(database: Path, collection: str) -> list[dict[str, Any]]:
    """What a database of Azurite holds on disk."""
    with contextlib.suppress(FileNotFoundError):
        for found in json.loads(database.read_bytes())["collections"]:
            if found["name"] == collection:
                documents: list[dict[str, Any]] = found["data"]
                return documents
    return []


def _command() -> list[str]:
    return [require_program("node", _NODE), str(_installed() / "node_modules/azurite/dist/src/blob/main.js")]


def _installed() -> Path:
    def fill(folder: Path) -> None:
        npm = require_program("npm", _NODE)
        options = ["--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
        fetch([npm, "install", "--prefix", str(folder), *options, f"azurite@{VERSION}"], folder=folder)

    return fetched(f"azurite-{VERSION}", fill)


def _write_certificate(certificate: Path, key: Path, trust_store: Path) -> None:
    """A certificate of 127.0.0.1, signed by itself. Java trusts this machine's too: Spark fetches jars."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import pkcs12
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.timezone.utc)
    usage = dict.fromkeys(["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False)
    usage |= {"crl_sign": False, "encipher_only": False, "decipher_only": False}
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=False, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of old certificates that machines still have.
        known = map(x509.load_der_x509_certificate, ssl.create_default_context().get_ca_certs(binary_form=True))
        trusted = [pkcs12.PKCS12Certificate(one, b"%d" % number) for number, one in enumerate(known)]
    trusted.append(pkcs12.PKCS12Certificate(made, b"azurite"))
    encryption = serialization.BestAvailableEncryption(TRUST_PASSWORD.encode())
    trust_store.write_bytes(pkcs12.serialize_java_truststore(trusted, encryption))
    kind, unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, kind, unencrypted))
