import pytest

from mptrain.data.emoji import read_emoji


@pytest.fixture(scope="module")
def emoji():
    return read_emoji()


def test_every_concept_has_a_drawing_by_every_vendor(emoji):
    assert emoji.pictures.shape == (1594, 4, 3, 32, 32)
    assert emoji.vendors == ["noto", "twemoji", "openmoji", "fluent"] and emoji.held_out == "fluent"
    assert len(emoji.labels) == len(emoji.tags) == len(emoji.groups) == len(emoji.subgroups) == 1594
    assert set(emoji.groups) == set(range(9))


def test_drawings_and_names_are_in_one_order(emoji):
    """The red apple is redder than the green apple, whoever drew it."""
    red, green = (emoji.pictures[emoji.labels.index(f"{colour} apple")].float() for colour in ("red", "green"))
    redness = [(picture[:, 0] - picture[:, 1]).mean((1, 2)) for picture in (red, green)]
    assert (redness[0] > redness[1] + 20).all()
    assert "grin" in emoji.tags[emoji.labels.index("grinning face")]
