from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptrain.data.words import END, JOINER, START, UNKNOWN, Vocabulary, detokenise, tokenise

SENTENCES = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@given(SENTENCES)
def test_detokenise_undoes_tokenise_up_to_spaces(sentence):
    assert detokenise(tokenise(sentence)) == " ".join(sentence.replace(JOINER, " ").split())


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("Der Akku ist leer.", ["Der", "Akku", "ist", "leer", f"{JOINER}."]),
        ("YAML-Datei", ["YAML", f"{JOINER}-{JOINER}", "Datei"]),
        ("„{config_key}“", [f"„{JOINER}", "{config_key}", f"{JOINER}“"]),
        ("{a}{b}", ["{a}", f"{JOINER}{{b}}"]),
        ("don't", ["don't"]),
        ("(a) b...", [f"({JOINER}", "a", f"{JOINER})", "b", f"{JOINER}.", f"{JOINER}.", f"{JOINER}."]),
        ("", []),
    ],
)
def test_tokens(sentence, tokens):
    assert tokenise(sentence) == tokens
    assert detokenise(tokens) == sentence


def test_placeholders_stay_whole_and_keep_their_case():
    assert tokenise("Set {Entity_Name} NOW", lower=True) == ["set", "{Entity_Name}", "now"]


def test_lower_case_does_not_change_the_number_of_tokens():
    sentence = "İstanbul ISN'T {X}-like"
    assert len(tokenise(sentence, lower=True)) == len(tokenise(sentence))


def test_vocabulary_keeps_the_most_frequent_words_in_a_fixed_order():
    vocabulary = Vocabulary(Counter({"b": 2, "a": 2, "c": 5, "rare": 1}), 6)
    assert vocabulary.words == ["</s>", "<s>", "<unk>", "c", "a", "b"] and len(vocabulary) == 6
    assert vocabulary.encode(["a", "rare", "c"]) == [4, UNKNOWN, 3]
    assert (END, START, UNKNOWN) == (0, 1, 2)


def test_words_that_look_like_special_ones_are_unknown():
    assert Vocabulary(Counter({"a": 1}), 4).encode(["</s>", "<s>", "<unk>"]) == [UNKNOWN] * 3
