"""What names a request's chunks besides its tokens."""

from types import SimpleNamespace

import pytest
import torch

from kvcellar.engines.vllm.adapters import Adapters
from kvcellar.engines.vllm.binding import Bound, BoundPart
from kvcellar.engines.vllm.groups import KVGroup, cut_chunks
from kvcellar.engines.vllm.receipts import Receipt
from kvcellar.engines.vllm.requests import RequestState, RequestWishes, read_wishes

pytestmark = pytest.mark.engine

CHUNK_TOKENS = 8
TOKENS = list(range(100, 140))


def bound(*, name=b"n" * 32):
    kinds = (KVGroup(0, CHUNK_TOKENS // 2),)
    part = BoundPart(None, name, CHUNK_TOKENS, ((0,),))
    return Bound((part,), (None,), CHUNK_TOKENS, cut_chunks(kinds, CHUNK_TOKENS), kinds)


HERE = bound()


def state(tokens=TOKENS, **more):
    request = SimpleNamespace(
        **{
            "request_id": "r",
            "all_token_ids": tokens,
            "num_tokens": len(tokens),
            "lora_request": None,
            "cache_salt": None,
            "mm_features": [],
            "prompt_embeds": None,
            **more,
        }
    )
    return RequestState(request, RequestWishes(), Receipt("r", None))


def keys(tokens=TOKENS, *, where=HERE, **more):
    one = state(tokens, **more)
    chain = one.keys(where, Adapters(), token_count=one.request.num_tokens)
    return [bytes(chain.key(index)) for index in range(chain.count)]


def image(identifier, start, length, modality="image"):
    place = SimpleNamespace(offset=start, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place, modality=modality)


def shared(one, other):
    """Return how many leading chunks have the same key; no others have any in common."""
    count = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one)
    )
    assert not set(one[count:]) & set(other)
    return count


def test_equal_requests_share_all_their_chunks():
    assert shared(keys(), keys()) == 5


def test_tenants_and_namespaces_share_nothing():
    assert shared(keys(cache_salt="a"), keys(cache_salt="b")) == 0
    assert shared(keys(cache_salt="a"), keys()) == 0
    assert shared(keys(cache_salt=""), keys()) == 5
    assert shared(keys(where=bound(name=b"m" * 32)), keys()) == 0


def test_text_before_an_image_is_shared_and_nothing_after():
    plain, cat, dog = (
        keys(),
        keys(mm_features=[image("cat", 18, 10)]),
        keys(mm_features=[image("dog", 18, 10)]),
    )
    assert shared(cat, dog) == shared(cat, plain) == 2
    assert shared(cat, keys(mm_features=[image("cat", 18, 10)])) == 5
    assert shared(cat, keys(mm_features=[image("cat", 17, 10)])) == 2
    assert shared(cat, keys(mm_features=[image("cat", 18, 10, "video")])) == 2


def test_the_whole_identifier_of_an_image_counts():
    one, other = "f" * 63 + "0", "f" * 63 + "1"
    assert shared(keys(mm_features=[image(one, 0, 4)]), keys(mm_features=[image(other, 0, 4)])) == 0


class TestEmbeddings:
    ZEROS = [0] * 20

    def _keys(self, embeddings, **more):
        return keys(self.ZEROS, prompt_embeds=embeddings, **more)

    def _random(self, dtype=torch.float32):
        return torch.randn(20, 4, generator=torch.Generator().manual_seed(1)).to(dtype)

    def test_equal_embeddings_share(self):
        assert shared(self._keys(self._random()), self._keys(self._random().clone())) == 2

    def test_they_share_as_far_as_they_are_equal(self):
        changed = self._random()
        changed[9, 3] += 1
        assert shared(self._keys(self._random()), self._keys(changed)) == 1

    def test_they_do_not_share_with_tokens_or_another_dtype(self):
        assert shared(self._keys(self._random()), keys(self.ZEROS)) == 0
        assert shared(self._keys(self._random(torch.bfloat16)), self._keys(self._random())) == 0

    def test_which_positions_are_tokens_counts(self):
        mask = [False] * 20
        other = [False] * 10 + [True] * 10
        one = self._keys(self._random(), prompt_is_token_ids=mask)
        assert shared(one, self._keys(self._random(), prompt_is_token_ids=other)) == 1

    def test_an_embedding_in_the_last_part_counts_once_the_chunk_is_full(self):
        changed = self._random()
        changed[18] += 1
        grown = [*self.ZEROS, 1, 2, 3, 4]
        one = keys(grown, prompt_embeds=self._random())
        assert shared(one, keys(grown, prompt_embeds=changed)) == 2


