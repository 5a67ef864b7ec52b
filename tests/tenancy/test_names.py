"""What a salt becomes: itself, bounded, and a digest where everybody may look."""

from blake3 import blake3

from kvcellar.tenancy.names import label_of, shown_name, tenant_of


def test_no_salt_and_the_default_name_are_the_tenant_without_a_salt():
    assert [tenant_of(salt) for salt in (None, "", "_default")] == ["", "", ""]
    assert (shown_name(""), label_of("")) == ("_default", "_default")


def test_a_salt_is_the_tenants_name_up_to_256_bytes():
    assert tenant_of("alice") == shown_name("alice") == "alice"
    assert tenant_of("ü" * 128) == "ü" * 128
    assert tenant_of("ü" * 128 + "x") == blake3(("ü" * 128 + "x").encode()).hexdigest()


def test_what_is_no_text_is_a_tenant_all_the_same():
    name = tenant_of("\ud800")
    assert len(name) == 64
    assert name != tenant_of("\ud801")


def test_pages_show_a_digest_and_not_the_salt():
    assert label_of("secret") == blake3(b"secret").hexdigest()[:12]
