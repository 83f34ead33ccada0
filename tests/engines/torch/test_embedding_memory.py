"""Images that do not fit the memory for embeddings, alone or together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from epd.engines.torch import build
from epd.engines.torch.checkpoint import Checkpoint
from epd.engines.torch.embedding_store import EmbeddingStore
from epd.engines.torch.tiny import write_random_checkpoint
from epd.transfer import Arena
from epd.types import Stage
from tests.engines.torch.cluster import Cluster, running_cluster
from tests.reference import Case, picture, user

SIDE = 56


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen2_5_vl", seed=1)
    return path


def image_bytes(model: Path) -> int:
    """What the embeddings of a picture of SIDE x SIDE take."""
    checkpoint = Checkpoint(model)
    num_tokens = checkpoint.family.image_tokens(SIDE, SIDE, checkpoint.image_budget)
    return num_tokens * checkpoint.language.hidden_size * 4


def case(*seeds: int) -> Case:
    return Case([user(*[None for _ in seeds], "?")], [picture(SIDE, SIDE, seed) for seed in seeds])


@pytest.fixture
def two_images_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encode worker has memory for the embeddings of two pictures."""
    nbytes = 2 * image_bytes(model)

    def small_store(address: int, _: int, clock: Any) -> EmbeddingStore:
        return EmbeddingStore(address, nbytes, clock)

    monkeypatch.setattr(build, "EmbeddingStore", small_store)


async def texts(cluster: Cluster, *cases: Case) -> list[str]:
    bodies = [cluster.body(case, f"r{number}") for number, case in enumerate(cases)]
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(cluster.chat(body) for body in bodies))
    assert [answer.status for answer in answers] == [200] * len(cases)
    await cluster.wait_at_rest()
    return [answer.text for answer in answers]


@pytest.mark.usefixtures("two_images_fit")
async def test_two_requests_that_hold_half_of_the_memory_each_are_both_answered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cases = case(1, 2), case(3, 4)
    async with running_cluster(model, tmp_path) as cluster:
        second = asyncio.Event()

        async def first_images_first(call: str, body: dict[str, Any]) -> None:
            if call == "encode" and body["part_idx"] == 1:
                await second.wait()

        cluster.coordinator.intercept = first_images_first
        answering = asyncio.create_task(texts(cluster, *cases))
        await cluster.wait_for(Stage.ENCODE, "epd_encodes_total", 2)
        second.set()
        answers = await answering
        monkeypatch.undo()
    async with running_cluster(model, tmp_path) as cluster:
        assert answers == await texts(cluster, *cases)


@pytest.mark.usefixtures("two_images_fit")
async def test_a_request_may_have_more_images_than_fit_the_encode_worker_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with running_cluster(model, tmp_path) as cluster:
        answers = await texts(cluster, case(1, 2, 3, 4, 5))
        monkeypatch.undo()
    async with running_cluster(model, tmp_path) as cluster:
        assert answers == await texts(cluster, case(1, 2, 3, 4, 5))


@pytest.mark.usefixtures("two_images_fit")
async def test_an_image_too_large_for_the_encode_worker_is_refused_for_good(
    model: Path, tmp_path: Path
):
    large = Case([user("?", None)], [picture(2 * SIDE, 2 * SIDE, 1)])
    async with running_cluster(model, tmp_path) as cluster:
        answer = await cluster.chat(cluster.body(large, "r1"))
        assert answer.status == 400
        error = answer.body["error"]
        assert error["param"] == "messages[0].content[1].image_url.url"
        limit = f"the {2 * image_bytes(model)} of an encode worker (embedding_bytes)"
        assert limit in error["message"]
        await cluster.wait_at_rest()


async def test_images_too_large_for_the_prefill_worker_are_refused_for_good(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nbytes = 2 * image_bytes(model)
    monkeypatch.setattr(build, "Arena", lambda address, _, clock: Arena(address, nbytes))
    async with running_cluster(model, tmp_path) as cluster:
        answer = await cluster.chat(cluster.body(case(1, 2, 3), "r1"))
        assert answer.status == 400
        error = answer.body["error"]
        assert error["param"] == "messages"
        assert f"the {nbytes} of a prefill worker (embedding_bytes)" in error["message"]
        await cluster.abort("r1")  # as the coordinator does
        await cluster.wait_at_rest()