class TestGrowth:
    def test_keys_go_on_as_tokens_come(self):
        tokens = TOKENS[:12]
        one = state(tokens)
        assert one.keys(HERE, Adapters(), token_count=12).count == 1
        tokens += TOKENS[12:]
        one.request.num_tokens = len(tokens)
        chain = one.keys(HERE, Adapters(), token_count=len(tokens))
        assert chain.joined(0, 5) == b"".join(keys())

    def test_a_prompt_that_is_shortened_has_new_keys(self):
        """As a connector beside ours may do after a request's arrival."""
        tokens = list(TOKENS)
        one = state(tokens)
        one.keys(HERE, Adapters(), token_count=40)
        del tokens[31:]
        one.request.num_tokens = 31
        assert one.has_shrunk()
        assert one.keys(HERE, Adapters(), token_count=31).count == 3
        tokens += [7] * 9
        one.request.num_tokens = 40
        chain = one.keys(HERE, Adapters(), token_count=40)
        assert chain.joined(0, 5) == b"".join(keys(tokens))

    def test_another_life_of_the_server_is_offered_everything_again(self):
        one = state()
        one.keys(HERE, Adapters(), token_count=40)
        one.next_chunk = 5
        assert not one.has_new_chunks(HERE, token_count=40)
        assert one.has_new_chunks(bound(), token_count=40)
        one.keys(bound(), Adapters(), token_count=40)
        assert one.next_chunk == 0

    def test_a_session_that_may_change_its_tokens_has_none(self):
        one = state(resumable=True)
        assert one.keys(HERE, Adapters(), token_count=40) is None
        assert (one.may_load, one.may_save) == (False, False)

    def test_an_adapter_that_cannot_be_named_has_none(self):
        lora = SimpleNamespace(lora_name="x", lora_path="no/where", lora_int_id=1)
        one = state(lora_request=lora)
        assert one.keys(HERE, Adapters(), token_count=40) is None


@pytest.mark.parametrize(
    ("params", "wishes"),
    [
        (None, RequestWishes()),
        ({"other": 1}, RequestWishes()),
        ({"kvcellar.skip_save": True}, RequestWishes(may_save=False)),
        ({"kvcellar.skip_save": False}, RequestWishes()),
        ({"kvcellar.max_offload_tokens": 100}, RequestWishes(tokens_max=100)),
        ({"lmcache.skip_save": True}, RequestWishes()),
    ],
)
def test_wishes_are_read_under_the_connectors_own_names(params, wishes):
    assert read_wishes(params, ("kvcellar.",)) == wishes


@pytest.mark.parametrize(
    "params",
    [
        {"lmcache.skip_save": "yes"},
        {"lmcache.skip_save": 1},
        {"lmcache.max_offload_tokens": "many"},
        {"lmcache.max_offload_tokens": -1},
        {"lmcache.max_offload_tokens": True},
    ],
)
def test_a_wish_that_makes_no_sense_is_named_and_stores_nothing(params):
    wishes = read_wishes(params, ("kvcellar.", "lmcache."))
    ((key, value),) = params.items()
    assert wishes == RequestWishes(may_save=False, problem=wishes.problem)
    assert wishes.problem.startswith(f"{key}={value!r}: write ")


@pytest.mark.parametrize(
    ("key", "may_save", "problem"),
    [
        (
            "kvcellar.skip_svae",
            False,
            "kvcellar.skip_svae is unknown: did you mean kvcellar.skip_save?",
        ),
        (
            "lmcache.max_offload_token",
            False,
            "lmcache.max_offload_token is unknown: did you mean lmcache.max_offload_tokens?",
        ),
        (
            "kvcellar.colour",
            True,
            "kvcellar.colour is unknown; known are skip_save and max_offload_tokens",
        ),
        ("lmcache.tag.user", True, ""),
        ("other.skip_svae", True, ""),
    ],
)
def test_a_mistyped_wish_is_named_and_stores_nothing_where_it_was_meant_so(key, may_save, problem):
    wishes = read_wishes({key: True}, ("kvcellar.", "lmcache."))
    assert wishes == RequestWishes(may_save=may_save, problem=problem)
