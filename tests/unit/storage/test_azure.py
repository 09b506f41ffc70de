"""What a URL of Azure's names, and which credentials adlfs and deltalake are given."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import azure.identity
import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential

from converter import (
    SourceError,
)
from converter.sources.delta import log
from converter.storage.azure import AzureStore, parse_azure_url
from converter.storage.opening import open_storage, open_store

ACCOUNT = {"account_key": "c2VjcmV0LWtleQ=="}

LAKE = "data@lake.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("url", "container", "path", "account", "shown"),
    [
        ("abfss://data@lake.dfs.core.windows.net/a/b", "data", "a/b", "lake", f"abfss://{LAKE}/a/b"),
        ("abfs://data@lake.dfs.core.windows.net", "data", "", "lake", "abfs://data@lake.dfs.core.windows.net"),
        ("abfss://data@lake.blob.core.windows.net/a/", "data", "a", "lake", "abfss://data@lake.dfs.core.windows.net/a"),
        ("https://lake.dfs.core.windows.net/data/a/b", "data", "a/b", "lake", f"abfss://{LAKE}/a/b"),
        ("https://lake.blob.core.windows.net/data/a%20b", "data", "a b", "lake", f"abfss://{LAKE}/a b"),
        ("az://data/a", "data", "a", None, "abfs://data@lake.dfs.core.windows.net/a"),
        ("abfs://data/a", "data", "a", None, "abfs://data@lake.dfs.core.windows.net/a"),
        (
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
            "space",
            "house.Lakehouse/Files",
            "onelake",
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
        ),
        (
            "https://onelake.blob.fabric.microsoft.com/space/house.Lakehouse/Files",
            "space",
            "house.Lakehouse/Files",
            "onelake",
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
        ),
        (
            "https://lake.blob.core.chinacloudapi.cn/data/a",
            "data",
            "a",
            "lake",
            "abfss://data@lake.dfs.core.chinacloudapi.cn/a",
        ),
        ("abfss://data@lake.dfs.core.usgovcloudapi.net/a", "data", "a", "lake",
         "abfss://data@lake.dfs.core.usgovcloudapi.net/a"),
    ],
)  # fmt: skip
def test_a_url_of_azures_in_every_form(url: str, container: str, path: str, account: str | None, shown: str) -> None:
    place = parse_azure_url(url)
    assert (place.container, place.path, place.account) == (container, path, account)
    store, root, found = open_store(url, ACCOUNT | ({} if account else {"account_name": "lake"}), 5)
    assert isinstance(store, AzureStore)
    assert (root, found) == (f"{container}/{path}".rstrip("/"), shown)
    assert store.options["account_name"] == (account or "lake")
    # Whom adlfs asks: by itself it knows the first cloud alone.
    host = found.partition("@")[2].partition("/")[0].replace(".dfs.", ".blob.")
    expected = None if host == "lake.blob.core.windows.net" else host
    assert (place.account_host, store.options.get("account_host")) == (expected, expected)
    # OneLake takes tokens alone.
    by_token = {"credential": lambda: "token", "account_name": account or "lake"}
    assert open_store(url, by_token, 5)[0].filesystem().service_client.url.rstrip("/") == f"https://{host}"
    # One that is given is asked instead.
    elsewhere = ACCOUNT | {"account_name": account or "lake", "account_host": "proxy.example.com"}
    assert open_store(url, elsewhere, 5)[0].options["account_host"] == "proxy.example.com"
    assert open_storage(found, ACCOUNT).url == found


def test_a_url_without_an_account_says_where_one_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match=r"abfs://data/a names no account.*account_name.*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("abfs://data/a", {}, 5)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lake")
    assert open_store("abfs://data/a", {}, 5)[2] == "abfs://data@lake.dfs.core.windows.net/a"


@pytest.mark.parametrize("url", ["abfs://@lake.dfs.core.windows.net/a", "abfss://data@lake.example.com/a"])
def test_a_url_that_is_none_of_azures_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no container|is not a host of Azure"):
        open_store(url, ACCOUNT, 5)


@pytest.mark.parametrize("credential", [AzureSasCredential("sig=hid%2Bden"), AzureNamedKeyCredential("lake", "hidden")])
def test_what_holds_a_key_is_no_provider(credential: Any) -> None:
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": credential})
    assert b"hid" not in pickle.dumps(storage)
    assert "hid" not in storage.without_secrets("hid%2Bden hid+den" if "Sas" in str(type(credential)) else "hidden")


@pytest.mark.parametrize("option", ["connection_string", "account_key"])
@pytest.mark.parametrize("value", ["garbage", b"garbage", "x"])
def test_a_credential_that_is_none_is_named(option: str, value: Any) -> None:
    storage = open_storage(f"abfss://{LAKE}/a", {option: value}, 1)
    with pytest.raises(OSError, match=rf"storage_options \({option}\) cannot be used") as caught:
        storage.size("a")
    assert "garbage" not in str(caught.value)


class AsyncCredential:
    """As those of azure.identity.aio."""

    async def get_token(self, *_: str, **__: Any) -> AccessToken:
        await asyncio.sleep(0)
        return AccessToken("an-async-token", 2_000_000_000)


CHINA = "AccountName=lake;AccountKey=a2V5;EndpointSuffix=core.chinacloudapi.cn"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"account_key": "a2V5"}, {"account_key": "a2V5"}),
        ({"sas_token": "?sv=1&sig=2"}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": "a2V5"}, {"account_key": "a2V5"}),
        ({"credential": "?sv=1&sig=2"}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": AzureNamedKeyCredential("lake", "a2V5")}, {"account_key": "a2V5"}),
        ({"credential": AzureSasCredential("sv=1&sig=2")}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": lambda: "a-token"}, {"bearer_token": "a-token"}),
        ({"credential": AsyncCredential()}, {"bearer_token": "an-async-token"}),
        ({"anon": True}, {"azure_skip_signature": "true"}),
        (
            {"connection_string": f"DefaultEndpointsProtocol=https;{CHINA}"},
            {"account_key": "a2V5", "azure_endpoint": "https://lake.blob.core.chinacloudapi.cn"},
        ),
        (
            {
                "connection_string": "AccountName=lake;SharedAccessSignature=sv=1&sig=2;BlobEndpoint=http://127.0.0.1:1/lake"
            },
            {"sas_token": "sv=1&sig=2", "azure_endpoint": "http://127.0.0.1:1/lake", "allow_http": "true"},
        ),
        (
            {"account_key": "a2V5", "account_host": "lake.blob.core.chinacloudapi.cn"},
            {"account_key": "a2V5", "azure_endpoint": "https://lake.blob.core.chinacloudapi.cn"},
        ),
    ],
)
def test_deltalake_is_told_the_credentials_that_our_client_has(
    options: dict[str, Any], expected: dict[str, str]
) -> None:
    _, found = open_storage("abfs://data@lake.dfs.core.windows.net/table", options).delta_place()
    assert found == {"account_name": "lake"} | expected


@pytest.mark.parametrize(
    ("host", "asked", "endpoint"),
    [
        ("lake.dfs.core.windows.net", "lake.dfs.core.windows.net", None),
        # deltalake takes no URL of these.
        ("lake.dfs.core.chinacloudapi.cn", "lake.dfs.core.windows.net", "https://lake.blob.core.chinacloudapi.cn"),
        ("lake.dfs.core.usgovcloudapi.net", "lake.dfs.core.windows.net", "https://lake.blob.core.usgovcloudapi.net"),
        (
            "onelake.dfs.fabric.microsoft.com",
            "onelake.dfs.fabric.microsoft.com",
            "https://onelake.blob.fabric.microsoft.com",
        ),
    ],
)
def test_deltalake_is_told_a_url_that_it_knows(host: str, asked: str, endpoint: str | None) -> None:
    storage = open_storage(f"abfss://data@{host}/a.dfs.core.b/table", {"credential": lambda: "token"})
    url, options = storage.delta_place()
    assert url == f"abfss://data@{asked}/a.dfs.core.b/table"
    assert options.get("azure_endpoint") == endpoint


@pytest.mark.parametrize("fails", [RuntimeError("no answer"), None], ids=str)
def test_a_provider_that_gives_no_token_to_deltalake_is_an_error_of_the_table(
    fails: Exception | None,
) -> None:
    def give() -> Any:
        if fails is not None:
            raise fails

    storage = open_storage("abfs://data@lake.dfs.core.windows.net/table", {"credential": give}, 10)
    with pytest.raises(
        SourceError, match=r"Delta table abfs://data@lake\..* cannot be opened.*: .*(no answer|gave NoneType)"
    ):
        log.open_table(storage, {}, version=0, timestamp=None)


TENANT = "11111111-1111-1111-1111-111111111111"


def credential_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "environment":
        environment = {"AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": TENANT, "AZURE_CLIENT_SECRET": "hunter22"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return azure.identity.DefaultAzureCredential()
    own = azure.identity.ClientSecretCredential(TENANT, TENANT, "hunter22")
    return azure.identity.ChainedTokenCredential(azure.identity.AzureCliCredential(), own) if kind == "chain" else own


@pytest.mark.parametrize("kind", ["own", "chain", "environment"])
def test_a_credential_that_holds_a_secret_is_not_pickled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = credential_of(kind, monkeypatch)
    # Else there were nothing to hold back.
    assert b"hunter22" in pickle.dumps(credential)
    storage = open_storage("abfss://data@lake.dfs.core.windows.net/a", {"credential": credential})
    assert b"hunter22" not in pickle.dumps(storage)
    assert "hunter22" not in storage.without_secrets("it said hunter22")


@pytest.mark.parametrize("kind", ["DefaultAzureCredential", "ManagedIdentityCredential", "AzureCliCredential"])
def test_a_credential_that_holds_none_travels(kind: str) -> None:
    credential = getattr(azure.identity, kind)()
    storage = open_storage("abfss://data@lake.dfs.core.windows.net/a", {"credential": credential})
    there = pickle.loads(pickle.dumps(storage))
    assert type(there.options["credential"]) is type(credential)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("abfss://data@other.dfs.core.windows.net/a", {}),
        ("abfs://data/a", {"account_name": "other", "account_key": "a2V5"}),
    ],
)
def test_a_connection_string_of_another_account_is_refused(
    url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=lake;AccountKey=a2V5hunter22")
    with pytest.raises(ValueError, match=r"in the account 'other', but .*_CONNECTION_STRING is for 'lake'") as caught:
        open_storage(url, options)
    assert "hunter22" not in str(caught.value)
    with pytest.raises(ValueError, match=r"account 'other', but .* for 'lake'"):
        open_storage(url, options | {"connection_string": None})
    assert open_storage("abfs://data/a").url == "abfs://data@lake.dfs.core.windows.net/a"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", "BlobEndpoint=https://lake.blob.core.windows.net;SharedAccessSignature=sig=a"
    )
    with pytest.raises(ValueError, match=r"account 'other', but .* for 'lake'"):
        open_storage(url, options)


def test_an_option_that_azure_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="knows no 'sas_tokn'; did you mean 'sas_token'"):
        open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_tokn": "s"}, 5)
