from __future__ import annotations

import pytest
from octavo.keys import KeyFile, KeyFileError, Quotas, Role, hash_of, new_key


def test_key_file_gives_each_key_its_tenant_roles_and_quotas() -> None:
    user, boss, stranger = new_key(), new_key(), new_key()
    file = KeyFile.parse(
        f"""
        [tenants.acme]
        weight = 2
        requests_per_minute = 60
        tokens_per_minute = 100_000

        [tenants.ops]

        [[keys]]
        id = "acme-app"
        hash = "{hash_of(user)}"
        tenant = "acme"

        [[keys]]
        id = "ops-1"
        hash = "{hash_of(boss)}"
        tenant = "ops"
        roles = ["operator", "user"]
        """
    )
    found = file.find(user)
    assert found is not None
    assert (found.id, found.tenant.name, found.tenant.weight) == ("acme-app", "acme", 2.0)
    assert found.roles == {Role.INFERENCE}
    assert found.tenant.quotas == Quotas(requests_per_minute=60, tokens_per_minute=100_000)
    operator = file.find(boss)
    assert operator is not None
    assert operator.roles == {Role.OPERATOR, Role.INFERENCE}
    assert operator.tenant.quotas == Quotas()
    assert file.find(stranger) is None
    for no_key in ("", user[:-1], user + "x", f" {user}", "é" * 50, hash_of(user)):
        assert file.find(no_key) is None


def test_keys_are_random_and_carry_their_prefix() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("octavo_") and len(key) == 50 for key in keys)


def test_record_of_a_key_does_not_show_its_hash() -> None:
    key = new_key()
    file = KeyFile.parse(f'[tenants.a]\n[[keys]]\nid = "k"\nhash = "{hash_of(key)}"\ntenant = "a"\n')
    assert hash_of(key).removeprefix("sha256:")[:12] not in repr(file.keys)
    assert key not in repr(file.find(key))


KEY = new_key()
ENTRY = f'[tenants.a]\n[[keys]]\nid = "k"\nhash = "{hash_of(KEY)}"\ntenant = "a"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants = 3", r"tenants must be tables"),
        ("keys = 3", r"keys must be an array"),
        ("[tenants.a", r"it is not TOML"),
        ("[tenant.a]", r"tenant: no such setting"),
        ("[tenants.a]\nrequest_per_minute = 3", r"tenants\.a\.request_per_minute: no such setting"),
        ("[tenants.a]\nweight = 0", r"tenants\.a\.weight: must be a positive number, got 0"),
        ("[tenants.a]\nweight = nan", r"tenants\.a\.weight: must be a positive number"),
        ("[tenants.a]\ntokens_per_minute = 0", r"tokens_per_minute: must be a whole number from 1, got 0"),
        ("[tenants.a]\ntokens_per_minute = true", r"must be a whole number from 1"),
        ("[tenants.'a b']", r"tenants\.a b: a name has"),
        (ENTRY.replace('tenant = "a"', 'tenant = "b"'), r"keys\[0\] \(k\)\.tenant: must name a table"),
        (ENTRY.replace(hash_of(KEY), KEY), r"keys\[0\] \(k\)\.hash: must be 'sha256:'"),
        (ENTRY + 'roles = ["admin"]', r"roles: must be a list of inference, operator, metrics, forward"),
        (ENTRY + "roles = []", r"roles: must be a list"),
        (ENTRY + ENTRY.removeprefix("[tenants.a]\n"), r"two have the id k\n.*k and k have the same hash"),
        ("[tenants.a]\nweight = 1" + "0" * 400, r"tenants\.a\.weight: must be a positive number, got 10"),
        ("[tenants.a]\nweight = 0x" + "f" * 9000, r"tenants\.a\.weight: must be a positive number"),
        ("[tenants.a]\nweight = " + "1" * 5000, r"it cannot be read: .*digits"),
        ("[tenants.a]\nrequests_per_minute = 0x" + "f" * 9000, r"must be a whole number from 1"),
        ("[tenants.a]\nweight = " + "[" * 9000, r"it cannot be read: .*recursion"),
        ("[tenants.a.weight" + ".a" * 9000 + "]", r"tenants\.a\.weight: must be a positive number"),
        (f'{KEY} = "acme"', r"octavo_\.\.\.: no such setting"),
    ],
    ids=lambda value: None if KEY not in value else "a key as the name of a setting",
)
def test_key_file_with_a_fault_is_refused_by_name_and_shows_no_key(text: str, problem: str) -> None:
    with pytest.raises(KeyFileError, match=problem) as caught:
        KeyFile.parse(text)
    assert KEY not in str(caught.value)
    assert hash_of(KEY)[7:] not in str(caught.value)


def test_key_file_names_all_of_its_faults_at_once() -> None:
    with pytest.raises(KeyFileError) as caught:
        KeyFile.parse("[tenants.a]\nweight = -1\nx = 1\n[[keys]]\nid = 'k'\n")
    assert len(str(caught.value).splitlines()) == 4
