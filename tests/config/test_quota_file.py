"""The file of quotas: written whole, for one pair of eyes, and refused by the field."""

import os

import pytest

from kvcellar.config.load import load_server
from kvcellar.config.quota_file import SavedQuota, read_quota_file, write_quota_file
from kvcellar.errors import ConfigError

QUOTAS = {"alice": SavedQuota(0.1, 7.25), "ü/%": SavedQuota(0), "_default": SavedQuota(1e9)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "quotas"


def test_what_was_written_is_read(path):
    assert read_quota_file(str(path)) == {}
    write_quota_file(str(path), QUOTAS)
    assert read_quota_file(str(path)) == QUOTAS
    write_quota_file(str(path), {})
    assert read_quota_file(str(path)) == {}


def test_only_its_owner_may_read_it_also_where_it_was_open_before(path):
    path.write_text('{"quotas": {}}')
    path.chmod(0o644)
    (path.parent / ".quotas.tmp").write_text("of a server that was killed")
    old = os.umask(0)
    try:
        write_quota_file(str(path), QUOTAS)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["quotas"]


def test_a_link_stays_a_link(path, tmp_path):
    path.symlink_to(tmp_path / "real")
    write_quota_file(str(path), QUOTAS)
    assert path.is_symlink()
    assert read_quota_file(str(tmp_path / "real")) == QUOTAS


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    write_quota_file(str(path), QUOTAS)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_quota_file(str(path), {})
    assert read_quota_file(str(path)) == QUOTAS
    assert [each.name for each in path.parent.iterdir()] == ["quotas"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "truncated"),
        ("{}", "quotas"),
        ("[1]", "object"),
        ('{"quotas": {"alice": {"limit_bg": 5}}}', "limit_bg"),
        ('{"quotas": {"alice": {"limit_gb": -1}}}', "limit_gb"),
        ('{"quotas": {"alice": {"limit_gb": 1e300}}}', "limit_gb"),
        ('{"quotas": {"alice": {"limit_gb": "5"}}}', "limit_gb"),
        ('{"quotas": {"alice": {"limit_gb": 5, "disk_limit_gb": -1}}}', "disk_limit_gb"),
        ('{"quotas": {"alice": 5}}', "$.quotas[...]"),
        ('{"quotas": {"": {"limit_gb": 5}}}', "key"),
        ('{"quota": {}}', "quota"),
        ("\xff", "--quota-file"),
        ("[" * 100_000, "--quota-file"),
    ],
    ids=range(13),
)
def test_what_is_wrong_in_it_is_named_and_no_salt_shown(path, content, named):
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        read_quota_file(str(path))
    text = str(raised.value).partition("; correct it")[0]
    assert named in text
    assert str(path) in text
    assert "alice" not in text


def test_what_is_no_file_or_has_no_folder_is_refused_at_the_start(path, tmp_path):
    os.mkfifo(path)
    words = ["--l1-size-gb", "1", "--eviction-policy", "IsolatedLRU", "--quota-file"]
    for wrong, named in (
        (path, "is not a file"),
        (tmp_path, "is not a file"),
        (tmp_path / "missing" / "quotas", "missing is no folder"),
        ("", "--quota-file is empty"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_server([*words, str(wrong)], program="kvcellar server")
    path.unlink()
    path.write_bytes(b" " * (8 << 20) + b"{}")
    with pytest.raises(ConfigError, match="larger"):
        read_quota_file(str(path))
    path.unlink()
    loaded = load_server([*words, str(path)], program="kvcellar server")
    assert loaded.config.quota_file == str(path)
