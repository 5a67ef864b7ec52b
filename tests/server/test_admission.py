"""Who may change things over HTTP, by address, by page and by token."""

import os

import pytest
from starlette.testclient import TestClient

from kvcellar.config.admin_token import read_admin_token
from kvcellar.config.load import load_server
from kvcellar.errors import ConfigError
from kvcellar.protocol.messages import Cleared, QuotaList
from kvcellar.protocol.quotas import QuotaFacts
from kvcellar.server.http.admission import Admission
from kvcellar.server.http.pages import make_app

TOKEN = "0123456789abcdef-secret"
CHANGES = (
    ("POST", "/cache/clear", {}),
    ("PUT", "/quota/a", {"limit_gb": 1}),
    ("DELETE", "/quota/a", None),
    ("GET", "/quota", None),
)


class Line:
    """A control loop that agrees to everything."""

    async def call(self, make, *, timeout_s):
        request = make(1)
        if type(request).__name__ == "Clear":
            return Cleared(1, 0, 0)
        return QuotaList(1, (QuotaFacts("a", None, 0),))


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def caller(admission, host="127.0.0.1", base="http://localhost"):
    return TestClient(make_app(Line(), admission), base_url=base, client=(host, 1))


def statuses(client, headers=None):
    return {
        client.request(method, path, json=body, headers=headers).status_code
        for method, path, body in CHANGES
    }


def test_without_a_token_this_host_may_and_others_may_only_read():
    assert statuses(caller(Admission())) == {200}
    stranger = caller(Admission(), "10.0.0.7", "http://10.0.0.1:8080")
    assert statuses(stranger) == {403}
    assert stranger.get("/quota/a").status_code == 200
    assert "--admin-token-file" in stranger.delete("/quota/a").json()["detail"]


def test_a_page_from_elsewhere_may_not_even_see_the_salts():
    headers = {"Origin": "http://evil.example"}
    assert statuses(caller(Admission()), headers) == {403}


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7"])
def test_with_a_token_file_the_token_counts_and_not_the_address(token_file, host):
    client = caller(Admission(str(token_file)), host, "http://cellar.example:8080")
    assert statuses(client, {"Authorization": f"Bearer {TOKEN}"}) == {200}
    assert statuses(client, {"Authorization": f"bearer  {TOKEN}"}) == {200}
    for wrong in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer \xfc"},
    ):
        assert statuses(client, {k: v.encode("latin-1") for k, v in wrong.items()}) == {401}
    refused = client.delete("/quota/a")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in refused.text
    assert client.get("/version").status_code == 200


def test_a_token_is_replaced_without_a_restart_and_a_lost_one_lets_nobody_in(token_file):
    client = caller(Admission(str(token_file)))
    token_file.write_text("another-secret-of-its-own")
    assert statuses(client, {"Authorization": f"Bearer {TOKEN}"}) == {401}
    assert statuses(client, {"Authorization": "Bearer another-secret-of-its-own"}) == {200}
    token_file.unlink()
    assert statuses(client, {"Authorization": "Bearer another-secret-of-its-own"}) == {503}
    assert statuses(client) == {503}


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short", b"two words-of-some-length", b"\xff" * 20, b"\x00" * 19]
)
def test_a_file_that_holds_no_token_stops_the_start(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        load_server(
            ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--admin-token-file", str(path)],
            program="kvcellar server",
        )
    assert str(path) in str(caught.value)
    assert len(content) < 5 or content.decode("latin-1") not in str(caught.value)


def test_what_is_no_file_is_no_token_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_admin_token(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not a file"):
        read_admin_token(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_admin_token(str(tmp_path / "pipe"))
