"""Images are pushed to a registry that refuses to replace a tag."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator

import pytest

from images.build import Image, push_images
from images.docker import docker, inspect_image, require_engine
from images.registry import find_image, read_labels
from images.versions import Build
from services.common.errors import DeviceError
from tests.registry import ImmutableTags, immutable_tags, running_registry

pytestmark = [pytest.mark.images]

SERVICES = ("tokenizer", "head")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        require_engine()
    except DeviceError as error:
        pytest.skip(str(error))
    with running_registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def front(registry: str) -> Iterator[ImmutableTags]:
    with immutable_tags(registry) as server:
        yield server


@pytest.fixture
def images(request: pytest.FixtureRequest) -> Iterator[list[Image]]:
    """Two images of a few bytes, with tags that only this test uses."""
    commit = hashlib.sha1(request.node.name.encode(), usedforsecurity=False).hexdigest()
    made = [make_image(service, commit, "first") for service in SERVICES]
    yield made
    for image in made:
        docker("rmi", "--force", inspect_image(image.names[-1])["Id"])


def make_image(service: str, commit: str, content: str) -> Image:
    build = Build(service, "cpu", "9.9.9", commit, "")
    image = Image(build, (f"millrace-test/{service}:{build.commit_tag}",), 0.0)
    dockerfile = f"FROM scratch\nLABEL content={content} millrace.service={service}\n"
    subprocess.run(["docker", "build", "-q", "-t", image.names[-1], "-"], input=dockerfile, text=True, check=True)
    return image


def names_in(address: str, images: list[Image]) -> list[str]:
    return [f"{address}/millrace/{image.build.service}:{image.build.commit_tag}" for image in images]


def test_the_same_images_are_pushed_twice(
    front: ImmutableTags, images: list[Image], capsys: pytest.CaptureFixture[str]
) -> None:
    push_images(images, "cpu", front.address)
    held = [find_image(name) for name in names_in(front.address, images)]
    assert None not in held
    assert len(front.pushed) == 2
    push_images(images, "cpu", front.address)
    assert [find_image(name) for name in names_in(front.address, images)] == held
    assert len(front.pushed) == 2
    told = capsys.readouterr().out
    for name in names_in(front.address, images):
        assert told.count(name) == 2
    assert read_labels(names_in(front.address, images)[0])["millrace.service"] == "tokenizer"


def test_other_content_under_a_tag_is_refused_before_anything_is_pushed(
    registry: str, images: list[Image], capsys: pytest.CaptureFixture[str]
) -> None:
    """This test's registry itself allows to replace a tag."""
    push_images(images[1:], "cpu", registry)
    before = find_image(names_in(registry, images)[1])
    images[1] = make_image("head", images[1].build.commit, "second")
    assert before is not None
    with pytest.raises(DeviceError, match=before.digest):
        push_images(images, "cpu", registry)
    assert [find_image(name) for name in names_in(registry, images)] == [None, before]


def test_a_push_that_another_one_overtook(front: ImmutableTags, images: list[Image]) -> None:
    """Another push came between our look-up and our push: the registry refuses ours, and we look the tag up again."""
    push_images(images, "cpu", front.address)
    front.hidden_reads = len(images)
    push_images(images, "cpu", front.address)
    other = make_image("tokenizer", images[0].build.commit, "third")
    front.hidden_reads = 1
    with pytest.raises(DeviceError, match=inspect_image(other.names[-1])["Id"]):
        push_images([other], "cpu", front.address)
