"""The model, its weights and sampling, without an engine around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.pdd.config import ModelSpec
from engines.pdd.model.llama import plain_generate
from engines.pdd.model.weights import random_weights
from engines.pdd.sampling import gumbel_noise, sample, sample_batch

TOY = ModelSpec(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    head_dim=8,
    intermediate_size=48,
    max_context=256,
    dtype="float64",
)


def test_weights_of_a_seed_are_the_same_in_both_dtypes() -> None:
    wide, narrow = random_weights(TOY), random_weights(replace(TOY, dtype="float32"))
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name].float(), narrow[name]) for name in wide)


def test_weights_of_another_seed_differ() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(random_weights(TOY)[name], random_weights(replace(TOY, seed=1))[name])


def test_greedy_outputs_vary_with_the_prompt_and_do_not_loop() -> None:
    spec = ModelSpec(dtype="float32")
    weights = random_weights(spec)
    rng = np.random.default_rng(0)
    outputs = [
        plain_generate(weights, spec, rng.integers(spec.vocab_size, size=length).tolist(), 64)
        for length in (1, 7, 24, 40)
    ]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert all(len(set(output)) > 32 for output in outputs)


def test_an_output_depends_on_the_first_token_of_its_prompt() -> None:
    weights = random_weights(TOY)
    outputs = {tuple(plain_generate(weights, TOY, [first, *range(9)], 6)) for first in range(8)}
    assert len(outputs) == 8


def test_temperature_zero_takes_the_first_largest_logit() -> None:
    assert sample(np.array([0.0, 2.0, 2.0, 1.0]), 0.0, seed=5, position=9) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.floats(0.1, 3.0))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int, temperature: float) -> None:
    row = np.linspace(-1.0, 1.0, 50)
    alone = sample(row, temperature, seed, position)
    others = np.stack([row[::-1], row, row])
    batch = sample_batch(others, [0.7, temperature, 0.0], [1, seed, seed], [3, position, position])
    assert batch[1:] == [alone, 49]


def test_draws_follow_the_softmax() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    drawn = sample_batch(np.tile(logits, (4000, 1)), [1.0] * 4000, [7] * 4000, range(4000))
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - np.exp(logits)).max() < 0.03


def test_noise_is_finite_and_differs_between_rows() -> None:
    noise = gumbel_noise([0, 0, 1], [0, 1, 0], 1000)
    assert np.isfinite(noise).all()
    assert len({tuple(row) for row in noise}) == 3
    assert abs(noise.mean() - np.euler_gamma) < 0.1


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        sample(np.zeros(3), -1.0, 0, 0)
