import torch

from mptrain.models.googlenet import InceptionModule, googlenet, googlenet_small


def test_full_size_has_two_auxiliary_classifiers() -> None:
    with torch.device("meta"):
        network = googlenet(num_classes=1000)
        assert sum(p.numel() for p in network.parameters()) == 13_004_888  # published: 13.0 M
        without = [p.numel() for name, p in network.named_parameters() if not name.startswith("aux")]
        assert sum(without) == 6_624_904  # published: 6.6 M
        outputs = network(torch.empty(2, 3, 224, 224))
        assert [tuple(output.shape) for output in outputs] == [(2, 1000)] * 3
        assert network.eval()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_module_joins_its_branches() -> None:
    # Row inception (3a) of the paper's table 1: 28x28x256 out of 192 channels.
    module = InceptionModule(192, (64, 96, 128, 16, 32, 32))
    assert module(torch.randn(2, 192, 28, 28)).shape == (2, 256, 28, 28)
    kernels = [m.kernel_size[0] for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [1, 1, 3, 1, 5, 1]


def test_small_form_gives_auxiliary_logits_in_training_only() -> None:
    network = googlenet_small(num_classes=7, channels=3)
    for size in (28, 32):
        outputs = network.train()(torch.randn(2, 3, size, size))
        assert [tuple(output.shape) for output in outputs] == [(2, 7)] * 2
        assert network.eval()(torch.randn(2, 3, size, size)).shape == (2, 7)
