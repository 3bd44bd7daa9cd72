"""The papers' models have the sizes that the papers state."""

from __future__ import annotations

import pytest

from gradsync_lab.papers.models import PAPER_MODELS, paper_model


@pytest.mark.parametrize(
    ("name", "tensors", "millions", "backward_ms", "sizes", "largest"),
    [
        ("alexnet", 26, 61.10, 25.9, 14, 37_748_736),
        ("vgg16", 32, 138.36, 85.3, 17, 102_760_448),
        ("resnet50", 161, 25.56, 62.8, 22, 2_359_296),
        ("resnet101", 314, 44.55, 120.4, 22, 2_359_296),
        ("ugatit", 148, 670.76, 434.2, 20, 268_435_456),
        ("bert-base", 199, 108.90, 65.9, 8, 23_445_504),
        ("gpt2", 148, 124.44, 210.6, 8, 38_597_376),
        ("lstm", 10, 85.97, 71.45, 4, 49_917_000),
    ],
)
def test_a_model_has_the_size_that_its_paper_states(
    name: str, tensors: int, millions: float, backward_ms: float, sizes: int, largest: int
) -> None:
    model = paper_model(name)
    elements = [gradient.elements for gradient in model.gradients]
    assert (len(elements), len(set(elements)), max(elements)) == (tensors, sizes, largest)
    assert sum(elements) / 1e6 == pytest.approx(millions, abs=0.005)
    assert 1e3 * model.backward_s == pytest.approx(backward_ms, abs=0.05)
    assert len({gradient.name for gradient in model.gradients}) == tensors


def test_a_model_says_whether_its_gaps_were_measured() -> None:
    traced = {name for name in PAPER_MODELS if paper_model(name).traced}
    assert traced == {"vgg16", "bert-base", "gpt2", "lstm"}
    for name in set(PAPER_MODELS) - traced:
        assert "the gaps are modelled, not traced" in paper_model(name).source


def test_gradients_come_in_the_order_of_backward() -> None:
    names = [gradient.name for gradient in paper_model("vgg16").gradients]
    assert names[:2] == ["classifier.6.bias", "classifier.6.weight"]
    assert names[-1] == "features.0.weight"


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'vgg19', choose one of alexnet, vgg16, "):
        paper_model("vgg19")
