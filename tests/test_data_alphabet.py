import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptrain.data.alphabet import BLANK, ENGLISH, UNUSED, Alphabet, most_frequent, plain_characters, plain_english


def test_english_has_29_classes_and_no_character_is_the_blank():
    alphabet = Alphabet(ENGLISH)
    assert len(alphabet) == 29 and BLANK not in alphabet.encode(ENGLISH)


@given(st.text(alphabet=ENGLISH))
def test_decode_undoes_encode(text):
    alphabet = Alphabet(ENGLISH)
    assert alphabet.decode(alphabet.encode(text).tolist()) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Press 1, or  don\u2019t.", "press one or don't"),
        ("Caf\u00e9 voice-mail", "cafe voice mail"),
        ("A4", "a four"),
        ("Dial 500", "dial 500"),
        ("...", ""),
    ],
)
def test_plain_english(text, plain):
    assert plain_english(text) == plain


def test_what_the_alphabet_lacks():
    assert Alphabet(ENGLISH).missing(plain_english("dial 500 \u042f")) == "05\u044f"
    with pytest.raises(KeyError):
        Alphabet(ENGLISH).encode("5")


def test_plain_characters_of_any_script():
    assert plain_characters("\u4f60\u597d\uff0c \uff21\u4e16\u754c\u3002") == "\u4f60\u597da\u4e16\u754c"


def test_the_most_frequent_characters_up_to_a_size_that_counts_the_blank():
    alphabet = most_frequent(["bba", "cab"], 3)
    assert alphabet.characters == ["b", "a"] and len(alphabet) == 3


def test_classes_beyond_the_alphabet_are_wrong_characters():
    assert Alphabet("ab").decode([1, 2, 3, 5999]) == f"ab{UNUSED}{UNUSED}"
